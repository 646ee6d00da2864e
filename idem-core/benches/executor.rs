//! What `Executor::run` adds to reserve and complete by hand, for an operation that does nothing, under unique keys.
//!
//! `cargo bench -p idem-core --bench executor`
//!
//! Both are timed in turns, a few hundred calls each, so that what else the machine does befalls both; `added` is the
//! difference.

#![allow(missing_docs, clippy::expect_used)]

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use idem_core::{Executor, Key, KeyStore, MemoryStore, Outcome, Reservation, Reserve};
use tokio::runtime::{Builder, Runtime};

/// Calls timed in one go.
const TURN: u64 = 500;
/// Records expire while the benchmark runs, so that the table stays small: it is not what is measured.
const RETENTION: Duration = Duration::from_secs(1);

/// A figure from the time by hand and the time by `run`.
type Figure = fn(Duration, Duration) -> Duration;

fn keys(count: u64) -> Vec<Key> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let first = NEXT.fetch_add(count, Ordering::Relaxed);
    (first..first + count).map(|id| Key::new("bench", &id.to_string()).expect("the key is valid")).collect()
}

async fn by_hand(store: &MemoryStore, keys: &[Key]) -> Duration {
    let begun = Instant::now();
    for key in keys {
        let request = Reserve::new(key.clone()).with_lease(RETENTION).with_retention(RETENTION);
        let Ok(Reservation::Acquired(lease)) = store.reserve(&request).await else { unreachable!("the key is new") };
        store.complete(&lease, &Outcome::new(0, "1")).await.expect("it is held");
    }
    begun.elapsed()
}

async fn run(executor: &Executor, keys: &[Key]) -> Duration {
    let begun = Instant::now();
    for key in keys {
        executor.run(key, None, |_| async { Ok::<_, Infallible>(1_u64) }).await.expect("the key is new");
    }
    begun.elapsed()
}

fn runtimes() -> [(&'static str, Runtime); 2] {
    let built = "a runtime can be built";
    [
        ("current_thread", Builder::new_current_thread().enable_time().build().expect(built)),
        ("multi_thread", Builder::new_multi_thread().worker_threads(2).enable_time().build().expect(built)),
    ]
}

fn overhead(criterion: &mut Criterion) {
    let figures: [(&str, Figure); 3] = [
        ("by_hand", |by_hand, _| by_hand),
        ("run", |_, run| run),
        ("added", |by_hand, run| run.saturating_sub(by_hand).max(Duration::from_nanos(1))),
    ];
    for (name, runtime) in runtimes() {
        let store = Arc::new(MemoryStore::builder().max_records(usize::MAX).build());
        let executor = Executor::builder(Arc::clone(&store)).lease(RETENTION).retention(RETENTION).build();
        let executor = executor.expect("the settings are valid");
        let mut group = criterion.benchmark_group(format!("executor/{name}"));
        for (figure, choose) in figures {
            group.bench_function(figure, |bencher| {
                bencher.to_async(&runtime).iter_custom(|calls| {
                    let (store, executor) = (Arc::clone(&store), executor.clone());
                    async move {
                        let (mut without, mut with) = (Duration::ZERO, Duration::ZERO);
                        let mut left = calls;
                        while left > 0 {
                            let turn = left.min(TURN);
                            left -= turn;
                            without += by_hand(&store, &keys(turn)).await;
                            with += run(&executor, &keys(turn)).await;
                        }
                        choose(without, with)
                    }
                });
            });
        }
        group.finish();
    }
}

criterion_group!(benches, overhead);
criterion_main!(benches);
