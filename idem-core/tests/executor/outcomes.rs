//! Operations that make their own outcomes.

use std::time::Duration;

use idem_core::executor::{Attempt, Ending, Executor, OnPanic, Recovery, Run, Settlement};
use idem_core::{Body, ErrorKind, Failure, Operation, Outcome, State, Withheld};

use crate::support::{Effects, Fault, Faulty, key};

fn answer() -> Outcome {
    Outcome::new(201, vec![0, 0xff]).with_header("a", "1").with_header("a", vec![0x80])
}

#[tokio::test]
async fn an_outcome_is_stored_and_given_back_as_it_is() {
    let executor = Executor::new(Faulty::new());
    let first = executor.run_outcome(&key("k"), None, |_| async { Ending::complete("for the caller", answer()) }).await;
    let Run::Ended { value: "for the caller", attempt: 1, completed: true, recorded: Ok(()) } = first else {
        panic!("{first:?}");
    };
    let again = executor.run_outcome(&key("k"), None, |_| async { Ending::complete((), Outcome::new(9, "")) }).await;
    let Run::Stored { outcome, attempt: 1, replayed: true } = again else { panic!("{again:?}") };
    assert_eq!(outcome, answer());
}

#[tokio::test]
async fn one_that_fails_frees_the_key() {
    let store = Faulty::new();
    let executor = Executor::new(store.clone());
    let fail = |_| async { Ending::fail(7, Failure::truncated("busy")) };
    for number in 1..3 {
        let run = executor.run_outcome(&key("k"), None, fail).await;
        assert!(
            matches!(run, Run::Ended { value: 7, attempt, completed: false, recorded: Ok(()) } if attempt == number),
            "{run:?}"
        );
    }
    assert_eq!(store.record(&key("k")).await.unwrap().state, State::Failed(Failure::truncated("busy")));
}

#[tokio::test]
async fn one_over_the_limit_is_withheld_and_the_caller_gets_its_value() {
    let executor = Executor::new(Faulty::build(false, 10));
    assert_eq!(executor.outcome_limit(), 10);
    let operation = |_| async { Ending::complete("whole", Outcome::new(200, "eleven byte")) };
    let run = executor.run_outcome(&key("k"), None, operation).await;
    assert!(matches!(run, Run::Ended { value: "whole", completed: true, recorded: Ok(()), .. }), "{run:?}");
    let again = executor.run_outcome(&key("k"), None, operation).await;
    let Run::Stored { outcome, .. } = again else { panic!("{again:?}") };
    assert_eq!((outcome.code, outcome.body), (200, Body::Withheld(Withheld::TooLarge)));
}

/// The caller has its value, and knows that nothing is stored.
#[tokio::test(start_paused = true)]
async fn a_value_is_given_although_it_could_not_be_stored() {
    let store = Faulty::new();
    store.inject(Operation::Complete, &[], Fault::Refuse(ErrorKind::Unavailable));
    let run = Executor::new(store).run_outcome(&key("k"), None, |_| async { Ending::complete(7, answer()) }).await;
    let Run::Ended { value: 7, recorded: Err(error), .. } = run else { panic!("{run:?}") };
    assert_eq!(error.kind(), ErrorKind::Unavailable);
}

/// What is known of a store that fails: whether this call may hold the key.
#[tokio::test(start_paused = true)]
async fn a_failure_before_the_key_is_held_is_told_from_one_behind() {
    let effects = Effects::default();
    let run = async |store: std::sync::Arc<Faulty>| {
        let effects = effects.clone();
        let operation = move |_| async move { Ending::complete(effects.happen(), answer()) };
        Executor::new(store).run_outcome(&key("k"), None, operation).await
    };
    let store = Faulty::new();
    store.inject(Operation::Reserve, &[], Fault::Refuse(ErrorKind::Unavailable));
    assert!(matches!(run(store).await, Run::Unreserved(error) if error.kind() == ErrorKind::Unavailable));

    // The reserve was long on its way, so that its lease is renewed first, which fails.
    let store = Faulty::new();
    store.inject(Operation::Reserve, &[Fault::LoseReply, Fault::Hang], Fault::None);
    store.inject(Operation::Renew, &[], Fault::Refuse(ErrorKind::LeaseLost));
    let slow = run(store.clone()).await;
    match &slow {
        Run::Store(error) => assert_eq!(error.kind(), ErrorKind::LeaseLost),
        // Not long enough: then it has run.
        other => assert!(matches!(other, Run::Ended { .. }) && store.calls(Operation::Renew) == 0, "{other:?}"),
    }
}

