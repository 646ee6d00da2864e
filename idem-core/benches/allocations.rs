//! Allocations and memory of the in-memory store: `cargo bench -p idem-core --bench allocations`. Counts, not times.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use allocation_counter::{AllocationInfo, measure};
use idem_core::{Key, KeyStore, Lease, MemoryStore, Outcome, Reservation, Reserve};

const RECORDS: usize = 1_000_000;
const BODY: usize = 256;

fn ready<F: Future>(future: F) -> F::Output {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("the in-memory store waits"),
    }
}

fn key(number: usize) -> Key {
    Key::new("tenant-7", &format!("order-{number:016x}")).unwrap()
}

fn acquire(store: &MemoryStore, request: &Reserve) -> Lease {
    match ready(store.reserve(request)).unwrap() {
        Reservation::Acquired(lease) => lease,
        other => panic!("{other:?}"),
    }
}

fn show(what: &str, counted: &AllocationInfo, times: usize) {
    let each = |count: u64| count as f64 / times as f64;
    println!("{what:<46} {:>6.2} allocations, {:>6.0} bytes", each(counted.count_total), each(counted.bytes_total));
}

fn main() {
    const TIMES: usize = 10_000;
    let store = MemoryStore::new();
    // Made beforehand, so that what is counted is the store's.
    let requests: Vec<Reserve> = (0..TIMES).map(|number| Reserve::new(key(number))).collect();
    let outcomes: Vec<Outcome> = (0..TIMES).map(|_| Outcome::new(200, vec![7; BODY])).collect();
    let mut leases = Vec::with_capacity(TIMES);
    let reserve = measure(|| requests.iter().for_each(|request| leases.push(acquire(&store, request))));
    let complete = measure(|| {
        for (lease, outcome) in leases.iter().zip(&outcomes) {
            ready(store.complete(lease, outcome)).unwrap();
        }
    });
    let replay = measure(|| requests.iter().for_each(|request| drop(ready(store.reserve(request)).unwrap())));
    show("key", &measure(|| (0..TIMES).for_each(|_| drop(Key::new("tenant-7", "order-0123456789abcdef")))), TIMES);
    show("reserve of a new key, tables growing", &reserve, TIMES);
    show("complete", &complete, TIMES);
    show("replay of a completed key", &replay, TIMES);
    drop((requests, outcomes, leases));

    // The caller's side included: the key's text and the body belong to the record once the caller is gone.
    let mut full = None;
    let held = measure(|| {
        let store = MemoryStore::new();
        for number in 0..RECORDS {
            let lease = acquire(&store, &Reserve::new(key(number)));
            ready(store.complete(&lease, &Outcome::new(200, vec![7; BODY]))).unwrap();
        }
        full = Some(store);
    });
    let bytes = held.bytes_current as f64 / RECORDS as f64;
    println!("{RECORDS} records with keys of 30 bytes and bodies of {BODY} bytes hold {bytes:.0} bytes each");
    drop(full);
}
