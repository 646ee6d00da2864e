//! Test doubles, shared by several of the integration tests.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::panic)]

use std::fmt;
use std::future::Future;
use std::pin::pin;
use std::sync::Mutex;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::{
    Capabilities, ErrorKind, Failure, Key, KeyStore, Lease, Operation, Outcome, PurgeBudget, Purged, Record,
    Reservation, Reserve, StoreError,
};

/// The answer of a future that never waits.
pub fn ready<F: Future>(future: F) -> F::Output {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("the future waits"),
    }
}

/// What happens to the next call that reaches a [`Wire`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fault {
    /// The request is lost: no effect.
    Request,
    /// The reply is lost: the effect is there.
    Reply,
    /// The reply does not come in time: the caller waits and may give up. The effect is there.
    Late,
}

/// Stands between the caller and a store: counts round trips, and loses what it is told to.
pub struct Wire<S> {
    pub store: S,
    trips: Mutex<Vec<&'static str>>,
    fault: Mutex<Option<Fault>>,
}

impl<S: KeyStore> Wire<S> {
    pub fn new(store: S) -> Self {
        Self { store, trips: Mutex::default(), fault: Mutex::default() }
    }

    pub fn lose(&self, fault: Fault) {
        *self.fault.lock().unwrap() = Some(fault);
    }

    /// The calls since this was asked last, by name.
    pub fn trips(&self) -> Vec<&'static str> {
        std::mem::take(&mut self.trips.lock().unwrap())
    }

    async fn pass<T>(
        &self,
        name: &'static str,
        operation: Operation,
        call: impl Future<Output = Result<T, StoreError>> + Send,
    ) -> Result<T, StoreError> {
        self.trips.lock().unwrap().push(name);
        let fault = self.fault.lock().unwrap().take();
        let lost = || StoreError::new(ErrorKind::Timeout, "wire", operation);
        match fault {
            None => call.await,
            Some(Fault::Request) => Err(lost()),
            Some(Fault::Reply) => {
                call.await?;
                Err(lost())
            }
            Some(Fault::Late) => {
                let answer = call.await;
                tokio::task::yield_now().await;
                answer
            }
        }
    }
}

impl<S: KeyStore> fmt::Debug for Wire<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Wire({:?})", self.store)
    }
}

impl<S: KeyStore> fmt::Display for Wire<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.store)
    }
}

#[async_trait]
impl<S: KeyStore> KeyStore for Wire<S> {
    fn capabilities(&self) -> Capabilities {
        self.store.capabilities()
    }

    async fn reserve(&self, request: &Reserve) -> Result<Reservation, StoreError> {
        self.pass("reserve", Operation::Reserve, self.store.reserve(request)).await
    }

    async fn complete(&self, lease: &Lease, outcome: &Outcome) -> Result<(), StoreError> {
        self.pass("complete", Operation::Complete, self.store.complete(lease, outcome)).await
    }

    async fn fail(&self, lease: &Lease, failure: &Failure) -> Result<(), StoreError> {
        self.pass("fail", Operation::Fail, self.store.fail(lease, failure)).await
    }

    async fn renew(&self, lease: &Lease, extend_by: Duration) -> Result<(), StoreError> {
        self.pass("renew", Operation::Renew, self.store.renew(lease, extend_by)).await
    }

    async fn fetch(&self, key: &Key) -> Result<Option<Record>, StoreError> {
        self.pass("fetch", Operation::Fetch, self.store.fetch(key)).await
    }

    async fn purge_expired(&self, budget: PurgeBudget) -> Result<Purged, StoreError> {
        self.pass("purge", Operation::Purge, self.store.purge_expired(budget)).await
    }

    async fn reserve_many(&self, requests: &[Reserve]) -> Vec<Result<Reservation, StoreError>> {
        self.trips.lock().unwrap().push("reserve_many");
        self.store.reserve_many(requests).await
    }

    async fn complete_many(&self, calls: &[(Lease, Outcome)]) -> Vec<Result<(), StoreError>> {
        self.trips.lock().unwrap().push("complete_many");
        self.store.complete_many(calls).await
    }
}
