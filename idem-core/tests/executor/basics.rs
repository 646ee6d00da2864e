//! Fresh, replay, mismatch, in progress, failed; many at once; callers that go away.

use std::convert::Infallible;
use std::time::Duration;

use idem_core::executor::{Attempt, Executor, RunError, Waiting};
use idem_core::{
    ErrorKind, Fingerprint, InvalidInput, KeyStore, MemoryStore, Operation, Origin, Outcome, Reserve, State,
};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;

use super::support::{Effects, Fault, Faulty, key, settle};

#[tokio::test(start_paused = true)]
async fn a_repeat_gets_the_first_result_and_runs_nothing() {
    let executor = Executor::new(MemoryStore::new());
    let effects = Effects::default();
    for replayed in [false, true, true] {
        let effects = effects.clone();
        let executed = executor.run(&key("k"), None, |_| async move { Ok::<_, Infallible>(effects.happen()) }).await;
        let executed = executed.unwrap();
        assert_eq!((executed.value, executed.attempt, executed.replayed), (1, 1, replayed));
    }
    assert_eq!(effects.count(), 1);
}

/// Pitfalls 20 and 21: the fingerprint is compared on every path.
#[tokio::test(start_paused = true)]
async fn another_fingerprint_is_a_mismatch_in_progress_and_completed() {
    let executor = Executor::new(MemoryStore::new());
    let (one, two) = (Fingerprint::of("one"), Fingerprint::of("two"));
    let (finish, finished) = oneshot::channel::<()>();
    let runner = executor.clone();
    let running = tokio::spawn(async move {
        runner.run(&key("k"), one, |_| async { finished.await.map_err(|error| error.to_string()) }).await
    });
    settle().await;
    let id = key("k");
    let other = || executor.run(&id, two, |_| async { Ok::<_, String>(()) });
    assert!(matches!(other().await, Err(RunError::Mismatch)));
    finish.send(()).unwrap();
    running.await.unwrap().unwrap();
    assert!(matches!(other().await, Err(RunError::Mismatch)));
}

/// Pitfall 8.
#[tokio::test(start_paused = true)]
async fn a_repeat_while_it_runs_is_refused_at_once() {
    let executor = Executor::builder(MemoryStore::new()).lease(Duration::from_secs(20)).build().unwrap();
    let runner = executor.clone();
    let running = tokio::spawn(async move {
        runner.run(&key("k"), None, |_| async { std::future::pending::<Result<(), Infallible>>().await }).await
    });
    settle().await;
    let repeat = executor.run(&key("k"), None, |_| async { Ok::<_, Infallible>(()) }).await;
    let Err(RunError::InProgress { attempt: 1, retry_after }) = repeat else { panic!("{repeat:?}") };
    assert!(!retry_after.is_zero() && retry_after <= Duration::from_secs(20), "{retry_after:?}");
    running.abort();
}

/// Pitfalls 22 and 27: an error frees the key, and a corrected retry is run.
#[tokio::test(start_paused = true)]
async fn an_error_frees_the_key_and_the_retry_runs_with_the_next_number() {
    let store = Faulty::new();
    let executor = Executor::new(store.clone());
    let wrong = executor.run(&key("k"), None, |_| async { Err::<u32, _>("wrong one-time password") }).await;
    let Err(RunError::Failed { error: "wrong one-time password", attempt: 1, is_final: false, replayed: false }) =
        wrong
    else {
        panic!("{wrong:?}");
    };
    let State::Failed(note) = store.record(&key("k")).await.unwrap().state else { panic!() };
    assert_eq!(note.note(), "wrong one-time password");
    let right = executor
        .run(&key("k"), None, |attempt| async move {
            assert_eq!((attempt.number(), attempt.origin(), attempt.key()), (2, Origin::Retry, &key("k")));
            Ok::<_, &str>(attempt.number())
        })
        .await;
    assert_eq!(right.unwrap().value, 2);
}

