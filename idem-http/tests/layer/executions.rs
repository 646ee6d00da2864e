//! How handlers run: once, detached, under a lease, and what becomes of those that do not end well.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::body::Body;
use axum::routing::post;
use axum::{Extension, Router};
use http::Response;
use idem_core::clock::ManualClock;
use idem_core::executor::{Executor, OnPanic, Reconciliation, Recovery, Waiting};
use idem_core::{Key, KeyStore, MemoryStore, Origin, Reservation, Reserve, State};
use idem_http::{Attempt, Decision, IdempotencyLayer, Reason, Recorded, SingleTenant, StillRunning};
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::support::{Answer, Runs, executor, layer, request, send, service};

/// A handler that runs until it is told to end.
fn slow(layer: &IdempotencyLayer) -> (Router, Runs, Arc<Notify>) {
    let (runs, end) = (Runs::default(), Arc::new(Notify::new()));
    let (counted, ended) = (runs.clone(), Arc::clone(&end));
    let handler = move || async move {
        let run = counted.run();
        ended.notified().await;
        format!("run {run}")
    };
    (Router::new().route("/", post(handler)).layer(layer.clone()), runs, end)
}

async fn until(condition: impl Fn() -> bool) {
    timeout(Duration::from_secs(20), async {
        while !condition() {
            sleep(Duration::from_millis(1)).await;
        }
    })
    .await
    .unwrap();
}

/// Pitfalls 1 and 8.
#[tokio::test]
async fn of_many_at_once_one_runs_and_the_others_are_told() {
    let (router, runs, end) = slow(&layer());
    let mut callers = JoinSet::new();
    for _ in 0..50 {
        let router = router.clone();
        callers.spawn(async move { send(&router, request("/", "k", "")).await });
    }
    for _ in 0..49 {
        let refused = callers.join_next().await.unwrap().unwrap();
        refused.assert_refused(Reason::InProgress, 409);
        let seconds: u64 = refused.headers["retry-after"].to_str().unwrap().parse().unwrap();
        assert!((1..=30).contains(&seconds), "{seconds}");
        assert_eq!(refused.problem()["retryable"], true);
    }
    end.notify_one();
    let first = callers.join_next().await.unwrap().unwrap();
    assert_eq!((&first.body[..], first.is_replay(), runs.count()), (&b"run 1"[..], false, 1));
}

#[tokio::test]
async fn those_who_wait_get_the_response() {
    let executor = Executor::builder(MemoryStore::new()).waiting(Waiting::UpTo(Duration::from_secs(20))).build();
    let (router, runs, end) = slow(&IdempotencyLayer::new(executor.unwrap(), SingleTenant));
    let mut callers = JoinSet::new();
    for _ in 0..20 {
        let router = router.clone();
        callers.spawn(async move { send(&router, request("/", "k", "")).await });
    }
    until(|| runs.count() == 1).await;
    // Another request does not wait for an answer that is not its own. Pitfall 21.
    send(&router, request("/", "k", "other")).await.assert_refused(Reason::Mismatch, 422);
    end.notify_one();
    let answers = callers.join_all().await;
    assert!(answers.iter().all(|answer| answer.body == "run 1"));
    assert_eq!(answers.iter().filter(|answer| answer.is_replay()).count(), 19);
}

#[tokio::test(start_paused = true)]
async fn who_has_waited_long_enough_is_told() {
    let executor = Executor::builder(MemoryStore::new()).waiting(Waiting::UpTo(Duration::from_secs(2))).build();
    let (router, runs, _end) = slow(&IdempotencyLayer::new(executor.unwrap(), SingleTenant));
    let first = router.clone();
    let first = tokio::spawn(async move { send(&first, request("/", "k", "")).await });
    tokio::task::yield_now().await;
    let begun = tokio::time::Instant::now();
    send(&router, request("/", "k", "")).await.assert_refused(Reason::InProgress, 409);
    assert_eq!((begun.elapsed().as_secs(), runs.count()), (2, 1));
    first.abort();
}

