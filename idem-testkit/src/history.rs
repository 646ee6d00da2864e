//! Random concurrent histories: what clients called, when, and what they were told; in peace, and while the store is
//! disturbed.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use idem_core::{
    ErrorClass, ErrorKind, Failure, Fingerprint, Key, KeyStore, Lease, OnAbandoned, Origin, Outcome, PurgeBudget,
    Record, Reservation, Reserve, StoreError, Token,
};
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};
use tokio::task::JoinSet;

use crate::checker::{self, Order};
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
    fn of(time: Time, disturbed: bool) -> Self {
        let (lease, retention) = match time {
            // Calls under disturbance take longer.
            Time::Real if disturbed => (Duration::from_millis(1_200), Duration::from_secs(4)),
            Time::Real => (Duration::from_millis(250), Duration::from_millis(900)),
            Time::Shifted | Time::Manual => (Duration::from_secs(30), Duration::from_secs(300)),
        };
        Self { lease, retention }
    }
}

/// How many do what in a history.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    clients: usize,
    keys: usize,
    /// Calls of a client in a round.
    calls: usize,
    /// Whether the store is disturbed in the middle of rounds.
    disturbed: bool,
}

/// In peace: few clients and keys, quickly done.
pub(crate) const CALM: Shape = Shape { clients: 3, keys: 2, calls: 3, disturbed: false };
/// Under disturbance, which may cost seconds each: so that each meets many calls.
pub(crate) const DISTURBED: Shape = Shape { clients: 12, keys: 8, calls: 4, disturbed: true };

const REQUESTS: usize = 5;
const ROUNDS: usize = 4;
/// The longest that clients and disturber pause before their next step, in milliseconds.
const PAUSE: u64 = 5;
/// A store that has not answered for so long, although nobody disturbs it any more, does not recover.
const RECOVERY: Duration = Duration::from_secs(60);
/// How often a call whose answer is unknown is sent again: each time, one more that may still happen.
const UNKNOWN: u32 = 4;

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
    /// And whether it is sent again until it is answered.
    Call(Call, Way, bool),
    Purge,
    Pause(Duration),
}

struct Round {
    /// How much time passes before it.
    pass: Duration,
    /// What each client does in it.
    clients: Vec<Vec<Step>>,
    /// The pauses before each disturbance of it.
    disturbances: Vec<Duration>,
}

struct Plan {
    keys: Vec<Key>,
    rounds: Vec<Round>,
}

impl Plan {
    fn draw(seed: u64, run: u32, shape: Shape, pace: Pace) -> Verdict<Self> {
        let rng = &mut StdRng::seed_from_u64(seed);
        let keys = (0..shape.keys)
            .map(|at| Key::new("history", &format!("{seed}-{run}-{at}")))
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
                let clients = (0..shape.clients).map(|_| steps(rng, &requests, shape, pace)).collect();
                // The first round is never spared.
                let disturbances = match (shape.disturbed, rng.random_range(0..4)) {
                    (false, _) => 0,
                    (true, 0) if round > 0 => 0,
                    (true, 1) => 2,
                    (true, _) => 1,
                };
                let disturbances = (0..disturbances).map(|_| pause(rng, 2 * PAUSE)).collect();
                Round { pass, clients, disturbances }
            })
            .collect();
        Ok(Self { keys, rounds })
    }
}

fn pause(rng: &mut impl Rng, longest: u64) -> Duration {
    Duration::from_millis(rng.random_range(0..=longest))
}

fn steps(rng: &mut impl Rng, requests: &[Vec<Reserve>], shape: Shape, pace: Pace) -> Vec<Step> {
    let mut steps = Vec::new();
    for _ in 0..shape.calls {
        if shape.disturbed {
            steps.push(Step::Pause(pause(rng, PAUSE)));
        }
        steps.push(match step(rng, requests, pace) {
            Step::Call(call, way, _) if shape.disturbed => Step::Call(call, way, rng.random_bool(0.7)),
            step => step,
        });
    }
    steps
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
    Step::Call(call, way, false)
}

