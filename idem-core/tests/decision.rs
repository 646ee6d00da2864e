//! The contract's table, case by case, against expectations written down here and not computed by the code under test;
//! and what must hold along any sequence of calls on one key.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::time::{Duration, SystemTime};

use idem_core::decision::{self, Change, Decision, Refusal, decide};
use idem_core::{
    Failure, Fingerprint, Key, Lease, OnAbandoned, Origin, Outcome, PreviousAttempt, Record, Reservation, Reserve,
    State, Token, Withheld,
};

const NS: Duration = Duration::from_nanos(1);
const SECOND: Duration = Duration::from_secs(1);

/// When the record under test was created; its latest attempt started 100 s later.
const CREATED: SystemTime = SystemTime::UNIX_EPOCH;
const LEASE: Duration = Duration::from_secs(30);
const RETENTION: Duration = Duration::from_secs(3600);
/// What the requests under test ask for: other durations than the record's, so that a mix-up shows.
const NEW_LEASE: Duration = Duration::from_secs(7);
const NEW_RETENTION: Duration = Duration::from_secs(77);

const MINE: Token = Token::from_bytes([1; 16]);
const OTHER: Token = Token::from_bytes([2; 16]);
const BEFORE: Token = Token::from_bytes([3; 16]);

fn started() -> SystemTime {
    CREATED + 100 * SECOND
}

fn updated() -> SystemTime {
    started() + SECOND
}

fn lease_end() -> SystemTime {
    updated() + LEASE
}

fn expiry() -> SystemTime {
    updated() + RETENTION
}

fn key() -> Key {
    Key::new("tenant-7", "order-42").unwrap()
}

fn print(number: u8) -> Fingerprint {
    Fingerprint::from_bytes([number; 32])
}

fn states() -> [State; 4] {
    [
        State::InProgress,
        State::Failed(Failure::new("no route").unwrap()),
        State::Completed(Outcome::new(201, "charged").with_header("etag", "1")),
        State::Completed(Outcome::withheld(200, Withheld::Secret)),
    ]
}

fn origins() -> [Origin; 3] {
    [Origin::Fresh, Origin::Retry, Origin::Takeover(PreviousAttempt { token: BEFORE, attempt: 4, started_at: CREATED })]
}

fn record(state: State, fingerprint: Option<Fingerprint>, origin: Origin, attempt: u32) -> Record {
    Record {
        key: key(),
        state,
        fingerprint,
        attempt,
        token: MINE,
        origin,
        retention: RETENTION,
        created_at: CREATED,
        started_at: started(),
        updated_at: updated(),
        lease_until: lease_end(),
        expires_at: expiry(),
        read_at: updated(),
    }
}

fn request(token: Token, fingerprint: Option<Fingerprint>, on_abandoned: OnAbandoned) -> Reserve {
    Reserve::new(key())
        .with_token(token)
        .with_fingerprint(fingerprint)
        .with_lease(NEW_LEASE)
        .with_retention(NEW_RETENTION)
        .with_on_abandoned(on_abandoned)
}

/// Moments of the store's clock, and what each means to a record.
fn moments() -> [(SystemTime, Moment); 9] {
    use Moment::{Expired, LeaseOver, LeaseRuns};
    [
        // The clock has jumped back to before the record was written.
        (CREATED - SECOND, LeaseRuns),
        (updated(), LeaseRuns),
        (lease_end() - NS, LeaseRuns),
        (lease_end(), LeaseOver),
        (lease_end() + NS, LeaseOver),
        (expiry() - NS, LeaseOver),
        (expiry(), Expired),
        (expiry() + NS, Expired),
        (expiry() + 1_000 * RETENTION, Expired),
    ]
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Moment {
    LeaseRuns,
    LeaseOver,
    Expired,
}

/// What a row of the table says.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Expected {
    Fresh,
    Mismatch,
    SameAttempt,
    Wait,
    Takeover,
    Abandoned,
    LeaseLost,
    Retry,
    Replay,
}

