//! The three scripts that every call becomes, their answers, and repeating what was not answered.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use bytes::Bytes;
use idem_core::decision::Refusal;
use idem_core::{
    ErrorClass, ErrorKind, Failure, Key, Lease, OnAbandoned, Operation, Origin, Outcome, Record, Reservation, Reserve,
    StoreError,
};
use rand::RngExt;
use redis::cluster_routing::Slot;
use redis::{Cmd, Pipeline, RedisWrite, Script, ServerErrorKind, Value};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::batch::Batcher;
use crate::config::{ClockShift, Config, Prefix};
use crate::error::{RedisStoreError, STORE, Trouble, own_error};
use crate::layout;
use crate::link::Link;

/// A script, and the name that the server gives it.
struct Stored {
    text: &'static str,
    script: Script,
}

impl Stored {
    fn new(text: &'static str) -> Self {
        Self { text, script: Script::new(text) }
    }
}

static RESERVE: LazyLock<Stored> = LazyLock::new(|| Stored::new(include_str!("scripts/reserve.lua")));
static SETTLE: LazyLock<Stored> = LazyLock::new(|| Stored::new(include_str!("scripts/settle.lua")));
static FETCH: LazyLock<Stored> = LazyLock::new(|| Stored::new(include_str!("scripts/fetch.lua")));

/// One call of the contract, as it is sent.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Call<'a> {
    Reserve(&'a Reserve),
    Complete(&'a Lease, &'a Outcome),
    Fail(&'a Lease, &'a Failure),
    Renew(&'a Lease, Duration),
    Fetch(&'a Key),
}

impl Call<'_> {
    fn operation(self) -> Operation {
        match self {
            Self::Reserve(_) => Operation::Reserve,
            Self::Complete(..) => Operation::Complete,
            Self::Fail(..) => Operation::Fail,
            Self::Renew(..) => Operation::Renew,
            Self::Fetch(_) => Operation::Fetch,
        }
    }

    fn key(&self) -> &Key {
        match self {
            Self::Reserve(request) => &request.key,
            Self::Complete(lease, _) | Self::Fail(lease, _) | Self::Renew(lease, _) => &lease.key,
            Self::Fetch(key) => key,
        }
    }

    /// Bytes of what it sends, about.
    fn size(&self) -> usize {
        let content = match self {
            Self::Complete(_, outcome) => layout::outcome_len(outcome),
            Self::Fail(_, failure) => failure.note().len(),
            Self::Reserve(_) => layout::MAX_FRESH,
            Self::Renew(..) | Self::Fetch(_) => 0,
        };
        content + self.key().size() + 160
    }

    fn script(&self) -> &'static Stored {
        match self {
            Self::Reserve(_) => &RESERVE,
            Self::Complete(..) | Self::Fail(..) | Self::Renew(..) => &SETTLE,
            Self::Fetch(_) => &FETCH,
        }
    }
}

/// Sends calls and reads their answers.
pub(crate) struct Calls {
    pub(crate) link: Arc<Link>,
    batcher: Batcher,
    prefix: Prefix,
    clock_shift: ClockShift,
    /// The scripts' word for an answer that waits for replicas.
    waits: &'static str,
    call_timeout: Duration,
    unreadable: AtomicU64,
}

impl Calls {
    pub(crate) fn new(link: Link, config: &Config) -> Self {
        let link = Arc::new(link);
        Self {
            batcher: Batcher::new(Arc::clone(&link), config.batching),
            link,
            prefix: config.prefix.clone(),
            clock_shift: config.clock_shift.clone(),
            waits: if config.acknowledge.waits() { "w" } else { "" },
            call_timeout: config.call_timeout,
            unreadable: AtomicU64::new(0),
        }
    }

    pub(crate) fn deadline(&self) -> Instant {
        Instant::now() + self.call_timeout
    }