/// Pitfall 1.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_many_at_once_one_runs() {
    let executor = Executor::new(MemoryStore::new());
    for round in 0..50 {
        let effects = Effects::default();
        let mut callers = JoinSet::new();
        for _ in 0..32 {
            let (executor, effects) = (executor.clone(), effects.clone());
            callers.spawn(async move {
                let operation = move |_| async move {
                    effects.happen();
                    tokio::task::yield_now().await;
                    Ok::<_, Infallible>(round)
                };
                match executor.run(&key(&format!("many-{round}")), None, operation).await {
                    Ok(executed) => assert_eq!(executed.value, round),
                    Err(RunError::InProgress { .. }) => {}
                    Err(other) => panic!("{other:?}"),
                }
            });
        }
        while let Some(caller) = callers.join_next().await {
            caller.unwrap();
        }
        executor.drain().await;
        assert_eq!(effects.count(), 1);
    }
}

/// Pitfall 24.
#[tokio::test(start_paused = true)]
async fn a_caller_that_goes_away_does_not_stop_the_operation() {
    let store = Faulty::new();
    let executor = Executor::new(store.clone());
    let (begun, mut began) = mpsc::channel(1);
    let (finish, finished) = oneshot::channel();
    let call = key("k");
    let call = executor.run(&call, None, |_| async move {
        begun.send(()).await.unwrap();
        finished.await.map_err(|error| error.to_string())
    });
    tokio::select! {
        biased;
        result = call => panic!("{result:?}"),
        _ = began.recv() => {}
    }
    assert_eq!(executor.running(), 1);
    finish.send(7).unwrap();
    executor.drain().await;
    assert_eq!(executor.running(), 0);
    let replay = executor.run(&key("k"), None, |_| async { Ok::<_, String>(8) }).await.unwrap();
    assert_eq!((replay.value, replay.replayed), (7, true));
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_goes_away_during_the_reserve_does_not_leave_the_key_blocked() {
    let store = std::sync::Arc::new(Faulty::build(true, 1024));
    let executor = Executor::new(store.clone());
    let call = key("k");
    let mut call = Box::pin(executor.run(&call, None, |_| async { Ok::<_, Infallible>(7) }));
    assert!(poll_once(call.as_mut()).await.is_none(), "the reserve is under way");
    drop(call);
    executor.drain().await;
    assert!(matches!(store.record(&key("k")).await.unwrap().state, State::Completed(_)));
}

/// Polls once.
async fn poll_once<F: Future>(mut future: std::pin::Pin<&mut F>) -> Option<F::Output> {
    std::future::poll_fn(|context| match future.as_mut().poll(context) {
        std::task::Poll::Ready(output) => std::task::Poll::Ready(Some(output)),
        std::task::Poll::Pending => std::task::Poll::Ready(None),
    })
    .await
}

#[tokio::test(start_paused = true)]
async fn a_call_that_is_never_polled_does_nothing() {
    let store = Faulty::new();
    let executor = Executor::new(store.clone());
    drop(executor.run(&key("k"), None, |_| async { Ok::<_, Infallible>(7) }));
    settle().await;
    assert!(store.record(&key("k")).await.is_none());
}

#[tokio::test(start_paused = true)]
async fn drain_waits_for_the_last() {
    let executor = Executor::new(MemoryStore::new());
    executor.drain().await;
    for id in ["a", "b"] {
        let executor = executor.clone();
        tokio::spawn(async move {
            let operation = move |_| async move {
                tokio::time::sleep(Duration::from_secs(if id == "a" { 1 } else { 5 })).await;
                Ok::<_, Infallible>(())
            };
            executor.run(&key(id), None, operation).await
        });
    }
    settle().await;
    let begun = tokio::time::Instant::now();
    executor.drain().await;
    assert_eq!(begun.elapsed().as_secs(), 5);
}

#[test]
fn without_a_runtime_it_is_an_error_and_nothing_is_run() {
    let executor = Executor::new(MemoryStore::new());
    let key = key("k");
    let mut call = Box::pin(executor.run(&key, None, |_| async { Ok::<_, Infallible>(7) }));
    let polled = call.as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop()));
    assert!(matches!(polled, std::task::Poll::Ready(Err(RunError::NoRuntime))));
}