/// Runs the history of that seed on the store, and looks for a legal order of it. The `run` tells repeated runs of one
/// seed on one store apart.
pub(crate) async fn run(ctx: &Ctx, seed: u64, run: u32, shape: Shape) -> Verdict {
    let pace = Pace::of(ctx.time, shape.disturbed);
    let plan = Plan::draw(seed, run, shape, pace)?;
    let events = Arc::new(Mutex::new(Vec::new()));
    let order = Arc::new(AtomicU64::new(0));
    let worker = |client| Worker {
        client,
        store: ctx.fixture.store(),
        events: events.clone(),
        order: order.clone(),
        watch: ctx.watch(),
    };
    for round in plan.rounds {
        if !round.pass.is_zero() {
            ctx.pass(round.pass).await?;
        }
        let barrier = Arc::new(tokio::sync::Barrier::new(shape.clients));
        let mut tasks = JoinSet::new();
        let moved = ctx.now();
        for (client, steps) in round.clients.into_iter().enumerate() {
            let (worker, barrier) = (worker(client), barrier.clone());
            tasks.spawn(async move {
                barrier.wait().await;
                worker.work(steps).await
            });
        }
        let (disturbed, ended) = tokio::join!(disturb(ctx, &round.disturbances), tasks.join_all());
        disturbed?;
        ended.into_iter().collect::<Verdict<Vec<()>>>()?;
        debug_assert!(ctx.now() >= moved, "a watch does not run back");
        if shape.disturbed {
            // What was acknowledged has to be there, and the store well again before its clock is moved.
            let looker = worker(shape.clients);
            for key in &plan.keys {
                looker.call(Call::Fetch(key.clone()), Way::Delivered, true).await?;
            }
        }
    }
    let events = std::mem::take(&mut *events.lock().unwrap_or_else(PoisonError::into_inner));
    for key in &plan.keys {
        let mut own: Vec<Event> = events.iter().filter(|event| event.call.key() == key).cloned().collect();
        own.sort_by_key(|event| event.began);
        match checker::order(&own, pace) {
            Order::Legal => {}
            Order::Illegal => {
                let calls = own.iter().map(|event| format!("      {event}\n")).collect::<String>();
                return Err(Failed::Illegal { seed, found: format!("no order of these calls is legal:\n{calls}") });
            }
            Order::Open => {
                let found = format!("the {} calls to one key of seed {seed} have too many orders", own.len());
                return Err(Failed::Inconclusive(found));
            }
        }
    }
    Ok(())
}

/// Disturbs the store after each of these pauses.
async fn disturb(ctx: &Ctx, pauses: &[Duration]) -> Verdict {
    for pause in pauses {
        tokio::time::sleep(*pause).await;
        ctx.log.add("-- the store is disturbed --");
        ctx.fixture.disturb().await?;
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
                Step::Call(call, way, until_answered) => self.call(call, way, until_answered).await?,
                Step::Pause(pause) => tokio::time::sleep(pause).await,
            }
        }
        Ok(())
    }

    /// Makes a call; on demand again, as the contract tells a caller to, until it is answered.
    async fn call(&self, call: Call, way: Way, until_answered: bool) -> Verdict {
        let begun = Instant::now();
        let (mut unknown, mut pause) = (0, Duration::from_millis(2));
        loop {
            match self.once(&call, way).await? {
                Sent::Answered => return Ok(()),
                // One that changes nothing may be asked for as often as it takes.
                Sent::Unanswered if !matches!(call, Call::Fetch(_)) => {
                    unknown += 1;
                    if unknown > UNKNOWN {
                        return Ok(());
                    }
                }
                Sent::Unanswered | Sent::Refused => {}
            }
            // The answer of a call that was lost or dropped on purpose is not asked for.
            if !until_answered || !matches!(way, Way::Delivered) {
                return Ok(());
            }
            if begun.elapsed() > RECOVERY {
                return Err(Failed::Broken(format!("the store has not recovered in {RECOVERY:?}")));
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_millis(500));
        }
    }

    /// Sends a call once, and notes what came of it.
    async fn once(&self, call: &Call, way: Way) -> Verdict<Sent> {
        let began = self.order.fetch_add(1, Ordering::SeqCst);
        let earliest = self.watch.now();
        let answer = match way {
            Way::Delivered => Some(send(&*self.store, call).await),
            Way::Lost => {
                drop(send(&*self.store, call).await);
                None
            }
            Way::Dropped(polls) => {
                dropped(send(&*self.store, call), polls).await;
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
                (_, ErrorClass::Retryable) => return Ok(Sent::Refused),
                (_, ErrorClass::Unknown) => None,
                (_, ErrorClass::Permanent) => return Err(error.into()),
            },
        };
        let ended = ended.map(|answer| (self.order.fetch_add(1, Ordering::SeqCst), answer));
        let (sent, latest) = match ended {
            Some(_) => (Sent::Answered, latest),
            None => (Sent::Unanswered, Duration::MAX),
        };
        let event = Event { client: self.client, call: call.clone(), began, ended, time: (earliest, latest) };
        self.events.lock().unwrap_or_else(PoisonError::into_inner).push(event);
        Ok(sent)
    }
}

/// What came of sending a call.
enum Sent {
    Answered,
    /// It may have happened, or may still.
    Unanswered,
    /// It has not happened.
    Refused,
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
