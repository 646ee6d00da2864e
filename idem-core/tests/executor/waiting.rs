//! Repeats that wait for the holder.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use idem_core::executor::{Executor, Recovery, RunError, Waiting};
use idem_core::{Fingerprint, KeyStore, Operation, Outcome, Reservation, Reserve};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::support::{Effects, Faulty, key, settle};

fn waiting(store: &Arc<Faulty>, most: Duration) -> Executor {
    Executor::builder(store.clone()).lease(Duration::from_secs(3600)).waiting(Waiting::UpTo(most)).build().unwrap()
}

/// Woken at once: no time passes between the holder's end and the waiting one's result, also across executors.
#[tokio::test(start_paused = true)]
async fn a_holder_in_this_process_wakes_the_waiting_at_once() {
    let store = Faulty::new();
    let (finish, finished) = oneshot::channel::<()>();
    let holder = waiting(&store, Duration::ZERO);
    tokio::spawn(async move {
        holder.run(&key("wake"), None, |_| async { finished.await.map(|()| 7).map_err(|e| e.to_string()) }).await
    });
    settle().await;
    let mut callers = JoinSet::new();
    for _ in 0..20 {
        let executor = waiting(&store, Duration::from_secs(600));
        callers.spawn(async move { executor.run(&key("wake"), None, |_| async { Ok::<_, String>(8) }).await });
    }
    // Long enough for the back-off to have reached its longest.
    store.pass(Duration::from_secs(60)).await;
    let ended = Instant::now();
    finish.send(()).unwrap();
    while let Some(caller) = callers.join_next().await {
        let executed = caller.unwrap().unwrap();
        assert_eq!((executed.value, executed.replayed), (7, true));
    }
    assert_eq!(ended.elapsed(), Duration::ZERO);
}

/// Each failure lets exactly one of the waiting run, at once.
#[tokio::test(start_paused = true)]
async fn after_a_failure_one_of_the_waiting_runs() {
    let store = Faulty::new();
    let effects = Effects::default();
    let mut callers = JoinSet::new();
    for _ in 0..10 {
        let (executor, effects) = (waiting(&store, Duration::from_secs(600)), effects.clone());
        callers.spawn(async move {
            let operation = |_| async move {
                tokio::time::sleep(Duration::from_secs(5)).await;
                if effects.happen() < 5 { Err("not yet") } else { Ok(effects.count()) }
            };
            executor.run(&key("one-of"), None, operation).await
        });
    }
    let begun = Instant::now();
    let (mut failed, mut done) = (0, 0);
    while let Some(caller) = callers.join_next().await {
        match caller.unwrap() {
            Ok(executed) => {
                assert_eq!(executed.value, 5);
                done += 1;
            }
            Err(RunError::Failed { .. }) => failed += 1,
            Err(other) => panic!("{other:?}"),
        }
    }
    assert_eq!((failed, done, effects.count()), (4, 6, 5));
    assert!(begun.elapsed() < Duration::from_millis(25_050), "{:?}", begun.elapsed());
}

/// For a holder elsewhere the store is asked, seldom.
#[tokio::test(start_paused = true)]
async fn a_holder_elsewhere_is_looked_for_with_growing_pauses() {
    let store = Faulty::new();
    let Reservation::Acquired(lease) = store.store.reserve(&Reserve::new(key("far"))).await.unwrap() else { panic!() };
    let executor = waiting(&store, Duration::from_secs(600));
    let running = tokio::spawn(async move { executor.run(&key("far"), None, |_| async { Ok::<_, String>(8) }).await });
    tokio::time::sleep(Duration::from_millis(200)).await;
    let early = store.calls(Operation::Reserve);
    assert!((4..=10).contains(&early), "{early} looks in the first 200 ms");
    tokio::time::sleep(Duration::from_secs(20)).await;
    let late = store.calls(Operation::Reserve);
    assert!((20..=50).contains(&late), "{late} looks in 20 s");
    store.store.complete(&lease, &Outcome::new(0, "9")).await.unwrap();
    let ended = Instant::now();
    assert_eq!(running.await.unwrap().unwrap().value, 9);
    assert!(ended.elapsed() <= Duration::from_millis(1001), "{:?}", ended.elapsed());
}

#[tokio::test(start_paused = true)]
async fn waiting_is_bounded() {
    let store = Faulty::new();
    let Reservation::Acquired(_) = store.store.reserve(&Reserve::new(key("bound"))).await.unwrap() else { panic!() };
    for most in [Duration::ZERO, Duration::from_millis(10), Duration::from_secs(5)] {
        let begun = Instant::now();
        let result = waiting(&store, most).run(&key("bound"), None, |_| async { Ok::<_, String>(8) }).await;
        assert!(matches!(result, Err(RunError::InProgress { attempt: 1, .. })), "{result:?}");
        assert!(begun.elapsed() >= most && begun.elapsed() <= most + Duration::from_millis(1));
    }
    let call = key("bound");
    let forever = waiting(&store, Duration::MAX);
    let forever = forever.run(&call, None, |_| async { Ok::<_, String>(8) });
    assert!(tokio::time::timeout(Duration::from_secs(86_400), forever).await.is_err());
}

/// The end of the holder's lease ends the wait: by a take-over, or by the refusal.
#[tokio::test(start_paused = true)]
async fn the_holders_lease_ends_the_wait() {
    for recovery in [Recovery::Rerun, Recovery::Refuse] {
        let store = Faulty::new();
        let request = Reserve::new(key("ends")).with_lease(Duration::from_millis(400));
        let Reservation::Acquired(_) = store.store.reserve(&request).await.unwrap() else { panic!() };
        let refuse = matches!(recovery, Recovery::Refuse);
        let executor = Executor::builder(store.clone())
            .waiting(Waiting::UpTo(Duration::from_secs(600)))
            .on_abandoned(recovery)
            .build()
            .unwrap();
        let begun = Instant::now();
        let running =
            tokio::spawn(async move { executor.run(&key("ends"), None, |_| async { Ok::<_, String>(8) }).await });
        store.pass(Duration::from_millis(400)).await;
        let result = running.await.unwrap();
        // Not the pause of up to 400 ms that the back-off has reached by then.
        assert!(begun.elapsed() < Duration::from_millis(700), "{:?}", begun.elapsed());
        match result {
            Ok(executed) => assert_eq!((executed.attempt, refuse), (2, false)),
            Err(RunError::Abandoned(_)) => assert!(refuse),
            Err(other) => panic!("{other:?}"),
        }
    }
}

/// Pitfall 21: a waiting repeat with another fingerprint does not wait for the wrong answer.
#[tokio::test(start_paused = true)]
async fn a_mismatch_does_not_wait() {
    let store = Faulty::new();
    let request = Reserve::new(key("mismatch")).with_fingerprint(Fingerprint::of("one"));
    store.store.reserve(&request).await.unwrap();
    let begun = Instant::now();
    let result = waiting(&store, Duration::from_secs(600))
        .run(&key("mismatch"), Fingerprint::of("two"), |_| async { Ok::<_, Infallible>(8) })
        .await;
    assert!(matches!(result, Err(RunError::Mismatch)));
    assert_eq!(begun.elapsed(), Duration::ZERO);
}
