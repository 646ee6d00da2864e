//! Running on although the caller goes away, and waiting for all that does.

use std::any::Any;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;

use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::JoinError;
use tracing::{Instrument, warn};

/// Polls the future once; if it is not done then, it becomes a task of its own, which goes on when the caller is
/// dropped or not polled. So what is done at once costs no task.
///
/// # Errors
/// The runtime is shut down and has dropped the task.
pub(super) async fn detached<F>(future: F, runtime: &Handle) -> Result<F::Output, JoinError>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    let mut future = Box::pin(future);
    if let Poll::Ready(output) = poll_fn(|context| Poll::Ready(future.as_mut().poll(context))).await {
        return Ok(output);
    }
    // No await since the poll: there is no moment at which the caller could drop it.
    match runtime.spawn(future.in_current_span()).await {
        Ok(output) => Ok(output),
        // A panic of the store's, as it would be without the task: the operation's are caught.
        Err(error) => match error.try_into_panic() {
            Ok(payload) => resume_unwind(payload),
            Err(cancelled) => Err(cancelled),
        },
    }
}

/// Runs foreign code to its end.
///
/// # Errors
/// The message of its panic, in whatever part of it.
pub(super) async fn guarded<Fut: Future>(start: impl FnOnce() -> Fut) -> Result<Fut::Output, Box<str>> {
    let mut future = pin!(Some(caught(start)?));
    let ended = poll_fn(|context| match future.as_mut().as_pin_mut() {
        Some(running) => match caught(|| running.poll(context)) {
            Ok(Poll::Ready(output)) => Poll::Ready(Ok(output)),
            Ok(Poll::Pending) => Poll::Pending,
            Err(message) => Poll::Ready(Err(message)),
        },
        None => Poll::Pending,
    })
    .await;
    if caught(|| future.set(None)).is_err() {
        warn!("an operation panicked when it was dropped, after its end");
    }
    ended
}

/// Runs foreign code.
///
/// # Errors
/// The message of its panic.
pub(super) fn caught<R>(code: impl FnOnce() -> R) -> Result<R, Box<str>> {
    // What the code leaves half-done is dropped, not looked at.
    catch_unwind(AssertUnwindSafe(code)).map_err(|payload| {
        let text = message(payload.as_ref());
        // The payload is foreign too: a panic in its drop must not leave the attempt unresolved.
        drop(catch_unwind(AssertUnwindSafe(move || drop(payload))));
        text
    })
}

fn message(payload: &(dyn Any + Send)) -> Box<str> {
    let text = payload.downcast_ref::<&str>().copied().or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("no message").into()
}

/// How many attempts run.
#[derive(Debug, Default)]
pub(super) struct Running {
    count: AtomicUsize,
    none: Notify,
}

impl Running {
    pub(super) fn enter(&self) -> Entered<'_> {
        self.count.fetch_add(1, Ordering::AcqRel);
        Entered(self)
    }

    pub(super) fn count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// Ends at a moment at which none runs.
    pub(super) async fn drained(&self) {
        loop {
            let none = self.none.notified();
            if self.count() == 0 {
                return;
            }
            none.await;
        }
    }
}

/// An attempt that runs, until dropped.
pub(super) struct Entered<'a>(&'a Running);

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if self.0.count.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.none.notify_waiters();
        }
    }
}
