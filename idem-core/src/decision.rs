//! The contract as pure functions: no clock, no I/O, no lock.
//!
//! Stores that hold whole records (the in-memory store, FoundationDB, a file) call these inside whatever makes their
//! read and write one step; stores that decide in SQL or Lua are checked against them by the conformance kit.
//!
//! | record found | [`decide`] says | change |
//! |---|---|---|
//! | absent or expired | `Acquired` (attempt 1, origin `Fresh`) | in progress, attempt 1 |
//! | any live state, both fingerprints given and different | `Mismatch` | none |
//! | in progress, same token | `Acquired` (same attempt, same origin) | none |
//! | in progress, other token, lease still running | `InProgress` | none |
//! | in progress, other token, lease over, policy `TakeOver` | `Acquired` (attempt + 1, origin `Takeover`) | new holder |
//! | in progress, other token, lease over, policy `Refuse` | `Abandoned` | none |
//! | failed, same token | error `LeaseLost` | none |
//! | failed, other token | `Acquired` (attempt + 1, origin `Retry`) | in progress |
//! | completed | `Completed` | none |

use std::time::{Duration, SystemTime};

use crate::clock::after;
use crate::outcome::{Failure, Outcome};
use crate::record::{Record, State};
use crate::request::{Lease, OnAbandoned, Origin, PreviousAttempt, Reservation, Reserve};

/// What a reserve has to do about the record it found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// Write this record in place of what was there, then answer [`Reservation::Acquired`] with its
    /// [`lease`](Record::lease). If the write does not happen, neither does the answer.
    Acquire(Record),
    /// Write nothing and answer this.
    Answer(Reservation),
    /// Write nothing: the attempt that asks has failed already. Answer with the error
    /// [`LeaseLost`](crate::ErrorKind::LeaseLost).
    LeaseLost,
}

/// Decides a reserve on the record of its key (`None` when absent) at that time of the store's clock.
///
/// The record must be the one that the following write replaces: read and write are one step, or the answer is wrong.
#[must_use]
pub fn decide(record: Option<&Record>, request: &Reserve, now: SystemTime) -> Decision {
    match rule(record, request, now) {
        Ruling::Acquire(grant) => Decision::Acquire(grant.record(request, now)),
        Ruling::Answer(answer) => Decision::Answer(answer.reservation(request, now)),
        Ruling::LeaseLost => Decision::LeaseLost,
    }
}

/// A [`Decision`] before its record or its answer is made. These are large: who makes them where they go saves copying
/// them there.
pub(crate) enum Ruling<'a> {
    Acquire(Grant<'a>),
    Answer(Answer<'a>),
    LeaseLost,
}

/// How the key is acquired, and the live record that is replaced.
pub(crate) struct Grant<'a> {
    pub(crate) attempt: u32,
    pub(crate) origin: Origin,
    before: Option<&'a Record>,
}

/// What to answer, and the record that it is made of.
pub(crate) enum Answer<'a> {
    Acquired(&'a Record),
    InProgress(&'a Record),
    Completed(&'a Record),
    Abandoned(&'a Record),
    Mismatch,
}

/// As [`decide`].
#[inline(always)]
pub(crate) fn rule<'a>(record: Option<&'a Record>, request: &Reserve, now: SystemTime) -> Ruling<'a> {
    let Some(record) = record.filter(|record| !record.is_expired(now)) else {
        return Ruling::Acquire(Grant { attempt: 1, origin: Origin::Fresh, before: None });
    };
    if let (Some(stored), Some(given)) = (&record.fingerprint, &request.fingerprint)
        && stored != given
    {
        return Ruling::Answer(Answer::Mismatch);
    }
    let next =
        |origin| Ruling::Acquire(Grant { attempt: record.attempt.saturating_add(1), origin, before: Some(record) });
    match &record.state {
        State::Completed(_) => Ruling::Answer(Answer::Completed(record)),
        State::Failed(_) if record.token == request.token => Ruling::LeaseLost,
        State::Failed(_) => next(Origin::Retry),
        State::InProgress if record.token == request.token => Ruling::Answer(Answer::Acquired(record)),
        State::InProgress if now < record.lease_until => Ruling::Answer(Answer::InProgress(record)),
        State::InProgress => match request.on_abandoned {
            OnAbandoned::TakeOver => next(Origin::Takeover(PreviousAttempt {
                token: record.token,
                attempt: record.attempt,
                started_at: record.started_at,
            })),
            OnAbandoned::Refuse => Ruling::Answer(Answer::Abandoned(record)),
        },
    }
}

impl Grant<'_> {
    /// The record to write.
    #[inline(always)]
    pub(crate) fn record(&self, request: &Reserve, now: SystemTime) -> Record {
        let lease_until = after(now, request.lease);
        Record {
            key: request.key.clone(),
            state: State::InProgress,
            // Fixed by the first reserve: compared later, never adopted.
            fingerprint: self.before.map_or(request.fingerprint, |record| record.fingerprint),
            attempt: self.attempt,
            token: request.token,
            origin: self.origin,
            retention: request.retention,
            created_at: self.before.map_or(now, |record| record.created_at),
            started_at: now,
            updated_at: now,
            lease_until,
            expires_at: after(now, request.retention).max(lease_until),
            read_at: now,
        }
    }
}

