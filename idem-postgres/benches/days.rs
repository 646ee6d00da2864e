//! What callers feel of a change of day and of a day that is dropped, and what dropping costs beside deleting:
//! `cargo bench -p idem-postgres --bench days`.
//!
//! `IDEM_BENCH_RECORDS` (default 1000000): records in the day that is dropped. `IDEM_BENCH_CALLERS` (default 64): callers
//! meanwhile. `IDEM_BENCH_HELD` (default 60): seconds for which a transaction is held open over midnight.
#![allow(clippy::print_stdout, clippy::unwrap_used, clippy::panic, reason = "a program for the terminal")]

mod load;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use idem_core::{Key, Reserve};
use idem_postgres::sqlx::postgres::{PgPool, PgPoolOptions};
use idem_postgres::sqlx::{self, AssertSqlSafe};
use idem_postgres::{Config, PostgresStore};
use load::{by_store, is_smoke, setting};
use tokio::time::sleep;

/// The length of each window in which latencies are taken together.
const WINDOW: Duration = Duration::from_secs(4);

#[tokio::main]
async fn main() {
    let (_server, url) = load::server();
    let records: i64 = setting("IDEM_BENCH_RECORDS", if is_smoke() { "20000" } else { "1000000" })[0];
    let callers: usize = setting("IDEM_BENCH_CALLERS", "64")[0];
    let held = Duration::from_secs(setting("IDEM_BENCH_HELD", if is_smoke() { "2" } else { "60" })[0]);
    let pool = PgPoolOptions::new().max_connections(16).connect(&url).await.unwrap();
    println!("{records} records in the day that goes, {callers} callers");
    drop_and_delete(&pool, records).await;
    midnight(&pool, records, callers).await;
    held_open(&pool, callers, held).await;
}

async fn run(pool: &PgPool, sql: &str) {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(pool).await.unwrap();
}

async fn number(pool: &PgPool, sql: &str) -> i64 {
    sqlx::query_scalar(AssertSqlSafe(sql.to_owned())).fetch_one(pool).await.unwrap()
}

/// A schema with a day long over, full of records that have expired; its partition is due after `due` seconds.
async fn with_an_old_day(pool: &PgPool, records: i64, due: u64) -> Arc<PostgresStore> {
    run(pool, "DROP SCHEMA IF EXISTS idem CASCADE").await;
    PostgresStore::migrate(pool, &Config::default()).await.unwrap();
    run(pool, "SELECT idem.make_partition(idem.today() - 3)").await;
    load::fill(pool, "idem", "idem.today() - 3", 1..=records, "now() - interval '50 h'").await;
    let due = format!("now() + interval '{due} s' WHERE day = idem.today() - 3");
    run(pool, &format!("UPDATE idem.partitions SET expires_at = {due}")).await;
    Arc::new(PostgresStore::open(pool.clone(), Config::default()).await.unwrap())
}

async fn drop_and_delete(pool: &PgPool, records: i64) {
    let store = with_an_old_day(pool, records, 0).await;
    let mebibytes = |bytes: i64| bytes as f64 / 1024.0 / 1024.0;
    let name: String = sqlx::query_scalar("SELECT name::text FROM idem.partitions ORDER BY day LIMIT 1")
        .fetch_one(pool)
        .await
        .unwrap();
    run(
        pool,
        &format!(
            "DROP TABLE IF EXISTS plain; \
             CREATE TABLE plain (LIKE idem.records INCLUDING ALL) WITH (autovacuum_enabled = off); \
             INSERT INTO plain SELECT * FROM idem.{name}; CHECKPOINT"
        ),
    )
    .await;
    let size = async |table: &str| mebibytes(number(pool, &format!("SELECT pg_total_relation_size('{table}')")).await);
    let (before, plain) = (size(&format!("idem.{name}")).await, size("plain").await);
    let begun = Instant::now();
    while store.maintain().await.unwrap().dropped == 0 {
        assert!(begun.elapsed() < Duration::from_secs(60), "it is not dropped");
    }
    let dropped = begun.elapsed();
    let left = number(pool, "SELECT count(*) FROM idem.records").await;
    println!("dropped: {dropped:>10.2?}   {before:.0} MiB before, 0 MiB after ({left} records left)");
    let begun = Instant::now();
    let gone = sqlx::query("DELETE FROM plain WHERE expires_at < now()").execute(pool).await.unwrap().rows_affected();
    let deleted = begun.elapsed();
    let after = size("plain").await;
    let begun = Instant::now();
    run(pool, "VACUUM plain").await;
    println!(
        "deleted: {deleted:>10.2?}   {plain:.0} MiB before, {after:.0} MiB after ({gone} records), \
         {:.2?} more to vacuum, {:.0} MiB then",
        begun.elapsed(),
        size("plain").await
    );
    println!("ratio:   {:>10.1}", deleted.as_secs_f64() / dropped.as_secs_f64());
    run(pool, "DROP TABLE plain").await;
}

