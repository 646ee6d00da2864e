//! Midnight, and what happens to days that are over.
#![allow(clippy::panic, clippy::unwrap_used, clippy::print_stdout, reason = "the helpers of tests are tests")]

mod stores;

stores::tests! {
    no_key_is_held_twice_while_the_day_changes,
    without_the_fence_keys_are_held_twice,
    a_day_that_is_over_is_dropped_and_nothing_before,
    a_record_moves_on_with_every_write,
    an_open_transaction_delays_the_change_of_day_and_nobody_else,
    a_process_of_shorter_retention_drops_no_live_record,
}

use std::sync::Arc;
use std::time::Duration;

use idem_core::{Key, KeyStore, Outcome, Reservation, Reserve};
use idem_postgres::sqlx::PgPool;
use idem_postgres::{Config, PostgresStore};
use stores::midnight::{self, DAY, number, sql};
use stores::{advance, fresh_config, pool};

async fn opened(config: &Config) -> (PgPool, Arc<PostgresStore>) {
    let pool = pool(config, 8).await.unwrap();
    PostgresStore::migrate(&pool, config).await.unwrap();
    let store = PostgresStore::open(pool.clone(), config.clone()).await.unwrap();
    (pool, Arc::new(store))
}

async fn acquire(store: &PostgresStore, id: &str) -> idem_core::Lease {
    match store.reserve(&Reserve::new(Key::new("days", id).unwrap())).await.unwrap() {
        Reservation::Acquired(lease) => lease,
        other => panic!("{other:?}"),
    }
}

async fn midnights(config: &Config) -> (usize, usize) {
    let (pool, first) = opened(config).await;
    let (_, second) = opened(config).await;
    midnight::midnights(&pool, config, [first, second]).await
}

async fn no_key_is_held_twice_while_the_day_changes() {
    let (keys, twice) = midnights(&fresh_config().with_max_retention(2 * DAY)).await;
    println!("{twice} of {keys} keys were held twice");
    assert!(keys > 500, "only {keys} keys");
    assert_eq!(twice, 0, "of {keys} keys");
}

/// The same without the lock: the test above is able to see what it looks for.
async fn without_the_fence_keys_are_held_twice() {
    for round in 1.. {
        let config = fresh_config().with_max_retention(2 * DAY);
        let (pool, _) = opened(&config).await;
        sql(
            &pool,
            &config,
            "DO $$
             DECLARE body text;
             BEGIN
                 FOR body IN SELECT pg_get_functiondef(oid) FROM pg_proc
                     WHERE pronamespace = '{schema}'::regnamespace AND proname IN ('reserve', 'settle')
                 LOOP
                     ASSERT body LIKE '%pg_advisory_xact_lock_shared(%';
                     EXECUTE regexp_replace(body, 'pg_advisory_xact_lock_shared\\([-0-9]+\\)', 'NULL');
                 END LOOP;
             END $$",
        )
        .await;
        let (keys, twice) = midnights(&config).await;
        println!("without the fence, {twice} of {keys} keys were held twice");
        if twice > 0 {
            return;
        }
        assert!(round < 5, "the test does not see the fault that it is there for");
    }
}

async fn a_day_that_is_over_is_dropped_and_nothing_before() {
    let config = fresh_config();
    let (pool, store) = opened(&config).await;
    let partitions = "SELECT count(*) FROM pg_catalog.pg_inherits WHERE inhparent = '{schema}.records'::regclass";
    let old = acquire(&store, "old").await;
    store.complete(&old, &Outcome::new(200, "old")).await.unwrap();
    let held = acquire(&store, "held").await;
    let longest = store.capabilities().max_retention;

    // The next day: written records move there, the others stay where they are and live on.
    advance(&pool, &config, DAY - Duration::from_secs(3_600)).await.unwrap();
    let mut changed = store.maintain().await.unwrap().day_changed;
    advance(&pool, &config, Duration::from_secs(3_600)).await.unwrap();
    changed |= store.maintain().await.unwrap().day_changed;
    assert!(changed, "the day did not change in 24 hours");
    let moved =
        number(&pool, &config, "SELECT count(*) FROM {schema}.records r, {schema}.epoch e WHERE r.day = e.day").await;
    assert_eq!(moved, 0);
    let fresh = acquire(&store, "fresh").await;
    store.complete(&fresh, &Outcome::new(200, "fresh")).await.unwrap();
    assert_eq!(store.fetch(&held.key).await.unwrap(), None, "its retention is over");

    // When the first day's records have all expired, its partition goes, and not before.
    assert_eq!(number(&pool, &config, "SELECT count(*) FROM {schema}.records WHERE id IN ('old', 'held')").await, 2);
    advance(&pool, &config, longest - Duration::from_secs(60)).await.unwrap();
    let mut dropped = store.maintain().await.unwrap().dropped;
    assert!(store.fetch(&fresh.key).await.unwrap().is_some());
    // An hour later than that, for a clock that is set back.
    advance(&pool, &config, Duration::from_secs(3_720)).await.unwrap();
    dropped += store.maintain().await.unwrap().dropped;
    assert!(dropped >= 1, "nothing was dropped");
    assert_eq!(number(&pool, &config, "SELECT count(*) FROM {schema}.records WHERE id IN ('old', 'held')").await, 0);
    let known = number(&pool, &config, "SELECT count(*) FROM {schema}.partitions").await;
    assert_eq!(number(&pool, &config, partitions).await, known);
    acquire(&store, "old").await;
}

