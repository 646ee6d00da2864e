//! Pairs (reserve + complete) a second: `cargo bench -p idem-fdb --bench pairs`.
//!
//! Distinct keys, outcomes of 256 bytes, client and server on one machine: a private cluster of one process with the engine
//! `memory`, or the one of `IDEM_FDB_CLUSTER_FILE`. Beside the store, in the same run, through the same driver's retry loop: two
//! plain transactions, each of which gets a key and sets it to a value as large as the store's.
//!
//! `IDEM_BENCH_SECONDS` (default 4) is how long each figure is measured, `IDEM_BENCH_ROUNDS` (default 3) how often.
#![allow(clippy::print_stdout, clippy::unwrap_used, clippy::panic, reason = "a program for the terminal")]

#[cfg(not(fdb_client))]
fn main() {
    println!("not run: FoundationDB's client library was not found when this was built");
    assert!(!std::env::var("IDEM_REQUIRE").is_ok_and(|names| names.split(',').any(|name| name == "fdb")), "required");
}

#[cfg(fdb_client)]
fn main() {
    measured::main();
}

#[cfg(fdb_client)]
mod measured {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::{Duration, Instant};

    use idem_core::{Key, KeyStore, Outcome, Reservation, Reserve};
    use idem_fdb::foundationdb::Database;
    use idem_fdb::foundationdb::tuple::Subspace;
    use idem_fdb::{Config, FdbStore};
    use idem_testkit::servers::FdbCluster;

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

    async fn by_store(store: Arc<FdbStore>, number: u64) {
        let request = Reserve::new(Key::new("bench", &id(number)).unwrap());
        let Reservation::Acquired(lease) = store.reserve(&request).await.unwrap() else { panic!("not new") };
        store.complete(&lease, &Outcome::new(201, &BODY[..])).await.unwrap();
    }

    /// What somebody would do who needs none of the rules.
    async fn by_hand(database: Arc<Database>, subspace: Subspace, sizes: [usize; 2], number: u64) {
        let place = &subspace.pack(&("bench", id(number)));
        for (step, size) in sizes.into_iter().enumerate() {
            database
                .run(|transaction, _| async move {
                    let found = transaction.get(place, false).await?;
                    assert_eq!(found.is_some(), step > 0);
                    transaction.set(place, &vec![b'x'; size]);
                    Ok(())
                })
                .await
                .unwrap();
        }
    }

    #[tokio::main]
    pub(crate) async fn main() {
        // A smoke run: that it works, not how fast.
        let smoke = std::env::args().any(|argument| argument == "--test");
        let given = std::env::var("IDEM_FDB_CLUSTER_FILE").ok();
        let cluster = given.is_none().then(|| FdbCluster::start().unwrap());
        let file = given.map_or_else(|| cluster.as_ref().unwrap().cluster_file(), Into::into);
        let time = if smoke { 200 } else { 1_000 * setting("IDEM_BENCH_SECONDS", 4) };
        let time = Duration::from_millis(time);
        let rounds = if smoke { 1 } else { setting("IDEM_BENCH_ROUNDS", 3) };
        let begun = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_micros() as u64;
        let mine = Subspace::from(("idem-bench", begun));
        let config = Config::default().with_subspace(mine.subspace(&"idem"));
        let store = Arc::new(FdbStore::open(Some(&file), config).await.unwrap());
        // The bytes of a record in progress and of a completed one, without key: see `codec`.
        let sizes = [2 + 70, 2 + 70 + 9 + BODY.len()];
        for round in 1..=rounds {
            println!("round {round}");
            for callers in [1, 64, 1_024] {
                let show = |name: &str, rate: f64, latencies: &[Duration]| {
                    let at = |share: f64| latencies[((latencies.len() - 1) as f64 * share) as usize];
                    println!("{callers:>6} {name:<20} {rate:>8.0}/s  p50 {:>9.2?}  p99 {:>9.2?}", at(0.5), at(0.99));
                };
                let (database, subspace) = (store.database().clone(), mine.subspace(&"plain"));
                let plain =
                    measure(callers, time, move |number| by_hand(database.clone(), subspace.clone(), sizes, number))
                        .await;
                show("plain get + set", plain.0, &plain.1);
                let idem = store.clone();
                let own = measure(callers, time, move |number| by_store(idem.clone(), number)).await;
                show("idem pairs", own.0, &own.1);
                println!("{:>6} idem / plain         {:>8.2}", "", own.0 / plain.0);
            }
        }
    }
}
