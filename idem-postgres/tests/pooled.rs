//! What is special behind a pooler that gives the server's sessions to others: transactions, maintenance, errors.
#![allow(clippy::panic, clippy::unwrap_used, clippy::print_stdout, reason = "the helpers of tests are tests")]

mod stores;

use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use idem_core::executor::{Attempt, Executor};
use idem_core::{
    Body, ErrorClass, ErrorKind, Failure, Fingerprint, Key, KeyStore, Lease, Origin, Outcome, Reservation, Reserve,
    Token, Withheld,
};
use idem_postgres::sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use idem_postgres::sqlx::{self, AssertSqlSafe, Connection, PgConnection, PgPool, Row};
use idem_postgres::{Config, PostgresError, PostgresStore};
use idem_testkit::servers::{PgBouncer, PostgresServer};
use stores::midnight::{DAY, midnights, number, sql};
use stores::pooled::{behind, bouncer, missing, pooled, pooled_config};
use stores::{advance, block_on, fresh_config, pool_of};

macro_rules! pooled_tests {
    ($($name:ident,)+) => {
        fn main() -> ExitCode {
            idem_testkit::run_tests(missing().as_ref(), &[$((stringify!($name), || block_on($name()))),+])
        }
    };
}

pooled_tests! {
    prepared_statements_behind_it_are_told_with_the_name_of_the_switch,
    a_pool_that_sends_what_pgbouncer_refuses_is_told,
    a_pool_of_the_stores_own_needs_nothing_but_the_switch,
    values_come_back_whatever_the_servers_settings,
    what_the_servers_encoding_lacks_is_refused_as_ever,
    key_and_rows_commit_together_or_not_at_all,
    an_operation_of_the_executor_commits_its_rows_with_its_key,
    no_answer_aborts_the_transaction,
    a_rival_waits_for_the_transaction,
    no_key_is_held_twice_while_the_day_changes,
    many_stores_maintain_at_once_and_leave_nothing_in_a_session,
    a_detach_that_is_interrupted_is_finished_by_a_later_round,
    a_detach_that_waits_for_too_long_is_cancelled_and_finished_later,
    two_that_detach_the_same_partition_do_each_other_no_harm,
    a_detach_waits_for_no_old_transaction,
    rounds_open_and_close_no_connection,
}

fn request(id: &str) -> Reserve {
    Reserve::new(Key::new("pooled", id).unwrap())
}

fn acquired(answer: Reservation) -> Lease {
    match answer {
        Reservation::Acquired(lease) => lease,
        other => panic!("{other:?}"),
    }
}

async fn opened(bouncer: &PgBouncer, config: &Config, connections: u32) -> (PgPool, Arc<PostgresStore>) {
    let pool = pooled(bouncer, config, connections).await.unwrap();
    PostgresStore::migrate(&pool, config).await.unwrap();
    let store = PostgresStore::open(pool.clone(), config.clone()).await.unwrap();
    (pool, Arc::new(store))
}

/// Several clients, few sessions, and statements that are prepared in one and meant in another.
async fn prepared_statements_behind_it_are_told_with_the_name_of_the_switch() {
    let bouncer = bouncer();
    let config = pooled_config().with_prepared_statements(true);
    let (_, store) = opened(&bouncer, &config, 8).await;
    let mut told = 0;
    for round in 0..50 {
        let calls = (0..16).map(|at| {
            let store = store.clone();
            tokio::spawn(async move { store.reserve(&request(&format!("{round}-{at}"))).await })
        });
        for call in calls.collect::<Vec<_>>() {
            let Err(error) = call.await.unwrap() else { continue };
            assert_eq!((error.kind(), error.class()), (ErrorKind::Misconfigured, ErrorClass::Permanent), "{error:?}");
            assert!(error.to_string().contains("with_prepared_statements(false)"), "{error}");
            if let Some(source) = error.source().and_then(|source| source.downcast_ref::<PostgresError>()) {
                assert!(matches!(source, PostgresError::PreparedStatements(_)), "{source:?}");
                assert!(source.source().is_some());
                told += 1;
            }
        }
    }
    assert!(told > 0, "prepared statements worked: the clients did not share sessions");
}

