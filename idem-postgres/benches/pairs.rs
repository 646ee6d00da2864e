//! Pairs (reserve + complete) a second: `cargo bench -p idem-postgres --bench pairs`.
//!
//! Distinct keys, outcomes of 256 bytes, `fsync` and `synchronous_commit` on, client and server on one machine: a private
//! server, or the one of `IDEM_POSTGRES_URL`. Beside the store, in the same run and through the same pool, what a team
//! would write by hand: one `INSERT … ON CONFLICT` and one `UPDATE` for each request, on one plain table.
//!
//! `IDEM_BENCH_SECONDS` (default 5) is how long each figure is measured, `IDEM_BENCH_CALLERS` (default 1,64,1024) with how
//! many callers.
#![allow(clippy::print_stdout, clippy::unwrap_used, clippy::panic, reason = "a program for the terminal")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use idem_core::{Key, KeyStore, Outcome, Reservation, Reserve};
use idem_postgres::sqlx::postgres::{PgPool, PgPoolOptions};
use idem_postgres::sqlx::{self};
use idem_postgres::{Config, PostgresStore};
use idem_testkit::servers::PostgresServer;

const BODY: [u8; 256] = [7; 256];

fn setting<T: std::str::FromStr>(name: &str, default: &str) -> Vec<T>
where
    T::Err: std::fmt::Debug,
{
    let text = std::env::var(name).unwrap_or_else(|_| default.to_owned());
    text.split(',').map(|part| part.trim().parse().unwrap()).collect()
}

/// Lets so many callers make pairs, and gives pairs a second and the latencies of pairs, sorted.
async fn measure<F, Fut>(callers: usize, time: Duration, pair: F) -> (f64, Vec<Duration>)
where
    F: Fn(u64) -> Fut + Clone + Send + 'static,
    Fut: Future<Output = ()> + Send,
{
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let begun = Instant::now();
    let tasks: Vec<_> = (0..callers)
        .map(|_| {
            let pair = pair.clone();
            tokio::spawn(async move {
                let mut latencies = Vec::new();
                while begun.elapsed() < time {
                    let start = Instant::now();
                    pair(NEXT.fetch_add(1, Ordering::Relaxed)).await;
                    latencies.push(start.elapsed());
                }
                latencies
            })
        })
        .collect();
    let mut all = Vec::new();
    for task in tasks {
        all.extend(task.await.unwrap());
    }
    let rate = all.len() as f64 / begun.elapsed().as_secs_f64();
    all.sort_unstable();
    (rate, all)
}

/// Scattered, as clients' keys are.
fn id(number: u64) -> String {
    format!("{:016x}-{number}", number.wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

async fn by_hand(pool: PgPool, number: u64) {
    let id = id(number);
    sqlx::query("INSERT INTO by_hand (id, state, expires_at) VALUES ($1, 1, now() + interval '1 day') ON CONFLICT (id) DO NOTHING")
        .bind(&id)
        .execute(&pool)
        .await
        .unwrap();
    sqlx::query("UPDATE by_hand SET state = 2, code = 201, body = $2 WHERE id = $1 AND state = 1")
        .bind(&id)
        .bind(&BODY[..])
        .execute(&pool)
        .await
        .unwrap();
}

async fn by_store(store: Arc<PostgresStore>, number: u64) {
    let request = Reserve::new(Key::new("bench", &id(number)).unwrap());
    let Reservation::Acquired(lease) = store.reserve(&request).await.unwrap() else { panic!("not new") };
    store.complete(&lease, &Outcome::new(201, &BODY[..])).await.unwrap();
}

#[tokio::main]
async fn main() {
    // A smoke run: that it works, not how fast.
    let smoke = std::env::args().any(|argument| argument == "--test");
    let server = std::env::var("IDEM_POSTGRES_URL").is_err().then(|| PostgresServer::start(&[]).unwrap());
    let url = server.as_ref().map_or_else(|| std::env::var("IDEM_POSTGRES_URL").unwrap(), PostgresServer::url);
    let time = Duration::from_secs(setting("IDEM_BENCH_SECONDS", if smoke { "1" } else { "5" })[0]);
    let pool = PgPoolOptions::new().max_connections(16).connect(&url).await.unwrap();
    sqlx::raw_sql(
        "DROP TABLE IF EXISTS by_hand; \
         CREATE TABLE by_hand (id text PRIMARY KEY, state int, code int, body bytea, expires_at timestamptz)",
    )
    .execute(&pool)
    .await
    .unwrap();
    let config = Config::default();
    PostgresStore::migrate(&pool, &config).await.unwrap();
    let store = Arc::new(PostgresStore::open(pool.clone(), config).await.unwrap());
    println!("{:>8} {:>10} {:>12} {:>10} {:>10}", "callers", "", "pairs/s", "p50", "p99");
    for callers in setting("IDEM_BENCH_CALLERS", if smoke { "8" } else { "1,64,1024" }) {
        let mut rates = Vec::new();
        let line = |name: &str, (rate, latencies): (f64, Vec<Duration>)| {
            let at = |share: f64| latencies[((latencies.len() - 1) as f64 * share) as usize];
            println!("{callers:>8} {name:>10} {rate:>12.0} {:>10.2?} {:>10.2?}", at(0.5), at(0.99));
            rate
        };
        let hand = pool.clone();
        rates.push(line("by hand", measure(callers, time, move |number| by_hand(hand.clone(), number)).await));
        let idem = store.clone();
        rates.push(line("idem", measure(callers, time, move |number| by_store(idem.clone(), number)).await));
        println!("{callers:>8} {:>10} {:>12.2}", "ratio", rates[1] / rates[0]);
    }
}
