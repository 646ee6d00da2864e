//! Operations of an executor that commit their rows together with the completion of their key.
#![allow(clippy::panic, clippy::unwrap_used, reason = "the helpers of tests are tests")]

mod stores;

stores::tests! {
    rows_and_key_are_committed_together,
    a_lost_lease_rolls_back,
    a_lease_that_ran_out_and_was_not_taken_is_completed,
    nobody_takes_over_while_the_commit_is_under_way,
    a_commit_whose_reply_is_lost_is_found_out,
    a_commit_whose_reply_is_lost_is_found_out_after_the_day_has_changed,
    a_commit_that_fails_after_its_caller_has_gone_frees_the_key,
    a_commit_that_is_killed_frees_the_key,
    a_constraint_that_is_checked_at_the_commit_frees_the_key,
    a_panic_or_an_error_after_the_commit_frees_nothing,
    what_cannot_be_completed_is_rolled_back,
    a_caller_that_goes_away_changes_nothing,
    a_runtime_that_is_shut_down_within_the_commit_leaves_all_or_nothing,
}

use std::sync::Arc;
use std::time::Duration;

use idem_core::executor::{Attempt, Executor, RunError};
use idem_core::{ErrorClass, ErrorKind, Key, KeyStore, Outcome, Reservation, Reserve, State, StoreError};
use idem_postgres::sqlx::{self, AssertSqlSafe, PgPool, Postgres, Transaction};
use idem_postgres::{Config, PostgresStore, is_unique_violation};
use stores::{advance, fresh_config, pool};
use tokio::time::{sleep, timeout};

const LEASE: Duration = Duration::from_secs(30);

/// A store, and a table of charges beside it.
#[derive(Clone)]
struct Bank {
    pool: PgPool,
    store: Arc<PostgresStore>,
    config: Config,
    executor: Executor,
}