async fn a_pool_that_sends_what_pgbouncer_refuses_is_told() {
    let bouncer = bouncer();
    let pool = PgPoolOptions::new().connect_lazy(&bouncer.url()).unwrap();
    let error = PostgresStore::open(pool, pooled_config()).await.unwrap_err();
    // pgbouncer gives the same code to troubles that pass.
    assert_eq!((error.kind(), error.class()), (ErrorKind::Unavailable, ErrorClass::Retryable), "{error:?}");
    assert!(error.to_string().contains("extra_float_digits"), "{error}");
}

async fn a_pool_of_the_stores_own_needs_nothing_but_the_switch() {
    let bouncer = bouncer();
    let store = PostgresStore::connect_and_migrate(&bouncer.url(), pooled_config()).await.unwrap();
    let store = Arc::new(store);
    let calls = (0..200).map(|at| {
        let store = store.clone();
        tokio::spawn(async move {
            let lease = acquired(store.reserve(&request(&at.to_string())).await.unwrap());
            store.complete(&lease, &Outcome::new(200, "done")).await.unwrap();
            assert!(store.fetch(&lease.key).await.unwrap().is_some());
        })
    });
    for call in calls.collect::<Vec<_>>() {
        call.await.unwrap();
    }
    store.maintain().await.unwrap();
}

/// By messages of text and by prepared statements, each reading what the other has written.
async fn values_come_back_whatever_the_servers_settings() {
    let server = PostgresServer::start(&[
        ("standard_conforming_strings", "off"),
        ("escape_string_warning", "off"),
        ("backslash_quote", "on"),
        ("bytea_output", "escape"),
        ("datestyle", "SQL, DMY"),
        ("intervalstyle", "sql_standard"),
        ("extra_float_digits", "-10"),
        ("timezone", "Asia/Kathmandu"),
    ])
    .unwrap();
    let bouncer = PgBouncer::start(&server, 2, &[]).unwrap();
    let config = pooled_config();
    let (_, simple) = opened(&bouncer, &config, 4).await;
    let prepared_config = config.clone().with_prepared_statements(true);
    let direct = pool_of(&server.url(), &config, 4).await.unwrap();
    let prepared = Arc::new(PostgresStore::open(direct, prepared_config).await.unwrap());
    let every_byte: Vec<u8> = (0..=255).collect();
    let ids = ["'; DROP SCHEMA idem; --", "\\'", "\\", "\"", "$1 $2", "{a,NULL}", "NULL", "é \u{10ffff}", "%s", " "];
    for (from, to) in [(&simple, &prepared), (&prepared, &simple)] {
        let mut calls = Vec::new();
        let mut outcomes = vec![
            Outcome::new(200, every_byte.clone()).with_header("x", every_byte.clone()).with_header("x", ""),
            Outcome::new(0, ""),
            Outcome::new(u16::MAX, "\\x00\\000'"),
            Outcome::withheld(201, Withheld::TooLarge),
        ];
        outcomes.extend(ids.iter().skip(4).map(|id| Outcome::new(204, id.as_bytes().to_vec())));
        let scope = if Arc::ptr_eq(from, &simple) { "'simple\\" } else { "prepared" };
        let wishes: Vec<Reserve> = ids
            .iter()
            .map(|id| Reserve::new(Key::new(scope, id).unwrap()).with_fingerprint(Fingerprint::of(id)))
            .collect();
        for (answer, outcome) in from.reserve_many(&wishes).await.into_iter().zip(outcomes) {
            calls.push((acquired(answer.unwrap()), outcome));
        }
        assert_eq!(calls.len(), ids.len());
        from.complete_many(&calls).await.into_iter().collect::<Result<Vec<()>, _>>().unwrap();
        for ((lease, outcome), wish) in calls.iter().zip(&wishes) {
            let record = to.fetch(&lease.key).await.unwrap().unwrap();
            assert_eq!(record.outcome(), Some(outcome), "{:?}", lease.key);
            assert_eq!(record.fingerprint, wish.fingerprint);
            assert_eq!(record, from.fetch(&lease.key).await.unwrap().unwrap().read(record.read_at));
            let Reservation::Completed(replayed) = to.reserve(wish).await.unwrap() else { panic!() };
            assert_eq!(replayed.read(record.read_at), record);
            let other = wish.clone().with_fingerprint(Fingerprint::of("another"));
            assert_eq!(to.reserve(&other).await.unwrap(), Reservation::Mismatch);
            // The same again, by the other.
            to.complete(lease, outcome).await.unwrap();
        }
        // A note, a takeover, a renewal.
        let failed = acquired(from.reserve(&Reserve::new(Key::new(scope, "failed").unwrap())).await.unwrap());
        from.fail(&failed, &Failure::new("it's \\ \"bad\"").unwrap()).await.unwrap();
        to.fail(&failed, &Failure::new("it's \\ \"bad\"").unwrap()).await.unwrap();
        let short = Reserve::new(Key::new(scope, "taken").unwrap()).with_lease(Duration::from_millis(1));
        let first = acquired(from.reserve(&short).await.unwrap());
        tokio::time::sleep(Duration::from_millis(20)).await;
        let second = acquired(from.reserve(&short.clone().with_token(Token::random())).await.unwrap());
        assert!(matches!(second.origin, Origin::Takeover(previous) if previous.token == first.token));
        to.renew(&second, Duration::from_secs(60)).await.unwrap();
        let record = to.fetch(&second.key).await.unwrap().unwrap();
        assert_eq!(record.lease(), second);
        assert_eq!(record.outcome().map(|outcome| &outcome.body), None::<&Body>);
    }
}

