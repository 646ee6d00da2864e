//! Renewal, loss, take-over while the first holder runs, and results that cannot be stored at first.

use std::convert::Infallible;
use std::time::Duration;

use idem_core::executor::{Attempt, Executor, RunError};
use idem_core::{ErrorKind, Failure, KeyStore, Operation, Outcome, Reservation, Reserve, State};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::support::{Effects, Fault, Faulty, key, settle};

const LEASE: Duration = Duration::from_secs(30);

fn executor(store: &std::sync::Arc<Faulty>) -> Executor {
    Executor::builder(store.clone()).lease(LEASE).build().unwrap()
}

/// An operation that lasts until it is told to end, and says whether it was told that its lease is lost.
fn lasting(
    finished: oneshot::Receiver<()>,
) -> impl FnOnce(Attempt) -> std::pin::Pin<Box<dyn Future<Output = Result<bool, Infallible>> + Send>> + Send + 'static {
    |attempt| {
        Box::pin(async move {
            drop(finished.await);
            Ok(attempt.is_lease_lost())
        })
    }
}

#[tokio::test(start_paused = true)]
async fn a_long_operation_keeps_its_lease() {
    let store = Faulty::new();
    let executor = executor(&store);
    let (finish, finished) = oneshot::channel();
    let runner = executor.clone();
    let running = tokio::spawn(async move { runner.run(&key("k"), None, lasting(finished)).await });
    for _ in 0..10 {
        store.pass(LEASE).await;
        let repeat = executor.run(&key("k"), None, |_| async { Ok::<_, Infallible>(true) }).await;
        assert!(matches!(repeat, Err(RunError::InProgress { attempt: 1, .. })), "{repeat:?}");
    }
    settle().await;
    let renewals = store.calls(Operation::Renew);
    assert!((24..=31).contains(&renewals), "{renewals} renewals in ten leases: a third of the lease each");
    finish.send(()).unwrap();
    assert!(!running.await.unwrap().unwrap().value);
    store.pass(LEASE * 2).await;
    assert_eq!(store.calls(Operation::Renew), renewals, "renewed after its end");
}

/// Pitfall 16.
#[tokio::test(start_paused = true)]
async fn renewal_survives_calls_that_fail_hang_and_lose_their_reply() {
    let store = Faulty::new();
    let executor = executor(&store);
    let (finish, finished) = oneshot::channel();
    let runner = executor.clone();
    let running = tokio::spawn(async move { runner.run(&key("k"), None, lasting(finished)).await });
    let faults = [
        Fault::Refuse(ErrorKind::Unavailable),
        Fault::Refuse(ErrorKind::Misconfigured),
        Fault::Hang,
        Fault::None,
        Fault::LoseReply,
        Fault::Refuse(ErrorKind::Conflict),
        Fault::None,
        Fault::Hang,
    ];
    store.inject(Operation::Renew, &faults, Fault::None);
    for _ in 0..40 {
        store.pass(LEASE / 8).await;
        let repeat = executor.run(&key("k"), None, |_| async { Ok::<_, Infallible>(true) }).await;
        assert!(matches!(repeat, Err(RunError::InProgress { attempt: 1, .. })), "{repeat:?}");
    }
    assert!(store.calls(Operation::Renew) > faults.len());
    finish.send(()).unwrap();
    assert!(!running.await.unwrap().unwrap().value);
}

