//! Gathers concurrent calls into one statement.
//!
//! So many statements may be under way at once. While there is none, a call is sent at once, by its caller. Otherwise calls
//! queue, and as soon as there is a statement fewer, those that have come go out together. There is no timer.
//!
//! A future that nobody polls holds nothing that others need: what callers send themselves is counted apart, and everything
//! else is done by tasks.
//!
//! A key may be held by a transaction of somebody's, for longer than a batch can wait. Then the server refuses the batch, its
//! calls go out again in parts until the one is found, and that one is sent by itself until it gets through or its time is
//! over. Meanwhile no other call for that key is put in a batch.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use std::{fmt, slice};

use async_trait::async_trait;
use idem_core::{ErrorClass, ErrorKind, Key, Operation, StoreError};
use sqlx::Postgres;
use sqlx::pool::PoolConnection;
use sqlx::postgres::PgConnection;
use tokio::sync::{Semaphore, SemaphorePermit, mpsc, oneshot};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, timeout_at};

use crate::calls::PATIENCE;
use crate::config::Batching;
use crate::connections::Connections;
use crate::error::{STORE, too_late};

/// How a kind of call is sent.
#[async_trait]
pub(crate) trait Batched: fmt::Debug + Send + Sync + 'static {
    /// One call.
    type Call: Send + Sync + Clone + 'static;
    /// What it is answered.
    type Answer: Send + 'static;

    fn operation(call: &Self::Call) -> Operation;

    /// Bytes that the call counts in a statement.
    fn size(call: &Self::Call) -> usize;

    fn key(call: &Self::Call) -> &Key;

    /// Sends the calls, which are in the order of [`in_order`], as one statement. It waits for others' transactions for a
    /// while only, and fails with a conflict then.
    async fn send(
        &self,
        connection: &mut PgConnection,
        calls: &[Self::Call],
    ) -> Result<Vec<Result<Self::Answer, StoreError>>, StoreError>;
}

/// The order in which every statement locks, which is that of the index.
fn in_order(a: &Key, b: &Key) -> std::cmp::Ordering {
    (a.id(), a.scope()).cmp(&(b.id(), b.scope()))
}

struct Job<S: Batched> {
    call: S::Call,
    reply: oneshot::Sender<Result<S::Answer, StoreError>>,
    /// Set by whoever comes first: the task that has a connection and sends it, or the caller that gives it up.
    taken: Arc<AtomicBool>,
}

pub(crate) struct Batcher<S: Batched> {
    queue: mpsc::Sender<Job<S>>,
    work: Arc<Work<S>>,
    /// The task that takes from the queue. It ends with the queue, after its last sender.
    task: Mutex<Option<JoinHandle<()>>>,
}

struct Work<S: Batched> {
    sender: S,
    connections: Arc<Connections>,
    queue: tokio::sync::Mutex<mpsc::Receiver<Job<S>>>,
    batching: Batching,
    call_timeout: Duration,
    statements: usize,
    /// One for each statement that may be under way at once, of those from the queue.
    slots: Arc<Semaphore>,
    /// And of those that callers send themselves.
    alone: Semaphore,
    /// The keys that somebody else's transaction holds, and whoever waits for one: one at a time has a statement.
    held: Mutex<HashMap<Key, usize>>,
    some_held: AtomicBool,
    turn: Semaphore,
}

impl<S: Batched> Batcher<S> {
    pub(crate) fn new(sender: S, connections: Arc<Connections>, batching: Batching, call_timeout: Duration) -> Self {
        let (queue, jobs) = mpsc::channel(batching.queue.clamp(1, 1 << 24));
        let statements = batching.statements.clamp(1, Semaphore::MAX_PERMITS);
        let work = Work {
            sender,
            connections,
            queue: tokio::sync::Mutex::new(jobs),
            batching,
            call_timeout,
            slots: Arc::new(Semaphore::new(statements)),
            alone: Semaphore::new(statements),
            statements,
            held: Mutex::default(),
            some_held: AtomicBool::new(false),
            turn: Semaphore::new(1),
        };
        Self { queue, work: Arc::new(work), task: Mutex::default() }
    }

    /// Starts the task with the first call that waits, and again where its runtime has gone.
    fn start(&self) {
        let mut task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
        if task.as_ref().is_none_or(JoinHandle::is_finished) {
            *task = Some(tokio::spawn(Arc::clone(&self.work).run()));
        }
    }

