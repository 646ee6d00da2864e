//! The in-memory store: its bounds, its sweep, its races, and input that it refuses.
#![allow(clippy::unwrap_used, clippy::panic)]

mod doubles;

use std::collections::HashSet;
use std::error::Error;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use doubles::{Wire, ready};
use idem_core::clock::{Clock, ManualClock};
use idem_core::limits::{DEFAULT_OUTCOME_LIMIT, MAX_LEASE, MAX_OUTCOME_LIMIT, MAX_RETENTION, MIN_DURATION};
use idem_core::{
    Body, ErrorClass, ErrorKind, Failure, InvalidInput, Key, KeyStore, Lease, MemoryStore, MemoryStoreBuilder, Origin,
    Outcome, PurgeBudget, Reservation, Reserve, Scope, State, StoreError, Withheld,
};
use proptest::prelude::*;

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

fn clocked() -> (Arc<ManualClock>, MemoryStoreBuilder) {
    let clock = Arc::new(ManualClock::default());
    (clock.clone(), MemoryStore::builder().clock(clock))
}

fn key(number: usize) -> Key {
    Key::new("t", &format!("k{number}")).unwrap()
}

/// Held for a second, kept for a minute.
fn ask(number: usize) -> Reserve {
    Reserve::new(key(number)).with_lease(SECOND).with_retention(MINUTE)
}

fn acquire(store: &impl KeyStore, request: &Reserve) -> Lease {
    match ready(store.reserve(request)) {
        Ok(Reservation::Acquired(lease)) => lease,
        other => panic!("{other:?}"),
    }
}

mod capacity {
    use super::*;

    fn refused(store: &MemoryStore, number: usize) {
        let error = ready(store.reserve(&ask(number))).unwrap_err();
        assert_eq!((error.kind(), error.class()), (ErrorKind::Full, ErrorClass::Retryable));
    }

