//! Harnesses of the stores in this workspace that need no server.
#![allow(dead_code, reason = "each test binary uses some")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::clock::ManualClock;
use idem_core::{Cached, KeyStore, MemoryStore};
use idem_testkit::{Abilities, Fixture, Harness, HarnessError, Noisy, Time};

/// The in-memory store, with a clock that moves only when told to.
pub(crate) struct Memory;

/// The in-memory store behind a bad network.
pub(crate) struct NoisyMemory;

/// The near-cache in front of the in-memory store, both by one clock.
pub(crate) struct CachedMemory;

struct Clocked {
    store: Arc<dyn KeyStore>,
    clock: Arc<ManualClock>,
}

#[async_trait]
impl Fixture for Clocked {
    fn store(&self) -> Arc<dyn KeyStore> {
        self.store.clone()
    }

    async fn advance(&self, by: Duration) -> Result<(), HarnessError> {
        self.clock.advance(by);
        Ok(())
    }
}

fn memory() -> (Arc<ManualClock>, Arc<MemoryStore>) {
    let clock = Arc::new(ManualClock::default());
    (clock.clone(), Arc::new(MemoryStore::builder().clock(clock).build()))
}

#[async_trait]
impl Harness for Memory {
    fn name(&self) -> String {
        "memory".to_owned()
    }

    fn abilities(&self) -> Abilities {
        Abilities::default().with_time(Time::Manual)
    }

    async fn build(&self) -> Result<Box<dyn Fixture>, HarnessError> {
        let (clock, store) = memory();
        Ok(Box::new(Clocked { store, clock }))
    }
}

#[async_trait]
impl Harness for NoisyMemory {
    fn name(&self) -> String {
        "noisy memory".to_owned()
    }

    fn abilities(&self) -> Abilities {
        Abilities::default().with_time(Time::Manual)
    }

    async fn build(&self) -> Result<Box<dyn Fixture>, HarnessError> {
        let (clock, store) = memory();
        static SEED: AtomicU64 = AtomicU64::new(0);
        let seed = SEED.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(Clocked { store: Arc::new(Noisy::new(store, seed)), clock }))
    }
}

#[async_trait]
impl Harness for CachedMemory {
    fn name(&self) -> String {
        "cached memory".to_owned()
    }

    fn abilities(&self) -> Abilities {
        Abilities::default().with_time(Time::Manual)
    }

    async fn build(&self) -> Result<Box<dyn Fixture>, HarnessError> {
        let (clock, store) = memory();
        let store = Cached::builder(store).clock(clock.clone()).build();
        Ok(Box::new(Clocked { store: Arc::new(store), clock }))
    }
}
