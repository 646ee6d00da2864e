//! One attempt, from reserve to complete or fail.

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep, timeout_at};
use tracing::{debug, warn};

use super::attempt::{Attempt, Held};
use super::backoff::Backoff;
use super::config::{OnPanic, Recovery};
use super::detach::guarded;
use super::encode;
use super::error::{Executed, RunError};
use super::judge::{Judge, Settlement};
use super::reconcile::{Reconcile, Reconciliation};
use super::{Inner, detach};
use crate::error::{ErrorClass, ErrorKind, Operation, StoreError};
use crate::limits::InvalidInput;
use crate::outcome::{Body, Failure, Outcome, Withheld};
use crate::record::Record;
use crate::request::{Lease, Origin, Reservation, Reserve};
use crate::token::Token;

/// How often a reserve or a fetch is sent while the store fails.
const CALL_TRIES: u32 = 3;
/// The pauses between the tries of one call.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// A call is given a third of the lease, but at least and at most so long.
const MIN_CALL: Duration = Duration::from_millis(50);
const MAX_CALL: Duration = Duration::from_secs(10);

/// What one run wants; handed back when another attempt holds the key.
pub(super) struct Call<F, J> {
    pub(super) request: Reserve,
    /// An earlier send of the request may have had its effect, or may still have it, from this moment on.
    pub(super) unsettled: Option<Instant>,
    pub(super) operation: F,
    pub(super) judge: J,
}

/// Another attempt holds the key.
pub(super) struct Busy<F, J> {
    pub(super) call: Call<F, J>,
    pub(super) attempt: u32,
    pub(super) retry_after: Duration,
}

pub(super) enum Step<T, E, F, J> {
    Done(Result<Executed<T>, RunError<T, E>>),
    Busy(Busy<F, J>),
}

impl Inner {
    #[expect(clippy::manual_async_fn, reason = "an async fn holds its arguments twice: this goes to the heap")]
    pub(super) fn attempt<T, E, F, Fut, J>(
        self: Arc<Self>,
        runtime: Handle,
        mut call: Call<F, J>,
    ) -> impl Future<Output = Step<T, E, F, J>> + Send + 'static
    where
        F: FnOnce(Attempt) -> Fut + Send + 'static,
        Fut: Future<Output = Result<T, E>> + Send + 'static,
        T: Serialize + DeserializeOwned + Send + 'static,
        E: Display + Send + 'static,
        J: Judge<E>,
    {
        async move {
            let _running = self.running.enter();
            // Taken apart at once: what the store answers is large, and would be part of the future otherwise.
            let held = match self.reserve(&mut call.request, &mut call.unsettled).await {
                Ok((Reservation::Acquired(lease), since)) => {
                    Arc::new(Held::new(lease, since + self.lease, self.outcome_limit))
                }
                Ok((Reservation::InProgress { attempt, retry_after }, _)) => {
                    return Step::Busy(Busy { call, attempt, retry_after });
                }
                Ok((Reservation::Completed(record), _)) => return Step::Done(replay_record::<T, E, J>(&record)),
                Ok((Reservation::Abandoned(record), _)) => {
                    return Step::Done(Err(RunError::Abandoned(Box::new(record))));
                }
                Ok((Reservation::Mismatch, _)) => return Step::Done(Err(RunError::Mismatch)),
                Err(error) => return Step::Done(Err(RunError::Store(error))),
            };
            let Call { operation, judge, .. } = call;
            Step::Done(self.hold(&held, &runtime, operation, judge).await)
        }
    }

    /// Reserves, with the same token until there is an answer. Returns since when a lease that it brings may run.
    async fn reserve(
        &self,
        request: &mut Reserve,
        unsettled: &mut Option<Instant>,
    ) -> Result<(Reservation, Instant), StoreError> {
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        let mut tries = 0;
        loop {
            tries += 1;
            let sent = Instant::now();
            let error = match timeout_at(sent + self.call_limit(), self.store.reserve(request)).await {
                Ok(Ok(reservation)) => {
                    let since = unsettled.unwrap_or(sent);
                    // It is not ours yet; but an earlier send that got no answer may still be on its way.
                    *unsettled = unsettled.map(|_| sent);
                    return Ok((reservation, since));
                }
                Ok(Err(error)) => error,
                Err(_) => self.no_answer(Operation::Reserve),
            };
            if tries == CALL_TRIES {
                return Err(error);
            }
            match error.class() {
                // The attempt of this token is over before it began: somebody has failed it by its record. Nothing was
                // run under it, and nothing will be.
                _ if error.kind() == ErrorKind::LeaseLost => {
                    request.token = Token::random();
                    *unsettled = None;
                }
                ErrorClass::Permanent => return Err(error),
                ErrorClass::Retryable => {}
                ErrorClass::Unknown => {
                    unsettled.get_or_insert(sent);
                }
            }
            debug!(scope = request.key.scope(), %error, "a key could not be reserved, to be tried again");
            sleep(backoff.pause()).await;
        }
    }