impl Answer<'_> {
    /// The answer itself.
    #[inline(always)]
    pub(crate) fn reservation(&self, request: &Reserve, now: SystemTime) -> Reservation {
        match self {
            Self::Acquired(record) => Reservation::Acquired(record.lease()),
            Self::InProgress(record) => Reservation::InProgress {
                attempt: record.attempt,
                // Never zero: a caller that waits for no time would spin.
                retry_after: record.lease_left(now).max(Duration::from_nanos(1)),
            },
            Self::Completed(record) => Reservation::Completed(record.read_as(&request.key, now)),
            Self::Abandoned(record) => Reservation::Abandoned(record.read_as(&request.key, now)),
            Self::Mismatch => Reservation::Mismatch,
        }
    }
}

/// Whether a call that was accepted has to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Change {
    /// The record was changed: write it.
    Write,
    /// It stands as the call wants it already, from the call's first delivery: nothing to write.
    Nothing,
}

/// Why a call under a lease is refused; the record is unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// Another attempt holds or held the key since, this one has failed, or the record has expired.
    LeaseLost,
    /// The record was completed under this very token, with another outcome.
    AlreadyCompleted,
}

/// The live record, if it is of the attempt that asks.
fn own<'a>(record: Option<&'a mut Record>, lease: &Lease, now: SystemTime) -> Result<&'a mut Record, Refusal> {
    record.filter(|record| !record.is_expired(now) && record.token == lease.token).ok_or(Refusal::LeaseLost)
}

/// Completes the record of the lease's key, in place.
///
/// # Errors
/// [`Refusal`]; the record is unchanged.
#[inline]
pub fn complete(
    record: Option<&mut Record>,
    lease: &Lease,
    outcome: &Outcome,
    now: SystemTime,
) -> Result<Change, Refusal> {
    let record = own(record, lease, now)?;
    match &record.state {
        State::InProgress => {
            settle(record, State::Completed(outcome.clone()), lease, now);
            Ok(Change::Write)
        }
        State::Completed(stored) if stored == outcome => Ok(Change::Nothing),
        State::Completed(_) => Err(Refusal::AlreadyCompleted),
        State::Failed(_) => Err(Refusal::LeaseLost),
    }
}

/// Fails the record of the lease's key, in place: the key is free for another attempt.
///
/// # Errors
/// [`Refusal`]; the record is unchanged.
pub fn fail(record: Option<&mut Record>, lease: &Lease, failure: &Failure, now: SystemTime) -> Result<Change, Refusal> {
    let record = own(record, lease, now)?;
    match &record.state {
        State::InProgress => {
            settle(record, State::Failed(failure.clone()), lease, now);
            Ok(Change::Write)
        }
        State::Failed(stored) if stored == failure => Ok(Change::Nothing),
        State::Failed(_) => Err(Refusal::LeaseLost),
        State::Completed(_) => Err(Refusal::AlreadyCompleted),
    }
}

fn settle(record: &mut Record, state: State, lease: &Lease, now: SystemTime) {
    record.state = state;
    record.retention = lease.retention;
    record.updated_at = now;
    record.expires_at = after(now, lease.retention);
}

/// Extends the lease on the lease's key to `extend_by` from now, in place; an end that lies further away stays.
///
/// # Errors
/// [`Refusal`]; the record is unchanged.
pub fn renew(
    record: Option<&mut Record>,
    lease: &Lease,
    extend_by: Duration,
    now: SystemTime,
) -> Result<Change, Refusal> {
    let record = own(record, lease, now)?;
    match &record.state {
        State::InProgress => {
            let until = after(now, extend_by);
            if until <= record.lease_until {
                return Ok(Change::Nothing);
            }
            record.lease_until = until;
            record.updated_at = now;
            record.expires_at = record.expires_at.max(until);
            Ok(Change::Write)
        }
        State::Failed(_) => Err(Refusal::LeaseLost),
        State::Completed(_) => Err(Refusal::AlreadyCompleted),
    }
}
