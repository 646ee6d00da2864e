//! Keeps a connection for the next call, for a moment.
//!
//! A pool asks the server for a sign of life when it gives a connection out and when it takes one back: two round trips
//! beside the one of the call. So a connection that has just answered is kept here for the next call. It goes back to the
//! pool when none has come for a tenth of a second, and at once when the pool has no other left for its other users.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use idem_core::{ErrorKind, Operation, StoreError};
use sqlx::pool::PoolConnection;
use sqlx::{PgPool, Postgres};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio::time::error::Elapsed;
use tokio::time::{Instant, sleep, timeout_at};

use crate::error::{STORE, Stage, store_error, too_late};

const MOMENT: Duration = Duration::from_millis(100);

pub(crate) struct Connections {
    pool: PgPool,
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    /// With the time of their last use, the latest at the end.
    connections: Vec<(PoolConnection<Postgres>, Instant)>,
    /// The task that gives them back. It ends when there are none.
    sweeper: Option<JoinHandle<()>>,
}

impl Connections {
    pub(crate) fn new(pool: PgPool) -> Arc<Self> {
        Arc::new(Self { pool, kept: Mutex::default() })
    }

    /// A connection that was kept, or one of the pool's.
    pub(crate) async fn acquire(
        &self,
        deadline: Instant,
        operation: Operation,
    ) -> Result<PoolConnection<Postgres>, StoreError> {
        if let Some((connection, _)) = self.kept().connections.pop() {
            return Ok(connection);
        }
        // Apart: it is large, and seldom needed.
        match timeout_at(deadline, Box::pin(self.pool.acquire())).await {
            Ok(connection) => connection.map_err(|error| store_error(error, Stage::Acquire, operation)),
            Err(_) => Err(too_late(operation)),
        }
    }

    /// What a call on the connection comes to, and what becomes of the connection: one that has answered is kept.
    pub(crate) fn after<T>(
        self: &Arc<Self>,
        connection: PoolConnection<Postgres>,
        operation: Operation,
        answer: Result<Result<T, StoreError>, Elapsed>,
    ) -> Result<T, StoreError> {
        match answer {
            Ok(Ok(answer)) => {
                self.keep(connection);
                Ok(answer)
            }
            Ok(Err(error)) => Err(error),
            Err(_) => {
                // What the server does with it is unknown; the connection is closed, and not given to another call.
                drop(connection.detach());
                Err(StoreError::new(ErrorKind::Timeout, STORE, operation))
            }
        }
    }

    /// Keeps a connection that is idle and has just answered.
    fn keep(self: &Arc<Self>, connection: PoolConnection<Postgres>) {
        if self.is_wanted() {
            return drop(connection);
        }
        let mut kept = self.kept();
        kept.connections.push((connection, Instant::now()));
        if kept.sweeper.as_ref().is_none_or(JoinHandle::is_finished) {
            kept.sweeper = Some(tokio::spawn(sweep(Arc::downgrade(self))));
        }
    }

    /// Whether the pool has none to give to others.
    fn is_wanted(&self) -> bool {
        self.pool.is_closed()
            || (self.pool.num_idle() == 0 && self.pool.size() >= self.pool.options().get_max_connections())
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn sweep(connections: Weak<Connections>) {
    loop {
        sleep(MOMENT).await;
        let Some(connections) = connections.upgrade() else { return };
        let all = connections.is_wanted();
        let mut kept = connections.kept();
        kept.connections.retain(|(_, used)| !all && used.elapsed() < MOMENT);
        if kept.connections.is_empty() {
            kept.sweeper = None;
            return;
        }
    }
}

impl Drop for Connections {
    fn drop(&mut self) {
        let kept = self.kept.get_mut().unwrap_or_else(PoisonError::into_inner);
        // The pool takes them back in a task, which needs a runtime; where there is none any more, they are closed.
        if Handle::try_current().is_err() {
            for (connection, _) in kept.connections.drain(..) {
                drop(connection.detach());
            }
        }
    }
}
