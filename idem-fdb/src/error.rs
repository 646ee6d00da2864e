//! What went wrong in FoundationDB, as the contract's kinds and classes: by its predicates and codes, never by text.

use std::error::Error;
use std::fmt;

use foundationdb::{FdbBindingError, FdbError};
use idem_core::{ErrorClass, ErrorKind, Operation, StoreError};

use crate::value::ValueError;

/// The name of this store in errors.
pub(crate) const STORE: &str = "fdb";

/// Why this crate itself could not go on.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum FdbStoreError {
    /// The client library is older than the API version that this crate was built for.
    #[error(
        "the installed client library knows the API up to version {found}, and {wanted} was asked for: install a newer \
         one, or build with the feature of an older version"
    )]
    ClientTooOld {
        /// The newest version that the library knows.
        found: i32,
        /// The version asked for.
        wanted: i32,
    },
    /// The network thread could not be started.
    #[error("the thread for FoundationDB's network could not be started")]
    NetworkThread,
    /// The path of the cluster file is not UTF-8, or holds a NUL.
    #[error("the path of the cluster file is not text that FoundationDB takes")]
    ClusterFile,
    /// The stored settings are of a newer version of this crate, or something else.
    #[error("what is stored as settings is not readable by this version")]
    Settings,
    /// There are no settings: the store was never opened, or somebody has cleared them.
    #[error("the store is not set up: open it, or call Records::set_up")]
    NotSetUp,
    /// The stored values are no record.
    #[error("{0}")]
    Value(#[from] ValueError),
    /// An earlier try of the call may have been committed and overtaken since, so that the answer to the last one would deny
    /// what has happened. The same call again gets that answer, as one that came too late.
    #[error("an earlier try of the call may have been committed, and overtaken since")]
    Overtaken,
    /// Too many calls wait for their turn.
    #[error("too many calls wait for their turn")]
    QueueFull,
    /// The transaction was begun anew as often as the configuration allows.
    #[error("the transaction was tried {tries} times")]
    TooManyTries {
        /// How often.
        tries: u32,
    },
}

/// Why a call within a caller's transaction has no answer.
///
/// Return it from the closure of [`Database::run`](foundationdb::Database::run) by `?`: what FoundationDB said becomes
/// exactly the error that its retry loop looks for, and everything else ends the loop.
#[derive(Debug)]
#[non_exhaustive]
pub enum CallError {
    /// FoundationDB's own error. Hand it to the retry loop.
    Fdb(FdbError),
    /// The contract's answer, or trouble of this store's: not to be tried again within this transaction.
    Store(StoreError),
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fdb(error) => write!(f, "FoundationDB: {error} ({})", error.code()),
            Self::Store(error) => error.fmt(f),
        }
    }
}

impl Error for CallError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Fdb(error) => Some(error),
            Self::Store(error) => error.source(),
        }
    }
}

impl From<FdbError> for CallError {
    fn from(error: FdbError) -> Self {
        Self::Fdb(error)
    }
}

impl From<StoreError> for CallError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl From<CallError> for FdbBindingError {
    fn from(error: CallError) -> Self {
        match error {
            // Despite its name, this is what the loop tries again. Wrapped in an error of any other type it is not.
            CallError::Fdb(error) => Self::NonRetryableFdbError(error),
            CallError::Store(error) => Self::CustomError(Box::new(error)),
        }
    }
}

/// Why a transaction has ended without answers. Cheap to clone: those who shared it share this.
#[derive(Debug, Clone)]
pub(crate) enum Stop {
    Fdb(FdbError),
    Own(FdbStoreError),
}

impl From<FdbError> for Stop {
    fn from(error: FdbError) -> Self {
        Self::Fdb(error)
    }
}

impl From<FdbStoreError> for Stop {
    fn from(error: FdbStoreError) -> Self {
        Self::Own(error)
    }
}

impl Stop {
    /// As an error of a call within the caller's transaction.
    pub(crate) fn in_transaction(self, operation: Operation) -> CallError {
        match self {
            Self::Fdb(error) => CallError::Fdb(error),
            Self::Own(error) => CallError::Store(own_error(error, operation)),
        }
    }
}

/// What is known of a call that ended without an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effect {
    /// None of its commits can have happened.
    None,
    /// One may have happened, or may happen yet.
    Possible,
}

/// The contract's error for FoundationDB's, of a call that has changed nothing.
pub(crate) fn fdb_error(error: FdbError, operation: Operation) -> StoreError {
    let (kind, class) = classify(error);
    StoreError::new(kind, STORE, operation).with_class(class).with_source(error)
}

/// The contract's error for one of this crate's, of a call that has changed nothing.
pub(crate) fn own_error(error: FdbStoreError, operation: Operation) -> StoreError {
    let (kind, class) = match error {
        FdbStoreError::Settings | FdbStoreError::Value(_) => (ErrorKind::Unreadable, ErrorClass::Permanent),
        FdbStoreError::TooManyTries { .. } => (ErrorKind::Conflict, ErrorClass::Retryable),
        FdbStoreError::Overtaken => (ErrorKind::Other, ErrorClass::Unknown),
        FdbStoreError::QueueFull => (ErrorKind::Unavailable, ErrorClass::Retryable),
        _ => (ErrorKind::Misconfigured, ErrorClass::Permanent),
    };
    StoreError::new(kind, STORE, operation).with_class(class).with_source(error)
}

/// The kind, and the class where no commit can have happened.
fn classify(error: FdbError) -> (ErrorKind, ErrorClass) {
    let kind = match error.code() {
        // not_committed: the transaction met another.
        1020 => ErrorKind::Conflict,
        // timed_out, transaction_too_old, transaction_timed_out
        1004 | 1007 | 1031 => ErrorKind::Timeout,
        // What is wrong with the cluster file, TLS, or the API's version; permission_denied.
        1504 | 1509 | 1511..=1517 | 1521 | 2016 | 2104 | 2105 | 2200..=2203 | 6000 | 6001 => ErrorKind::Misconfigured,
        // Wrong use, which the checks before exclude: a transaction, a key or a value that is too large, and so on.
        2000..=2199 => ErrorKind::Other,
        _ => ErrorKind::Unavailable,
    };
    let class = match kind {
        ErrorKind::Misconfigured | ErrorKind::Other => ErrorClass::Permanent,
        _ => ErrorClass::Retryable,
    };
    (kind, class)
}