/// The table: state, moment, do the fingerprints clash, is the token the record's, policy; `*` is any.
const TABLE: &[(&str, &str, &str, &str, &str, Expected)] = &[
    ("absent", "*", "*", "*", "*", Expected::Fresh),
    ("in progress", "expired", "*", "*", "*", Expected::Fresh),
    ("failed", "expired", "*", "*", "*", Expected::Fresh),
    ("completed", "expired", "*", "*", "*", Expected::Fresh),
    ("in progress", "lease runs", "clash", "*", "*", Expected::Mismatch),
    ("in progress", "lease over", "clash", "*", "*", Expected::Mismatch),
    ("failed", "lease runs", "clash", "*", "*", Expected::Mismatch),
    ("failed", "lease over", "clash", "*", "*", Expected::Mismatch),
    ("completed", "lease runs", "clash", "*", "*", Expected::Mismatch),
    ("completed", "lease over", "clash", "*", "*", Expected::Mismatch),
    ("in progress", "lease runs", "agree", "mine", "*", Expected::SameAttempt),
    ("in progress", "lease over", "agree", "mine", "*", Expected::SameAttempt),
    ("in progress", "lease runs", "agree", "other", "*", Expected::Wait),
    ("in progress", "lease over", "agree", "other", "take over", Expected::Takeover),
    ("in progress", "lease over", "agree", "other", "refuse", Expected::Abandoned),
    ("failed", "lease runs", "agree", "mine", "*", Expected::LeaseLost),
    ("failed", "lease over", "agree", "mine", "*", Expected::LeaseLost),
    ("failed", "lease runs", "agree", "other", "*", Expected::Retry),
    ("failed", "lease over", "agree", "other", "*", Expected::Retry),
    ("completed", "lease runs", "agree", "*", "*", Expected::Replay),
    ("completed", "lease over", "agree", "*", "*", Expected::Replay),
];

/// The one row for such a request.
fn look_up(state: Option<&State>, moment: Moment, request: &Reserve, stored: Option<Fingerprint>) -> Expected {
    let state = match state {
        None => "absent",
        Some(State::InProgress) => "in progress",
        Some(State::Failed(_)) => "failed",
        Some(State::Completed(_)) => "completed",
    };
    let moment = match moment {
        Moment::LeaseRuns => "lease runs",
        Moment::LeaseOver => "lease over",
        Moment::Expired => "expired",
    };
    let prints = match (stored, request.fingerprint) {
        (Some(stored), Some(given)) if stored.as_bytes() != given.as_bytes() => "clash",
        _ => "agree",
    };
    let token = if request.token == MINE { "mine" } else { "other" };
    let policy = match request.on_abandoned {
        OnAbandoned::TakeOver => "take over",
        OnAbandoned::Refuse => "refuse",
    };
    let fits = |cell: &str, value: &str| cell == "*" || cell == value;
    let mut rows = TABLE.iter().filter(|row| {
        fits(row.0, state) && fits(row.1, moment) && fits(row.2, prints) && fits(row.3, token) && fits(row.4, policy)
    });
    let row = rows.next().unwrap_or_else(|| panic!("no row for {state}, {moment}, {prints}, {token}, {policy}"));
    assert!(rows.next().is_none(), "two rows for {state}, {moment}, {prints}, {token}, {policy}");
    row.5
}

/// Compares every field of the answer, and of the record to be written.
fn check(expected: Expected, decision: &Decision, found: Option<&Record>, request: &Reserve, now: SystemTime) {
    let written = |attempt, origin, fingerprint, created_at| {
        Decision::Acquire(Record {
            key: key(),
            state: State::InProgress,
            fingerprint,
            attempt,
            token: request.token,
            origin,
            retention: NEW_RETENTION,
            created_at,
            started_at: now,
            updated_at: now,
            lease_until: now + NEW_LEASE,
            expires_at: now + NEW_RETENTION,
            read_at: now,
        })
    };
    let found = || found.unwrap().clone();
    let want = match expected {
        // Nothing of an expired record survives: not its attempt, not its fingerprint, not its creation time.
        Expected::Fresh => written(1, Origin::Fresh, request.fingerprint, now),
        Expected::Takeover => {
            let found = found();
            let previous = PreviousAttempt { token: MINE, attempt: found.attempt, started_at: started() };
            let attempt = if found.attempt == u32::MAX { u32::MAX } else { found.attempt + 1 };
            written(attempt, Origin::Takeover(previous), found.fingerprint, CREATED)
        }
        Expected::Retry => {
            let found = found();
            let attempt = if found.attempt == u32::MAX { u32::MAX } else { found.attempt + 1 };
            written(attempt, Origin::Retry, found.fingerprint, CREATED)
        }
        Expected::SameAttempt => {
            let found = found();
            let lease = Lease::new(key(), MINE, found.attempt, found.origin, RETENTION);
            Decision::Answer(Reservation::Acquired(lease))
        }
        Expected::Wait => {
            // The rest of the lease by this clock, never more than was granted.
            let retry_after = lease_end().duration_since(now).unwrap().min(LEASE);
            Decision::Answer(Reservation::InProgress { attempt: found().attempt, retry_after })
        }
        Expected::Mismatch => Decision::Answer(Reservation::Mismatch),
        Expected::Abandoned => Decision::Answer(Reservation::Abandoned(Record { read_at: now, ..found() })),
        Expected::Replay => Decision::Answer(Reservation::Completed(Record { read_at: now, ..found() })),
        Expected::LeaseLost => Decision::LeaseLost,
    };
    assert_eq!(decision, &want, "{expected:?} at {now:?}");
}

