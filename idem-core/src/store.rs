//! The trait that every backend implements.
//!
//! # Write your own
//! A backend has to make one thing true: that its read of a record and the write which follows are one step. Where the
//! underlying store holds values as a whole, the functions of [`decision`](crate::decision) say what to write, and
//! [`codec`](crate::codec) turns a record into bytes. This is a whole backend over a map behind a lock:
//!
//! ```
//! use std::collections::HashMap;
//! use std::fmt;
//! use std::sync::{Mutex, MutexGuard, PoisonError};
//! use std::time::{Duration, SystemTime};
//!
//! use async_trait::async_trait;
//! use idem_core::decision::{self, Decision};
//! use idem_core::limits::{check_lease, check_retention, DEFAULT_OUTCOME_LIMIT, MAX_RETENTION};
//! use idem_core::{
//!     Capabilities, Failure, InvalidInput, Key, KeyStore, Lease, Operation, Outcome, PurgeBudget, Purged, Record,
//!     Reservation, Reserve, StoreError, ErrorKind,
//! };
//!
//! #[derive(Debug, Default)]
//! struct MapStore(Mutex<HashMap<Key, Record>>);
//!
//! impl fmt::Display for MapStore {
//!     fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
//!         f.write_str("map")
//!     }
//! }
//!
//! impl MapStore {
//!     fn lock(&self) -> MutexGuard<'_, HashMap<Key, Record>> {
//!         self.0.lock().unwrap_or_else(PoisonError::into_inner)
//!     }
//! }
//!
//! fn refused(operation: Operation) -> impl Fn(decision::Refusal) -> StoreError {
//!     move |refusal| StoreError::refused(refusal, "map", operation)
//! }
//!
//! fn invalid(operation: Operation) -> impl Fn(InvalidInput) -> StoreError {
//!     move |input| StoreError::invalid(input, "map", operation)
//! }
//!
//! #[async_trait]
//! impl KeyStore for MapStore {
//!     fn capabilities(&self) -> Capabilities {
//!         Capabilities::default()
//!     }
//!
//!     async fn reserve(&self, request: &Reserve) -> Result<Reservation, StoreError> {
//!         request.validate(MAX_RETENTION).map_err(invalid(Operation::Reserve))?;
//!         let mut records = self.lock();
//!         match decision::decide(records.get(&request.key), request, SystemTime::now()) {
//!             Decision::Acquire(record) => {
//!                 let lease = record.lease();
//!                 records.insert(record.key.clone(), record);
//!                 Ok(Reservation::Acquired(lease))
//!             }
//!             Decision::Answer(answer) => Ok(answer),
//!             Decision::LeaseLost => Err(StoreError::new(ErrorKind::LeaseLost, "map", Operation::Reserve)),
//!         }
//!     }
//!
//!     async fn complete(&self, lease: &Lease, outcome: &Outcome) -> Result<(), StoreError> {
//!         check_retention(lease.retention, MAX_RETENTION).map_err(invalid(Operation::Complete))?;
//!         outcome.validate(DEFAULT_OUTCOME_LIMIT).map_err(invalid(Operation::Complete))?;
//!         decision::complete(self.lock().get_mut(&lease.key), lease, outcome, SystemTime::now())
//!             .map_err(refused(Operation::Complete))?;
//!         Ok(())
//!     }
//!
//!     async fn fail(&self, lease: &Lease, failure: &Failure) -> Result<(), StoreError> {
//!         check_retention(lease.retention, MAX_RETENTION).map_err(invalid(Operation::Fail))?;
//!         decision::fail(self.lock().get_mut(&lease.key), lease, failure, SystemTime::now())
//!             .map_err(refused(Operation::Fail))?;
//!         Ok(())
//!     }
//!
//!     async fn renew(&self, lease: &Lease, extend_by: Duration) -> Result<(), StoreError> {
//!         check_lease(extend_by).map_err(invalid(Operation::Renew))?;
//!         decision::renew(self.lock().get_mut(&lease.key), lease, extend_by, SystemTime::now())
//!             .map_err(refused(Operation::Renew))?;
//!         Ok(())
//!     }
//!
//!     async fn fetch(&self, key: &Key) -> Result<Option<Record>, StoreError> {
//!         let now = SystemTime::now();
//!         Ok(self.lock().get(key).filter(|record| !record.is_expired(now)).map(|record| record.read(now)))
//!     }
//!
//!     async fn purge_expired(&self, budget: PurgeBudget) -> Result<Purged, StoreError> {
//!         let now = SystemTime::now();
//!         let mut records = self.lock();
//!         let expired: Vec<Key> =
//!             records.values().filter(|record| record.is_expired(now)).map(|record| record.key.clone()).collect();
//!         let removed = expired.iter().take(budget.records).filter(|key| records.remove(key).is_some()).count();
//!         Ok(Purged::new(removed as u64, removed < expired.len()))
//!     }
//! }
//! ```
//!
//! Then prove it: a test of one line, `idem_testkit::run(MyHarness)`, runs the conformance kit against it. The guide
//! "Write a backend" in the repository's `docs` folder goes through it.

