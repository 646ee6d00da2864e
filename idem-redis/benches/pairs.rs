//! Pairs (reserve + complete) a second: `cargo bench -p idem-redis --bench pairs`.
//!
//! Distinct keys, outcomes of 256 bytes, client and server on one machine: a private server, or the one of
//! `IDEM_REDIS_URL` (a single server without a password). Beside the store, in the same run:
//!
//! - with 1,024 callers, how many of the store's own two scripts the server does by itself, as `redis-benchmark -P 64`
//!   drives it: half the harmonic mean of both is what a client could reach at best;
//! - with 64 callers, how many `SET NX PX` a second `redis-benchmark -c 50` does without pipelining;
//! - with one caller, the two raw commands (`SET NX PX`, `SET PX`) through the same driver;
//! - the bytes of memory of a completed record, and of a bare `SET` of the same body under the same name.
//!
//! `IDEM_BENCH_SECONDS` (default 4) is how long each figure is measured, `IDEM_BENCH_ROUNDS` (default 3) how often: the
//! ratios are of figures measured one after the other, and the best round is the one with the least of everybody else's
//! work in it, so all are shown.
#![allow(clippy::print_stdout, clippy::unwrap_used, clippy::panic, reason = "a program for the terminal")]

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use idem_core::{Key, KeyStore, Outcome, Reservation, Reserve};
use idem_redis::redis::aio::MultiplexedConnection;
use idem_redis::redis::{AsyncConnectionConfig, Client, cmd};
use idem_redis::{Config, Policy, RedisStore};
use idem_testkit::servers::RedisServer;

