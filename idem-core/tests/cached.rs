//! The near-cache: what it answers, for how long, and what it must not know.
#![allow(clippy::unwrap_used, clippy::panic)]

mod doubles;

use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use doubles::{Fault, Wire, ready};
use idem_core::clock::{Clock, ManualClock};
use idem_core::{
    Body, Cached, ErrorKind, Failure, Fingerprint, Key, KeyStore, Lease, MemoryStore, Outcome, PurgeBudget, Record,
    Reservation, Reserve, State,
};

const NS: Duration = Duration::from_nanos(1);
const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);
const NONE: [&str; 0] = [];

type Store = Cached<Wire<MemoryStore>>;

/// The store's clock, the cache's, and the store.
fn apart(by: Duration) -> (Arc<ManualClock>, Arc<ManualClock>, Store) {
    let store_clock = Arc::new(ManualClock::default());
    let cache_clock = Arc::new(ManualClock::new(store_clock.now() + by));
    let store = Wire::new(MemoryStore::builder().clock(store_clock.clone()).build());
    let cached = Cached::builder(store).clock(cache_clock.clone()).build();
    (store_clock, cache_clock, cached)
}

fn shared() -> (Arc<ManualClock>, Store) {
    let clock = Arc::new(ManualClock::default());
    let store = Wire::new(MemoryStore::builder().clock(clock.clone()).build());
    (clock.clone(), Cached::builder(store).clock(clock).build())
}

fn key(number: usize) -> Key {
    Key::new("t", &format!("k{number}")).unwrap()
}

fn ask(number: usize) -> Reserve {
    Reserve::new(key(number)).with_lease(SECOND).with_retention(MINUTE)
}

fn acquire(store: &impl KeyStore, request: &Reserve) -> Lease {
    match ready(store.reserve(request)).unwrap() {
        Reservation::Acquired(lease) => lease,
        other => panic!("{other:?}"),
    }
}

fn replay(store: &impl KeyStore, request: &Reserve) -> Record {
    match ready(store.reserve(request)).unwrap() {
        Reservation::Completed(record) => record,
        other => panic!("{other:?}"),
    }
}

/// A completed key, known to the store and not to the cache.
fn complete(store: &Store, number: usize) {
    let inner = store.inner();
    ready(inner.complete(&acquire(inner, &ask(number)), &Outcome::new(200, number.to_string()))).unwrap();
    inner.trips();
}

/// A completed key that the cache has.
fn warm(store: &Store, number: usize) {
    complete(store, number);
    replay(store, &ask(number));
    assert_eq!(store.inner().trips(), ["reserve"]);
}

#[test]
fn repeats_of_a_completed_record_make_one_round_trip() {
    let (_, store) = shared();
    complete(&store, 1);
    let first = replay(&store, &ask(1));
    assert_eq!(store.inner().trips(), ["reserve"]);
    for _ in 0..5 {
        assert_eq!(replay(&store, &ask(1)), first);
        assert_eq!(ready(store.fetch(&key(1))).unwrap().as_ref(), Some(&first));
    }
    assert_eq!(store.inner().trips(), NONE);

    // A fetch fills it as well.
    complete(&store, 2);
    let fetched = ready(store.fetch(&key(2))).unwrap().unwrap();
    assert_eq!(store.inner().trips(), ["fetch"]);
    assert_eq!(replay(&store, &ask(2)), fetched);
    assert_eq!(store.inner().trips(), NONE);
}

#[test]
fn nothing_but_completed_records_is_kept() {
    let (clock, store) = shared();
    let lease = acquire(&store, &ask(1));
    for _ in 0..2 {
        assert!(matches!(ready(store.reserve(&ask(1))).unwrap(), Reservation::InProgress { .. }));
        assert_eq!(ready(store.fetch(&key(1))).unwrap().unwrap().state, State::InProgress);
        assert_eq!(ready(store.fetch(&key(2))).unwrap(), None);
    }
    assert_eq!(store.inner().trips().len(), 7, "each call asked the store");
    clock.advance(SECOND);
    let refuse = ask(1).with_on_abandoned(idem_core::OnAbandoned::Refuse);
    assert!(matches!(ready(store.reserve(&refuse)).unwrap(), Reservation::Abandoned(_)));
    ready(store.fail(&lease, &Failure::default())).unwrap();
    assert!(matches!(ready(store.fetch(&key(1))).unwrap().unwrap().state, State::Failed(_)));
    acquire(&store, &ask(1));
    assert_eq!(store.bytes(), 0);
}

