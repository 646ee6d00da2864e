//! What the layer did, for whoever looks at the response.

use idem_core::Withheld;

use crate::refusal::Reason;

/// What became of a request with a key: an extension of every response that the layer had a part in, for layers further
/// out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Decision {
    /// The handler ran.
    Ran {
        /// The attempt that it was.
        attempt: u32,
        /// Whether it took the key over from one that was silent.
        took_over: bool,
        /// What the store keeps.
        recorded: Recorded,
    },
    /// The stored response of an earlier attempt; nothing ran.
    Replayed {
        /// The attempt that it is of.
        attempt: u32,
    },
    /// The layer answered by itself; the handler did not run, or nothing is known of it.
    Refused(Reason),
    /// The [check](crate::IdempotencyLayer::with_check) of requests has refused it; nothing was reserved.
    Rejected,
    /// The store was down, and the handler ran without protection.
    Unprotected,
}

/// What the store keeps of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Recorded {
    /// The response, for every repeat.
    Whole,
    /// That it ran, but not its response.
    Withheld(Withheld),
    /// Nothing: the key is free, and a repeat runs the handler again.
    Freed,
    /// Nothing, since the store failed. A repeat may run the handler again when the lease is over.
    Failed,
}

impl Decision {
    /// In a word, as it is in logs and metrics.
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Ran { recorded: Recorded::Failed, .. } => "unrecorded",
            Self::Ran { took_over: true, .. } => "taken-over",
            Self::Ran { recorded: Recorded::Withheld(_), .. } => "withheld",
            Self::Ran { recorded: Recorded::Freed, .. } => "freed",
            Self::Ran { recorded: Recorded::Whole, .. } => "fresh",
            Self::Replayed { .. } => "replayed",
            Self::Refused(reason) => reason.as_str(),
            Self::Rejected => "rejected",
            Self::Unprotected => "unprotected",
        }
    }
}
