//! Random concurrent histories: what clients called, when, and what they were told.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use idem_core::{
    ErrorClass, ErrorKind, Failure, Fingerprint, Key, KeyStore, Lease, OnAbandoned, Origin, Outcome, PurgeBudget,
    Record, Reservation, Reserve, StoreError, Token,
};
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};
use tokio::task::JoinSet;

use crate::checker;
use crate::context::Ctx;
use crate::harness::Time;
use crate::probe::{dropped, show, shown};
use crate::verdict::{Failed, Verdict};

/// A call to the store.
#[derive(Debug, Clone)]
pub(crate) enum Call {
    Reserve(Reserve),
    Complete(Lease, Outcome),
    Fail(Lease, Failure),
    Renew(Lease, Duration),
    Fetch(Key),
}

impl Call {
    pub(crate) fn key(&self) -> &Key {
        match self {
            Self::Reserve(request) => &request.key,
            Self::Complete(lease, _) | Self::Fail(lease, _) | Self::Renew(lease, _) => &lease.key,
            Self::Fetch(key) => key,
        }
    }
}

/// What a client was told.
#[derive(Debug, Clone)]
pub(crate) enum Answer {
    Reserved(Box<Reservation>),
    Done,
    Fetched(Option<Box<Record>>),
    /// An error that the contract has an answer for: the lease is lost, or the record completed otherwise.
    Refused(ErrorKind),
}

/// One call of a history.
#[derive(Debug, Clone)]
pub(crate) struct Event {
    pub(crate) client: usize,
    pub(crate) call: Call,
    /// Its place in the order of all beginnings and ends.
    pub(crate) began: u64,
    /// `None` when it was never answered: it may have happened at any time since it began, or not at all.
    pub(crate) ended: Option<(u64, Answer)>,
    /// The time, by the store's clock up to an offset, between which it happened.
    pub(crate) time: (Duration, Duration),
}

/// The durations of a history. Its jumps of time are well away from the edges of lease and retention.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace {
    pub(crate) lease: Duration,
    pub(crate) retention: Duration,
}

impl Pace {
    fn of(time: Time) -> Self {
        let (lease, retention) = match time {
            Time::Real => (Duration::from_millis(250), Duration::from_millis(900)),
            Time::Shifted | Time::Manual => (Duration::from_secs(30), Duration::from_secs(300)),
        };
        Self { lease, retention }
    }
}

const CLIENTS: usize = 3;
const KEYS: usize = 2;
const REQUESTS: usize = 5;
const CALLS: usize = 3;
const ROUNDS: usize = 4;

/// How a call is treated on its way.
#[derive(Debug, Clone, Copy)]
enum Way {
    Delivered,
    /// The answer is lost.
    Lost,
    /// The call is dropped after so many polls.
    Dropped(u32),
}

/// What a client does next. Everything is drawn before the first call, so that the seed alone decides it.
#[derive(Debug, Clone)]
enum Step {
    Call(Call, Way),
    Purge,
}

struct Plan {
    keys: Vec<Key>,
    /// By round: how much time passes before it, and what each client does in it.
    rounds: Vec<(Duration, Vec<Vec<Step>>)>,
}

impl Plan {
    fn draw(seed: u64, pace: Pace) -> Verdict<Self> {
        let rng = &mut StdRng::seed_from_u64(seed);
        let keys = (0..KEYS)
            .map(|at| Key::new("history", &format!("{seed}-{at}")))
            .collect::<Result<Vec<_>, _>>()
            .map_err(|error| Failed::Broken(error.to_string()))?;
        let requests: Vec<Vec<Reserve>> =
            keys.iter().map(|key| (0..REQUESTS).map(|_| request(rng, key, pace)).collect()).collect();
        let rounds = (0..ROUNDS)
            .map(|round| {
                let pass = match rng.random_range(0..6) {
                    _ if round == 0 => Duration::ZERO,
                    0 | 1 => Duration::ZERO,
                    2 => pace.lease * 2 / 5,
                    3 | 4 => pace.lease * 6 / 5,
                    _ => pace.retention * 6 / 5,
                };
                let clients = (0..CLIENTS).map(|_| (0..CALLS).map(|_| step(rng, &requests, pace)).collect()).collect();
                (pass, clients)
            })
            .collect();
        Ok(Self { keys, rounds })
    }
}

