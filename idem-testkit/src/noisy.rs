//! A correct store on a bad day.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::{
    Capabilities, ErrorClass, ErrorKind, Failure, Key, KeyStore, Lease, Operation, Outcome, PurgeBudget, Purged,
    Record, Reservation, Reserve, StoreError,
};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// A store that keeps the contract of the one it wraps, and yet delays calls, refuses some with a retryable error,
/// and loses replies. A case that fails on it is itself at fault.
pub struct Noisy {
    store: Arc<dyn KeyStore>,
    rng: Mutex<StdRng>,
}

/// What happens to one call.
struct Fate {
    delay: Option<Duration>,
    undelivered: bool,
    reply_lost: bool,
}

impl Noisy {
    /// Noise around that store, drawn from that seed.
    #[must_use]
    pub fn new(store: Arc<dyn KeyStore>, seed: u64) -> Self {
        Self { store, rng: Mutex::new(StdRng::seed_from_u64(seed)) }
    }

    fn fate(&self) -> Fate {
        let mut rng = self.rng.lock().unwrap_or_else(PoisonError::into_inner);
        Fate {
            delay: rng.random_bool(0.2).then(|| Duration::from_micros(rng.random_range(0..1_000))),
            undelivered: rng.random_bool(0.1),
            reply_lost: rng.random_bool(0.1),
        }
    }

    async fn send<T, F>(&self, operation: Operation, call: impl Fn() -> F + Send) -> Result<T, StoreError>
    where
        T: Send,
        F: Future<Output = Result<T, StoreError>> + Send,
    {
        let fate = self.fate();
        match fate.delay {
            Some(delay) => tokio::time::sleep(delay).await,
            None => tokio::task::yield_now().await,
        }
        let trouble = |class| Err(StoreError::new(ErrorKind::Unavailable, "noisy", operation).with_class(class));
        if fate.undelivered {
            return trouble(ErrorClass::Retryable);
        }
        let answer = call().await;
        if fate.reply_lost {
            return trouble(ErrorClass::Unknown);
        }
        answer
    }
}

impl fmt::Debug for Noisy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Noisy").field("store", &self.store).finish_non_exhaustive()
    }
}

impl fmt::Display for Noisy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "noisy {}", self.store)
    }
}

#[async_trait]
impl KeyStore for Noisy {
    fn capabilities(&self) -> Capabilities {
        self.store.capabilities()
    }

    async fn reserve(&self, request: &Reserve) -> Result<Reservation, StoreError> {
        self.send(Operation::Reserve, || self.store.reserve(request)).await
    }

    async fn complete(&self, lease: &Lease, outcome: &Outcome) -> Result<(), StoreError> {
        self.send(Operation::Complete, || self.store.complete(lease, outcome)).await
    }

    async fn fail(&self, lease: &Lease, failure: &Failure) -> Result<(), StoreError> {
        self.send(Operation::Fail, || self.store.fail(lease, failure)).await
    }

    async fn renew(&self, lease: &Lease, extend_by: Duration) -> Result<(), StoreError> {
        self.send(Operation::Renew, || self.store.renew(lease, extend_by)).await
    }

    async fn fetch(&self, key: &Key) -> Result<Option<Record>, StoreError> {
        self.send(Operation::Fetch, || self.store.fetch(key)).await
    }

    async fn purge_expired(&self, budget: PurgeBudget) -> Result<Purged, StoreError> {
        // A purge is not repeatable: one whose reply is lost has removed what nobody counted.
        self.store.purge_expired(budget).await
    }
}