#[test]
fn neither_a_completion_nor_its_failure_fills_it() {
    let (_, store) = shared();
    let lease = acquire(&store, &ask(1));
    for fault in [Fault::Request, Fault::Reply] {
        store.inner().lose(fault);
        assert_eq!(ready(store.complete(&lease, &Outcome::new(200, "a"))).unwrap_err().kind(), ErrorKind::Timeout);
        assert_eq!(store.bytes(), 0);
    }
    ready(store.complete(&lease, &Outcome::new(200, "a"))).unwrap();
    assert_eq!(store.bytes(), 0);
    // Nor does an answer that never arrived.
    store.inner().lose(Fault::Reply);
    ready(store.reserve(&ask(1))).unwrap_err();
    assert_eq!(store.bytes(), 0);
    replay(&store, &ask(1));
    assert!(store.bytes() > 0);
}

#[test]
fn the_cached_path_tells_a_mismatch() {
    let (_, store) = shared();
    let of = |what: Option<&str>| ask(1).with_fingerprint(what.map(Fingerprint::of));
    ready(store.complete(&acquire(&store, &of(Some("a"))), &Outcome::new(200, ""))).unwrap();
    // A mismatch answered by the store fills nothing.
    assert_eq!(ready(store.reserve(&of(Some("b")))).unwrap(), Reservation::Mismatch);
    assert_eq!(store.bytes(), 0);
    replay(&store, &of(None));
    store.inner().trips();
    for _ in 0..2 {
        assert_eq!(ready(store.reserve(&of(Some("b")))).unwrap(), Reservation::Mismatch);
        assert_eq!(ready(store.reserve_many(&[of(Some("b"))])).remove(0).unwrap(), Reservation::Mismatch);
        replay(&store, &of(Some("a")));
        replay(&store, &of(None));
    }
    assert_eq!(store.inner().trips(), NONE);
}

/// What the store refuses is refused although the cache knows the key.
#[test]
fn bad_requests_go_to_the_store() {
    let (_, store) = shared();
    warm(&store, 1);
    let bad = ask(1).with_lease(Duration::ZERO);
    assert_eq!(ready(store.reserve(&bad)).unwrap_err().kind(), ErrorKind::InvalidInput);
    assert_eq!(ready(store.reserve_many(&[bad])).remove(0).unwrap_err().kind(), ErrorKind::InvalidInput);
    assert_eq!(store.inner().trips(), ["reserve", "reserve_many"]);
}

#[test]
fn an_entry_ends_exactly_with_the_record() {
    let (clock, store) = shared();
    complete(&store, 1);
    clock.advance(10 * SECOND);
    assert_eq!(replay(&store, &ask(1)).expires_in(), 50 * SECOND);
    store.inner().trips();
    clock.advance(50 * SECOND - NS);
    assert_eq!(replay(&store, &ask(1)).expires_in(), NS);
    assert_eq!(ready(store.fetch(&key(1))).unwrap().unwrap().expires_in(), NS);
    assert_eq!(store.inner().trips(), NONE);
    clock.advance(NS);
    assert_eq!(ready(store.fetch(&key(1))).unwrap(), None);
    assert_eq!(acquire(&store, &ask(1)).attempt, 1);
    assert_eq!(store.inner().trips(), ["fetch", "reserve"]);
}

/// Hours between the clocks, either way, change nothing: only durations are counted.
#[test]
fn the_two_clocks_are_never_compared() {
    for (store_ahead, by) in [(false, 100 * 60 * MINUTE), (true, 100 * 60 * MINUTE)] {
        let (store_clock, cache_clock, store) = if store_ahead {
            let (store_clock, cache_clock, store) = apart(Duration::ZERO);
            store_clock.advance(by);
            (store_clock, cache_clock, store)
        } else {
            apart(by)
        };
        complete(&store, 1);
        let first = replay(&store, &ask(1));
        assert_eq!(first.expires_in(), MINUTE);
        store.inner().trips();

        cache_clock.advance(MINUTE - NS);
        store_clock.advance(MINUTE - NS);
        let last = replay(&store, &ask(1));
        assert_eq!((last.expires_in(), last.read_at), (NS, store_clock.now()), "it has aged by what it was held");
        assert_eq!(Record { read_at: first.read_at, ..last }, first);
        assert_eq!(store.inner().trips(), NONE);
        cache_clock.advance(NS);
        store_clock.advance(NS);
        acquire(&store, &ask(1));
    }
}