    /// Sends a call with whatever others there are, within the time that a call may take.
    pub(crate) async fn call(&self, call: S::Call) -> Result<S::Answer, StoreError> {
        let deadline = Instant::now() + self.work.call_timeout;
        let answer = match self.alone(&call) {
            // Sent from here, without a way through another task; apart, so that a call which waits in the queue does not
            // carry the room for what sends it.
            Some(_permit) => Box::pin(self.work.one(&call, deadline)).await,
            None => self.enqueue(call.clone(), deadline).await,
        };
        match answer {
            Err(error) if error.kind() == ErrorKind::Conflict => self.insist(call, error, deadline).await,
            answer => answer,
        }
    }

    /// Whether nothing is under way that a call could be gathered behind.
    fn alone(&self, call: &S::Call) -> Option<SemaphorePermit<'_>> {
        let busy = self.queue.capacity() < self.queue.max_capacity()
            || self.work.slots.available_permits() < self.work.statements
            || self.work.is_held(call);
        if busy { None } else { self.work.alone.try_acquire().ok() }
    }

    /// Waits for a key that is held, in a task that ends with the caller.
    async fn insist(&self, call: S::Call, error: StoreError, deadline: Instant) -> Result<S::Answer, StoreError> {
        let operation = S::operation(&call);
        let mut tasks = JoinSet::new();
        tasks.spawn(Arc::clone(&self.work).insist(call, error, deadline));
        match tasks.join_next().await {
            Some(Ok(answer)) => answer,
            _ => Err(StoreError::new(ErrorKind::Unavailable, STORE, operation)),
        }
    }

    async fn enqueue(&self, call: S::Call, deadline: Instant) -> Result<S::Answer, StoreError> {
        let operation = S::operation(&call);
        let (reply, answer) = oneshot::channel();
        let taken = Arc::new(AtomicBool::new(false));
        let job = Job { call, reply, taken: Arc::clone(&taken) };
        self.queue.try_send(job).map_err(|_| {
            StoreError::new(ErrorKind::Unavailable, STORE, operation)
                .with_class(ErrorClass::Retryable)
                .with_context("too many calls wait for their turn")
        })?;
        self.start();
        match timeout_at(deadline, answer).await {
            Ok(Ok(answer)) => answer,
            // The runtime of the task was shut down.
            Ok(Err(_)) => Err(StoreError::new(ErrorKind::Unavailable, STORE, operation)),
            Err(_) if taken.swap(true, Ordering::AcqRel) => Err(StoreError::new(ErrorKind::Timeout, STORE, operation)),
            Err(_) => Err(too_late(operation)),
        }
    }

    /// Sends these calls as statements of their own, as few as the limits allow. An answer each, in their order.
    pub(crate) async fn call_many(&self, calls: Vec<S::Call>) -> Vec<Result<S::Answer, StoreError>> {
        let deadline = Instant::now() + self.work.call_timeout;
        let mut order: Vec<usize> = (0..calls.len()).collect();
        order.sort_by(|a, b| in_order(S::key(&calls[*a]), S::key(&calls[*b])));
        let mut answers: Vec<Option<Result<S::Answer, StoreError>>> = calls.iter().map(|_| None).collect();
        let mut rest = &order[..];
        while let Some(first) = rest.first() {
            let mut bytes = S::size(&calls[*first]);
            let mut count = 1;
            while let Some(next) = rest.get(count).map(|at| S::size(&calls[*at])) {
                // A batch that the caller has made goes out whole where it can.
                if bytes + next > self.work.batching.bytes {
                    break;
                }
                bytes += next;
                count += 1;
            }
            let (now, later) = rest.split_at(count);
            rest = later;
            let batch: Vec<S::Call> = now.iter().map(|at| calls[*at].clone()).collect();
            for (at, answer) in now.iter().zip(self.work.send(&batch, None, deadline).await) {
                answers[*at] = Some(answer);
            }
        }
        let mut all = Vec::with_capacity(calls.len());
        for (call, answer) in calls.into_iter().zip(answers) {
            all.push(match answer.unwrap_or_else(|| Err(missing::<S>(&call))) {
                Err(error) if error.kind() == ErrorKind::Conflict => self.insist(call, error, deadline).await,
                answer => answer,
            });
        }
        all
    }
}

