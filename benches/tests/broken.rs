//! The benchmarks fail with a broken store, and not with a sound one.
#![allow(missing_docs, clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::sync::Arc;
use std::time::Duration;

use idem_benches::load::mix::Mix;
use idem_benches::load::report::Step;
use idem_benches::load::run::{Plan, run};
use idem_benches::subject::Store;
use idem_benches::workloads::{WORKLOADS, Workload};
use idem_core::KeyStore;
use idem_testkit::Harness;
use idem_testkit::broken::{Broken, Fault};
use tokio::runtime::Runtime;

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

fn store(runtime: &Runtime, fault: Option<Fault>) -> Arc<dyn KeyStore> {
    runtime.block_on(Broken(fault).build()).unwrap().store()
}

fn load(fault: Option<Fault>, zipf: Option<f64>) -> Step {
    let runtime = runtime();
    let plan = Plan {
        rate: 2_000.0,
        time: Duration::from_millis(500),
        warm_up: Duration::from_millis(100),
        queue: 10_000,
        mix: Mix { repeats: 0.2, duplicates: 0.1, failures: 0.1, zipf, keys: 200, body: 64 },
        number: 1,
        preloaded: 0,
    };
    let effects = Arc::new(plan.effects());
    run(runtime.handle(), &store(&runtime, fault), &effects, &plan, None, &[], &mut |_| ()).unwrap()
}

#[test]
fn a_load_on_a_sound_store_finds_nothing_wrong() {
    let step = load(None, None);
    assert_eq!((step.faults, &step.shown_faults, step.errors()), (0, &Vec::new(), 0));
    assert_eq!((step.answered, step.refused, step.unanswered), (1_000, 0, 0));
    assert!(step.replayed.count > 100 && step.in_flight.count + step.replayed.count < 900, "{step:?}");
    assert!(step.effects > 500 && step.failed_on_purpose > 20 && step.audited == step.effects, "{step:?}");
}

#[test]
fn a_load_by_zipfs_law_on_a_sound_store_finds_nothing_wrong() {
    let step = load(None, Some(1.1));
    assert_eq!((step.faults, &step.shown_faults, step.errors()), (0, &Vec::new(), 0));
    assert!(step.replayed.count > 500 && step.effects <= 200, "{step:?}");
}

#[test]
fn a_load_on_a_broken_store_finds_it_out() {
    for fault in [
        Fault::DuplicateIsError,
        Fault::ReplaysOnce,
        Fault::SelfByFingerprint,
        Fault::FingerprintIsKey,
        Fault::FailHolds,
        Fault::BatchOutOfOrder,
    ] {
        assert!(load(Some(fault), None).faults > 0, "{fault:?}");
    }
}

/// Whether two callers meet between the look and the write is up to the scheduler: in one short load they need not.
#[test]
fn loads_on_a_store_that_looks_before_it_writes_find_it_out() {
    assert!((0..50).any(|_| load(Some(Fault::CheckThenWrite), None).faults > 0));
}

#[test]
fn too_many_at_once_are_refused_and_counted() {
    let runtime = runtime();
    let mix = Mix { repeats: 0.0, duplicates: 0.0, failures: 0.0, zipf: None, keys: 1, body: 64 };
    let (time, warm_up) = (Duration::from_millis(200), Duration::ZERO);
    // They are handed over faster than one at a time is answered.
    let plan = Plan { rate: 100_000.0, time, warm_up, queue: 1, mix, number: 1, preloaded: 0 };
    let effects = Arc::new(plan.effects());
    let step = run(runtime.handle(), &store(&runtime, None), &effects, &plan, None, &[], &mut |_| ()).unwrap();
    assert!(step.refused > 0 && !step.is_held(1_000.0), "{step:?}");
    assert_eq!((step.answered + step.refused, step.faults), (20_000, 0));
}

/// The first workload that fails, and how.
fn failing(fault: Option<Fault>) -> Option<(Workload, String)> {
    let runtime = runtime();
    let subject = Arc::new(Store::new(store(&runtime, fault)));
    // Its clock stands still, so nothing expires that could be purged.
    WORKLOADS.iter().filter(|workload| !workload.name.starts_with("purge")).find_map(|workload| {
        let measured = runtime.block_on(async {
            match workload.prepare(subject.clone()).await? {
                Some(prepared) => prepared.time(20).await,
                None => Ok(None),
            }
        });
        measured.err().map(|error| (*workload, error.to_string()))
    })
}

#[test]
fn workloads_on_a_broken_store_fail() {
    assert_eq!(failing(None), None);
    // As with the load, callers need not meet at once.
    assert!((0..50).any(|_| failing(Some(Fault::CheckThenWrite)).is_some()));
    for fault in [
        Fault::DuplicateIsError,
        Fault::SelfByFingerprint,
        Fault::FingerprintIsKey,
        Fault::MismatchNotWhenCompleted,
        Fault::FingerprintLostAtComplete,
        Fault::RetryAfterZero,
        Fault::BodyAsText,
        Fault::BodyCut,
    ] {
        assert!(failing(Some(fault)).is_some(), "{fault:?}");
    }
}
