//! Gathers concurrent calls into transactions.
//!
//! Most of what a transaction costs, it costs once: a read version, a commit, and the messages between callers and the client
//! library's one thread. So while a few calls are under way, each has a transaction of its own; beyond that they queue, and a
//! few senders take what is there, make it one transaction, and answer. There is no timer: what comes while all senders are
//! busy goes out together.
//!
//! A batch that meets others is tried again as a whole, a few times; then each of its calls goes by itself, so that one hot
//! key does not hold up the others.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use foundationdb::Database;
use idem_core::{ErrorKind, StoreError};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use crate::calls::{Answer, Call, OwnedCall};
use crate::error::{Effect, FdbStoreError, STORE, own_error};
use crate::records::Records;
use crate::run::{Bounds, Failed, run};

/// How often a batch is tried before its calls go by themselves.
const TOGETHER: u32 = 3;

type Answered = Result<Answer, StoreError>;

struct Job {
    number: u64,
    call: OwnedCall,
    deadline: Instant,
    reply: oneshot::Sender<Answered>,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    senders: usize,
    next: u64,
}

pub(crate) struct Batcher(Arc<Inner>);

struct Inner {
    database: Arc<Database>,
    records: Arc<Records>,
    /// Calls under way by themselves.
    alone: AtomicUsize,
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
    pub(crate) fn new(database: Arc<Database>, records: Arc<Records>) -> Self {
        Self(Arc::new(Inner { database, records, alone: AtomicUsize::new(0), queue: Mutex::default() }))
    }

    /// Makes a call, with whatever others there are.
    pub(crate) async fn call(&self, call: Call<'_>) -> Answered {
        let (inner, operation) = (&self.0, call.operation());
        let config = inner.records.config();
        call.check(config)?;
        let deadline = Instant::now() + config.call_timeout;
        if config.batching.calls <= 1 || inner.may_go_alone() {
            inner.alone.fetch_add(1, Ordering::Relaxed);
            let _alone = Alone(&inner.alone);
            return inner.alone(call, deadline, Effect::None).await;
        }
        let (reply, answer) = oneshot::channel();
        let number = {
            let mut queue = inner.queue();
            if queue.jobs.len() >= config.batching.queue {
                return Err(own_error(FdbStoreError::QueueFull, operation));
            }
            queue.next += 1;
            let number = queue.next;
            queue.jobs.push_back(Job { number, call: call.to_owned(), deadline, reply });
            if queue.senders < config.batching.transactions.max(1) {
                queue.senders += 1;
                drop(queue);
                tokio::spawn(Sender { inner: Arc::clone(inner), counted: true }.run());
            }
            number
        };
        match timeout_at(deadline, answer).await {
            Ok(Ok(answer)) => answer,
            // The runtime of the sender has gone.
            Ok(Err(_)) => Err(StoreError::new(ErrorKind::Unavailable, STORE, operation)),
            Err(_) => {
                // Still in the queue: it was not sent, and will not be.
                let mut queue = inner.queue();
                let at = queue.jobs.iter().position(|job| job.number == number);
                let waiting = at.is_some_and(|at| queue.jobs.remove(at).is_some());
                let effect = if waiting { Effect::None } else { Effect::Possible };
                Err(Failed::late(effect).into_error(operation))
            }
        }
    }

