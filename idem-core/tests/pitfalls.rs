//! Faults that other idempotency software had in public, each as a small scenario. The numbers are those of the
//! project's list; what needs an executor, a server or HTTP is tested with those. What the tables of `decision.rs`
//! show at length is only touched here.
#![allow(clippy::unwrap_used, clippy::panic)]

mod doubles;

use std::sync::Arc;
use std::time::Duration;

use doubles::{Fault, Wire, ready};
use idem_core::clock::{Clock, ManualClock};
use idem_core::codec::{self, DecodeError};
use idem_core::{
    Body, Cached, ErrorClass, ErrorKind, Failure, Fingerprint, Key, KeyStore, Lease, MemoryStore, OnAbandoned, Origin,
    Outcome, PurgeBudget, Record, Reservation, Reserve, State, Withheld,
};

const NS: Duration = Duration::from_nanos(1);
const LEASE: Duration = Duration::from_secs(30);
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

struct Bench {
    clock: Arc<ManualClock>,
    store: Wire<MemoryStore>,
}

fn bench() -> Bench {
    let clock = Arc::new(ManualClock::default());
    let store = Wire::new(MemoryStore::builder().clock(clock.clone()).build());
    Bench { clock, store }
}

fn key() -> Key {
    Key::new("tenant-7", "order-42").unwrap()
}

fn ask() -> Reserve {
    Reserve::new(key()).with_lease(LEASE).with_retention(DAY)
}

fn answer(store: &impl KeyStore, request: &Reserve) -> Reservation {
    ready(store.reserve(request)).unwrap()
}

fn acquire(store: &impl KeyStore, request: &Reserve) -> Lease {
    match answer(store, request) {
        Reservation::Acquired(lease) => lease,
        other => panic!("{other:?}"),
    }
}

fn record(store: &impl KeyStore) -> Record {
    ready(store.fetch(&key())).unwrap().unwrap()
}

fn done() -> Outcome {
    Outcome::new(201, "charged once")
}

