//! A store that fails.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use idem_core::executor::Executor;
use idem_core::{ErrorKind, Operation};
use idem_http::{Decision, IdempotencyLayer, OnStoreError, Reason, Recorded, SingleTenant};

use crate::support::{Frail, Runs, request, send, service};

fn frail(set: impl Fn(IdempotencyLayer) -> IdempotencyLayer) -> (Arc<Frail>, Router, Runs) {
    let store = Arc::new(Frail::default());
    let executor = Executor::builder(Arc::clone(&store)).lease(Duration::from_secs(3)).build().unwrap();
    let (router, runs) = service(&set(IdempotencyLayer::new(executor, SingleTenant)), |run| run.to_string());
    (store, router, runs)
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_down_is_503_and_the_handler_does_not_run() {
    let kinds =
        [ErrorKind::Unavailable, ErrorKind::Timeout, ErrorKind::Full, ErrorKind::Misconfigured, ErrorKind::Unreadable];
    let (store, router, runs) = frail(|layer| layer);
    for kind in kinds {
        store.fail(Operation::Reserve, kind);
        let refused = send(&router, request("/", "k", "")).await;
        refused.assert_refused(Reason::StoreUnavailable, 503);
        assert_eq!(
            (&refused.headers["retry-after"], refused.problem()["retryable"].as_bool()),
            (&"1".parse().unwrap(), Some(true))
        );
        store.mend();
    }
    assert_eq!(runs.count(), 0);
    assert_eq!(send(&router, request("/", "k", "")).await.body, "1");
}

#[tokio::test(start_paused = true)]
async fn by_choice_the_handler_runs_unprotected() {
    let (store, router, runs) = frail(|layer| layer.with_on_store_error(OnStoreError::RunUnprotected));
    store.fail(Operation::Reserve, ErrorKind::Unavailable);
    for run in 1..3 {
        let answer = send(&router, request("/", "k", "body")).await;
        assert_eq!((answer.status, answer.decision, runs.count()), (200, Some(Decision::Unprotected), run));
    }
    store.mend();
    // Bad requests are refused all the same, and where the store is up all is as ever.
    store.fail(Operation::Complete, ErrorKind::Unavailable);
    store.mend();
    assert!(!send(&router, request("/", "k", "body")).await.is_replay());
    assert!(send(&router, request("/", "k", "body")).await.is_replay());
    send(&router, request("/", "k", "other")).await.assert_refused(Reason::Mismatch, 422);
    assert_eq!(runs.count(), 3);
    // There is a record, of which it cannot be told whether it is completed.
    store.fail(Operation::Reserve, ErrorKind::Unreadable);
    send(&router, request("/", "k", "body")).await.assert_refused(Reason::StoreUnavailable, 503);
    assert_eq!(runs.count(), 3);
}

/// The client gets its response, and the key stays held until the lease's end: no repeat runs before.
#[tokio::test(start_paused = true)]
async fn a_response_is_given_although_it_could_not_be_stored() {
    let (store, router, runs) = frail(|layer| layer);
    store.fail(Operation::Complete, ErrorKind::Unavailable);
    let first = send(&router, request("/", "k", "")).await;
    assert_eq!((first.status, &first.body[..]), (200, &b"1"[..]));
    assert_eq!(first.decision, Some(Decision::Ran { attempt: 1, took_over: false, recorded: Recorded::Failed }));
    store.mend();
    send(&router, request("/", "k", "")).await.assert_refused(Reason::InProgress, 409);
    assert_eq!(runs.count(), 1);
}

/// Within that time it is stored after all.
#[tokio::test(start_paused = true)]
async fn a_response_is_stored_when_the_store_comes_back() {
    let (store, router, runs) = frail(|layer| layer);
    store.fail(Operation::Complete, ErrorKind::Unavailable);
    let first = router.clone();
    let first = tokio::spawn(async move { send(&first, request("/", "k", "")).await });
    tokio::time::sleep(Duration::from_millis(500)).await;
    send(&router, request("/", "k", "")).await.assert_refused(Reason::InProgress, 409);
    store.mend();
    let first = first.await.unwrap();
    assert_eq!(first.decision, Some(Decision::Ran { attempt: 1, took_over: false, recorded: Recorded::Whole }));
    let again = send(&router, request("/", "k", "")).await;
    assert_eq!((again.is_replay(), again.body, runs.count()), (true, first.body, 1));
}

/// A key that could not be freed is held until the lease's end.
#[tokio::test(start_paused = true)]
async fn a_refusal_to_free_a_key_does_not_reach_the_client() {
    let store = Arc::new(Frail::default());
    store.fail(Operation::Fail, ErrorKind::Unavailable);
    let executor = Executor::builder(Arc::clone(&store)).lease(Duration::from_secs(3)).build().unwrap();
    let layer = IdempotencyLayer::new(executor, SingleTenant);
    let (router, _) = service(&layer, |_| http::StatusCode::BAD_GATEWAY);
    assert_eq!(send(&router, request("/", "k", "")).await.status, 502);
    send(&router, request("/", "k", "")).await.assert_refused(Reason::InProgress, 409);
}