/// Pitfall 24.
#[tokio::test]
async fn a_handler_goes_on_when_its_client_has_gone() {
    let layer = layer();
    let (router, runs, end) = slow(&layer);
    let gone = router.clone();
    let client = tokio::spawn(async move { send(&gone, request("/", "k", "")).await });
    until(|| runs.count() == 1).await;
    client.abort();
    assert!(client.await.unwrap_err().is_cancelled());
    send(&router, request("/", "k", "")).await.assert_refused(Reason::InProgress, 409);
    end.notify_one();
    layer.drain(Duration::from_secs(20)).await.unwrap();
    let again = send(&router, request("/", "k", "")).await;
    assert_eq!((&again.body[..], again.is_replay(), runs.count()), (&b"run 1"[..], true, 1));
}

#[tokio::test]
async fn a_shutdown_waits_for_what_runs_until_its_time_is_over() {
    let layer = layer();
    let sibling = layer.clone().with_executor(layer.executor().sibling().build().unwrap());
    assert_eq!(layer.drain(Duration::ZERO).await, Ok(()));
    let (router, runs, end) = slow(&sibling);
    let client = tokio::spawn(async move { send(&router, request("/", "k", "")).await });
    until(|| runs.count() == 1).await;
    client.abort();
    // Whichever layer is asked: the executors are siblings.
    let error = layer.drain(Duration::from_millis(20)).await.unwrap_err();
    assert!(matches!(error, StillRunning { handlers: 1, .. }) && error.to_string().contains('1'));
    end.notify_one();
    layer.drain(Duration::from_secs(20)).await.unwrap();
}

/// Pitfalls 22 and 23.
#[tokio::test]
async fn a_panic_resolves_the_key_at_once() {
    for (on_panic, again) in [(OnPanic::Free, None), (OnPanic::Abandon, Some(Reason::InProgress))] {
        let runs = Runs::default();
        let counted = runs.clone();
        let handler = move || async move {
            assert!(counted.run() > 1, "the first of them");
            "ok"
        };
        let executor = executor().sibling().on_panic(on_panic).build().unwrap();
        let router = Router::new().route("/", post(handler)).layer(IdempotencyLayer::new(executor, SingleTenant));
        let first = send(&router, request("/", "k", "")).await;
        first.assert_refused(Reason::Panicked, 500);
        assert!(
            !String::from_utf8_lossy(&first.body).contains("the first of them"),
            "a panic's text is not for clients"
        );
        let second = send(&router, request("/", "k", "")).await;
        match again {
            None => assert_eq!((second.status, runs.count()), (200, 2)),
            Some(reason) => {
                second.assert_refused(reason, 409);
                assert_eq!(runs.count(), 1);
            }
        }
    }
}

/// A panic in a later poll, and in one of the functions of the layer's settings.
#[tokio::test]
async fn panics_of_all_kinds_are_borne() {
    let late = || async {
        tokio::task::yield_now().await;
        if true {
            panic!("late");
        }
    };
    let router = Router::new().route("/", post(late)).layer(layer());
    send(&router, request("/", "k", "")).await.assert_refused(Reason::Panicked, 500);
    let finality = idem_http::Finality::custom(|_| panic!("of the policy"));
    let (router, _) = service(&layer().with_finality(finality), |run| run.to_string());
    send(&router, request("/", "k", "")).await.assert_refused(Reason::Panicked, 500);
}

#[tokio::test]
async fn the_handler_learns_its_key_attempt_and_origin() {
    let handler = |Extension(attempt): Extension<Attempt>| async move {
        let status = if attempt.number() == 1 { 503 } else { 200 };
        let body =
            format!("{}/{} {} {:?}", attempt.key().scope(), attempt.key().id(), attempt.number(), attempt.origin());
        Response::builder().status(status).body(Body::from(body)).unwrap()
    };
    let tenant = |_: &http::request::Parts| idem_http::Scope::new("tenant").ok();
    let router = Router::new().route("/", post(handler)).layer(IdempotencyLayer::new(executor(), tenant));
    let answer = async || send(&router, request("/", "\"order 1\"", "")).await;
    assert_eq!(answer().await.body, "tenant/order 1 1 Fresh");
    let second = answer().await;
    assert_eq!(second.body, "tenant/order 1 2 Retry");
    assert_eq!(second.decision, Some(Decision::Ran { attempt: 2, took_over: false, recorded: Recorded::Whole }));
    assert_eq!(answer().await.decision, Some(Decision::Replayed { attempt: 2 }));
}

/// A store whose clock goes by hand, with a key on it whose holder is silent: its process has died.
async fn abandoned() -> (Arc<MemoryStore>, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::default());
    let store = Arc::new(MemoryStore::builder().clock(Arc::clone(&clock) as _).build());
    let reserve = Reserve::new(Key::new("", "k").unwrap()).with_lease(Duration::from_millis(5_900));
    assert!(matches!(store.reserve(&reserve).await.unwrap(), Reservation::Acquired(_)));
    (store, clock)
}

