//! What the tests of the executor share.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::clock::ManualClock;
use idem_core::{
    Capabilities, ErrorKind, Failure, Key, KeyStore, Lease, MemoryStore, Operation, Outcome, PurgeBudget, Purged,
    Record, Reservation, Reserve, StoreError,
};

/// What befalls one call.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Fault {
    /// The call is not made, and fails so.
    Refuse(ErrorKind),
    /// The call is made, and its reply is lost.
    LoseReply,
    /// There is never an answer.
    Hang,
    /// All is well.
    None,
}

/// A memory store whose calls can be made to fail, and are counted. Its clock moves only by hand.
#[derive(Debug)]
pub(crate) struct Faulty {
    pub(crate) store: MemoryStore,
    pub(crate) clock: Arc<ManualClock>,
    faults: Mutex<Vec<(Operation, VecDeque<Fault>, Fault)>>,
    calls: Mutex<Vec<Operation>>,
    /// An await in every call, so that attempts become tasks.
    pub(crate) slow: bool,
}

impl Faulty {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self::build(false, 1024 * 1024))
    }

    pub(crate) fn build(slow: bool, limit: usize) -> Self {
        let clock = Arc::new(ManualClock::default());
        Self {
            store: MemoryStore::builder().clock(Arc::clone(&clock) as _).outcome_limit(limit).build(),
            clock,
            faults: Mutex::default(),
            calls: Mutex::default(),
            slow,
        }
    }

    /// These befall the next calls, and `then` all others, until called again.
    pub(crate) fn inject(&self, operation: Operation, faults: &[Fault], then: Fault) {
        let mut all = self.faults.lock().unwrap();
        all.retain(|(of, ..)| *of != operation);
        all.push((operation, faults.iter().copied().collect(), then));
    }

    pub(crate) fn calls(&self, operation: Operation) -> usize {
        self.calls.lock().unwrap().iter().filter(|of| **of == operation).count()
    }

    /// Moves both clocks on: the store's and tokio's paused one, in small steps.
    pub(crate) async fn pass(&self, time: Duration) {
        let steps = 200;
        for _ in 0..steps {
            self.clock.advance(time / steps);
            tokio::time::sleep(time / steps).await;
        }
    }

    pub(crate) async fn record(&self, key: &Key) -> Option<Record> {
        self.store.fetch(key).await.unwrap()
    }

    async fn call<T>(
        &self,
        operation: Operation,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        self.calls.lock().unwrap().push(operation);
        if self.slow {
            tokio::task::yield_now().await;
        }
        let fault = {
            let mut all = self.faults.lock().unwrap();
            let faults = all.iter_mut().find(|(of, ..)| *of == operation);
            faults.map_or(Fault::None, |(_, next, then)| next.pop_front().unwrap_or(*then))
        };
        match fault {
            Fault::None => call.await,
            Fault::Refuse(kind) => Err(StoreError::new(kind, "faulty", operation)),
            Fault::LoseReply => {
                drop(call.await);
                Err(StoreError::new(ErrorKind::Timeout, "faulty", operation))
            }
            Fault::Hang => std::future::pending().await,
        }
    }
}

impl fmt::Display for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("faulty")
    }
}

#[async_trait]
impl KeyStore for Faulty {
    fn capabilities(&self) -> Capabilities {
        self.store.capabilities()
    }

    async fn reserve(&self, request: &Reserve) -> Result<Reservation, StoreError> {
        self.call(Operation::Reserve, self.store.reserve(request)).await
    }

    async fn complete(&self, lease: &Lease, outcome: &Outcome) -> Result<(), StoreError> {
        self.call(Operation::Complete, self.store.complete(lease, outcome)).await
    }

    async fn fail(&self, lease: &Lease, failure: &Failure) -> Result<(), StoreError> {
        self.call(Operation::Fail, self.store.fail(lease, failure)).await
    }

    async fn renew(&self, lease: &Lease, extend_by: Duration) -> Result<(), StoreError> {
        self.call(Operation::Renew, self.store.renew(lease, extend_by)).await
    }

    async fn fetch(&self, key: &Key) -> Result<Option<Record>, StoreError> {
        self.call(Operation::Fetch, self.store.fetch(key)).await
    }

    async fn purge_expired(&self, budget: PurgeBudget) -> Result<Purged, StoreError> {
        self.store.purge_expired(budget).await
    }
}

pub(crate) fn key(id: &str) -> Key {
    Key::new("executor", id).unwrap()
}

/// Counts effects.
#[derive(Debug, Clone, Default)]
pub(crate) struct Effects(Arc<AtomicUsize>);

impl Effects {
    pub(crate) fn happen(&self) -> usize {
        self.0.fetch_add(1, Ordering::SeqCst) + 1
    }

    pub(crate) fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

/// Polls everything that can run, without letting time pass.
pub(crate) async fn settle() {
    for _ in 0..50 {
        tokio::task::yield_now().await;
    }
}
