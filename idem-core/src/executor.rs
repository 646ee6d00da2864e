//! Runs operations so that they take effect once.
//!
//! [`Executor::run`] does what every user of a [`KeyStore`] has to do otherwise: it reserves the key, keeps its lease
//! alive while the operation runs, stores the result, and gives it to every repeat.
//!
//! ```
//! use idem_core::executor::Executor;
//! use idem_core::{Fingerprint, Key, MemoryStore};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let executor = Executor::new(MemoryStore::new());
//! let key = Key::new("tenant-7", "order-42")?;
//! let fingerprint = Fingerprint::of("amount=1200");
//!
//! let first = executor.run(&key, Some(fingerprint), |_| async { Ok::<_, String>("charge-1".to_owned()) }).await?;
//! assert_eq!((first.value.as_str(), first.replayed), ("charge-1", false));
//!
//! // The client got no answer and asks again: nothing is run, and it gets the first result.
//! let again = executor.run(&key, Some(fingerprint), |_| async { Ok::<_, String>("charge-2".to_owned()) }).await?;
//! assert_eq!((again.value.as_str(), again.replayed), ("charge-1", true));
//! # Ok(())
//! # }
//! ```
//!
//! # What is promised
//! The effect happens **effectively once**: no repeat runs the operation while an attempt holds the key or once a
//! result is stored. What no store can rule out is named: an operation whose process dies or is cut off for longer
//! than the lease leaves nobody who knows whether its effect happened ([`Recovery`] says what to do then), and an
//! operation that goes on although its [lease is lost](Attempt::lease_lost) may run beside its successor, which
//! [`Attempt::number`] makes harmless where it is checked downstream.
//!
//! # Which errors are final
//! [`run`](Executor::run) frees the key at every error. [`run_with`](Executor::run_with) asks a policy, and stores the
//! errors that are answers, such as a declined card; they need serde.
//!
//! # Detached
//! An attempt that is not done at its first poll goes on as a task of its own: a caller that is dropped (a client that
//! hung up, a time-out, a `select!`) does not stop it, and its result is stored for the repeat. A time-out *within* the
//! operation is the way to bound it: the lease is renewed as long as it runs. Task-locals are those of the caller at the
//! first poll only; the current tracing span is carried on. [`Executor::drain`] waits for what still runs, for a clean
//! shutdown.
//!
//! # Together with rows of your own
//! An operation whose effect is rows in the database of the store can commit them *together with the completion of its
//! key*, where the backend offers that: `complete_and_commit` of `idem-postgres`. It does first what is slow, such as
//! asking a card network, while only the lease is held; then it opens a transaction, writes its rows, completes its
//! [lease](Attempt::lease) with [`Attempt::success`], which is the outcome as the executor would store it, and commits.
//!
//! Then rows and key are there together or not at all, whatever dies, and for what is in the transaction
//! [`Recovery::Rerun`] is safe: where an attempt was taken over, its transaction can commit no more.
//!
//! - **The commit got no answer.** The operation returns an error, and the executor [fails](KeyStore::fail) the attempt,
//!   as after every error. The store, having waited for the transaction to end, says whether it was committed: then the
//!   stored result is returned, with `replayed` unset; otherwise the key is free. It is never run again for want of an
//!   answer.
//! - **The lease was lost.** Completing is refused, and the operation has to roll back: nothing took effect. It returns
//!   an error, and the call ends in [`RunError::Unrecorded`] with [`LeaseLost`](crate::ErrorKind::LeaseLost). A lease that
//!   has run out, but was not taken over, is still good.
//! - **An error or a panic after the commit** frees nothing: the caller gets the stored result.
//! - **A process that dies** leaves the key completed, or in progress with nothing done.
//!
//! # Results
//! They are stored as JSON, under code 0 for a success and 1 for a final error, so they have to survive that: a float
//! that is no number does not. One that is larger than the store's limit or has no JSON is withheld: the first caller
//! gets it, and repeats get [`RunError::Withheld`]. Outcomes in a form of one's own: [`Executor::run_outcome`].
//!
//! # Runtime
//! A tokio runtime with its timer enabled. Leases are renewed by the runtime that the operation runs on: one with a
//! single thread must not be blocked for longer than the lease.

