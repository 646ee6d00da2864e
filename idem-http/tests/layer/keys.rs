//! Keys, scopes and methods.

use axum::Router;
use axum::body::Body;
use axum::routing::{any, post};
use http::{HeaderName, Method, Request};
use idem_core::executor::Executor;
use idem_http::{IdempotencyLayer, KeyFormat, Reason, RequestScope, Scope};

use crate::support::{Frail, Runs, layer, request, send, service};

#[tokio::test]
async fn a_required_key_that_is_missing_is_400_and_an_optional_one_is_passed_through() {
    let bare = || Request::post("/").body(Body::empty()).unwrap();
    let (router, runs) = service(&layer(), |run| run.to_string());
    send(&router, bare()).await.assert_refused(Reason::KeyMissing, 400);
    assert_eq!(runs.count(), 0);

    let (router, runs) = service(&layer().with_optional_key(), |run| run.to_string());
    for run in 1..3 {
        let answer = send(&router, bare()).await;
        assert_eq!((answer.status, answer.decision, runs.count()), (200, None, run));
    }
    // With a key it is protected all the same.
    assert!(!send(&router, request("/", "k", "")).await.is_replay());
    assert!(send(&router, request("/", "k", "")).await.is_replay());
    let (router, _) = service(&layer().with_optional_key().with_required_key(), |run| run.to_string());
    send(&router, bare()).await.assert_refused(Reason::KeyMissing, 400);
}

/// Pitfall 38.
#[tokio::test]
async fn quoted_and_bare_are_one_key_and_two_lines_or_a_list_are_refused() {
    let (router, runs) = service(&layer(), |run| run.to_string());
    assert!(!send(&router, request("/", "order-1", "")).await.is_replay());
    for same in ["\"order-1\"", " order-1 ", "\"order-1\";version=2"] {
        assert!(send(&router, request("/", same, "")).await.is_replay(), "{same}");
    }
    for bad in ["a, b", "\"a\", \"b\"", "\"a", "\"a\\b\"", "", "\"\"", "a b"] {
        send(&router, request("/", bad, "")).await.assert_refused(Reason::KeyInvalid, 400);
    }
    let mut two = request("/", "order-1", "");
    two.headers_mut().append("idempotency-key", "order-1".parse().unwrap());
    send(&router, two).await.assert_refused(Reason::KeyInvalid, 400);
    assert_eq!(runs.count(), 1);
}

/// Pitfall 40.
#[tokio::test]
async fn bytes_that_disguise_a_key_are_refused_at_the_edge() {
    let store = std::sync::Arc::new(Frail::default());
    let layer = IdempotencyLayer::new(Executor::new(std::sync::Arc::clone(&store)), idem_http::SingleTenant);
    let (router, runs) = service(&layer, |run| run.to_string());
    for bytes in [&b"a\tb"[..], b"a\x80", b"\"a\xff\"", "a\u{202e}b".as_bytes(), "größe".as_bytes()] {
        let mut bad = request("/", "x", "");
        let value = http::HeaderValue::from_bytes(bytes).unwrap();
        bad.headers_mut().insert("idempotency-key", value);
        let answer = send(&router, bad).await;
        answer.assert_refused(Reason::KeyInvalid, 400);
        // What was sent is not sent back.
        assert!(answer.body.is_ascii());
    }
    assert_eq!((runs.count(), store.calls()), (0, 0));
}

/// Pitfall 41.
#[tokio::test]
async fn the_scope_comes_first_and_a_long_key_costs_the_store_nothing() {
    let store = std::sync::Arc::new(Frail::default());
    let unknown = |_: &http::request::Parts| None;
    let layer = IdempotencyLayer::new(Executor::new(std::sync::Arc::clone(&store)), unknown);
    let (router, runs) = service(&layer, |run| run.to_string());
    for key in ["k".to_owned(), "k".repeat(100_000), "a, b".to_owned()] {
        // Nor is the body looked at: it never comes.
        let body = crate::support::frames(vec![b"part"], false);
        send(&router, request("/", &key, body)).await.assert_refused(Reason::ScopeUnknown, 403);
    }
    let layer = IdempotencyLayer::new(Executor::new(std::sync::Arc::clone(&store)), idem_http::SingleTenant);
    let (router, _) = service(&layer, |run| run.to_string());
    let body = crate::support::frames(vec![b"part"], false);
    send(&router, request("/", &"k".repeat(256), body)).await.assert_refused(Reason::KeyInvalid, 400);
    assert_eq!((runs.count(), store.calls()), (0, 0));
    assert_eq!(send(&router, request("/", &"k".repeat(255), "")).await.status, 200);
}

struct ByAccount;

impl RequestScope for ByAccount {
    fn scope(&self, request: &http::request::Parts) -> Option<Scope> {
        Scope::new(request.headers.get("account")?.to_str().ok()?).ok()
    }
}

