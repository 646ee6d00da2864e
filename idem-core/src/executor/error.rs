//! What a run returns.

use std::error::Error;
use std::fmt;
use std::time::Duration;

use tokio::task::JoinError;

use crate::error::StoreError;
use crate::outcome::Withheld;
use crate::record::Record;

/// An operation that took effect: now, or when the key was first used.
///
/// `Debug` does not show the value.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Executed<T> {
    /// What the operation returned.
    pub value: T,
    /// The attempt that returned it.
    pub attempt: u32,
    /// Whether it is the stored result of an earlier attempt, and nothing was run now.
    pub replayed: bool,
}

impl<T> fmt::Debug for Executed<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Executed")
            .field("attempt", &self.attempt)
            .field("replayed", &self.replayed)
            .finish_non_exhaustive()
    }
}

/// Why a run has no value to return. The variants say whether the operation was run and what a repeat will meet.
///
/// It can be logged: neither `Debug` nor `Display` nor the sources show values or stored bytes. They do show an
/// operation's error, as its `Display` does.
#[non_exhaustive]
pub enum RunError<T, E> {
    /// The operation was run and returned this error.
    Failed {
        /// The error.
        error: E,
        /// The attempt that returned it.
        attempt: u32,
        /// Whether the error is stored as the final answer. Otherwise the key is free, and a repeat runs the
        /// operation again.
        is_final: bool,
        /// Whether it is the stored error of an earlier attempt, and nothing was run now.
        replayed: bool,
    },
    /// Another attempt holds the key. Nothing was run.
    InProgress {
        /// The attempt that holds it.
        attempt: u32,
        /// How long its lease still runs unless it is renewed. The key may be free much sooner.
        retry_after: Duration,
    },
    /// The key was used with another fingerprint. Nothing was run, and a repeat of this request never will be.
    Mismatch,
    /// The holder was silent until its lease was over, and the policy is
    /// [`Recovery::Refuse`](super::Recovery::Refuse). Nothing was run. Somebody has to find out and to complete or fail
    /// the attempt by [`Record::lease`].
    Abandoned(Box<Record>),
    /// The holder was silent until its lease was over, and the reconcile hook could not tell what became of it.
    /// Nothing was run. The first repeat after this attempt's lease asks again.
    OutcomeUnknown {
        /// The attempt that asked.
        attempt: u32,
    },
    /// The operation panicked. By the policy [`OnPanic`](super::OnPanic) the key is free or left abandoned. (Where it had
    /// [completed its lease](super#together-with-rows-of-your-own) before, its stored result is returned instead.)
    Panicked {
        /// The panic's message, where it is a text.
        message: Box<str>,
        /// The attempt that panicked.
        attempt: u32,
    },
    /// The operation was executed by an earlier attempt, but its result is not kept. Nothing was run and nothing ever
    /// will be.
    Withheld {
        /// The attempt that executed it.
        attempt: u32,
        /// The code of the outcome: 0 for a success, 1 for a final error.
        code: u16,
        /// Why the result is not kept.
        reason: Withheld,
    },
    /// The operation was executed by an earlier attempt, but its stored result cannot be read as the type that this
    /// call asks for. Nothing was run.
    ///
    /// The error within may quote the stored result, so it is no source, and `Debug` shows its place only.
    Undecodable(serde_json::Error),
    /// The store failed before the operation was run: nothing was run, and a repeat may be. The key may be held until
    /// the end of a lease.
    Store(StoreError),
    /// The operation **was run**, but its result could not be stored, so a repeat may run it again: the lease was lost
    /// to another attempt, or the store could not be reached until the lease's end. With
    /// [`AlreadyCompleted`](crate::ErrorKind::AlreadyCompleted) as the source's kind another outcome is stored of this
    /// attempt, by a reconciler or by the operation itself, and that is what repeats get.
    Unrecorded {
        /// What the operation returned.
        result: Result<T, E>,
        /// The attempt that returned it.
        attempt: u32,
        /// Why it could not be stored.
        source: StoreError,
    },
    /// The runtime was shut down while the operation ran, and has dropped it: it may have taken effect. The key is held
    /// until the lease's end, and [`Recovery`](super::Recovery) applies then.
    Interrupted(JoinError),
    /// The call was made outside of a tokio runtime. Nothing was run.
    NoRuntime,
}

impl<T, E: fmt::Display> fmt::Display for RunError<T, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed { error, is_final: true, .. } => write!(f, "the operation failed for good: {error}"),
            Self::Failed { error, .. } => write!(f, "the operation failed: {error}"),
            Self::InProgress { attempt, retry_after } => {
                write!(f, "attempt {attempt} is in progress, its lease ends in {retry_after:?}")
            }
            Self::Mismatch => f.write_str("the key was used for another request"),
            Self::Abandoned(record) => {
                write!(f, "attempt {} was abandoned, and its outcome is unknown", record.attempt)
            }
            Self::OutcomeUnknown { .. } => f.write_str("the outcome of an abandoned attempt could not be found out"),
            Self::Panicked { message, attempt } => write!(f, "attempt {attempt} panicked: {message}"),
            Self::Withheld { reason, .. } => write!(f, "the operation was executed, but {reason}"),
            Self::Undecodable(error) => write!(
                f,
                "the operation was executed, but its stored result cannot be read: {:?} error at line {} column {}",
                error.classify(),
                error.line(),
                error.column()
            ),
            Self::Store(_) => f.write_str("the store failed, and the operation was not run"),
            Self::Unrecorded { result: Ok(_), .. } => {
                f.write_str("the operation was executed, but its result could not be stored")
            }
            Self::Unrecorded { result: Err(error), .. } => {
                write!(f, "the operation failed ({error}), and that could not be stored")
            }
            Self::Interrupted(_) => f.write_str("the operation was interrupted, and its outcome is unknown"),
            Self::NoRuntime => f.write_str("not within a tokio runtime"),
        }
    }
}

impl<T, E: fmt::Display> fmt::Debug for RunError<T, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed { error, attempt, is_final, replayed } => f
                .debug_struct("Failed")
                .field("error", &format_args!("{error}"))
                .field("attempt", attempt)
                .field("is_final", is_final)
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
            Self::Withheld { attempt, code, reason } => f
                .debug_struct("Withheld")
                .field("attempt", attempt)
                .field("code", code)
                .field("reason", reason)
                .finish(),
            Self::Undecodable(error) => f
                .debug_struct("Undecodable")
                .field("category", &error.classify())
                .field("line", &error.line())
                .field("column", &error.column())
                .finish(),
            Self::Store(source) => f.debug_tuple("Store").field(source).finish(),
            Self::Unrecorded { result, attempt, source } => f
                .debug_struct("Unrecorded")
                .field("result", &result.as_ref().map(|_| format_args!("..")).map_err(|error| error.to_string()))
                .field("attempt", attempt)
                .field("source", source)
                .finish(),
            Self::Interrupted(source) => f.debug_tuple("Interrupted").field(source).finish(),
            Self::NoRuntime => f.write_str("NoRuntime"),
        }
    }
}

impl<T, E: fmt::Display> Error for RunError<T, E> {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Store(source) | Self::Unrecorded { source, .. } => Some(source),
            Self::Interrupted(source) => Some(source),
            _ => None,
        }
    }
}