/// Pitfall 15: a renewal is refused, and the operation learns of it at once.
#[tokio::test(start_paused = true)]
async fn a_take_over_is_told_to_the_operation_and_its_result_does_not_overwrite() {
    let store = Faulty::new();
    let executor = executor(&store);
    let (finish, finished) = oneshot::channel();
    let (tell, told) = oneshot::channel();
    let runner = executor.clone();
    let first = tokio::spawn(async move {
        let operation = |attempt: Attempt| async move {
            attempt.lease_lost().await;
            assert!(attempt.is_lease_lost());
            tell.send(()).unwrap();
            drop(finished.await);
            Ok::<_, Infallible>("first")
        };
        runner.run(&key("k"), None, |attempt| async { operation(attempt).await.map(str::to_owned) }).await
    });
    settle().await;
    // The machine of the store believes the lease over: this process was cut off, or slept.
    store.clock.advance(LEASE);
    let second = executor
        .run(&key("k"), None, |attempt| async move { Ok::<_, Infallible>(format!("second {}", attempt.number())) })
        .await;
    assert_eq!(second.unwrap().value, "second 2");
    tokio::time::timeout(LEASE / 2, told).await.expect("told at the next renewal").unwrap();
    finish.send(()).unwrap();
    let first = first.await.unwrap();
    let Err(RunError::Unrecorded { result: Ok(value), attempt: 1, source }) = first else { panic!("{first:?}") };
    assert_eq!((value.as_str(), source.kind()), ("first", ErrorKind::LeaseLost));
    let State::Completed(outcome) = store.record(&key("k")).await.unwrap().state else { panic!() };
    assert_eq!(outcome, Outcome::new(0, "\"second 2\""));
}

/// No renewal gets through: the loss is told at the lease's end, counted here, not a moment later.
#[tokio::test(start_paused = true)]
async fn a_lease_that_cannot_be_renewed_is_lost_at_its_end() {
    for fault in [Fault::Refuse(ErrorKind::Unavailable), Fault::Hang, Fault::LoseReply] {
        let store = Faulty::new();
        store.inject(Operation::Renew, &[], fault);
        let begun = Instant::now();
        let lost = executor(&store)
            .run(&key("k"), None, move |attempt| async move {
                assert!(!attempt.is_lease_lost());
                attempt.lease_lost().await;
                Ok::<_, Infallible>(begun.elapsed().as_millis() as u64)
            })
            .await;
        // Timers are rounded up to a millisecond.
        assert!((30_000..=30_001).contains(&lost.unwrap().value));
        assert!(store.calls(Operation::Renew) >= 2, "{fault:?}: tried again");
    }
}

/// A lease that ran out but was not taken over is still the caller's: its result is kept.
#[tokio::test(start_paused = true)]
async fn a_result_after_the_leases_end_is_kept_when_nobody_took_over() {
    let store = Faulty::new();
    store.inject(Operation::Renew, &[], Fault::Refuse(ErrorKind::Unavailable));
    let clock = store.clock.clone();
    let executed = executor(&store)
        .run(&key("k"), None, |attempt| async move {
            attempt.lease_lost().await;
            clock.advance(LEASE * 2);
            Ok::<_, Infallible>(7)
        })
        .await;
    assert_eq!(executed.unwrap().value, 7);
    assert!(matches!(store.record(&key("k")).await.unwrap().state, State::Completed(_)));
}

#[tokio::test(start_paused = true)]
async fn complete_is_repeated_with_the_same_token() {
    let faults = [
        Fault::Refuse(ErrorKind::Unavailable),
        Fault::Refuse(ErrorKind::Conflict),
        Fault::Hang,
        // It was applied; the repeat must not take this for another outcome.
        Fault::LoseReply,
        Fault::LoseReply,
    ];
    let store = Faulty::new();
    store.inject(Operation::Complete, &faults, Fault::None);
    let effects = Effects::default();
    for replayed in [false, true] {
        let effects = effects.clone();
        let operation = |_| async move { Ok::<_, Infallible>(effects.happen()) };
        let executed = executor(&store).run(&key("k"), None, operation).await.unwrap();
        assert_eq!((executed.value, executed.replayed), (1, replayed));
    }
    assert_eq!(store.calls(Operation::Complete), 6);
}

#[tokio::test(start_paused = true)]
async fn a_failure_is_repeated_with_the_same_token_too() {
    let store = Faulty::new();
    store.inject(Operation::Fail, &[Fault::LoseReply, Fault::Refuse(ErrorKind::Timeout)], Fault::None);
    let failed = executor(&store).run(&key("k"), None, |_| async { Err::<u32, _>("no") }).await;
    assert!(matches!(failed, Err(RunError::Failed { error: "no", is_final: false, .. })), "{failed:?}");
    assert_eq!(store.calls(Operation::Fail), 3);
}

