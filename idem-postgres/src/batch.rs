//! Gathers concurrent calls into one statement.
//!
//! A few tasks take calls from one queue: each takes what is there, sends it, and answers. While all are busy, the queue
//! grows, and the next of them takes more at once. There is no timer, and a call that comes alone goes out alone.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::{ErrorClass, ErrorKind, Operation, StoreError};
use sqlx::PgPool;
use sqlx::postgres::PgConnection;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::config::Batching;
use crate::error::{STORE, Stage, store_error};

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

    /// Puts the calls in the order in which statements lock.
    fn sort_key(call: &Self::Call) -> (&str, &str);

    /// Sends the calls, which are sorted, as one statement.
    async fn send(
        &self,
        connection: &mut PgConnection,
        calls: &[Self::Call],
    ) -> Result<Vec<Result<Self::Answer, StoreError>>, StoreError>;
}

struct Job<S: Batched> {
    call: S::Call,
    reply: oneshot::Sender<Result<S::Answer, StoreError>>,
    /// Set by whoever comes first: the task that sends it, or the caller that gives it up.
    taken: Arc<AtomicBool>,
}

pub(crate) struct Batcher<S: Batched> {
    queue: mpsc::Sender<Job<S>>,
    work: Arc<Work<S>>,
    /// They end with the queue, after its last sender; calls under way are answered first.
    tasks: Mutex<Vec<JoinHandle<()>>>,
}

struct Work<S: Batched> {
    sender: S,
    pool: PgPool,
    queue: tokio::sync::Mutex<mpsc::Receiver<Job<S>>>,
    batching: Batching,
    call_timeout: Duration,
}

impl<S: Batched> Batcher<S> {
    pub(crate) fn new(sender: S, pool: PgPool, batching: Batching, call_timeout: Duration) -> Self {
        let (queue, jobs) = mpsc::channel(batching.queue.clamp(1, 1 << 24));
        Self {
            queue,
            work: Arc::new(Work { sender, pool, queue: tokio::sync::Mutex::new(jobs), batching, call_timeout }),
            tasks: Mutex::default(),
        }
    }

    /// Starts the tasks with the first call, and again where their runtime has gone.
    fn start(&self) {
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        if tasks.iter().any(|task| !task.is_finished()) {
            return;
        }
        let statements = self.work.batching.statements.max(1);
        *tasks = (0..statements).map(|_| tokio::spawn(Arc::clone(&self.work).run())).collect();
    }

    /// Sends a call with whatever others there are, within the time that a call may take.
    pub(crate) async fn call(&self, call: S::Call) -> Result<S::Answer, StoreError> {
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
        match timeout(self.work.call_timeout, answer).await {
            Ok(Ok(answer)) => answer,
            // The runtime of the tasks was shut down.
            Ok(Err(_)) => Err(StoreError::new(ErrorKind::Unavailable, STORE, operation)),
            Err(_) => {
                let sent = taken.swap(true, Ordering::AcqRel);
                let class = if sent { ErrorClass::Unknown } else { ErrorClass::Retryable };
                Err(StoreError::new(ErrorKind::Timeout, STORE, operation).with_class(class))
            }
        }
    }

    /// Sends these calls as statements of their own, as few as the limits allow. An answer each, in their order.
    pub(crate) async fn call_many(&self, calls: Vec<S::Call>) -> Vec<Result<S::Answer, StoreError>> {
        let mut order: Vec<usize> = (0..calls.len()).collect();
        order.sort_by(|a, b| S::sort_key(&calls[*a]).cmp(&S::sort_key(&calls[*b])));
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
            for (at, answer) in now.iter().zip(self.work.send(&batch).await) {
                answers[*at] = Some(answer);
            }
        }
        let missing = |call: &S::Call| Err(StoreError::new(ErrorKind::Other, STORE, S::operation(call)));
        answers.into_iter().zip(&calls).map(|(answer, call)| answer.unwrap_or_else(|| missing(call))).collect()
    }
}

impl<S: Batched> Work<S> {
    async fn run(self: Arc<Self>) {
        while let Some(mut jobs) = self.next().await {
            jobs.sort_by(|a, b| S::sort_key(&a.call).cmp(&S::sort_key(&b.call)));
            let (calls, replies): (Vec<_>, Vec<_>) = jobs.into_iter().map(|job| (job.call, job.reply)).unzip();
            for (reply, answer) in replies.into_iter().zip(self.send(&calls).await) {
                // A caller that has gone is told nothing.
                drop(reply.send(answer));
            }
        }
    }

    /// The jobs to send together; `None` when there will be no more.
    async fn next(&self) -> Option<Vec<Job<S>>> {
        let mut queue = self.queue.lock().await;
        let mut jobs = Vec::new();
        let mut bytes = 0;
        loop {
            let job = if jobs.is_empty() {
                queue.recv().await?
            } else {
                if jobs.len() >= self.batching.calls || bytes >= self.batching.bytes {
                    return Some(jobs);
                }
                match queue.try_recv() {
                    Ok(job) => job,
                    Err(_) => return Some(jobs),
                }
            };
            // One that was given up is not sent.
            if !job.reply.is_closed() && !job.taken.swap(true, Ordering::AcqRel) {
                bytes += S::size(&job.call);
                jobs.push(job);
            }
        }
    }

    /// Sends calls as one statement. Where the server has refused the statement as a whole, nothing has happened, and
    /// each goes out by itself: what is wrong with one is not its neighbours' trouble.
    async fn send(&self, calls: &[S::Call]) -> Vec<Result<S::Answer, StoreError>> {
        let error = match self.statement(calls).await {
            Ok(answers) => return answers,
            Err(error) => error,
        };
        // Not for trouble of the connection or the server, which each would meet again, one after the other.
        let one_call_may_be_to_blame =
            matches!(error.kind(), ErrorKind::Conflict | ErrorKind::Other | ErrorKind::Unreadable);
        if calls.len() > 1 && one_call_may_be_to_blame && error.class() != ErrorClass::Unknown {
            let mut answers = Vec::with_capacity(calls.len());
            for call in calls {
                answers.push(match self.statement(std::slice::from_ref(call)).await {
                    Ok(mut one) => one.pop().unwrap_or_else(|| Err(copy(&error, S::operation(call)))),
                    Err(error) => Err(error),
                });
            }
            return answers;
        }
        let mut errors: Vec<_> = calls.iter().skip(1).map(|call| Err(copy(&error, S::operation(call)))).collect();
        errors.insert(0, Err(error));
        errors
    }

    async fn statement(&self, calls: &[S::Call]) -> Result<Vec<Result<S::Answer, StoreError>>, StoreError> {
        let operation = calls.first().map_or(Operation::Setup, S::operation);
        let mut connection =
            self.pool.acquire().await.map_err(|error| store_error(error, Stage::Acquire, operation))?;
        match timeout(self.call_timeout, self.sender.send(&mut connection, calls)).await {
            Ok(answers) => answers,
            Err(_) => {
                // What the server does with it is unknown; the connection is closed, and not given to another call.
                drop(connection.detach());
                Err(StoreError::new(ErrorKind::Timeout, STORE, operation))
            }
        }
    }
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
