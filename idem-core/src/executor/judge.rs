//! Which errors are final, and how they are stored: what tells `run` from `run_with`.

use std::fmt::Display;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::config::OnError;
use super::encode;
use crate::outcome::{Failure, Outcome};

/// How an attempt ends.
pub(super) enum Settlement {
    Complete(Outcome),
    Fail(Failure),
}

/// The caller's policy for errors of the operation.
pub(super) trait Judge<E>: Send + 'static {
    fn judge(&self, error: &E, limit: usize) -> Settlement;

    /// A stored final error.
    fn read(body: &[u8]) -> Result<E, serde_json::Error>;
}

/// Every error frees the key.
pub(super) struct AlwaysFree;

impl<E: Display> Judge<E> for AlwaysFree {
    fn judge(&self, error: &E, _limit: usize) -> Settlement {
        Settlement::Fail(Failure::truncated(&error.to_string()))
    }

    fn read(_body: &[u8]) -> Result<E, serde_json::Error> {
        Err(encode::unreadable("a final error is stored, and only `run_with` reads it"))
    }
}

/// The caller says.
pub(super) struct ByPolicy<P>(pub(super) P);

impl<E, P> Judge<E> for ByPolicy<P>
where
    E: Display + Serialize + DeserializeOwned,
    P: Fn(&E) -> OnError + Send + 'static,
{
    fn judge(&self, error: &E, limit: usize) -> Settlement {
        match self.0(error) {
            OnError::Free => AlwaysFree.judge(error, limit),
            OnError::Final => Settlement::Complete(encode::error(error, limit)),
        }
    }

    fn read(body: &[u8]) -> Result<E, serde_json::Error> {
        encode::decode(body)
    }
}
