//! Which responses are kept.

use axum::body::Body;
use axum::extract::Request as AxumRequest;
use axum::routing::post;
use axum::{Extension, Json, Router};
use http::{Method, Request, Response, StatusCode};
use idem_http::{BeforeRun, Decision, Finality, IdempotencyLayer, Recorded, Recording};

use crate::support::{Runs, executor, layer, request, send, service};

/// A handler that responds with the status that it is asked for.
fn statuses(layer: IdempotencyLayer) -> Router {
    let handler = |request: AxumRequest| async move {
        let status: u16 = request.uri().query().unwrap().parse().unwrap();
        Response::builder().status(status).body(Body::from("answer")).unwrap()
    };
    Router::new().route("/", post(handler)).layer(layer)
}

async fn kept(router: &Router, status: u16) -> bool {
    let again = || request(&format!("/?{status}"), &format!("k{status}"), "");
    let first = send(router, again()).await;
    assert_eq!((first.status, first.is_replay(), &first.body[..]), (status, false, &b"answer"[..]));
    let repeat = send(router, again()).await;
    assert_eq!(repeat.status, status);
    let Some(Decision::Ran { recorded, .. }) = first.decision else { panic!("{first:?}") };
    assert_eq!(recorded, if repeat.is_replay() { Recorded::Whole } else { Recorded::Freed });
    repeat.is_replay()
}

/// Pitfall 27.
#[tokio::test]
async fn responses_that_a_repeat_may_mend_are_not_kept() {
    let router = statuses(layer());
    for status in [200, 201, 202, 226, 301, 303, 400, 401, 402, 403, 404, 406, 409, 410, 412, 418, 422, 423, 451, 499] {
        assert!(kept(&router, status).await, "{status}");
    }
    for status in [405, 408, 413, 415, 425, 429, 500, 501, 502, 503, 504, 599] {
        assert!(!kept(&router, status).await, "{status}");
    }
}

#[tokio::test]
async fn other_policies_keep_others() {
    let router = statuses(layer().with_finality(Finality::Executions));
    for status in [200, 400, 405, 415, 500, 503] {
        assert!(kept(&router, status).await, "{status}");
    }
    assert!(!kept(&router, 429).await);
    let own = Finality::custom(|response| response.status == StatusCode::CREATED);
    let router = statuses(layer().with_finality(own));
    assert!(kept(&router, 201).await && !kept(&router, 200).await && !kept(&router, 400).await);
    let router = statuses(IdempotencyLayer::stripe(executor(), idem_http::SingleTenant));
    assert!(kept(&router, 500).await && !kept(&router, 429).await);
}

/// Pitfall 27: a wrong password is corrected in the mail program, say, and the same request is right then.
#[tokio::test]
async fn the_handler_has_the_last_word() {
    let (router, runs) = service(&layer(), |run| match run {
        1 => (StatusCode::BAD_REQUEST, Extension(Recording::Free), "wrong one-time password"),
        2 => (StatusCode::INTERNAL_SERVER_ERROR, Extension(Recording::Keep), "charged, and then failed"),
        _ => (StatusCode::OK, Extension(Recording::Keep), "never"),
    });
    assert_eq!(send(&router, request("/", "k", "")).await.status, 400);
    assert!(!send(&router, request("/", "k", "")).await.is_replay());
    let kept = send(&router, request("/", "k", "")).await;
    assert_eq!((kept.status, kept.is_replay(), runs.count()), (500, true, 2));
}

#[derive(serde::Deserialize)]
struct Order {
    amount: u32,
}

/// Pitfall 28.
#[tokio::test]
async fn what_a_framework_says_before_the_handler_runs_is_not_kept() {
    let runs = Runs::default();
    let counted = runs.clone();
    let handler = move |BeforeRun(Json(order)): BeforeRun<Json<Order>>| async move {
        counted.run();
        order.amount.to_string()
    };
    // Of the route: 404 and 405 never come to the layer.
    let router = Router::new().route("/", post(handler).route_layer(layer()));
    let order = |key: &str, kind: &str, body: &str| {
        let mut request = request("/", key, body.to_owned());
        request.headers_mut().insert("content-type", kind.parse().unwrap());
        request
    };
    let missing = send(&router, request("/nowhere", "k", "")).await;
    let put = Request::put("/").header("idempotency-key", "k").body(Body::empty()).unwrap();
    let put = send(&router, put).await;
    let patch = Request::builder().method(Method::PATCH).uri("/").header("idempotency-key", "k").body(Body::empty());
    let patch = send(&router, patch.unwrap()).await;
    for (answer, status) in [(missing, 404), (put, 405), (patch, 405)] {
        assert_eq!((answer.status, answer.decision), (status, None));
    }
    // Of the extractors.
    for (key, kind, body, status) in [
        ("type", "text/plain", r#"{"amount":5}"#, 415),
        ("syntax", "application/json", "{", 400),
        ("form", "application/json", r#"{"amount":"five"}"#, 422),
    ] {
        for attempt in 1..3 {
            let answer = send(&router, order(key, kind, body)).await;
            assert_eq!(answer.status, status);
            let freed = Decision::Ran { attempt, took_over: false, recorded: Recorded::Freed };
            assert_eq!(answer.decision, Some(freed), "{key}");
        }
    }
    assert_eq!(runs.count(), 0);
    assert_eq!(send(&router, order("k", "application/json", r#"{"amount":5}"#)).await.body, "5");
}

/// The same around a whole router: a status that cannot be a handler's is not kept.
#[tokio::test]
async fn a_layer_around_a_router_keeps_no_refusal_of_form() {
    let router = Router::new().route("/", axum::routing::get(|| async { "ok" })).layer(layer());
    for attempt in 1..3 {
        let answer = send(&router, request("/", "k", "")).await;
        assert_eq!(answer.status, 405);
        let freed = Decision::Ran { attempt, took_over: false, recorded: Recorded::Freed };
        assert_eq!(answer.decision, Some(freed));
    }
}

/// The rules that keys are never freed under another fingerprint hold here too.
#[tokio::test]
async fn a_corrected_request_needs_a_key_of_its_own() {
    let (router, _) = service(&layer(), |run| if run == 1 { StatusCode::TOO_MANY_REQUESTS } else { StatusCode::OK });
    assert_eq!(send(&router, request("/", "k", "wrong")).await.status, 429);
    send(&router, request("/", "k", "right")).await.assert_refused(idem_http::Reason::Mismatch, 422);
    assert_eq!(send(&router, request("/", "other", "right")).await.status, 200);
}

/// Pitfall 28, in full: what is refused before anything is reserved leaves the key to a corrected request.
#[tokio::test]
async fn what_a_check_refuses_does_not_use_the_key_up() {
    let check = |parts: &http::request::Parts, body: &bytes::Bytes| match &body[..] {
        b"right" => None,
        _ => {
            Some(Response::builder().status(422).header("method", parts.method.as_str()).body("wrong".into()).unwrap())
        }
    };
    let (router, runs) = service(&layer().with_check(check), |run| run.to_string());
    let refused = send(&router, request("/", "k", "left")).await;
    assert_eq!((refused.status, refused.decision), (422, Some(Decision::Rejected)));
    assert!(refused.body == "wrong" && refused.headers["method"] == "POST");
    for replayed in [false, true] {
        let answer = send(&router, request("/", "k", "right")).await;
        assert_eq!((&answer.body[..], answer.is_replay(), runs.count()), (&b"1"[..], replayed, 1));
    }
    assert_eq!(send(&router, request("/", "k", "left")).await.status, 422);
}
