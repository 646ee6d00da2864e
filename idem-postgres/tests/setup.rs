//! Migration, bad settings, and a server that crashes under load.
#![allow(clippy::panic, clippy::unwrap_used, reason = "the helpers of tests are tests")]

mod stores;

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use idem_core::{ErrorClass, ErrorKind, Fingerprint, Key, KeyStore, Lease, Outcome, Reservation, Reserve, StoreError};
use idem_postgres::sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use idem_postgres::sqlx::{self, AssertSqlSafe, PgPool};
use idem_postgres::{Batching, Config, PostgresError, PostgresStore, Schema};
use idem_testkit::servers::PostgresServer;
use stores::{SERVER, fresh_config, persist, pool};

stores::tests! {
    many_processes_migrate_at_once,
    what_is_not_set_up_is_told_clearly,
    calls_without_a_migration_are_refused,
    a_role_without_rights_is_told_so,
    a_server_that_is_not_there_is_told_in_time,
    a_full_queue_refuses_and_does_nothing,
    nothing_acknowledged_is_lost_when_the_server_crashes_under_load,
    a_key_can_be_looked_up_in_psql,
    overlapping_batches_in_opposite_orders_never_deadlock,
    an_answer_that_changes_nothing_waits_for_no_disk,
}

async fn sql(pool: &PgPool, text: String) {
    sqlx::raw_sql(AssertSqlSafe(text)).execute(pool).await.unwrap();
}

fn own(error: &StoreError) -> &PostgresError {
    error.source().unwrap().downcast_ref().unwrap_or_else(|| panic!("{error:?}"))
}

async fn many_processes_migrate_at_once() {
    let config = fresh_config();
    let mut processes = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let config = config.clone();
        processes.spawn(async move {
            let pool = pool(&config, 1).await.unwrap();
            PostgresStore::migrate(&pool, &config).await.unwrap();
            PostgresStore::migrate(&pool, &config).await.unwrap();
        });
    }
    processes.join_all().await;
    PostgresStore::open(pool(&config, 1).await.unwrap(), config).await.unwrap();
}

async fn what_is_not_set_up_is_told_clearly() {
    assert!(matches!(Schema::new("a\"b; DROP TABLE x"), Err(PostgresError::SchemaName)));
    let config = fresh_config();
    let pool = pool(&config, 2).await.unwrap();
    let error = PostgresStore::open(pool.clone(), config.clone()).await.unwrap_err();
    assert_eq!((error.kind(), error.class()), (ErrorKind::Misconfigured, ErrorClass::Permanent));
    assert!(matches!(own(&error), PostgresError::NotMigrated));

    PostgresStore::migrate(&pool, &config).await.unwrap();
    sql(&pool, format!("UPDATE \"{}\".version SET version = 99", config.schema.as_str())).await;
    for error in [
        PostgresStore::open(pool.clone(), config.clone()).await.unwrap_err(),
        PostgresStore::migrate(&pool, &config).await.unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Misconfigured);
        assert!(matches!(own(&error), PostgresError::NewerSchema { found: 99, .. }));
    }
}

/// The schema goes away under an open store: an error, never "absent".
async fn calls_without_a_migration_are_refused() {
    let config = fresh_config();
    let pool = pool(&config, 4).await.unwrap();
    PostgresStore::migrate(&pool, &config).await.unwrap();
    let store = PostgresStore::open(pool.clone(), config.clone()).await.unwrap();
    sql(&pool, format!("DROP SCHEMA \"{}\" CASCADE", config.schema.as_str())).await;
    let request = Reserve::new(Key::new("a", "b").unwrap());
    let reserved = store.reserve(&request).await.unwrap_err();
    let fetched = store.fetch(&request.key).await.unwrap_err();
    for error in [reserved, fetched] {
        assert_eq!((error.kind(), error.class()), (ErrorKind::Misconfigured, ErrorClass::Permanent), "{error:?}");
    }
}

async fn a_role_without_rights_is_told_so() {
    let config = fresh_config();
    let owner = pool(&config, 2).await.unwrap();
    PostgresStore::migrate(&owner, &config).await.unwrap();
    let role = format!("role_{}", config.schema.as_str());
    sql(&owner, format!("CREATE ROLE {role} LOGIN")).await;
    let options: PgConnectOptions = SERVER.url().parse().unwrap();
    let pool = PgPoolOptions::new().connect_with(options.username(&role)).await.unwrap();
    for error in [
        PostgresStore::open(pool.clone(), config.clone()).await.unwrap_err(),
        PostgresStore::migrate(&pool, &fresh_config()).await.unwrap_err(),
    ] {
        assert_eq!((error.kind(), error.class()), (ErrorKind::Misconfigured, ErrorClass::Permanent), "{error:?}");
    }
}

