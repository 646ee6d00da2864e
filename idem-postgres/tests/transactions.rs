//! Calls within the caller's transaction, and the server that dies in it.
#![allow(clippy::panic, clippy::unwrap_used, reason = "the helpers of tests are tests")]

mod stores;

stores::tests! {
    key_and_rows_commit_together_or_not_at_all,
    no_answer_aborts_the_transaction,
    isolation_above_read_committed_is_refused_and_the_transaction_goes_on,
    a_rival_waits_for_the_transaction,
    a_crash_at_any_step_leaves_all_or_nothing,
}

use std::sync::Arc;

use idem_core::{ErrorKind, Failure, Fingerprint, Key, KeyStore, Lease, Outcome, Reservation, Reserve};
use idem_postgres::sqlx::postgres::PgPoolOptions;
use idem_postgres::sqlx::{self, AssertSqlSafe, PgPool, Postgres, Row, Transaction};
use idem_postgres::{Config, PostgresStore};
use idem_testkit::servers::PostgresServer;
use stores::{fresh_config, pool};

struct Bank {
    pool: PgPool,
    store: Arc<PostgresStore>,
    table: String,
}

impl Bank {
    async fn open(pool: PgPool, config: Config) -> Self {
        PostgresStore::migrate(&pool, &config).await.unwrap();
        let table = format!("bank_{}", config.schema.as_str());
        let bank = Self { store: Arc::new(PostgresStore::open(pool.clone(), config).await.unwrap()), pool, table };
        bank.sql("CREATE TABLE IF NOT EXISTS {table} (key text, amount int)").await;
        bank
    }

    async fn fresh() -> Self {
        let config = fresh_config();
        Self::open(pool(&config, 8).await.unwrap(), config).await
    }

    async fn sql(&self, text: &str) {
        let text = text.replace("{table}", &self.table);
        sqlx::raw_sql(AssertSqlSafe(text)).execute(&self.pool).await.unwrap();
    }

    async fn charge(&self, transaction: &mut Transaction<'_, Postgres>, key: &str) -> Result<(), sqlx::Error> {
        let text = format!("INSERT INTO {} VALUES ($1, 1200)", self.table);
        sqlx::query(AssertSqlSafe(text)).bind(key).execute(&mut **transaction).await.map(drop)
    }

    async fn charges(&self, key: &str) -> i64 {
        let text = format!("SELECT count(*) FROM {} WHERE key = $1", self.table);
        sqlx::query(AssertSqlSafe(text)).bind(key).fetch_one(&self.pool).await.unwrap().get(0)
    }
}

fn request(id: &str) -> Reserve {
    Reserve::new(Key::new("bank", id).unwrap())
}

fn acquired(answer: Reservation) -> Lease {
    match answer {
        Reservation::Acquired(lease) => lease,
        other => panic!("{other:?}"),
    }
}

async fn key_and_rows_commit_together_or_not_at_all() {
    let bank = Bank::fresh().await;
    for commit in [false, true] {
        let mut transaction = bank.pool.begin().await.unwrap();
        let lease = acquired(bank.store.reserve_in(&mut transaction, &request("a")).await.unwrap());
        assert_eq!(lease.attempt, 1);
        bank.charge(&mut transaction, "a").await.unwrap();
        bank.store.complete_in(&mut transaction, &lease, &Outcome::new(201, "charged")).await.unwrap();
        // The same again, as after a lost reply.
        bank.store.complete_in(&mut transaction, &lease, &Outcome::new(201, "charged")).await.unwrap();
        if commit {
            transaction.commit().await.unwrap();
        } else {
            transaction.rollback().await.unwrap();
            assert_eq!(bank.store.fetch(&lease.key).await.unwrap(), None);
        }
        assert_eq!(bank.charges("a").await, i64::from(commit));
    }
    let Reservation::Completed(record) = bank.store.reserve(&request("a")).await.unwrap() else { panic!() };
    assert_eq!(record.outcome(), Some(&Outcome::new(201, "charged")));
}

/// Pitfall 48.
async fn no_answer_aborts_the_transaction() {
    let bank = Bank::fresh().await;
    let print = Fingerprint::of("a");
    acquired(bank.store.reserve(&request("held").with_fingerprint(print)).await.unwrap());
    let done = acquired(bank.store.reserve(&request("done")).await.unwrap());
    bank.store.complete(&done, &Outcome::new(200, "first")).await.unwrap();

    let mut transaction = bank.pool.begin().await.unwrap();
    let tx = &mut transaction;
    let held = bank.store.reserve_in(tx, &request("held")).await.unwrap();
    assert!(matches!(held, Reservation::InProgress { .. }));
    let other = request("held").with_fingerprint(Fingerprint::of("b"));
    assert_eq!(bank.store.reserve_in(tx, &other).await.unwrap(), Reservation::Mismatch);
    assert!(matches!(bank.store.reserve_in(tx, &request("done")).await.unwrap(), Reservation::Completed(_)));
    let stranger = Lease::new(done.key.clone(), idem_core::Token::random(), 1, done.origin, done.retention);
    let lost = bank.store.complete_in(tx, &stranger, &Outcome::new(200, "x")).await.unwrap_err();
    assert_eq!(lost.kind(), ErrorKind::LeaseLost);
    let already = bank.store.complete_in(tx, &done, &Outcome::new(200, "x")).await.unwrap_err();
    assert_eq!(already.kind(), ErrorKind::AlreadyCompleted);
    let invalid = bank.store.reserve_in(tx, &request("x").with_lease(std::time::Duration::ZERO)).await.unwrap_err();
    assert_eq!(invalid.kind(), ErrorKind::InvalidInput);
    let failed = acquired(bank.store.reserve_in(tx, &request("failed")).await.unwrap());
    bank.store.fail_in(tx, &failed, &Failure::new("no").unwrap()).await.unwrap();
    bank.charge(tx, "after all").await.unwrap();
    transaction.commit().await.unwrap();
    assert_eq!(bank.charges("after all").await, 1);
    assert_eq!(acquired(bank.store.reserve(&request("failed")).await.unwrap()).attempt, 2);
}

