//! The kit on itself: it passes what is right, and catches what is wrong by the case named for it.

mod stores;

use idem_testkit::broken::{Broken, Fault};
use idem_testkit::{case_names, run_disturbed_histories, run_histories, run_one};
use stores::{Memory, NoisyMemory};

/// Every case twice over: a case that failed here would be wrong itself.
#[test]
fn a_sound_store_passes_every_case() {
    for name in case_names() {
        run_one(&Broken(None), name).unwrap_or_else(|report| panic!("{report}"));
    }
}

#[test]
fn every_broken_store_fails_the_case_named_for_it() {
    assert!(Fault::ALL.len() >= 15);
    let mut uncaught = Vec::new();
    for fault in Fault::ALL {
        match run_one(&Broken(Some(*fault)), fault.caught_by()) {
            Ok(()) => uncaught.push(format!("{fault:?} passed {}", fault.caught_by())),
            Err(report) => {
                assert_eq!(report.case, fault.caught_by());
                assert!(report.store.contains(&format!("{fault:?}")), "{report}");
                assert!(!report.operations.is_empty(), "no operations: {report}");
                println!("{fault:?}: {}", report.found);
            }
        }
    }
    assert!(uncaught.is_empty(), "{uncaught:#?}");
}

#[test]
fn every_case_is_failed_by_some_broken_store() {
    let named: Vec<_> = Fault::ALL.iter().map(|fault| fault.caught_by()).collect();
    let toothless: Vec<_> = case_names()
        // The others are failed by a store of their own.
        .filter(|name| !named.contains(name))
        .filter(|name| Fault::ALL.iter().all(|fault| run_one(&Broken(Some(*fault)), name).is_ok()))
        .collect();
    assert!(toothless.is_empty(), "no broken store fails {toothless:?}");
}

#[test]
fn a_correct_store_on_a_bad_network_never_fails() {
    for round in 0..3 {
        for name in case_names() {
            match run_one(&NoisyMemory, name) {
                Err(report) if !report.found.contains("the harness lacks") => panic!("round {round}: {report}"),
                _ => {}
            }
        }
    }
    run_histories(&NoisyMemory, 0..300).unwrap_or_else(|report| panic!("{report}"));
}

#[test]
fn a_thousand_histories_on_the_in_memory_store_are_legal() {
    assert_eq!(run_histories(&Memory, 0..1_000).unwrap_or_else(|report| panic!("{report}")), 1_000);
}

/// Without any case named for them.
#[test]
fn histories_alone_find_broken_stores_within_a_hundred_seeds() {
    let faults = [
        Fault::NotSelfRecognising,
        Fault::NoFencing,
        Fault::FailNotFenced,
        Fault::FingerprintLostAtComplete,
        Fault::MismatchOnlyWhenCompleted,
        Fault::OriginForgotten,
        Fault::LateReserveRevives,
        Fault::LateCompleteRefused,
        Fault::CompleteOverwrites,
        Fault::CompleteNotRepeatable,
        Fault::FailDeletes,
        Fault::AttemptNotCounted,
        Fault::RefuseIgnored,
        Fault::LeaseInWrongUnit,
        Fault::OneDuration,
        Fault::ExpiredVisible,
        Fault::TwoSteps,
        Fault::CheckThenWrite,
    ];
    for fault in faults {
        let report = run_histories(&Broken(Some(fault)), 0..100);
        let report = report.expect_err(&format!("100 histories on a store with {fault:?} were all legal"));
        println!("{fault:?} found by seed {}", report.seed);
        assert!(report.to_string().contains(&format!("IDEM_SEED={}", report.seed)));
    }
}

/// What only shows while the store is disturbed.
#[test]
fn histories_under_disturbance_find_broken_stores_and_pass_a_sound_one() {
    let found = |fault| run_disturbed_histories(&Broken(fault), 40);
    assert_eq!(found(None).unwrap_or_else(|report| panic!("{report}")), 40);
    for fault in [
        Fault::FailsOverToThePast,
        Fault::AcknowledgesEarly,
        Fault::ErrorAsAbsent,
        Fault::LostReplyIsRetryable,
        Fault::TroubleIsPermanent,
        Fault::NotSelfRecognising,
    ] {
        let report = found(Some(fault)).expect_err(&format!("40 histories on a store with {fault:?} were all legal"));
        println!("{fault:?} found by seed {}", report.seed);
    }
    let report = run_disturbed_histories(&Memory, 1).expect_err("a harness that cannot disturb");
    assert!(report.found.contains("disturb"), "{report}");
}