/// The time that the answer took is taken off: it is not known where in it the store looked at its clock.
#[test]
fn an_entry_counts_from_before_the_call_was_sent() {
    let (_, cache_clock, store) = apart(Duration::ZERO);
    complete(&store, 1);
    let request = ask(1);
    let slow = |seconds: u32| {
        store.inner().lose(Fault::Late);
        let mut call = Box::pin(store.reserve(&request));
        let mut context = Context::from_waker(Waker::noop());
        assert!(call.as_mut().poll(&mut context).is_pending());
        cache_clock.advance(SECOND * seconds);
        assert!(call.as_mut().poll(&mut context).is_ready());
        store.inner().trips();
    };
    // As long as the record lives: nothing may be kept.
    slow(60);
    assert_eq!(store.bytes(), 0);
    slow(40);
    assert_eq!(replay(&store, &ask(1)).expires_in(), 20 * SECOND);
    cache_clock.advance(20 * SECOND - NS);
    replay(&store, &ask(1));
    assert_eq!(store.inner().trips(), NONE);
    cache_clock.advance(NS);
    replay(&store, &ask(1));
    assert_eq!(store.inner().trips(), ["reserve"]);
}

#[test]
fn an_entry_does_not_count_when_the_clock_went_back() {
    let (_, cache_clock, store) = apart(MINUTE);
    warm(&store, 1);
    let then = cache_clock.now();
    cache_clock.set(then - NS);
    replay(&store, &ask(1));
    assert_eq!(store.inner().trips(), ["reserve"]);
    replay(&store, &ask(1));
    assert_eq!(store.inner().trips(), NONE, "kept anew, from the new time on");
}

/// A record whose key has come to a new life is found in its new form, at once.
#[test]
fn a_new_record_of_the_same_key_replaces_the_old() {
    let (clock, store) = shared();
    warm(&store, 1);
    clock.advance(MINUTE);
    ready(store.complete(&acquire(&store, &ask(1)), &Outcome::new(201, "new"))).unwrap();
    assert_eq!(replay(&store, &ask(1)).outcome(), Some(&Outcome::new(201, "new")));
    store.inner().trips();
    clock.advance(MINUTE - NS);
    assert_eq!(replay(&store, &ask(1)).outcome(), Some(&Outcome::new(201, "new")));
    assert_eq!(store.inner().trips(), NONE);
}