    /// The command of a call: by the script's name, or with its text, which makes the server know it.
    fn command(&self, call: Call<'_>, with_text: bool) -> Cmd {
        let stored = call.script();
        let mut cmd = Cmd::with_capacity(9, call.size() + if with_text { stored.text.len() } else { 40 });
        match with_text {
            true => cmd.arg("EVAL").arg(stored.text),
            false => cmd.arg("EVALSHA").arg(stored.script.get_hash()),
        };
        cmd.arg("1");
        let name = layout::name_len(&self.prefix, call.key());
        layout::put_name(&mut cmd.bufmut_for_next_arg(name), &self.prefix, call.key());
        let mode = match call {
            Call::Reserve(request) => {
                layout::put_fresh(&mut cmd.bufmut_for_next_arg(layout::MAX_FRESH), request);
                cmd.write_arg_fmt(layout::kept(request.retention));
                match (request.on_abandoned, self.waits) {
                    (OnAbandoned::TakeOver, waits) => waits,
                    (OnAbandoned::Refuse, "") => "r",
                    (OnAbandoned::Refuse, _) => "rw",
                }
            }
            Call::Complete(lease, outcome) => {
                settle(&mut cmd, lease, lease.retention);
                layout::put_outcome(&mut cmd.bufmut_for_next_arg(layout::outcome_len(outcome)), outcome);
                self.waits
            }
            Call::Fail(lease, failure) => {
                settle(&mut cmd, lease, lease.retention);
                layout::put_failure(&mut cmd.bufmut_for_next_arg(1 + failure.note().len()), failure);
                self.waits
            }
            Call::Renew(lease, extend_by) => {
                settle(&mut cmd, lease, extend_by);
                cmd.write_arg(b"P");
                self.waits
            }
            Call::Fetch(_) => self.waits,
        };
        // Each argument costs the server time: these are left out where they say nothing.
        let shift = self.clock_shift.micros();
        if shift != 0 {
            cmd.arg(mode).arg(shift);
        } else if !mode.is_empty() {
            cmd.arg(mode);
        }
        cmd
    }

    /// Sends a call, and sends it again where it was not answered, until the time that a call may take is over.
    async fn send(&self, call: Call<'_>, deadline: Instant) -> Result<Value, StoreError> {
        let mut attempt = Attempt::new(call, self, deadline);
        loop {
            let command = self.command(call, attempt.with_text);
            let answer = self.batcher.call(command, call.size(), deadline).await;
            if let Some(done) = attempt.judge(answer) {
                return done;
            }
            attempt.pause().await;
        }
    }

    pub(crate) async fn reserve(&self, request: &Reserve) -> Result<Reservation, StoreError> {
        let answer = self.send(Call::Reserve(request), self.deadline()).await;
        self.count(answer.and_then(|answer| read_reservation(answer, request)))
    }

    pub(crate) async fn settle(&self, call: Call<'_>) -> Result<(), StoreError> {
        let answer = self.send(call, self.deadline()).await;
        self.count(answer.and_then(|answer| read_settled(&answer, call.operation())))
    }

    /// Sends a call once, to see whether it can be sent.
    pub(crate) async fn probe(&self, call: Call<'_>) -> Result<Value, StoreError> {
        self.send(call, self.deadline()).await
    }

    /// Counts what could not be read.
    pub(crate) fn count<T>(&self, answer: Result<T, StoreError>) -> Result<T, StoreError> {
        if let Err(error) = &answer
            && error.kind() == ErrorKind::Unreadable
        {
            self.unreadable.fetch_add(1, Ordering::Relaxed);
        }
        answer
    }

    pub(crate) fn unreadable(&self) -> u64 {
        self.unreadable.load(Ordering::Relaxed)
    }

    pub(crate) async fn fetch(&self, key: &Key) -> Result<Option<Record>, StoreError> {
        let answer = self.send(Call::Fetch(key), self.deadline()).await;
        self.count(answer.and_then(|answer| read_fetched(answer, key, Operation::Fetch)))
    }

