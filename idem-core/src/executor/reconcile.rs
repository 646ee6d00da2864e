//! Finding out what became of an abandoned attempt.

use async_trait::async_trait;
use serde::Serialize;

use super::encode;
use crate::limits::MAX_OUTCOME_LIMIT;
use crate::outcome::Outcome;
use crate::request::Lease;

/// What became of an attempt whose holder was silent until its lease was over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reconciliation {
    /// Its effect happened, and this is the outcome. It is stored and returned as a replay; nothing is run.
    ///
    /// Make it by [`executed`](Self::executed) or [`executed_error`](Self::executed_error), or by
    /// [`Outcome::withheld`] where the result cannot be had any more.
    Executed(Outcome),
    /// Its effect did not happen and cannot happen any more: the operation is run.
    NotExecuted,
    /// Nobody can tell now. Nothing is run and nothing is stored; the caller gets
    /// [`RunError::OutcomeUnknown`](super::RunError::OutcomeUnknown), and the first repeat after the lease's end asks
    /// again.
    Unknown,
}

impl Reconciliation {
    /// The effect happened, and the operation would have returned `Ok` with this.
    #[must_use]
    pub fn executed<T: Serialize>(value: &T) -> Self {
        Self::Executed(encode::success(value, MAX_OUTCOME_LIMIT))
    }

    /// The operation was executed, and would have returned this error, which is
    /// [final](super::OnError::Final).
    #[must_use]
    pub fn executed_error<E: Serialize>(error: &E) -> Self {
        Self::Executed(encode::error(error, MAX_OUTCOME_LIMIT))
    }
}

/// Asks whoever knows (the payment provider, the mail server's log) what became of an abandoned attempt.
///
/// It is called by the attempt that took the key over, and by one at a time: the lease that it is given holds the key
/// and is renewed meanwhile. [`Lease::origin`](crate::Lease::origin) tells the attempt before, which may have been a
/// take-over itself that could not find out: ask by the key, not by the attempt. The operation of an attempt before
/// may even still run, in a process that was cut off: an answer of "not executed" must mean that it cannot take effect
/// any more.
///
/// A panic counts as [`Reconciliation::Unknown`]. It runs detached, as the operation does.
///
/// Implemented for closures of `Fn(Lease) -> impl Future<Output = Reconciliation>`.
#[async_trait]
pub trait Reconcile: Send + Sync + 'static {
    /// What became of the attempts before this lease's.
    async fn reconcile(&self, lease: &Lease) -> Reconciliation;
}

#[async_trait]
impl<F, Fut> Reconcile for F
where
    F: Fn(Lease) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Reconciliation> + Send + 'static,
{
    async fn reconcile(&self, lease: &Lease) -> Reconciliation {
        self(lease.clone()).await
    }
}
