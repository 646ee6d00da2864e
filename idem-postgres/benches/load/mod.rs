//! What the benchmarks share: the server, the keys, and callers that make pairs.
#![allow(
    dead_code,
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::panic,
    reason = "a program for the terminal; each uses some"
)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use idem_core::{Key, KeyStore, Outcome, Reservation, Reserve};
use idem_postgres::PostgresStore;
use idem_postgres::sqlx::{self, AssertSqlSafe, PgPool};
use idem_testkit::servers::PostgresServer;

pub(crate) const BODY: [u8; 256] = [7; 256];

/// Numbers with commas between them, of an environment variable.
pub(crate) fn setting<T: std::str::FromStr>(name: &str, default: &str) -> Vec<T>
where
    T::Err: std::fmt::Debug,
{
    let text = std::env::var(name).unwrap_or_else(|_| default.to_owned());
    text.split(',').map(|part| part.trim().parse().unwrap()).collect()
}

/// A smoke run: that it works, not how fast.
pub(crate) fn is_smoke() -> bool {
    std::env::args().any(|argument| argument == "--test")
}

/// The server of `IDEM_POSTGRES_URL`, or a private one, and its URL.
pub(crate) fn server() -> (Option<PostgresServer>, String) {
    match std::env::var("IDEM_POSTGRES_URL") {
        Ok(url) => (None, url),
        Err(_) => {
            let server = PostgresServer::start(&[]).unwrap();
            let url = server.url();
            (Some(server), url)
        }
    }
}

/// Pairs made, in what time, and how long each took.
#[derive(Default, Clone)]
pub(crate) struct Measured {
    time: Duration,
    latencies: Vec<Duration>,
}

impl Measured {
    pub(crate) fn add(&mut self, other: Self) {
        self.time += other.time;
        self.latencies.extend(other.latencies);
    }

    /// Pairs a second.
    pub(crate) fn rate(&self) -> f64 {
        self.latencies.len() as f64 / self.time.as_secs_f64()
    }

    pub(crate) fn mean(&self) -> Duration {
        self.latencies.iter().sum::<Duration>() / u32::try_from(self.latencies.len()).unwrap().max(1)
    }

    pub(crate) fn percentile(&mut self, share: f64) -> Duration {
        self.latencies.sort_unstable();
        self.latencies[((self.latencies.len() - 1) as f64 * share) as usize]
    }
}

/// Lets so many callers make pairs for that long.
pub(crate) async fn measure<F, Fut>(callers: usize, time: Duration, pair: F) -> Measured
where
    F: Fn(u64) -> Fut + Clone + Send + 'static,
    Fut: Future<Output = ()> + Send,
{
    let begun = Instant::now();
    let tasks: Vec<_> = (0..callers)
        .map(|_| {
            let pair = pair.clone();
            tokio::spawn(async move {
                let mut latencies = Vec::new();
                while begun.elapsed() < time {
                    let start = Instant::now();
                    pair(next()).await;
                    latencies.push(start.elapsed());
                }
                latencies
            })
        })
        .collect();
    let mut latencies = Vec::new();
    for task in tasks {
        latencies.extend(task.await.unwrap());
    }
    Measured { time: begun.elapsed(), latencies }
}

/// A number that was not given before.
pub(crate) fn next() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Scattered, as clients' keys are.
pub(crate) fn id(number: u64) -> String {
    format!("{:016x}-{number}", number.wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

pub(crate) async fn by_store(store: Arc<PostgresStore>, number: u64) {
    let request = Reserve::new(Key::new("bench", &id(number)).unwrap());
    let Reservation::Acquired(lease) = store.reserve(&request).await.unwrap() else { panic!("not new") };
    store.complete(&lease, &Outcome::new(201, &BODY[..])).await.unwrap();
}

/// Puts records in a day's partition as the store would have: in progress, then completed, which is where their bodies
/// come in. `day` and `created` are expressions of SQL.
pub(crate) async fn fill(pool: &PgPool, schema: &str, day: &str, ids: std::ops::RangeInclusive<i64>, created: &str) {
    let sql = format!(
        "INSERT INTO {schema}.records (day, scope, id, state, attempt, token, origin, retention, created_at, started_at, \
             updated_at, lease_until, expires_at) \
         SELECT {day}, 'filled', md5(i::text), 'in progress', 1, gen_random_uuid(), 'fresh', '24 h', t, t, t, t, \
             t + interval '24 h' FROM generate_series({}, {}) i, (SELECT {created} AS t) times; \
         UPDATE {schema}.records SET state = 'completed', code = 201, body = '\\x{}' \
         WHERE scope = 'filled' AND state = 'in progress'",
        ids.start(),
        ids.end(),
        "07".repeat(BODY.len())
    );
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(pool).await.unwrap();
    sqlx::raw_sql("CHECKPOINT").execute(pool).await.unwrap();
}
