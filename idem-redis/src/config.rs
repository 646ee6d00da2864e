//! Settings.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use idem_core::limits::{DEFAULT_OUTCOME_LIMIT, MAX_OUTCOME_LIMIT, MAX_RETENTION};

use crate::error::RedisStoreError;

/// Settings of a [`RedisStore`](crate::RedisStore).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Config {
    /// What the names of all keys begin with. Default: `idem`.
    pub prefix: Prefix,
    /// The longest retention that a reserve may ask for. Default: 366 days, the longest there is.
    pub max_retention: Duration,
    /// The largest outcome, in bytes. Default: 1 MiB; 8 MiB at most.
    pub outcome_limit: usize,
    /// How long a call may take in all: waiting for its turn, connecting, and repeating what was not answered included.
    /// Default: 5 s.
    pub call_timeout: Duration,
    /// How long the server may take for an answer, or to accept a connection, before the call is repeated on another
    /// connection. Default: 1 s.
    pub response_timeout: Duration,
    /// How calls are gathered. Default: [`Batching::default`].
    pub batching: Batching,
    /// What a call waits for before it is answered. Default: nothing but the server's answer.
    pub acknowledge: Acknowledge,
    /// What [`open`](crate::RedisStore::open) does about a server that may evict live records under memory pressure.
    /// Default: [`Policy::Refuse`].
    pub on_eviction: Policy,
    /// What [`open`](crate::RedisStore::open) does about a server that loses acknowledged writes when it crashes or fails
    /// over. Default: [`Policy::Warn`].
    pub on_data_loss: Policy,
    #[doc(hidden)]
    pub clock_shift: ClockShift,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            prefix: Prefix::default(),
            max_retention: MAX_RETENTION,
            outcome_limit: DEFAULT_OUTCOME_LIMIT,
            call_timeout: Duration::from_secs(5),
            response_timeout: Duration::from_secs(1),
            batching: Batching::default(),
            acknowledge: Acknowledge::default(),
            on_eviction: Policy::Refuse,
            on_data_loss: Policy::Warn,
            clock_shift: ClockShift::default(),
        }
    }
}

impl Config {
    /// With that prefix.
    #[must_use]
    pub fn with_prefix(self, prefix: Prefix) -> Self {
        Self { prefix, ..self }
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

    /// With that bound on a call.
    #[must_use]
    pub fn with_call_timeout(self, call_timeout: Duration) -> Self {
        Self { call_timeout, ..self }
    }

    /// With that bound on an answer.
    #[must_use]
    pub fn with_response_timeout(self, response_timeout: Duration) -> Self {
        Self { response_timeout, ..self }
    }

    /// With that way of gathering calls.
    #[must_use]
    pub fn with_batching(self, batching: Batching) -> Self {
        Self { batching, ..self }
    }

    /// With that to wait for.
    #[must_use]
    pub fn with_acknowledge(self, acknowledge: Acknowledge) -> Self {
        Self { acknowledge, ..self }
    }

    /// With that policy about eviction.
    #[must_use]
    pub fn with_on_eviction(self, policy: Policy) -> Self {
        Self { on_eviction: policy, ..self }
    }

    /// With that policy about the loss of acknowledged writes.
    #[must_use]
    pub fn with_on_data_loss(self, policy: Policy) -> Self {
        Self { on_data_loss: policy, ..self }
    }

    /// For tests: stores of this configuration and its clones see the server's clock moved on by as much as this says.
    #[doc(hidden)]
    #[must_use]
    pub fn with_clock_shift(self, clock_shift: ClockShift) -> Self {
        Self { clock_shift, ..self }
    }
}

/// What to do about a server that is set up to lose what the contract promises to keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Policy {
    /// Nothing.
    Ignore,
    /// Say so in a `tracing` event, and go on.
    Warn,
    /// Fail, with [`Misconfigured`](idem_core::ErrorKind::Misconfigured) and
    /// [`RedisStoreError::Unsafe`].
    Refuse,
}

/// What a call waits for before it is answered, beside the server's answer: less is lost when the server fails over or
/// crashes, for a round trip to a replica or a sync of the disk. Also calls that change nothing wait: what they tell of was
/// written by somebody.
///
/// When too few answer in time, the call fails with [`RedisStoreError::TooFewAcknowledged`] in class *unknown*: what it
/// wrote is on the server and may reach the others later. The same call again waits again.
///
/// **This is no consensus.** A failover may still choose a replica that did not answer, and a server that is cut off
/// goes on until it notices. It makes the window small; it does not close it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Acknowledge {
    /// How many replicas must have the write in memory (`WAIT`).
    pub replicas: u32,
    /// How the write must be on disks (`WAITAOF`; Redis 7.2 and later, Valkey).
    pub fsync: Fsync,
    /// How long to wait for them. Less than [`Config::response_timeout`].
    pub timeout: Duration,
}