#[test]
fn a_batch_forwards_only_what_is_not_known_and_keeps_the_order() {
    let (_, store) = shared();
    (0..10).filter(|number| number % 2 == 0).for_each(|number| warm(&store, number));
    complete(&store, 11);
    let requests: Vec<Reserve> = (0..12).map(ask).collect();
    let answers = ready(store.reserve_many(&requests));
    assert_eq!(answers.len(), 12);
    for (number, answer) in answers.iter().enumerate() {
        match answer.as_ref().unwrap() {
            Reservation::Completed(record) => {
                assert!(number % 2 == 0 && number < 10 || number == 11, "{number}");
                assert_eq!(record.outcome(), Some(&Outcome::new(200, number.to_string())));
            }
            Reservation::Acquired(lease) => {
                assert!(number % 2 == 1 || number == 10, "{number}");
                assert_eq!((&lease.key, lease.token), (&key(number), requests[number].token));
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(store.inner().trips(), ["reserve_many"]);
    // The batch filled it with 11; nothing is left to ask for.
    let known: Vec<Reserve> = [0, 11, 2, 0].map(ask).to_vec();
    assert!(ready(store.reserve_many(&known)).iter().all(|answer| matches!(answer, Ok(Reservation::Completed(_)))));
    assert!(ready(store.reserve_many(&[])).is_empty());
    assert_eq!(store.inner().trips(), NONE);

    let calls: Vec<(Lease, Outcome)> = answers
        .into_iter()
        .filter_map(|answer| match answer {
            Ok(Reservation::Acquired(lease)) => Some((lease, Outcome::new(200, "done"))),
            _ => None,
        })
        .collect();
    assert!(ready(store.complete_many(&calls)).iter().all(Result::is_ok));
    assert_eq!(store.inner().trips(), ["complete_many"]);
}

#[test]
fn every_other_call_goes_to_the_store() {
    let (_, store) = shared();
    let lease = acquire(&store, &ask(1));
    ready(store.renew(&lease, MINUTE)).unwrap();
    ready(store.fail(&lease, &Failure::default())).unwrap();
    ready(store.complete(&acquire(&store, &ask(1)), &Outcome::new(200, ""))).unwrap();
    ready(store.purge_expired(PurgeBudget::default())).unwrap();
    assert_eq!(store.inner().trips(), ["reserve", "renew", "fail", "reserve", "complete", "purge"]);
    assert_eq!(store.capabilities(), store.inner().capabilities());
    assert_eq!(store.to_string(), "cached memory");
    assert!(format!("{store:?}").starts_with("Cached {"));
    // A late call on a key that the cache knows is refused by the store, and shakes nothing.
    replay(&store, &ask(1));
    assert_eq!(ready(store.complete(&lease, &Outcome::new(500, ""))).unwrap_err().kind(), ErrorKind::LeaseLost);
    assert_eq!(replay(&store, &ask(1)).outcome().unwrap().code, 200);
}

/// A caller that goes away while the answer is under way leaves the cache empty or right.
#[test]
fn a_cancelled_call_leaves_nothing_wrong() {
    let (clock, store) = shared();
    complete(&store, 1);
    let request = ask(1);
    store.inner().lose(Fault::Late);
    {
        let mut call = Box::pin(store.reserve(&request));
        assert!(call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    }
    assert_eq!(store.bytes(), 0);
    assert_eq!(replay(&store, &ask(1)).expires_in(), MINUTE);
    clock.advance(MINUTE);
    acquire(&store, &ask(1));
}

#[test]
fn it_is_bounded_in_bytes() {
    const BODY: usize = 10_000;
    const MOST: u64 = 200_000;
    let store = Cached::builder(Wire::new(MemoryStore::new())).max_bytes(MOST).build();
    for number in 0..200 {
        let lease = acquire(&store, &ask(number));
        ready(store.complete(&lease, &Outcome::new(200, vec![0; BODY]))).unwrap();
        replay(&store, &ask(number));
        assert!(store.bytes() <= MOST);
    }
    // It holds as many as fit, and counts their bodies.
    let held = store.bytes();
    assert!(held > MOST - 2 * BODY as u64, "{held}");
    store.inner().trips();
    (0..200).for_each(|number| drop(replay(&store, &ask(number))));
    let missed = store.inner().trips().len();
    assert!((150..200).contains(&missed), "{missed} of 200 asked the store");

    // One that is larger than the whole is answered and not kept.
    let lease = acquire(&store, &ask(1000));
    ready(store.complete(&lease, &Outcome::new(200, vec![0; MOST as usize]))).unwrap();
    replay(&store, &ask(1000));
    assert!(store.bytes() <= MOST);
}

/// What has expired by the process's clock leaves the cache without being asked for.
#[test]
fn entries_that_are_over_free_their_memory() {
    let store = Cached::new(MemoryStore::new());
    let request = ask(1).with_lease(Duration::from_millis(1)).with_retention(Duration::from_millis(300));
    ready(store.complete(&acquire(&store, &request), &Outcome::new(200, ""))).unwrap();
    ready(store.reserve(&request)).unwrap();
    let deadline = std::time::Instant::now() + MINUTE;
    while store.bytes() > 0 {
        assert!(std::time::Instant::now() < deadline, "still there");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A replay from the cache shares the body that the store gave.
#[test]
fn a_cached_replay_copies_no_body() {
    let (_, store) = shared();
    ready(store.complete(&acquire(&store, &ask(1)), &Outcome::new(200, vec![0; 50_000]))).unwrap();
    let body = |record: Record| match &record.outcome().unwrap().body {
        Body::Stored(bytes) => bytes.as_ptr(),
        Body::Withheld(_) => panic!(),
    };
    let stored = body(replay(&store, &ask(1)));
    assert_eq!(body(replay(&store, &ask(1))), stored);
}

/// Many callers at once, through records' ends: each key is run once in each of its lives, and no answer is of an
/// earlier life.
#[test]
fn concurrent_callers_see_one_result_per_life() {
    const THREADS: usize = 4;
    const KEYS: usize = 50;
    let (clock, store) = shared();
    for life in 0..10_usize {
        let start = std::sync::Barrier::new(THREADS);
        let runs: usize = std::thread::scope(|threads| {
            let work = || {
                start.wait();
                let mut runs = 0;
                for number in (0..KEYS).cycle().take(KEYS * 20) {
                    match ready(store.reserve(&ask(number))).unwrap() {
                        Reservation::Acquired(lease) => {
                            runs += 1;
                            ready(store.complete(&lease, &Outcome::new(life as u16, number.to_string()))).unwrap();
                        }
                        Reservation::Completed(record) => {
                            assert_eq!(record.outcome(), Some(&Outcome::new(life as u16, number.to_string())));
                        }
                        Reservation::InProgress { .. } => {}
                        other => panic!("{other:?}"),
                    }
                }
                runs
            };
            let threads: Vec<_> = (0..THREADS).map(|_| threads.spawn(work)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(runs, KEYS, "life {life}");
        clock.advance(MINUTE);
    }
}