    #[test]
    fn a_full_store_refuses_and_drops_nothing() {
        let (clock, builder) = clocked();
        let store = builder.max_records(500).build();
        let leases: Vec<Lease> = (0..500).map(|number| acquire(&store, &ask(number))).collect();
        (500..600).for_each(|number| refused(&store, number));
        assert_eq!(store.len(), 500);

        // Everything else still works: repeats, renewals, completions, failures, and a retry of a failed key.
        for (number, lease) in leases.iter().enumerate() {
            ready(store.renew(lease, 2 * SECOND)).unwrap();
            match number % 3 {
                0 => ready(store.complete(lease, &Outcome::new(200, "done"))).unwrap(),
                1 => {
                    ready(store.fail(lease, &Failure::default())).unwrap();
                    assert_eq!(acquire(&store, &ask(number)).origin, Origin::Retry);
                }
                _ => {}
            }
        }
        clock.advance(30 * SECOND);
        (500..600).for_each(|number| refused(&store, number));
        for number in 0..500 {
            match ready(store.reserve(&ask(number))).unwrap() {
                Reservation::Completed(_) => assert_eq!(number % 3, 0),
                Reservation::Acquired(lease) => {
                    assert_ne!(number % 3, 0);
                    assert!(matches!(lease.origin, Origin::Takeover(_)));
                }
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn room_returns_when_records_expire() {
        let (clock, builder) = clocked();
        let store = builder.max_records(300).build();
        (0..300).for_each(|number| drop(acquire(&store, &ask(number))));
        clock.advance(MINUTE - Duration::from_nanos(1));
        refused(&store, 300);
        clock.advance(Duration::from_nanos(1));
        // Each new key finds a place, whichever shards it and the expired ones are in.
        (300..600).for_each(|number| drop(acquire(&store, &ask(number))));
        refused(&store, 600);
        assert_eq!(store.len(), 300);
    }

    #[test]
    fn a_store_without_room_takes_nothing() {
        let store = MemoryStore::builder().max_records(0).build();
        refused(&store, 1);
        assert!(store.is_empty());
    }

    /// Racing callers never exceed the bound, and never leave a place unused for good.
    #[test]
    fn the_bound_holds_under_contention() {
        let (clock, builder) = clocked();
        let store = builder.max_records(1000).build();
        for round in 0..5 {
            let taken = AtomicUsize::new(0);
            std::thread::scope(|threads| {
                for thread in 0..4 {
                    let (store, taken) = (&store, &taken);
                    threads.spawn(move || {
                        for number in 0..500 {
                            let request = ask((round * 4 + thread) * 500 + number);
                            if ready(store.reserve(&request)).is_ok() {
                                taken.fetch_add(1, Ordering::Relaxed);
                            }
                            assert!(store.len() <= 1000);
                        }
                    });
                }
            });
            assert_eq!(taken.into_inner(), 1000, "round {round}");
            clock.advance(MINUTE);
        }
    }
}

mod sweep {
    use super::*;

    /// The store neither grows nor slows when as many records expire as arrive, without any purge.
    #[test]
    fn memory_is_bounded_in_steady_state() {
        let (clock, builder) = clocked();
        let store = builder.build();
        // 500 live records at any time: each lives a minute, one arrives every 0.12 s.
        let mut most = 0;
        for number in 0..100_000 {
            acquire(&store, &ask(number));
            clock.advance(MINUTE / 500);
            most = most.max(store.len());
        }
        // Per shard there is half a live record; what has expired is found by the next insert into the shard.
        assert!(most < 3_000, "{most} records held, 500 of them live");
    }

    #[test]
    fn memory_is_bounded_with_many_records_to_a_shard() {
        let (clock, builder) = clocked();
        let store = builder.build();
        let live = 100_000;
        let mut most = 0;
        for number in 0..4 * live {
            acquire(&store, &ask(number));
            clock.advance(MINUTE / live as u32);
            most = most.max(store.len());
        }
        assert!(most < live + live / 5, "{most} records held, {live} of them live");
    }

    #[test]
    fn purge_keeps_to_its_budget_and_says_when_there_is_more() {
        let (clock, builder) = clocked();
        let store = builder.build();
        // Many to a shard, so that the budget ends within shards.
        (0..50_000).for_each(|number| drop(acquire(&store, &ask(number))));
        let purge = |records| ready(store.purge_expired(PurgeBudget::records(records))).unwrap();
        let nothing = purge(usize::MAX);
        assert_eq!((nothing.removed, nothing.more), (0, false));

        clock.advance(MINUTE);
        let (mut removed, mut calls) = (0, 0);
        loop {
            let purged = purge(37);
            assert!(purged.removed <= 37);
            removed += purged.removed;
            assert_eq!(store.len() as u64, 50_000 - removed);
            calls += 1;
            if !purged.more {
                break;
            }
        }
        assert_eq!(removed, 50_000);
        assert!(calls < 3_000, "{calls} calls");
        assert!(store.is_empty());
    }

    #[test]
    fn purge_removes_only_what_has_expired() {
        let (clock, builder) = clocked();
        let store = builder.build();
        for number in 0..900 {
            let lease = acquire(&store, &ask(number).with_retention(MINUTE * (1 + number as u32 % 3)));
            if number % 2 == 0 {
                ready(store.complete(&lease, &Outcome::new(200, "done"))).unwrap();
            }
        }
        for minutes in 1..=3 {
            clock.advance(MINUTE);
            while ready(store.purge_expired(PurgeBudget::records(10))).unwrap().more {}
            for number in 0..900 {
                let there = ready(store.fetch(&key(number))).unwrap().is_some();
                assert_eq!(there, number % 3 >= minutes, "record {number} after {minutes} minutes");
            }
            assert_eq!(store.len(), 300 * (3 - minutes));
        }
    }

    /// An expired record is absent to every call, purged or not, and its successor is not what a purge removes.
    #[test]
    fn an_expired_record_is_replaced_in_its_place() {
        let (clock, builder) = clocked();
        let store = builder.max_records(1).build();
        let old = acquire(&store, &ask(1));
        ready(store.complete(&old, &Outcome::new(200, "old"))).unwrap();
        clock.advance(MINUTE);
        assert_eq!(ready(store.fetch(&key(1))).unwrap(), None);
        assert_eq!(ready(store.complete(&old, &Outcome::new(200, "old"))).unwrap_err().kind(), ErrorKind::LeaseLost);
        assert_eq!(ready(store.renew(&old, SECOND)).unwrap_err().kind(), ErrorKind::LeaseLost);

        let new = acquire(&store, &ask(1));
        assert_eq!((new.attempt, new.origin), (1, Origin::Fresh));
        assert_eq!(ready(store.purge_expired(PurgeBudget::default())).unwrap().removed, 0);
        assert_eq!(store.len(), 1);
        ready(store.complete(&new, &Outcome::new(200, "new"))).unwrap();
        clock.advance(MINUTE);
        assert_eq!(ready(store.purge_expired(PurgeBudget::default())).unwrap().removed, 1);
        assert!(store.is_empty());
    }

    /// A record whose life a call has changed is looked for at its new end.
    #[test]
    fn calls_move_the_expiry_that_the_sweep_sees() {
        let (clock, builder) = clocked();
        let store = builder.build();
        let purge = || ready(store.purge_expired(PurgeBudget::default())).unwrap().removed;
        let renewed = acquire(&store, &ask(1).with_retention(SECOND));
        ready(store.renew(&renewed, MINUTE)).unwrap();
        let shortened = acquire(&store, &ask(2).with_retention(10 * MINUTE));
        ready(store.fail(&shortened.with_retention(SECOND), &Failure::default())).unwrap();
        let extended = acquire(&store, &ask(3));
        ready(store.complete(&extended.with_retention(2 * MINUTE), &Outcome::new(200, ""))).unwrap();

        clock.advance(SECOND);
        assert_eq!((purge(), store.len()), (1, 2));
        clock.advance(MINUTE - SECOND);
        assert_eq!((purge(), store.len()), (1, 1));
        clock.advance(MINUTE);
        assert_eq!((purge(), store.len()), (1, 0));
    }

    /// Wherever a sweep stands, it finds the records whose life a call cuts short.
    #[test]
    fn a_life_that_is_cut_short_during_a_sweep_ends_in_time() {
        for swept in [64, 1_000] {
            let (clock, builder) = clocked();
            let store = builder.build();
            let reserve = |number: usize| {
                let kept = if number.is_multiple_of(5) { SECOND } else { 10 * MINUTE };
                acquire(&store, &ask(number).with_retention(kept))
            };
            // On few processors the table of a shard has more slots than a sweep looks through at once.
            let leases: Vec<Lease> = (0..20_000).map(reserve).collect();
            clock.advance(SECOND);
            let purged = ready(store.purge_expired(PurgeBudget::records(swept))).unwrap();
            assert!(purged.more && purged.removed as usize <= swept);
            for (number, lease) in leases.into_iter().enumerate().filter(|(number, _)| !number.is_multiple_of(5)) {
                let kept = if number.is_multiple_of(2) { SECOND } else { MINUTE };
                ready(store.complete(&lease.with_retention(kept), &Outcome::new(200, "done"))).unwrap();
            }
            clock.advance(SECOND);
            while ready(store.purge_expired(PurgeBudget::default())).unwrap().more {}
            assert_eq!(store.len(), 8_000, "after a sweep of {swept}");
            clock.advance(MINUTE - SECOND);
            while ready(store.purge_expired(PurgeBudget::default())).unwrap().more {}
            assert!(store.is_empty(), "after a sweep of {swept}");
        }
    }

    /// Live keys are reserved, renewed and completed while purges run; nothing live goes, everything expired does.
    #[test]
    fn purge_is_safe_beside_everything_else() {
        let (clock, builder) = clocked();
        let store = builder.build();
        let done = AtomicBool::new(false);
        std::thread::scope(|threads| {
            threads.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    ready(store.purge_expired(PurgeBudget::records(50))).unwrap();
                }
            });
            let worker = threads.spawn(|| {
                for round in 0..40 {
                    let numbers = round * 500..(round + 1) * 500;
                    let leases: Vec<Lease> = numbers.clone().map(|number| acquire(&store, &ask(number))).collect();
                    for lease in &leases {
                        ready(store.renew(lease, 2 * SECOND)).unwrap();
                        ready(store.complete(lease, &Outcome::new(200, "done"))).unwrap();
                    }
                    clock.advance(MINUTE - SECOND);
                    for number in numbers {
                        let answer = ready(store.reserve(&ask(number))).unwrap();
                        assert!(matches!(answer, Reservation::Completed(_)), "{answer:?}");
                    }
                    clock.advance(SECOND);
                }
            });
            let worked = worker.join();
            done.store(true, Ordering::Relaxed);
            worked.unwrap();
        });
        while ready(store.purge_expired(PurgeBudget::default())).unwrap().more {}
        assert!(store.is_empty());
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

        /// Tables grow and move their entries in the middle of sweeps; still no expired record is forgotten.
        #[test]
        fn no_expired_record_is_lost_by_growth_during_a_sweep(
            rounds in prop::collection::vec((1usize..6000, 0u32..90, 0usize..800), 1..8),
        ) {
            let (clock, builder) = clocked();
            let store = builder.build();
            let mut number = 0;
            let mut ends = Vec::new();
            for (inserts, seconds, budget) in rounds {
                for _ in 0..inserts {
                    let kept = SECOND * (1 + number as u32 % 100);
                    acquire(&store, &ask(number).with_retention(kept));
                    ends.push(clock.now() + kept);
                    number += 1;
                }
                clock.advance(SECOND * seconds);
                ready(store.purge_expired(PurgeBudget::records(budget))).unwrap();
            }
            while ready(store.purge_expired(PurgeBudget::records(500))).unwrap().more {}
            let live = ends.iter().filter(|end| **end > clock.now()).count();
            prop_assert_eq!(store.len(), live);
            clock.advance(100 * SECOND);
            while ready(store.purge_expired(PurgeBudget::records(500))).unwrap().more {}
            prop_assert_eq!(store.len(), 0);
        }
    }
}

