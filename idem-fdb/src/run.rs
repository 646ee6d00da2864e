//! Transactions, tried until they are answered: the driver's retry loop, bounded in tries and in time.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use foundationdb::{
    Database, FdbBindingError, FdbError, FdbResult, RetryableTransaction, RunnerHooks, TransactionCommitError,
};
use idem_core::{ErrorClass, ErrorKind, Operation, StoreError};
use tokio::time::timeout;

use crate::error::{Effect, FdbStoreError, STORE, Stop, fdb_error, own_error};

/// How far a transaction has come: what its error means depends on it.
#[derive(Debug)]
struct Progress {
    tries: AtomicU32,
    /// The transaction of this try goes to be committed.
    committing: AtomicBool,
    /// A commit of an earlier try may have happened. It stays so until there is an answer: the next try's error, whatever it
    /// is, does not undo that.
    uncertain: AtomicBool,
}

impl Progress {
    fn effect(&self) -> Effect {
        if self.committing.load(Ordering::Relaxed) || self.uncertain.load(Ordering::Relaxed) {
            Effect::Possible
        } else {
            Effect::None
        }
    }
}

impl RunnerHooks for Progress {
    async fn on_commit_error(&self, error: &TransactionCommitError) -> FdbResult<()> {
        // 1021 and 1039, by the driver's predicate; and what is not known to be one of those that were not committed, such
        // as a time-out (1031).
        if !error.is_retryable_not_committed() {
            self.uncertain.store(true, Ordering::Relaxed);
        }
        self.committing.store(false, Ordering::Relaxed);
        Ok(())
    }
}

/// The bounds of a call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    pub(crate) time: Duration,
    pub(crate) tries: u32,
    /// What earlier transactions for the same may have done.
    pub(crate) before: Effect,
}

/// Why there is no answer. Cheap to clone: those who shared a transaction share this.
#[derive(Debug, Clone)]
pub(crate) struct Failed {
    cause: Cause,
    pub(crate) effect: Effect,
}

#[derive(Debug, Clone)]
enum Cause {
    Stop(Stop),
    /// The time is over.
    Time,
    /// The driver's, of no code.
    Driver,
}

impl Failed {
    pub(crate) fn late(effect: Effect) -> Self {
        Self { cause: Cause::Time, effect }
    }

    /// Whether the transaction has met others too often.
    pub(crate) fn is_conflict(&self) -> bool {
        matches!(self.cause, Cause::Stop(Stop::Own(FdbStoreError::TooManyTries { .. })))
    }

    pub(crate) fn into_error(self, operation: Operation) -> StoreError {
        let error = match self.cause {
            Cause::Stop(Stop::Fdb(error)) => fdb_error(error, operation),
            Cause::Stop(Stop::Own(error)) => own_error(error, operation),
            Cause::Time => StoreError::new(ErrorKind::Timeout, STORE, operation).with_class(ErrorClass::Retryable),
            Cause::Driver => StoreError::new(ErrorKind::Other, STORE, operation),
        };
        match self.effect {
            Effect::None => error,
            Effect::Possible => error.with_class(ErrorClass::Unknown),
        }
    }
}

/// Runs what is to be one transaction, and commits it. One that may have been committed is run again, and told so: calls
/// recognise themselves by their tokens.
pub(crate) async fn run<T, F>(
    database: &Database,
    bounds: Bounds,
    work: impl Fn(RetryableTransaction, Effect) -> F + Sync,
) -> Result<T, Failed>
where
    F: Future<Output = Result<T, Stop>> + Send,
    T: Send,
{
    let progress = Progress {
        tries: AtomicU32::new(0),
        committing: AtomicBool::new(false),
        uncertain: AtomicBool::new(bounds.before == Effect::Possible),
    };
    let tried = database.run_with_hooks(&progress, |transaction, _| {
        // What the driver says of the try before is not used: it forgets the one before that.
        let (progress, tries) = (&progress, progress.tries.fetch_add(1, Ordering::Relaxed));
        let worked = if tries < bounds.tries {
            Ok(work(transaction, progress.effect()))
        } else {
            Err(FdbStoreError::TooManyTries { tries })
        };
        async move {
            let answer = match worked {
                Ok(worked) => worked.await,
                Err(error) => Err(Stop::Own(error)),
            };
            let answer = answer.map_err(|stop| match stop {
                Stop::Fdb(error) => FdbBindingError::NonRetryableFdbError(error),
                Stop::Own(error) => FdbBindingError::CustomError(Box::new(error)),
            })?;
            progress.committing.store(true, Ordering::Relaxed);
            Ok(answer)
        }
    });
    let failed = |cause| Err(Failed { cause, effect: progress.effect() });
    match timeout(bounds.time, tried).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(FdbBindingError::CustomError(error))) => match error.downcast::<FdbStoreError>() {
            Ok(error) => failed(Cause::Stop(Stop::Own(*error))),
            Err(_) => failed(Cause::Driver),
        },
        Ok(Err(error)) => {
            let code: Option<FdbError> = error.get_fdb_error();
            failed(code.map_or(Cause::Driver, |error| Cause::Stop(Stop::Fdb(error))))
        }
        Err(_) => failed(Cause::Time),
    }
}