/// complete, fail, renew and take-over move a record on to the current day.
async fn a_record_moves_on_with_every_write() {
    let config = fresh_config().with_max_retention(3 * DAY);
    let (pool, store) = opened(&config).await;
    sql(&pool, &config, "SELECT {schema}.make_partition({schema}.today() + 1)").await;
    let request = |id: &str| Reserve::new(Key::new("days", id).unwrap()).with_retention(2 * DAY);
    let mut leases = Vec::new();
    for id in ["completed", "failed", "renewed", "taken over", "untouched"] {
        let Reservation::Acquired(lease) = store.reserve(&request(id)).await.unwrap() else { panic!() };
        leases.push(lease);
    }
    sql(&pool, &config, "SELECT {schema}.change_day({schema}.today() + 1)").await;
    advance(&pool, &config, Duration::from_secs(31)).await.unwrap();
    store.complete(&leases[0], &Outcome::new(200, "done")).await.unwrap();
    store.fail(&leases[1], &idem_core::Failure::default()).await.unwrap();
    store.renew(&leases[2], Duration::from_secs(60)).await.unwrap();
    let Reservation::Acquired(taken) = store.reserve(&request("taken over")).await.unwrap() else { panic!() };
    assert_eq!(taken.attempt, 2);
    let current = "SELECT count(*) FROM {schema}.records r, {schema}.epoch e WHERE r.day = e.day";
    assert_eq!(number(&pool, &config, current).await, 4);
    assert_eq!(number(&pool, &config, "SELECT count(*) FROM {schema}.records").await, 5);
    // The same complete again, now that its record lies elsewhere.
    store.complete(&leases[0], &Outcome::new(200, "done")).await.unwrap();
    for lease in &leases {
        assert!(store.fetch(&lease.key).await.unwrap().is_some(), "{:?}", lease.key);
    }
}

/// Somebody's transaction that has reserved and does not end.
async fn an_open_transaction_delays_the_change_of_day_and_nobody_else() {
    let config = fresh_config().with_max_retention(2 * DAY);
    let (pool, store) = opened(&config).await;
    let mut open = pool.begin().await.unwrap();
    store.reserve_in(&mut open, &Reserve::new(Key::new("days", "open").unwrap())).await.unwrap();
    advance(&pool, &config, DAY).await.unwrap();
    for round in 0..5 {
        let (maintained, callers) = tokio::join!(store.maintain(), async {
            let begun = std::time::Instant::now();
            for at in 0..20 {
                acquire(&store, &format!("{round}-{at}")).await;
            }
            begun.elapsed()
        });
        let maintained = maintained.unwrap();
        assert!(maintained.day_delayed && !maintained.day_changed, "{maintained:?}");
        assert!(callers < Duration::from_secs(5), "20 callers waited {callers:?}");
    }
    // One that has lasted for a while is not waited for any more, for the 100 ms in which others would wait, too.
    tokio::time::sleep(Duration::from_millis(1_100)).await;
    let mut shortest = Duration::MAX;
    for _ in 0..5 {
        let begun = std::time::Instant::now();
        let maintained = store.maintain().await.unwrap();
        assert!(maintained.day_delayed && !maintained.day_changed, "{maintained:?}");
        shortest = shortest.min(begun.elapsed());
    }
    assert!(shortest < Duration::from_millis(90), "the change of day was tried in vain: {shortest:?}");
    open.rollback().await.unwrap();
    assert!(store.maintain().await.unwrap().day_changed);
}

/// The process that does the maintenance may be set up otherwise than the one that has written.
async fn a_process_of_shorter_retention_drops_no_live_record() {
    let config = fresh_config();
    let (pool, short) = opened(&config).await;
    let (_, long) = opened(&config.clone().with_max_retention(4 * DAY)).await;
    let request = Reserve::new(Key::new("days", "kept").unwrap()).with_retention(4 * DAY);
    let Reservation::Acquired(lease) = long.reserve(&request).await.unwrap() else { panic!() };
    long.complete(&lease, &Outcome::new(200, "kept")).await.unwrap();
    for day in 1..=3 {
        advance(&pool, &config, DAY).await.unwrap();
        short.maintain().await.unwrap();
        let record = long.fetch(&lease.key).await.unwrap();
        assert!(record.is_some(), "dropped after {day} days");
        assert!(matches!(long.reserve(&request).await.unwrap(), Reservation::Completed(_)));
    }
    // The retention counts from the end of the day.
    advance(&pool, &config, 2 * DAY).await.unwrap();
    advance(&pool, &config, Duration::from_secs(3_660)).await.unwrap();
    assert!(short.maintain().await.unwrap().dropped >= 1);
    assert_eq!(number(&pool, &config, "SELECT count(*) FROM {schema}.records").await, 0);
}