mod races {
    use super::*;

    /// R1: however many reserve an absent, an expired, a failed or an abandoned key at once, one gets it.
    #[test]
    fn one_of_many_wins_each_key() {
        const THREADS: usize = 8;
        const KEYS: usize = 2_000;
        let (clock, builder) = clocked();
        let store = builder.build();
        for kind in ["absent", "expired", "failed", "abandoned"] {
            match kind {
                "expired" => clock.advance(MINUTE),
                "failed" => {
                    for number in 0..KEYS {
                        let lease = ready(store.fetch(&key(number))).unwrap().unwrap().lease();
                        ready(store.fail(&lease, &Failure::default())).unwrap();
                    }
                }
                "abandoned" => clock.advance(SECOND),
                _ => {}
            }
            let start = Barrier::new(THREADS);
            let wins: Vec<Vec<Lease>> = std::thread::scope(|threads| {
                let threads: Vec<_> = (0..THREADS)
                    .map(|_| {
                        threads.spawn(|| {
                            start.wait();
                            let mut wins = Vec::new();
                            for number in 0..KEYS {
                                match ready(store.reserve(&ask(number))).unwrap() {
                                    Reservation::Acquired(lease) => wins.push(lease),
                                    Reservation::InProgress { .. } => {}
                                    other => panic!("{other:?}"),
                                }
                            }
                            wins
                        })
                    })
                    .collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            let wins: Vec<Lease> = wins.into_iter().flatten().collect();
            let keys: HashSet<&str> = wins.iter().map(|lease| lease.key.id()).collect();
            assert_eq!((wins.len(), keys.len()), (KEYS, KEYS), "{kind}");
            for lease in &wins {
                match kind {
                    "absent" | "expired" => assert_eq!((lease.attempt, lease.origin), (1, Origin::Fresh)),
                    "failed" => assert_eq!((lease.attempt, lease.origin), (2, Origin::Retry)),
                    _ => assert!(lease.attempt == 3 && matches!(lease.origin, Origin::Takeover(_))),
                }
            }
        }
    }

    /// Late completions of a holder race with take-overs: a key is completed by exactly one of the two.
    #[test]
    fn a_take_over_and_a_late_completion_exclude_each_other() {
        let (clock, builder) = clocked();
        let store = builder.build();
        let old: Vec<Lease> = (0..2_000).map(|number| acquire(&store, &ask(number))).collect();
        clock.advance(SECOND);
        let start = Barrier::new(2);
        let (late, new) = std::thread::scope(|threads| {
            let late = threads.spawn(|| {
                start.wait();
                let complete = |lease| ready(store.complete(lease, &Outcome::new(1, "late"))).is_ok();
                old.iter().map(complete).collect::<Vec<bool>>()
            });
            start.wait();
            let new: Vec<bool> = (0..old.len())
                .map(|number| match ready(store.reserve(&ask(number))).unwrap() {
                    Reservation::Acquired(lease) => ready(store.complete(&lease, &Outcome::new(2, "new"))).is_ok(),
                    Reservation::Completed(record) => {
                        assert_eq!(record.outcome().unwrap().code, 1);
                        false
                    }
                    other => panic!("{other:?}"),
                })
                .collect();
            (late.join().unwrap(), new)
        });
        for (number, (late, new)) in late.iter().zip(&new).enumerate() {
            assert!(late ^ new, "key {number}: late {late}, new {new}");
        }
    }
}

mod bad_input {
    use super::*;

    fn invalid(error: &StoreError) -> &InvalidInput {
        assert_eq!((error.kind(), error.class()), (ErrorKind::InvalidInput, ErrorClass::Permanent));
        assert!(error.source().is_some());
        error.invalid_input().unwrap()
    }

    #[test]
    fn a_bad_key_or_scope_does_not_come_into_being() {
        assert_eq!(Key::new("t", ""), Err(InvalidInput::KeyIdEmpty));
        assert_eq!(Key::new("t", &"k".repeat(256)), Err(InvalidInput::KeyIdTooLong { bytes: 256 }));
        for character in ['\0', '\u{1b}', '\u{7f}', '\u{202e}', '\u{2066}', '\u{200f}'] {
            let text = format!("a{character}");
            for (field, refused) in [
                ("key id", Key::new("t", &text).unwrap_err()),
                ("key id", Scope::new("t").unwrap().key(&text).unwrap_err()),
                ("scope", Key::new(&text, "k").unwrap_err()),
                ("scope", Scope::new(&text).unwrap_err()),
            ] {
                assert_eq!(refused, InvalidInput::ForbiddenCharacter { field, character, at: 1 });
            }
        }
        assert_eq!(Key::new(&"s".repeat(65), "k"), Err(InvalidInput::ScopeTooLong { bytes: 65 }));
        // The longest that is allowed is stored and found.
        let store = MemoryStore::new();
        let longest = Key::new(&"s".repeat(64), &"k".repeat(255)).unwrap();
        acquire(&store, &Reserve::new(longest.clone()));
        assert_eq!(ready(store.fetch(&longest)).unwrap().unwrap().key, longest);
    }

    #[test]
    fn bad_durations_are_refused_and_nothing_is_stored() {
        let store = MemoryStore::new();
        let nanosecond = Duration::from_nanos(1);
        let cases = [
            (Duration::ZERO, MINUTE, InvalidInput::LeaseTooShort { lease: Duration::ZERO }),
            (MIN_DURATION - nanosecond, MINUTE, InvalidInput::LeaseTooShort { lease: MIN_DURATION - nanosecond }),
            (MAX_LEASE + nanosecond, MAX_RETENTION, InvalidInput::LeaseTooLong { lease: MAX_LEASE + nanosecond }),
            (Duration::MAX, Duration::MAX, InvalidInput::LeaseTooLong { lease: Duration::MAX }),
            (SECOND, Duration::ZERO, InvalidInput::RetentionTooShort { retention: Duration::ZERO }),
            (
                SECOND,
                MAX_RETENTION + nanosecond,
                InvalidInput::RetentionTooLong { retention: MAX_RETENTION + nanosecond, max: MAX_RETENTION },
            ),
            (SECOND, Duration::MAX, InvalidInput::RetentionTooLong { retention: Duration::MAX, max: MAX_RETENTION }),
            (
                SECOND,
                SECOND - nanosecond,
                InvalidInput::RetentionShorterThanLease { retention: SECOND - nanosecond, lease: SECOND },
            ),
        ];
        for (lease, retention, want) in cases {
            let request = Reserve::new(key(1)).with_lease(lease).with_retention(retention);
            assert_eq!(invalid(&ready(store.reserve(&request)).unwrap_err()), &want);
            let many = ready(store.reserve_many(std::slice::from_ref(&request)));
            assert_eq!(invalid(many[0].as_ref().unwrap_err()), &want);
        }
        assert!(store.is_empty());
    }

    #[test]
    fn durations_at_their_limits_work() {
        let (clock, builder) = clocked();
        let store = builder.build();
        for (number, (lease, retention)) in [
            (MIN_DURATION, MIN_DURATION),
            (MIN_DURATION, MAX_RETENTION),
            (SECOND, SECOND),
            (MAX_LEASE, MAX_LEASE),
            (MAX_LEASE, MAX_RETENTION),
        ]
        .into_iter()
        .enumerate()
        {
            let request = Reserve::new(key(number)).with_lease(lease).with_retention(retention);
            let held = acquire(&store, &request);
            let record = ready(store.fetch(&key(number))).unwrap().unwrap();
            assert_eq!((record.lease_remaining(), record.expires_in()), (lease, retention));
            let rival = Reserve::new(key(number));
            assert_eq!(
                ready(store.reserve(&rival)).unwrap(),
                Reservation::InProgress { attempt: 1, retry_after: lease }
            );
            clock.advance(lease - Duration::from_nanos(1));
            assert_eq!(
                ready(store.reserve(&rival)).unwrap(),
                Reservation::InProgress { attempt: 1, retry_after: Duration::from_nanos(1) }
            );
            ready(store.renew(&held, MAX_LEASE)).unwrap();
            ready(store.complete(&held, &Outcome::new(200, ""))).unwrap();
        }
    }

    #[test]
    fn a_bad_call_under_a_lease_changes_nothing() {
        let store = MemoryStore::builder().outcome_limit(10).build();
        let lease = acquire(&store, &ask(1));
        let before = ready(store.fetch(&key(1))).unwrap().unwrap();

        let too_large = Outcome::new(200, "0123456").with_header("ab", "cd");
        let error = ready(store.complete(&lease, &too_large)).unwrap_err();
        assert_eq!(invalid(&error), &InvalidInput::OutcomeTooLarge { bytes: 11, limit: 10 });
        let many = ready(store.complete_many(&[(lease.clone(), too_large)]));
        assert!(matches!(invalid(many[0].as_ref().unwrap_err()), InvalidInput::OutcomeTooLarge { .. }));
        for name in ["", "a\u{202e}", &"n".repeat(256)] {
            let outcome = Outcome::withheld(200, Withheld::Secret).with_header(name, "");
            invalid(&ready(store.complete(&lease, &outcome)).unwrap_err());
        }
        for retention in [Duration::ZERO, MAX_RETENTION + SECOND, Duration::MAX] {
            let lease = lease.clone().with_retention(retention);
            invalid(&ready(store.complete(&lease, &Outcome::new(200, ""))).unwrap_err());
            invalid(&ready(store.fail(&lease, &Failure::default())).unwrap_err());
        }
        for extend in [Duration::ZERO, MAX_LEASE + Duration::from_nanos(1), Duration::MAX] {
            invalid(&ready(store.renew(&lease, extend)).unwrap_err());
        }
        let after = ready(store.fetch(&key(1))).unwrap().unwrap();
        assert_eq!(before, idem_core::Record { read_at: before.read_at, ..after });

        ready(store.complete(&lease, &Outcome::new(200, "0123456").with_header("ab", "c"))).unwrap();
    }

    #[test]
    fn an_outcome_of_exactly_the_limit_is_stored() {
        for (builder, limit) in [
            (MemoryStore::builder(), DEFAULT_OUTCOME_LIMIT),
            (MemoryStore::builder().outcome_limit(usize::MAX), MAX_OUTCOME_LIMIT),
        ] {
            let store = builder.build();
            assert_eq!(store.capabilities().max_outcome_bytes, limit);
            let lease = acquire(&store, &ask(1));
            let error = ready(store.complete(&lease, &Outcome::new(200, vec![7; limit + 1]))).unwrap_err();
            assert_eq!(invalid(&error), &InvalidInput::OutcomeTooLarge { bytes: limit + 1, limit });
            let outcome = Outcome::new(200, vec![7; limit]);
            ready(store.complete(&lease, &outcome)).unwrap();
            assert_eq!(ready(store.fetch(&key(1))).unwrap().unwrap().state, State::Completed(outcome));
        }
    }
}

/// A replay shares the memory of the stored body: the bytes are never copied.
#[test]
fn a_replay_copies_no_body() {
    let store = MemoryStore::new();
    let outcome = Outcome::new(200, vec![1; 100_000]).with_header("etag", vec![2; 1000]);
    let Body::Stored(given) = &outcome.body else { panic!() };
    ready(store.complete(&acquire(&store, &ask(1)), &outcome)).unwrap();
    for _ in 0..3 {
        let Reservation::Completed(record) = ready(store.reserve(&ask(1))).unwrap() else { panic!() };
        let replay = record.outcome().unwrap();
        let Body::Stored(body) = &replay.body else { panic!() };
        assert_eq!(body.as_ptr(), given.as_ptr());
        let line = |outcome: &Outcome| outcome.headers.as_slice()[0].value.as_ptr();
        assert_eq!(line(replay), line(&outcome));
    }
}

/// Pointers to a store are stores, as trait objects too, and pass batches on as batches.
#[test]
fn pointers_forward_every_call() {
    fn exercise(store: &(impl KeyStore + ?Sized), wire: &Wire<MemoryStore>) {
        assert_eq!(store.to_string(), "memory");
        assert_eq!(store.capabilities(), wire.capabilities());
        let requests: Vec<Reserve> = (0..3).map(ask).collect();
        let calls: Vec<(Lease, Outcome)> = ready(store.reserve_many(&requests))
            .into_iter()
            .map(|answer| match answer.unwrap() {
                Reservation::Acquired(lease) => (lease, Outcome::new(200, "done")),
                other => panic!("{other:?}"),
            })
            .collect();
        assert!(ready(store.complete_many(&calls)).iter().all(Result::is_ok));
        let Reservation::Acquired(lease) = ready(store.reserve(&ask(9))).unwrap() else { panic!() };
        ready(store.renew(&lease, MINUTE)).unwrap();
        ready(store.fail(&lease, &Failure::default())).unwrap();
        ready(store.complete(&lease, &Outcome::new(200, ""))).unwrap_err();
        ready(store.fetch(&key(9))).unwrap().unwrap();
        ready(store.purge_expired(PurgeBudget::default())).unwrap();
        let trips = ["reserve_many", "complete_many", "reserve", "renew", "fail", "complete", "fetch", "purge"];
        assert_eq!(wire.trips(), trips);
    }

    let wire = || Wire::new(MemoryStore::new());
    let arc = Arc::new(wire());
    exercise(&arc, &arc);
    let object: Arc<dyn KeyStore> = Arc::new(wire());
    assert_eq!(object.to_string(), "memory");
    let leaked: &'static Wire<MemoryStore> = Box::leak(Box::new(wire()));
    exercise(&leaked, leaked);
    let object: Box<dyn KeyStore> = Box::new(&*Box::leak(Box::new(wire())));
    assert_eq!(object.to_string(), "memory");
    let shared = Arc::new(wire());
    let boxed: Box<dyn KeyStore> = Box::new(shared.clone());
    exercise(&boxed, &shared);
    let nested: Arc<Box<dyn KeyStore>> = Arc::new(Box::new(leaked));
    exercise_nested(&nested);

    fn exercise_nested(store: &impl KeyStore) {
        assert!(matches!(ready(store.reserve(&ask(77))).unwrap(), Reservation::Acquired(_)));
    }
}

/// A batch is answered in its order, and a key that occurs twice is held by the first of its requests.
#[test]
fn a_batch_is_answered_in_order() {
    let store = MemoryStore::new();
    let bad = ask(2).with_lease(Duration::ZERO);
    let answers = ready(store.reserve_many(&[ask(1), bad, ask(1), ask(3)]));
    assert!(matches!(&answers[0], Ok(Reservation::Acquired(lease)) if lease.key == key(1)));
    assert!(matches!(&answers[1], Err(error) if error.kind() == ErrorKind::InvalidInput));
    assert!(matches!(&answers[2], Ok(Reservation::InProgress { attempt: 1, .. })));
    assert!(matches!(&answers[3], Ok(Reservation::Acquired(lease)) if lease.key == key(3)));
    assert_eq!(store.len(), 2);
}

/// Two scopes with one id are two keys (R16), however the text of the two could be joined.
#[test]
fn scopes_are_apart() {
    let store = MemoryStore::new();
    for (scope, id) in [("a", "bc"), ("ab", "c"), ("", "abc"), ("b", "bc")] {
        acquire(&store, &Reserve::new(Key::new(scope, id).unwrap()));
    }
    assert_eq!(store.len(), 4);
}
