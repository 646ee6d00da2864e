//! The calls of the contract that change a record, as values: so that one or many can be put into a transaction.

use std::time::Duration;

use idem_core::decision::Refusal;
use idem_core::limits::{check_lease, check_retention};
use idem_core::{ErrorKind, Failure, Key, Lease, Operation, Outcome, Record, Reservation, Reserve, StoreError};

use crate::config::Config;
use crate::error::STORE;

/// A call.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Call<'c> {
    Reserve(&'c Reserve),
    Complete(&'c Lease, &'c Outcome),
    Fail(&'c Lease, &'c Failure),
    Renew(&'c Lease, Duration),
}

/// A call that outlives its caller.
#[derive(Debug)]
pub(crate) enum OwnedCall {
    Reserve(Reserve),
    Complete(Lease, Outcome),
    Fail(Lease, Failure),
    Renew(Lease, Duration),
}

/// What a call is answered.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "it is moved once, and a box would be an allocation for each reserve")]
pub(crate) enum Answer {
    Reserved(Reservation),
    Done,
}

impl Answer {
    /// What a reserve is answered.
    pub(crate) fn reserved(self) -> Result<Reservation, StoreError> {
        match self {
            Self::Reserved(reservation) => Ok(reservation),
            Self::Done => Err(StoreError::new(ErrorKind::Other, STORE, Operation::Reserve)),
        }
    }
}

impl<'c> Call<'c> {
    pub(crate) fn key(&self) -> &'c Key {
        match self {
            Self::Reserve(request) => &request.key,
            Self::Complete(lease, _) | Self::Fail(lease, _) | Self::Renew(lease, _) => &lease.key,
        }
    }

    /// The lease under which it is made.
    pub(crate) fn lease(&self) -> Option<&'c Lease> {
        match self {
            Self::Reserve(_) => None,
            Self::Complete(lease, _) | Self::Fail(lease, _) | Self::Renew(lease, _) => Some(lease),
        }
    }

    pub(crate) fn operation(&self) -> Operation {
        match self {
            Self::Reserve(_) => Operation::Reserve,
            Self::Complete(..) => Operation::Complete,
            Self::Fail(..) => Operation::Fail,
            Self::Renew(..) => Operation::Renew,
        }
    }

    /// About the bytes that the call adds to a transaction: what it writes, and the keys that it reads and writes.
    pub(crate) fn size(&self) -> usize {
        let key = self.key();
        let content = match self {
            Self::Complete(_, outcome) => outcome.size(),
            Self::Reserve(_) | Self::Fail(..) | Self::Renew(..) => 0,
        };
        500 + 8 * (key.scope().len() + key.id().len()) + content
    }

    /// Refuses what breaks a limit, before anything is sent.
    pub(crate) fn check(&self, config: &Config) -> Result<(), StoreError> {
        let retention = |lease: &Lease| check_retention(lease.retention, config.max_retention);
        let checked = match self {
            Self::Reserve(request) => request.validate(config.max_retention),
            Self::Complete(lease, outcome) => retention(lease).and_then(|()| outcome.validate(config.outcome_limit)),
            Self::Fail(lease, _) => retention(lease),
            Self::Renew(_, extend_by) => check_lease(*extend_by),
        };
        checked.map_err(|input| StoreError::invalid(input, STORE, self.operation()))
    }

    /// Whether an answer, given on this record, tells what became of the call although an earlier try of it may have been
    /// committed.
    ///
    /// It does where it says that the call has had its effect, now or before, and where it could not be so if it had. Otherwise
    /// the earlier try may have done its work and been overtaken: a fail that freed the key, which another attempt holds by
    /// now, would be told that the lease is lost. That would deny what has happened. The caller learns that it is unknown, and
    /// gets that same answer when it asks again: then it is the answer to a call that came too late.
    pub(crate) fn tells(
        self,
        answer: &Result<Answer, Refusal>,
        record: Option<&Record>,
        call_timeout: Duration,
    ) -> bool {
        match (self, answer) {
            (Self::Reserve(_), Ok(Answer::Reserved(Reservation::Acquired(_)))) => true,
            // While the record lived that an earlier try would have made, nobody else could begin anew, nor with another
            // fingerprint.
            (Self::Reserve(request), Ok(Answer::Reserved(_))) => {
                let of_another = |record: &Record| record.token != request.token && record.attempt == 1;
                request.retention >= call_timeout && record.is_some_and(of_another)
            }
            (Self::Reserve(_), Err(_)) => false,
            (_, Ok(_)) => true,
            // A completed record is final: the call was not what completed it.
            (Self::Complete(..) | Self::Fail(..), Err(Refusal::AlreadyCompleted)) => true,
            (_, Err(_)) => false,
        }
    }

    pub(crate) fn to_owned(self) -> OwnedCall {
        match self {
            Self::Reserve(request) => OwnedCall::Reserve(request.clone()),
            Self::Complete(lease, outcome) => OwnedCall::Complete(lease.clone(), outcome.clone()),
            Self::Fail(lease, failure) => OwnedCall::Fail(lease.clone(), failure.clone()),
            Self::Renew(lease, extend_by) => OwnedCall::Renew(lease.clone(), extend_by),
        }
    }
}

impl OwnedCall {
    pub(crate) fn call(&self) -> Call<'_> {
        match self {
            Self::Reserve(request) => Call::Reserve(request),
            Self::Complete(lease, outcome) => Call::Complete(lease, outcome),
            Self::Fail(lease, failure) => Call::Fail(lease, failure),
            Self::Renew(lease, extend_by) => Call::Renew(lease, *extend_by),
        }
    }
}