/// Callers that go on until they are told, and when each of their pairs ended and how long it took.
struct Load {
    begun: Instant,
    stop: Arc<AtomicBool>,
    pairs: Arc<Mutex<Vec<(Duration, Duration)>>>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl Load {
    fn start(store: &Arc<PostgresStore>, callers: usize) -> Self {
        let (begun, stop, pairs) = (Instant::now(), Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
        let tasks = (0..callers)
            .map(|_| {
                let (store, stop, pairs) = (store.clone(), stop.clone(), pairs.clone());
                tokio::spawn(async move {
                    let mut own = Vec::new();
                    while !stop.load(Ordering::Relaxed) {
                        let start = Instant::now();
                        by_store(store.clone(), load::next()).await;
                        own.push((begun.elapsed(), start.elapsed()));
                    }
                    pairs.lock().unwrap().extend(own);
                })
            })
            .collect();
        Self { begun, stop, pairs, tasks }
    }

    async fn end(self) -> Vec<(Duration, Duration)> {
        self.stop.store(true, Ordering::Relaxed);
        for task in self.tasks {
            task.await.unwrap();
        }
        Arc::into_inner(self.pairs).unwrap().into_inner().unwrap()
    }
}

/// Prints the latencies of the pairs that ended in that time.
fn window(name: &str, pairs: &[(Duration, Duration)], from: Duration, to: Duration) {
    let mut latencies: Vec<Duration> =
        pairs.iter().filter(|(ended, _)| (from..to).contains(ended)).map(|(_, latency)| *latency).collect();
    latencies.sort_unstable();
    assert!(!latencies.is_empty(), "no pair ended in: {name}");
    let at = |share: f64| latencies[((latencies.len() - 1) as f64 * share) as usize];
    let rate = latencies.len() as f64 / (to - from).as_secs_f64();
    println!("{name:<28} {rate:>8.0} pairs/s   p50 {:>9.2?}   p99 {:>9.2?}   max {:>9.2?}", at(0.5), at(0.99), at(1.0));
}

/// Moves the clock so that midnight comes in that time.
async fn just_before_midnight(pool: &PgPool, by: Duration) {
    run(
        pool,
        &format!(
            "UPDATE idem.epoch SET shift = (day + 1)::timestamp AT TIME ZONE 'UTC' - clock_timestamp() - interval '{} s'",
            by.as_secs()
        ),
    )
    .await;
}

async fn midnight(pool: &PgPool, records: i64, callers: usize) {
    let store = with_an_old_day(pool, records, 0).await;
    let before = 2 * WINDOW;
    just_before_midnight(pool, before).await;
    let due = 2 * before;
    run(
        pool,
        &format!(
            "UPDATE idem.partitions SET expires_at = clock_timestamp() + (SELECT shift FROM idem.epoch) + interval '{} s' \
             WHERE day = (SELECT min(day) FROM idem.partitions)",
            due.as_secs()
        ),
    )
    .await;
    let load = Load::start(&store, callers);
    let begun = load.begun;
    let (mut changed, mut dropped) = (None, None);
    while begun.elapsed() < due + before {
        let start = begun.elapsed();
        let done = store.maintain().await.unwrap();
        if done.day_changed {
            changed = Some(start);
        }
        if done.dropped > 0 {
            dropped = Some((start, begun.elapsed() - start));
        }
        sleep(Duration::from_millis(200)).await;
    }
    let pairs = load.end().await;
    let (changed, (dropped, took)) = (changed.unwrap(), dropped.unwrap());
    let half = WINDOW / 2;
    window("before", &pairs, changed - WINDOW - half, changed - half);
    window("around the change of day", &pairs, changed - half, changed + half);
    window("between", &pairs, changed + half, changed + half + WINDOW);
    window("around the drop", &pairs, dropped - half, dropped + half);
    println!("the round with the drop took {took:.2?}");
}

/// Somebody's transaction that has reserved is held open over midnight.
async fn held_open(pool: &PgPool, callers: usize, held: Duration) {
    let store = with_an_old_day(pool, 1, 1_000_000).await;
    just_before_midnight(pool, WINDOW + Duration::from_secs(1)).await;
    let load = Load::start(&store, callers);
    let begun = load.begun;
    sleep(WINDOW).await;
    let mut transaction = pool.begin().await.unwrap();
    store.reserve_in(&mut transaction, &Reserve::new(Key::new("bench", "held").unwrap())).await.unwrap();
    let (from, mut delayed, mut changed) = (begun.elapsed(), 0, None);
    while begun.elapsed() < from + held {
        let done = store.maintain().await.unwrap();
        assert!(!done.day_changed, "the day changed under an open transaction");
        delayed += u32::from(done.day_delayed);
        // As often as the maintenance task looks again.
        sleep(Duration::from_secs(2)).await;
    }
    let to = begun.elapsed();
    transaction.rollback().await.unwrap();
    while changed.is_none() {
        if store.maintain().await.unwrap().day_changed {
            changed = Some(begun.elapsed() - to);
        }
    }
    let pairs = load.end().await;
    window("before", &pairs, Duration::ZERO, from);
    window("while a transaction is open", &pairs, from, to);
    println!(
        "open for {:.0?}: the change of day was put off {delayed} times, and done {:.2?} after",
        to - from,
        changed.unwrap()
    );
}