/// A database of another encoding keeps what it can hold, and refuses the rest by either protocol.
async fn what_the_servers_encoding_lacks_is_refused_as_ever() {
    let mut connection = PgConnection::connect(&behind().url()).await.unwrap();
    let create = "CREATE DATABASE latin ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0";
    sqlx::raw_sql(create).execute(&mut connection).await.unwrap();
    for prepared in [false, true] {
        let config = fresh_config().with_prepared_statements(prepared);
        let options: PgConnectOptions = behind().url().parse().unwrap();
        let pool = PgPoolOptions::new().connect_with(options.database("latin")).await.unwrap();
        PostgresStore::migrate(&pool, &config).await.unwrap();
        let store = PostgresStore::open(pool, config).await.unwrap();
        let lease = acquired(store.reserve(&request("é")).await.unwrap());
        assert_eq!(store.fetch(&lease.key).await.unwrap().unwrap().key.id(), "é");
        let error = store.reserve(&request("日")).await.unwrap_err();
        assert_eq!((error.kind(), error.class()), (ErrorKind::Other, ErrorClass::Permanent), "{error:?}");
    }
}

/// A table of the business's, and the store, through the pooler.
struct Bank {
    pool: PgPool,
    store: Arc<PostgresStore>,
    config: Config,
    _bouncer: PgBouncer,
}

impl Bank {
    async fn open() -> Self {
        let (bouncer, config) = (bouncer(), pooled_config());
        let (pool, store) = opened(&bouncer, &config, 6).await;
        sql(&pool, &config, "CREATE TABLE {schema}.bank (key text, amount int)").await;
        Self { pool, store, config, _bouncer: bouncer }
    }

    /// As a user writes it, but for `persistent(false)`.
    async fn charge(&self, transaction: &mut sqlx::PgTransaction<'_>, key: &str) {
        let text = format!("INSERT INTO {}.bank VALUES ($1, $2)", self.config.schema.as_str());
        let query = sqlx::query(AssertSqlSafe(text)).bind(key).bind(1200).persistent(false);
        query.execute(&mut **transaction).await.unwrap();
    }

    async fn charges(&self, key: &str) -> i64 {
        number(&self.pool, &self.config, &format!("SELECT count(*) FROM {{schema}}.bank WHERE key = '{key}'")).await
    }
}

async fn key_and_rows_commit_together_or_not_at_all() {
    let bank = Bank::open().await;
    // Others use the same sessions meanwhile.
    let (over, store) = (Arc::new(AtomicBool::new(false)), bank.store.clone());
    let others = tokio::spawn({
        let over = over.clone();
        async move {
            for at in 0.. {
                if over.load(Ordering::Relaxed) {
                    return at;
                }
                store.reserve(&request(&format!("other-{at}"))).await.unwrap();
            }
            0
        }
    });
    for round in 0..20 {
        let (id, commit) = (format!("key-{round}"), round % 2 == 0);
        let mut transaction = bank.pool.begin().await.unwrap();
        let lease = acquired(bank.store.reserve_in(&mut transaction, &request(&id)).await.unwrap());
        bank.charge(&mut transaction, &id).await;
        let outcome = Outcome::new(201, "charged");
        bank.store.complete_in(&mut transaction, &lease, &outcome).await.unwrap();
        bank.store.complete_in(&mut transaction, &lease, &outcome).await.unwrap();
        if commit {
            transaction.commit().await.unwrap();
            let Reservation::Completed(record) = bank.store.reserve(&request(&id)).await.unwrap() else { panic!() };
            assert_eq!(record.outcome(), Some(&outcome));
        } else {
            transaction.rollback().await.unwrap();
            assert_eq!(bank.store.fetch(&lease.key).await.unwrap(), None);
        }
        assert_eq!(bank.charges(&id).await, i64::from(commit));
    }
    over.store(true, Ordering::Relaxed);
    assert!(others.await.unwrap() > 10);
}