/// Pitfall 29.
#[tokio::test]
async fn nobody_gets_the_answer_of_another_scope() {
    let layer = IdempotencyLayer::new(crate::support::executor(), ByAccount);
    let (router, runs) = service(&layer, |run| run.to_string());
    let of = |account: &str| {
        let mut request = request("/", "order-1", "");
        request.headers_mut().insert("account", account.parse().unwrap());
        request
    };
    let alice = send(&router, of("alice")).await;
    let bob = send(&router, of("bob")).await;
    assert!(!alice.is_replay() && !bob.is_replay() && alice.body != bob.body);
    assert_eq!(send(&router, of("alice")).await.body, alice.body);
    assert_eq!(send(&router, of("bob")).await.body, bob.body);
    send(&router, request("/", "order-1", "")).await.assert_refused(Reason::ScopeUnknown, 403);
    send(&router, of(&"a".repeat(65))).await.assert_refused(Reason::ScopeUnknown, 403);
    assert_eq!(runs.count(), 2);
}

#[tokio::test]
async fn formats_are_admitted_as_set() {
    let uuid = "8e03978e-40d5-43dd-bc93-6894a57f9324";
    for (format, good) in [
        (KeyFormat::Uuid, uuid),
        (KeyFormat::Ulid, "01ARZ3NDEKTSV4RRFFQ69G5FAV"),
        (KeyFormat::custom("an order number", |key| key.starts_with("order-")), "order-1"),
    ] {
        let described = format.description().to_owned();
        let (router, runs) = service(&layer().with_key_format(format), |run| run.to_string());
        let refused = send(&router, request("/", "something", "")).await;
        refused.assert_refused(Reason::KeyNotAdmitted, 400);
        assert_eq!(refused.problem()["detail"], format!("the key must be {described}"));
        assert_eq!(send(&router, request("/", good, "")).await.status, 200);
        assert_eq!(send(&router, request("/", &format!("\"{good}\""), "")).await.status, 200);
        assert_eq!(runs.count(), 1);
    }
}

#[tokio::test]
async fn keys_on_other_methods_are_ignored() {
    let app = |layer: IdempotencyLayer| {
        let runs = Runs::default();
        let counted = runs.clone();
        let handler = move || async move { counted.run().to_string() };
        (Router::new().route("/", any(handler)).layer(layer), runs)
    };
    let keyed = |method: Method| Request::builder().method(method).uri("/").header("idempotency-key", "not, a, key");
    let (router, runs) = app(layer());
    for (at, method) in
        [Method::GET, Method::HEAD, Method::OPTIONS, Method::PUT, Method::DELETE].into_iter().enumerate()
    {
        let answer = send(&router, keyed(method).body(Body::empty()).unwrap()).await;
        assert_eq!((answer.status, answer.decision, runs.count()), (200, None, at + 1));
    }
    for method in [Method::POST, Method::PATCH] {
        send(&router, keyed(method).body(Body::empty()).unwrap()).await.assert_refused(Reason::KeyInvalid, 400);
    }
    let (router, runs) = app(layer().with_methods([Method::PUT, Method::DELETE]));
    send(&router, keyed(Method::PUT).body(Body::empty()).unwrap()).await.assert_refused(Reason::KeyInvalid, 400);
    assert_eq!(send(&router, keyed(Method::POST).body(Body::empty()).unwrap()).await.status, 200);
    assert_eq!(runs.count(), 1);
}

#[tokio::test]
async fn headers_have_the_names_that_are_set() {
    let layer = layer()
        .with_header_name(HeaderName::from_static("x-request-key"))
        .with_replayed_header_name(HeaderName::from_static("x-replayed"));
    let (router, _) = service(&layer, |run| run.to_string());
    send(&router, request("/", "k", "")).await.assert_refused(Reason::KeyMissing, 400);
    for replayed in [false, true] {
        let request = Request::post("/").header("x-request-key", "k").body(Body::empty()).unwrap();
        assert_eq!(send(&router, request).await.headers.contains_key("x-replayed"), replayed);
    }
}

/// Required on one route, optional on another, absent on a third, by layering.
#[tokio::test]
async fn each_route_has_its_own() {
    let handler = || async { "ok" };
    let router = Router::new()
        .route("/charges", post(handler).layer(layer()))
        .route("/notes", post(handler).layer(layer().with_optional_key()))
        .route("/search", post(handler));
    let send_to = async |uri: &str| send(&router, Request::post(uri).body(Body::empty()).unwrap()).await.status;
    assert_eq!([send_to("/charges").await, send_to("/notes").await, send_to("/search").await], [400, 200, 200]);
}

proptest::proptest! {
    /// Whatever the header holds, the request is processed once or refused.
    #[test]
    fn no_header_breaks_the_layer(
        lines in proptest::collection::vec(proptest::collection::vec(proptest::arbitrary::any::<u8>(), 0..40), 1..3),
        quoted in "\"[a\\\\\", ;é]{0,8}\"?[;a=1]{0,3}",
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            for lines in [lines, vec![quoted.into_bytes()]] {
                let (router, runs) = service(&layer(), |run| run.to_string());
                let mut request = Request::post("/").body(Body::empty()).unwrap();
                for line in &lines {
                    // What HTTP itself does not bear never comes here.
                    if let Ok(value) = http::HeaderValue::from_bytes(line) {
                        request.headers_mut().append("idempotency-key", value);
                    }
                }
                let answer = send(&router, request).await;
                let found = (answer.status, runs.count());
                assert!(found == (200, 1) || found == (400, 0), "{found:?}: {lines:?}");
            }
        });
    }
}