fn request(rng: &mut impl Rng, key: &Key, pace: Pace) -> Reserve {
    let fingerprint = match rng.random_range(0..6) {
        0 => None,
        1 => Some(Fingerprint::of("other")),
        _ => Some(Fingerprint::of("same")),
    };
    let on_abandoned = if rng.random_bool(0.25) { OnAbandoned::Refuse } else { OnAbandoned::TakeOver };
    Reserve::new(key.clone())
        .with_token(Token::from_bytes(rng.random()))
        .with_fingerprint(fingerprint)
        .with_lease(pace.lease)
        .with_retention(pace.retention)
        .with_on_abandoned(on_abandoned)
}

fn step(rng: &mut impl Rng, requests: &[Vec<Reserve>], pace: Pace) -> Step {
    if rng.random_bool(0.04) {
        return Step::Purge;
    }
    let key = rng.random_range(0..requests.len());
    let at = rng.random_range(0..REQUESTS);
    let request = &requests[key][at];
    // Whether it was ever given out or not: stores go by the token.
    let lease = Lease::new(request.key.clone(), request.token, 1, Origin::Fresh, request.retention);
    let variant = u16::from(rng.random_bool(0.15));
    // The code tells the outcomes of a history apart.
    let code = u16::try_from(at).unwrap_or(0) * 2 + variant;
    let call = match rng.random_range(0..20) {
        0..9 => Call::Reserve(request.clone()),
        9..13 => Call::Complete(lease, Outcome::new(code, format!("outcome {code}"))),
        13..16 => Call::Fail(lease, Failure::truncated(if variant == 0 { "note" } else { "another note" })),
        16..18 => Call::Renew(lease, pace.lease),
        _ => Call::Fetch(request.key.clone()),
    };
    let way = match rng.random_range(0..20) {
        0..3 => Way::Lost,
        3..5 => Way::Dropped(rng.random_range(0..4)),
        _ => Way::Delivered,
    };
    Step::Call(call, way)
}

/// Runs the history of that seed on the store, and looks for a legal order of it.
pub(crate) async fn run(ctx: &Ctx, seed: u64) -> Verdict {
    let pace = Pace::of(ctx.time);
    let plan = Plan::draw(seed, pace)?;
    let events = Arc::new(Mutex::new(Vec::new()));
    let order = Arc::new(AtomicU64::new(0));
    for (pass, clients) in plan.rounds {
        if !pass.is_zero() {
            ctx.pass(pass).await?;
        }
        let barrier = Arc::new(tokio::sync::Barrier::new(CLIENTS));
        let mut tasks = JoinSet::new();
        let moved = ctx.now();
        for (client, steps) in clients.into_iter().enumerate() {
            let worker = Worker {
                client,
                store: ctx.fixture.store(),
                events: events.clone(),
                order: order.clone(),
                watch: ctx.watch(),
            };
            let barrier = barrier.clone();
            tasks.spawn(async move {
                barrier.wait().await;
                worker.work(steps).await
            });
        }
        for result in tasks.join_all().await {
            result?;
        }
        debug_assert!(ctx.now() >= moved, "a watch does not run back");
    }
    let events = std::mem::take(&mut *events.lock().unwrap_or_else(PoisonError::into_inner));
    for key in &plan.keys {
        let mut own: Vec<Event> = events.iter().filter(|event| event.call.key() == key).cloned().collect();
        own.sort_by_key(|event| event.began);
        if !checker::legal(&own, pace) {
            let calls = own.iter().map(|event| format!("      {event}\n")).collect::<String>();
            return Err(Failed::Illegal { seed, found: format!("no order of these calls is legal:\n{calls}") });
        }
    }
    Ok(())
}