/// The operation committed, got no answer, and says that it failed: what is committed is what the caller gets.
#[tokio::test]
async fn an_end_gives_way_to_what_turns_out_to_be_stored() {
    for settlement in [Settlement::Fail(Failure::default()), Settlement::Complete(Outcome::new(500, ""))] {
        let store = Faulty::new();
        let writer = store.clone();
        let operation = move |attempt: Attempt| async move {
            idem_core::KeyStore::complete(&writer.store, attempt.lease(), &answer()).await.unwrap();
            Ending { value: (), settlement }
        };
        let run = Executor::new(store).run_outcome(&key("k"), None, operation).await;
        let Run::Stored { outcome, attempt: 1, replayed: false } = run else { panic!("{run:?}") };
        assert_eq!(outcome, answer());
    }
}

#[tokio::test]
async fn an_operation_that_completed_its_key_is_believed() {
    for (code, believed) in [(201, true), (500, false)] {
        let store = Faulty::new();
        let writer = store.clone();
        let operation = move |attempt: Attempt| async move {
            idem_core::KeyStore::complete(&writer.store, attempt.lease(), &answer()).await.unwrap();
            attempt.mark_completed(answer());
            Ending::complete("value", Outcome::new(code, "of its own"))
        };
        let run = Executor::new(store.clone()).run_outcome(&key("k"), None, operation).await;
        match run {
            Run::Ended { value: "value", completed: true, recorded: Ok(()), .. } => assert!(believed),
            Run::Stored { outcome, replayed: false, .. } => assert!(!believed && outcome == answer()),
            other => panic!("{other:?}"),
        }
        assert_eq!(store.calls(Operation::Complete) + store.calls(Operation::Fail), 0);
    }
}

/// One that never ends is counted by its executor and by every sibling of it.
#[tokio::test(start_paused = true)]
async fn siblings_have_settings_of_their_own_and_one_count() {
    let executor = Executor::builder(Faulty::new()).lease(Duration::from_secs(9)).build().unwrap();
    let sibling = executor.sibling().on_abandoned(Recovery::Refuse).on_panic(OnPanic::Abandon).build().unwrap();
    assert_eq!((sibling.lease(), sibling.retention()), (Duration::from_secs(9), executor.retention()));
    assert!(format!("{sibling:?}").contains("recovery: Refuse") && format!("{executor:?}").contains("recovery: Rerun"));
    let (end, ended) = tokio::sync::oneshot::channel::<()>();
    let runner = sibling.clone();
    let running = tokio::spawn(async move {
        let operation = |_| async move {
            let _ = ended.await;
            Ending::complete((), answer())
        };
        runner.run_outcome(&key("k"), None, operation).await
    });
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert_eq!((executor.running(), sibling.running()), (1, 1));
    assert!(tokio::time::timeout(Duration::from_secs(1), executor.drain()).await.is_err());
    end.send(()).unwrap();
    executor.drain().await;
    assert!(matches!(running.await.unwrap(), Run::Ended { .. }));
    assert_eq!((executor.running(), sibling.running()), (0, 0));
}

#[test]
fn values_stay_out_of_debug_output() {
    let run = Run::Ended { value: "card 4242", attempt: 1, completed: true, recorded: Ok(()) };
    let ending = Ending::complete("card 4242", Outcome::new(200, "card 4242"));
    let shown = format!("{run:?} {ending:?}");
    assert!(!shown.contains("4242"), "{shown}");
}
