//! The kit where nobody can move the clock: the cases wait, and judge by the same rules.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::{KeyStore, MemoryStore};
use idem_testkit::{Abilities, Fixture, Harness, HarnessError, Noisy, case_names, run_disturbed_histories, run_one};

/// The in-memory store by its own clock.
struct Waiting;

struct Fresh(Arc<MemoryStore>);

#[async_trait]
impl Harness for Waiting {
    fn name(&self) -> String {
        "memory in real time".to_owned()
    }

    async fn build(&self) -> Result<Box<dyn Fixture>, HarnessError> {
        Ok(Box::new(Fresh(Arc::new(MemoryStore::new()))))
    }
}

#[async_trait]
impl Fixture for Fresh {
    fn store(&self) -> Arc<dyn KeyStore> {
        self.0.clone()
    }
}

#[test]
fn a_sound_store_passes_every_case_in_real_time() {
    let names: Vec<_> = case_names().collect();
    let (next, ran) = (AtomicUsize::new(0), AtomicUsize::new(0));
    // They wait most of the time.
    std::thread::scope(|threads| {
        for _ in 0..24 {
            threads.spawn(|| {
                while let Some(name) = names.get(next.fetch_add(1, Ordering::SeqCst)) {
                    match run_one(&Waiting, name) {
                        Ok(()) => drop(ran.fetch_add(1, Ordering::SeqCst)),
                        Err(report) if report.found.contains("the harness lacks") => {}
                        Err(report) => panic!("{report}"),
                    }
                }
            });
        }
    });
    assert!(ran.load(Ordering::SeqCst) > 60);
}

/// The in-memory store behind a bad network, with disturbances that take their time.
struct Disturbed;

struct Troubled(Arc<Noisy>);

#[async_trait]
impl Harness for Disturbed {
    fn name(&self) -> String {
        "noisy memory in real time".to_owned()
    }

    fn abilities(&self) -> Abilities {
        Abilities::default().with_disturb()
    }

    async fn build(&self) -> Result<Box<dyn Fixture>, HarnessError> {
        Ok(Box::new(Troubled(Arc::new(Noisy::new(Arc::new(MemoryStore::new()), 7)))))
    }
}

#[async_trait]
impl Fixture for Troubled {
    fn store(&self) -> Arc<dyn KeyStore> {
        self.0.clone()
    }

    async fn disturb(&self) -> Result<(), HarnessError> {
        tokio::time::sleep(Duration::from_millis(700)).await;
        Ok(())
    }
}

/// Time goes on while the store is in trouble: calls may be anywhere around the edges of leases, and stay decidable.
#[test]
fn histories_under_disturbance_can_be_told_in_real_time() {
    run_disturbed_histories(&Disturbed, 3).unwrap_or_else(|report| panic!("{report}"));
}