#[test]
fn reserve_follows_the_table() {
    let mut seen = Vec::new();
    let mut cases = 0;
    for fingerprint in [None, Some(print(1)), Some(print(2))] {
        for token in [MINE, OTHER] {
            for policy in [OnAbandoned::TakeOver, OnAbandoned::Refuse] {
                let request = request(token, fingerprint, policy);
                for (now, moment) in moments() {
                    let expected = look_up(None, moment, &request, None);
                    check(expected, &decide(None, &request, now), None, &request, now);
                    for stored in [None, Some(print(1))] {
                        for state in states() {
                            for origin in origins() {
                                for attempt in [1, 7, u32::MAX] {
                                    let record = record(state.clone(), stored, origin, attempt);
                                    let expected = look_up(Some(&state), moment, &request, stored);
                                    let decision = decide(Some(&record), &request, now);
                                    check(expected, &decision, Some(&record), &request, now);
                                    seen.push(expected);
                                    cases += 1;
                                }
                            }
                        }
                    }
                }
            }
        }
    }
    assert_eq!(cases, 3 * 2 * 2 * 9 * 2 * 4 * 3 * 3);
    for row in TABLE {
        assert!(seen.contains(&row.5), "never met: {:?}", row.5);
    }
}

/// A record lives at least as long as its lease, also when asked for less (stores refuse that before they decide).
#[test]
fn a_record_never_expires_while_its_lease_runs() {
    let now = updated();
    let short = request(MINE, None, OnAbandoned::TakeOver).with_retention(SECOND);
    let Decision::Acquire(record) = decide(None, &short, now) else { panic!() };
    assert_eq!((record.lease_until, record.expires_at), (now + NEW_LEASE, now + NEW_LEASE));

    let mut record = record;
    let lease = record.lease();
    assert_eq!(decision::renew(Some(&mut record), &lease, RETENTION, now), Ok(Change::Write));
    assert_eq!((record.lease_until, record.expires_at), (now + RETENTION, now + RETENTION));
}

/// Times at the end of what can be expressed neither panic nor wrap round into the past.
#[test]
fn a_clock_at_the_end_of_time_does_not_panic() {
    let mut end = CREATED;
    for shift in (0..63).rev() {
        end = end.checked_add(Duration::from_secs(1 << shift)).unwrap_or(end);
    }
    let ask = request(MINE, None, OnAbandoned::TakeOver);
    let Decision::Acquire(record) = decide(None, &ask, end) else { panic!() };
    assert!(record.lease_until >= end && record.expires_at >= end);
}

fn lease_of(token: Token) -> Lease {
    // What counts is the token; the retention is the call's own.
    Lease::new(key(), token, 1, Origin::Fresh, NEW_RETENTION)
}

/// The calls under a lease: what the record is, whose token, whether the content is what is stored already.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Content {
    Stored,
    Different,
}

type Called = Result<Change, Refusal>;

const LOST: Called = Err(Refusal::LeaseLost);
const FINAL: Called = Err(Refusal::AlreadyCompleted);
const WRITE: Called = Ok(Change::Write);
const SAME: Called = Ok(Change::Nothing);

/// Rows: state, content; then what complete, fail and renew answer to the holder's token. To another token, and on a
/// record that is absent or expired, all of them answer that the lease is lost.
const UNDER_LEASE: &[(&str, Content, Called, Called, Called)] = &[
    ("in progress", Content::Stored, WRITE, WRITE, WRITE),
    ("in progress", Content::Different, WRITE, WRITE, WRITE),
    ("failed", Content::Stored, LOST, SAME, LOST),
    ("failed", Content::Different, LOST, LOST, LOST),
    ("completed", Content::Stored, SAME, FINAL, FINAL),
    ("completed", Content::Different, FINAL, FINAL, FINAL),
];