impl<S: Batched> Work<S> {
    async fn run(self: Arc<Self>) {
        let mut queue = self.queue.lock().await;
        let mut next = None;
        loop {
            let first = match next.take() {
                Some(job) => job,
                None => match queue.recv().await {
                    Some(job) => job,
                    None => return,
                },
            };
            let Ok(slot) = Arc::clone(&self.slots).acquire_owned().await else { return };
            let jobs;
            (jobs, next) = self.gather(first, &mut queue);
            let work = Arc::clone(&self);
            tokio::spawn(async move {
                work.answer(jobs).await;
                drop(slot);
            });
        }
    }

    /// What is sent together: this job and those that have come meanwhile; and the first that is too much.
    fn gather(&self, first: Job<S>, queue: &mut mpsc::Receiver<Job<S>>) -> (Vec<Job<S>>, Option<Job<S>>) {
        let mut jobs = Vec::new();
        let mut bytes = 0;
        let mut candidate = Some(first);
        while let Some(job) = candidate {
            bytes += S::size(&job.call);
            if !jobs.is_empty() && bytes > self.batching.bytes {
                return (jobs, Some(job));
            }
            jobs.push(job);
            if jobs.len() >= self.batching.calls {
                break;
            }
            candidate = queue.try_recv().ok();
        }
        (jobs, None)
    }

    async fn answer(&self, mut jobs: Vec<Job<S>>) {
        let deadline = Instant::now() + self.call_timeout;
        let Some(operation) = jobs.first().map(|job| S::operation(&job.call)) else { return };
        // Before the calls are taken: as long as there is no connection, nothing has happened.
        let connection = match self.connections.acquire(deadline, operation).await {
            Ok(connection) => connection,
            Err(error) => {
                for job in jobs {
                    drop(job.reply.send(Err(copy(&error, S::operation(&job.call)))));
                }
                return;
            }
        };
        // One that was given up is not sent, and one whose key is held would hold up the others.
        jobs.retain(|job| !job.reply.is_closed() && !job.taken.swap(true, Ordering::AcqRel));
        jobs.sort_by(|a, b| in_order(S::key(&a.call), S::key(&b.call)));
        let mut replies = Vec::with_capacity(jobs.len());
        let mut calls = Vec::with_capacity(jobs.len());
        for Job { call, reply, .. } in jobs {
            if self.is_held(&call) {
                drop(reply.send(Err(held(S::operation(&call)))));
            } else {
                calls.push(call);
                replies.push(reply);
            }
        }
        let answers = self.send(&calls, Some(connection), deadline).await;
        for (reply, answer) in replies.into_iter().zip(answers) {
            // A caller that has gone is told nothing.
            drop(reply.send(answer));
        }
    }

    /// Sends calls as one statement. Where the server has refused the statement as a whole, nothing has happened, and
    /// they go out again in parts, until it is known whose trouble it is: what is wrong with one is not its neighbours'.
    async fn send(
        &self,
        calls: &[S::Call],
        mut connection: Option<PoolConnection<Postgres>>,
        deadline: Instant,
    ) -> Vec<Result<S::Answer, StoreError>> {
        let mut answers = Vec::with_capacity(calls.len());
        // From the last to the first.
        let mut rest = vec![calls];
        while let Some(part) = rest.pop() {
            let error = match self.statement(part, connection.take(), deadline).await {
                Ok(all) => {
                    answers.extend(all);
                    continue;
                }
                Err(error) => error,
            };
            if let Some(parts) = parts::<S>(part, &error) {
                rest.extend(parts.into_iter().rev());
                continue;
            }
            let copies = part.iter().skip(1).map(|call| copy(&error, S::operation(call))).collect::<Vec<_>>();
            answers.extend(std::iter::once(error).chain(copies).map(Err));
        }
        answers
    }

    async fn statement(
        &self,
        calls: &[S::Call],
        connection: Option<PoolConnection<Postgres>>,
        deadline: Instant,
    ) -> Result<Vec<Result<S::Answer, StoreError>>, StoreError> {
        let Some(first) = calls.first() else { return Ok(Vec::new()) };
        let operation = S::operation(first);
        let mut connection = match connection {
            Some(connection) => connection,
            None => self.connections.acquire(deadline, operation).await?,
        };
        let answers = timeout_at(deadline, self.sender.send(&mut connection, calls)).await;
        self.connections.after(connection, operation, answers)
    }

