//! One run at one rate.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use idem_core::{ErrorClass, Failure, KeyStore, OnAbandoned, Reservation, StoreError};
use tokio::runtime::Handle;

use super::effects::{Effects, State};
use super::events::Events;
use super::mix::{Arrival, Kind, Mix, Retries, Source};
use super::preload::request;
use super::report::{Event, Latency, Point, Step};
use crate::{Failed, process};

/// Longer than any run, so that nothing is ever taken over.
pub(crate) const LEASE: Duration = Duration::from_secs(6 * 60 * 60);
/// As long as a Postgres store's default allows.
pub(crate) const RETENTION: Duration = Duration::from_secs(24 * 60 * 60);
/// How long the scheduler sleeps at least: arrivals come that much late at most while it gets its turn.
const SHORTEST_SLEEP: Duration = Duration::from_micros(200);
/// Arrivals that are handed over together.
const HANDOVER: usize = 64;
/// How often a call is repeated that may have had its effect, with the same token.
const DELIVERIES: u32 = 3;
/// How long the last arrivals may take.
const DRAIN: Duration = Duration::from_secs(30);
/// Faults that are shown.
const SHOWN: usize = 10;
/// Completed keys that are looked at once more at the end.
const AUDITED: u64 = 5_000;
/// From this lateness on (p99), the generator has not kept up.
const LATE: Duration = Duration::from_millis(10);

/// What a run is.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Arrivals a second.
    pub rate: f64,
    /// How long they are counted.
    pub time: Duration,
    /// How long they come before they are counted. They are checked all the same.
    pub warm_up: Duration,
    /// Arrivals that may be under way at once; more are refused.
    pub queue: usize,
    /// What they are.
    pub mix: Mix,
    /// Distinguishes the keys of this run from those of others on the same store.
    pub number: u32,
    /// Records that are there before.
    pub preloaded: u64,
}

impl Plan {
    /// The table for its keys.
    #[must_use]
    pub fn effects(&self) -> Effects {
        // Arrivals, and a margin for the second that begins.
        let arrivals = self.rate * (self.time + self.warm_up).as_secs_f64();
        let keys = if self.mix.zipf.is_some() { self.mix.keys } else { arrivals as u64 + 1_000 };
        Effects::new(self.number, self.preloaded, keys, self.mix.body)
    }
}

/// How an arrival was answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    Ran,
    Replayed,
    InFlight,
}

/// Latencies in nanoseconds, by answer.
type Latencies = [Histogram<u32>; 3];

fn latencies() -> Result<Latencies, Failed> {
    let new = || Histogram::new_with_bounds(1, 600_000_000_000, 3);
    Ok([new()?, new()?, new()?])
}

/// Where arrivals note what they have met. Each thread of the runtime uses one of these most of the time.
struct Shard {
    latencies: Latencies,
}

#[derive(Default)]
struct Faults {
    count: u64,
    shown: Vec<String>,
}

/// What all arrivals of a run share.
struct Shared {
    store: Arc<dyn KeyStore>,
    effects: Arc<Effects>,
    retries: Retries,
    /// What failed attempts leave behind.
    failure: Failure,
    shards: Vec<Mutex<Shard>>,
    /// When the first arrival is due.
    begun: Instant,
    warm_up: Duration,
    under_way: AtomicUsize,
    /// When the latest answer came, in nanoseconds since the first arrival was due.
    latest: AtomicU64,
    refused: AtomicU64,
    failed: AtomicU64,
    faults: Mutex<Faults>,
    errors: Mutex<BTreeMap<String, u64>>,
    /// How late arrivals were handed over, and how late they were taken up.
    late: Mutex<Histogram<u32>>,
    scheduled: AtomicBool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

thread_local! {
    static THREAD: usize = {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        NEXT.fetch_add(1, Ordering::Relaxed)
    };
}

impl Shared {
    fn fault(&self, what: String) {
        let mut faults = lock(&self.faults);
        faults.count += 1;
        if faults.shown.len() < SHOWN {
            faults.shown.push(what);
        }
    }

    fn error(&self, error: &StoreError) {
        *lock(&self.errors).entry(format!("{error} ({:?})", error.kind())).or_default() += 1;
    }