#[test]
fn calls_under_a_lease_follow_the_table() {
    let mut cases = 0;
    for state in states() {
        let name = match &state {
            State::InProgress => "in progress",
            State::Failed(_) => "failed",
            State::Completed(_) => "completed",
        };
        for (now, moment) in moments() {
            for token in [MINE, OTHER] {
                for &(_, content, complete, fail, renew) in UNDER_LEASE.iter().filter(|row| row.0 == name) {
                    for stored in [None, Some(print(1))] {
                        for origin in origins() {
                            let before = record(state.clone(), stored, origin, 7);
                            let refused = token == OTHER || moment == Moment::Expired;
                            let expect = |answer| if refused { LOST } else { answer };
                            let outcome = match (&state, content) {
                                (State::Completed(outcome), Content::Stored) => outcome.clone(),
                                _ => Outcome::new(500, "another"),
                            };
                            let failure = match (&state, content) {
                                (State::Failed(failure), Content::Stored) => failure.clone(),
                                _ => Failure::new("another").unwrap(),
                            };
                            let lease = lease_of(token);
                            let settled = |state| Record {
                                state,
                                retention: NEW_RETENTION,
                                updated_at: now,
                                expires_at: now + NEW_RETENTION,
                                ..before.clone()
                            };

                            let mut after = before.clone();
                            let answer = decision::complete(Some(&mut after), &lease, &outcome, now);
                            assert_eq!(answer, expect(complete), "complete: {name} {content:?} {moment:?}");
                            let written = settled(State::Completed(outcome));
                            assert_eq!(after, if answer == WRITE { written } else { before.clone() });

                            let mut after = before.clone();
                            let answer = decision::fail(Some(&mut after), &lease, &failure, now);
                            assert_eq!(answer, expect(fail), "fail: {name} {content:?} {moment:?}");
                            let written = settled(State::Failed(failure));
                            assert_eq!(after, if answer == WRITE { written } else { before.clone() });

                            // Far enough that the lease grows at each of these moments, and the expiry with it at some.
                            let extend = Duration::from_secs(3000);
                            let mut after = before.clone();
                            let answer = decision::renew(Some(&mut after), &lease, extend, now);
                            assert_eq!(answer, expect(renew), "renew: {name} {content:?} {moment:?}");
                            let written = Record {
                                lease_until: now + extend,
                                updated_at: now,
                                expires_at: expiry().max(now + extend),
                                ..before.clone()
                            };
                            assert_eq!(after, if answer == WRITE { written } else { before.clone() });
                            cases += 1;
                        }
                    }
                }
            }
        }
    }
    assert_eq!(cases, 4 * 9 * 2 * 2 * 2 * 3);
}

#[test]
fn calls_on_an_absent_record_have_lost_the_lease() {
    let (lease, now) = (lease_of(MINE), updated());
    assert_eq!(decision::complete(None, &lease, &Outcome::new(200, ""), now), LOST);
    assert_eq!(decision::fail(None, &lease, &Failure::default(), now), LOST);
    assert_eq!(decision::renew(None, &lease, SECOND, now), LOST);
}

#[test]
fn a_renewal_never_shortens_a_lease() {
    for (extend, lease_until, change) in
        [(LEASE - NS, lease_end(), SAME), (LEASE, lease_end(), SAME), (LEASE + NS, lease_end() + NS, WRITE)]
    {
        let mut after = record(State::InProgress, None, Origin::Fresh, 1);
        assert_eq!(decision::renew(Some(&mut after), &lease_of(MINE), extend, updated()), change);
        assert_eq!(after.lease_until, lease_until);
    }
}

mod properties {
    use super::*;
    use proptest::prelude::*;

    /// One call or event; numbers pick a token, a fingerprint, an outcome or a note.
    #[derive(Debug, Clone)]
    enum Step {
        Reserve { token: u8, print: u8, lease: u64, retention: u64, refuse: bool },
        Complete { token: u8, outcome: u8, retention: u64 },
        Fail { token: u8, note: u8, retention: u64 },
        Renew { token: u8, extend: u64 },
        Advance(u64),
        JumpBack(u64),
    }