use std::fmt::{Debug, Display};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::error::StoreError;
use crate::key::Key;
use crate::limits::{DEFAULT_OUTCOME_LIMIT, MAX_RETENTION};
use crate::outcome::{Failure, Outcome};
use crate::record::Record;
use crate::request::{Lease, PurgeBudget, Purged, Reservation, Reserve};

/// What a store can hold and how safely, for callers that adapt and for the conformance kit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// The largest [`Outcome::size`] that it stores.
    pub max_outcome_bytes: usize,
    /// The longest retention that it accepts.
    pub max_retention: Duration,
    /// Whether acknowledged writes survive the store's process.
    pub durable: bool,
    /// Whether [`purge_expired`](KeyStore::purge_expired) is what removes expired records and counts them; otherwise
    /// the store removes them by itself.
    pub purges: bool,
}

impl Default for Capabilities {
    /// 1 MiB, the longest retention there is, not durable, purges.
    fn default() -> Self {
        Self { max_outcome_bytes: DEFAULT_OUTCOME_LIMIT, max_retention: MAX_RETENTION, durable: false, purges: true }
    }
}

/// A store of idempotency keys: the contract, by rule.
///
/// - **R1 atomic.** However many callers reserve one absent key at once, exactly one gets `Acquired`.
/// - **R2 answers are outcomes.** A duplicate is never an error. Errors are for bad input and the store's own trouble.
/// - **R3 mismatch first.** The fingerprint is compared before anything else, on every path. It survives complete and
///   fail.
/// - **R4 any call may be delivered twice.** The same reserve, complete, fail or renew sent again after a lost reply
///   gives the same answer and changes nothing more. (A renewal counts from its latest delivery.)
/// - **R5 lease.** Before the lease's end the key is refused; from its end on it can be taken over. `retry_after` is
///   more than zero and at most what was granted.
/// - **R6 fencing.** complete, fail and renew act only while the record is in progress under the caller's token. A
///   lease that ran out but was not taken over is still the caller's. Otherwise: `LeaseLost`, or `AlreadyCompleted`
///   where the record was completed under this very token; nothing changed. renew never shortens a lease. A
///   fingerprint is fixed by the first reserve; a later one is compared, not adopted.
/// - **R7 completed is final.** Outcome bytes come back bit for bit. The same complete again is Ok; another outcome
///   under the same token is `AlreadyCompleted`; nothing overwrites it before it expires.
/// - **R8 fail frees the key for a retry**, keeps the failure note for operators, and keeps attempt and fingerprint.
/// - **R9 expiry.** Two durations, never one: lease and retention. Retention counts from the latest acquire, complete
///   or fail. An expired record is absent for every method, purged or not.
/// - **R10 one clock.** Deadlines are written and compared by the store's clock, never by the client's.
/// - **R11 withheld outcome.** "Executed, result not stored" is an outcome of its own: the operation is never run
///   again, and the repeat gets a definite answer.
/// - **R12 limits in bytes**, checked before anything is sent; see [`limits`](crate::limits).
/// - **R13 three error classes**: permanent, retryable, unknown; see [`ErrorClass`](crate::ErrorClass). A backend's
///   error never turns into "absent".
/// - **R14 cancellation.** Dropping any future leaves the record as before or as after the call, never in between, and
///   leaks no connection, lock or waiter.
/// - **R15 purge** removes only what has expired, does bounded work per call, and is safe beside everything else.
/// - **R16 isolation of scopes.** The same id in two scopes is two keys.
///
/// There are no provided bodies for reserve, complete, fail and renew: what they promise has to be made by the store.
#[async_trait]
pub trait KeyStore: Debug + Display + Send + Sync + 'static {
    /// What this store can hold, and how safely. Constant for the life of the store.
    fn capabilities(&self) -> Capabilities;

    /// Asks to hold a key.
    ///
    /// **Behaviour.** As the table of [`decision`](crate::decision) says.
    ///
    /// **To be correct.** Reading the record, deciding and writing are one step to every other caller (R1). The time is
    /// the store's (R10) and is read within that step. The token of the request is compared, so that a repeat of the
    /// same request meets itself and not a rival (R4).
    ///
    /// **Errors.** [`InvalidInput`](crate::ErrorKind::InvalidInput) before anything is sent;
    /// [`LeaseLost`](crate::ErrorKind::LeaseLost) when the attempt of this very token has failed already; the store's
    /// own trouble. After an error of class unknown, send the same request again.
    ///
    /// **Cancellation.** The key may be held under the request's token, or not; the same request tells.
    ///
    /// **Cost.** One round trip.
    async fn reserve(&self, request: &Reserve) -> Result<Reservation, StoreError>;

    /// Stores the final outcome of the attempt that holds the key.
    ///
    /// **Behaviour.** The record becomes completed, and expires `lease.retention` from now. The same outcome again is
    /// Ok and changes nothing, also its expiry. A lease that has run out but was not taken over still completes.
    ///
    /// **To be correct.** The token and the state are compared in the same step as the write (R6).
    ///
    /// **Errors.** [`InvalidInput`](crate::ErrorKind::InvalidInput) when the outcome is over the limit (complete with
    /// [`Body::Withheld`](crate::Body::Withheld) then); [`LeaseLost`](crate::ErrorKind::LeaseLost);
    /// [`AlreadyCompleted`](crate::ErrorKind::AlreadyCompleted); the store's own trouble.
    ///
    /// **Cancellation.** The outcome is stored whole or not at all; the same call again tells.
    ///
    /// **Cost.** One round trip.
    async fn complete(&self, lease: &Lease, outcome: &Outcome) -> Result<(), StoreError>;

    /// Gives the attempt up and frees the key for another one.
    ///
    /// **Behaviour.** The record becomes failed, keeps attempt, fingerprint and the note, and expires
    /// `lease.retention` from now. The same call again is Ok and changes nothing; once another attempt has acquired the
    /// key it is `LeaseLost`, which says the same: this attempt is over.
    ///
    /// **To be correct.** As [`complete`](Self::complete). The record is not deleted: its attempt number and
    /// fingerprint are needed (R8).
    ///
    /// **Errors.** [`LeaseLost`](crate::ErrorKind::LeaseLost), also when this attempt has failed with another note;
    /// [`AlreadyCompleted`](crate::ErrorKind::AlreadyCompleted); the store's own trouble.
    ///
    /// **Cancellation.** As [`complete`](Self::complete).
    ///
    /// **Cost.** One round trip.
    async fn fail(&self, lease: &Lease, failure: &Failure) -> Result<(), StoreError>;

    /// Extends the lease to `extend_by` from now.
    ///
    /// **Behaviour.** A lease that ends later already stays as it is. A lease that has run out but was not taken over
    /// comes to life again. The record's expiry moves with the lease's end where it lies before it.
    ///
    /// **To be correct.** A renewal that arrives after a take-over must not take the key back (R6).
    ///
    /// **Errors.** [`InvalidInput`](crate::ErrorKind::InvalidInput) when `extend_by` is zero or longer than
    /// [`MAX_LEASE`](crate::limits::MAX_LEASE); [`LeaseLost`](crate::ErrorKind::LeaseLost);
    /// [`AlreadyCompleted`](crate::ErrorKind::AlreadyCompleted); the store's own trouble.
    ///
    /// **Cancellation.** The lease is extended or it is not.
    ///
    /// **Cost.** One round trip.
    async fn renew(&self, lease: &Lease, extend_by: Duration) -> Result<(), StoreError>;

    /// Reads a record, changing nothing.
    ///
    /// **Behaviour.** `None` when there is none or it has expired.
    ///
    /// **To be correct.** What cannot be read is an error, never `None` (R13).
    ///
    /// **Errors.** The store's own trouble.
    ///
    /// **Cancellation.** No effect.
    ///
    /// **Cost.** One round trip.
    async fn fetch(&self, key: &Key) -> Result<Option<Record>, StoreError>;

    /// Removes records that have expired, within a budget.
    ///
    /// **Behaviour.** Expired records are absent for every call anyway: this frees their room. Call it from time to
    /// time, again at once while [`Purged::more`]. Where the store expires records by itself, it does nothing.
    ///
    /// **To be correct.** Nothing live is removed, however the call races with others (R15).
    ///
    /// **Errors.** The store's own trouble.
    ///
    /// **Cancellation.** What was removed was expired.
    ///
    /// **Cost.** Bounded by the budget, not by the size of the store.
    async fn purge_expired(&self, budget: PurgeBudget) -> Result<Purged, StoreError>;

    /// Reserves several keys: an answer each, in the order of the requests, as if reserved one after the other.
    ///
    /// **Behaviour.** Each as [`reserve`](Self::reserve); one that is refused does not touch its neighbours.
    ///
    /// **To be correct.** A key that occurs twice is reserved by the first of its requests and in progress for the
    /// second, unless that is the same request: then both are told that they hold it (R4).
    ///
    /// **Errors.** Per request.
    ///
    /// **Cancellation.** Each request on its own, as [`reserve`](Self::reserve).
    ///
    /// **Cost.** One round trip per request, unless the store does better.
    async fn reserve_many(&self, requests: &[Reserve]) -> Vec<Result<Reservation, StoreError>> {
        let mut answers = Vec::with_capacity(requests.len());
        for request in requests {
            answers.push(self.reserve(request).await);
        }
        answers
    }

    /// Completes several keys: an answer each, in the order of the calls, as if completed one after the other.
    ///
    /// **Behaviour.** Each as [`complete`](Self::complete); one that is refused does not touch its neighbours.
    ///
    /// **To be correct.** Each is fenced by its own token. A key that occurs twice is completed by the first of its calls;
    /// the second is Ok where it brings the same outcome, and [`AlreadyCompleted`](crate::ErrorKind::AlreadyCompleted)
    /// otherwise.
    ///
    /// **Errors.** Per call.
    ///
    /// **Cancellation.** Each call on its own, as [`complete`](Self::complete).
    ///
    /// **Cost.** One round trip per call, unless the store does better.
    async fn complete_many(&self, calls: &[(Lease, Outcome)]) -> Vec<Result<(), StoreError>> {
        let mut answers = Vec::with_capacity(calls.len());
        for (lease, outcome) in calls {
            answers.push(self.complete(lease, outcome).await);
        }
        answers
    }
}