#[tokio::test(start_paused = true)]
async fn settings_are_checked() {
    let build = |lease, retention| {
        Executor::builder(MemoryStore::new()).lease(lease).retention(retention).build().map(|_| ()).unwrap_err()
    };
    let (zero, day) = (Duration::ZERO, Duration::from_secs(86_400));
    assert_eq!(build(zero, day), InvalidInput::LeaseTooShort { lease: zero });
    assert_eq!(build(day * 2, day * 3), InvalidInput::LeaseTooLong { lease: day * 2 });
    assert_eq!(build(day, zero), InvalidInput::RetentionTooShort { retention: zero });
    assert!(matches!(build(day, day * 400), InvalidInput::RetentionTooLong { .. }));
    assert_eq!(build(day, day / 2), InvalidInput::RetentionShorterThanLease { retention: day / 2, lease: day });
    assert!(Executor::builder(MemoryStore::new()).lease(day).retention(day).build().is_ok());
}

/// The store's own trouble before the operation: nothing is run.
#[tokio::test(start_paused = true)]
async fn a_store_that_cannot_be_reached_runs_nothing() {
    let store = Faulty::new();
    let executor = Executor::new(store.clone());
    store.inject(Operation::Reserve, &[], Fault::Refuse(ErrorKind::Unavailable));
    let result = executor.run(&key("k"), None, |_| async { Ok::<_, Infallible>(()) }).await;
    let Err(RunError::Store(error)) = result else { panic!("{result:?}") };
    assert_eq!((error.kind(), store.calls(Operation::Reserve)), (ErrorKind::Unavailable, 3));
    store.inject(Operation::Reserve, &[], Fault::Refuse(ErrorKind::Misconfigured));
    let result = executor.run(&key("k"), None, |_| async { Ok::<_, Infallible>(()) }).await;
    assert!(matches!(result, Err(RunError::Store(_))));
    assert_eq!(store.calls(Operation::Reserve), 4, "a permanent error is not repeated");
    store.inject(Operation::Reserve, &[], Fault::Hang);
    assert!(matches!(
        executor.run(&key("k"), None, |_| async { Ok::<_, Infallible>(()) }).await,
        Err(RunError::Store(_))
    ));
    assert!(store.record(&key("k")).await.is_none());
}

/// Pitfalls 2 and 44: the reserve took effect, its reply was lost, and the repeat is no rival to itself.
#[tokio::test(start_paused = true)]
async fn a_reserve_whose_reply_was_lost_is_recognised() {
    let store = Faulty::new();
    let executor = Executor::new(store.clone());
    store.inject(Operation::Reserve, &[Fault::LoseReply, Fault::LoseReply], Fault::None);
    let executed = executor.run(&key("k"), None, |_| async { Ok::<_, Infallible>(7) }).await.unwrap();
    assert_eq!((executed.value, executed.attempt, executed.replayed), (7, 1, false));
    assert_eq!(store.calls(Operation::Reserve), 3);
}

/// A second runtime can use the executor after the first one is gone, and its leases are kept.
#[test]
fn an_executor_outlives_its_runtime() {
    let store = Faulty::new();
    let executor = Executor::builder(store.clone()).lease(Duration::from_secs(12)).build().unwrap();
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let first = runtime();
    first.block_on(async {
        let call = key("lost");
        let call = executor.run(&call, None, |_| std::future::pending::<Result<(), Infallible>>());
        assert!(tokio::time::timeout(Duration::from_secs(1), call).await.is_err());
    });
    drop(first);
    assert_eq!(executor.running(), 0, "the runtime has dropped what ran on it");
    for (id, keep) in [("second", runtime()), ("third", runtime())] {
        keep.block_on(async {
            let passing = store.clone();
            let operation = |attempt: Attempt| async move {
                passing.pass(Duration::from_secs(60)).await;
                Ok::<_, Infallible>(attempt.is_lease_lost())
            };
            assert!(!executor.run(&key(id), None, operation).await.unwrap().value);
        });
        // Not dropped: a runtime that stands still renews nothing, and must not be relied upon.
        Box::leak(Box::new(keep));
    }
    let runtime = runtime();
    runtime.block_on(async {
        let request = Reserve::new(key("lost"));
        let answer = store.reserve(&request).await.unwrap();
        assert!(matches!(answer, idem_core::Reservation::Acquired(_)), "nobody renews for the lost one: {answer:?}");
        store
            .complete(&idem_core::Record::lease(&store.record(&key("lost")).await.unwrap()), &Outcome::new(0, "0"))
            .await
            .unwrap();
    });
}