async fn an_operation_of_the_executor_commits_its_rows_with_its_key() {
    let bank = Arc::new(Bank::open().await);
    let executor = Executor::new(bank.store.clone());
    for round in 0..10 {
        for replayed in [false, true] {
            let own = bank.clone();
            let operation = move |attempt: Attempt| async move {
                let mut transaction = own.pool.begin().await.unwrap();
                own.charge(&mut transaction, attempt.key().id()).await;
                own.store.complete_and_commit(transaction, &attempt, attempt.success(&round)).await.map(|()| round)
            };
            let key = Key::new("pooled", &format!("executed-{round}")).unwrap();
            let done = executor.run(&key, None, operation).await.unwrap();
            assert_eq!((done.value, done.replayed), (round, replayed));
            assert_eq!(bank.charges(key.id()).await, 1);
        }
    }
}

async fn no_answer_aborts_the_transaction() {
    let bank = Bank::open().await;
    let held = request("held").with_fingerprint(Fingerprint::of("a"));
    acquired(bank.store.reserve(&held).await.unwrap());
    let done = acquired(bank.store.reserve(&request("done")).await.unwrap());
    bank.store.complete(&done, &Outcome::new(200, "first")).await.unwrap();
    let mut transaction = bank.pool.begin().await.unwrap();
    let tx = &mut transaction;
    let rival = held.clone().with_token(Token::random());
    assert!(matches!(bank.store.reserve_in(tx, &rival).await.unwrap(), Reservation::InProgress { .. }));
    let other = rival.with_fingerprint(Fingerprint::of("b"));
    assert_eq!(bank.store.reserve_in(tx, &other).await.unwrap(), Reservation::Mismatch);
    assert!(matches!(bank.store.reserve_in(tx, &request("done")).await.unwrap(), Reservation::Completed(_)));
    let already = bank.store.complete_in(tx, &done, &Outcome::new(200, "x")).await.unwrap_err();
    assert_eq!(already.kind(), ErrorKind::AlreadyCompleted);
    let failed = acquired(bank.store.reserve_in(tx, &request("failed")).await.unwrap());
    bank.store.fail_in(tx, &failed, &Failure::new("no").unwrap()).await.unwrap();
    bank.charge(tx, "after all").await;
    transaction.commit().await.unwrap();
    assert_eq!(bank.charges("after all").await, 1);
    assert_eq!(acquired(bank.store.reserve(&request("failed")).await.unwrap()).attempt, 2);

    let mut transaction = bank.pool.begin().await.unwrap();
    sqlx::raw_sql("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE").execute(&mut *transaction).await.unwrap();
    let error = bank.store.reserve_in(&mut transaction, &request("serializable")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Misconfigured);
    bank.charge(&mut transaction, "serializable").await;
    transaction.commit().await.unwrap();
    assert_eq!(bank.charges("serializable").await, 1);
}

