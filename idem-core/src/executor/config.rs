//! Settings of an executor.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::Executor;
use super::detach::Running;
use super::reconcile::Reconcile;
use crate::limits::{DEFAULT_LEASE, DEFAULT_RETENTION, InvalidInput};
use crate::request::Reserve;
use crate::store::KeyStore;
use crate::{Key, OnAbandoned};

/// What is done about a key whose holder was silent until its lease was over, so that nobody knows whether its effect
/// happened.
///
/// It is known that there was a holder for as long as the record lives: for the
/// [retention](ExecutorBuilder::retention), counted from when it acquired the key, and in any case to its lease's end. An
/// attempt that ran for longer than that before it died is forgotten with its lease, and whatever is set here, the next
/// repeat runs the operation as if the key were new.
#[derive(Clone, Default)]
#[non_exhaustive]
pub enum Recovery {
    /// Run the operation again: for operations that bear it, such as a mail, or that pass the
    /// [attempt's number](super::Attempt::number) on as a fencing token.
    #[default]
    Rerun,
    /// Run nothing and return [`RunError::Abandoned`](super::RunError::Abandoned), until somebody has completed or
    /// failed the attempt by [`Record::lease`](crate::Record::lease).
    Refuse,
    /// Take the key over and ask: for money, where the payment provider knows.
    Reconcile(Arc<dyn Reconcile>),
}

impl Recovery {
    /// [`Recovery::Reconcile`] with that hook.
    pub fn reconcile(hook: impl Reconcile) -> Self {
        Self::Reconcile(Arc::new(hook))
    }

    pub(super) fn on_abandoned(&self) -> OnAbandoned {
        match self {
            Self::Rerun | Self::Reconcile(_) => OnAbandoned::TakeOver,
            Self::Refuse => OnAbandoned::Refuse,
        }
    }
}

impl fmt::Debug for Recovery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Rerun => "Rerun",
            Self::Refuse => "Refuse",
            Self::Reconcile(_) => "Reconcile",
        })
    }
}

/// What is done about an operation that panicked. Either way the caller learns of it at once, by
/// [`RunError::Panicked`](super::RunError::Panicked).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum OnPanic {
    /// Free the key: the next repeat runs the operation again.
    #[default]
    Free,
    /// Leave the attempt in progress and do not renew its lease: when it is over, the executor's [`Recovery`] applies.
    Abandon,
}

/// What becomes of a key whose operation returned an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OnError {
    /// The operation had no effect that matters, and may be run again: the next repeat runs it. For time-outs of a
    /// provider, wrong one-time passwords, and whatever else a repeat can mend.
    Free,
    /// The error is the answer, as final as a success: every repeat gets the same error, and nothing is run. For
    /// declined cards.
    Final,
}

/// What a repeat does while another attempt holds the key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Waiting {
    /// Return [`RunError::InProgress`](super::RunError::InProgress) at once.
    #[default]
    Refuse,
    /// Wait for the holder's result, at most so long, and return `InProgress` then.
    ///
    /// A holder of this process wakes the waiting at once when it ends; for others the store is asked from time to
    /// time, after 25 ms at first and about every second in the end, and when the holder's lease is over.
    UpTo(Duration),
}

/// Settings of an [`Executor`].
#[derive(Debug)]
#[must_use]
pub struct ExecutorBuilder {
    pub(super) store: Arc<dyn KeyStore>,
    pub(super) lease: Duration,
    pub(super) retention: Duration,
    pub(super) recovery: Recovery,
    pub(super) on_panic: OnPanic,
    pub(super) waiting: Waiting,
    pub(super) running: Arc<Running>,
}

impl ExecutorBuilder {
    pub(super) fn new(store: Arc<dyn KeyStore>) -> Self {
        let retention = DEFAULT_RETENTION.min(store.capabilities().max_retention);
        Self {
            store,
            lease: DEFAULT_LEASE.min(retention),
            retention,
            recovery: Recovery::default(),
            on_panic: OnPanic::default(),
            waiting: Waiting::default(),
            running: Arc::default(),
        }
    }

    /// How long a holder that died may block its key. While an operation runs, its lease is renewed at a third of
    /// this, and again every twelfth where that fails. Default: 30 s.
    ///
    /// Choose some seconds at least: a lease in the order of the store's response time is lost all the time.
    pub fn lease(self, lease: Duration) -> Self {
        Self { lease, ..self }
    }

    /// How long results are kept for repeats, from the latest acquire, complete or fail. Default: 24 h, or the
    /// longest that the store accepts where that is shorter.
    ///
    /// It is also how long an attempt is remembered that never ended, see [`Recovery`]: choose it well beyond the longest
    /// time that an operation takes.
    pub fn retention(self, retention: Duration) -> Self {
        Self { retention, ..self }
    }

    /// What to do about a holder whose lease is over. Default: [`Recovery::Rerun`].
    pub fn on_abandoned(self, recovery: Recovery) -> Self {
        Self { recovery, ..self }
    }

    /// What to do about an operation that panicked. Default: [`OnPanic::Free`].
    pub fn on_panic(self, on_panic: OnPanic) -> Self {
        Self { on_panic, ..self }
    }

    /// What a repeat does while another attempt holds the key. Default: [`Waiting::Refuse`].
    pub fn waiting(self, waiting: Waiting) -> Self {
        Self { waiting, ..self }
    }

    /// The executor.
    ///
    /// # Errors
    /// [`InvalidInput`], when the lease or the retention is zero or too long for the store, or the retention is
    /// shorter than the lease.
    pub fn build(self) -> Result<Executor, InvalidInput> {
        let probe = Reserve::new(Key::new("", "probe")?).with_lease(self.lease).with_retention(self.retention);
        probe.validate(self.store.capabilities().max_retention)?;
        Ok(Executor::from_settings(self))
    }
}
