//! Speed of the in-memory store by the number of records it holds: `cargo bench -p idem-core --bench memory`.
//!
//! Two threads, each driving its futures by polling them once: the in-memory store never waits, so there is no runtime
//! in the figures. An operation is everything a caller does: it makes the key, the token, the request and, for a pair
//! (reserve + complete), a body of 256 bytes of its own. Keys are unique for pairs and drawn at random for replays.
//! Rates are totals over both threads.
//!
//! - `pairs`: on top of the records held; what has been added is taken away again, outside of the measurement.
//! - `pairs_expiring`: as many records expire as are added, so each reserve sweeps too.
//! - `replays`: a reserve of a completed key, drawn from all: it waits for the machine's memory some five times.
//! - `replays_recent`: drawn from the latest 10,000, as repeats mostly come soon.
//! - `map_...`: the same keys and bodies in plain `HashMap`s behind as many locks, for scale: an insert
//!   and a second look-up, and a look-up. It grows with the number of records as the machine's memory does.
//!
//! `IDEM_BENCH_RECORDS` (comma-separated) chooses the numbers of records. The default needs 8 GB of memory.
#![allow(missing_docs, clippy::panic, clippy::unwrap_used)]

use std::collections::HashMap;
use std::future::Future;
use std::hash::{BuildHasher, RandomState};
use std::hint::black_box;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant, SystemTime};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use idem_core::clock::{Clock, MonotonicClock};
use idem_core::{Body, Key, KeyStore, MemoryStore, Outcome, PurgeBudget, Reservation, Reserve};

const THREADS: u64 = 2;
const BODY: usize = 256;
const KEPT: Duration = Duration::from_secs(300 * 24 * 60 * 60);
const SHORT: Duration = Duration::from_secs(60);
/// Keys of pairs, beyond those of any record that is held.
const NEW: u64 = 1 << 40;

fn ready<F: Future>(future: F) -> F::Output {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("the in-memory store waits"),
    }
}

/// The real clock, which the bench can move on.
#[derive(Debug, Default)]
struct Shifted {
    clock: MonotonicClock,
    seconds: AtomicU64,
}

impl Clock for Shifted {
    fn now(&self) -> SystemTime {
        self.clock.now() + Duration::from_secs(self.seconds.load(Ordering::Relaxed))
    }
}

impl Shifted {
    fn advance(&self, by: Duration) {
        self.seconds.fetch_add(by.as_secs(), Ordering::Relaxed);
    }
}

/// An id of 22 bytes; scrambled, so that neighbours in number are none in the table.
fn id(number: u64) -> [u8; 22] {
    let mut id = *b"order-0000000000000000";
    let scrambled = scramble(number);
    for (digit, byte) in id[6..].iter_mut().enumerate() {
        *byte = b"0123456789abcdef"[(scrambled >> (4 * digit)) as usize & 15];
    }
    id
}

