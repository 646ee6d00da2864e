//! Keys and values, without a server and without the client library.
#![allow(clippy::unwrap_used, dead_code, unreachable_pub, reason = "tests of a part of the library's own files")]

#[path = "../src/keys.rs"]
mod keys;
#[path = "../src/value.rs"]
mod value;

use std::time::{Duration, SystemTime};

use foundationdb_tuple::{Subspace, unpack};
use idem_core::decision::{Change, Decision, complete, decide};
use idem_core::{Key, Outcome, Record, Reserve};
use keys::{DAY, Keys, day, piece, pieces};
use proptest::prelude::*;
use value::{PIECE, ValueError, further, join, split};

fn now() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000)
}

fn record(body: usize) -> Record {
    let request = Reserve::new(Key::new("scope", "id").unwrap());
    let Decision::Acquire(mut record) = decide(None, &request, now()) else { unreachable!() };
    let outcome = Outcome::new(200, (0..body).map(|at| at as u8).collect::<Vec<_>>());
    let lease = record.lease();
    assert_eq!(complete(Some(&mut record), &lease, &outcome, now()), Ok(Change::Write));
    record
}

fn joined(record: &Record, first: &[u8], pieces: &[Vec<u8>]) -> Result<Record, ValueError> {
    join(&record.key, first, pieces.iter().map(Vec::as_slice), now())
}

#[test]
fn the_keys_are_these() {
    let keys = Keys::new(&Subspace::from("idem"));
    let key = Key::new("tenant-7", "order-42").unwrap();
    let place = keys.record(19_675, &key);
    let tuple: (String, u32, String, u64, String, String) = unpack(&place).unwrap();
    let expected = ("idem", 1, "records", 19_675, "tenant-7", "order-42");
    assert_eq!((&*tuple.0, tuple.1, &*tuple.2, tuple.3, &*tuple.4, &*tuple.5), expected);
    let settings: (String, u32, String) = unpack(keys.settings()).unwrap();
    assert_eq!((&*settings.0, settings.1, &*settings.2), ("idem", 1, "settings"));
}

#[test]
fn a_days_range_holds_its_records_and_their_pieces_and_no_others() {
    let keys = Keys::new(&Subspace::from_bytes(b"x".to_vec()));
    let within = |place: &[u8], before: u64| {
        let (begin, end) = keys.before(before);
        *begin <= *place && *place < *end
    };
    for at in [0, 1, 255, 256, 65_535, 65_536, 19_675] {
        for key in [Key::new("", "a").unwrap(), Key::new(&"s".repeat(64), &"\u{10ffff}".repeat(63)).unwrap()] {
            let place = keys.record(at, &key);
            for place in [place.clone(), piece(&place, 1), piece(&place, 94)] {
                assert!(within(&place, at + 1), "{at}");
                assert!(!within(&place, at), "{at}");
            }
        }
    }
    let (begin, end) = keys.before(u64::MAX);
    assert!(!(*begin <= *keys.settings() && *keys.settings() < *end), "a purge removes the settings");
}

/// "a" + "bc" and "ab" + "c" are two keys, and the pieces of one are nobody else's.
#[test]
fn the_places_of_two_keys_do_not_meet() {
    let keys = Keys::new(&Subspace::from("idem"));
    let ids = [("a", "bc"), ("ab", "c"), ("", "abc"), ("a", "b"), ("a", "b\u{1}".trim_end_matches('\u{1}'))];
    for (scope, id) in ids {
        let place = keys.record(1, &Key::new(scope, id).unwrap());
        let (begin, end) = pieces(&place);
        for (other_scope, other_id) in ids {
            let other = keys.record(1, &Key::new(other_scope, other_id).unwrap());
            assert_eq!(place == other, (scope, id) == (other_scope, other_id));
            assert!(!(begin <= other && other < end));
        }
        let own = piece(&place, 94);
        assert!(begin <= own && own < end);
    }
}

#[test]
fn a_day_is_a_day_of_the_epoch() {
    let at = |seconds| day(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds));
    assert_eq!([at(0), at(DAY - 1), at(DAY), at(2 * DAY)], [0, 0, 1, 2]);
    assert_eq!(day(SystemTime::UNIX_EPOCH - Duration::from_secs(1)), 0);
}

#[test]
fn a_body_of_any_size_comes_back_and_no_value_is_too_large() {
    for body in [0, 1, 89_999, 90_000, 90_001, 100_001, 2 * PIECE, 8 * 1024 * 1024] {
        let record = record(body);
        let values = split(&record);
        assert_eq!(further(&values.first), Ok(values.further.len()));
        for value in values.further.iter().chain([&values.first]) {
            assert!(value.len() <= 100_000, "{body}");
        }
        let mut expected = record.clone();
        expected.read_at = now();
        assert_eq!(joined(&record, &values.first, &values.further), Ok(expected), "{body}");
    }
}

#[test]
fn a_piece_that_is_missing_or_too_much_or_of_another_length_is_an_error() {
    let record = record(300_000);
    let values = split(&record);
    let (first, further) = (&values.first, &values.further);
    assert_eq!(further.len(), 3);
    assert_eq!(joined(&record, first, &further[1..]), Err(ValueError::Pieces { found: 2, wanted: 3 }));
    let more = [&further[..], &[b"more".to_vec()]].concat();
    assert_eq!(joined(&record, first, &more), Err(ValueError::Pieces { found: 4, wanted: 3 }));
    for at in 0..3 {
        let mut shorter = further.clone();
        shorter[at].pop();
        assert!(joined(&record, first, &shorter).is_err(), "{at}");
        let mut empty = further.clone();
        empty[at].clear();
        assert!(joined(&record, first, &empty).is_err(), "{at}");
    }
    assert_eq!(joined(&record, &[], further), Err(ValueError::Version));
    assert_eq!(joined(&record, &[1], further), Err(ValueError::Version));
    assert_eq!(joined(&record, &[2, 3, 1], further), Err(ValueError::Version));
}

#[test]
fn headers_count_as_bytes() {
    let mut record = record(10);
    let outcome =
        (0..200).fold(Outcome::new(200, "body"), |outcome, _| outcome.with_header("x-header", vec![b'v'; 900]));
    record.state = idem_core::State::Completed(outcome);
    let values = split(&record);
    assert!(!values.further.is_empty());
    assert!(joined(&record, &values.first, &values.further).is_ok());
}

proptest! {
    #[test]
    fn what_is_stored_by_somebody_else_is_an_error_and_no_panic(
        first in proptest::collection::vec(any::<u8>(), 0..300),
        pieces in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..50), 0..3),
    ) {
        let key = Key::new("scope", "id").unwrap();
        let _ = join(&key, &first, pieces.iter().map(Vec::as_slice), now());
    }
}