fn with(store: &Arc<MemoryStore>, recovery: Recovery) -> IdempotencyLayer {
    let executor = Executor::builder(Arc::clone(store)).on_abandoned(recovery).build().unwrap();
    IdempotencyLayer::new(executor, SingleTenant)
}

#[tokio::test]
async fn the_time_to_come_back_is_whole_seconds_and_never_past_the_lease() {
    let (store, clock) = abandoned().await;
    let (router, _) = service(&with(&store, Recovery::Rerun), |run| run.to_string());
    for (passes, seconds) in [(0, "5"), (900, "5"), (1, "4"), (4_000, "1"), (990, "1")] {
        clock.advance(Duration::from_millis(passes));
        let refused = send(&router, request("/", "k", "")).await;
        refused.assert_refused(Reason::InProgress, 409);
        assert_eq!(refused.headers["retry-after"], seconds);
    }
    clock.advance(Duration::from_millis(9));
    assert_eq!(send(&router, request("/", "k", "")).await.status, 200);
}

#[tokio::test]
async fn a_key_whose_holder_died_is_taken_over_refused_or_asked_about() {
    let (store, clock) = abandoned().await;
    clock.advance(Duration::from_secs(6));
    let (router, runs) = service(&with(&store, Recovery::Rerun), |run| run.to_string());
    let taken = send(&router, request("/", "k", "")).await;
    assert_eq!(taken.decision, Some(Decision::Ran { attempt: 2, took_over: true, recorded: Recorded::Whole }));
    assert_eq!(runs.count(), 1);

    let (store, clock) = abandoned().await;
    clock.advance(Duration::from_secs(6));
    let (router, runs) = service(&with(&store, Recovery::Refuse), |run| run.to_string());
    for _ in 0..2 {
        let refused = send(&router, request("/", "k", "")).await;
        refused.assert_refused(Reason::Abandoned, 500);
        assert_eq!((&refused.problem()["retryable"], refused.headers.get("retry-after")), (&false.into(), None));
    }
    // Somebody finds out.
    let record = store.fetch(&Key::new("", "k").unwrap()).await.unwrap().unwrap();
    let found = Response::builder().status(201).header("location", "/found").body("found".into()).unwrap();
    store.complete(&record.lease(), &idem_http::outcome(&found)).await.unwrap();
    let answer = send(&router, request("/", "k", "")).await;
    assert!(answer.is_replay() && answer.status == 201 && answer.headers["location"] == "/found");
    assert_eq!((&answer.body[..], runs.count()), (&b"found"[..], 0));
}

#[tokio::test]
async fn a_hook_says_what_became_of_a_key_whose_holder_died() {
    let found = Response::builder().status(202).body("found".into()).unwrap();
    for (word, status, runs_then) in [
        (Reconciliation::Executed(idem_http::outcome(&found)), 202, 0),
        (Reconciliation::NotExecuted, 200, 1),
        (Reconciliation::Unknown, 503, 0),
    ] {
        let (store, clock) = abandoned().await;
        clock.advance(Duration::from_secs(6));
        let said = word.clone();
        let hook = move |lease: idem_core::Lease| {
            assert!(matches!(lease.origin, Origin::Takeover(_)));
            let said = said.clone();
            async move { said }
        };
        let (router, runs) = service(&with(&store, Recovery::reconcile(hook)), |run| run.to_string());
        let answer = send(&router, request("/", "k", "")).await;
        assert_eq!((answer.status, runs.count()), (status, runs_then), "{word:?}");
        match word {
            Reconciliation::Executed(_) => assert!(answer.is_replay() && answer.body == "found"),
            Reconciliation::NotExecuted => assert!(!answer.is_replay()),
            Reconciliation::Unknown => {
                answer.assert_refused(Reason::OutcomeUnknown, 503);
                // The hook is asked again when this attempt's lease is over.
                assert_eq!(answer.headers["retry-after"], "30");
            }
        }
    }
}

