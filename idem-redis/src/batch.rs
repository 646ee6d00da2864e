//! Gathers concurrent calls into pipelines.
//!
//! The driver's multiplexed connection pipelines by itself, but each call then costs a message to its task, an answer from it
//! and a wake of it. Measured by the bench `pairs` with and without (`Batching::with_calls(1)`), two runs on a busy machine:
//! with 1,024 callers 65,000 to 90,000 pairs a second for 5 µs of this process's processor time each, against 39,000 to
//! 67,000 for 10 to 12 µs; with 64 callers 65,000 against 42,000 to 61,000. A caller that is alone goes to the
//! driver directly, which is one task less on the way.
//!
//! So while a few calls are under way, each goes to the driver by itself; beyond that they queue, and a few senders take what
//! is there, send it as one pipeline, and answer. There is no timer: what comes while all senders are busy goes out together.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::{Cmd, Pipeline, Value};
use tokio::sync::{Semaphore, oneshot};
use tokio::time::{Instant, timeout, timeout_at};

use crate::config::Batching;
use crate::error::Trouble;
use crate::link::Link;

/// So many calls under way go to the driver by themselves.
const ALONE: usize = 2;

/// So many calls are under way to a cluster at once; the others wait for their turn. The driver takes the longer for each, the
/// more there are: with tens of thousands, four times as long.
const IN_A_CLUSTER: usize = 256;

/// A call that takes longer makes room for another: a node that does not answer does not hold up the calls to the others.
const TURN: Duration = Duration::from_millis(50);

type Answer = Result<Value, Trouble>;

struct Job {
    number: u64,
    command: Cmd,
    bytes: usize,
    deadline: Instant,
    reply: oneshot::Sender<Answer>,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    senders: usize,
    next: u64,
}

pub(crate) struct Batcher(Arc<Inner>);

struct Inner {
    link: Arc<Link>,
    batching: Batching,
    alone: AtomicUsize,
    cluster: Semaphore,
    queue: Mutex<Queue>,
}

/// Counts a call that is under way by itself, also when it is dropped.
struct Alone<'a>(&'a AtomicUsize);

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Batcher {
    pub(crate) fn new(link: Arc<Link>, batching: Batching) -> Self {
        let cluster = Semaphore::new(IN_A_CLUSTER);
        Self(Arc::new(Inner { link, batching, alone: AtomicUsize::new(0), cluster, queue: Mutex::default() }))
    }

    /// Sends a command with whatever others there are.
    pub(crate) async fn call(&self, command: Cmd, bytes: usize, deadline: Instant) -> Answer {
        let inner = &self.0;
        if inner.link.is_cluster() {
            return inner.in_a_cluster(&command, deadline).await;
        }
        if inner.batching.calls <= 1 || inner.may_go_alone() {
            inner.alone.fetch_add(1, Ordering::Relaxed);
            let _alone = Alone(&inner.alone);
            // Apart, so that a call which waits in the queue does not carry the room for what sends it.
            return Box::pin(inner.link.one(&command, deadline)).await;
        }
        let (reply, answer) = oneshot::channel();
        let number = {
            let mut queue = inner.queue();
            if queue.jobs.len() >= inner.batching.queue {
                return Err(Trouble::QueueFull);
            }
            queue.next += 1;
            let number = queue.next;
            queue.jobs.push_back(Job { number, command, bytes, deadline, reply });
            if queue.senders < inner.batching.pipelines.max(1) {
                queue.senders += 1;
                drop(queue);
                tokio::spawn(Sender { inner: Arc::clone(inner), counted: true }.run());
            }
            number
        };
        match timeout_at(deadline, answer).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => Err(Trouble::Gone),
            Err(_) => {
                // Still in the queue: it was not sent, and will not be.
                let mut queue = inner.queue();
                let at = queue.jobs.iter().position(|job| job.number == number);
                let waiting = at.is_some_and(|at| queue.jobs.remove(at).is_some());
                Err(Trouble::Timeout { sent: !waiting })
            }
        }
    }
}

impl Inner {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn may_go_alone(&self) -> bool {
        self.alone.load(Ordering::Relaxed) < ALONE && self.queue().senders == 0
    }

    /// Sends a command when it is its turn.
    async fn in_a_cluster(&self, command: &Cmd, deadline: Instant) -> Answer {
        let before = self.alone.fetch_add(1, Ordering::Relaxed);
        let _alone = Alone(&self.alone);
        if before >= self.batching.queue.saturating_add(IN_A_CLUSTER) {
            return Err(Trouble::QueueFull);
        }
        let Ok(turn) = timeout_at(deadline, self.cluster.acquire()).await else {
            return Err(Trouble::Timeout { sent: false });
        };
        let mut answer = Box::pin(self.link.one(command, deadline));
        match timeout(TURN, &mut answer).await {
            Ok(answer) => answer,
            Err(_) => {
                drop(turn);
                answer.await
            }
        }
    }

    /// What to send together next.
    fn next(&self) -> Vec<Job> {
        let mut queue = self.queue();
        let mut batch = Vec::with_capacity(queue.jobs.len().min(self.batching.calls));
        let mut bytes = 0;
        while batch.len() < self.batching.calls && bytes < self.batching.bytes {
            let Some(job) = queue.jobs.pop_front() else { break };
            // One that was given up is not sent.
            if !job.reply.is_closed() {
                bytes += job.bytes;
                batch.push(job);
            }
        }
        if batch.is_empty() {
            queue.senders -= 1;
        }
        batch
    }
}

/// A sender at work. It ends when nothing is left to send; it is counted until then, also where its runtime goes away.
struct Sender {
    inner: Arc<Inner>,
    counted: bool,
}

impl Sender {
    async fn run(mut self) {
        let inner = Arc::clone(&self.inner);
        let mut crowd = true;
        loop {
            // Lets those run who were answered just now, or came with the call that started this sender: what they call
            // next goes along. One alone is not waited for: what it calls next finds no sender, and takes the short way.
            if crowd {
                tokio::task::yield_now().await;
            }
            let batch = inner.next();
            crowd = batch.len() > 1;
            if batch.is_empty() {
                self.counted = false;
                return;
            }
            let mut pipeline = Pipeline::with_capacity(batch.len() + 1);
            let mut replies = Vec::with_capacity(batch.len());
            // Who has to have an answer sooner gives up by itself.
            let deadline = batch.iter().map(|job| job.deadline).max().unwrap_or_else(Instant::now);
            for job in batch {
                pipeline.add_command(job.command);
                replies.push(job.reply);
            }
            match inner.link.pipeline(pipeline, deadline).await {
                Ok(answers) => {
                    for (reply, answer) in replies.into_iter().zip(answers) {
                        // A caller that has gone is told nothing.
                        drop(reply.send(answer));
                    }
                }
                Err(trouble) => {
                    for reply in replies {
                        drop(reply.send(Err(trouble.clone())));
                    }
                }
            }
        }
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        if self.counted {
            self.inner.queue().senders -= 1;
        }
    }
}

impl fmt::Debug for Batcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batcher").field("batching", &self.0.batching).finish_non_exhaustive()
    }
}
