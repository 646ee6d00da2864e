//! Looks for an order of a key's history that the contract allows.
//!
//! A call takes effect at one moment between its beginning and its end; one that was not answered, at any moment since
//! it began or never. So the search tries the calls in every order that fits, applies each to a model by the functions
//! of [`idem_core::decision`], and goes on where the answer is the one that was given (Wing and Gong's algorithm, with
//! Lowe's memory of configurations that were tried).
//!
//! The moment is known only to lie within an interval, so whether a lease was over may be open: then both are tried.
//!
//! A call that was not answered and would change nothing has as well not happened; so it is tried only where it changes
//! something, which keeps the number of orders small although many calls have no answer.

use std::collections::HashSet;
use std::time::{Duration, SystemTime};

use idem_core::decision::{self, Change, Decision, Refusal};
use idem_core::{ErrorKind, Lease, Origin, Record, Reservation, State, Token, codec};

use crate::history::{Answer, Call, Event, Pace};

/// Earliest and latest.
type Interval = (Duration, Duration);

/// What the store may hold for the key.
#[derive(Debug, Clone)]
struct Model {
    /// All but its times, which are those of [`pin`].
    record: Record,
    lease_until: Interval,
    expires_at: Interval,
}

/// The moment at which the model's records are decided on.
fn moment() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000)
}

fn plus(interval: Interval, by: Duration) -> Interval {
    (interval.0.saturating_add(by), interval.1.saturating_add(by))
}

/// What was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    Legal,
    Illegal,
    /// There are too many orders to try them all.
    Open,
}

/// The most calls of a history: they are counted in a word.
const CALLS: usize = 64;
/// The most configurations that are tried: some hundred megabytes, some seconds.
const CONFIGURATIONS: usize = 500_000;

/// Whether there is a legal order. The events are those of one key, by their beginning.
pub(crate) fn order(events: &[Event], pace: Pace) -> Order {
    // A fetch that was not answered tells nothing, and has changed nothing.
    let events: Vec<&Event> =
        events.iter().filter(|event| event.ended.is_some() || !matches!(event.call, Call::Fetch(_))).collect();
    if events.len() > CALLS {
        return Order::Open;
    }
    let mut search = Search { events: &events, pace, tried: HashSet::new(), open: false };
    match search.from(0, None) {
        true => Order::Legal,
        false if search.open => Order::Open,
        false => Order::Illegal,
    }
}

struct Search<'a> {
    events: &'a [&'a Event],
    pace: Pace,
    tried: HashSet<(u64, Vec<u8>)>,
    /// Whether it was given up.
    open: bool,
}

impl Search<'_> {
    /// Whether the events that are not `done` can follow on that state.
    fn from(&mut self, done: u64, state: Option<&Model>) -> bool {
        let open = |at: usize| done & (1 << at) == 0;
        let answered = self.events.iter().enumerate().filter(|(at, event)| open(*at) && event.ended.is_some());
        let Some(first_end) = answered.filter_map(|(_, event)| event.ended.as_ref().map(|(end, _)| *end)).min() else {
            return true;
        };
        self.open |= self.tried.len() >= CONFIGURATIONS;
        if self.open || !self.tried.insert((done, memory(state))) {
            return false;
        }
        for (at, event) in self.events.iter().enumerate() {
            if !open(at) || event.began > first_end {
                continue;
            }
            for next in steps(state, event, self.pace) {
                if self.from(done | 1 << at, next.as_ref()) {
                    return true;
                }
            }
        }
        false
    }
}

/// The state, as bytes to compare.
fn memory(state: Option<&Model>) -> Vec<u8> {
    let Some(model) = state else { return Vec::new() };
    let mut bytes = codec::encode(&model.record);
    for time in [model.lease_until.0, model.lease_until.1, model.expires_at.0, model.expires_at.1] {
        bytes.extend(time.as_nanos().to_le_bytes());
    }
    bytes
}

/// What may be the case when the event takes effect: the record with its times pinned around [`moment`].
fn cases(state: Option<&Model>, time: Interval) -> Vec<Option<Model>> {
    let Some(model) = state else { return vec![None] };
    let mut cases = Vec::new();
    if time.1 >= model.expires_at.0 {
        cases.push(None);
    }
    if time.0 < model.expires_at.1 {
        if time.0 < model.lease_until.1 {
            cases.push(Some(pin(model, Duration::from_secs(1))));
        }
        if time.1 >= model.lease_until.0 {
            cases.push(Some(pin(model, Duration::ZERO)));
        }
    }
    cases
}

fn pin(model: &Model, lease_left: Duration) -> Model {
    let mut model = model.clone();
    model.record.lease_until = moment() + lease_left;
    model.record.expires_at = moment() + Duration::from_secs(3_600);
    model
}

/// The states that the event may lead to, given what it was answered.
fn steps(state: Option<&Model>, event: &Event, pace: Pace) -> Vec<Option<Model>> {
    let answer = event.ended.as_ref().map(|(_, answer)| answer);
    cases(state, event.time).into_iter().filter_map(|case| step(case, event, answer, pace).ok()).collect()
}

/// The call was answered otherwise than by the contract.
struct Illegal;