/// Pitfall 15: the loss is told to the handler, whose result is not stored over its successor's.
#[tokio::test(start_paused = true)]
async fn a_lost_lease_is_visible_to_the_handler() {
    let clock = Arc::new(ManualClock::default());
    let store = Arc::new(MemoryStore::builder().clock(Arc::clone(&clock) as _).build());
    let (tell, told) = oneshot::channel();
    let tell = Arc::new(std::sync::Mutex::new(Some(tell)));
    let handler = move |Extension(attempt): Extension<Attempt>| async move {
        let tell = tell.lock().unwrap().take();
        if let Some(tell) = tell {
            assert!(!attempt.is_lease_lost());
            tell.send(()).unwrap();
            attempt.lease_lost().await;
        }
        format!("attempt {}", attempt.number())
    };
    let layer = with(&store, Recovery::Rerun);
    let router = Router::new().route("/", post(handler)).layer(layer);
    let first = router.clone();
    let first = tokio::spawn(async move { send(&first, request("/", "k", "")).await });
    told.await.unwrap();
    // By the store's clock the lease is over, which the holder does not know.
    clock.advance(Duration::from_secs(31));
    let second = send(&router, request("/", "k", "")).await;
    assert_eq!((&second.body[..], second.is_replay()), (&b"attempt 2"[..], false));
    let first = first.await.unwrap();
    assert_eq!(first.decision, Some(Decision::Ran { attempt: 1, took_over: false, recorded: Recorded::Failed }));
    assert_eq!(first.body, "attempt 1");
    assert_eq!(send(&router, request("/", "k", "")).await.body, "attempt 2");
}

/// Longer than the lease: it is renewed.
#[tokio::test]
async fn a_long_handler_keeps_its_key() {
    let executor = Executor::builder(MemoryStore::new()).lease(Duration::from_millis(600)).build().unwrap();
    let (router, runs, end) = slow(&IdempotencyLayer::new(executor, SingleTenant));
    let first = router.clone();
    let first = tokio::spawn(async move { send(&first, request("/", "k", "")).await });
    for _ in 0..8 {
        sleep(Duration::from_millis(200)).await;
        let refused = send(&router, request("/", "k", "")).await;
        refused.assert_refused(Reason::InProgress, 409);
        assert_eq!(refused.headers["retry-after"], "1");
    }
    end.notify_one();
    assert_eq!((first.await.unwrap().status, runs.count()), (200, 1));
}

/// A handler that commits its own rows completes its key with them, and its client gets what it returned.
#[tokio::test]
async fn a_handler_can_complete_its_key_itself() {
    let store = Arc::new(MemoryStore::new());
    let committed = Arc::clone(&store);
    static RUN: AtomicU64 = AtomicU64::new(0);
    let handler = move |Extension(attempt): Extension<Attempt>| async move {
        let response = Response::builder().status(201).header("location", "/1").body("charged".into()).unwrap();
        let outcome = idem_http::outcome(&response);
        committed.complete(attempt.lease(), &outcome).await.unwrap();
        match RUN.fetch_add(1, Ordering::SeqCst) {
            // The commit was answered.
            0 => attempt.mark_completed(outcome),
            // It was not, and the handler knows no better than to say so.
            1 => return Response::builder().status(503).body(Body::empty()).unwrap(),
            // It knows nothing at all.
            _ => panic!("after the commit"),
        }
        response.map(Body::from)
    };
    let router = Router::new().route("/", post(handler)).layer(with(&store, Recovery::Rerun));
    for key in ["answered", "not answered", "panicked"] {
        let key = format!("\"{key}\"");
        let first: Answer = send(&router, request("/", &key, "")).await;
        assert_eq!((first.status, &first.body[..], first.is_replay()), (201, &b"charged"[..], false), "{key}");
        assert_eq!(first.headers["location"], "/1");
        let again = send(&router, request("/", &key, "")).await;
        assert_eq!((again.status, &again.body, again.is_replay()), (201, &first.body, true));
    }
    assert_eq!(RUN.load(Ordering::SeqCst), 3);
}

#[tokio::test]
async fn what_an_attempt_leaves_is_a_note_without_its_body() {
    let layer = layer();
    let (router, _) = service(&layer, |_| Response::builder().status(503).body(Body::from("secret")).unwrap());
    assert_eq!(send(&router, request("/", "k", "")).await.status, 503);
    let record = layer.executor().store().fetch(&Key::new("", "k").unwrap()).await.unwrap().unwrap();
    let State::Failed(failure) = record.state else { panic!("it is free") };
    assert_eq!(failure.note(), "responded with 503");
}