    async fn hold<T, E, F, Fut, J>(
        &self,
        held: &Arc<Held>,
        runtime: &Handle,
        operation: F,
        judge: J,
    ) -> Result<Executed<T>, RunError<T, E>>
    where
        F: FnOnce(Attempt) -> Fut + Send + 'static,
        Fut: Future<Output = Result<T, E>> + Send + 'static,
        T: Serialize + DeserializeOwned + Send + 'static,
        E: Display + Send + 'static,
        J: Judge<E>,
    {
        self.ensure_time(held).await.map_err(RunError::Store)?;
        // Before the operation's first poll, which may block its thread for longer than the lease.
        let mut kept = self.keeper.keep(held, runtime);
        let attempt = held.lease.attempt;
        if let Origin::Takeover(previous) = held.lease.origin {
            let scope = held.lease.key.scope();
            warn!(scope, attempt, previous = previous.attempt, "an abandoned attempt was taken over");
            if let Recovery::Reconcile(hook) = &self.recovery {
                match ask(&**hook, &held.lease).await {
                    Reconciliation::NotExecuted => self.ensure_time(held).await.map_err(RunError::Store)?,
                    Reconciliation::Executed(outcome) => {
                        kept.release();
                        let settled = self.settle(held, Settlement::Complete(outcome.clone())).await;
                        return settled
                            .map_err(RunError::Store)
                            .and_then(|()| stored_result::<T, E, J>(attempt, &outcome, true));
                    }
                    // Not failed: that would say that nothing has happened, and the next attempt would not ask.
                    Reconciliation::Unknown => return Err(RunError::OutcomeUnknown { attempt }),
                }
            }
        }
        let ended = guarded(|| operation(Attempt::new(Arc::clone(held)))).await;
        kept.release();
        if let Some(outcome) = held.completed() {
            return completed_by_operation::<T, E, J>(held, outcome, ended);
        }
        let (error, settlement) = match ended {
            Ok(Ok(value)) => {
                let outcome = encode::success(&value, self.outcome_limit);
                return match self.settle(held, Settlement::Complete(outcome)).await {
                    Ok(()) => Ok(Executed { value, attempt, replayed: false }),
                    Err(source) => Err(RunError::Unrecorded { result: Ok(value), attempt, source }),
                };
            }
            Ok(Err(error)) => match detach::caught(|| judge.judge(&error, self.outcome_limit)) {
                Ok(settlement) => (error, settlement),
                Err(message) => return self.panicked::<T, E, J>(held, message).await,
            },
            Err(message) => return self.panicked::<T, E, J>(held, message).await,
        };
        let is_final = matches!(settlement, Settlement::Complete(_));
        let source = match self.settle(held, settlement).await {
            Ok(()) => return Err(RunError::Failed { error, attempt, is_final, replayed: false }),
            Err(source) => source,
        };
        match self.already_completed(held, &source).await {
            Some(outcome) => stored_result::<T, E, J>(attempt, &outcome, false),
            None => Err(RunError::Unrecorded { result: Err(error), attempt, source }),
        }
    }

    /// Before the operation: a lease whose reserve was long on its way is renewed first, or it would end too soon for
    /// the keeper.
    async fn ensure_time(&self, held: &Held) -> Result<(), StoreError> {
        if held.lasts_until(Instant::now() + self.lease / 2) { Ok(()) } else { self.keeper.renew(held).await }
    }

    async fn panicked<T: DeserializeOwned, E, J: Judge<E>>(
        &self,
        held: &Held,
        message: Box<str>,
    ) -> Result<Executed<T>, RunError<T, E>> {
        let attempt = held.lease.attempt;
        warn!(scope = held.lease.key.scope(), attempt, policy = ?self.on_panic, "an operation panicked");
        if self.on_panic == OnPanic::Free {
            let note = Failure::truncated(&format!("panicked: {message}"));
            // Where that fails it has been told, and the key is free at the lease's end.
            if let Err(error) = self.settle(held, Settlement::Fail(note)).await
                && let Some(outcome) = self.already_completed(held, &error).await
            {
                return stored_result::<T, E, J>(attempt, &outcome, false);
            }
        }
        Err(RunError::Panicked { message, attempt })
    }

    /// What is stored of an attempt that could not be failed because it is completed: by a transaction of its operation
    /// whose commit got no answer, or by a reconciler.
    ///
    /// That the store says so is final: it has waited for the transaction, or has made it impossible.
    async fn already_completed(&self, held: &Held, refusal: &StoreError) -> Option<Outcome> {
        if refusal.kind() != ErrorKind::AlreadyCompleted {
            return None;
        }
        let lease = &held.lease;
        warn!(scope = lease.key.scope(), attempt = lease.attempt, "an operation failed whose attempt is completed");
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        for _ in 0..CALL_TRIES {
            match timeout_at(Instant::now() + self.call_limit(), self.store.fetch(&lease.key)).await {
                Ok(Ok(record)) => {
                    return record.filter(|record| record.token == lease.token)?.outcome().cloned();
                }
                Ok(Err(error)) if error.class() == ErrorClass::Permanent => return None,
                Ok(Err(_)) | Err(_) => sleep(backoff.pause()).await,
            }
        }
        None
    }

