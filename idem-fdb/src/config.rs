//! Settings.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use foundationdb::tuple::Subspace;
use idem_core::clock::{Clock, SystemClock};
use idem_core::limits::{DEFAULT_OUTCOME_LIMIT, MAX_OUTCOME_LIMIT, MAX_RETENTION};

/// Settings of a store.
#[derive(Clone)]
#[non_exhaustive]
pub struct Config {
    /// Where the store's keys lie. Default: the tuple `("idem",)`.
    ///
    /// The subspace is the store's alone. A directory of FoundationDB's directory layer gives one by the bytes of its
    /// prefix: `Subspace::from_bytes(directory.bytes()?)`.
    pub subspace: Subspace,
    /// The longest retention that a reserve may ask for. Default: 24 hours.
    ///
    /// A reserve looks at the days from today to the last on which a record may expire, so each day more is one read
    /// more. The longest that any store over the same subspace was ever opened with counts for all of them.
    pub max_retention: Duration,
    /// The largest outcome, in bytes. Default: 1 MiB; 8 MiB at most, which a transaction of FoundationDB's holds.
    pub outcome_limit: usize,
    /// By how much the clocks of two processes may differ. Default: 5 s. Every process should say the same.
    ///
    /// FoundationDB has no clock to ask, so deadlines are written by the writer's and compared by the reader's. The bound
    /// is added to what is written: a take-over comes that much late, and never early while the clocks keep the bound.
    pub max_clock_skew: Duration,
    /// How long a call may take in all. Default: 10 s.
    pub call_timeout: Duration,
    /// How often a call's transaction is tried within that time. Default: 100.
    pub max_tries: u32,
    /// How concurrent calls are gathered. Default: [`Batching::default`].
    pub batching: Batching,
    /// The clock. Default: the machine's.
    pub clock: Arc<dyn Clock>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            subspace: Subspace::from("idem"),
            max_retention: Duration::from_secs(24 * 60 * 60),
            outcome_limit: DEFAULT_OUTCOME_LIMIT,
            max_clock_skew: Duration::from_secs(5),
            call_timeout: Duration::from_secs(10),
            max_tries: 100,
            batching: Batching::default(),
            clock: Arc::new(SystemClock),
        }
    }
}

impl Config {
    /// With keys in that subspace.
    #[must_use]
    pub fn with_subspace(self, subspace: Subspace) -> Self {
        Self { subspace, ..self }
    }

    /// With that longest retention; 366 days at most.
    #[must_use]
    pub fn with_max_retention(self, max_retention: Duration) -> Self {
        Self { max_retention: max_retention.min(MAX_RETENTION), ..self }
    }

    /// With that outcome limit.
    #[must_use]
    pub fn with_outcome_limit(self, bytes: usize) -> Self {
        Self { outcome_limit: bytes.min(MAX_OUTCOME_LIMIT), ..self }
    }

    /// With clocks that differ by so much at most.
    #[must_use]
    pub fn with_max_clock_skew(self, max_clock_skew: Duration) -> Self {
        Self { max_clock_skew, ..self }
    }

    /// With that bound on a call.
    #[must_use]
    pub fn with_call_timeout(self, call_timeout: Duration) -> Self {
        Self { call_timeout, ..self }
    }

    /// With so many tries of a call's transaction; 1 at least.
    #[must_use]
    pub fn with_max_tries(self, max_tries: u32) -> Self {
        Self { max_tries: max_tries.max(1), ..self }
    }

    /// With that way of gathering calls.
    #[must_use]
    pub fn with_batching(self, batching: Batching) -> Self {
        Self { batching, ..self }
    }

    /// With that clock.
    #[must_use]
    pub fn with_clock(self, clock: Arc<dyn Clock>) -> Self {
        Self { clock, ..self }
    }
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Config")
            .field("subspace", &format_args!("{}", self.subspace))
            .field("max_retention", &self.max_retention)
            .field("outcome_limit", &self.outcome_limit)
            .field("max_clock_skew", &self.max_clock_skew)
            .field("call_timeout", &self.call_timeout)
            .field("max_tries", &self.max_tries)
            .field("batching", &self.batching)
            .field("clock", &self.clock)
            .finish()
    }
}

/// How concurrent calls are gathered into one transaction.
///
/// While fewer than [`alone`](Self::alone) calls are under way, each has a transaction of its own; beyond that, those that come
/// while all transactions are busy go out together as soon as one is done. So nobody waits for a timer.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Batching {
    /// The most calls in one transaction; 1 turns batching off.
    pub calls: usize,
    /// The most bytes that calls add to one transaction; a single call may add more.
    pub bytes: usize,
    /// Transactions of several calls under way at once.
    pub transactions: usize,
    /// So many calls under way have a transaction of their own.
    pub alone: usize,
    /// The most calls that wait for their turn; more are refused, with nothing done.
    pub queue: usize,
}

impl Default for Batching {
    /// 64 calls, 1 MiB, 16 transactions, 4 alone, 65,536 in the queue.
    fn default() -> Self {
        Self { calls: 64, bytes: 1024 * 1024, transactions: 16, alone: 4, queue: 65_536 }
    }
}

impl Batching {
    /// Every call in a transaction of its own.
    #[must_use]
    pub fn off() -> Self {
        Self { calls: 1, ..Self::default() }
    }

    /// With so many calls in one transaction at most.
    #[must_use]
    pub fn with_calls(self, calls: usize) -> Self {
        Self { calls, ..self }
    }

    /// With so many bytes in one transaction at most.
    #[must_use]
    pub fn with_bytes(self, bytes: usize) -> Self {
        Self { bytes, ..self }
    }

    /// With so many transactions under way at once.
    #[must_use]
    pub fn with_transactions(self, transactions: usize) -> Self {
        Self { transactions, ..self }
    }

    /// With so many calls under way by themselves.
    #[must_use]
    pub fn with_alone(self, alone: usize) -> Self {
        Self { alone, ..self }
    }

    /// With so many calls waiting at most.
    #[must_use]
    pub fn with_queue(self, queue: usize) -> Self {
        Self { queue, ..self }
    }
}