async fn a_server_that_is_not_there_is_told_in_time() {
    let config = Config::default().with_call_timeout(Duration::from_millis(500));
    let error = PostgresStore::connect("postgres://nobody:secret@127.0.0.1:1/none", config).await.unwrap_err();
    assert_ne!(error.class(), ErrorClass::Permanent);
    assert!(!format!("{error} {error:?}").contains("secret"), "{error:?}");
}

async fn a_full_queue_refuses_and_does_nothing() {
    let config = fresh_config().with_batching(Batching::default().with_queue(4).with_statements(1));
    let pool = pool(&config, 2).await.unwrap();
    PostgresStore::migrate(&pool, &config).await.unwrap();
    let store = Arc::new(PostgresStore::open(pool.clone(), config.clone()).await.unwrap());
    // Somebody holds the lock of the day, so that every call waits.
    let mut day = pool.begin().await.unwrap();
    let lock = format!("LOCK TABLE \"{}\".epoch IN ACCESS EXCLUSIVE MODE", config.schema.as_str());
    sqlx::raw_sql(AssertSqlSafe(lock)).execute(&mut *day).await.unwrap();
    let calls: Vec<_> = (0..30)
        .map(|at| {
            let store = store.clone();
            tokio::spawn(async move { store.reserve(&Reserve::new(Key::new("full", &at.to_string()).unwrap())).await })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(300)).await;
    day.rollback().await.unwrap();
    let (mut reserved, mut refused) = (0, 0);
    for (at, call) in calls.into_iter().enumerate() {
        let key = Key::new("full", &at.to_string()).unwrap();
        match call.await.unwrap() {
            Ok(_) => reserved += 1,
            Err(error) => {
                assert_eq!(error.class(), ErrorClass::Retryable, "{error:?}");
                assert_eq!(store.fetch(&key).await.unwrap(), None);
                refused += 1;
            }
        }
    }
    assert!(reserved >= 4 && refused >= 10, "{reserved} reserved, {refused} refused");
}

async fn nothing_acknowledged_is_lost_when_the_server_crashes_under_load() {
    let server = PostgresServer::start(&[]).unwrap();
    let config = Config::default().with_call_timeout(Duration::from_secs(5));
    let pool =
        PgPoolOptions::new().max_connections(8).acquire_timeout(Duration::from_secs(2)).connect(&server.url()).await;
    let pool = pool.unwrap();
    PostgresStore::migrate(&pool, &config).await.unwrap();
    let store = Arc::new(PostgresStore::open(pool, config).await.unwrap());
    let over = Arc::new(AtomicBool::new(false));
    // Two callers for each key: one of them runs.
    let callers: Vec<_> = (0..32)
        .map(|caller| {
            let (store, over) = (store.clone(), over.clone());
            tokio::spawn(async move {
                let mut completed: Vec<(Lease, Outcome)> = Vec::new();
                for number in 0.. {
                    if over.load(Ordering::Relaxed) {
                        break;
                    }
                    let key = Key::new("crash", &format!("{}-{number}", caller / 2)).unwrap();
                    let request = Reserve::new(key).with_lease(Duration::from_secs(3_600));
                    if let Reservation::Acquired(lease) = persist(|| store.reserve(&request)).await {
                        let outcome = Outcome::new(201, format!("by {caller}"));
                        persist(|| store.complete(&lease, &outcome)).await;
                        completed.push((lease, outcome));
                    }
                }
                completed
            })
        })
        .collect();
    for _ in 0..2 {
        tokio::time::sleep(Duration::from_millis(700)).await;
        server.crash_and_restart().unwrap();
    }
    tokio::time::sleep(Duration::from_millis(700)).await;
    over.store(true, Ordering::Relaxed);
    let mut keys = std::collections::HashSet::new();
    for caller in callers {
        for (lease, outcome) in caller.await.unwrap() {
            assert_eq!(lease.attempt, 1);
            assert!(keys.insert(lease.key.clone()), "{:?} was run twice", lease.key);
            let record = persist(|| store.fetch(&lease.key)).await.unwrap();
            assert_eq!(record.outcome(), Some(&outcome), "{:?}", lease.key);
        }
    }
    assert!(keys.len() > 100, "only {} keys", keys.len());
}

async fn a_key_can_be_looked_up_in_psql() {
    let config = fresh_config();
    let pool = pool(&config, 2).await.unwrap();
    PostgresStore::migrate(&pool, &config).await.unwrap();
    let store = PostgresStore::open(pool.clone(), config.clone()).await.unwrap();
    let request = Reserve::new(Key::new("tenant-7", "order-42").unwrap());
    let Reservation::Acquired(lease) = store.reserve(&request).await.unwrap() else { panic!() };
    store.complete(&lease, &Outcome::new(201, "charged")).await.unwrap();
    let text = format!(
        "SELECT state::text, attempt, code, body_bytes FROM \"{}\".overview WHERE scope = 'tenant-7' AND id = 'order-42'",
        config.schema.as_str()
    );
    let row: (String, i32, i32, i32) = sqlx::query_as(AssertSqlSafe(text)).fetch_one(&pool).await.unwrap();
    assert_eq!(row, ("completed".to_owned(), 1, 201, 7));
}

/// By two stores, so that the batches of one do not merge: every call is answered, and none by a deadlock.
async fn overlapping_batches_in_opposite_orders_never_deadlock() {
    let seconds = std::env::var("IDEM_STRESS_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(5);
    let config = fresh_config();
    let pool = pool(&config, 16).await.unwrap();
    PostgresStore::migrate(&pool, &config).await.unwrap();
    let end = std::time::Instant::now() + Duration::from_secs(seconds);
    let mut workers = tokio::task::JoinSet::new();
    for worker in 0..6 {
        let store = PostgresStore::open(pool.clone(), config.clone()).await.unwrap();
        workers.spawn(async move {
            let mut round = 0;
            while std::time::Instant::now() < end {
                // A few keys that live on, so that every path is taken: fresh, held, failed, completed.
                let mut requests: Vec<Reserve> = (0..40)
                    .map(|at| Reserve::new(Key::new("stress", &format!("{}-{at}", round / 20)).unwrap()))
                    .collect();
                if worker % 2 == 1 {
                    requests.reverse();
                }
                let mut calls = Vec::new();
                for answer in store.reserve_many(&requests).await {
                    if let Reservation::Acquired(lease) = answer.unwrap() {
                        calls.push((lease, Outcome::new(200, "done")));
                    }
                }
                let failed = calls.split_off(calls.len() / 2);
                if worker % 2 == 1 {
                    calls.reverse();
                }
                for answer in store.complete_many(&calls).await {
                    answer.unwrap();
                }
                let fails = failed.iter().map(|(lease, _)| async {
                    store.fail(lease, &idem_core::Failure::default()).await.unwrap();
                });
                for fail in fails {
                    fail.await;
                }
                round += 1;
            }
            round
        });
    }
    let rounds: usize = workers.join_all().await.into_iter().sum();
    assert!(rounds > 20, "only {rounds} rounds");
}

/// A call that takes a lock on a row has a transaction id, and its commit is written to the log and waited for.
async fn an_answer_that_changes_nothing_waits_for_no_disk() {
    // Nobody else uses it. Autovacuum has transactions of its own.
    let server = PostgresServer::start(&[("autovacuum", "off")]).unwrap();
    let store = PostgresStore::connect_and_migrate(&server.url(), Config::default()).await.unwrap();
    let next = async || -> String {
        let next = sqlx::query_scalar("SELECT pg_snapshot_xmax(pg_current_snapshot())::text");
        next.fetch_one(store.pool()).await.unwrap()
    };
    let request = |id: &str| Reserve::new(Key::new("still", id).unwrap());
    let print = |text: &str| Fingerprint::of(text);
    let hold = async |id: &str| match store.reserve(&request(id).with_fingerprint(print("a"))).await.unwrap() {
        Reservation::Acquired(lease) => lease,
        answer => panic!("{answer:?}"),
    };
    hold("held").await;
    let lease = hold("done").await;
    store.complete(&lease, &Outcome::new(200, "done")).await.unwrap();
    let before = next().await;
    for _ in 0..10 {
        assert!(matches!(store.reserve(&request("done")).await.unwrap(), Reservation::Completed(_)));
        assert!(matches!(store.reserve(&request("held")).await.unwrap(), Reservation::InProgress { .. }));
        for id in ["held", "done"] {
            let other = request(id).with_fingerprint(print("b"));
            assert!(matches!(store.reserve(&other).await.unwrap(), Reservation::Mismatch));
        }
        assert!(store.fetch(&lease.key).await.unwrap().is_some());
    }
    assert_eq!(next().await, before, "transactions with an id");
}