/// Whose disk a write has to be on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Fsync {
    /// Nobody's.
    #[default]
    None,
    /// The server's own append-only file.
    Server,
    /// Also those of as many replicas as [`Acknowledge::replicas`] says.
    ServerAndReplicas,
}

impl Default for Acknowledge {
    /// Nothing; 500 ms where something is set.
    fn default() -> Self {
        Self { replicas: 0, fsync: Fsync::None, timeout: Duration::from_millis(500) }
    }
}

impl Acknowledge {
    /// By so many replicas.
    #[must_use]
    pub fn replicas(replicas: u32) -> Self {
        Self { replicas, ..Self::default() }
    }

    /// On that disk.
    #[must_use]
    pub fn with_fsync(self, fsync: Fsync) -> Self {
        Self { fsync, ..self }
    }

    /// Waiting for so long.
    #[must_use]
    pub fn with_timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    pub(crate) fn waits(self) -> bool {
        self.replicas > 0 || self.fsync != Fsync::None
    }
}

/// How concurrent calls are gathered into one write to the server.
///
/// A call goes out at once while few are under way; those that come while all senders are busy go out together as soon
/// as one is done. So nobody waits for a timer, and a caller that is alone pays nothing.
///
/// On a cluster, whose nodes would each have a pipeline of its own, calls are not gathered: 256 at most are under way at
/// once, not counting those that have been for longer than 50 ms, and the others wait in the queue.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Batching {
    /// The most calls in one pipeline; 1 turns batching off.
    pub calls: usize,
    /// The most bytes of commands in one pipeline; a single call may have more.
    pub bytes: usize,
    /// Pipelines under way at once.
    pub pipelines: usize,
    /// The most calls that wait for their turn; more are refused, with nothing done.
    pub queue: usize,
}

impl Default for Batching {
    /// 128 calls, 1 MiB, 2 pipelines, 65,536 in the queue.
    fn default() -> Self {
        Self { calls: 128, bytes: 1024 * 1024, pipelines: 2, queue: 65_536 }
    }
}

impl Batching {
    /// With so many calls in one pipeline at most.
    #[must_use]
    pub fn with_calls(self, calls: usize) -> Self {
        Self { calls, ..self }
    }

    /// With so many bytes in one pipeline at most.
    #[must_use]
    pub fn with_bytes(self, bytes: usize) -> Self {
        Self { bytes, ..self }
    }

    /// With so many pipelines under way at once.
    #[must_use]
    pub fn with_pipelines(self, pipelines: usize) -> Self {
        Self { pipelines, ..self }
    }

    /// With so many calls waiting at most.
    #[must_use]
    pub fn with_queue(self, queue: usize) -> Self {
        Self { queue, ..self }
    }
}

/// What the names of all keys of a store begin with: 1 to 64 ASCII letters, digits and `_`, `-`, `.`, `/`, `:`.
///
/// Nothing in it has a meaning for `SCAN MATCH`, and it holds no hash tag, which would put all keys into one slot. A record
/// does not know its name: keys can be moved with `MIGRATE`, and renamed to another prefix.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Prefix(Box<str>);

impl Prefix {
    /// A prefix of that text.
    ///
    /// # Errors
    /// [`RedisStoreError::Prefix`].
    pub fn new(text: impl Into<Box<str>>) -> Result<Self, RedisStoreError> {
        let text = text.into();
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"_-./:".contains(&byte);
        if text.is_empty() || text.len() > 64 || !text.bytes().all(allowed) {
            return Err(RedisStoreError::Prefix);
        }
        Ok(Self(text))
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Default for Prefix {
    fn default() -> Self {
        Self("idem".into())
    }
}

/// By how much tests move the server's clock, as the scripts see it. It may only grow: what Redis expires by itself goes
/// by the clock as it is, and has to come later.
#[doc(hidden)]
#[derive(Debug, Clone, Default)]
pub struct ClockShift(Arc<AtomicI64>);

#[doc(hidden)]
impl ClockShift {
    /// Moves the clock on.
    pub fn advance(&self, by: Duration) {
        self.0.fetch_add(i64::try_from(by.as_micros()).unwrap_or(i64::MAX), Ordering::SeqCst);
    }

    pub(crate) fn micros(&self) -> i64 {
        self.0.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_that_mean_something_to_redis_are_refused() {
        for text in ["", "a*", "a?", "[a]", "{a}", "a b", "a\\", "ä", &"a".repeat(65)] {
            assert!(Prefix::new(text).is_err(), "{text}");
        }
        for text in ["idem", "app:idem", "a_b-c.d/e", &"a".repeat(64)] {
            assert!(Prefix::new(text).is_ok(), "{text}");
        }
    }
}