    /// Sends calls that the caller has gathered: as few pipelines as the limits allow on one server, a pipeline for each slot
    /// on a cluster, all at once. An answer each, in their order. What was not answered is sent again together.
    pub(crate) async fn many(&self, calls: &[Call<'_>]) -> Vec<Result<Value, StoreError>> {
        let deadline = self.deadline();
        let mut attempts: Vec<Attempt<'_>> = calls.iter().map(|call| Attempt::new(*call, self, deadline)).collect();
        let mut done: Vec<Option<Result<Value, StoreError>>> = calls.iter().map(|_| None).collect();
        let mut open: Vec<usize> = (0..calls.len()).collect();
        while !open.is_empty() {
            let mut answers: Vec<Option<Result<Value, Trouble>>> = calls.iter().map(|_| None).collect();
            let mut sent = JoinSet::new();
            // On a cluster, what was refused with one call of a slot need not be so for the others of it.
            let one_by_one = self.link.is_cluster() && open.len() < calls.len();
            for group in self.groups(calls, &open, one_by_one) {
                let Some(first) = group.first().copied() else { continue };
                let link = Arc::clone(&self.link);
                let command = |at: usize| self.command(calls[at], attempts[at].with_text);
                if group.len() == 1 {
                    let command = command(first);
                    sent.spawn(async move {
                        let answer = link.one(&command, deadline).await;
                        (group, Ok(vec![answer]))
                    });
                } else {
                    let mut pipeline = Pipeline::with_capacity(group.len() + 1);
                    for at in &group {
                        pipeline.add_command(command(*at));
                    }
                    sent.spawn(async move {
                        let answer = link.pipeline(pipeline, deadline).await;
                        (group, answer)
                    });
                }
                // One server gets them one after the other, so that calls of one key keep their order; on a cluster, those of
                // one key are of one slot and go together.
                if !self.link.is_cluster() {
                    take_answers(&mut sent, &mut answers).await;
                }
            }
            take_answers(&mut sent, &mut answers).await;
            for at in std::mem::take(&mut open) {
                done[at] = attempts[at].judge(answers[at].take().unwrap_or(Err(Trouble::Gone)));
                if done[at].is_none() {
                    open.push(at);
                }
            }
            if let Some(longest) = open.iter().map(|at| &attempts[*at]).max_by_key(|attempt| attempt.pauses) {
                longest.pause().await;
            }
        }
        let missing = |call: &Call<'_>| Err(unknown_answer(call.operation()));
        done.into_iter().zip(calls).map(|(done, call)| done.unwrap_or_else(|| missing(call))).collect()
    }

    /// Which calls go together: by slot on a cluster, by size otherwise.
    fn groups(&self, calls: &[Call<'_>], open: &[usize], one_by_one: bool) -> Vec<Vec<usize>> {
        const MOST_BYTES: usize = 4 * 1024 * 1024;
        if one_by_one {
            return open.iter().map(|at| vec![*at]).collect();
        }
        let mut groups: Vec<Vec<usize>> = Vec::new();
        if self.link.is_cluster() {
            let mut by_slot: HashMap<Slot, usize> = HashMap::new();
            for at in open {
                let slot = Slot::for_key(layout::name(&self.prefix, calls[*at].key()));
                let group = *by_slot.entry(slot).or_insert_with(|| {
                    groups.push(Vec::new());
                    groups.len() - 1
                });
                groups[group].push(*at);
            }
            return groups;
        }
        let mut bytes = 0;
        for at in open {
            bytes += calls[*at].size();
            match groups.last_mut() {
                Some(group) if bytes <= MOST_BYTES => group.push(*at),
                _ => {
                    groups.push(vec![*at]);
                    bytes = calls[*at].size();
                }
            }
        }
        groups
    }
}

type Sent = JoinSet<(Vec<usize>, Result<Vec<Result<Value, Trouble>>, Trouble>)>;

/// Waits for the pipelines that were sent, and puts their answers in their places.
async fn take_answers(sent: &mut Sent, answers: &mut [Option<Result<Value, Trouble>>]) {
    while let Some(answered) = sent.join_next().await {
        match answered {
            Ok((group, Ok(values))) => group.iter().zip(values).for_each(|(at, value)| answers[*at] = Some(value)),
            Ok((group, Err(trouble))) => group.iter().for_each(|at| answers[*at] = Some(Err(trouble.clone()))),
            // Its runtime goes away: nothing is known of these.
            Err(_) => {}
        }
    }
}

/// The arguments that all calls under a lease begin with.
fn settle(cmd: &mut Cmd, lease: &Lease, duration: Duration) {
    cmd.write_arg(lease.token.as_bytes());
    cmd.write_arg_fmt(layout::micros(duration));
    cmd.write_arg_fmt(layout::kept(duration));
}

/// What is known of a call that is sent until it is answered.
struct Attempt<'a> {
    call: Call<'a>,
    cluster: bool,
    call_timeout: Duration,
    deadline: Instant,
    /// An earlier delivery may have been executed.
    maybe: bool,
    with_text: bool,
    pauses: u32,
    /// What the latest delivery met.
    latest: Option<Trouble>,
}

impl<'a> Attempt<'a> {
    fn new(call: Call<'a>, calls: &Calls, deadline: Instant) -> Self {
        Self {
            call,
            cluster: calls.link.is_cluster(),
            call_timeout: calls.call_timeout,
            deadline,
            maybe: false,
            with_text: false,
            pauses: 0,
            latest: None,
        }
    }