async fn isolation_above_read_committed_is_refused_and_the_transaction_goes_on() {
    let bank = Bank::fresh().await;
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        let mut transaction = bank.pool.begin().await.unwrap();
        let set = format!("SET TRANSACTION ISOLATION LEVEL {level}");
        sqlx::raw_sql(AssertSqlSafe(set)).execute(&mut *transaction).await.unwrap();
        let error = bank.store.reserve_in(&mut transaction, &request(level)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misconfigured);
        let lease = acquired(bank.store.reserve(&request(level)).await.unwrap());
        let error = bank.store.complete_in(&mut transaction, &lease, &Outcome::new(200, "")).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misconfigured);
        bank.charge(&mut transaction, level).await.unwrap();
        transaction.commit().await.unwrap();
        assert_eq!(bank.charges(level).await, 1);
    }
}

/// A reserve elsewhere waits for the transaction, and then knows.
async fn a_rival_waits_for_the_transaction() {
    let bank = Bank::fresh().await;
    for commit in [true, false] {
        let id = if commit { "committed" } else { "rolled back" };
        let mut transaction = bank.pool.begin().await.unwrap();
        let lease = acquired(bank.store.reserve_in(&mut transaction, &request(id)).await.unwrap());
        bank.store.complete_in(&mut transaction, &lease, &Outcome::new(200, "")).await.unwrap();
        let store = bank.store.clone();
        let rival = tokio::spawn(async move { store.reserve(&request(id)).await });
        tokio::time::sleep(std::time::Duration::from_millis(300)).await;
        assert!(!rival.is_finished(), "the rival did not wait");
        if commit {
            transaction.commit().await.unwrap();
            assert!(matches!(rival.await.unwrap().unwrap(), Reservation::Completed(_)));
        } else {
            transaction.rollback().await.unwrap();
            assert_eq!(acquired(rival.await.unwrap().unwrap()).attempt, 1);
        }
    }
}

/// The server is killed at every step. Afterwards there is all or nothing, and a repeat makes it all.
async fn a_crash_at_any_step_leaves_all_or_nothing() {
    let server = PostgresServer::start(&[]).unwrap();
    let connect = || PgPoolOptions::new().max_connections(4).connect(Box::leak(server.url().into_boxed_str()));
    Bank::open(connect().await.unwrap(), Config::default()).await;
    for step in 0..=4 {
        let bank = Bank::open(connect().await.unwrap(), Config::default()).await;
        let id = format!("step-{step}");
        let wish = request(&id);
        let run = async {
            let mut transaction = bank.pool.begin().await?;
            if step == 0 {
                server.crash().unwrap();
            }
            let lease = match bank.store.reserve_in(&mut transaction, &wish).await {
                Ok(answer) => acquired(answer),
                Err(_) => return Err(sqlx::Error::WorkerCrashed),
            };
            if step == 1 {
                server.crash().unwrap();
            }
            bank.charge(&mut transaction, &id).await?;
            if step == 2 {
                server.crash().unwrap();
            }
            if bank.store.complete_in(&mut transaction, &lease, &Outcome::new(201, "charged")).await.is_err() {
                return Err(sqlx::Error::WorkerCrashed);
            }
            if step == 3 {
                server.crash().unwrap();
            }
            transaction.commit().await?;
            server.crash().unwrap();
            Ok(())
        };
        let result: Result<(), sqlx::Error> = run.await;
        assert_eq!(result.is_ok(), step == 4, "{result:?}");
        server.up().unwrap();

        let bank = Bank::open(connect().await.unwrap(), Config::default()).await;
        let charged = bank.charges(&id).await;
        assert_eq!(charged, i64::from(step == 4), "after a crash at step {step}");
        // The same request again.
        match bank.store.reserve(&wish).await.unwrap() {
            Reservation::Completed(_) => assert_eq!(charged, 1),
            Reservation::Acquired(lease) => {
                assert_eq!(charged, 0);
                let mut transaction = bank.pool.begin().await.unwrap();
                bank.charge(&mut transaction, &id).await.unwrap();
                bank.store.complete_in(&mut transaction, &lease, &Outcome::new(201, "charged")).await.unwrap();
                transaction.commit().await.unwrap();
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(bank.charges(&id).await, 1);
    }
}
