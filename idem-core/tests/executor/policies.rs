//! Final errors, panics, and what is done about abandoned attempts.

use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use idem_core::executor::{Attempt, Executor, OnError, OnPanic, Reconcile, Reconciliation, Recovery, RunError};
use idem_core::{ErrorKind, Failure, KeyStore, Lease, Operation, Origin, Outcome, Reservation, Reserve, State};
use serde::{Deserialize, Serialize};

use super::support::{Effects, Fault, Faulty, key, settle};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
enum ChargeError {
    Declined { reason: String },
    Timeout,
}

impl fmt::Display for ChargeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

fn policy(error: &ChargeError) -> OnError {
    match error {
        ChargeError::Declined { .. } => OnError::Final,
        ChargeError::Timeout => OnError::Free,
    }
}

fn declined() -> ChargeError {
    ChargeError::Declined { reason: "no funds".to_owned() }
}

#[tokio::test(start_paused = true)]
async fn a_final_error_is_replayed_as_the_same_typed_error() {
    let executor = Executor::new(Faulty::new());
    for replay in [false, true, true] {
        let operation = move |_| async move { if replay { Ok(1_u32) } else { Err(declined()) } };
        let result = executor.run_with(&key("k"), None, policy, operation).await;
        let Err(RunError::Failed { error, attempt: 1, is_final: true, replayed }) = result else {
            panic!("{result:?}");
        };
        assert_eq!((error, replayed), (declined(), replay));
    }
    // A caller whose errors are never final has no type for it, and runs nothing all the same.
    let result = executor.run(&key("k"), None, |_| async { Ok::<u32, String>(1) }).await;
    assert!(matches!(result, Err(RunError::Undecodable(_))), "{result:?}");
}

#[tokio::test(start_paused = true)]
async fn an_error_that_is_not_final_frees_the_key() {
    let executor = Executor::new(Faulty::new());
    let run = |result: Result<u32, ChargeError>| {
        let executor = executor.clone();
        async move { executor.run_with(&key("k"), None, policy, |_| async move { result }).await }
    };
    let result = run(Err(ChargeError::Timeout)).await;
    assert!(matches!(result, Err(RunError::Failed { error: ChargeError::Timeout, is_final: false, .. })));
    assert_eq!(run(Ok(5)).await.unwrap().value, 5);
}

/// Pitfall 23, with a panic at once, after an await, in the closure, in the policy, and in the error's text.
#[tokio::test(start_paused = true)]
async fn a_panic_frees_the_key_at_once() {
    let store = Faulty::new();
    let executor = Executor::new(store.clone());
    let panicked = |result: Result<_, RunError<u32, ChargeError>>, with: &str| {
        let Err(RunError::Panicked { message, .. }) = result else { panic!("{with}: {result:?}") };
        assert_eq!(&*message, with);
    };
    let id = key("k");
    panicked(executor.run(&id, None, |_| async { panic!("at once") }).await.map(|done| done.value), "at once");
    let State::Failed(note) = store.record(&id).await.unwrap().state else { panic!() };
    assert_eq!(note.note(), "panicked: at once");
    let late = |_| async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        panic!("after {}", "an await")
    };
    panicked(executor.run(&id, None, late).await.map(|done| done.value), "after an await");
    let in_closure = |_| -> std::future::Ready<Result<u32, ChargeError>> { panic!("in the closure") };
    panicked(executor.run(&id, None, in_closure).await.map(|done| done.value), "in the closure");
    let on_error = |_: &ChargeError| -> OnError { panic!("in the policy") };
    let result = executor.run_with(&id, None, on_error, |_| async { Err(ChargeError::Timeout) }).await;
    panicked(result.map(|done| done.value), "in the policy");
    struct Wordless;
    impl std::fmt::Display for Wordless {
        fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            panic!("in the error's text")
        }
    }
    let Err(RunError::Panicked { message, .. }) = executor.run(&id, None, |_| async { Err::<u32, _>(Wordless) }).await
    else {
        panic!("an error whose text cannot be had");
    };
    assert_eq!(&*message, "in the error's text");
    assert_eq!(executor.run(&id, None, |_| async { Ok::<_, Infallible>(7) }).await.unwrap().attempt, 6);
}