    /// Completes or fails, again and again with the same token while the store fails, until the lease's end: from then
    /// on another attempt may hold the key. The lease is renewed no more, so this is bounded.
    async fn settle(&self, held: &Held, mut settlement: Settlement) -> Result<(), StoreError> {
        let lease = &held.lease;
        // Also a lease that is over may still be ours, and the store tells.
        let mut now = Instant::now();
        let until = held.end().max(now + self.call_limit());
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE.min(self.lease / 12));
        loop {
            let end = until.min(now + self.call_limit());
            let answer = match &settlement {
                Settlement::Complete(outcome) => timeout_at(end, self.store.complete(lease, outcome)).await,
                Settlement::Fail(failure) => timeout_at(end, self.store.fail(lease, failure)).await,
            };
            let error = match answer {
                Ok(Ok(())) => return Ok(()),
                Ok(Err(error)) => error,
                Err(_) => self.no_answer(match &settlement {
                    Settlement::Complete(_) => Operation::Complete,
                    Settlement::Fail(_) => Operation::Fail,
                }),
            };
            if let Settlement::Complete(outcome) = &mut settlement
                && matches!(outcome.body, Body::Stored(_))
                && matches!(error.invalid_input(), Some(InvalidInput::OutcomeTooLarge { .. }))
            {
                *outcome = Outcome::withheld(outcome.code, Withheld::TooLarge);
                continue;
            }
            let (scope, attempt, pause) = (lease.key.scope(), lease.attempt, backoff.pause());
            if error.class() == ErrorClass::Permanent || Instant::now() + pause >= until {
                // A failure of what is completed already is looked into.
                let is_success =
                    matches!(&settlement, Settlement::Complete(outcome) if outcome.code == encode::SUCCESS);
                if is_success || error.kind() != ErrorKind::AlreadyCompleted {
                    warn!(scope, attempt, %error, "the end of an operation that was run could not be stored");
                }
                return Err(error);
            }
            debug!(scope, attempt, %error, "a result could not be stored, to be tried again");
            sleep(pause).await;
            now = Instant::now();
        }
    }

    /// How long one call to the store may take before it is sent again.
    fn call_limit(&self) -> Duration {
        (self.lease / 3).clamp(MIN_CALL, MAX_CALL)
    }

    fn no_answer(&self, operation: Operation) -> StoreError {
        StoreError::new(ErrorKind::Timeout, self.store.to_string(), operation)
    }
}

/// What became of the attempts before; whoever panics does not know.
async fn ask(hook: &dyn Reconcile, lease: &Lease) -> Reconciliation {
    guarded(|| hook.reconcile(lease)).await.unwrap_or_else(|_| {
        warn!(scope = lease.key.scope(), attempt = lease.attempt, "a reconcile hook panicked");
        Reconciliation::Unknown
    })
}

/// An operation that has completed its lease by itself: that stands, whatever came after.
fn completed_by_operation<T: DeserializeOwned, E, J: Judge<E>>(
    held: &Held,
    outcome: &Outcome,
    ended: Result<Result<T, E>, Box<str>>,
) -> Result<Executed<T>, RunError<T, E>> {
    let attempt = held.lease.attempt;
    match (outcome.code, ended) {
        (encode::SUCCESS, Ok(Ok(value))) => Ok(Executed { value, attempt, replayed: false }),
        (encode::ERROR, Ok(Err(error))) => Err(RunError::Failed { error, attempt, is_final: true, replayed: false }),
        _ => {
            let scope = held.lease.key.scope();
            warn!(scope, attempt, "an operation completed its attempt, and then ended in another way");
            stored_result::<T, E, J>(attempt, outcome, false)
        }
    }
}

/// A completed record as what the operation returned.
fn replay_record<T: DeserializeOwned, E, J: Judge<E>>(record: &Record) -> Result<Executed<T>, RunError<T, E>> {
    match record.outcome() {
        Some(outcome) => stored_result::<T, E, J>(record.attempt, outcome, true),
        None => Err(RunError::Undecodable(encode::unreadable("the store says completed, but gives no outcome"))),
    }
}

/// A stored outcome as what the operation returned.
fn stored_result<T: DeserializeOwned, E, J: Judge<E>>(
    attempt: u32,
    outcome: &Outcome,
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
        encode::ERROR => Err(match J::read(body) {
            Ok(error) => RunError::Failed { error, attempt, is_final: true, replayed },
            Err(error) => RunError::Undecodable(error),
        }),
        _ => Err(RunError::Undecodable(encode::unreadable("the outcome's code is neither 0 nor 1"))),
    }
}