mod attempt;
mod backoff;
mod config;
mod detach;
mod encode;
mod error;
mod judge;
mod keeper;
mod outcomes;
mod reconcile;
mod run;
#[cfg(test)]
mod tests;
mod typed;
mod waiters;

use std::fmt::{self, Display};
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::runtime::Handle;
use tokio::time::{Instant, timeout};

pub use attempt::Attempt;
pub use config::{ExecutorBuilder, OnError, OnPanic, Recovery, Waiting};
pub use error::{Executed, RunError};
pub use outcomes::{Ending, Run, Settlement};
pub use reconcile::{Reconcile, Reconciliation};

use crate::fingerprint::Fingerprint;
use crate::key::Key;
use crate::request::Reserve;
use crate::store::KeyStore;
use backoff::Backoff;
use detach::{Running, detached};
use judge::Judge;
use keeper::Keeper;
use outcomes::AsItSays;
use run::{Busy, Call, Step};
use typed::{AlwaysFree, ByPolicy, Typed};
use waiters::Waiter;

/// The first and the longest pause between two looks at a key that is waited for.
const FIRST_LOOK: Duration = Duration::from_millis(25);
const LONGEST_LOOK: Duration = Duration::from_secs(1);
/// As long as anybody waits; a time beyond what an instant can express counts as this.
const LONGEST_WAIT: Duration = Duration::from_secs(10 * 366 * 24 * 60 * 60);

/// Runs operations under keys of one store. Cheap to clone; see the [module](self).
#[derive(Clone)]
pub struct Executor(Arc<Inner>);

struct Inner {
    store: Arc<dyn KeyStore>,
    keeper: Arc<Keeper>,
    lease: Duration,
    retention: Duration,
    recovery: Recovery,
    on_panic: OnPanic,
    waiting: Waiting,
    outcome_limit: usize,
    running: Arc<Running>,
}

impl Executor {
    /// An executor with the default settings: see [`ExecutorBuilder`].
    #[must_use]
    pub fn new(store: impl KeyStore) -> Self {
        Self::from_settings(Self::builder(store))
    }

    /// The settings to change.
    pub fn builder(store: impl KeyStore) -> ExecutorBuilder {
        ExecutorBuilder::new(Arc::new(store))
    }

    fn from_settings(settings: ExecutorBuilder) -> Self {
        let ExecutorBuilder { store, lease, retention, recovery, on_panic, waiting, running } = settings;
        Self(Arc::new(Inner {
            keeper: Arc::new(Keeper::new(Arc::clone(&store), lease)),
            outcome_limit: store.capabilities().max_outcome_bytes,
            store,
            lease,
            retention,
            recovery,
            on_panic,
            waiting,
            running,
        }))
    }

    /// Runs the operation under the key, unless it has taken effect already. Every error frees the key, so that the
    /// next repeat runs the operation again; for errors that are answers, see [`run_with`](Self::run_with).
    ///
    /// The operation is called at most once, and not at all when the key is held or its result is stored. It is given
    /// its [`Attempt`]: the fencing number, and the news that the lease is lost. The error's text is kept in the record
    /// as a note for operators.
    ///
    /// A fingerprint of the request guards against a key that is used twice: give it whenever there is one.
    ///
    /// # Errors
    /// [`RunError`]: [`Failed`](RunError::Failed) when the operation failed, [`Unrecorded`](RunError::Unrecorded) and
    /// [`Interrupted`](RunError::Interrupted) when it ran and that could not be stored,
    /// [`Panicked`](RunError::Panicked); in all other cases nothing was run.
    ///
    /// While the store fails, a reserve is sent three times, and a result until the lease's end: so long may the call
    /// take beyond the operation.
    ///
    /// # Cancellation
    /// Before its first poll: nothing happens. While it waits for another holder: it stops waiting, unless it acquires
    /// the key at that moment. Otherwise the attempt goes on without its caller.
    pub async fn run<T, E, F, Fut>(
        &self,
        key: &Key,
        fingerprint: impl Into<Option<Fingerprint>>,
        operation: F,
    ) -> Result<Executed<T>, RunError<T, E>>
    where
        F: FnOnce(Attempt) -> Fut + Send + 'static,
        Fut: Future<Output = Result<T, E>> + Send + 'static,
        T: Serialize + DeserializeOwned + Send + 'static,
        E: Display + Send + 'static,
    {
        self.drive(key, fingerprint.into(), Typed(AlwaysFree), operation).await.typed::<AlwaysFree>()
    }