    /// The call's result, or `None` where it is to be sent again.
    fn judge(&mut self, answer: Result<Value, Trouble>) -> Option<Result<Value, StoreError>> {
        let trouble = match answer {
            Ok(Value::ServerError(error)) => Trouble::Server(error),
            Ok(value) if self.maybe && !self.tells(&value) => return Some(Err(self.unknown())),
            Ok(value) => return Some(Ok(value)),
            Err(trouble) => trouble,
        };
        if let Trouble::Server(error) = &trouble
            && error.kind() == Some(ServerErrorKind::NoScript)
            && !self.with_text
        {
            // The server was restarted, failed over, or its scripts were flushed.
            self.with_text = true;
            return None;
        }
        let (_, class) = trouble.classify(self.cluster);
        self.maybe |= class == ErrorClass::Unknown;
        // That the time was over tells less than what it was spent on.
        let trouble = match (self.latest.take(), trouble) {
            (Some(before), Trouble::Timeout { sent: false }) => before,
            (_, trouble) => trouble,
        };
        if trouble.may_pass(self.cluster) && Instant::now() < self.deadline {
            self.pauses += 1;
            self.latest = Some(trouble);
            return None;
        }
        let class = if self.maybe { ErrorClass::Unknown } else { class };
        Some(Err(trouble.into_error(class, self.cluster, self.call.operation())))
    }

    /// Whether an answer tells what became of the call although an earlier delivery of it may have been executed.
    ///
    /// It does where it says that the call has had its effect, now or before, and where it could not be so if it had. Otherwise
    /// the earlier delivery may have done its work and been overtaken: a fail that freed the key, which another attempt holds
    /// by now, is told that the lease is lost. To answer so would deny what has happened. The caller learns that it is
    /// unknown, and gets that same answer when it asks again: then it is the answer to a call that came too late.
    fn tells(&self, value: &Value) -> bool {
        match (self.call, value) {
            (Call::Fetch(_), _) | (_, Value::Int(1 | 8)) => true,
            (Call::Complete(..) | Call::Fail(..), Value::Int(9)) => true,
            // While the record lived that an earlier delivery would have made, nobody else could begin anew, nor with
            // another fingerprint.
            (Call::Reserve(request), Value::Int(6)) => request.retention >= self.call_timeout,
            (Call::Reserve(_), Value::Array(parts)) if parts.first() == Some(&Value::Int(2)) => true,
            (Call::Reserve(request), Value::Array(parts)) => match &parts[..] {
                [_, _, Value::BulkString(record)] => {
                    request.retention >= self.call_timeout && layout::is_first_of_another(record, request.token)
                }
                _ => false,
            },
            _ => false,
        }
    }