#[derive(Debug, thiserror::Error)]
enum ChargeError {
    #[error("the database: {0}")]
    Database(#[from] sqlx::Error),
    #[error("{0}")]
    Store(#[from] StoreError),
    #[error("no answer")]
    NoAnswer,
}

impl Bank {
    async fn fresh() -> Self {
        let bank = Self::open(fresh_config().with_max_retention(Duration::from_secs(3 * 24 * 3600))).await;
        bank.sql("CREATE TABLE {s}.charges (charge text CONSTRAINT charges_key UNIQUE DEFERRABLE INITIALLY DEFERRED)")
            .await;
        bank
    }

    async fn open(config: Config) -> Self {
        let pool = pool(&config, 10).await.unwrap();
        PostgresStore::migrate(&pool, &config).await.unwrap();
        let store = Arc::new(PostgresStore::open(pool.clone(), config.clone()).await.unwrap());
        let retention = Duration::from_secs(3 * 24 * 3600);
        let executor = Executor::builder(store.clone()).lease(LEASE).retention(retention).build().unwrap();
        Self { pool, store, config, executor }
    }

    /// `{s}` is the schema.
    async fn sql(&self, text: &str) {
        let text = text.replace("{s}", self.config.schema.as_str());
        sqlx::raw_sql(AssertSqlSafe(text)).execute(&self.pool).await.unwrap();
    }

    /// From now on a commit does that first, for charges of that name.
    async fn at_commit(&self, charge: &str, what: &str) {
        self.sql(&format!(
            "CREATE FUNCTION {{s}}.at_commit() RETURNS trigger LANGUAGE plpgsql AS
                $$ BEGIN IF new.charge = '{charge}' THEN {what}; END IF; RETURN NULL; END $$;
             CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT ON {{s}}.charges
                DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION {{s}}.at_commit()"
        ))
        .await;
    }

    async fn begin(&self, charge: &str) -> Result<Transaction<'static, Postgres>, sqlx::Error> {
        let mut transaction = self.pool.begin().await?;
        let text = format!("INSERT INTO {}.charges VALUES ($1)", self.config.schema.as_str());
        sqlx::query(AssertSqlSafe(text)).bind(charge).execute(&mut *transaction).await?;
        Ok(transaction)
    }

    /// The operation.
    async fn charge(&self, attempt: &Attempt, charge: &str) -> Result<String, ChargeError> {
        let transaction = self.begin(charge).await?;
        let charge = charge.to_owned();
        self.store.complete_and_commit(transaction, attempt, attempt.success(&charge)).await?;
        Ok(charge)
    }

    async fn charges(&self) -> Vec<String> {
        let text = format!("SELECT charge FROM {}.charges ORDER BY charge", self.config.schema.as_str());
        sqlx::query_scalar(AssertSqlSafe(text)).fetch_all(&self.pool).await.unwrap()
    }

    async fn run(&self, charge: &'static str) -> Result<(String, u32, bool), RunError<String, ChargeError>> {
        let bank = self.clone();
        let operation = move |attempt: Attempt| async move { bank.charge(&attempt, charge).await };
        self.executor.run(&key(), None, operation).await.map(|done| (done.value, done.attempt, done.replayed))
    }

    /// That charge was made, alone, and every repeat gets it.
    async fn charged(&self, charge: &str, attempt: u32) {
        assert_eq!(self.charges().await, [charge]);
        assert_eq!(self.run("another").await.unwrap(), (charge.to_owned(), attempt, true));
        assert_eq!(self.charges().await, [charge]);
    }
}

fn key() -> Key {
    Key::new("bank", "order").unwrap()
}

async fn rows_and_key_are_committed_together() {
    let bank = Bank::fresh().await;
    assert_eq!(bank.run("a").await.unwrap(), ("a".to_owned(), 1, false));
    let record = bank.store.fetch(&key()).await.unwrap().unwrap();
    assert_eq!(record.state, State::Completed(Outcome::new(0, "\"a\"")));
    bank.charged("a", 1).await;
}

/// Another takes the key over while the first still holds its transaction open.
async fn a_lost_lease_rolls_back() {
    let bank = Bank::fresh().await;
    let first = {
        let bank = bank.clone();
        move |attempt: Attempt| async move {
            let transaction = bank.begin("first").await?;
            advance(&bank.pool, &bank.config, LEASE).await?;
            assert_eq!(bank.run("second").await.unwrap(), ("second".to_owned(), 2, false));
            let done = bank.store.complete_and_commit(transaction, &attempt, attempt.success(&"first")).await;
            assert_eq!(done.as_ref().unwrap_err().kind(), ErrorKind::LeaseLost);
            done?;
            Ok::<_, ChargeError>("first".to_owned())
        }
    };
    let result = bank.executor.run(&key(), None, first).await;
    let Err(RunError::Unrecorded { result: Err(ChargeError::Store(error)), source, attempt: 1 }) = &result else {
        panic!("{result:?}")
    };
    assert_eq!((error.kind(), source.kind()), (ErrorKind::LeaseLost, ErrorKind::LeaseLost));
    bank.charged("second", 2).await;
}

async fn a_lease_that_ran_out_and_was_not_taken_is_completed() {
    let bank = Bank::fresh().await;
    let operation = {
        let bank = bank.clone();
        move |attempt: Attempt| async move {
            advance(&bank.pool, &bank.config, LEASE * 2).await?;
            bank.charge(&attempt, "a").await
        }
    };
    assert_eq!(bank.executor.run(&key(), None, operation).await.unwrap().value, "a");
    bank.charged("a", 1).await;
}

/// The lease is over, but the transaction has completed it: a rival waits, and then knows.
async fn nobody_takes_over_while_the_commit_is_under_way() {
    for commit in [true, false] {
        let bank = Bank::fresh().await;
        let request = Reserve::new(key()).with_lease(LEASE);
        let Reservation::Acquired(lease) = bank.store.reserve(&request).await.unwrap() else { panic!() };
        let mut transaction = bank.begin("first").await.unwrap();
        bank.store.complete_in(&mut transaction, &lease, &Outcome::new(0, "\"first\"")).await.unwrap();
        advance(&bank.pool, &bank.config, LEASE).await.unwrap();
        let rival = {
            let bank = bank.clone();
            tokio::spawn(async move { bank.run("second").await })
        };
        sleep(Duration::from_millis(300)).await;
        assert!(!rival.is_finished(), "the rival did not wait");
        if commit {
            transaction.commit().await.unwrap();
            assert_eq!(rival.await.unwrap().unwrap(), ("first".to_owned(), 1, true));
            bank.charged("first", 1).await;
        } else {
            transaction.rollback().await.unwrap();
            assert_eq!(rival.await.unwrap().unwrap(), ("second".to_owned(), 2, false));
            bank.charged("second", 2).await;
        }
    }
}

/// An operation that gives its commit up while the server is about it, and the result of the run.
async fn lose_reply(bank: &Bank, then: impl Future<Output = ()> + Send + 'static) -> Result<String, String> {
    let operation = {
        let bank = bank.clone();
        move |attempt: Attempt| async move {
            let charge = timeout(Duration::from_millis(300), bank.charge(&attempt, "slow"));
            let lost = charge.await;
            assert!(lost.is_err(), "{lost:?}");
            then.await;
            Err::<String, _>(ChargeError::NoAnswer)
        }
    };
    match bank.executor.run(&key(), None, operation).await {
        Ok(done) => {
            assert_eq!((done.attempt, done.replayed), (1, false));
            Ok(done.value)
        }
        Err(RunError::Failed { error, is_final: false, replayed: false, .. }) => Err(error.to_string()),
        Err(other) => panic!("{other:?}"),
    }
}

/// The commit is under way when its caller gives up, and succeeds later: it is found out, and nothing is run again, though
/// repeats come all the time.
async fn a_commit_whose_reply_is_lost_is_found_out() {
    let bank = Bank::fresh().await;
    bank.at_commit("slow", "PERFORM pg_sleep(1.5)").await;
    let repeats = {
        let bank = bank.clone();
        tokio::spawn(async move {
            sleep(Duration::from_millis(100)).await;
            loop {
                match bank.run("repeat").await {
                    Ok(done) => return done,
                    Err(RunError::InProgress { .. }) => sleep(Duration::from_millis(20)).await,
                    Err(other) => panic!("{other:?}"),
                }
            }
        })
    };
    assert_eq!(lose_reply(&bank, async {}).await.unwrap(), "slow");
    assert_eq!(repeats.await.unwrap(), ("slow".to_owned(), 1, true));
    bank.charged("slow", 1).await;
}

/// Completing moves the record to the new day's partition; who waits for it has to find it there.
async fn a_commit_whose_reply_is_lost_is_found_out_after_the_day_has_changed() {
    let bank = Bank::fresh().await;
    bank.at_commit("slow", "PERFORM pg_sleep(1.5)").await;
    let operation = {
        let bank = bank.clone();
        move |attempt: Attempt| async move {
            advance(&bank.pool, &bank.config, Duration::from_secs(24 * 3600)).await?;
            bank.store.maintain().await?;
            let lost = timeout(Duration::from_millis(300), bank.charge(&attempt, "slow")).await;
            assert!(lost.is_err(), "{lost:?}");
            Err::<String, _>(ChargeError::NoAnswer)
        }
    };
    let done = bank.executor.run(&key(), None, operation).await.unwrap();
    assert_eq!((done.value.as_str(), done.attempt, done.replayed), ("slow", 1, false));
    bank.charged("slow", 1).await;
}

async fn a_commit_that_fails_after_its_caller_has_gone_frees_the_key() {
    let bank = Bank::fresh().await;
    bank.at_commit("slow", "PERFORM pg_sleep(1.5); RAISE 'no'").await;
    assert_eq!(lose_reply(&bank, async {}).await.unwrap_err(), "no answer");
    assert_eq!(bank.run("second").await.unwrap(), ("second".to_owned(), 2, false));
    bank.charged("second", 2).await;
}

async fn a_commit_that_is_killed_frees_the_key() {
    let bank = Bank::fresh().await;
    bank.at_commit("slow", "PERFORM pg_sleep(60)").await;
    let killer = bank.clone();
    let kill = async move {
        let killed: i64 = sqlx::query_scalar(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = $1 AND wait_event = 'PgSleep'",
        )
        .bind(killer.config.schema.as_str())
        .fetch_one(&killer.pool)
        .await
        .unwrap();
        assert_eq!(killed, 1);
    };
    assert_eq!(lose_reply(&bank, kill).await.unwrap_err(), "no answer");
    assert_eq!(bank.run("second").await.unwrap(), ("second".to_owned(), 2, false));
    bank.charged("second", 2).await;
}

async fn a_constraint_that_is_checked_at_the_commit_frees_the_key() {
    let bank = Bank::fresh().await;
    bank.sql("INSERT INTO {s}.charges VALUES ('taken')").await;
    let refused = bank.run("taken").await;
    let Err(RunError::Failed { error, is_final: false, .. }) = &refused else { panic!("{refused:?}") };
    assert!(is_unique_violation(error, "charges_key"), "{error:?}");
    let ChargeError::Store(error) = error else { panic!("{error:?}") };
    assert_eq!(error.class(), ErrorClass::Permanent);
    assert_eq!(bank.run("free").await.unwrap(), ("free".to_owned(), 2, false));
    assert_eq!(bank.charges().await, ["free", "taken"]);
}

async fn a_panic_or_an_error_after_the_commit_frees_nothing() {
    for panics in [true, false] {
        let bank = Bank::fresh().await;
        let operation = {
            let bank = bank.clone();
            move |attempt: Attempt| async move {
                bank.charge(&attempt, "a").await?;
                if panics {
                    panic!("behind the commit");
                }
                Err::<String, _>(ChargeError::NoAnswer)
            }
        };
        let done = bank.executor.run(&key(), None, operation).await.unwrap();
        assert_eq!((done.value.as_str(), done.replayed), ("a", false));
        bank.charged("a", 1).await;
    }
}

async fn what_cannot_be_completed_is_rolled_back() {
    let bank = Bank::fresh().await;
    for spoil in ["SET TRANSACTION ISOLATION LEVEL REPEATABLE READ", "SELECT 1 / 0"] {
        let operation = {
            let bank = bank.clone();
            move |attempt: Attempt| async move {
                let mut transaction = bank.pool.begin().await?;
                // An error that is swallowed: the server would answer the commit with success, and roll back.
                drop(sqlx::raw_sql(spoil).execute(&mut *transaction).await);
                let insert = format!("INSERT INTO {}.charges VALUES ('spoilt')", bank.config.schema.as_str());
                drop(sqlx::query(AssertSqlSafe(insert)).execute(&mut *transaction).await);
                bank.store.complete_and_commit(transaction, &attempt, attempt.success(&"spoilt")).await?;
                Ok::<_, ChargeError>("spoilt".to_owned())
            }
        };
        let result = bank.executor.run(&key(), None, operation).await;
        assert!(matches!(result, Err(RunError::Failed { error: ChargeError::Store(_), .. })), "{result:?}");
        assert!(bank.charges().await.is_empty());
    }
    assert_eq!(bank.run("a").await.unwrap(), ("a".to_owned(), 3, false));
    bank.charged("a", 3).await;
}

async fn a_caller_that_goes_away_changes_nothing() {
    let bank = Bank::fresh().await;
    bank.at_commit("slow", "PERFORM pg_sleep(0.5)").await;
    assert!(timeout(Duration::from_millis(200), bank.run("slow")).await.is_err());
    bank.executor.drain().await;
    bank.charged("slow", 1).await;
}

/// The operation is dropped while the server is about its commit, which comes to its end one way or the other.
async fn a_runtime_that_is_shut_down_within_the_commit_leaves_all_or_nothing() {
    for commits in [true, false] {
        let bank = Bank::fresh().await;
        let end = if commits { "PERFORM pg_sleep(1)" } else { "PERFORM pg_sleep(1); RAISE 'no'" };
        bank.at_commit("slow", end).await;
        let config = bank.config.clone();
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let dying = runtime.spawn(async move { Bank::open(config).await.run("slow").await });
        let sleeping = "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1 AND wait_event = 'PgSleep'";
        loop {
            let query = sqlx::query_scalar(sleeping).bind(bank.config.schema.as_str());
            let count: i64 = query.fetch_one(&bank.pool).await.unwrap();
            if count > 0 {
                break;
            }
            sleep(Duration::from_millis(10)).await;
        }
        runtime.shutdown_background();
        drop(dying.await);
        // Nobody renews the lease any more, and the transaction is still under way.
        advance(&bank.pool, &bank.config, LEASE).await.unwrap();
        let repeat = bank.run("second").await.unwrap();
        if commits {
            assert_eq!(repeat, ("slow".to_owned(), 1, true));
            bank.charged("slow", 1).await;
        } else {
            assert_eq!(repeat, ("second".to_owned(), 2, false));
            bank.charged("second", 2).await;
        }
    }
}