    /// Sends one call as a statement of its own.
    async fn one(&self, call: &S::Call, deadline: Instant) -> Result<S::Answer, StoreError> {
        let mut answers = self.statement(slice::from_ref(call), None, deadline).await?;
        answers.pop().unwrap_or_else(|| Err(missing::<S>(call)))
    }

    /// Sends a call again and again whose key is held by somebody's transaction, by itself, for as long as a call may take.
    /// The error is that of the try before: nothing has happened.
    async fn insist(
        self: Arc<Self>,
        call: S::Call,
        mut error: StoreError,
        deadline: Instant,
    ) -> Result<S::Answer, StoreError> {
        let _mark = Mark::new(&self, S::key(&call));
        // No try is begun that the server would not have refused in time: then it is certain that nothing happened.
        let last = deadline.checked_sub(2 * PATIENCE).unwrap_or(deadline);
        loop {
            let turn = timeout_at(last, async { (self.turn.acquire().await, self.slots.acquire().await) });
            let Ok(_turn) = turn.await else { return Err(error) };
            if Instant::now() >= last {
                return Err(error);
            }
            // The server waits for the transaction, a while.
            match self.one(&call, deadline).await {
                Err(again) if again.kind() == ErrorKind::Conflict => error = again,
                answer => return answer,
            }
        }
    }

    fn is_held(&self, call: &S::Call) -> bool {
        self.some_held.load(Ordering::Acquire) && self.held().contains_key(S::key(call))
    }

    fn held(&self) -> MutexGuard<'_, HashMap<Key, usize>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// That somebody waits for a key that is held.
struct Mark<'a, S: Batched> {
    work: &'a Work<S>,
    key: &'a Key,
}

impl<'a, S: Batched> Mark<'a, S> {
    fn new(work: &'a Work<S>, key: &'a Key) -> Self {
        *work.held().entry(key.clone()).or_default() += 1;
        work.some_held.store(true, Ordering::Release);
        Self { work, key }
    }
}

impl<S: Batched> Drop for Mark<'_, S> {
    fn drop(&mut self) {
        let mut held = self.work.held();
        if let Some(waiting) = held.get_mut(self.key) {
            *waiting -= 1;
            if *waiting == 0 {
                held.remove(self.key);
            }
        }
        self.work.some_held.store(!held.is_empty(), Ordering::Release);
    }
}

/// How calls go out again that the server has refused together, where one of them may be to blame.
fn parts<'a, S: Batched>(calls: &'a [S::Call], error: &StoreError) -> Option<Vec<&'a [S::Call]>> {
    const PARTS: usize = 8;
    let most = calls.len().div_ceil(PARTS);
    if calls.len() < 2 || error.class() == ErrorClass::Unknown {
        return None;
    }
    match error.kind() {
        // A key is held: all its calls are in one part, and such a part by itself need not wait once more.
        ErrorKind::Conflict => {
            let mut parts = Vec::new();
            let (mut begin, mut end) = (0, 0);
            for of_one_key in calls.chunk_by(|a, b| S::key(a) == S::key(b)) {
                if of_one_key.len() == calls.len() {
                    return None;
                }
                if end > begin && end - begin + of_one_key.len() > most {
                    parts.push(&calls[begin..end]);
                    begin = end;
                }
                end += of_one_key.len();
            }
            parts.push(&calls[begin..]);
            Some(parts)
        }
        ErrorKind::Other | ErrorKind::Unreadable => Some(calls.chunks(most).collect()),
        // Trouble of the connection or the server, which each would meet again, one after the other.
        _ => None,
    }
}

/// A transaction holds the key.
fn held(operation: Operation) -> StoreError {
    StoreError::new(ErrorKind::Conflict, STORE, operation)
        .with_class(ErrorClass::Retryable)
        .with_context("a transaction holds the key")
}

fn missing<S: Batched>(call: &S::Call) -> StoreError {
    StoreError::new(ErrorKind::Other, STORE, S::operation(call))
}

/// The same error for another call of the statement. The source stays with the first.
fn copy(error: &StoreError, operation: Operation) -> StoreError {
    StoreError::new(error.kind(), STORE, operation).with_class(error.class()).with_context(error.to_string())
}

impl<S: Batched> fmt::Debug for Batcher<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batcher")
            .field("sender", &self.work.sender)
            .field("batching", &self.work.batching)
            .finish_non_exhaustive()
    }
}