#[tokio::test(start_paused = true)]
async fn a_result_that_cannot_be_stored_until_the_leases_end_is_returned_as_unrecorded() {
    for fault in [Fault::Refuse(ErrorKind::Unavailable), Fault::Hang] {
        let store = Faulty::new();
        store.inject(Operation::Complete, &[], fault);
        store.inject(Operation::Fail, &[], fault);
        let begun = Instant::now();
        let result =
            executor(&store).run(&key("k"), None, |_| async { Ok::<_, Infallible>("effect".to_owned()) }).await;
        assert!(begun.elapsed() > LEASE * 9 / 10 && begun.elapsed() <= LEASE + Duration::from_millis(1));
        let shown = format!("{result:?}");
        assert!(!shown.contains("effect"), "{shown}");
        let Err(error) = result else { panic!() };
        assert!(std::error::Error::source(&error).is_some());
        let RunError::Unrecorded { result: Ok(value), attempt: 1, .. } = error else { panic!("{error:?}") };
        assert_eq!(value, "effect");
        let result = executor(&store).run(&key("other"), None, |_| async { Err::<u32, _>("no") }).await;
        assert!(matches!(result, Err(RunError::Unrecorded { result: Err("no"), .. })));
    }
}

#[tokio::test(start_paused = true)]
async fn a_permanent_error_of_complete_is_not_repeated() {
    let store = Faulty::new();
    store.inject(Operation::Complete, &[], Fault::Refuse(ErrorKind::Misconfigured));
    let result = executor(&store).run(&key("k"), None, |_| async { Ok::<_, Infallible>(1) }).await;
    assert!(matches!(result, Err(RunError::Unrecorded { result: Ok(1), .. })));
    assert_eq!(store.calls(Operation::Complete), 1);
}

/// The lease is counted from before the first send: a reserve that was long on its way leaves a lease that may be
/// nearly over, and is renewed before anything is run.
#[tokio::test(start_paused = true)]
async fn a_slow_reserve_is_renewed_before_the_operation() {
    let store = Faulty::new();
    store.inject(Operation::Reserve, &[Fault::Hang, Fault::Hang], Fault::None);
    let operation = |attempt: Attempt| async move { Ok::<_, Infallible>(attempt.is_lease_lost()) };
    assert!(!executor(&store).run(&key("k"), None, operation).await.unwrap().value);
    assert_eq!(store.calls(Operation::Renew), 1);
    store.inject(Operation::Reserve, &[Fault::Hang, Fault::Hang], Fault::None);
    store.inject(Operation::Renew, &[], Fault::Refuse(ErrorKind::Unavailable));
    let effects = Effects::default();
    let operation = {
        let effects = effects.clone();
        |_| async move { Ok::<_, Infallible>(effects.happen()) }
    };
    let result = executor(&store).run(&key("other"), None, operation).await;
    assert!(matches!(result, Err(RunError::Store(_))), "{result:?}");
    assert_eq!(effects.count(), 0);
}

#[tokio::test(start_paused = true)]
async fn numbers_grow_with_every_attempt() {
    let store = Faulty::new();
    let executor = executor(&store);
    for number in 1..=5 {
        if number % 2 == 0 {
            let answer = store.store.reserve(&Reserve::new(key("k")).with_lease(LEASE)).await.unwrap();
            let Reservation::Acquired(lease) = answer else { panic!() };
            assert_eq!(lease.attempt, number);
            store.clock.advance(LEASE);
        } else {
            let operation = |attempt: Attempt| async move { Err::<u32, _>(attempt.number().to_string()) };
            let result = executor.run(&key("k"), None, operation).await;
            let Err(RunError::Failed { error, attempt, .. }) = result else { panic!("{result:?}") };
            assert_eq!((error, attempt), (number.to_string(), number));
        }
    }
}

/// Somebody fails an attempt by its record before its holder knows that it holds: it begins anew under another token.
#[tokio::test(start_paused = true)]
async fn an_attempt_that_was_failed_before_it_began_begins_anew() {
    let store = Faulty::new();
    store.inject(Operation::Reserve, &[Fault::LoseReply], Fault::None);
    let runner = executor(&store);
    let operation = |attempt: Attempt| async move { Ok::<_, Infallible>(attempt.number()) };
    let running = tokio::spawn(async move { runner.run(&key("k"), None, operation).await });
    settle().await;
    let record = store.record(&key("k")).await.unwrap();
    store.store.fail(&record.lease(), &Failure::default()).await.unwrap();
    assert_eq!(running.await.unwrap().unwrap().value, 2);
    assert_eq!(store.calls(Operation::Reserve), 3);
}

