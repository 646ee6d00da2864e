//! What a replay costs in memory: the same for every size of body.
#![allow(clippy::unwrap_used, clippy::panic)]

mod doubles;

use allocation_counter::measure;
use doubles::ready;
use idem_core::{Body, Cached, Key, KeyStore, MemoryStore, Outcome, Reservation, Reserve};

/// Allocations and bytes of one replay, of a record with so large a body.
fn replay(store: &impl KeyStore, bytes: usize) -> (u64, u64) {
    let key = Key::new("t", &format!("body of {bytes}")).unwrap();
    let Reservation::Acquired(lease) = ready(store.reserve(&Reserve::new(key.clone()))).unwrap() else { panic!() };
    let outcome = Outcome::new(200, vec![1; bytes]).with_header("etag", vec![2; bytes / 10]);
    ready(store.complete(&lease, &outcome)).unwrap();
    let request = Reserve::new(key);
    // A first one, since a near-cache has still to be filled.
    let first = ready(store.reserve(&request)).unwrap();
    let mut answer = None;
    let counted = measure(|| answer = Some(ready(store.reserve(&request)).unwrap()));

    // And the body is the stored one itself.
    for reservation in [&first, answer.as_ref().unwrap()] {
        let Reservation::Completed(record) = reservation else { panic!() };
        let (Body::Stored(replayed), Body::Stored(given)) = (&record.outcome().unwrap().body, &outcome.body) else {
            panic!()
        };
        assert_eq!((replayed.as_ptr(), replayed.len()), (given.as_ptr(), bytes));
    }
    (counted.count_total, counted.bytes_total)
}

#[test]
fn a_replay_allocates_the_same_whatever_the_size_of_the_body() {
    let store = MemoryStore::new();
    let cached = Cached::new(MemoryStore::new());
    for bytes in [1, 256, 10_000, 900_000] {
        // The future's box alone.
        let (count, size) = replay(&store, bytes);
        assert!(count == 1 && size < 100, "{count} allocations of {size} bytes for a body of {bytes}");
        // The cache may write down that the entry was used.
        let (count, size) = replay(&cached, bytes);
        assert!(count <= 3 && size < 4_000, "cached: {count} allocations of {size} bytes for a body of {bytes}");
    }
}

#[test]
fn a_key_needs_no_allocation_where_it_is_short_and_few_where_it_is_long() {
    let (short, long) = ("8e03978e-40d5-43dd-bc93-6894a57f9324", "k".repeat(200));
    for (scope, id, most) in [("", short, 0), ("a-tenant-of-25-bytes-name", short, 0), ("tenant-7", &long, 2)] {
        let counted = measure(|| drop(Key::new(scope, id).unwrap()));
        assert!(counted.count_total <= most, "{} allocations for {scope}/{id}", counted.count_total);
        let key = Key::new(scope, id).unwrap();
        assert_eq!(measure(|| drop(key.clone())).count_total, 0);
    }
}
