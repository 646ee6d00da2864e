//! One attempt, from reserve to complete or fail.

use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::{Instant, sleep, timeout_at};
use tracing::{debug, warn};

use super::attempt::{Attempt, Held};
use super::backoff::Backoff;
use super::config::{OnPanic, Recovery};
use super::detach::guarded;
use super::judge::Judge;
use super::outcomes::{Run, Settlement};
use super::reconcile::{Reconcile, Reconciliation};
use super::{Inner, detach};
use crate::error::{ErrorClass, ErrorKind, Operation, StoreError};
use crate::limits::InvalidInput;
use crate::outcome::{Body, Failure, Outcome, Withheld};
use crate::record::State;
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

pub(super) enum Step<V, F, J> {
    Done(Run<V>),
    Busy(Busy<F, J>),
}

impl Inner {
    #[expect(clippy::manual_async_fn, reason = "an async fn holds its arguments twice: this goes to the heap")]
    pub(super) fn attempt<R, V, F, Fut, J>(
        self: Arc<Self>,
        runtime: Handle,
        mut call: Call<F, J>,
    ) -> impl Future<Output = Step<V, F, J>> + Send + 'static
    where
        F: FnOnce(Attempt) -> Fut + Send + 'static,
        Fut: Future<Output = R> + Send + 'static,
        R: Send + 'static,
        V: Send + 'static,
        J: Judge<R, V>,
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
                Ok((Reservation::Completed(record), _)) => {
                    let attempt = record.attempt;
                    return Step::Done(match record.state {
                        State::Completed(outcome) => Run::Stored { outcome, attempt, replayed: true },
                        State::InProgress | State::Failed(_) => Run::Store(self.no_outcome()),
                    });
                }
                Ok((Reservation::Abandoned(record), _)) => return Step::Done(Run::Abandoned(Box::new(record))),
                Ok((Reservation::Mismatch, _)) => return Step::Done(Run::Mismatch),
                Err(error) => return Step::Done(Run::Unreserved(error)),
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

    async fn hold<R, V, F, Fut, J>(&self, held: &Arc<Held>, runtime: &Handle, operation: F, judge: J) -> Run<V>
    where
        F: FnOnce(Attempt) -> Fut + Send + 'static,
        Fut: Future<Output = R> + Send + 'static,
        R: Send + 'static,
        V: Send + 'static,
        J: Judge<R, V>,
    {
        if let Err(error) = self.ensure_time(held).await {
            return Run::Store(error);
        }
        // Before the operation's first poll, which may block its thread for longer than the lease.
        let mut kept = self.keeper.keep(held, runtime);
        let attempt = held.lease.attempt;
        if let Origin::Takeover(previous) = held.lease.origin {
            let scope = held.lease.key.scope();
            warn!(scope, attempt, previous = previous.attempt, "an abandoned attempt was taken over");
            if let Recovery::Reconcile(hook) = &self.recovery {
                match ask(&**hook, &held.lease).await {
                    Reconciliation::NotExecuted => {
                        if let Err(error) = self.ensure_time(held).await {
                            return Run::Store(error);
                        }
                    }
                    Reconciliation::Executed(outcome) => {
                        kept.release();
                        return match self.settle(held, Settlement::Complete(outcome.clone()), false).await {
                            Ok(()) => Run::Stored { outcome, attempt, replayed: true },
                            Err(error) => Run::Store(error),
                        };
                    }
                    // Not failed: that would say that nothing has happened, and the next attempt would not ask.
                    Reconciliation::Unknown => return Run::OutcomeUnknown { attempt },
                }
            }
        }
        let ended = guarded(|| operation(Attempt::new(Arc::clone(held)))).await;
        kept.release();
        if let Some(outcome) = held.completed() {
            return completed_by_operation::<R, V, J>(held, outcome, ended);
        }
        let judged = ended.and_then(|ended| detach::caught(|| judge.settle(ended, self.outcome_limit)));
        let (value, settlement) = match judged {
            Ok(judged) => judged,
            Err(message) => return self.panicked(held, message).await,
        };
        let completed = matches!(settlement, Settlement::Complete(_));
        let gives_way = J::gives_way(&value);
        let recorded = self.settle(held, settlement, gives_way).await;
        if gives_way
            && let Err(refusal) = &recorded
            && let Some(outcome) = self.already_completed(held, refusal).await
        {
            return Run::Stored { outcome, attempt, replayed: false };
        }
        Run::Ended { value, attempt, completed, recorded }
    }

    /// Before the operation: a lease whose reserve was long on its way is renewed first, or it would end too soon for
    /// the keeper.
    async fn ensure_time(&self, held: &Held) -> Result<(), StoreError> {
        if held.lasts_until(Instant::now() + self.lease / 2) { Ok(()) } else { self.keeper.renew(held).await }
    }

    async fn panicked<V>(&self, held: &Held, message: Box<str>) -> Run<V> {
        let attempt = held.lease.attempt;
        warn!(scope = held.lease.key.scope(), attempt, policy = ?self.on_panic, "an operation panicked");
        if self.on_panic == OnPanic::Free {
            let note = Failure::truncated(&format!("panicked: {message}"));
            // Where that fails it has been told, and the key is free at the lease's end.
            if let Err(error) = self.settle(held, Settlement::Fail(note), true).await
                && let Some(outcome) = self.already_completed(held, &error).await
            {
                return Run::Stored { outcome, attempt, replayed: false };
            }
        }
        Run::Panicked { message, attempt }
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
    ///
    /// The caller looks into a refusal because it is completed already, where it says so: that is no news then.
    async fn settle(&self, held: &Held, mut settlement: Settlement, looked_into: bool) -> Result<(), StoreError> {
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
                if !looked_into || error.kind() != ErrorKind::AlreadyCompleted {
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

    /// The store breaks its contract.
    fn no_outcome(&self) -> StoreError {
        StoreError::new(ErrorKind::Unreadable, self.store.to_string(), Operation::Reserve)
            .with_context("a completed record without an outcome")
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
fn completed_by_operation<R, V, J: Judge<R, V>>(held: &Held, outcome: &Outcome, ended: Result<R, Box<str>>) -> Run<V> {
    let attempt = held.lease.attempt;
    match ended {
        Ok(ended) if J::agrees(&ended, outcome) => {
            Run::Ended { value: J::value(ended), attempt, completed: true, recorded: Ok(()) }
        }
        _ => {
            let scope = held.lease.key.scope();
            warn!(scope, attempt, "an operation completed its attempt, and then ended in another way");
            Run::Stored { outcome: outcome.clone(), attempt, replayed: false }
        }
    }
}