/// Requests that arrive at once under one key must not run side by side: there is one holder.
#[test]
fn pitfall_01_several_run_at_once() {
    let Bench { store, .. } = bench();
    for round in 0..200 {
        let start = std::sync::Barrier::new(4);
        let wins: usize = std::thread::scope(|threads| {
            let ask = || {
                let request = Reserve::new(Key::new("t", &round.to_string()).unwrap());
                start.wait();
                usize::from(matches!(answer(&store, &request), Reservation::Acquired(_)))
            };
            let threads: Vec<_> = (0..4).map(|_| threads.spawn(ask)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(wins, 1, "round {round}");
    }
}

/// The reserve took effect and its reply was lost: sent again, the caller must not meet itself as a rival.
#[test]
fn pitfall_02_lost_reply_of_reserve() {
    let Bench { clock, store } = bench();
    let request = ask();
    store.lose(Fault::Reply);
    let error = ready(store.reserve(&request)).unwrap_err();
    assert_eq!(error.class(), ErrorClass::Unknown, "it may have happened");
    let held = record(&store);

    clock.advance(Duration::from_secs(5));
    assert_eq!(acquire(&store, &request), held.lease());
    assert_eq!(record(&store).lease_until, held.lease_until, "the repeat changes nothing");
    // Where the request itself was lost, the same repeat is what acquires.
    let other = Reserve::new(Key::new("t", "another").unwrap());
    store.lose(Fault::Request);
    ready(store.reserve(&other)).unwrap_err();
    assert_eq!(acquire(&store, &other).origin, Origin::Fresh);
}

/// Two identical requests have the same fingerprint: who holds the key is told by the token, not by what is asked.
#[test]
fn pitfall_03_identical_requests_both_win() {
    let Bench { store, .. } = bench();
    let twin = || ask().with_fingerprint(Fingerprint::of("the same"));
    let first = acquire(&store, &twin());
    assert!(matches!(answer(&store, &twin()), Reservation::InProgress { .. }));
    assert_eq!(record(&store).token, first.token);
}

/// A duplicate is an answer: an error would trip retries and circuit breakers.
#[test]
fn pitfall_04_duplicate_as_an_error() {
    let Bench { clock, store } = bench();
    let ask = || ask().with_fingerprint(Fingerprint::of("a")).with_on_abandoned(OnAbandoned::Refuse);
    let lease = acquire(&store, &ask());
    assert!(matches!(ready(store.reserve(&ask())), Ok(Reservation::InProgress { .. })));
    assert!(matches!(ready(store.reserve(&ask().with_fingerprint(Fingerprint::of("b")))), Ok(Reservation::Mismatch)));
    clock.advance(LEASE);
    assert!(matches!(ready(store.reserve(&ask())), Ok(Reservation::Abandoned(_))));
    ready(store.complete(&lease, &done())).unwrap();
    assert!(matches!(ready(store.reserve(&ask())), Ok(Reservation::Completed(_))));
    // A completion that arrives twice is none either.
    ready(store.complete(&lease, &done())).unwrap();
}

/// Lock, result and failure are one typed, versioned form: each is read back as what it is, and unknown bytes are an
/// error, not a crash and not an absent record.
#[test]
fn pitfall_05_one_value_of_different_shapes() {
    let Bench { store, .. } = bench();
    let lease = acquire(&store, &ask());
    let mut shapes = vec![record(&store)];
    ready(store.fail(&lease, &Failure::new("no route").unwrap())).unwrap();
    shapes.push(record(&store));
    ready(store.complete(&acquire(&store, &ask()), &done())).unwrap();
    shapes.push(record(&store));
    for record in shapes {
        let mut bytes = codec::encode(&record);
        let read = codec::decode(&key(), bytes.clone().into(), record.read_at).unwrap();
        assert_eq!(read, record);
        bytes[0] = 9;
        assert_eq!(codec::decode(&key(), bytes.into(), record.read_at), Err(DecodeError::Version(9)));
    }
    assert!(codec::decode(&key(), "{\"locked\":true}".into(), record(&store).read_at).is_err());
    assert_eq!(ErrorKind::Unreadable.class(), ErrorClass::Permanent);
}

/// A purge removes the row between the conflict and the read: whoever goes on has a lease, and there is one of them.
#[test]
fn pitfall_06_purged_between_conflict_and_read() {
    let Bench { clock, store } = bench();
    acquire(&store, &ask());
    for _ in 0..500 {
        clock.advance(DAY);
        let leases: Vec<Lease> = std::thread::scope(|threads| {
            threads.spawn(|| ready(store.purge_expired(PurgeBudget::default())).unwrap());
            let ask = || match answer(&store, &ask()) {
                Reservation::Acquired(lease) => Some(lease),
                Reservation::InProgress { .. } => None,
                other => panic!("{other:?}"),
            };
            let threads = [threads.spawn(ask), threads.spawn(ask)];
            threads.into_iter().filter_map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(leases.len(), 1);
        assert_eq!(record(&store).lease(), leases[0], "the lease is backed by a record");
    }
}

/// Lock and expiry are one write: every record has an end from the moment it exists, whatever the caller does next.
#[test]
fn pitfall_07_a_key_without_expiry() {
    let Bench { clock, store } = bench();
    store.lose(Fault::Late);
    {
        // The caller dies while it waits for the reply.
        let request = ask();
        let mut waiting = Box::pin(store.reserve(&request));
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        assert!(waiting.as_mut().poll(&mut context).is_pending());
    }
    assert_eq!(record(&store).expires_in(), DAY);
    clock.advance(DAY);
    assert_eq!(ready(store.fetch(&key())).unwrap(), None);
}

/// What is in flight is deduplicated too, not only what has finished.
#[test]
fn pitfall_08_requests_in_flight_are_not_deduplicated() {
    let Bench { store, .. } = bench();
    acquire(&store, &ask());
    assert_eq!(record(&store).state, State::InProgress, "stored before the handler runs");
    assert!(matches!(answer(&store, &ask()), Reservation::InProgress { .. }));
}

/// Nothing is kept per key once its record is gone: not for refused, failed, taken over or cancelled calls either.
#[test]
fn pitfall_09_a_lock_table_that_only_grows() {
    let clock = Arc::new(ManualClock::default());
    let store = MemoryStore::builder().clock(clock.clone()).build();
    std::thread::scope(|threads| {
        for _ in 0..4 {
            threads.spawn(|| {
                for number in 0..2_000 {
                    let request = Reserve::new(Key::new("t", &(number % 500).to_string()).unwrap());
                    drop(store.reserve(&request));
                    if let Ok(Reservation::Acquired(lease)) = ready(store.reserve(&request)) {
                        if number % 2 == 0 {
                            ready(store.fail(&lease, &Failure::default())).unwrap();
                        } else {
                            ready(store.complete(&lease, &done())).unwrap();
                        }
                    }
                    ready(store.fetch(&Key::new("t", &format!("never reserved {number}")).unwrap())).unwrap();
                }
            });
        }
    });
    assert_eq!(store.len(), 500);
    clock.advance(DAY);
    while ready(store.purge_expired(PurgeBudget::default())).unwrap().more {}
    assert!(store.is_empty());
}

/// One unit everywhere: the key is refused a nanosecond before the lease's end and taken at it, by whatever path.
#[test]
fn pitfall_10_lease_in_another_unit() {
    for lease in [Duration::from_millis(1), Duration::from_millis(1500), LEASE, DAY] {
        let Bench { clock, store } = bench();
        let ask = || ask().with_lease(lease).with_retention(3 * DAY);
        let rest = || Reservation::InProgress { attempt: 1, retry_after: NS };
        let holder = acquire(&store, &ask());
        clock.advance(lease - NS);
        assert_eq!(answer(&store, &ask()), rest());
        assert_eq!(ready(store.reserve_many(&[ask()])).remove(0).unwrap(), rest());
        assert_eq!(record(&store).lease_remaining(), NS);
        // A renewal has the same boundary.
        ready(store.renew(&holder, lease)).unwrap();
        clock.advance(lease - NS);
        assert_eq!(answer(&store, &ask()), rest());
        clock.advance(NS);
        assert!(matches!(answer(&store, &ask().with_on_abandoned(OnAbandoned::Refuse)), Reservation::Abandoned(_)));
        assert!(matches!(acquire(&store, &ask()).origin, Origin::Takeover(_)));
    }
}

/// A remaining time of zero is zero, not "none given": nothing that is over is replayed or extended by a default.
#[test]
fn pitfall_11_zero_read_as_none_given() {
    let Bench { clock, store } = bench();
    let lease = acquire(&store, &ask());
    clock.advance(LEASE);
    assert_eq!(record(&store).lease_remaining(), Duration::ZERO);
    assert!(matches!(answer(&store, &ask()), Reservation::Acquired(_)));
    for request in [ask().with_lease(Duration::ZERO), ask().with_retention(Duration::ZERO)] {
        assert_eq!(ready(store.reserve(&request)).unwrap_err().kind(), ErrorKind::InvalidInput);
    }
    assert_eq!(ready(store.renew(&lease, Duration::ZERO)).unwrap_err().kind(), ErrorKind::InvalidInput);
    assert_eq!(
        ready(store.complete(&lease.with_retention(Duration::ZERO), &done())).unwrap_err().kind(),
        ErrorKind::InvalidInput
    );
}

/// A crash blocks the key for the lease, not for the retention.
#[test]
fn pitfall_12_crash_blocks_the_key_for_a_day() {
    let Bench { clock, store } = bench();
    acquire(&store, &ask());
    clock.advance(LEASE);
    let next = acquire(&store, &ask());
    assert_eq!(next.attempt, 2);
    ready(store.complete(&next, &done())).unwrap();
    clock.advance(DAY - NS);
    assert!(matches!(answer(&store, &ask()), Reservation::Completed(_)), "the result lives for the retention");
}

/// A's lease ends and B runs; what A says afterwards must not touch B's claim.
#[test]
fn pitfall_13_late_failure_deletes_anothers_claim() {
    let Bench { clock, store } = bench();
    let a = acquire(&store, &ask());
    clock.advance(LEASE);
    let b = acquire(&store, &ask());
    let held = record(&store);
    assert_eq!(ready(store.fail(&a, &Failure::default())).unwrap_err().kind(), ErrorKind::LeaseLost);
    assert_eq!(ready(store.complete(&a, &done())).unwrap_err().kind(), ErrorKind::LeaseLost);
    assert_eq!(record(&store), held);
    ready(store.complete(&b, &done())).unwrap();
    assert_eq!(ready(store.fail(&a, &Failure::default())).unwrap_err().kind(), ErrorKind::LeaseLost);
}

/// One worker's two attempts are two owners: its older one must not pass as the newer.
#[test]
fn pitfall_14_owner_is_the_workers_name() {
    let Bench { clock, store } = bench();
    let older = acquire(&store, &ask());
    clock.advance(LEASE);
    // The same worker, with the same request made anew.
    let newer = acquire(&store, &ask());
    assert_ne!(older.token, newer.token);
    assert_eq!(ready(store.complete(&older, &done())).unwrap_err().kind(), ErrorKind::LeaseLost);
    ready(store.complete(&newer, &done())).unwrap();
}

/// A renewal that arrives after a take-over is refused and told so.
#[test]
fn pitfall_15_late_renewal_takes_the_lease_back() {
    let Bench { clock, store } = bench();
    let a = acquire(&store, &ask());
    clock.advance(LEASE);
    acquire(&store, &ask());
    let held = record(&store);
    assert_eq!(ready(store.renew(&a, LEASE)).unwrap_err().kind(), ErrorKind::LeaseLost);
    assert_eq!(record(&store), held);
}

/// Deadlines are the store's: a caller cannot bring a time of its own, and a clock that is hours off judges nothing.
#[test]
fn pitfall_17_deadline_judged_by_another_clock() {
    let Bench { clock, store } = bench();
    let cache_clock = Arc::new(ManualClock::new(clock.now() + 7 * DAY));
    let cached = Cached::builder(store).clock(cache_clock.clone()).build();
    let lease = acquire(&cached, &ask());
    assert!(matches!(answer(&cached, &ask()), Reservation::InProgress { retry_after: LEASE, .. }));
    cache_clock.advance(LEASE);
    assert!(matches!(answer(&cached, &ask()), Reservation::InProgress { .. }), "the store's lease still runs");
    ready(cached.complete(&lease, &done())).unwrap();
    assert!(matches!(answer(&cached, &ask()), Reservation::Completed(_)));
    // Times in answers are the store's, so that they can be compared with each other.
    let Reservation::Completed(record) = answer(&cached, &ask()) else { panic!() };
    assert_eq!((record.created_at, record.expires_in()), (clock.now(), DAY));
}

/// What is released after the lease's end, even after the retention of the reserve, lives on from then.
#[test]
fn pitfall_18_released_late_and_expired_at_once() {
    for fail in [false, true] {
        let Bench { clock, store } = bench();
        let lease = acquire(&store, &ask().with_retention(LEASE + NS));
        clock.advance(LEASE);
        if fail {
            ready(store.fail(&lease, &Failure::default())).unwrap();
        } else {
            ready(store.complete(&lease, &done())).unwrap();
        }
        assert_eq!(record(&store).expires_in(), LEASE + NS);
        clock.advance(LEASE);
        assert!(ready(store.fetch(&key())).unwrap().is_some());
    }
}

/// The cache must not know a result that was never stored.
#[test]
fn pitfall_19_cache_filled_before_the_durable_write() {
    let Bench { store, .. } = bench();
    let cached = Cached::new(store);
    let request = ask();
    let lease = acquire(&cached, &request);
    cached.inner().lose(Fault::Request);
    ready(cached.complete(&lease, &done())).unwrap_err();
    assert!(matches!(answer(&cached, &ask()), Reservation::InProgress { .. }));
    assert_eq!(ready(cached.fetch(&key())).unwrap().unwrap().state, State::InProgress);
    ready(cached.complete(&lease, &Outcome::new(500, "another"))).unwrap();
    let Reservation::Completed(record) = answer(&cached, &ask()) else { panic!() };
    assert_eq!(record.outcome(), Some(&Outcome::new(500, "another")));
}

/// The cached path compares fingerprints as the store does.
#[test]
fn pitfall_20_fast_path_skips_the_mismatch_check() {
    let Bench { store, .. } = bench();
    let cached = Cached::new(store);
    let of = |what: &str| ask().with_fingerprint(Fingerprint::of(what));
    ready(cached.complete(&acquire(&cached, &of("a")), &done())).unwrap();
    assert!(matches!(answer(&cached, &of("a")), Reservation::Completed(_)));
    cached.inner().trips();
    assert_eq!(answer(&cached, &of("b")), Reservation::Mismatch);
    assert_eq!(ready(cached.reserve_many(&[of("b")])).remove(0).unwrap(), Reservation::Mismatch);
    assert_eq!(cached.inner().trips(), Vec::<&str>::new(), "the answers came from the cache");
}

/// Another request under a used key is told at once in every state; it must not wait for an answer to something else.
#[test]
fn pitfall_21_mismatch_seen_only_when_completed() {
    let Bench { clock, store } = bench();
    let of = |what: &str| ask().with_fingerprint(Fingerprint::of(what));
    let mismatch = || assert_eq!(answer(&store, &of("b")), Reservation::Mismatch);
    let lease = acquire(&store, &of("a"));
    mismatch();
    ready(store.fail(&lease, &Failure::default())).unwrap();
    mismatch();
    acquire(&store, &of("a"));
    clock.advance(LEASE);
    mismatch();
    // One that names no fingerprint may go on, and does not wipe out the first one's.
    let lease = acquire(&store, &ask());
    mismatch();
    ready(store.complete(&lease, &done())).unwrap();
    mismatch();
}

/// A result over the limit is refused whole before it is stored; withheld, it is final: no repeat runs again, and none
/// gets a cut or an empty result for the whole one.
#[test]
fn pitfall_25_result_over_the_limit() {
    let store = MemoryStore::builder().outcome_limit(100).build();
    let lease = acquire(&store, &ask());
    let large = Outcome::new(200, vec![1; 101]);
    assert_eq!(ready(store.complete(&lease, &large)).unwrap_err().kind(), ErrorKind::InvalidInput);
    assert_eq!(record(&store).state, State::InProgress);
    ready(store.complete(&lease, &Outcome::withheld(200, Withheld::TooLarge))).unwrap();
    let Reservation::Completed(record) = answer(&store, &ask()) else { panic!() };
    let outcome = record.outcome().unwrap();
    assert_eq!((outcome.code, &outcome.body), (200, &Body::Withheld(Withheld::TooLarge)));
    // "Withheld" is not the same result as an empty one.
    assert_eq!(ready(store.complete(&lease, &Outcome::new(200, ""))).unwrap_err().kind(), ErrorKind::AlreadyCompleted);
}

/// Bodies and header values are bytes: binary, cut UTF-8, NUL and nothing at all come back bit for bit.
#[test]
fn pitfall_26_bodies_stored_as_text() {
    let all: Vec<u8> = (0..=u8::MAX).collect();
    for (number, body) in [&all[..], b"", b"\0", b"\xe6\x97", b"\xff\xfe\0\0"].into_iter().enumerate() {
        let Bench { store, .. } = bench();
        let outcome = Outcome::new(number as u16, body.to_vec()).with_header("x", body.to_vec()).with_header("x", "");
        ready(store.complete(&acquire(&store, &ask()), &outcome)).unwrap();
        let Reservation::Completed(record) = answer(&store, &ask()) else { panic!() };
        let Body::Stored(replayed) = &record.outcome().unwrap().body else { panic!() };
        assert_eq!(&replayed[..], body);
        assert_eq!(record.outcome().unwrap(), &outcome);
        let decoded = codec::decode(&key(), codec::encode(&record).into(), record.read_at).unwrap();
        assert_eq!(decoded.outcome(), Some(&outcome));
    }
}

/// Two orders that look the same under two keys are two orders: a fingerprint never conflicts on its own.
#[test]
fn pitfall_37_same_body_under_another_key() {
    let Bench { store, .. } = bench();
    let same = Fingerprint::of("one coffee");
    for id in ["order-1", "order-2"] {
        let request = Reserve::new(Key::new("t", id).unwrap()).with_fingerprint(same);
        ready(store.complete(&acquire(&store, &request), &done())).unwrap();
    }
    // And one key in two scopes as well.
    let request = Reserve::new(Key::new("u", "order-1").unwrap()).with_fingerprint(same);
    assert_eq!(acquire(&store, &request).attempt, 1);
}