/// One client of a history.
struct Worker {
    client: usize,
    store: Arc<dyn KeyStore>,
    events: Arc<Mutex<Vec<Event>>>,
    order: Arc<AtomicU64>,
    watch: crate::context::Watch,
}

impl Worker {
    async fn work(&self, steps: Vec<Step>) -> Verdict {
        for step in steps {
            match step {
                Step::Purge => match self.store.purge_expired(PurgeBudget::records(3)).await {
                    Err(error) if error.class() == ErrorClass::Permanent => return Err(error.into()),
                    _ => {}
                },
                Step::Call(call, way) => self.call(call, way).await?,
            }
        }
        Ok(())
    }

    async fn call(&self, call: Call, way: Way) -> Verdict {
        let began = self.order.fetch_add(1, Ordering::SeqCst);
        let earliest = self.watch.now();
        let answer = match way {
            Way::Delivered => Some(send(&*self.store, &call).await),
            Way::Lost => {
                drop(send(&*self.store, &call).await);
                None
            }
            Way::Dropped(polls) => {
                dropped(send(&*self.store, &call), polls).await;
                None
            }
        };
        let latest = self.watch.now();
        let ended = match answer {
            None => None,
            Some(Ok(answer)) => Some(answer),
            Some(Err(error)) => match (error.kind(), error.class()) {
                (kind @ (ErrorKind::LeaseLost | ErrorKind::AlreadyCompleted), _) => Some(Answer::Refused(kind)),
                // Nothing happened: it is no part of the history.
                (_, ErrorClass::Retryable) => return Ok(()),
                (_, ErrorClass::Unknown) => None,
                (_, ErrorClass::Permanent) => return Err(error.into()),
            },
        };
        let ended = ended.map(|answer| (self.order.fetch_add(1, Ordering::SeqCst), answer));
        let latest = if ended.is_some() { latest } else { Duration::MAX };
        let event = Event { client: self.client, call, began, ended, time: (earliest, latest) };
        self.events.lock().unwrap_or_else(PoisonError::into_inner).push(event);
        Ok(())
    }
}

async fn send(store: &dyn KeyStore, call: &Call) -> Result<Answer, StoreError> {
    match call {
        Call::Reserve(request) => store.reserve(request).await.map(|answer| Answer::Reserved(Box::new(answer))),
        Call::Complete(lease, outcome) => store.complete(lease, outcome).await.map(|()| Answer::Done),
        Call::Fail(lease, failure) => store.fail(lease, failure).await.map(|()| Answer::Done),
        Call::Renew(lease, extend_by) => store.renew(lease, *extend_by).await.map(|()| Answer::Done),
        Call::Fetch(key) => store.fetch(key).await.map(|record| Answer::Fetched(record.map(Box::new))),
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (from, to) = self.time;
        write!(f, "{:>3}", self.began)?;
        match &self.ended {
            Some((ended, _)) => write!(f, "-{ended:<3} [{from:?}, {to:?}]")?,
            None => write!(f, "-?   [{from:?}, …]")?,
        }
        write!(f, " client {}: ", self.client)?;
        match &self.call {
            Call::Reserve(request) => f.write_str(&show(request))?,
            Call::Complete(lease, outcome) => write!(f, "complete {} with {}", shown(lease), outcome.code)?,
            Call::Fail(lease, failure) => write!(f, "fail {} ({failure})", shown(lease))?,
            Call::Renew(lease, by) => write!(f, "renew {} by {by:?}", shown(lease))?,
            Call::Fetch(key) => write!(f, "fetch {}/{}", key.scope(), key.id())?,
        }
        match &self.ended {
            Some((_, Answer::Reserved(answer))) => write!(f, " -> {answer:?}"),
            Some((_, Answer::Fetched(record))) => write!(f, " -> {record:?}"),
            Some((_, Answer::Done)) => f.write_str(" -> Ok"),
            Some((_, Answer::Refused(kind))) => write!(f, " -> {kind:?}"),
            None => f.write_str(" -> no answer"),
        }
    }
}