/// What a panic throws may panic in its own drop: the key is freed all the same, and a result that was had is kept.
#[tokio::test(start_paused = true)]
async fn a_panic_in_the_drop_of_a_panic_is_resolved_too() {
    struct Thrown;
    impl Drop for Thrown {
        fn drop(&mut self) {
            panic!("in the drop of what was thrown")
        }
    }
    struct Wordless;
    impl serde::Serialize for Wordless {
        fn serialize<S: serde::Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
            std::panic::panic_any(Thrown)
        }
    }
    impl<'de> serde::Deserialize<'de> for Wordless {
        fn deserialize<D: serde::Deserializer<'de>>(_: D) -> Result<Self, D::Error> {
            Ok(Self)
        }
    }
    let store = Faulty::new();
    let (executor, id) = (Executor::new(store.clone()), key("k"));
    let thrown =
        executor.run(&id, None, |_| async { if true { std::panic::panic_any(Thrown) } else { Ok::<u32, String>(0) } });
    assert!(matches!(thrown.await, Err(RunError::Panicked { attempt: 1, .. })));
    assert!(matches!(store.record(&key("k")).await.unwrap().state, State::Failed(_)));
    let executed = executor.run(&key("k"), None, |_| async { Ok::<_, Infallible>(Wordless) }).await.unwrap();
    assert_eq!((executed.attempt, executed.replayed), (2, false));
    let State::Completed(outcome) = store.record(&key("k")).await.unwrap().state else { panic!() };
    assert_eq!(outcome.body, idem_core::Body::Withheld(idem_core::Withheld::Unserializable));
}

/// A panic in the drop of an operation that is done does not lose its result.
#[tokio::test(start_paused = true)]
async fn a_panic_after_the_end_keeps_the_result() {
    struct Late(bool);
    impl Drop for Late {
        fn drop(&mut self) {
            if self.0 {
                panic!("in a drop");
            }
        }
    }
    struct Operation(Late);
    impl Future for Operation {
        type Output = Result<u32, Infallible>;
        fn poll(mut self: std::pin::Pin<&mut Self>, _: &mut std::task::Context<'_>) -> std::task::Poll<Self::Output> {
            self.0.0 = true;
            std::task::Poll::Ready(Ok(7))
        }
    }
    let executor = Executor::new(Faulty::new());
    let executed = executor.run(&key("k"), None, |_| Operation(Late(false))).await.unwrap();
    assert_eq!(executed.value, 7);
    assert!(executor.run(&key("k"), None, |_| Operation(Late(false))).await.unwrap().replayed);
}

#[tokio::test(start_paused = true)]
async fn a_panic_can_leave_the_attempt_to_a_reconciler() {
    let store = Faulty::new();
    let executor = Executor::builder(store.clone())
        .lease(Duration::from_secs(30))
        .on_panic(OnPanic::Abandon)
        .on_abandoned(Recovery::Refuse)
        .build()
        .unwrap();
    let result =
        executor.run(&key("k"), None, |_| async { if true { panic!("half-way") } else { Ok::<u32, String>(0) } }).await;
    assert!(matches!(result, Err(RunError::Panicked { attempt: 1, .. })), "{result:?}");
    let id = key("k");
    let again = || executor.run(&id, None, |_| async { Ok::<u32, String>(1) });
    assert!(matches!(again().await, Err(RunError::InProgress { .. })));
    store.pass(Duration::from_secs(31)).await;
    let Err(RunError::Abandoned(record)) = again().await else { panic!() };
    store.complete(&record.lease(), &Outcome::new(0, "9")).await.unwrap();
    let executed = again().await.unwrap();
    assert_eq!((executed.value, executed.replayed), (9, true));
}

/// An attempt that somebody began and left.
async fn abandon(store: &Faulty, id: &str) -> Lease {
    let request = Reserve::new(key(id)).with_lease(Duration::from_secs(30));
    let Reservation::Acquired(lease) = store.store.reserve(&request).await.unwrap() else { panic!() };
    store.clock.advance(Duration::from_secs(30));
    lease
}