    /// As [`run`](Self::run), with a policy that says which errors of the operation are final. A final error is stored
    /// as a success is, and every repeat gets the same error, with `replayed` set.
    ///
    /// ```
    /// use idem_core::executor::{Executor, OnError, RunError};
    /// use idem_core::{Key, MemoryStore};
    /// use serde::{Deserialize, Serialize};
    ///
    /// #[derive(Debug, Serialize, Deserialize, thiserror::Error)]
    /// enum ChargeError {
    ///     #[error("the card was declined")]
    ///     Declined,
    ///     #[error("the provider did not answer")]
    ///     Timeout,
    /// }
    ///
    /// fn policy(error: &ChargeError) -> OnError {
    ///     match error {
    ///         ChargeError::Declined => OnError::Final,
    ///         ChargeError::Timeout => OnError::Free,
    ///     }
    /// }
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let executor = Executor::new(MemoryStore::new());
    /// let key = Key::new("tenant-7", "order-42")?;
    /// for replay in [false, true] {
    ///     let result = executor.run_with(&key, None, policy, |_| async { Err::<u64, _>(ChargeError::Declined) }).await;
    ///     let Err(RunError::Failed { error: ChargeError::Declined, is_final: true, replayed, .. }) = result else {
    ///         panic!("{result:?}");
    ///     };
    ///     assert_eq!(replayed, replay);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`run`](Self::run). A panic of the policy counts as one of the operation.
    ///
    /// # Cancellation
    /// As [`run`](Self::run).
    pub async fn run_with<T, E, P, F, Fut>(
        &self,
        key: &Key,
        fingerprint: impl Into<Option<Fingerprint>>,
        on_error: P,
        operation: F,
    ) -> Result<Executed<T>, RunError<T, E>>
    where
        P: Fn(&E) -> OnError + Send + 'static,
        F: FnOnce(Attempt) -> Fut + Send + 'static,
        Fut: Future<Output = Result<T, E>> + Send + 'static,
        T: Serialize + DeserializeOwned + Send + 'static,
        E: Display + Serialize + DeserializeOwned + Send + 'static,
    {
        self.drive(key, fingerprint.into(), Typed(ByPolicy(on_error)), operation).await.typed::<ByPolicy<P>>()
    }

    /// As [`run`](Self::run), for an operation that makes its own [`Outcome`](crate::Outcome) and says whether it is final:
    /// for layers over a protocol, whose results are no JSON. Repeats get the outcome as it is.
    ///
    /// An outcome that is larger than [`outcome_limit`](Self::outcome_limit) is stored as withheld.
    ///
    /// ```
    /// use idem_core::executor::{Ending, Executor, Run};
    /// use idem_core::{Key, MemoryStore, Outcome};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let executor = Executor::new(MemoryStore::new());
    /// let key = Key::new("tenant-7", "order-42")?;
    /// let operation = |_| async { Ending::complete("for this caller", Outcome::new(201, "for all repeats")) };
    /// let first = executor.run_outcome(&key, None, operation).await;
    /// assert!(matches!(first, Run::Ended { value: "for this caller", completed: true, recorded: Ok(()), .. }));
    /// let again = executor.run_outcome(&key, None, operation).await;
    /// let Run::Stored { outcome, replayed: true, .. } = again else { panic!("{again:?}") };
    /// assert_eq!(outcome, Outcome::new(201, "for all repeats"));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// There are none: every case of [`Run`] is an answer to give.
    ///
    /// # Cancellation
    /// As [`run`](Self::run).
    pub async fn run_outcome<V, F, Fut>(
        &self,
        key: &Key,
        fingerprint: impl Into<Option<Fingerprint>>,
        operation: F,
    ) -> Run<V>
    where
        F: FnOnce(Attempt) -> Fut + Send + 'static,
        Fut: Future<Output = Ending<V>> + Send + 'static,
        V: Send + 'static,
    {
        self.drive(key, fingerprint.into(), AsItSays, operation).await
    }

