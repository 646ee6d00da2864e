//! The layer's own answers: statuses, presets and forms.

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use idem_core::executor::{Executor, OnPanic, Recovery};
use idem_core::{ErrorKind, Operation};
use idem_http::{Decision, IdempotencyLayer, KeyFormat, Reason, RequestScope, Scope, SingleTenant};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::routing::post;

use crate::support::{Answer, Frail, executor, layer, request, send, service};

/// Nobody, where the request says so.
struct Known;

impl RequestScope for Known {
    fn scope(&self, request: &http::request::Parts) -> Option<Scope> {
        (!request.headers.contains_key("nobody")).then(Scope::default)
    }
}

/// Every reason, brought about by requests alone.
async fn provoke(reason: Reason, set: impl Fn(IdempotencyLayer) -> IdempotencyLayer) -> Answer {
    let store = Arc::new(Frail::default());
    let builder = Executor::builder(Arc::clone(&store)).lease(Duration::from_millis(400)).on_panic(OnPanic::Abandon);
    let builder = match reason {
        Reason::Abandoned => builder.on_abandoned(Recovery::Refuse),
        Reason::OutcomeUnknown => {
            builder.on_abandoned(Recovery::reconcile(|_| async { idem_core::executor::Reconciliation::Unknown }))
        }
        _ => builder,
    };
    let layer = set(IdempotencyLayer::new(builder.build().unwrap(), Known).with_body_limit(5));
    let handler = |request: axum::extract::Request| async move {
        match request.uri().query() {
            Some("panics") => panic!("as asked"),
            Some("waits") => std::future::pending().await,
            Some("large") => Response::new(Body::from(vec![0; 1024 * 1024 + 1])),
            _ => Response::new(Body::empty()),
        }
    };
    let router = Router::new().route("/", post(handler)).layer(layer);
    match reason {
        Reason::KeyMissing => send(&router, Request::post("/").body(Body::empty()).unwrap()).await,
        Reason::KeyInvalid => send(&router, request("/", "a, b", "")).await,
        Reason::KeyNotAdmitted => send(&router, request("/", "k", "")).await,
        Reason::ScopeUnknown => {
            let mut nobody = request("/", "k", "");
            nobody.headers_mut().insert("nobody", "1".parse().unwrap());
            send(&router, nobody).await
        }
        Reason::BodyTooLarge => send(&router, request("/", "k", "six by")).await,
        Reason::BodyUnreadable => {
            let broken = crate::support::Polled(|_: &mut std::task::Context<'_>| {
                std::task::Poll::Ready(Some(Err::<http_body::Frame<Bytes>, _>("broken")))
            });
            send(&router, request("/", "k", Body::new(broken))).await
        }
        Reason::InProgress => {
            let first = router.clone();
            tokio::spawn(async move { send(&first, request("/?waits", "k", "")).await });
            tokio::time::sleep(Duration::from_millis(10)).await;
            send(&router, request("/?waits", "k", "")).await
        }
        Reason::Mismatch => {
            send(&router, request("/", "k", "")).await;
            send(&router, request("/", "k", "other")).await
        }
        Reason::Abandoned | Reason::OutcomeUnknown => {
            send(&router, request("/?panics", "k", "")).await;
            tokio::time::sleep(Duration::from_millis(450)).await;
            send(&router, request("/?panics", "k", "")).await
        }
        Reason::Withheld => {
            send(&router, request("/?large", "k", "")).await;
            send(&router, request("/?large", "k", "")).await
        }
        Reason::Unreadable => {
            use idem_core::{Key, KeyStore, Outcome, Reservation, Reserve};
            let reserve = Reserve::new(Key::new("", "k").unwrap());
            let Reservation::Acquired(lease) = store.reserve(&reserve).await.unwrap() else { panic!("it is new") };
            store.complete(&lease, &Outcome::new(0, "")).await.unwrap();
            send(&router, request("/", "k", "")).await
        }
        Reason::Panicked => send(&router, request("/?panics", "k", "")).await,
        Reason::StoreUnavailable => {
            store.fail(Operation::Reserve, ErrorKind::Unavailable);
            send(&router, request("/", "k", "")).await
        }
        Reason::Interrupted => {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let answer = std::thread::spawn(move || {
                let call = {
                    let _within = runtime.enter();
                    let mut call = Box::pin(async move { send(&router, request("/?waits", "k", "")).await });
                    runtime.block_on(async {
                        tokio::select! {
                            biased;
                            _ = &mut call => panic!("it waits"),
                            () = tokio::task::yield_now() => {}
                        }
                    });
                    call
                };
                drop(runtime);
                let other = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                other.block_on(call)
            });
            answer.join().unwrap()
        }
        other => panic!("a new reason needs a test: {other:?}"),
    }
}