/// An operation that blocks its thread is renewed all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operation_that_blocks_its_thread_keeps_its_lease() {
    let executor = Executor::builder(MemoryStore::new()).lease(Duration::from_millis(300)).build().unwrap();
    let runner = executor.clone();
    let running = tokio::spawn(async move {
        let operation = |attempt: Attempt| async move {
            std::thread::sleep(Duration::from_millis(1200));
            Ok::<_, Infallible>(attempt.is_lease_lost())
        };
        runner.run(&key("blocking"), None, operation).await
    });
    tokio::time::sleep(Duration::from_millis(900)).await;
    let repeat = executor.run(&key("blocking"), None, |_| async { Ok::<_, Infallible>(true) }).await;
    assert!(matches!(repeat, Err(RunError::InProgress { attempt: 1, .. })), "{repeat:?}");
    assert!(!running.await.unwrap().unwrap().value);
}

/// The runtime that the operation runs on is shut down, while the caller lives on another one.
#[test]
fn an_operation_whose_runtime_is_shut_down_is_interrupted() {
    let runtime = || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_time().build().unwrap();
    let (first, second) = (runtime(), runtime());
    let store = Faulty::new();
    let executor = Executor::new(store.clone());
    let id = key("k");
    let mut call = Box::pin(executor.run(&id, None, |_| std::future::pending::<Result<(), Infallible>>()));
    {
        let _within = first.enter();
        let polled = call.as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop()));
        assert!(polled.is_pending());
    }
    drop(first);
    let result = second.block_on(call);
    assert!(matches!(result, Err(RunError::Interrupted(_))), "{result:?}");
    let record = second.block_on(store.record(&id)).unwrap();
    assert!(matches!(record.state, State::InProgress), "nobody knows whether it took effect");
}

/// Replies are lost and calls refused at random, callers go away and come again: each key has one effect.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn under_noise_each_key_has_one_effect() {
    let store = std::sync::Arc::new(Faulty::build(true, 1024));
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut noise = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        match state % 4 {
            0 => Fault::LoseReply,
            1 => Fault::Refuse(ErrorKind::Unavailable),
            _ => Fault::None,
        }
    };
    for operation in [Operation::Reserve, Operation::Complete] {
        let faults: Vec<_> = (0..2000).map(|_| noise()).collect();
        store.inject(operation, &faults, Fault::None);
    }
    // The store's clock stands still: no lease ends, whatever the noise.
    let executor = Executor::builder(store.clone()).waiting(Waiting::UpTo(Duration::from_millis(500))).build().unwrap();
    let keys = 40;
    let effects: Vec<Effects> = (0..keys).map(|_| Effects::default()).collect();
    let mut callers = JoinSet::new();
    for caller in 0..keys * 8 {
        let (executor, effects) = (executor.clone(), effects[caller % keys].clone());
        callers.spawn(async move {
            let id = key(&format!("noise-{}", caller % keys));
            for repeat in 0..3 {
                let effects = effects.clone();
                let operation = move |_| async move {
                    effects.happen();
                    tokio::task::yield_now().await;
                    Ok::<_, Infallible>(caller % keys)
                };
                let call = executor.run(&id, None, operation);
                if (caller + repeat) % 5 == 0 {
                    drop(tokio::time::timeout(Duration::from_millis(1), call).await);
                    continue;
                }
                match call.await {
                    Ok(executed) => assert_eq!(executed.value, caller % keys),
                    Err(RunError::InProgress { .. } | RunError::Store(_)) => {}
                    Err(other) => panic!("{other:?}"),
                }
            }
        });
    }
    while let Some(caller) = callers.join_next().await {
        caller.unwrap();
    }
    executor.drain().await;
    let counts: Vec<usize> = effects.iter().map(Effects::count).collect();
    assert!(counts.iter().all(|count| *count <= 1), "{counts:?}");
    let ran = counts.iter().sum::<usize>();
    assert!(ran > keys / 2, "{ran} of {keys} keys were run at all");
}