fn step(case: Option<Model>, event: &Event, answer: Option<&Answer>, pace: Pace) -> Result<Option<Model>, Illegal> {
    let now = moment();
    match &event.call {
        Call::Reserve(request) => match decision::decide(case.as_ref().map(|model| &model.record), request, now) {
            Decision::Acquire(record) => {
                fits(
                    answer,
                    |answer| matches!(answer, Answer::Reserved(found) if same_answer(found, &Reservation::Acquired(record.lease()), pace)),
                )?;
                let lease_until = plus(event.time, request.lease);
                Ok(Some(Model { record, lease_until, expires_at: plus(event.time, request.retention) }))
            }
            Decision::Answer(expected) => {
                changes_nothing(answer)?;
                fits(
                    answer,
                    |answer| matches!(answer, Answer::Reserved(found) if same_answer(found, &expected, pace)),
                )?;
                Ok(case)
            }
            Decision::LeaseLost => {
                changes_nothing(answer)?;
                fits(answer, |answer| matches!(answer, Answer::Refused(ErrorKind::LeaseLost)))?;
                Ok(case)
            }
        },
        Call::Complete(lease, outcome) => {
            settle(case, event, answer, lease, |record| decision::complete(record, lease, outcome, now))
        }
        Call::Fail(lease, failure) => {
            settle(case, event, answer, lease, |record| decision::fail(record, lease, failure, now))
        }
        Call::Renew(lease, extend_by) => {
            let mut case = case;
            let change = decision::renew(case.as_mut().map(|model| &mut model.record), lease, *extend_by, now);
            if change.is_err() {
                changes_nothing(answer)?;
            }
            fits(answer, |answer| accepted(answer, change))?;
            if let (Ok(_), Some(model)) = (change, &mut case) {
                let until = plus(event.time, *extend_by);
                model.lease_until = (model.lease_until.0.max(until.0), model.lease_until.1.max(until.1));
                model.expires_at =
                    (model.expires_at.0.max(model.lease_until.0), model.expires_at.1.max(model.lease_until.1));
            }
            Ok(case)
        }
        Call::Fetch(_) => {
            fits(answer, |answer| match (answer, &case) {
                (Answer::Fetched(None), None) => true,
                (Answer::Fetched(Some(found)), Some(model)) => same_record(found, &model.record),
                _ => false,
            })?;
            Ok(case)
        }
    }
}

fn fits(answer: Option<&Answer>, legal: impl FnOnce(&Answer) -> bool) -> Result<(), Illegal> {
    if answer.is_none_or(legal) { Ok(()) } else { Err(Illegal) }
}

/// Leaves out a call without an answer, where it changes nothing.
fn changes_nothing(answer: Option<&Answer>) -> Result<(), Illegal> {
    if answer.is_some() { Ok(()) } else { Err(Illegal) }
}

fn accepted(answer: &Answer, change: Result<Change, Refusal>) -> bool {
    match change {
        Ok(_) => matches!(answer, Answer::Done),
        Err(Refusal::LeaseLost) => matches!(answer, Answer::Refused(ErrorKind::LeaseLost)),
        Err(Refusal::AlreadyCompleted) => matches!(answer, Answer::Refused(ErrorKind::AlreadyCompleted)),
    }
}

fn settle(
    mut case: Option<Model>,
    event: &Event,
    answer: Option<&Answer>,
    lease: &Lease,
    call: impl FnOnce(Option<&mut Record>) -> Result<Change, Refusal>,
) -> Result<Option<Model>, Illegal> {
    let change = call(case.as_mut().map(|model| &mut model.record));
    if !matches!(change, Ok(Change::Write)) {
        changes_nothing(answer)?;
    }
    fits(answer, |answer| accepted(answer, change))?;
    if let (Ok(Change::Write), Some(model)) = (change, &mut case) {
        model.expires_at = plus(event.time, lease.retention);
    }
    Ok(case)
}

/// An origin without its time.
fn origin(origin: Origin) -> (u8, Option<(Token, u32)>) {
    match origin {
        Origin::Fresh => (0, None),
        Origin::Retry => (1, None),
        Origin::Takeover(previous) => (2, Some((previous.token, previous.attempt))),
    }
}

fn same_lease(found: &Lease, expected: &Lease) -> bool {
    (&found.key, found.token, found.attempt, origin(found.origin), found.retention)
        == (&expected.key, expected.token, expected.attempt, origin(expected.origin), expected.retention)
}

fn same_record(found: &Record, expected: &Record) -> bool {
    let same_state = match (&found.state, &expected.state) {
        (State::InProgress, State::InProgress) => true,
        (State::Failed(found), State::Failed(expected)) => found == expected,
        (State::Completed(found), State::Completed(expected)) => found == expected,
        _ => false,
    };
    same_state && found.fingerprint == expected.fingerprint && same_lease(&found.lease(), &expected.lease())
}

fn same_answer(found: &Reservation, expected: &Reservation, pace: Pace) -> bool {
    match (found, expected) {
        (Reservation::Acquired(found), Reservation::Acquired(expected)) => same_lease(found, expected),
        (Reservation::InProgress { attempt, retry_after }, Reservation::InProgress { attempt: expected, .. }) => {
            attempt == expected && !retry_after.is_zero() && *retry_after <= pace.lease
        }
        (Reservation::Completed(found), Reservation::Completed(expected))
        | (Reservation::Abandoned(found), Reservation::Abandoned(expected)) => same_record(found, expected),
        (Reservation::Mismatch, Reservation::Mismatch) => true,
        _ => false,
    }
}
