//! What `Executor::run` adds to reserve and complete by hand, for an operation that does nothing, under unique keys.
//!
//! `cargo bench -p idem-core --bench executor`

#![allow(missing_docs, clippy::expect_used)]

use std::convert::Infallible;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use idem_core::{Executor, Key, KeyStore, MemoryStore, Outcome, Reservation, Reserve};
use tokio::runtime::{Builder, Runtime};

fn store() -> Arc<MemoryStore> {
    Arc::new(MemoryStore::builder().max_records(usize::MAX).build())
}

/// Records expire while the benchmark runs, so that the table stays small and is not what is measured.
const RETENTION: Duration = Duration::from_secs(1);
const LEASE: Duration = Duration::from_secs(1);

fn runtimes() -> [(&'static str, Runtime); 2] {
    let built = "a runtime can be built";
    [
        ("current_thread", Builder::new_current_thread().enable_time().build().expect(built)),
        ("multi_thread", Builder::new_multi_thread().worker_threads(2).enable_time().build().expect(built)),
    ]
}

fn overhead(criterion: &mut Criterion) {
    let next = AtomicU64::new(0);
    let key = || Key::new("bench", &next.fetch_add(1, Ordering::Relaxed).to_string()).expect("the key is valid");
    for (name, runtime) in runtimes() {
        let mut group = criterion.benchmark_group(format!("executor/{name}"));
        let by_hand = store();
        group.bench_function("by_hand", |bencher| {
            bencher.to_async(&runtime).iter_batched(
                key,
                |key| async {
                    let request = Reserve::new(key).with_lease(LEASE).with_retention(RETENTION);
                    match by_hand.reserve(&request).await {
                        Ok(Reservation::Acquired(lease)) => by_hand.complete(&lease, &Outcome::new(0, "1")).await,
                        other => unreachable!("{other:?}"),
                    }
                },
                BatchSize::SmallInput,
            );
        });
        let executor =
            Executor::builder(store()).lease(LEASE).retention(RETENTION).build().expect("the settings are valid");
        group.bench_function("run", |bencher| {
            bencher.to_async(&runtime).iter_batched(
                key,
                |key| {
                    let executor = executor.clone();
                    async move { black_box(executor.run(&key, None, |_| async { Ok::<_, Infallible>(1_u64) }).await) }
                },
                BatchSize::SmallInput,
            );
        });
        group.finish();
    }
}

criterion_group!(benches, overhead);
criterion_main!(benches);