    fn step(jumps: bool) -> impl Strategy<Value = Step> {
        // Times in seconds, few and small, so that ends are met exactly.
        let reserve =
            (0u8..3, 0u8..3, 1u64..8, 0u64..12, any::<bool>()).prop_map(|(token, print, lease, more, refuse)| {
                Step::Reserve { token, print, lease, retention: lease + more, refuse }
            });
        let complete = (0u8..3, 0u8..2, 1u64..12).prop_map(|(token, outcome, retention)| Step::Complete {
            token,
            outcome,
            retention,
        });
        let fail =
            (0u8..3, 0u8..2, 1u64..12).prop_map(|(token, note, retention)| Step::Fail { token, note, retention });
        let renew = (0u8..3, 1u64..8).prop_map(|(token, extend)| Step::Renew { token, extend });
        prop_oneof![
            8 => reserve,
            2 => complete,
            2 => fail,
            3 => renew,
            5 => (0u64..6).prop_map(Step::Advance),
            u32::from(jumps) => (1u64..20).prop_map(Step::JumpBack),
        ]
    }

    fn token(number: u8) -> Token {
        Token::from_bytes([number; 16])
    }

    #[derive(Debug, PartialEq)]
    enum Answer {
        Reserved(Box<Reservation>),
        Lost,
        Called(Result<(), Refusal>),
    }

    /// A store of one record.
    #[derive(Debug, Clone)]
    struct Cell {
        record: Option<Record>,
        now: SystemTime,
    }

    impl Cell {
        fn live(&self) -> Option<&Record> {
            self.record.as_ref().filter(|record| self.now < record.expires_at)
        }

        fn call(&mut self, step: &Step) -> Option<Answer> {
            let lease =
                |number, retention| Lease::new(key(), token(number), 1, Origin::Fresh, Duration::from_secs(retention));
            let (record, now) = (self.record.as_mut(), self.now);
            match *step {
                Step::Reserve { token: number, print: of, lease, retention, refuse } => {
                    let request = Reserve::new(key())
                        .with_token(token(number))
                        .with_fingerprint((of > 0).then(|| print(of)))
                        .with_lease(Duration::from_secs(lease))
                        .with_retention(Duration::from_secs(retention))
                        .with_on_abandoned(if refuse { OnAbandoned::Refuse } else { OnAbandoned::TakeOver });
                    Some(match decide(self.record.as_ref(), &request, now) {
                        Decision::Acquire(record) => {
                            let lease = record.lease();
                            self.record = Some(record);
                            Answer::Reserved(Box::new(Reservation::Acquired(lease)))
                        }
                        Decision::Answer(answer) => Answer::Reserved(Box::new(answer)),
                        Decision::LeaseLost => Answer::Lost,
                    })
                }
                Step::Complete { token, outcome, retention } => {
                    let outcome = Outcome::new(outcome.into(), "result");
                    let change = decision::complete(record, &lease(token, retention), &outcome, now);
                    Some(Answer::Called(change.map(|_| ())))
                }
                Step::Fail { token, note, retention } => {
                    let failure = Failure::new(note.to_string()).unwrap();
                    let change = decision::fail(record, &lease(token, retention), &failure, now);
                    Some(Answer::Called(change.map(|_| ())))
                }
                Step::Renew { token, extend } => {
                    let change = decision::renew(record, &lease(token, 1), Duration::from_secs(extend), now);
                    Some(Answer::Called(change.map(|_| ())))
                }
                Step::Advance(seconds) => {
                    self.now += Duration::from_secs(seconds);
                    None
                }
                Step::JumpBack(seconds) => {
                    self.now -= Duration::from_secs(seconds);
                    None
                }
            }
        }
    }

    fn rival() -> Reserve {
        Reserve::new(key()).with_token(token(200)).with_lease(SECOND).with_retention(SECOND)
    }

