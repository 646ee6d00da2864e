//! Operations that return a `Result`: which errors are final, how both are stored, and how they are read again. This is
//! what `run` and `run_with` are beyond `run_outcome`.

use std::fmt::Display;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::config::OnError;
use super::encode;
use super::error::{Executed, RunError};
use super::judge::Judge;
use super::outcomes::{Run, Settlement};
use crate::outcome::{Body, Failure, Outcome};

/// The caller's policy for errors of the operation.
pub(super) trait Policy<E>: Send + 'static {
    fn settle(&self, error: &E, limit: usize) -> Settlement;

    /// A stored final error.
    fn read(body: &[u8]) -> Result<E, serde_json::Error>;
}

/// Every error frees the key.
pub(super) struct AlwaysFree;

impl<E: Display> Policy<E> for AlwaysFree {
    fn settle(&self, error: &E, _limit: usize) -> Settlement {
        Settlement::Fail(Failure::truncated(&error.to_string()))
    }

    fn read(_body: &[u8]) -> Result<E, serde_json::Error> {
        Err(encode::unreadable("a final error is stored, and only `run_with` reads it"))
    }
}

/// The caller says.
pub(super) struct ByPolicy<P>(pub(super) P);

impl<E, P> Policy<E> for ByPolicy<P>
where
    E: Display + Serialize + DeserializeOwned,
    P: Fn(&E) -> OnError + Send + 'static,
{
    fn settle(&self, error: &E, limit: usize) -> Settlement {
        match self.0(error) {
            OnError::Free => AlwaysFree.settle(error, limit),
            OnError::Final => Settlement::Complete(encode::error(error, limit)),
        }
    }

    fn read(body: &[u8]) -> Result<E, serde_json::Error> {
        encode::decode(body)
    }
}

/// Judges a `Result` by its policy.
pub(super) struct Typed<P>(pub(super) P);

impl<T: Serialize, E, P: Policy<E>> Judge<Result<T, E>, Result<T, E>> for Typed<P> {
    fn settle(&self, ended: Result<T, E>, limit: usize) -> (Result<T, E>, Settlement) {
        let settlement = match &ended {
            Ok(value) => Settlement::Complete(encode::success(value, limit)),
            Err(error) => self.0.settle(error, limit),
        };
        (ended, settlement)
    }

    fn agrees(ended: &Result<T, E>, outcome: &Outcome) -> bool {
        outcome.code == if ended.is_ok() { encode::SUCCESS } else { encode::ERROR }
    }

    fn value(ended: Result<T, E>) -> Result<T, E> {
        ended
    }

    fn gives_way(value: &Result<T, E>) -> bool {
        value.is_err()
    }
}

impl<T, E> Run<Result<T, E>> {
    /// What the caller of `run` or `run_with` gets.
    pub(super) fn typed<P: Policy<E>>(self) -> Result<Executed<T>, RunError<T, E>>
    where
        T: DeserializeOwned,
    {
        Err(match self {
            Self::Ended { value: Ok(value), attempt, recorded: Ok(()), .. } => {
                return Ok(Executed { value, attempt, replayed: false });
            }
            Self::Ended { value: Err(error), attempt, completed, recorded: Ok(()) } => {
                RunError::Failed { error, attempt, is_final: completed, replayed: false }
            }
            Self::Ended { value, attempt, recorded: Err(source), .. } => {
                RunError::Unrecorded { result: value, attempt, source }
            }
            Self::Stored { outcome, attempt, replayed } => return read::<T, E, P>(&outcome, attempt, replayed),
            Self::InProgress { attempt, retry_after } => RunError::InProgress { attempt, retry_after },
            Self::Mismatch => RunError::Mismatch,
            Self::Abandoned(record) => RunError::Abandoned(record),
            Self::OutcomeUnknown { attempt } => RunError::OutcomeUnknown { attempt },
            Self::Panicked { message, attempt } => RunError::Panicked { message, attempt },
            Self::Unreserved(error) | Self::Store(error) => RunError::Store(error),
            Self::Interrupted(error) => RunError::Interrupted(error),
            Self::NoRuntime => RunError::NoRuntime,
        })
    }
}

/// A stored outcome as what the operation returned.
fn read<T: DeserializeOwned, E, P: Policy<E>>(
    outcome: &Outcome,
    attempt: u32,
    replayed: bool,
) -> Result<Executed<T>, RunError<T, E>> {
    let body = match &outcome.body {
        Body::Stored(body) => body,
        Body::Withheld(reason) => {
            return Err(RunError::Withheld { attempt, code: outcome.code, reason: *reason });
        }
    };
    match outcome.code {
        encode::SUCCESS => match encode::decode(body) {
            Ok(value) => Ok(Executed { value, attempt, replayed }),
            Err(error) => Err(RunError::Undecodable(error)),
        },
        encode::ERROR => Err(match P::read(body) {
            Ok(error) => RunError::Failed { error, attempt, is_final: true, replayed },
            Err(error) => RunError::Undecodable(error),
        }),
        _ => Err(RunError::Undecodable(encode::unreadable("the outcome's code is neither 0 nor 1"))),
    }
}
