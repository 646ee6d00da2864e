//! Keeps the leases of running operations alive.
//!
//! One table of leases per executor and, per runtime that it is used from, one task that looks through the leases of
//! that runtime's operations. Its interval is a twelfth of the lease; it ends when it finds nothing to keep. So an
//! operation costs an entry in a table and no task and no timer of its own.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use slab::Slab;
use tokio::runtime::{Handle, Id};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};
use tracing::{debug, warn};

use super::attempt::Held;
use super::waiters;
use crate::error::{ErrorKind, Operation, StoreError};
use crate::store::KeyStore;

/// The shortest interval; timers are no finer.
const MIN_TICK: Duration = Duration::from_millis(1);

/// The longest that one renewal is waited for.
const LONGEST_CALL: Duration = Duration::from_secs(10);

pub(super) struct Keeper {
    store: Arc<dyn KeyStore>,
    lease: Duration,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    kept: Slab<(Id, Arc<Held>)>,
    /// A task belongs to its runtime: one of another runtime may not be driven while an operation of this one runs.
    tickers: Vec<(Id, JoinHandle<()>)>,
}

impl Keeper {
    pub(super) fn new(store: Arc<dyn KeyStore>, lease: Duration) -> Self {
        Self { store, lease, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tick(&self) -> Duration {
        (self.lease / 12).max(MIN_TICK)
    }

    /// Renews the lease until the guard is dropped or released, while that runtime is driven.
    pub(super) fn keep(self: &Arc<Self>, held: &Arc<Held>, runtime: &Handle) -> Kept {
        let id = runtime.id();
        let mut state = self.state();
        let slot = state.kept.insert((id, Arc::clone(held)));
        if !state.tickers.iter().any(|(of, task)| *of == id && !task.is_finished()) {
            state.tickers.retain(|(_, task)| !task.is_finished());
            let ticker = runtime.spawn(run(Arc::downgrade(self), id, self.tick()));
            state.tickers.push((id, ticker));
            // The task that a worker spawned last waits for that worker, and no other can take it: were that the
            // ticker, an operation that blocks this worker would hold up its own renewal.
            drop(runtime.spawn(async {}));
        }
        drop(state);
        Kept { keeper: Arc::clone(self), held: Arc::clone(held), slot: Some(slot) }
    }

    /// The leases of that runtime to renew now; `None` when it has none at all, and its ticker ends.
    fn due(&self, runtime: Id) -> Option<Vec<Arc<Held>>> {
        let mut state = self.state();
        let mut own = state.kept.iter().filter(|(_, (of, _))| *of == runtime).map(|(_, (_, held))| held).peekable();
        if own.peek().is_none() {
            drop(own);
            // Under the lock, so that a lease which comes next finds no ticker and starts one.
            state.tickers.retain(|(of, _)| *of != runtime);
            return None;
        }
        // At the tick that is next to a third of the lease after it was granted.
        let due = Instant::now() + self.lease * 2 / 3 + self.tick() / 2;
        Some(own.filter(|held| held.start_renewal(due)).cloned().collect())
    }

    /// Renews once. What fails is tried again at the next tick.
    pub(super) async fn renew(&self, held: &Held) -> Result<(), StoreError> {
        let sent = Instant::now();
        let answer = match timeout((self.lease / 4).min(LONGEST_CALL), self.store.renew(&held.lease, self.lease)).await
        {
            Ok(answer) => answer,
            Err(_) => Err(StoreError::new(ErrorKind::Timeout, self.store.to_string(), Operation::Renew)),
        };
        let (scope, attempt) = (held.lease.key.scope(), held.lease.attempt);
        match &answer {
            // Counted from before the send: the store's clock granted it later.
            Ok(()) => held.extend(sent + self.lease),
            Err(error) if error.kind() == ErrorKind::LeaseLost => {
                if held.lose() {
                    warn!(scope, attempt, "the lease of a running operation is lost");
                }
            }
            // The result was stored while this call was on its way.
            Err(error) if error.kind() == ErrorKind::AlreadyCompleted => {
                debug!(scope, attempt, "a lease was renewed after its attempt was completed");
            }
            Err(error) => warn!(scope, attempt, %error, "a lease could not be renewed, to be tried again"),
        }
        answer
    }

    #[cfg(test)]
    pub(super) fn kept(&self) -> usize {
        self.state().kept.len()
    }

    #[cfg(test)]
    pub(super) fn tickers(&self) -> usize {
        self.state().tickers.iter().filter(|(_, task)| !task.is_finished()).count()
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        for (_, ticker) in &state.tickers {
            ticker.abort();
        }
    }
}

/// The task of one runtime.
async fn run(keeper: Weak<Keeper>, runtime: Id, tick: Duration) {
    loop {
        sleep(tick).await;
        let Some(keeper) = keeper.upgrade() else { return };
        let Some(due) = keeper.due(runtime) else { return };
        for held in due {
            let renewal = Renewal { keeper: Arc::clone(&keeper), held };
            // Each for itself: one that gets no answer does not delay the others. What went wrong has been told.
            tokio::spawn(async move { drop(renewal.keeper.renew(&renewal.held).await) });
        }
    }
}

/// A renewal under way; it is over however its task ends.
struct Renewal {
    keeper: Arc<Keeper>,
    held: Arc<Held>,
}

impl Drop for Renewal {
    fn drop(&mut self) {
        self.held.end_renewal();
    }
}

/// An attempt that holds its key. Dropped, in whatever way the attempt ends, its lease is renewed no more and those
/// who wait for the key look again.
pub(super) struct Kept {
    keeper: Arc<Keeper>,
    held: Arc<Held>,
    slot: Option<usize>,
}

impl Kept {
    /// Renews no more.
    pub(super) fn release(&mut self) {
        if let Some(slot) = self.slot.take() {
            let removed = self.keeper.state().kept.try_remove(slot);
            drop(removed);
            self.held.end_keeping();
        }
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.release();
        waiters::wake(&self.held.lease.key);
    }
}
