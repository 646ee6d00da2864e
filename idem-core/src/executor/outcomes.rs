//! Operations that make their own outcomes, and what a run of any operation comes to.

use std::fmt;
use std::time::Duration;

use tokio::task::JoinError;

use super::judge::Judge;
use crate::error::StoreError;
use crate::outcome::{Failure, Outcome};
use crate::record::Record;

/// How an attempt ends in the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Settlement {
    /// This outcome is final, and every repeat gets it.
    Complete(Outcome),
    /// The key is free, and a repeat runs the operation again.
    Fail(Failure),
}

/// What an operation of [`run_outcome`](super::Executor::run_outcome) ends in: something for its caller, and something for
/// the store. `Debug` does not show the value.
#[derive(Clone, PartialEq, Eq)]
pub struct Ending<V> {
    /// For the caller of this run only.
    pub value: V,
    /// For the store, and so for every repeat.
    pub settlement: Settlement,
}

impl<V> Ending<V> {
    /// It took effect, or gave a final answer: repeats get this outcome.
    pub fn complete(value: V, outcome: Outcome) -> Self {
        Self { value, settlement: Settlement::Complete(outcome) }
    }

    /// It may be run again.
    pub fn fail(value: V, failure: Failure) -> Self {
        Self { value, settlement: Settlement::Fail(failure) }
    }
}

impl<V> fmt::Debug for Ending<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ending").field("settlement", &self.settlement).finish_non_exhaustive()
    }
}

/// What became of a call of [`run_outcome`](super::Executor::run_outcome): each case has to be answered in its own way, so
/// the list is complete. `Debug` shows no value.
pub enum Run<V> {
    /// The operation was run to its end by this call.
    Ended {
        /// What it gave for its caller.
        value: V,
        /// The attempt that ran it.
        attempt: u32,
        /// Whether it is final. Otherwise the key is free.
        completed: bool,
        /// Whether the store has taken its end. If not, a repeat may run it again: the lease was lost, or the store could
        /// not be reached until the lease's end.
        recorded: Result<(), StoreError>,
    },
    /// There is an outcome: the operation took effect.
    Stored {
        /// As it is stored.
        outcome: Outcome,
        /// The attempt that it is of.
        attempt: u32,
        /// Whether it was there before this call, and nothing was run. Otherwise the operation was run by this call,
        /// ended in another way, and turned out to have completed its key, or to have been completed by a reconciler.
        replayed: bool,
    },
    /// Another attempt holds the key. Nothing was run.
    InProgress {
        /// The attempt that holds it.
        attempt: u32,
        /// How long its lease still runs unless it is renewed.
        retry_after: Duration,
    },
    /// The key was used with another fingerprint. Nothing was run.
    Mismatch,
    /// See [`RunError::Abandoned`](super::RunError::Abandoned).
    Abandoned(Box<Record>),
    /// See [`RunError::OutcomeUnknown`](super::RunError::OutcomeUnknown).
    OutcomeUnknown {
        /// The attempt that asked.
        attempt: u32,
    },
    /// The operation panicked, and by the policy [`OnPanic`](super::OnPanic) the key is free or left abandoned.
    Panicked {
        /// The panic's message, where it is a text.
        message: Box<str>,
        /// The attempt that panicked.
        attempt: u32,
    },
    /// The key could not be reserved, and this call does not hold it. Nothing was run.
    Unreserved(StoreError),
    /// The key was reserved, and then the store failed before the operation was run, or before what a reconcile hook
    /// had found out was stored. Nothing was run by this call; the key is held until the end of a lease.
    Store(StoreError),
    /// See [`RunError::Interrupted`](super::RunError::Interrupted).
    Interrupted(JoinError),
    /// The call was made outside of a tokio runtime. Nothing was run.
    NoRuntime,
}

impl<V> fmt::Debug for Run<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ended { attempt, completed, recorded, .. } => f
                .debug_struct("Ended")
                .field("attempt", attempt)
                .field("completed", completed)
                .field("recorded", recorded)
                .finish_non_exhaustive(),
            Self::Stored { outcome, attempt, replayed } => f
                .debug_struct("Stored")
                .field("outcome", outcome)
                .field("attempt", attempt)
                .field("replayed", replayed)
                .finish(),
            Self::InProgress { attempt, retry_after } => {
                f.debug_struct("InProgress").field("attempt", attempt).field("retry_after", retry_after).finish()
            }
            Self::Mismatch => f.write_str("Mismatch"),
            Self::Abandoned(record) => f.debug_tuple("Abandoned").field(record).finish(),
            Self::OutcomeUnknown { attempt } => f.debug_struct("OutcomeUnknown").field("attempt", attempt).finish(),
            Self::Panicked { message, attempt } => {
                f.debug_struct("Panicked").field("message", message).field("attempt", attempt).finish()
            }
            Self::Unreserved(error) => f.debug_tuple("Unreserved").field(error).finish(),
            Self::Store(error) => f.debug_tuple("Store").field(error).finish(),
            Self::Interrupted(error) => f.debug_tuple("Interrupted").field(error).finish(),
            Self::NoRuntime => f.write_str("NoRuntime"),
        }
    }
}

/// The operation has said it all.
pub(super) struct AsItSays;

impl<V> Judge<Ending<V>, V> for AsItSays {
    fn settle(&self, ended: Ending<V>, _limit: usize) -> (V, Settlement) {
        (ended.value, ended.settlement)
    }

    fn agrees(ended: &Ending<V>, outcome: &Outcome) -> bool {
        matches!(&ended.settlement, Settlement::Complete(said) if said.code == outcome.code)
    }

    fn value(ended: Ending<V>) -> V {
        ended.value
    }

    fn gives_way(_value: &V) -> bool {
        true
    }
}