    /// Makes calls that belong together, in as few transactions as hold them, as if one after the other.
    pub(crate) async fn call_many(&self, calls: &[Call<'_>]) -> Vec<Answered> {
        let inner = &self.0;
        let config = inner.records.config();
        let deadline = Instant::now() + config.call_timeout;
        let mut answers: Vec<Option<Answered>> = calls.iter().map(|call| call.check(config).err().map(Err)).collect();
        let good: Vec<usize> = (0..calls.len()).filter(|&at| answers[at].is_none()).collect();
        let mut left = &*good;
        while !left.is_empty() {
            let mut bytes = 0;
            let fits = |at: &&usize| {
                let before = bytes;
                bytes += calls[**at].size();
                before == 0 || bytes <= MANY_BYTES
            };
            let count = left.iter().take(MANY_CALLS).take_while(fits).count();
            let (batch, rest) = left.split_at(count.max(1));
            let part: Vec<Call<'_>> = batch.iter().map(|&at| calls[at]).collect();
            let answered = inner.together(&part, deadline, config.max_tries, Effect::None).await;
            match answered {
                Ok(answered) => {
                    for (&at, answer) in batch.iter().zip(answered) {
                        answers[at] = Some(answer);
                    }
                }
                Err(failed) => {
                    for &at in batch {
                        answers[at] = Some(Err(failed.clone().into_error(calls[at].operation())));
                    }
                }
            }
            left = rest;
        }
        let missing = |call: &Call<'_>| Err(StoreError::new(ErrorKind::Other, STORE, call.operation()));
        answers.into_iter().zip(calls).map(|(answer, call)| answer.unwrap_or_else(|| missing(call))).collect()
    }
}

/// What a transaction of calls that belong together holds at most: well within FoundationDB's 10 MB and five seconds.
const MANY_CALLS: usize = 1_000;
const MANY_BYTES: usize = 4 * 1024 * 1024;

impl Inner {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn may_go_alone(&self) -> bool {
        self.alone.load(Ordering::Relaxed) < self.records.config().batching.alone && self.queue().senders == 0
    }

    /// Makes calls in one transaction, of which an earlier one may have been committed.
    async fn together(
        &self,
        calls: &[Call<'_>],
        deadline: Instant,
        tries: u32,
        before: Effect,
    ) -> Result<Vec<Answered>, Failed> {
        let time = deadline.saturating_duration_since(Instant::now());
        let records = &self.records;
        run(&self.database, Bounds { time, tries, before }, |transaction, before| async move {
            records.many(&transaction, calls, before).await
        })
        .await
    }

    /// Makes a call in a transaction of its own.
    async fn alone(&self, call: Call<'_>, deadline: Instant, before: Effect) -> Answered {
        let answered = self.together(&[call], deadline, self.records.config().max_tries, before).await;
        let answer = answered.map_err(|failed| failed.into_error(call.operation()))?.pop();
        answer.unwrap_or_else(|| Err(StoreError::new(ErrorKind::Other, STORE, call.operation())))
    }

    /// What to send together next.
    fn next(&self) -> Vec<Job> {
        let batching = self.records.config().batching;
        let mut queue = self.queue();
        let mut batch = Vec::with_capacity(queue.jobs.len().min(batching.calls));
        let mut bytes = 0;
        while batch.len() < batching.calls && bytes < batching.bytes {
            let Some(job) = queue.jobs.pop_front() else { break };
            // One that was given up is not sent.
            if !job.reply.is_closed() {
                bytes += job.call.call().size();
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
            // Who has to have an answer sooner gives up by itself.
            let deadline = batch.iter().map(|job| job.deadline).max().unwrap_or_else(Instant::now);
            let calls: Vec<Call<'_>> = batch.iter().map(|job| job.call.call()).collect();
            let tries = TOGETHER.min(inner.records.config().max_tries);
            let answered = inner.together(&calls, deadline, tries, Effect::None).await;
            match answered {
                Ok(answers) => {
                    for (job, answer) in batch.into_iter().zip(answers) {
                        // A caller that has gone is told nothing.
                        drop(job.reply.send(answer));
                    }
                }
                Err(failed) if failed.is_conflict() && batch.len() > 1 => {
                    for job in batch {
                        let (inner, before) = (Arc::clone(&inner), failed.effect);
                        tokio::spawn(async move {
                            let answer = inner.alone(job.call.call(), job.deadline, before).await;
                            drop(job.reply.send(answer));
                        });
                    }
                }
                Err(failed) => {
                    for job in batch {
                        let operation = job.call.call().operation();
                        drop(job.reply.send(Err(failed.clone().into_error(operation))));
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
        f.debug_struct("Batcher").finish_non_exhaustive()
    }
}
