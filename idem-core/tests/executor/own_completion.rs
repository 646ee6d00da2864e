//! Operations that complete their lease by themselves, as in a transaction of their own.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use idem_core::executor::{Attempt, Executor, OnError, OnPanic, RunError};
use idem_core::{ErrorKind, Failure, KeyStore, Operation, Outcome, Reservation, Reserve, State, Withheld};

use super::support::{Fault, Faulty, key};

const LEASE: Duration = Duration::from_secs(30);

fn executor(store: &Arc<Faulty>) -> Executor {
    Executor::builder(store.clone()).lease(LEASE).build().unwrap()
}

/// What is stored, as a repeat gets it.
async fn replay(store: &Arc<Faulty>) -> u32 {
    let again = executor(store).run(&key("k"), None, |_| async { Ok::<u32, Infallible>(99) }).await.unwrap();
    assert!(again.replayed);
    again.value
}

/// How the operation goes on behind its commit.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Then {
    Returns,
    Fails,
    Panics,
}

/// An operation that commits 7 under its lease, says so where it was told, and then goes on.
async fn commit(store: Arc<Faulty>, attempt: Attempt, marks: bool, then: Then) -> Result<u32, String> {
    tokio::task::yield_now().await;
    let outcome = attempt.success(&7);
    store.store.complete(attempt.lease(), &outcome).await.unwrap();
    if marks {
        attempt.mark_completed(outcome);
    }
    match then {
        Then::Returns => Ok(7),
        Then::Fails => Err("the reply is lost".to_owned()),
        Then::Panics => panic!("behind the commit"),
    }
}

#[tokio::test(start_paused = true)]
async fn whatever_comes_behind_the_commit_the_caller_gets_what_is_stored() {
    for (marks, then) in [
        (true, Then::Returns),
        (true, Then::Fails),
        (true, Then::Panics),
        (false, Then::Returns),
        (false, Then::Fails),
        (false, Then::Panics),
    ] {
        let store = Faulty::new();
        let writer = store.clone();
        let executed =
            executor(&store).run(&key("k"), None, move |attempt| commit(writer, attempt, marks, then)).await.unwrap();
        assert_eq!((executed.value, executed.attempt, executed.replayed), (7, 1, false), "{marks} {then:?}");
        let calls = [Operation::Complete, Operation::Fail, Operation::Fetch].map(|of| store.calls(of));
        let expected = match (marks, then) {
            // Nothing is asked where all is known.
            (true, _) => [0, 0, 0],
            (false, Then::Returns) => [1, 0, 0],
            (false, Then::Fails | Then::Panics) => [0, 1, 1],
        };
        assert_eq!(calls, expected, "{marks} {then:?}");
        assert_eq!(replay(&store).await, 7);
    }
}