#[tokio::test(start_paused = true)]
async fn an_abandoned_attempt_is_rerun_by_default() {
    let store = Faulty::new();
    let executor = Executor::new(store.clone());
    let before = abandon(&store, "k").await;
    let operation = |attempt: Attempt| async move { Ok::<_, Infallible>(attempt.number()) };
    let executed = executor
        .run(&key("k"), None, move |attempt| {
            let Origin::Takeover(previous) = attempt.origin() else { panic!() };
            assert_eq!((previous.token, previous.attempt), (before.token, 1));
            operation(attempt)
        })
        .await
        .unwrap();
    assert_eq!(executed.value, 2);
}

fn reconciling(store: &Arc<Faulty>, answer: Reconciliation, asked: &Effects) -> Executor {
    let asked = asked.clone();
    let hook = move |lease: Lease| {
        let (answer, asked) = (answer.clone(), asked.clone());
        async move {
            assert!(matches!(lease.origin, Origin::Takeover(_)));
            asked.happen();
            tokio::time::sleep(Duration::from_secs(100)).await;
            answer
        }
    };
    Executor::builder(store.clone())
        .lease(Duration::from_secs(30))
        .on_abandoned(Recovery::reconcile(hook))
        .build()
        .unwrap()
}

/// Runs it while time passes, and a repeat beside it, which must be refused however long the hook takes.
async fn reconcile(
    store: &Arc<Faulty>,
    executor: &Executor,
    effects: &Effects,
) -> Result<(usize, bool), RunError<usize, ChargeError>> {
    let run = |executor: Executor, effects: Effects| async move {
        executor.run_with(&key("k"), None, policy, |_| async move { Ok(effects.happen()) }).await
    };
    let running = tokio::spawn(run(executor.clone(), effects.clone()));
    store.pass(Duration::from_secs(90)).await;
    let beside = run(executor.clone(), effects.clone()).await;
    assert!(matches!(beside, Err(RunError::InProgress { attempt: 2, .. })), "{beside:?}");
    store.pass(Duration::from_secs(15)).await;
    running.await.unwrap().map(|done| (done.value, done.replayed))
}

