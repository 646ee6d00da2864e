//! The pool's connections: kept for a moment, never from others, and never lost.
#![allow(clippy::panic, clippy::unwrap_used, reason = "the helpers of tests are tests")]

mod stores;

stores::tests! {
    a_connection_is_kept_for_the_next_call_and_given_back,
    a_pool_of_one_connection_serves_the_store_and_others,
    a_pool_without_a_free_connection_is_told_in_time,
    a_server_that_hangs_is_told_in_time,
    a_pool_that_is_closed_gets_its_connections_back,
    dropped_calls_lose_no_connection,
    a_call_that_nobody_polls_holds_nobody_up,
    a_store_may_outlive_its_runtime,
}

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use idem_core::{ErrorClass, ErrorKind, Key, KeyStore, Outcome, Reservation, Reserve};
use idem_postgres::sqlx::{self, PgPool};
use idem_postgres::{Config, PostgresStore};
use idem_testkit::servers::PostgresServer;
use stores::{fresh_config, persist, pool};
use tokio::task::JoinSet;
use tokio::time::sleep;

async fn opened(connections: u32, config: &Config) -> (PgPool, Arc<PostgresStore>) {
    let pool = pool(config, connections).await.unwrap();
    PostgresStore::migrate(&pool, config).await.unwrap();
    (pool.clone(), Arc::new(PostgresStore::open(pool, config.clone()).await.unwrap()))
}

async fn pair(store: &PostgresStore, id: &str) {
    let request = Reserve::new(Key::new("connections", id).unwrap());
    let Reservation::Acquired(lease) = store.reserve(&request).await.unwrap() else { panic!("not new") };
    store.complete(&lease, &Outcome::new(200, "")).await.unwrap();
}

/// All connections are back in the pool, soon.
async fn all_come_back(pool: &PgPool) {
    let begun = Instant::now();
    while pool.num_idle() < pool.size() as usize {
        assert!(begun.elapsed() < Duration::from_secs(5), "{} of {} came back", pool.num_idle(), pool.size());
        sleep(Duration::from_millis(10)).await;
    }
}

async fn a_connection_is_kept_for_the_next_call_and_given_back() {
    let (pool, store) = opened(8, &fresh_config()).await;
    all_come_back(&pool).await;
    pair(&store, "first").await;
    assert!(pool.num_idle() < pool.size() as usize, "it was given back at once");
    for at in 0..100 {
        pair(&store, &at.to_string()).await;
    }
    all_come_back(&pool).await;
    pair(&store, "later").await;
}

/// With the user's own statements between the store's.
async fn a_pool_of_one_connection_serves_the_store_and_others() {
    let (pool, store) = opened(1, &fresh_config()).await;
    let begun = Instant::now();
    for at in 0..50 {
        pair(&store, &at.to_string()).await;
        sqlx::query("SELECT 1").execute(&pool).await.unwrap();
    }
    assert!(begun.elapsed() < Duration::from_secs(4), "50 pairs took {:?}", begun.elapsed());
}

async fn a_pool_without_a_free_connection_is_told_in_time() {
    let config = fresh_config().with_call_timeout(Duration::from_millis(400));
    let (pool, store) = opened(1, &config).await;
    let taken = pool.acquire().await.unwrap();
    let request = Reserve::new(Key::new("connections", "a").unwrap());
    let lease =
        idem_core::Lease::new(request.key.clone(), request.token, 1, idem_core::Origin::Fresh, request.retention);
    let begun = Instant::now();
    let mut many = JoinSet::new();
    for at in 0..100 {
        let store = store.clone();
        let request = Reserve::new(Key::new("connections", &format!("many-{at}")).unwrap());
        many.spawn(async move { store.reserve(&request).await.unwrap_err() });
    }
    let mut errors = many.join_all().await;
    errors.extend([
        store.complete(&lease, &Outcome::new(200, "")).await.unwrap_err(),
        store.renew(&lease, Duration::from_secs(30)).await.unwrap_err(),
        store.fetch(&request.key).await.unwrap_err(),
    ]);
    assert!(begun.elapsed() < Duration::from_secs(4), "after {:?}", begun.elapsed());
    for error in errors {
        assert_eq!((error.kind(), error.class()), (ErrorKind::Timeout, ErrorClass::Retryable), "{error}");
    }
    drop(taken);
    pair(&store, "b").await;
}