/// The store does not answer at first: it is asked until it does, and nothing is run again.
#[tokio::test(start_paused = true)]
async fn a_lost_commit_reply_is_looked_up_through_trouble() {
    let store = Faulty::new();
    let trouble = [Fault::Refuse(ErrorKind::Unavailable), Fault::Hang, Fault::LoseReply];
    store.inject(Operation::Fail, &trouble, Fault::None);
    store.inject(Operation::Fetch, &trouble[..2], Fault::None);
    let writer = store.clone();
    let executed =
        executor(&store).run(&key("k"), None, move |attempt| commit(writer, attempt, false, Then::Fails)).await;
    assert_eq!(executed.unwrap().value, 7);
    assert_eq!((store.calls(Operation::Fail), store.calls(Operation::Fetch)), (4, 3));
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_looked_up_is_unrecorded_and_frees_nothing() {
    for fault in [Fault::Refuse(ErrorKind::Unavailable), Fault::Refuse(ErrorKind::Unreadable), Fault::Hang] {
        let store = Faulty::new();
        store.inject(Operation::Fetch, &[], fault);
        let writer = store.clone();
        let result =
            executor(&store).run(&key("k"), None, move |attempt| commit(writer, attempt, false, Then::Fails)).await;
        let Err(RunError::Unrecorded { result: Err(error), attempt: 1, source }) = result else { panic!("{result:?}") };
        assert_eq!((error.as_str(), source.kind()), ("the reply is lost", ErrorKind::AlreadyCompleted));
        assert_eq!(replay(&store).await, 7);
    }
}

/// The transaction was rolled back: the error frees the key, as every error does.
#[tokio::test(start_paused = true)]
async fn an_outcome_that_was_not_committed_frees_the_key() {
    let store = Faulty::new();
    let operation = |attempt: Attempt| async move {
        drop(attempt.success(&7));
        Err::<u32, _>("rolled back")
    };
    let result = executor(&store).run(&key("k"), None, operation).await;
    assert!(matches!(result, Err(RunError::Failed { error: "rolled back", is_final: false, .. })), "{result:?}");
    let writer = store.clone();
    let executed =
        executor(&store).run(&key("k"), None, move |attempt| commit(writer, attempt, true, Then::Returns)).await;
    assert_eq!(executed.unwrap().attempt, 2);
}

/// By a policy that takes a lost reply for final, or that panics, what is committed stands all the same.
#[tokio::test(start_paused = true)]
async fn no_policy_overwrites_what_is_committed() {
    for marks in [false, true] {
        let store = Faulty::new();
        let writer = store.clone();
        let operation = move |attempt| commit(writer, attempt, marks, Then::Fails);
        let executed = executor(&store).run_with(&key("k"), None, |_| OnError::Final, operation).await;
        assert_eq!(executed.unwrap().value, 7);

        let store = Faulty::new();
        let writer = store.clone();
        let operation = move |attempt| commit(writer, attempt, marks, Then::Fails);
        let policy = |_: &String| -> OnError { panic!("in the policy") };
        assert_eq!(executor(&store).run_with(&key("k"), None, policy, operation).await.unwrap().value, 7);
    }
}

/// Abandoned panics are not looked into; the record is what it is.
#[tokio::test(start_paused = true)]
async fn an_abandoned_panic_behind_the_commit_leaves_it_completed() {
    let store = Faulty::new();
    let abandoning = Executor::builder(store.clone()).on_panic(OnPanic::Abandon).build().unwrap();
    let writer = store.clone();
    let result = abandoning.run(&key("k"), None, move |attempt| commit(writer, attempt, false, Then::Panics)).await;
    assert!(matches!(result, Err(RunError::Panicked { .. })), "{result:?}");
    assert_eq!(replay(&store).await, 7);
}

#[tokio::test(start_paused = true)]
async fn a_final_error_is_committed_too() {
    for marks in [false, true] {
        let store = Faulty::new();
        let run = |marks: Option<bool>| {
            let (executor, writer) = (executor(&store), store.clone());
            async move {
                let operation = move |attempt: Attempt| async move {
                    let error = "declined".to_owned();
                    let outcome = attempt.final_error(&error);
                    writer.store.complete(attempt.lease(), &outcome).await.unwrap();
                    if marks.unwrap() {
                        attempt.mark_completed(outcome);
                    }
                    Err::<u32, _>(error)
                };
                executor.run_with(&key("k"), None, |_| OnError::Final, operation).await
            }
        };
        for (marks, replay) in [(Some(marks), false), (None, true)] {
            let result = run(marks).await;
            let Err(RunError::Failed { error, is_final: true, replayed, .. }) = result else { panic!("{result:?}") };
            assert_eq!((error.as_str(), replayed), ("declined", replay));
        }
    }
}

/// An operation that commits one thing and returns another: what is committed stands, for its caller too.
#[tokio::test(start_paused = true)]
async fn an_error_that_was_committed_is_not_turned_into_a_success() {
    let store = Faulty::new();
    let writer = store.clone();
    let operation = move |attempt: Attempt| async move {
        let outcome = attempt.final_error(&"declined");
        writer.store.complete(attempt.lease(), &outcome).await.unwrap();
        attempt.mark_completed(outcome);
        // A second word has no effect.
        attempt.mark_completed(attempt.success(&8));
        Ok::<u32, String>(8)
    };
    let result = executor(&store).run_with(&key("k"), None, |_| OnError::Final, operation).await;
    assert!(matches!(result, Err(RunError::Failed { is_final: true, replayed: false, .. })), "{result:?}");
}

#[tokio::test(start_paused = true)]
async fn a_result_over_the_limit_is_withheld_as_the_executor_does() {
    for marks in [false, true] {
        let store = Arc::new(Faulty::build(false, 10));
        let writer = store.clone();
        let operation = move |attempt: Attempt| async move {
            let value = "x".repeat(50);
            let outcome = attempt.success(&value);
            assert_eq!(outcome, Outcome::withheld(0, Withheld::TooLarge));
            writer.store.complete(attempt.lease(), &outcome).await.unwrap();
            if marks {
                attempt.mark_completed(outcome);
            }
            Ok::<_, Infallible>(value)
        };
        assert_eq!(executor(&store).run(&key("k"), None, operation).await.unwrap().value.len(), 50);
        let again = executor(&store).run(&key("k"), None, |_| async { Ok::<_, Infallible>(String::new()) }).await;
        assert!(matches!(again, Err(RunError::Withheld { code: 0, reason: Withheld::TooLarge, .. })));
    }
}

/// The lease was taken over before the operation completed it: it rolls back, and the other attempt's result stands.
#[tokio::test(start_paused = true)]
async fn a_lost_lease_is_told_and_the_successor_stands() {
    let store = Faulty::new();
    let writer = store.clone();
    let operation = move |attempt: Attempt| async move {
        writer.clock.advance(LEASE);
        let Reservation::Acquired(second) = writer.store.reserve(&Reserve::new(key("k"))).await.unwrap() else {
            panic!()
        };
        writer.store.complete(&second, &Outcome::new(0, "2")).await.unwrap();
        let refused = writer.store.complete(attempt.lease(), &attempt.success(&1)).await.unwrap_err();
        Err::<u32, _>(refused)
    };
    let result = executor(&store).run(&key("k"), None, operation).await;
    let Err(RunError::Unrecorded { result: Err(error), source, .. }) = result else { panic!("{result:?}") };
    assert_eq!((error.kind(), source.kind()), (ErrorKind::LeaseLost, ErrorKind::LeaseLost));
    assert_eq!(replay(&store).await, 2);
}

/// A lease that has run out is still good while nobody has taken it.
#[tokio::test(start_paused = true)]
async fn a_lease_that_ran_out_can_be_completed() {
    let store = Faulty::new();
    store.inject(Operation::Renew, &[], Fault::Refuse(ErrorKind::Unavailable));
    let writer = store.clone();
    let operation = move |attempt: Attempt| async move {
        attempt.lease_lost().await;
        writer.clock.advance(LEASE * 2);
        commit(writer, attempt, true, Then::Returns).await
    };
    assert_eq!(executor(&store).run(&key("k"), None, operation).await.unwrap().value, 7);
    assert_eq!(replay(&store).await, 7);
}

/// Behind a completion there is nothing to renew.
#[tokio::test(start_paused = true)]
async fn a_completed_lease_is_renewed_no_more() {
    let store = Faulty::new();
    let writer = store.clone();
    let operation = move |attempt: Attempt| async move {
        let done = commit(writer.clone(), attempt, true, Then::Returns).await;
        writer.pass(LEASE * 3).await;
        done
    };
    assert_eq!(executor(&store).run(&key("k"), None, operation).await.unwrap().value, 7);
    assert_eq!(store.calls(Operation::Renew), 0);
    assert!(matches!(store.record(&key("k")).await.unwrap().state, State::Completed(_)));
}

/// A reconciler has completed the attempt while its operation ran and failed: what it wrote is the answer.
#[tokio::test(start_paused = true)]
async fn a_failure_is_answered_with_what_a_reconciler_wrote() {
    let store = Faulty::new();
    let writer = store.clone();
    let operation = move |attempt: Attempt| async move {
        writer.store.complete(attempt.lease(), &Outcome::new(0, "5")).await.unwrap();
        Err::<u32, _>("no")
    };
    assert_eq!(executor(&store).run(&key("k"), None, operation).await.unwrap().value, 5);
    assert_eq!(replay(&store).await, 5);
    // And a key that a reconciler has freed stays free.
    let writer = store.clone();
    let operation = move |attempt: Attempt| async move {
        writer.store.fail(attempt.lease(), &Failure::default()).await.unwrap();
        Err::<u32, _>("no")
    };
    let result = executor(&store).run(&key("other"), None, operation).await;
    assert!(matches!(&result, Err(RunError::Unrecorded { source, .. }) if source.kind() == ErrorKind::LeaseLost));
}
