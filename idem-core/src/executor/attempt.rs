//! The attempt, as its operation and its keeper see it.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use serde::Serialize;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use super::encode;
use crate::key::Key;
use crate::outcome::Outcome;
use crate::request::{Lease, Origin};

/// The attempt that an operation runs in. Cheap to clone.
#[derive(Clone)]
pub struct Attempt(Arc<Held>);

impl Attempt {
    pub(super) fn new(held: Arc<Held>) -> Self {
        Self(held)
    }

    /// The key that it runs under.
    #[must_use]
    pub fn key(&self) -> &Key {
        &self.0.lease.key
    }

    /// Its number, from 1: the fencing token. It grows with every attempt at the key, so whoever receives it downstream
    /// and refuses numbers lower than the highest seen is safe from an attempt that was taken over and does not know.
    /// It starts anew when the record has expired.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.0.lease.attempt
    }

    /// How it came to hold the key; after a take-over the effect may have happened already.
    #[must_use]
    pub fn origin(&self) -> Origin {
        self.0.lease.origin
    }

    /// The handle by which it holds the key. The executor completes or fails it when the operation ends. An operation
    /// that does so itself, [in a transaction of its own](super#together-with-rows-of-your-own), does it with the outcome
    /// that the executor would store: with any other it gets [`RunError::Unrecorded`](super::RunError::Unrecorded).
    #[must_use]
    pub fn lease(&self) -> &Lease {
        &self.0.lease
    }

    /// The outcome that the executor stores for an operation that returns `Ok` with this value: what a transaction of the
    /// operation's own has to complete the [lease](Self::lease) with, so that repeats can read it. One that cannot be
    /// stored (too large, no JSON) is withheld.
    #[must_use]
    pub fn success<T: Serialize>(&self, value: &T) -> Outcome {
        encode::success(value, self.0.outcome_limit)
    }

    /// As [`success`](Self::success), for an operation that returns this error, which is [final](super::OnError::Final).
    #[must_use]
    pub fn final_error<E: Serialize>(&self, error: &E) -> Outcome {
        encode::error(error, self.0.outcome_limit)
    }

    /// Says that the lease is completed with this outcome, for certain: for backends that have done so in the operation's
    /// own transaction and got the answer to its commit. Without it nothing is wrong, but the executor completes again.
    ///
    /// From now on the executor stores nothing and renews nothing for this attempt, and whatever the operation does yet,
    /// the outcome stands: when it returns an error or panics, its caller gets what every repeat gets.
    ///
    /// **Never before the commit is answered**: a key that is not completed after all would be taken over at the lease's
    /// end, and the operation run again.
    pub fn mark_completed(&self, outcome: Outcome) {
        self.0.mark_completed(outcome);
    }

    /// Whether the key may have been taken over: the store has said so, or the lease could not be renewed to its end,
    /// counted by this process's monotonic clock from before the call that granted it. Once true, it stays true.
    ///
    /// Look at it, or at [`lease_lost`](Self::lease_lost), before every step that must not happen twice. It narrows
    /// the gap and cannot close it (the process may be suspended right after the look): [`number`](Self::number) can.
    #[must_use]
    pub fn is_lease_lost(&self) -> bool {
        self.0.is_lost(Instant::now())
    }

    /// Ends when [`is_lease_lost`](Self::is_lease_lost) becomes true. For `select!`; may be dropped at any time.
    pub async fn lease_lost(&self) {
        loop {
            let told = self.0.told.notified();
            if self.is_lease_lost() {
                return;
            }
            tokio::select! {
                () = told => {}
                () = sleep_until(self.0.end()) => {}
            }
        }
    }
}

impl fmt::Debug for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attempt")
            .field("key", self.key())
            .field("number", &self.number())
            .field("origin", &self.origin())
            .field("is_lease_lost", &self.is_lease_lost())
            .finish()
    }
}

/// A lease that is held, and how long it lasts by this process's clock.
pub(super) struct Held {
    pub(super) lease: Lease,
    outcome_limit: usize,
    /// What the operation has completed the lease with.
    completed: OnceLock<Outcome>,
    time: Mutex<Time>,
    told: Notify,
}

struct Time {
    /// When the lease ends, at the earliest.
    end: Instant,
    lost: bool,
    /// Renewals are in vain: the store has said that it is lost, or the operation has completed it.
    refused: bool,
    /// The operation has.
    ended: bool,
    /// A renewal is under way.
    renewing: bool,
}

impl Held {
    pub(super) fn new(lease: Lease, end: Instant, outcome_limit: usize) -> Self {
        Self {
            lease,
            outcome_limit,
            completed: OnceLock::new(),
            time: Mutex::new(Time { end, lost: false, refused: false, ended: false, renewing: false }),
            told: Notify::new(),
        }
    }

    fn time(&self) -> MutexGuard<'_, Time> {
        self.time.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn end(&self) -> Instant {
        self.time().end
    }

    /// A renewal has succeeded.
    pub(super) fn extend(&self, end: Instant) {
        let mut time = self.time();
        time.end = time.end.max(end);
    }

    /// The store has refused a renewal. Whether that matters: not when the attempt has ended meanwhile.
    pub(super) fn lose(&self) -> bool {
        let mut time = self.time();
        if time.ended {
            return false;
        }
        (time.lost, time.refused) = (true, true);
        drop(time);
        self.told.notify_waiters();
        true
    }

    fn mark_completed(&self, outcome: Outcome) {
        // The first one: completed is final.
        if self.completed.set(outcome).is_ok() {
            self.time().refused = true;
        }
    }

    pub(super) fn completed(&self) -> Option<&Outcome> {
        self.completed.get()
    }

    /// The operation has ended, and the lease is renewed no more.
    pub(super) fn end_keeping(&self) {
        self.time().ended = true;
    }

    /// Whether the lease is known to last until then.
    pub(super) fn lasts_until(&self, then: Instant) -> bool {
        let time = self.time();
        !time.lost && then < time.end
    }

    fn is_lost(&self, now: Instant) -> bool {
        let mut time = self.time();
        if !time.lost && now >= time.end {
            time.lost = true;
            drop(time);
            self.told.notify_waiters();
            return true;
        }
        time.lost
    }

    /// Claims the renewal that is due when the lease ends before that time, unless one is under way already.
    pub(super) fn start_renewal(&self, due: Instant) -> bool {
        let mut time = self.time();
        let start = time.end <= due && !time.renewing && !time.refused;
        time.renewing |= start;
        start
    }

    pub(super) fn end_renewal(&self) {
        self.time().renewing = false;
    }
}