/// The server's processes are stopped, and go on later.
async fn a_server_that_hangs_is_told_in_time() {
    let server = PostgresServer::start(&[]).unwrap();
    let config = Config::default().with_call_timeout(Duration::from_millis(700));
    let store = Arc::new(PostgresStore::connect_and_migrate(&server.url(), config).await.unwrap());
    pair(&store, "a").await;
    let signal = |signal: &str| {
        let file = std::fs::read_to_string(server.directory().join("data/postmaster.pid")).unwrap();
        let postmaster = file.lines().next().unwrap().to_owned();
        let children = Command::new("pgrep").args(["-P", &postmaster]).output().unwrap();
        let children = String::from_utf8(children.stdout).unwrap();
        let sent =
            Command::new("kill").arg(signal).arg(&postmaster).args(children.split_whitespace()).output().unwrap();
        assert!(sent.status.success(), "{sent:?}");
    };
    let mut calls = JoinSet::new();
    for caller in 0..50 {
        let store = store.clone();
        calls.spawn(async move {
            let mut at = 0;
            loop {
                at += 1;
                let request = Reserve::new(Key::new("hangs", &format!("{caller}-{at}")).unwrap());
                let begun = Instant::now();
                if let Err(error) = store.reserve(&request).await {
                    return (request, error, begun.elapsed());
                }
            }
        });
    }
    sleep(Duration::from_millis(100)).await;
    signal("-STOP");
    let begun = Instant::now();
    let fetched = store.fetch(&Key::new("hangs", "x").unwrap()).await.unwrap_err();
    assert_eq!(fetched.kind(), ErrorKind::Timeout);
    assert!(begun.elapsed() < Duration::from_secs(3), "after {:?}", begun.elapsed());
    let refused = calls.join_all().await;
    signal("-CONT");
    let mut unknown = 0;
    for (request, error, took) in refused {
        assert!(took < Duration::from_secs(3), "after {took:?}");
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        match error.class() {
            ErrorClass::Unknown => {
                unknown += 1;
                // It may be done yet; the same call finds out.
                let again = persist(|| store.reserve(&request)).await;
                assert!(matches!(again, Reservation::Acquired(lease) if lease.attempt == 1));
            }
            ErrorClass::Retryable => assert_eq!(persist(|| store.fetch(&request.key)).await, None),
            ErrorClass::Permanent => panic!("{error}"),
        }
    }
    assert!(unknown > 0, "none was sent");
}

async fn a_pool_that_is_closed_gets_its_connections_back() {
    let (pool, store) = opened(4, &fresh_config()).await;
    pair(&store, "a").await;
    tokio::time::timeout(Duration::from_secs(5), pool.close()).await.unwrap();
    let error = store.reserve(&Reserve::new(Key::new("connections", "b").unwrap())).await.unwrap_err();
    assert_eq!((error.kind(), error.class()), (ErrorKind::Unavailable, ErrorClass::Retryable), "{error}");
}

async fn dropped_calls_lose_no_connection() {
    let (pool, store) = opened(4, &fresh_config()).await;
    let mut calls = JoinSet::new();
    for at in 0..500_u64 {
        let store = store.clone();
        calls.spawn(async move {
            let request = Reserve::new(Key::new("connections", &at.to_string()).unwrap());
            drop(tokio::time::timeout(Duration::from_micros(at * 10), store.reserve(&request)).await);
        });
    }
    calls.join_all().await;
    for at in 0..20 {
        pair(&store, &format!("after-{at}")).await;
    }
    all_come_back(&pool).await;
}

/// As in a `select!` whose other branch takes its time.
async fn a_call_that_nobody_polls_holds_nobody_up() {
    let (_, store) = opened(12, &fresh_config().with_call_timeout(Duration::from_secs(3))).await;
    let requests: Vec<_> =
        (0..4).map(|at| Reserve::new(Key::new("connections", &format!("unpolled-{at}")).unwrap())).collect();
    let mut unpolled: Vec<_> = requests.iter().map(|request| store.reserve(request)).collect();
    for call in &mut unpolled {
        let mut once = std::future::poll_fn(|context| std::task::Poll::Ready(call.as_mut().poll(context).is_ready()));
        assert!(!(&mut once).await, "it was answered at once");
    }
    let begun = Instant::now();
    let mut calls = JoinSet::new();
    for at in 0..100 {
        let store = store.clone();
        calls.spawn(async move { pair(&store, &at.to_string()).await });
    }
    calls.join_all().await;
    assert!(begun.elapsed() < Duration::from_secs(2), "after {:?}", begun.elapsed());
    for call in unpolled {
        assert!(matches!(call.await.unwrap(), Reservation::Acquired(_)));
    }
}

async fn a_store_may_outlive_its_runtime() {
    let store = std::thread::spawn(|| {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(async {
            let (_, store) = opened(4, &fresh_config()).await;
            pair(&store, "a").await;
            store
        })
    })
    .join()
    .unwrap();
    std::thread::spawn(move || drop(store)).join().unwrap();
}