async fn a_rival_waits_for_the_transaction() {
    let bank = Bank::open().await;
    for commit in [true, false] {
        let id = if commit { "committed" } else { "rolled back" };
        let mut transaction = bank.pool.begin().await.unwrap();
        let lease = acquired(bank.store.reserve_in(&mut transaction, &request(id)).await.unwrap());
        bank.store.complete_in(&mut transaction, &lease, &Outcome::new(200, "")).await.unwrap();
        let store = bank.store.clone();
        let rival = tokio::spawn(async move { store.reserve(&request(id)).await });
        tokio::time::sleep(Duration::from_millis(300)).await;
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

async fn no_key_is_held_twice_while_the_day_changes() {
    let (bouncer, config) = (bouncer(), pooled_config().with_max_retention(2 * DAY));
    let (pool, first) = opened(&bouncer, &config, 8).await;
    let (_, second) = opened(&bouncer, &config, 8).await;
    let (keys, twice) = midnights(&pool, &config, [first, second]).await;
    println!("{twice} of {keys} keys were held twice");
    assert!(keys > 200, "only {keys} keys");
    assert_eq!(twice, 0, "of {keys} keys");
}

/// How many partitions the table has, and how many of them are pending.
async fn attached(pool: &PgPool, config: &Config) -> (i64, i64) {
    let of = "FROM pg_catalog.pg_inherits WHERE inhparent = '{schema}.records'::regclass";
    (
        number(pool, config, &format!("SELECT count(*) {of}")).await,
        number(pool, config, &format!("SELECT count(*) {of} AND inhdetachpending")).await,
    )
}

async fn many_stores_maintain_at_once_and_leave_nothing_in_a_session() {
    const DAYS: u32 = 8;
    // A server that nobody else uses: its sessions and locks are looked at.
    let server = PostgresServer::start(&[]).unwrap();
    let bouncer = PgBouncer::start(&server, 3, &[]).unwrap();
    let config = pooled_config();
    let mut stores = Vec::new();
    let mut pools = Vec::new();
    for _ in 0..6 {
        let (pool, store) = opened(&bouncer, &config, 4).await;
        pools.push(pool);
        stores.push(store);
    }
    let over = Arc::new(AtomicBool::new(false));
    let callers: Vec<_> = stores
        .iter()
        .enumerate()
        .map(|(caller, store)| {
            let (store, over) = (store.clone(), over.clone());
            tokio::spawn(async move {
                let mut calls = 0;
                while !over.load(Ordering::Relaxed) {
                    let lease = acquired(store.reserve(&request(&format!("{caller}-{calls}"))).await.unwrap());
                    match store.complete(&lease, &Outcome::new(200, "")).await {
                        // The clock was moved by a day in between.
                        Err(error) if error.kind() == ErrorKind::LeaseLost => {}
                        answer => answer.unwrap(),
                    }
                    calls += 1;
                }
                calls
            })
        })
        .collect();
    let mut dropped = 0;
    for day in 0..DAYS {
        advance(&pools[0], &config, DAY).await.unwrap();
        let mut changed = 0;
        for _ in 0..50 {
            let rounds = stores.iter().map(|store| {
                let store = store.clone();
                tokio::spawn(async move { store.maintain().await })
            });
            for round in rounds.collect::<Vec<_>>() {
                let done = round.await.unwrap().unwrap();
                changed += u32::from(done.day_changed);
                dropped += done.dropped;
            }
            if changed > 0 {
                break;
            }
        }
        assert_eq!(changed, 1, "day {day}");
    }
    over.store(true, Ordering::Relaxed);
    for caller in callers {
        assert!(caller.await.unwrap() > 10);
    }
    // The last of them, now that nothing is in the way.
    for _ in 0..20 {
        dropped += stores[0].maintain().await.unwrap().dropped;
    }
    assert!(dropped >= DAYS - 3, "only {dropped} partitions were dropped");
    let known = number(&pools[0], &config, "SELECT count(*) FROM {schema}.partitions").await;
    assert_eq!(attached(&pools[0], &config).await, (known, 0));

    // What a stranger finds in the sessions.
    for pool in &pools {
        let mut session = pool.begin().await.unwrap();
        for (setting, value) in [("lock_timeout", "0"), ("statement_timeout", "0"), ("enable_seqscan", "on")] {
            let show = sqlx::raw_sql(AssertSqlSafe(format!("SHOW {setting}"))).fetch_one(&mut *session).await.unwrap();
            assert_eq!(show.get::<String, _>(0), value, "{setting}");
        }
        let prepared = sqlx::raw_sql("SELECT count(*) FROM pg_prepared_statements");
        assert_eq!(prepared.fetch_one(&mut *session).await.unwrap().get::<i64, _>(0), 0);
    }
    let locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'";
    assert_eq!(number(&pools[0], &config, locks).await, 0);
}

/// A day whose partition is to be dropped by the next round.
async fn over(pool: &PgPool, store: &PostgresStore, config: &Config) -> String {
    acquired(store.reserve(&request("old")).await.unwrap());
    let name = "SELECT name::text FROM {schema}.partitions ORDER BY day LIMIT 1";
    let name = name.replace("{schema}", config.schema.as_str());
    let name: String = sqlx::raw_sql(AssertSqlSafe(name)).fetch_one(pool).await.unwrap().get(0);
    advance(pool, config, DAY).await.unwrap();
    assert!(store.maintain().await.unwrap().day_changed);
    advance(pool, config, DAY + Duration::from_secs(3_660)).await.unwrap();
    name
}

/// A transaction that has begun to use the table, without its partitions where that is said.
async fn reading(direct: &PgPool, config: &Config, only: bool) -> sqlx::PgTransaction<'static> {
    let mut reader = direct.begin().await.unwrap();
    let (schema, only) = (config.schema.as_str(), if only { "ONLY" } else { "" });
    let lock = format!("LOCK TABLE {only} {schema}.records IN ACCESS SHARE MODE");
    sqlx::raw_sql(AssertSqlSafe(lock)).execute(&mut *reader).await.unwrap();
    reader
}

/// The sessions in which a detach of that schema waits.
fn detaching(config: &Config) -> String {
    format!(
        "FROM pg_stat_activity WHERE query LIKE '%{}%DETACH%CONCURRENTLY' AND state = 'active' \
         AND wait_event_type = 'Lock'",
        config.schema.as_str()
    )
}

/// Begins a round, and waits until its detach waits.
async fn round_that_waits(
    store: &Arc<PostgresStore>,
    direct: &PgPool,
    config: &Config,
) -> tokio::task::JoinHandle<Result<idem_postgres::Maintained, idem_core::StoreError>> {
    let store = store.clone();
    let round = tokio::spawn(async move { store.maintain().await });
    while number(direct, config, &format!("SELECT count(*) {}", detaching(config))).await == 0 {
        assert!(!round.is_finished(), "the detach did not wait: {round:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    round
}

/// Nothing is left of the partition.
async fn is_gone(pool: &PgPool, config: &Config, name: &str) {
    let tables = format!(
        "SELECT count(*) FROM pg_class c WHERE c.relname = '{name}' AND c.relnamespace = '{{schema}}'::regnamespace"
    );
    assert_eq!(number(pool, config, &tables).await, 0);
    assert_eq!(attached(pool, config).await.1, 0);
}

/// Rounds until a partition is dropped.
async fn drop_one(store: &PostgresStore) {
    for _ in 0..50 {
        if store.maintain().await.is_ok_and(|done| done.dropped > 0) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    panic!("the detach was not finished");
}

/// The backend is killed while it waits for those who use the table.
async fn a_detach_that_is_interrupted_is_finished_by_a_later_round() {
    let (bouncer, config) = (bouncer(), pooled_config());
    let (pool, store) = opened(&bouncer, &config, 4).await;
    let name = over(&pool, &store, &config).await;
    let direct = pool_of(&behind().url(), &fresh_config(), 2).await.unwrap();
    // Young when the round looks, and there as long as it takes.
    let reader = reading(&direct, &config, false).await;
    let round = round_that_waits(&store, &direct, &config).await;
    number(&direct, &config, &format!("SELECT count(pg_terminate_backend(pid)) {}", detaching(&config))).await;
    let error = round.await.unwrap().unwrap_err();
    assert_ne!(error.class(), ErrorClass::Permanent, "{error:?}");
    assert_eq!(attached(&pool, &config).await.1, 1, "the detach was interrupted and is pending");
    // Callers go on, and what is pending is not seen.
    assert_eq!(acquired(store.reserve(&request("old")).await.unwrap()).attempt, 1);
    reader.rollback().await.unwrap();
    drop_one(&store).await;
    is_gone(&pool, &config, &name).await;
}

async fn a_detach_that_waits_for_too_long_is_cancelled_and_finished_later() {
    let (bouncer, config) = (bouncer(), pooled_config());
    let (pool, store) = opened(&bouncer, &config, 4).await;
    let name = over(&pool, &store, &config).await;
    let direct = pool_of(&behind().url(), &fresh_config(), 2).await.unwrap();
    let reader = reading(&direct, &config, false).await;
    let round = round_that_waits(&store, &direct, &config).await;
    // Callers and other processes go on meanwhile.
    let begun = std::time::Instant::now();
    while !round.is_finished() {
        let call = std::time::Instant::now();
        acquired(store.reserve(&Reserve::new(Key::new("meanwhile", &format!("{call:?}")).unwrap())).await.unwrap());
        assert!(call.elapsed() < Duration::from_secs(2), "a call took {:?}", call.elapsed());
        assert!(begun.elapsed() < Duration::from_secs(20), "the round goes on");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(round.await.unwrap().unwrap().dropped, 0);
    assert_eq!(attached(&pool, &config).await.1, 1, "it is pending");
    for left in 0.. {
        // No session of the pooler's is lost to it.
        if number(&direct, &config, &format!("SELECT count(*) {}", detaching(&config))).await == 0 {
            break;
        }
        assert!(left < 50, "the detach goes on in its session");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    reader.rollback().await.unwrap();
    drop_one(&store).await;
    is_gone(&pool, &config, &name).await;
}

/// One was so slow that it is taken for dead.
async fn two_that_detach_the_same_partition_do_each_other_no_harm() {
    let (bouncer, config) = (bouncer(), pooled_config());
    let (pool, slow) = opened(&bouncer, &config, 4).await;
    let (_, quick) = opened(&bouncer, &config, 4).await;
    let name = over(&pool, &slow, &config).await;
    let direct = pool_of(&behind().url(), &fresh_config(), 2).await.unwrap();
    let reader = reading(&direct, &config, true).await;
    let round = round_that_waits(&slow, &direct, &config).await;
    assert_eq!(quick.maintain().await.unwrap(), idem_postgres::Maintained::default(), "another is at it");
    sql(&direct, &config, "UPDATE {schema}.maintenance SET until = clock_timestamp()").await;
    drop_one(&quick).await;
    is_gone(&pool, &config, &name).await;
    reader.rollback().await.unwrap();
    let done = round.await.unwrap().unwrap();
    assert_eq!(done.dropped, 0, "it was dropped by the other");
    is_gone(&pool, &config, &name).await;
    assert_eq!(acquired(quick.reserve(&request("old")).await.unwrap()).attempt, 1);
}

/// Somebody's long transaction has looked at the table: it is left to a later round, and nobody waits for it.
async fn a_detach_waits_for_no_old_transaction() {
    let (bouncer, config) = (bouncer(), pooled_config());
    let (pool, store) = opened(&bouncer, &config, 4).await;
    over(&pool, &store, &config).await;
    let direct = pool_of(&behind().url(), &fresh_config(), 2).await.unwrap();
    let reader = reading(&direct, &config, false).await;
    tokio::time::sleep(Duration::from_millis(1_200)).await;
    for round in 0..3 {
        let begun = std::time::Instant::now();
        let (done, callers) = tokio::join!(store.maintain(), async {
            let begun = std::time::Instant::now();
            for at in 0..20 {
                acquired(store.reserve(&request(&format!("{round}-{at}"))).await.unwrap());
            }
            begun.elapsed()
        });
        assert_eq!(done.unwrap().dropped, 0);
        assert!(begun.elapsed() < Duration::from_secs(4), "the round took {:?}", begun.elapsed());
        assert!(callers < Duration::from_secs(2), "20 calls took {callers:?}");
    }
    assert_eq!(attached(&pool, &config).await.1, 0, "nothing was begun");
    reader.rollback().await.unwrap();
    let mut dropped = 0;
    for _ in 0..20 {
        dropped += store.maintain().await.unwrap().dropped;
    }
    assert!(dropped > 0);
}

/// Neither where another process is at it, nor where this one is.
async fn rounds_open_and_close_no_connection() {
    let config = fresh_config();
    let pool = pool_of(&behind().url(), &config, 1).await.unwrap();
    PostgresStore::migrate(&pool, &config).await.unwrap();
    let store = PostgresStore::open(pool.clone(), config.clone()).await.unwrap();
    let session = number(&pool, &config, "SELECT pg_backend_pid()::bigint").await;
    for led in [false, true] {
        if led {
            let lead = "SELECT {schema}.lead('00000000-0000-0000-0000-00000000000f', '1 hour')";
            sql(&pool, &config, lead).await;
        }
        advance(&pool, &config, DAY).await.unwrap();
        let done = store.maintain().await.unwrap();
        assert_eq!(done.day_changed, !led, "another process is at it: {led}");
        assert_eq!(number(&pool, &config, "SELECT pg_backend_pid()::bigint").await, session);
    }
    sql(&pool, &config, "UPDATE {schema}.maintenance SET until = clock_timestamp()").await;
    assert!(store.maintain().await.unwrap().day_changed, "the other one has died");
}