    fn unknown(&mut self) -> StoreError {
        let operation = self.call.operation();
        match self.latest.take() {
            Some(trouble) => trouble.into_error(ErrorClass::Unknown, self.cluster, operation),
            None => unknown_answer(operation),
        }
    }

    /// Waits before the next delivery: not at all after the first try that was lost, longer each time.
    async fn pause(&self) {
        if self.pauses > 1 {
            let longest = Duration::from_millis(5) * 2_u32.saturating_pow(self.pauses.min(8));
            let pause = longest.mul_f64(rand::rng().random_range(0.5..1.0));
            sleep(pause.min(self.deadline.saturating_duration_since(Instant::now()))).await;
        }
    }
}

fn unknown_answer(operation: Operation) -> StoreError {
    // It has been answered, so it has happened, whatever it was.
    own_error(RedisStoreError::Answer, operation).with_class(ErrorClass::Unknown)
}

/// The time and the record of an answer.
fn read_record(now: &Value, record: Value, key: &Key, operation: Operation) -> Result<Record, StoreError> {
    let (Value::Int(now), Value::BulkString(bytes)) = (now, record) else { return Err(unknown_answer(operation)) };
    let read_at = layout::time(*now as f64).ok_or_else(|| unknown_answer(operation))?;
    layout::decode(key, Bytes::from(bytes), read_at).map_err(|error| own_error(error.into(), operation))
}

pub(crate) fn read_reservation(answer: Value, request: &Reserve) -> Result<Reservation, StoreError> {
    let operation = Operation::Reserve;
    match answer {
        Value::Int(1) => {
            let retention = Duration::from_micros(layout::micros(request.retention));
            Ok(Reservation::Acquired(Lease::new(request.key.clone(), request.token, 1, Origin::Fresh, retention)))
        }
        Value::Int(6) => Ok(Reservation::Mismatch),
        Value::Int(7) => Err(StoreError::new(ErrorKind::LeaseLost, STORE, operation)),
        Value::Int(8) => Err(own_error(RedisStoreError::NoRecord, operation)),
        Value::Array(parts) => {
            let Ok([Value::Int(verdict), now, record]) = <[Value; 3]>::try_from(parts) else {
                return Err(unknown_answer(operation));
            };
            let record = read_record(&now, record, &request.key, operation)?;
            match verdict {
                2 => Ok(Reservation::Acquired(record.lease())),
                3 => Ok(Reservation::InProgress {
                    attempt: record.attempt,
                    // Never zero: a caller that waits for no time would spin.
                    retry_after: record.lease_remaining().max(Duration::from_micros(1)),
                }),
                4 => Ok(Reservation::Abandoned(record)),
                5 => Ok(Reservation::Completed(record)),
                _ => Err(unknown_answer(operation)),
            }
        }
        _ => Err(unknown_answer(operation)),
    }
}

pub(crate) fn read_settled(answer: &Value, operation: Operation) -> Result<(), StoreError> {
    match answer {
        Value::Int(1) => Ok(()),
        Value::Int(7) => Err(StoreError::refused(Refusal::LeaseLost, STORE, operation)),
        Value::Int(8) => Err(own_error(RedisStoreError::NoRecord, operation)),
        Value::Int(9) => Err(StoreError::refused(Refusal::AlreadyCompleted, STORE, operation)),
        _ => Err(unknown_answer(operation)),
    }
}

pub(crate) fn read_fetched(answer: Value, key: &Key, operation: Operation) -> Result<Option<Record>, StoreError> {
    match answer {
        Value::Nil => Ok(None),
        Value::Array(parts) => {
            let Ok([now, record]) = <[Value; 2]>::try_from(parts) else { return Err(unknown_answer(operation)) };
            let record = read_record(&now, record, key, operation)?;
            Ok((!record.is_expired(record.read_at)).then_some(record))
        }
        _ => Err(unknown_answer(operation)),
    }
}

impl fmt::Debug for Calls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Calls").field("link", &self.link).field("batcher", &self.batcher).finish_non_exhaustive()
    }
}
