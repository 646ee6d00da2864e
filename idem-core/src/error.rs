//! The one error of every store, in three classes.

use std::borrow::Cow;
use std::error::Error;
use std::fmt;

use crate::decision::Refusal;
use crate::limits::InvalidInput;

/// What a caller may conclude from an error about the call that met it (rule R13).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorClass {
    /// The call had no effect, and has none when it is repeated.
    Permanent,
    /// The call had no effect; repeated later it may succeed.
    Retryable,
    /// The call may have had its effect: repeat the very same call with the same token, and its answer tells.
    Unknown,
}

/// What went wrong, decided by the server's error code, never by its text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The input breaks a limit; the source is an [`InvalidInput`].
    InvalidInput,
    /// The attempt no longer holds the key: it was taken over, has failed, or its record has expired.
    LeaseLost,
    /// The record was completed under this very token, with another outcome, which stands.
    AlreadyCompleted,
    /// The store takes no new record now. What it holds is safe.
    Full,
    /// The store could not be reached, or its connection broke.
    Unavailable,
    /// No answer in time.
    Timeout,
    /// The store's concurrency control gave this call up.
    Conflict,
    /// What is stored under the key cannot be read: written by a newer version, by something else, or damaged. Never
    /// taken for an absent record.
    Unreadable,
    /// The store is not set up for this: no schema, a newer schema, no rights, a read-only replica.
    Misconfigured,
    /// Anything else.
    Other,
}

impl ErrorKind {
    /// The class that an error of this kind has unless the store knows better.
    #[must_use]
    pub const fn class(self) -> ErrorClass {
        match self {
            Self::InvalidInput | Self::LeaseLost | Self::AlreadyCompleted | Self::Unreadable | Self::Misconfigured => {
                ErrorClass::Permanent
            }
            Self::Full | Self::Conflict => ErrorClass::Retryable,
            Self::Unavailable | Self::Timeout | Self::Other => ErrorClass::Unknown,
        }
    }

    const fn text(self) -> &'static str {
        match self {
            Self::InvalidInput => "invalid input",
            Self::LeaseLost => "the lease is lost",
            Self::AlreadyCompleted => "already completed with another outcome",
            Self::Full => "the store is full",
            Self::Unavailable => "the store is unavailable",
            Self::Timeout => "no answer in time",
            Self::Conflict => "the call was given up in favour of another",
            Self::Unreadable => "the stored record cannot be read",
            Self::Misconfigured => "the store is not set up for this",
            Self::Other => "the store failed",
        }
    }
}

/// The call that met an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// [`reserve`](crate::KeyStore::reserve)
    Reserve,
    /// [`complete`](crate::KeyStore::complete)
    Complete,
    /// [`fail`](crate::KeyStore::fail)
    Fail,
    /// [`renew`](crate::KeyStore::renew)
    Renew,
    /// [`fetch`](crate::KeyStore::fetch)
    Fetch,
    /// [`purge_expired`](crate::KeyStore::purge_expired)
    Purge,
    /// Opening, migrating or checking a store.
    Setup,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Reserve => "reserve",
            Self::Complete => "complete",
            Self::Fail => "fail",
            Self::Renew => "renew",
            Self::Fetch => "fetch",
            Self::Purge => "purge",
            Self::Setup => "setup",
        })
    }
}

/// Trouble of a store, or input that it refuses. A duplicate is not an error (rule R2).
///
/// It names no key and holds no body, so it can be logged.
pub struct StoreError(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    class: ErrorClass,
    store: Cow<'static, str>,
    operation: Operation,
    context: Option<Cow<'static, str>>,
    source: Option<Box<dyn Error + Send + Sync>>,
}

impl StoreError {
    /// An error of that kind, in the kind's class.
    #[must_use]
    pub fn new(kind: ErrorKind, store: impl Into<Cow<'static, str>>, operation: Operation) -> Self {
        let (store, class) = (store.into(), kind.class());
        Self(Box::new(Inner { kind, class, store, operation, context: None, source: None }))
    }

    /// The error for input that breaks a limit.
    #[must_use]
    pub fn invalid(input: InvalidInput, store: impl Into<Cow<'static, str>>, operation: Operation) -> Self {
        Self::new(ErrorKind::InvalidInput, store, operation).with_source(input)
    }

    /// The error for a call that [`decision`](crate::decision) refuses.
    #[must_use]
    pub fn refused(refusal: Refusal, store: impl Into<Cow<'static, str>>, operation: Operation) -> Self {
        let kind = match refusal {
            Refusal::LeaseLost => ErrorKind::LeaseLost,
            Refusal::AlreadyCompleted => ErrorKind::AlreadyCompleted,
        };
        Self::new(kind, store, operation)
    }

    /// In that class instead of the kind's.
    #[must_use]
    pub fn with_class(mut self, class: ErrorClass) -> Self {
        self.0.class = class;
        self
    }

    /// With a sentence of what was being done. It must not hold a key, a body or a password.
    #[must_use]
    pub fn with_context(mut self, context: impl Into<Cow<'static, str>>) -> Self {
        self.0.context = Some(context.into());
        self
    }

    /// With the error that caused it.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        self.0.source = Some(source.into());
        self
    }

    /// What went wrong.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// What a caller may conclude about the call.
    #[must_use]
    pub fn class(&self) -> ErrorClass {
        self.0.class
    }

    /// The store that met it.
    #[must_use]
    pub fn store(&self) -> &str {
        &self.0.store
    }

    /// The call that met it.
    #[must_use]
    pub fn operation(&self) -> Operation {
        self.0.operation
    }

    /// The limit that the input broke, where that is what went wrong.
    #[must_use]
    pub fn invalid_input(&self) -> Option<&InvalidInput> {
        self.0.source.as_ref().and_then(|source| source.downcast_ref())
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.0.store, self.0.operation, self.0.kind.text())?;
        if let Some(context) = &self.0.context {
            write!(f, " ({context})")?;
        }
        Ok(())
    }
}

impl fmt::Debug for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreError")
            .field("kind", &self.0.kind)
            .field("class", &self.0.class)
            .field("store", &self.0.store)
            .field("operation", &self.0.operation)
            .field("context", &self.0.context)
            .field("source", &self.0.source)
            .finish()
    }
}

impl Error for StoreError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.0.source.as_ref().map(|source| &**source as &(dyn Error + 'static))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_source_is_kept_and_can_be_recovered() {
        let error = StoreError::invalid(InvalidInput::KeyIdEmpty, "memory", Operation::Reserve);
        assert_eq!(error.to_string(), "memory: reserve: invalid input");
        assert_eq!(error.class(), ErrorClass::Permanent);
        assert_eq!(error.invalid_input(), Some(&InvalidInput::KeyIdEmpty));
        assert_eq!(error.source().unwrap().to_string(), "the key id is empty");
    }

    #[test]
    fn a_store_that_knows_better_sets_the_class() {
        let error = StoreError::new(ErrorKind::Unavailable, "x", Operation::Complete);
        assert_eq!(error.class(), ErrorClass::Unknown);
        assert_eq!(error.with_class(ErrorClass::Retryable).class(), ErrorClass::Retryable);
    }

    #[test]
    fn it_is_one_word_wide() {
        assert_eq!(size_of::<StoreError>(), size_of::<usize>());
    }
}