/// A bijection that looks random.
fn scramble(number: u64) -> u64 {
    let mut x = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Something that holds a body under a key.
trait Subject: Sync {
    fn pair(&self, id: &str, retention: Duration);
    fn replay(&self, id: &str);
    /// Ends the life of what was added with a short retention.
    fn expire(&self);
    /// Takes away what has expired; `added` are the numbers of the keys.
    fn clear(&self, added: std::ops::Range<u64>);
}

struct Store {
    store: MemoryStore,
    clock: Arc<Shifted>,
}

impl Store {
    fn new() -> Self {
        let clock = Arc::new(Shifted::default());
        Self { store: MemoryStore::builder().clock(clock.clone()).build(), clock }
    }
}

impl Subject for Store {
    fn pair(&self, id: &str, retention: Duration) {
        let request = Reserve::new(Key::new("tenant-7", id).unwrap()).with_retention(retention);
        let Reservation::Acquired(lease) = ready(self.store.reserve(&request)).unwrap() else { panic!("not new") };
        let outcome = Outcome::new(200, vec![7; BODY]);
        ready(self.store.complete(&lease, &outcome)).unwrap();
    }

    fn replay(&self, id: &str) {
        let request = Reserve::new(Key::new("tenant-7", id).unwrap());
        let Reservation::Completed(record) = ready(self.store.reserve(&request)).unwrap() else { panic!("not there") };
        let Some(Body::Stored(body)) = record.outcome().map(|outcome| &outcome.body) else { panic!("no body") };
        assert_eq!(body[BODY - 1], 7);
    }

    fn expire(&self) {
        self.clock.advance(SHORT);
    }

    fn clear(&self, _: std::ops::Range<u64>) {
        while ready(self.store.purge_expired(PurgeBudget::records(100_000))).unwrap().more {}
    }
}

struct Map {
    shards: Vec<Mutex<HashMap<String, Arc<[u8]>>>>,
    hasher: RandomState,
}

impl Map {
    fn new() -> Self {
        Self { shards: (0..1024).map(|_| Mutex::default()).collect(), hasher: RandomState::new() }
    }

    fn shard(&self, id: &str) -> &Mutex<HashMap<String, Arc<[u8]>>> {
        &self.shards[(self.hasher.hash_one(id) >> 32) as usize % self.shards.len()]
    }
}

impl Subject for Map {
    fn pair(&self, id: &str, _: Duration) {
        self.shard(id).lock().unwrap().insert(format!("tenant-7{id}"), Arc::new([]));
        let body: Arc<[u8]> = Arc::new([7; BODY]);
        *self.shard(id).lock().unwrap().get_mut(&format!("tenant-7{id}")).unwrap() = body;
    }

    fn replay(&self, id: &str) {
        let body = self.shard(id).lock().unwrap().get(&format!("tenant-7{id}")).cloned().unwrap();
        assert_eq!(body[BODY - 1], 7);
    }

    fn expire(&self) {}

    fn clear(&self, added: std::ops::Range<u64>) {
        for number in added {
            let id = id(number);
            let id = std::str::from_utf8(&id).unwrap();
            self.shard(id).lock().unwrap().remove(&format!("tenant-7{id}"));
        }
    }
}

/// Runs that many operations on the threads together, and takes the time of the slowest.
fn timed(operations: u64, operation: impl Fn(u64) + Sync) -> Duration {
    let start = Barrier::new(THREADS as usize);
    let mine = |thread| {
        start.wait();
        let begun = Instant::now();
        (thread..operations).step_by(THREADS as usize).for_each(&operation);
        begun.elapsed()
    };
    std::thread::scope(|threads| {
        let threads: Vec<_> = (0..THREADS).map(|thread| threads.spawn(move || mine(thread))).collect::<Vec<_>>();
        threads.into_iter().map(|thread| thread.join().unwrap()).max().unwrap_or_default()
    })
}

fn with_id(number: u64, call: impl FnOnce(&str)) {
    call(std::str::from_utf8(&id(number)).unwrap());
}

fn pairs(subject: &impl Subject, next: &AtomicU64, batch: u64, operations: u64, clear: bool) -> Duration {
    let (mut done, mut time) = (0, Duration::ZERO);
    while done < operations {
        let count = batch.min(operations - done);
        let first = next.fetch_add(count, Ordering::Relaxed);
        time += timed(count, |number| with_id(first + number, |id| subject.pair(id, SHORT)));
        subject.expire();
        if clear {
            subject.clear(first..first + count);
        }
        done += count;
    }
    time
}

fn measure(criterion: &mut Criterion, subject: &impl Subject, prefix: &str, records: u64) {
    timed(records, |number| with_id(number, |id| subject.pair(id, KEPT)));
    let next = AtomicU64::new(NEW);
    // The same for every number of records, so that what is added takes the same room: enough that starting threads
    // does not count.
    let batch = 20_000;
    let mut group = criterion.benchmark_group("memory");
    group.throughput(Throughput::Elements(1)).sample_size(10).warm_up_time(Duration::from_millis(500));
    group.measurement_time(Duration::from_secs(2));
    for (name, latest) in [("replays", records), ("replays_recent", records.min(10_000))] {
        group.bench_function(BenchmarkId::new(format!("{prefix}{name}"), records), |bencher| {
            bencher.iter_custom(|operations| {
                let seed = scramble(next.fetch_add(1, Ordering::Relaxed));
                timed(operations, |number| {
                    with_id(records - 1 - scramble(seed ^ number) % latest, |id| subject.replay(black_box(id)));
                })
            });
        });
    }
    group.bench_function(BenchmarkId::new(format!("{prefix}pairs"), records), |bencher| {
        bencher.iter_custom(|operations| pairs(subject, &next, batch, operations, true));
    });
    if prefix.is_empty() {
        group.bench_function(BenchmarkId::new("pairs_expiring", records), |bencher| {
            bencher.iter_custom(|operations| pairs(subject, &next, batch, operations, false));
        });
    }
    group.finish();
}

fn memory(criterion: &mut Criterion) {
    let chosen = std::env::var("IDEM_BENCH_RECORDS").unwrap_or_else(|_| "10000,100000,1000000,5000000".to_owned());
    for records in chosen.split(',').map(|number| number.trim().parse().unwrap()) {
        measure(criterion, &Store::new(), "", records);
        measure(criterion, &Map::new(), "map_", records);
    }
}

criterion_group!(benches, memory);
criterion_main!(benches);