    /// The settings of this executor, to change some, for another one over the same store. The new one counts its attempts
    /// with this one's: [`running`](Self::running) and [`drain`](Self::drain) of either are about both.
    pub fn sibling(&self) -> ExecutorBuilder {
        let Inner { store, lease, retention, recovery, on_panic, waiting, running, .. } = &*self.0;
        ExecutorBuilder {
            store: Arc::clone(store),
            lease: *lease,
            retention: *retention,
            recovery: recovery.clone(),
            on_panic: *on_panic,
            waiting: *waiting,
            running: Arc::clone(running),
        }
    }

    /// How long a holder that died blocks its key.
    #[must_use]
    pub fn lease(&self) -> Duration {
        self.0.lease
    }

    /// How long results are kept.
    #[must_use]
    pub fn retention(&self) -> Duration {
        self.0.retention
    }

    /// The largest [`Outcome::size`](crate::Outcome::size) that is stored whole.
    #[must_use]
    pub fn outcome_limit(&self) -> usize {
        self.0.outcome_limit
    }

    /// The store of the keys.
    #[must_use]
    pub fn store(&self) -> &Arc<dyn KeyStore> {
        &self.0.store
    }

    /// How many attempts run now, detached ones among them.
    #[must_use]
    pub fn running(&self) -> usize {
        self.0.running.count()
    }

    /// Waits until no attempt runs any more, detached ones among them: for a clean shutdown, after the last call of
    /// [`run`](Self::run). Callers that wait for another holder do not count. May be dropped at any time.
    pub async fn drain(&self) {
        self.0.running.drained().await;
    }

    async fn drive<R, V, F, Fut, J>(
        &self,
        key: &Key,
        fingerprint: Option<Fingerprint>,
        judge: J,
        operation: F,
    ) -> Run<V>
    where
        F: FnOnce(Attempt) -> Fut + Send + 'static,
        Fut: Future<Output = R> + Send + 'static,
        R: Send + 'static,
        V: Send + 'static,
        J: Judge<R, V>,
    {
        let Ok(runtime) = Handle::try_current() else { return Run::NoRuntime };
        let until = match self.0.waiting {
            Waiting::Refuse => None,
            Waiting::UpTo(most) => Some(Instant::now() + most.min(LONGEST_WAIT)),
        };
        let request = Reserve::new(key.clone())
            .with_fingerprint(fingerprint)
            .with_lease(self.0.lease)
            .with_retention(self.0.retention)
            .with_on_abandoned(self.0.recovery.on_abandoned());
        let mut busy = match self.step(&runtime, Call { request, unsettled: None, operation, judge }).await {
            Step::Done(result) => return result,
            Step::Busy(busy) => busy,
        };
        let Some(until) = until else { return busy.refuse() };
        let mut looks = Backoff::new(FIRST_LOOK, LONGEST_LOOK);
        let waiter = Waiter::new(key);
        loop {
            // Taken before the look, so that a holder that ends right after it is not missed.
            let woken = waiter.woken();
            busy = match self.step(&runtime, busy.call).await {
                Step::Done(result) => return result,
                Step::Busy(busy) => busy,
            };
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return busy.refuse();
            }
            // Woken or not, look again.
            drop(timeout(looks.pause().min(busy.retry_after).min(left), woken).await);
        }
    }

    async fn step<R, V, F, Fut, J>(&self, runtime: &Handle, call: Call<F, J>) -> Step<V, F, J>
    where
        F: FnOnce(Attempt) -> Fut + Send + 'static,
        Fut: Future<Output = R> + Send + 'static,
        R: Send + 'static,
        V: Send + 'static,
        J: Judge<R, V>,
    {
        let attempt = Arc::clone(&self.0).attempt(runtime.clone(), call);
        detached(attempt, runtime).await.unwrap_or_else(|cancelled| Step::Done(Run::Interrupted(cancelled)))
    }
}

impl<F, J> Busy<F, J> {
    fn refuse<V>(self) -> Run<V> {
        Run::InProgress { attempt: self.attempt, retry_after: self.retry_after }
    }
}

impl fmt::Debug for Executor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { store, lease, retention, recovery, on_panic, waiting, .. } = &*self.0;
        f.debug_struct("Executor")
            .field("store", store)
            .field("lease", lease)
            .field("retention", retention)
            .field("recovery", recovery)
            .field("on_panic", on_panic)
            .field("waiting", waiting)
            .field("running", &self.running())
            .finish()
    }
}