    /// One arrival, from its due time on.
    async fn arrive(self: Arc<Self>, arrival: Arrival, due: Duration) {
        match self.perform(&arrival).await {
            Ok(answer) if due >= self.warm_up => {
                let now = self.begun.elapsed();
                let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
                self.latest.fetch_max(nanoseconds(now), Ordering::Relaxed);
                let at = THREAD.with(|thread| *thread) % self.shards.len();
                lock(&self.shards[at]).latencies[answer as usize]
                    .saturating_record(nanoseconds(now.saturating_sub(due)));
            }
            Ok(_) => {}
            Err(Trouble::Store(error)) => self.error(&error),
            Err(Trouble::Fault(what)) => self.fault(what),
        }
        self.under_way.fetch_sub(1, Ordering::SeqCst);
    }

    async fn perform(&self, arrival: &Arrival) -> Result<Answer, Trouble> {
        let Arrival { number, kind, fails, tag } = *arrival;
        let before = self.effects.state(number);
        let request = request(&self.effects, number)
            .map_err(|error| Trouble::Fault(error.to_string()))?
            .with_on_abandoned(OnAbandoned::Refuse);
        let fault = |what: String| Err(Trouble::Fault(format!("{what} ({kind:?})")));
        match deliver(|| self.store.reserve(&request)).await? {
            Reservation::Acquired(lease) => {
                if kind == Kind::Repeat {
                    return fault(format!("key {number} was completed, and is given out again"));
                }
                self.effects.begin(number, tag).map_err(Trouble::Fault)?;
                if fails {
                    self.effects.give_up(number);
                    deliver(|| self.store.fail(&lease, &self.failure)).await?;
                    self.failed.fetch_add(1, Ordering::Relaxed);
                    lock(&self.retries).push((number, kind));
                } else {
                    let outcome = self.effects.outcome(number, tag);
                    deliver(|| self.store.complete(&lease, &outcome)).await?;
                    self.effects.complete(number, tag);
                }
                Ok(Answer::Ran)
            }
            Reservation::Completed(record) => {
                self.effects.check_replay(number, &record).map_err(Trouble::Fault)?;
                Ok(Answer::Replayed)
            }
            Reservation::InProgress { .. } if matches!(before, State::Completed(_)) => {
                fault(format!("key {number} was completed, and is told to be in progress"))
            }
            Reservation::InProgress { .. } if matches!(kind, Kind::New | Kind::Retry) => {
                fault(format!("key {number} has one caller, who is told that it is in progress"))
            }
            Reservation::InProgress { .. } => Ok(Answer::InFlight),
            other => fault(format!("key {number}: a wrong answer: {other:?}")),
        }
    }
}

enum Trouble {
    Store(StoreError),
    Fault(String),
}

impl From<StoreError> for Trouble {
    /// Nobody else holds the key, so a lost lease is the store's fault and no trouble with a server.
    fn from(error: StoreError) -> Self {
        match error.class() {
            ErrorClass::Permanent => Self::Fault(error.to_string()),
            _ => Self::Store(error),
        }
    }
}

/// Sends the same call again where it may have had its effect.
async fn deliver<T, F: Future<Output = Result<T, StoreError>>>(call: impl Fn() -> F) -> Result<T, StoreError> {
    let mut deliveries = 1;
    loop {
        match call().await {
            Err(error) if error.class() == ErrorClass::Unknown && deliveries < DELIVERIES => deliveries += 1,
            result => return result,
        }
    }
}

/// What a run tells while it lasts.
#[derive(Debug, Clone)]
pub struct Progress {
    /// Since the first counted arrival; negative while it warms up.
    pub seconds: f64,
    /// Answered a second, of late.
    pub rate: f64,
    /// Latencies of late.
    pub latency: Latency,
    /// Arrivals under way.
    pub under_way: usize,
    /// Arrivals refused so far, because too many were under way.
    pub refused: u64,
}

/// Runs that plan, and tells each second how it goes. To be called by a thread that is none of the runtime's.
///
/// # Errors
/// When a thread cannot be started. What the store does wrong is in the result.
pub fn run(
    runtime: &Handle,
    store: &Arc<dyn KeyStore>,
    effects: &Arc<Effects>,
    plan: &Plan,
    events: Option<Events>,
    servers: &[u32],
    progress: &mut dyn FnMut(&Progress),
) -> Result<Step, Failed> {
    let retries = Retries::default();
    let source = Source::new(plan.mix, effects.clone(), retries.clone())?;
    let shards = thread::available_parallelism()?.get() + 1;
    let shards: Result<_, Failed> = (0..shards).map(|_| Ok(Mutex::new(Shard { latencies: latencies()? }))).collect();
    let shared = Arc::new(Shared {
        store: store.clone(),
        effects: effects.clone(),
        retries,
        failure: Failure::new("the load generator wants it so")?,
        shards: shards?,
        // So that all is in its place.
        begun: Instant::now() + Duration::from_millis(20),
        warm_up: plan.warm_up,
        under_way: AtomicUsize::new(0),
        latest: AtomicU64::new(0),
        refused: AtomicU64::new(0),
        failed: AtomicU64::new(0),
        faults: Mutex::default(),
        errors: Mutex::default(),
        late: Mutex::new(Histogram::new_with_bounds(1, 600_000_000_000, 3)?),
        scheduled: AtomicBool::new(false),
    });
    let scheduler = {
        let (shared, plan, runtime) = (shared.clone(), *plan, runtime.clone());
        thread::Builder::new().name("scheduler".to_owned()).spawn(move || schedule(&shared, &plan, source, &runtime))?
    };
    let measured_from = shared.begun + plan.warm_up;
    let events = events.map(|events| events.start(runtime, measured_from, plan.time));
    let cpu = || (process::own_cpu(), process::cpu(servers));
    let (mut before, mut warm) = (cpu(), false);

    let window = (plan.time / 120).clamp(Duration::from_millis(100), Duration::from_secs(2));
    let (mut total, mut recent) = (latencies()?, latencies()?);
    let (mut points, mut told) = (Vec::new(), Instant::now());
    loop {
        thread::sleep(window);
        let done = shared.scheduled.load(Ordering::SeqCst) && shared.under_way.load(Ordering::SeqCst) == 0;
        let late_by = shared.begun.elapsed().saturating_sub(plan.warm_up + plan.time);
        let now = Instant::now();
        if !warm && now >= measured_from {
            (warm, before) = (true, cpu());
        }
        let mut here = latencies()?;
        for shard in &shared.shards {
            let mut shard = lock(shard);
            for (sum, part) in here.iter_mut().zip(&mut shard.latencies) {
                if !part.is_empty() {
                    sum.add(&*part)?;
                    part.reset();
                }
            }
        }
        for sums in [&mut total, &mut recent] {
            for (sum, part) in sums.iter_mut().zip(&here) {
                sum.add(part)?;
            }
        }
        let seconds = signed_seconds(measured_from, now);
        let all = Latency::of(&here)?;
        if all.count > 0 {
            let rate = all.count as f64 / window.as_secs_f64();
            points.push(Point { seconds, rate, latency: all });
        }
        let since = told.elapsed();
        if since >= Duration::from_secs(1) || done {
            let latency = Latency::of(&recent)?;
            progress(&Progress {
                seconds,
                rate: latency.count as f64 / since.as_secs_f64(),
                latency,
                under_way: shared.under_way.load(Ordering::SeqCst),
                refused: shared.refused.load(Ordering::SeqCst),
            });
            told = Instant::now();
            recent.iter_mut().for_each(Histogram::reset);
        }
        if done || late_by > DRAIN {
            break;
        }
    }
    let after = cpu();
    let unanswered = shared.under_way.load(Ordering::SeqCst) as u64;
    let ran_out = scheduler.join().map_err(|_| "the scheduler has panicked")?;
    let events: Vec<Event> = match events {
        Some(events) => runtime.block_on(events)??,
        None => Vec::new(),
    };
    if ran_out {
        return Err("the generator has run out of keys: its own mistake".into());
    }
    let audited = runtime.block_on(audit(&shared))?;

    let spent = |before: Option<Duration>, after: Option<Duration>| Some(after?.saturating_sub(before?).as_secs_f64());
    let late = Latency::of_one(&lock(&shared.late));
    let all = Latency::of(&total)?;
    let latest = Duration::from_nanos(shared.latest.load(Ordering::SeqCst)).saturating_sub(plan.warm_up);
    let time = plan.time.max(latest).as_secs_f64();
    let faults = lock(&shared.faults);
    Ok(Step {
        rate: plan.rate,
        seconds: plan.time.as_secs_f64(),
        achieved: all.count as f64 / time,
        kept_up: late.p99 <= LATE.as_secs_f64() * 1e3,
        late,
        answered: all.count,
        ran: Latency::of_one(&total[Answer::Ran as usize]),
        replayed: Latency::of_one(&total[Answer::Replayed as usize]),
        in_flight: Latency::of_one(&total[Answer::InFlight as usize]),
        latency: all,
        refused: shared.refused.load(Ordering::SeqCst),
        unanswered,
        failed_on_purpose: shared.failed.load(Ordering::SeqCst),
        effects: shared.effects.count(),
        audited,
        faults: faults.count,
        shown_faults: faults.shown.clone(),
        errors: lock(&shared.errors).clone(),
        client_cpu_seconds: spent(before.0, after.0),
        server_cpu_seconds: spent(before.1, after.1),
        client_memory_bytes: process::own_memory(),
        events,
        timeline: points,
    })
}

fn signed_seconds(from: Instant, to: Instant) -> f64 {
    if to >= from { (to - from).as_secs_f64() } else { -(from - to).as_secs_f64() }
}

/// How many arrivals are due by then, since the first one is: none before it.
fn due(since: Option<Duration>, rate: f64, total: u64) -> u64 {
    since.map_or(0, |since| (since.as_secs_f64() * rate) as u64 + 1).min(total)
}

/// Hands arrivals over as they come due. Whether there was no key left for one.
fn schedule(shared: &Arc<Shared>, plan: &Plan, mut source: Source, runtime: &Handle) -> bool {
    let total = (plan.rate * (plan.warm_up + plan.time).as_secs_f64()) as u64;
    let due_at = |number: u64| Duration::from_secs_f64(number as f64 / plan.rate);
    let (mut next, mut ran_out) = (0, false);
    while next < total && !ran_out {
        let due = due(Instant::now().checked_duration_since(shared.begun), plan.rate, total);
        while next < due && !ran_out {
            let room = plan.queue.saturating_sub(shared.under_way.load(Ordering::SeqCst));
            let mut batch = Vec::with_capacity(HANDOVER);
            let mut late = lock(&shared.late);
            for _ in 0..HANDOVER.min((due - next) as usize) {
                let due = due_at(next);
                next += 1;
                if due >= plan.warm_up {
                    let by = shared.begun.elapsed().saturating_sub(due);
                    late.saturating_record(u64::try_from(by.as_nanos()).unwrap_or(u64::MAX));
                }
                if batch.len() >= room {
                    // Also in the warm-up: that it does not fill the queue is part of holding the rate.
                    shared.refused.fetch_add(1, Ordering::SeqCst);
                    continue;
                }
                match source.arrival() {
                    Some(arrival) => batch.push((arrival, due)),
                    None => ran_out = true,
                }
            }
            drop(late);
            shared.under_way.fetch_add(batch.len(), Ordering::SeqCst);
            let shared = shared.clone();
            // One task goes to the runtime from outside, and makes the others there.
            runtime.spawn(async move {
                for (arrival, due) in batch {
                    tokio::spawn(shared.clone().arrive(arrival, due));
                }
            });
        }
        let wait = due_at(next).saturating_sub(shared.begun.elapsed());
        thread::sleep(wait.max(SHORTEST_SLEEP));
    }
    shared.scheduled.store(true, Ordering::SeqCst);
    ran_out
}

/// Asks once more for keys that are completed, spread over all: each must be replayed. Tells how many there were.
async fn audit(shared: &Arc<Shared>) -> Result<u64, Failed> {
    let every = (shared.effects.len() / AUDITED).max(1) as usize;
    let completed: Vec<u64> = (0..shared.effects.len())
        .step_by(every)
        .filter(|number| matches!(shared.effects.state(*number), State::Completed(_)))
        .collect();
    for numbers in completed.chunks(500) {
        let requests = numbers.iter().map(|number| request(&shared.effects, *number)).collect::<Result<Vec<_>, _>>()?;
        for (number, answer) in numbers.iter().zip(shared.store.reserve_many(&requests).await) {
            match answer {
                Ok(Reservation::Completed(record)) => {
                    if let Err(what) = shared.effects.check_replay(*number, &record) {
                        shared.fault(what);
                    }
                }
                Ok(other) => shared.fault(format!("key {number} was completed, and afterwards is {other:?}")),
                Err(error) => shared.error(&error),
            }
        }
    }
    Ok(completed.len() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_arrival_is_due_at_its_time_and_not_one_later() {
        let at = |milliseconds| due(Some(Duration::from_millis(milliseconds)), 100.0, 4);
        assert_eq!([due(None, 100.0, 4), at(0), at(9), at(10), at(11), at(1_000)], [0, 1, 1, 2, 2, 4]);
    }
}
