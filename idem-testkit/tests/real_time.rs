//! The kit where nobody can move the clock: the cases wait, and judge by the same rules.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use idem_core::{KeyStore, MemoryStore};
use idem_testkit::{Fixture, Harness, HarnessError, case_names, run_one};

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