/// Every method, so that a pointer to a store is a store and no better implementation is hidden by a provided body.
macro_rules! forward {
    ($pointer:ty) => {
        #[async_trait]
        #[deny(clippy::missing_trait_methods)]
        impl<S: KeyStore + ?Sized> KeyStore for $pointer {
            fn capabilities(&self) -> Capabilities {
                (**self).capabilities()
            }

            async fn reserve(&self, request: &Reserve) -> Result<Reservation, StoreError> {
                (**self).reserve(request).await
            }

            async fn complete(&self, lease: &Lease, outcome: &Outcome) -> Result<(), StoreError> {
                (**self).complete(lease, outcome).await
            }

            async fn fail(&self, lease: &Lease, failure: &Failure) -> Result<(), StoreError> {
                (**self).fail(lease, failure).await
            }

            async fn renew(&self, lease: &Lease, extend_by: Duration) -> Result<(), StoreError> {
                (**self).renew(lease, extend_by).await
            }

            async fn fetch(&self, key: &Key) -> Result<Option<Record>, StoreError> {
                (**self).fetch(key).await
            }

            async fn purge_expired(&self, budget: PurgeBudget) -> Result<Purged, StoreError> {
                (**self).purge_expired(budget).await
            }

            async fn reserve_many(&self, requests: &[Reserve]) -> Vec<Result<Reservation, StoreError>> {
                (**self).reserve_many(requests).await
            }

            async fn complete_many(&self, calls: &[(Lease, Outcome)]) -> Vec<Result<(), StoreError>> {
                (**self).complete_many(calls).await
            }
        }
    };
}

forward!(Arc<S>);
forward!(Box<S>);
forward!(&'static S);