    fn run(steps: &[Step]) -> Result<(), TestCaseError> {
        let mut cell = Cell { record: None, now: started() };
        // The longest that the present holder was ever granted at once.
        let mut granted = Duration::ZERO;
        for step in steps {
            let before = cell.clone();
            let answer = cell.call(step);
            let old = before.live().cloned();
            let new = cell.live().cloned();

            // R4: delivered twice, it gives the same answer and changes nothing more.
            let once = cell.clone();
            if let Some(answer) = &answer {
                let again = cell.call(step);
                prop_assert_eq!(Some(answer), again.as_ref());
                prop_assert_eq!(&once.record, &cell.record);
            }

            if let (Some(old), Some(new)) = (&old, &new) {
                prop_assert!(new.attempt >= old.attempt);
                prop_assert_eq!(new.created_at, old.created_at);
                prop_assert_eq!(new.fingerprint, old.fingerprint);
                if old.token != new.token {
                    prop_assert_eq!(new.attempt, old.attempt + 1, "a new holder is a new attempt");
                    let taken_over = before.now >= old.lease_until;
                    prop_assert!(taken_over || matches!(old.state, State::Failed(_)), "taken before its time");
                }
                if matches!(old.state, State::Completed(_)) {
                    prop_assert_eq!(old, new, "completed is final");
                }
                if new.state == State::InProgress && old.token == new.token {
                    prop_assert!(new.lease_until >= old.lease_until, "a lease is never shortened");
                }
            }
            match step {
                Step::Reserve { lease, .. }
                    if old.as_ref().map(|old| old.token) != new.as_ref().map(|new| new.token) =>
                {
                    granted = Duration::from_secs(*lease);
                }
                Step::Reserve { lease, .. } if old.is_none() => granted = Duration::from_secs(*lease),
                Step::Renew { extend, .. } if answer == Some(Answer::Called(Ok(()))) => {
                    granted = granted.max(Duration::from_secs(*extend))
                }
                _ => {}
            }

            // R6: only the holder's calls are taken.
            if let (
                Step::Complete { token: by, .. } | Step::Fail { token: by, .. } | Step::Renew { token: by, .. },
                Some(Answer::Called(result)),
            ) = (step, &answer)
            {
                let holder = old.as_ref().is_some_and(|old| old.token == token(*by));
                if !holder {
                    prop_assert_eq!(*result, Err(Refusal::LeaseLost));
                }
                if result.is_err() {
                    prop_assert_eq!(&before.record, &once.record, "a refused call changes nothing");
                }
            }
            if let Some(Answer::Reserved(answer)) = &answer
                && let Reservation::InProgress { retry_after, .. } = &**answer
            {
                prop_assert!(*retry_after > Duration::ZERO && *retry_after <= granted, "{retry_after:?} {granted:?}");
            }

            // The boundaries of whatever is there now.
            if let Some(record) = &once.record {
                if record.state == State::InProgress {
                    prop_assert!(record.expires_at >= record.lease_until, "expires while the lease runs");
                    let early = decide(Some(record), &rival(), record.lease_until - NS);
                    prop_assert!(matches!(early, Decision::Answer(Reservation::InProgress { .. })), "{early:?}");
                    let due = decide(Some(record), &rival(), record.lease_until);
                    let Decision::Acquire(due) = due else { return Err(TestCaseError::fail(format!("{due:?}"))) };
                    if record.lease_until < record.expires_at {
                        prop_assert!(matches!(due.origin, Origin::Takeover(previous)
                            if previous.token == record.token && previous.attempt == record.attempt));
                    } else {
                        prop_assert_eq!((due.origin, due.attempt), (Origin::Fresh, 1));
                    }
                }
                let last = decide(Some(record), &rival().with_fingerprint(print(9)), record.expires_at - NS);
                if record.fingerprint.is_some() {
                    prop_assert_eq!(last, Decision::Answer(Reservation::Mismatch));
                } else {
                    prop_assert!(!matches!(last, Decision::Acquire(fresh) if fresh.origin == Origin::Fresh));
                }
                let gone = decide(Some(record), &rival(), record.expires_at);
                prop_assert!(
                    matches!(gone, Decision::Acquire(fresh) if fresh.origin == Origin::Fresh && fresh.attempt == 1)
                );
            }
        }
        Ok(())
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]

        #[test]
        fn any_sequence_of_calls_keeps_the_rules(steps in prop::collection::vec(step(false), 1..40)) {
            run(&steps)?;
        }

        #[test]
        fn a_clock_that_jumps_back_breaks_no_rule(steps in prop::collection::vec(step(true), 1..40)) {
            run(&steps)?;
        }

        /// A call whose reply was lost is sent again later, before the record expires: it still means the same.
        #[test]
        fn a_repeat_that_comes_late_changes_nothing(
            steps in prop::collection::vec(step(false), 1..20),
            last in step(false).prop_filter("a call that writes", |step| {
                matches!(step, Step::Reserve { .. } | Step::Complete { .. } | Step::Fail { .. })
            }),
            late in 0u64..20,
        ) {
            let mut cell = Cell { record: None, now: started() };
            for step in &steps {
                cell.call(step);
            }
            let answer = cell.call(&last);
            let written = cell.record.clone();
            cell.now += Duration::from_secs(late);
            let taken = match &answer {
                Some(Answer::Reserved(answer)) => matches!(**answer, Reservation::Acquired(_)),
                Some(Answer::Called(result)) => result.is_ok(),
                Some(Answer::Lost) | None => false,
            };
            if taken && cell.live().is_some() {
                prop_assert_eq!(cell.call(&last), answer);
                prop_assert_eq!(cell.record, written);
            }
        }
    }
}