#[tokio::test(start_paused = true)]
async fn reconciled_as_executed_is_a_replay() {
    let (store, asked, effects) = (Faulty::new(), Effects::default(), Effects::default());
    abandon(&store, "k").await;
    let executor = reconciling(&store, Reconciliation::executed(&41_usize), &asked);
    assert_eq!(reconcile(&store, &executor, &effects).await.unwrap(), (41, true));
    let replay = executor.run(&key("k"), None, |_| async { Ok::<_, String>(0) }).await.unwrap();
    assert_eq!((replay.value, replay.replayed), (41, true));
    assert_eq!((asked.count(), effects.count()), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn reconciled_as_a_final_error_is_that_error() {
    let (store, asked, effects) = (Faulty::new(), Effects::default(), Effects::default());
    abandon(&store, "k").await;
    let executor = reconciling(&store, Reconciliation::executed_error(&declined()), &asked);
    let result = reconcile(&store, &executor, &effects).await;
    let Err(RunError::Failed { error, is_final: true, replayed: true, .. }) = result else { panic!("{result:?}") };
    assert_eq!((error, effects.count()), (declined(), 0));
}

#[tokio::test(start_paused = true)]
async fn reconciled_as_not_executed_is_run() {
    let (store, asked, effects) = (Faulty::new(), Effects::default(), Effects::default());
    abandon(&store, "k").await;
    let executor = reconciling(&store, Reconciliation::NotExecuted, &asked);
    assert_eq!(reconcile(&store, &executor, &effects).await.unwrap(), (1, false));
    assert_eq!((asked.count(), effects.count()), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn reconciled_as_unknown_runs_nothing_and_asks_again_after_the_lease() {
    let (store, asked, effects) = (Faulty::new(), Effects::default(), Effects::default());
    abandon(&store, "k").await;
    let executor = reconciling(&store, Reconciliation::Unknown, &asked);
    let result = reconcile(&store, &executor, &effects).await;
    assert!(matches!(result, Err(RunError::OutcomeUnknown { attempt: 2 })), "{result:?}");
    assert!(matches!(store.record(&key("k")).await.unwrap().state, State::InProgress));
    assert_eq!(asked.count(), 1);
    let id = key("k");
    let again = || executor.run(&id, None, |_| async { Ok::<u32, String>(0) });
    assert!(matches!(again().await, Err(RunError::InProgress { attempt: 2, .. })));
    store.clock.advance(Duration::from_secs(31));
    assert!(matches!(again().await, Err(RunError::OutcomeUnknown { attempt: 3 })));
    assert_eq!((asked.count(), effects.count()), (2, 0));
}

#[tokio::test(start_paused = true)]
async fn a_hook_that_panics_does_not_know() {
    let store = Faulty::new();
    abandon(&store, "k").await;
    struct Broken;
    #[async_trait::async_trait]
    impl Reconcile for Broken {
        async fn reconcile(&self, _: &Lease) -> Reconciliation {
            panic!("no connection to the provider")
        }
    }
    let executor = Executor::builder(store.clone()).on_abandoned(Recovery::reconcile(Broken)).build().unwrap();
    let result = executor.run(&key("k"), None, |_| async { Ok::<u32, String>(0) }).await;
    assert!(matches!(result, Err(RunError::OutcomeUnknown { attempt: 2 })), "{result:?}");
    assert!(matches!(store.record(&key("k")).await.unwrap().state, State::InProgress));
}

/// The hook is asked about take-overs only, not after an attempt that said that it failed.
#[tokio::test(start_paused = true)]
async fn the_hook_is_not_asked_after_a_failure() {
    let (store, asked) = (Faulty::new(), Effects::default());
    let lease = abandon(&store, "k").await;
    store.store.fail(&lease, &Failure::default()).await.unwrap();
    let executor = reconciling(&store, Reconciliation::Unknown, &asked);
    executor.run(&key("k"), None, |_| async { Ok::<u32, String>(0) }).await.unwrap();
    assert_eq!(asked.count(), 0);
}

/// What the provider has done is known but cannot be stored: nothing is run, and the next repeat asks again.
#[tokio::test(start_paused = true)]
async fn a_reconciled_outcome_that_cannot_be_stored_runs_nothing() {
    let (store, asked, effects) = (Faulty::new(), Effects::default(), Effects::default());
    abandon(&store, "k").await;
    let executor = reconciling(&store, Reconciliation::executed(&41_usize), &asked);
    store.inject(Operation::Complete, &[], Fault::Refuse(ErrorKind::Misconfigured));
    let result = reconcile(&store, &executor, &effects).await;
    assert!(matches!(result, Err(RunError::Store(_))), "{result:?}");
    assert_eq!(effects.count(), 0);
    settle().await;
}

/// What the documentation of `Recovery` says of attempts that run for longer than the retention.
#[tokio::test(start_paused = true)]
async fn an_abandoned_attempt_is_remembered_for_the_retention() {
    let (lease, retention) = (Duration::from_secs(30), Duration::from_secs(100));
    for (ran, remembered) in [(60, true), (120, false)] {
        let store = Faulty::new();
        let request = Reserve::new(key("k")).with_lease(lease).with_retention(retention);
        let Reservation::Acquired(held) = store.store.reserve(&request).await.unwrap() else { panic!() };
        for _ in 0..ran / 10 {
            store.clock.advance(Duration::from_secs(10));
            store.store.renew(&held, lease).await.unwrap();
        }
        let executor = Executor::builder(store.clone()).on_abandoned(Recovery::Refuse).build().unwrap();
        let id = key("k");
        let again =
            || executor.run(&id, None, |attempt| async move { Ok::<_, Infallible>(attempt.origin() == Origin::Fresh) });
        store.clock.advance(lease - Duration::from_nanos(1));
        assert!(matches!(again().await, Err(RunError::InProgress { .. })), "no earlier than the lease's end");
        store.clock.advance(Duration::from_nanos(1));
        match again().await {
            Err(RunError::Abandoned(_)) => assert!(remembered, "after {ran} s"),
            Ok(executed) => assert!(executed.value && !remembered, "after {ran} s"),
            other => panic!("{other:?}"),
        }
    }
}