fn default_status(reason: Reason) -> u16 {
    match reason {
        Reason::KeyMissing | Reason::KeyInvalid | Reason::KeyNotAdmitted | Reason::BodyUnreadable => 400,
        Reason::ScopeUnknown => 403,
        Reason::InProgress => 409,
        Reason::Withheld => 410,
        Reason::BodyTooLarge => 413,
        Reason::Mismatch => 422,
        Reason::Abandoned | Reason::Unreadable | Reason::Panicked => 500,
        Reason::OutcomeUnknown | Reason::StoreUnavailable | Reason::Interrupted => 503,
        other => panic!("{other:?}"),
    }
}

fn strict(reason: Reason) -> impl Fn(IdempotencyLayer) -> IdempotencyLayer {
    move |layer| if reason == Reason::KeyNotAdmitted { layer.with_key_format(KeyFormat::Uuid) } else { layer }
}

#[tokio::test]
async fn every_reason_has_its_status_and_can_be_given_another() {
    for reason in Reason::ALL {
        provoke(reason, strict(reason)).await.assert_refused(reason, default_status(reason));
        let teapot = |layer| strict(reason)(layer).with_status(reason, StatusCode::IM_A_TEAPOT);
        provoke(reason, teapot).await.assert_refused(reason, 418);
    }
}

#[tokio::test]
async fn every_reason_can_have_an_address_documentation_and_a_body_of_its_own() {
    for reason in Reason::ALL {
        let answer = provoke(reason, |layer| {
            strict(reason)(layer)
                .with_problem_types("https://api.example/problems/")
                .with_documentation("https://api.example/idempotency")
                .unwrap()
        })
        .await;
        assert_eq!(answer.problem()["type"], format!("https://api.example/problems/{}", reason.as_str()));
        assert_eq!(
            answer.headers["link"],
            "<https://api.example/idempotency>; rel=\"describedby\"; type=\"text/html\""
        );
        let answer = provoke(reason, |layer| {
            strict(reason)(layer).with_responder(move |refusal, standard| {
                // What comes before it, such as a panic.
                if refusal.reason() != reason {
                    return standard;
                }
                assert_eq!(refusal.status(), standard.status());
                assert!(!refusal.detail().is_empty());
                let retry = standard.headers().get("retry-after").map(|value| value.to_str().unwrap().parse().unwrap());
                assert_eq!(retry, refusal.retry_after());
                assert!(!refusal.is_retryable() || refusal.original_status().is_none());
                Response::builder().status(499).body(Bytes::from(refusal.reason().title())).unwrap()
            })
        })
        .await;
        assert_eq!((answer.status, &answer.body[..]), (499, reason.title().as_bytes()));
        assert_eq!(answer.decision, Some(Decision::Refused(reason)));
    }
    assert!(layer().with_documentation("https://a\n").is_err());
}

/// Refusals that a client may repeat say so, and when.
#[tokio::test]
async fn what_is_retryable_says_when() {
    for reason in Reason::ALL {
        let answer = provoke(reason, strict(reason)).await;
        let retryable = matches!(
            reason,
            Reason::InProgress
                | Reason::OutcomeUnknown
                | Reason::StoreUnavailable
                | Reason::BodyUnreadable
                | Reason::Panicked
                | Reason::Interrupted
        );
        assert_eq!(answer.problem()["retryable"], retryable, "{reason:?}");
        let timed = matches!(reason, Reason::InProgress | Reason::OutcomeUnknown | Reason::StoreUnavailable);
        assert_eq!(answer.headers.get("retry-after").is_some(), timed, "{reason:?}");
        if timed {
            assert_eq!(answer.headers["retry-after"], "1");
        }
    }
}

/// 423 and 425 instead of 409.
#[tokio::test]
async fn a_key_in_use_is_locked_or_too_early_by_choice() {
    for status in [StatusCode::LOCKED, StatusCode::TOO_EARLY] {
        let answer = provoke(Reason::InProgress, |layer| layer.with_status(Reason::InProgress, status)).await;
        answer.assert_refused(Reason::InProgress, status.as_u16());
    }
}

#[tokio::test]
async fn the_preset_of_stripe() {
    let (router, runs) = service(&IdempotencyLayer::stripe(executor(), SingleTenant), |run| match run {
        1 => StatusCode::INTERNAL_SERVER_ERROR,
        _ => StatusCode::OK,
    });
    // Its errors are answers, it is about POST, and a key is optional.
    assert!(!send(&router, request("/", "k", "a")).await.is_replay());
    let kept = send(&router, request("/", "k", "a")).await;
    assert_eq!((kept.status, kept.is_replay()), (500, true));
    send(&router, request("/", "k", "b")).await.assert_refused(Reason::Mismatch, 400);
    assert_eq!(send(&router, Request::post("/").body(Body::empty()).unwrap()).await.status, 200);
    let patch = Request::patch("/").header("idempotency-key", "a, b").body(Body::empty()).unwrap();
    assert_eq!(send(&router, patch).await.status, 405);
    assert_eq!(runs.count(), 2);
}