/// Somebody completes a running attempt by its record: what they wrote stands, and the operation's result is returned.
#[tokio::test(start_paused = true)]
async fn a_result_does_not_overwrite_what_a_reconciler_wrote() {
    let store = Faulty::new();
    let writer = store.clone();
    let operation = |attempt: Attempt| async move {
        writer.store.complete(attempt.lease(), &Outcome::new(0, "1")).await.unwrap();
        Ok::<_, Infallible>(2)
    };
    let result = executor(&store).run(&key("k"), None, operation).await;
    let Err(RunError::Unrecorded { result: Ok(2), source, .. }) = result else { panic!("{result:?}") };
    assert_eq!(source.kind(), ErrorKind::AlreadyCompleted);
    let replay = executor(&store).run(&key("k"), None, |_| async { Ok::<_, Infallible>(3) }).await.unwrap();
    assert_eq!((replay.value, replay.replayed), (1, true));
}

/// The shortest and the longest lease that are allowed work.
#[tokio::test]
async fn the_limits_of_a_lease_work() {
    use idem_core::limits::{MAX_LEASE, MIN_DURATION};
    for lease in [MIN_DURATION, MAX_LEASE] {
        let store = idem_core::MemoryStore::new();
        let executor = Executor::builder(store).lease(lease).retention(MAX_LEASE).build().unwrap();
        for replayed in [false, true] {
            let executed = executor.run(&key("k"), None, |_| async { Ok::<_, Infallible>(7) }).await.unwrap();
            assert_eq!((executed.value, executed.replayed), (7, replayed));
        }
    }
}

/// A call that never answers is given up after ten seconds, however long the lease.
#[tokio::test(start_paused = true)]
async fn a_call_that_hangs_is_sent_again_soon() {
    let store = Faulty::new();
    let executor = Executor::builder(store.clone()).lease(Duration::from_secs(3600)).build().unwrap();
    store.inject(Operation::Reserve, &[Fault::Hang], Fault::None);
    store.inject(Operation::Complete, &[Fault::Hang], Fault::None);
    let begun = Instant::now();
    executor.run(&key("k"), None, |_| async { Ok::<_, Infallible>(7) }).await.unwrap();
    assert_eq!(begun.elapsed().as_secs(), 20);
}

/// What a waiting caller once sent without an answer may still arrive: the lease is counted from before the look that
/// was answered last, not from the one that got the key.
#[tokio::test(start_paused = true)]
async fn a_lease_got_by_waiting_counts_from_the_last_answer() {
    let store = Faulty::new();
    let Reservation::Acquired(holder) = store.store.reserve(&Reserve::new(key("k"))).await.unwrap() else { panic!() };
    store.inject(Operation::Reserve, &[Fault::Refuse(ErrorKind::Timeout)], Fault::None);
    let lease = Duration::from_secs(30);
    let executor = Executor::builder(store.clone())
        .lease(lease)
        .waiting(idem_core::executor::Waiting::UpTo(Duration::from_secs(600)))
        .build()
        .unwrap();
    let operation = |attempt: Attempt| async move {
        let begun = Instant::now();
        attempt.lease_lost().await;
        Ok::<_, Infallible>(begun.elapsed().as_millis() as u64)
    };
    let running = tokio::spawn(async move { executor.run(&key("k"), None, operation).await });
    // The looks are about a second apart by now.
    tokio::time::sleep(Duration::from_secs(20)).await;
    store.inject(Operation::Renew, &[], Fault::Refuse(ErrorKind::Unavailable));
    store.store.fail(&holder, &Failure::default()).await.unwrap();
    let lasted = running.await.unwrap().unwrap().value;
    assert!((28_900..29_600).contains(&lasted), "{lasted} ms");
}
