//! What a caller asks of a store, and the answers.

use std::time::{Duration, SystemTime};

use crate::fingerprint::Fingerprint;
use crate::key::Key;
use crate::limits::{DEFAULT_LEASE, DEFAULT_RETENTION, InvalidInput, check_lease, check_retention};
use crate::record::Record;
use crate::token::Token;

/// A wish to hold a key.
///
/// Make it once and send the very same value again when a reply is lost: its token makes the repeat harmless (rule R4).
///
/// ```
/// use std::time::Duration;
/// use idem_core::{Fingerprint, Key, Reserve};
///
/// let request = Reserve::new(Key::new("tenant-7", "order-42")?)
///     .with_fingerprint(Fingerprint::of("amount=1200"))
///     .with_lease(Duration::from_secs(60))
///     .with_retention(Duration::from_secs(48 * 60 * 60));
/// # Ok::<(), idem_core::InvalidInput>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Reserve {
    /// The key wanted.
    pub key: Key,
    /// The token of the attempt that this request starts, if it wins.
    pub token: Token,
    /// What is asked for. Compared where the record has one too.
    pub fingerprint: Option<Fingerprint>,
    /// How long the key is held unless the lease is renewed: as long as a holder that died may block the others.
    pub lease: Duration,
    /// How long the record is kept, counted from the latest acquire, complete or fail. At least as long as any client
    /// or broker may repeat the request.
    pub retention: Duration,
    /// What to do about a holder whose lease is over.
    pub on_abandoned: OnAbandoned,
}

impl Reserve {
    /// A request with a new random token, no fingerprint, a lease of 30 s, a retention of 24 h, and take-over.
    #[must_use]
    pub fn new(key: Key) -> Self {
        Self {
            key,
            token: Token::random(),
            fingerprint: None,
            lease: DEFAULT_LEASE,
            retention: DEFAULT_RETENTION,
            on_abandoned: OnAbandoned::TakeOver,
        }
    }

    /// With that token instead of a random one: to repeat a call whose reply was lost.
    #[must_use]
    pub fn with_token(self, token: Token) -> Self {
        Self { token, ..self }
    }

    /// With that fingerprint.
    #[must_use]
    pub fn with_fingerprint(self, fingerprint: impl Into<Option<Fingerprint>>) -> Self {
        Self { fingerprint: fingerprint.into(), ..self }
    }

    /// With that lease.
    #[must_use]
    pub fn with_lease(self, lease: Duration) -> Self {
        Self { lease, ..self }
    }

    /// With that retention.
    #[must_use]
    pub fn with_retention(self, retention: Duration) -> Self {
        Self { retention, ..self }
    }

    /// With that policy for a holder whose lease is over.
    #[must_use]
    pub fn with_on_abandoned(self, on_abandoned: OnAbandoned) -> Self {
        Self { on_abandoned, ..self }
    }

    /// Checks the durations against the contract and against the store's longest retention. Every store does this
    /// before it sends anything.
    ///
    /// # Errors
    /// [`InvalidInput`], when a duration is zero, absurd, or the retention is shorter than the lease.
    pub fn validate(&self, max_retention: Duration) -> Result<(), InvalidInput> {
        check_lease(self.lease)?;
        check_retention(self.retention, max_retention)?;
        if self.retention < self.lease {
            return Err(InvalidInput::RetentionShorterThanLease { retention: self.retention, lease: self.lease });
        }
        Ok(())
    }
}

/// What a reserve does when the holder's lease is over and nobody knows whether its effect happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum OnAbandoned {
    /// Become the holder, and learn of the previous attempt by [`Origin::Takeover`]: for operations that may run again.
    #[default]
    TakeOver,
    /// Leave it as it is and answer [`Reservation::Abandoned`]: for operations of which somebody must find out first.
    Refuse,
}

/// The answer to a reserve. A duplicate is an answer, never an error (rule R2).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reservation {
    /// The caller holds the key: run the operation, then complete or fail with this lease.
    Acquired(Lease),
    /// Another attempt holds it.
    InProgress {
        /// The attempt that holds it.
        attempt: u32,
        /// How long its lease still runs: more than zero, and at most as long as its latest acquire or renewal granted.
        /// The key may be free much sooner.
        retry_after: Duration,
    },
    /// It is done: replay the outcome.
    Completed(Record),
    /// The holder's lease is over, and the policy is [`OnAbandoned::Refuse`]: the outcome is unknown and somebody must
    /// decide, with [`Record::lease`].
    Abandoned(Record),
    /// The key was used for something else. Nothing is run and nothing is replayed.
    Mismatch,
}

/// The handle of an attempt that holds a key.
///
/// It has no effect when dropped: an attempt ends by complete, fail, or the end of the lease.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Lease {
    /// The key held.
    pub key: Key,
    /// The token under which it is held.
    pub token: Token,
    /// The number of the attempt, from 1: the fencing token to hand downstream. It starts anew when a record expires.
    pub attempt: u32,
    /// How the attempt came to hold the key.
    pub origin: Origin,
    /// How long the record is kept from complete or fail on.
    pub retention: Duration,
}

impl Lease {
    /// A handle from its parts, for stores that keep them in a form of their own.
    #[must_use]
    pub fn new(key: Key, token: Token, attempt: u32, origin: Origin, retention: Duration) -> Self {
        Self { key, token, attempt, origin, retention }
    }

    /// With another retention, counted from complete or fail.
    #[must_use]
    pub fn with_retention(self, retention: Duration) -> Self {
        Self { retention, ..self }
    }
}

/// How an attempt came to hold its key. Kept in the record, so that a repeated reserve gets the same answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Origin {
    /// The key was absent, or its record had expired.
    Fresh,
    /// The attempt before this one said that it had failed.
    Retry,
    /// The attempt before this one was silent until its lease was over: its effect may have happened, may be happening,
    /// or may not. So may those of attempts before it, where it took over itself: ask by key, not by attempt.
    Takeover(PreviousAttempt),
}

/// The attempt that was taken over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PreviousAttempt {
    /// Its token.
    pub token: Token,
    /// Its number.
    pub attempt: u32,
    /// When it acquired the key, by the store's clock.
    pub started_at: SystemTime,
}

/// How much one purge may do (rule R15).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PurgeBudget {
    /// The most records to remove. Stores that drop records by the partition may go beyond it where that costs them
    /// nothing.
    pub records: usize,
}

impl PurgeBudget {
    /// At most so many records.
    #[must_use]
    pub const fn records(records: usize) -> Self {
        Self { records }
    }
}

impl Default for PurgeBudget {
    /// 1,000 records.
    fn default() -> Self {
        Self::records(1_000)
    }
}

/// What one purge did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Purged {
    /// Records removed by this call.
    pub removed: u64,
    /// Whether the budget ended before the work did: call again.
    pub more: bool,
}

impl Purged {
    /// A result from its parts.
    #[must_use]
    pub const fn new(removed: u64, more: bool) -> Self {
        Self { removed, more }
    }
}