const BODY: [u8; 256] = [b'x'; 256];

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// Scattered, as clients' keys are.
fn id(number: u64) -> String {
    format!("{:016x}-{number:012}", number.wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

static NEXT: AtomicU64 = AtomicU64::new(0);

/// Lets so many callers make pairs, and gives pairs a second and the latencies of pairs, sorted.
async fn measure<F, Fut>(callers: usize, time: Duration, pair: F) -> (f64, Vec<Duration>)
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

async fn by_store(store: Arc<RedisStore>, number: u64) {
    let request = Reserve::new(Key::new("bench", &id(number)).unwrap());
    let Reservation::Acquired(lease) = store.reserve(&request).await.unwrap() else { panic!("not new") };
    store.complete(&lease, &Outcome::new(201, &BODY[..])).await.unwrap();
}

/// The two commands that somebody in a hurry would send.
async fn by_hand(mut connection: MultiplexedConnection, number: u64) {
    let key = format!("idem:5:bench:{}", id(number));
    let mut set = cmd("SET");
    set.arg(&key).arg("held").arg("NX").arg("PX").arg(86_400_000);
    set.query_async::<()>(&mut connection).await.unwrap();
    let mut set = cmd("SET");
    set.arg(&key).arg(&BODY[..]).arg("PX").arg(86_400_000);
    set.query_async::<()>(&mut connection).await.unwrap();
}

/// What `redis-benchmark` reaches with this command, in requests a second.
fn redis_benchmark(port: &str, options: &[&str], command: &[&[u8]]) -> f64 {
    use std::os::unix::ffi::OsStrExt;
    let output = Command::new("redis-benchmark")
        .args(["-p", port, "-q"])
        .args(options)
        .args(command.iter().map(|word| std::ffi::OsStr::from_bytes(word)))
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let before = text.rsplit_once(" requests per second").unwrap_or_else(|| panic!("{text}")).0;
    before.rsplit([' ', ':']).next().unwrap().parse().unwrap()
}

/// Like that double, without a zero byte: `redis-benchmark` takes its arguments from the command line.
fn without_zeros(number: f64) -> [u8; 8] {
    number.to_be_bytes().map(|byte| byte.max(1))
}

/// How many reserves and completes the server does by itself, a second. They take keys at random, so that few are met
/// twice.
async fn scripts_alone(port: &str, connection: &mut MultiplexedConnection, requests: u64) -> (f64, f64) {
    let load = |text: &'static str| {
        let mut command = cmd("SCRIPT");
        command.arg("LOAD").arg(text);
        command
    };
    let reserve: String = load(include_str!("../src/scripts/reserve.lua")).query_async(connection).await.unwrap();
    let settle: String = load(include_str!("../src/scripts/settle.lua")).query_async(connection).await.unwrap();
    let mut fresh = Vec::new();
    for number in [1e-300, 30e6, 86_400e6, 86_400e6, 1e-300] {
        fresh.extend(without_zeros(number));
    }
    // An attempt, a token, the flags of a first retry without a fingerprint, the state.
    fresh.extend(b"\x01\x01\x01\x010123456789abcdef\x02P");
    let outcome = [&b"C\x01\x01\x01\x01\x01"[..], &BODY].concat();
    let name = b"idem:5:bench:0123456789abcdef-__rand_int__";
    let options = |count: u64| {
        [
            "-P".to_owned(),
            "64".to_owned(),
            "-c".to_owned(),
            "16".to_owned(),
            "-n".to_owned(),
            count.to_string(),
            "-r".to_owned(),
        ]
    };
    let run = |count: u64, range: u64, command: &[&[u8]]| {
        let options = options(count);
        let mut options: Vec<&str> = options.iter().map(String::as_str).collect();
        let range = range.to_string();
        options.push(&range);
        redis_benchmark(port, &options, command)
    };
    let reserves: &[&[u8]] = &[b"EVALSHA", reserve.as_bytes(), b"1", name, &fresh, b"86401000"];
    let completes: &[&[u8]] =
        &[b"EVALSHA", settle.as_bytes(), b"1", name, b"0123456789abcdef", b"86400000000", b"86401000", &outcome];
    let reserved = run(requests, 1_000_000_000, reserves);
    cmd("FLUSHALL").query_async::<()>(connection).await.unwrap();
    // Keys to complete: most of the range is reserved, and a quarter of that completed.
    run(requests * 3, requests, reserves);
    let completed = run(requests / 4, requests, completes);
    cmd("FLUSHALL").query_async::<()>(connection).await.unwrap();
    (reserved, completed)
}

async fn memory(connection: &mut MultiplexedConnection, key: &str) -> u64 {
    let mut usage = cmd("MEMORY");
    usage.arg("USAGE").arg(key);
    usage.query_async(connection).await.unwrap()
}

#[tokio::main]
async fn main() {
    // A smoke run: that it works, not how fast.
    let smoke = std::env::args().any(|argument| argument == "--test");
    let server = std::env::var("IDEM_REDIS_URL").is_err().then(|| RedisServer::start(&[]).unwrap());
    let url = server.as_ref().map_or_else(|| std::env::var("IDEM_REDIS_URL").unwrap(), RedisServer::url);
    let port = url.rsplit(':').next().unwrap().to_owned();
    let time = if smoke { Duration::from_millis(200) } else { Duration::from_secs(setting("IDEM_BENCH_SECONDS", 4)) };
    let rounds = if smoke { 1 } else { setting("IDEM_BENCH_ROUNDS", 3) };
    let requests = if smoke { 10_000 } else { 400_000 };
    let client = Client::open(url.as_str()).unwrap();
    let info = client.get_connection_info().clone();
    let tcp = info.tcp_settings().clone().set_nodelay(true);
    let client = Client::open(info.set_tcp_settings(tcp)).unwrap();
    // Emptying the server takes longer than the driver waits by itself.
    let patient = AsyncConnectionConfig::new().set_response_timeout(Some(Duration::from_secs(60)));
    let mut connection = client.get_multiplexed_async_connection_with_config(&patient).await.unwrap();
    let store = RedisStore::connect(&url, Config::default().with_on_data_loss(Policy::Ignore)).await.unwrap();
    let store = Arc::new(store);
    let show = |callers: usize, name: &str, rate: f64, latencies: &[Duration]| {
        let at = |share: f64| latencies[((latencies.len() - 1) as f64 * share) as usize];
        println!("{callers:>6} {name:<34} {rate:>10.0}/s  p50 {:>9.2?}  p99 {:>9.2?}", at(0.5), at(0.99));
    };
    for round in 1..=rounds {
        println!("round {round}");
        cmd("FLUSHALL").query_async::<()>(&mut connection).await.unwrap();

        let hand = connection.clone();
        let (rate, raw) = measure(1, time, move |number| by_hand(hand.clone(), number)).await;
        show(1, "raw SET NX PX + SET PX", rate, &raw);
        let idem = store.clone();
        let (rate, own) = measure(1, time, move |number| by_store(idem.clone(), number)).await;
        show(1, "idem pairs", rate, &own);
        let p50 = |latencies: &[Duration]| latencies[latencies.len() / 2].as_secs_f64();
        println!("{:>6} latency, idem / raw (p50)          {:>10.2}", "", p50(&own) / p50(&raw));

        cmd("FLUSHALL").query_async::<()>(&mut connection).await.unwrap();
        let count = (requests / 2).to_string();
        let set: &[&[u8]] =
            &[b"SET", b"idem:5:bench:0123456789abcdef-__rand_int__", b"held", b"NX", b"PX", b"86400000"];
        let unpipelined = redis_benchmark(&port, &["-c", "50", "-n", &count, "-r", "1000000000"], set);
        println!("{:>6} {:<34} {unpipelined:>10.0}/s", 50, "redis-benchmark SET NX PX");
        let idem = store.clone();
        let (rate, latencies) = measure(64, time, move |number| by_store(idem.clone(), number)).await;
        show(64, "idem pairs", rate, &latencies);
        println!("{:>6} pairs per SET NX PX                 {:>10.2}", "", rate / unpipelined);

        cmd("FLUSHALL").query_async::<()>(&mut connection).await.unwrap();
        let (reserves, completes) = scripts_alone(&port, &mut connection, requests).await;
        println!("{:>6} {:<34} {reserves:>10.0}/s", "", "redis-benchmark -P 64, reserve");
        println!("{:>6} {:<34} {completes:>10.0}/s", "", "redis-benchmark -P 64, complete");
        let ceiling = 1.0 / (1.0 / reserves + 1.0 / completes);
        let idem = store.clone();
        let (rate, latencies) = measure(1_024, time, move |number| by_store(idem.clone(), number)).await;
        show(1_024, "idem pairs", rate, &latencies);
        println!("{:>6} pairs, idem / the scripts alone      {:>10.2}", "", rate / ceiling);
    }
    cmd("FLUSHALL").query_async::<()>(&mut connection).await.unwrap();
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    by_store(store, number).await;
    let key = format!("idem:5:bench:{}", id(number));
    let record = memory(&mut connection, &key).await;
    cmd("SET").arg(&key).arg(&BODY[..]).arg("PX").arg(86_400_000).query_async::<()>(&mut connection).await.unwrap();
    let bare = memory(&mut connection, &key).await;
    println!("memory of a completed record: {record} bytes; of a bare SET of the same body: {bare} bytes");
}
