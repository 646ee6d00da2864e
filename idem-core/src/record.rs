//! What a store keeps of a key.

use std::time::{Duration, SystemTime};

use crate::fingerprint::Fingerprint;
use crate::key::Key;
use crate::outcome::{Failure, Outcome};
use crate::request::{Lease, Origin};
use crate::token::Token;

/// The record of one key, as of the moment when a store read it.
///
/// All times are of the store's clock (rule R10). To know how long something still lasts, use
/// [`expires_in`](Self::expires_in) and [`lease_remaining`](Self::lease_remaining), which compare the store's times
/// with each other, and never the store's with the caller's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// The key it belongs to.
    pub key: Key,
    /// What has become of the operation.
    pub state: State,
    /// What was asked for, fixed by the first reserve; kept through complete, fail and every further attempt (rule R3).
    pub fingerprint: Option<Fingerprint>,
    /// The number of the latest attempt, counted from 1. Grows with every take-over and retry, so it can be handed
    /// downstream as a fencing token.
    pub attempt: u32,
    /// The token of the attempt that holds the key, or that held it last.
    pub token: Token,
    /// How that attempt came to hold the key.
    pub origin: Origin,
    /// The retention that the latest acquire, complete or fail asked for.
    pub retention: Duration,
    /// When the key was first reserved.
    pub created_at: SystemTime,
    /// When the latest attempt acquired the key.
    pub started_at: SystemTime,
    /// When the record was last written.
    pub updated_at: SystemTime,
    /// When the lease of the latest attempt ends; from then on (and not before) it can be taken over.
    pub lease_until: SystemTime,
    /// When the record expires; from then on it is absent for every call (rule R9). Never before `lease_until` while
    /// in progress.
    pub expires_at: SystemTime,
    /// When the store read or wrote this copy.
    pub read_at: SystemTime,
}

/// What has become of the operation under a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// An attempt holds the key, or held it until its lease ran out.
    InProgress,
    /// The latest attempt gave up; another may start.
    Failed(Failure),
    /// It is done. Final.
    Completed(Outcome),
}

impl Record {
    /// Whether the record counts as absent at that time of the store's clock: from `expires_at` on.
    #[must_use]
    pub fn is_expired(&self, now: SystemTime) -> bool {
        now >= self.expires_at
    }

    /// How long the record still lived when it was read. Counted from the moment of the answer, so no two clocks are
    /// compared.
    #[must_use]
    pub fn expires_in(&self) -> Duration {
        self.expires_at.duration_since(self.read_at).unwrap_or_default()
    }

    /// How long the lease of an attempt in progress still ran when the record was read; zero when it was over. At most
    /// what the latest acquire or renewal granted, also when the store's clock has jumped back since.
    #[must_use]
    pub fn lease_remaining(&self) -> Duration {
        self.lease_left(self.read_at)
    }

    pub(crate) fn lease_left(&self, now: SystemTime) -> Duration {
        let granted = self.lease_until.duration_since(self.updated_at).unwrap_or_default();
        self.lease_until.duration_since(now).unwrap_or_default().min(granted)
    }

    /// The result, when the operation is completed.
    #[must_use]
    pub fn outcome(&self) -> Option<&Outcome> {
        match &self.state {
            State::Completed(outcome) => Some(outcome),
            State::InProgress | State::Failed(_) => None,
        }
    }

    /// The handle of the latest attempt. With it a reconciler completes or fails an abandoned attempt by the ordinary
    /// calls, once it has found out what became of it.
    #[must_use]
    pub fn lease(&self) -> Lease {
        Lease {
            key: self.key.clone(),
            token: self.token,
            attempt: self.attempt,
            origin: self.origin,
            retention: self.retention,
        }
    }

    /// This record as it stands at that time of the store's clock.
    #[must_use]
    pub fn read(&self, now: SystemTime) -> Self {
        self.read_as(&self.key, now)
    }

    /// As [`read`](Self::read), with the caller's own copy of the key: a replay then leaves the reference count of the
    /// stored one alone, which is likely in another processor's cache.
    #[inline(always)]
    pub(crate) fn read_as(&self, key: &Key, now: SystemTime) -> Self {
        Self { key: key.clone(), state: self.state.clone(), read_at: now, ..*self }
    }
}
