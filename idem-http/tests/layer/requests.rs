//! Bodies of requests, and what makes two requests the same.

use std::sync::Arc;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::routing::{patch, post};
use http::Request;
use http_body_util::BodyExt;
use idem_core::executor::Executor;
use idem_http::{Fingerprint, Fingerprinting, IdempotencyLayer, Reason, SingleTenant};

use tower::ServiceExt;

use crate::support::{Frail, Polled, Runs, frames, layer, request, send, service};

fn echo(layer: IdempotencyLayer) -> Router {
    Router::new().route("/", post(|body: Bytes| async move { body })).layer(layer)
}

/// Pitfall 26.
#[tokio::test]
async fn the_handler_gets_the_body_as_it_was_sent() {
    let router = echo(layer());
    for (at, body) in [vec![], vec![0], (0..=255).collect(), vec![0xff; 100_000]].into_iter().enumerate() {
        for _ in 0..2 {
            assert_eq!(send(&router, request("/", &format!("k{at}"), body.clone())).await.body, body);
        }
    }
    let answer = send(&router, request("/", "chunked", frames(vec![b"one ", b"", b"two"], true))).await;
    assert_eq!(answer.body, "one two");
    // In other chunks it is the same request.
    assert!(send(&router, request("/", "chunked", frames(vec![b"one two"], true))).await.is_replay());
}

#[tokio::test]
async fn a_body_over_the_limit_is_413_before_anything_is_reserved() {
    let store = Arc::new(Frail::default());
    let layer = IdempotencyLayer::new(Executor::new(Arc::clone(&store)), SingleTenant).with_body_limit(10);
    let router = echo(layer);
    send(&router, request("/", "k", "eleven byte")).await.assert_refused(Reason::BodyTooLarge, 413);
    // Of unknown length; it is not read to its end.
    let endless = frames(vec![b"eleven", b" byte"], false);
    send(&router, request("/", "k", endless)).await.assert_refused(Reason::BodyTooLarge, 413);
    assert_eq!(store.calls(), 0);
    assert_eq!(send(&router, request("/", "k", "ten bytes!")).await.body, "ten bytes!");
    assert_eq!(send(&router, request("/", "k", frames(vec![b"ten ", b"bytes!"], true))).await.body, "ten bytes!");
    // A body that is none of the layer's business is as long as it likes.
    let without = Request::put("/").body(Body::from("eleven byte")).unwrap();
    assert_eq!(send(&router, without).await.status, 405);
}

/// Pitfall 36.
#[tokio::test]
async fn an_upload_that_breaks_off_reserves_nothing() {
    let store = Arc::new(Frail::default());
    let (router, runs) =
        service(&IdempotencyLayer::new(Executor::new(Arc::clone(&store)), SingleTenant), |run| run.to_string());
    let mut parts = vec![Err("the client has gone"), Ok("part")];
    let broken = Body::new(Polled(move |_: &mut std::task::Context<'_>| {
        std::task::Poll::Ready(parts.pop().map(|part| part.map(|data| http_body::Frame::data(Bytes::from(data)))))
    }));
    send(&router, request("/", "k", broken)).await.assert_refused(Reason::BodyUnreadable, 400);
    assert_eq!((runs.count(), store.calls()), (0, 0));
    assert_eq!(send(&router, request("/", "k", "part")).await.body, "1");
}

#[tokio::test]
async fn trailers_of_a_request_reach_the_handler() {
    let handler = |request: axum::extract::Request| async move {
        let trailers = request.into_body().collect().await.unwrap().trailers().cloned().unwrap();
        trailers["checksum"].to_str().unwrap().to_owned()
    };
    let router = Router::new().route("/", post(handler)).layer(layer());
    let mut parts = vec![
        http_body::Frame::trailers(
            [(http::HeaderName::from_static("checksum"), "c".parse().unwrap())].into_iter().collect(),
        ),
        http_body::Frame::data(Bytes::from("data")),
    ];
    let body = Body::new(Polled(move |_: &mut std::task::Context<'_>| {
        std::task::Poll::Ready(parts.pop().map(Ok::<_, std::convert::Infallible>))
    }));
    assert_eq!(send(&router, request("/", "k", body)).await.body, "c");
}

/// Pitfalls 30 and 39.
#[tokio::test]
async fn the_same_key_for_another_request_is_a_mismatch() {
    let runs = Runs::default();
    let counted = runs.clone();
    let handler = move || async move { counted.run().to_string() };
    let nested = Router::new().route("/items", post(handler.clone())).layer(layer_of_all());
    fn layer_of_all() -> IdempotencyLayer {
        static LAYER: std::sync::OnceLock<IdempotencyLayer> = std::sync::OnceLock::new();
        LAYER.get_or_init(layer).clone()
    }
    let router = Router::new()
        .route("/a", post(handler.clone()).merge(patch(handler.clone())))
        .route("/b", post(handler))
        .layer(layer_of_all())
        .nest("/x", nested.clone())
        .nest("/y", nested);
    let first = send(&router, request("/a?x=1&y=2", "k", "body")).await;
    assert_eq!(first.status, 200);
    let patched = Request::patch("/a?x=1&y=2").header("idempotency-key", "k").body(Body::from("body")).unwrap();
    for other in [
        request("/b?x=1&y=2", "k", "body"),
        request("/a?x=1&y=2", "k", "other"),
        request("/a?x=1&y=2", "k", ""),
        request("/a?x=1", "k", "body"),
        request("/a?y=2&x=1", "k", "body"),
        request("/a", "k", "body"),
        patched,
    ] {
        send(&router, other).await.assert_refused(Reason::Mismatch, 422);
    }
    assert!(send(&router, request("/a?x=1&y=2", "k", "body")).await.is_replay());
    // Routers that are nested have one path within, and are two.
    assert_eq!(send(&router, request("/x/items", "nested", "")).await.status, 200);
    send(&router, request("/y/items", "nested", "")).await.assert_refused(Reason::Mismatch, 422);
    assert_eq!(runs.count(), 2);
}

/// Pitfall 37.
#[tokio::test]
async fn equal_bodies_under_two_keys_are_two_orders() {
    let (router, runs) = service(&layer(), |run| run.to_string());
    for (key, run) in [("a", "1"), ("b", "2"), ("a", "1"), ("b", "2")] {
        assert_eq!(send(&router, request("/", key, "same")).await.body, run);
    }
    assert_eq!(runs.count(), 2);
}

#[tokio::test]
async fn fingerprints_are_made_as_set() {
    let with = |fingerprinting: Fingerprinting| echo(layer().with_fingerprinting(fingerprinting));
    let json = |body: &'static str| {
        let mut request = request("/", "k", body);
        request.headers_mut().insert("content-type", "application/json".parse().unwrap());
        request
    };
    let router = with(Fingerprinting::default().with_canonical_json());
    let first = send(&router, json(r#"{"a":1,"b":2}"#)).await;
    let again = send(&router, json(r#"{ "b":2, "a":1 }"#)).await;
    assert!(again.is_replay() && again.body == first.body);
    send(&router, json(r#"{"a":1.0,"b":2}"#)).await.assert_refused(Reason::Mismatch, 422);

    let router = with(Fingerprinting::default().with_sorted_query());
    send(&router, request("/?a=1&b=2", "k", "")).await;
    assert!(send(&router, request("/?b=2&a=1", "k", "")).await.is_replay());

    let router = with(Fingerprinting::default().without_body());
    send(&router, request("/", "k", "signed at 1")).await;
    assert_eq!(send(&router, request("/", "k", "signed at 2")).await.body, "signed at 1");

    let router = with(Fingerprinting::default().with_headers([http::header::CONTENT_TYPE]));
    send(&router, json("{}")).await;
    assert!(send(&router, json("{}")).await.is_replay());
    send(&router, request("/", "k", "{}")).await.assert_refused(Reason::Mismatch, 422);

    let router = with(Fingerprinting::custom(|_, body| Fingerprint::of(&body[..1])));
    send(&router, request("/", "k", "a1")).await;
    assert!(send(&router, request("/", "k", "a2")).await.is_replay());
    send(&router, request("/", "k", "b1")).await.assert_refused(Reason::Mismatch, 422);
}

/// A layer within that lets one handler run at a time: an upload that does not end, and those who wait, are none.
#[tokio::test]
async fn a_permit_to_run_is_not_held_by_uploads_and_waiters() {
    use http::Response;
    use http_body_util::Full;
    use idem_core::executor::Waiting;
    use std::convert::Infallible;
    use std::time::Duration;
    use tower::ServiceBuilder;

    let executor = Executor::builder(idem_core::MemoryStore::new()).waiting(Waiting::UpTo(Duration::from_secs(30)));
    let (end, ended) = tokio::sync::watch::channel(false);
    let handler = move |request: Request<idem_http::RequestBody<Body>>| {
        let mut ended = ended.clone();
        async move {
            if request.uri().path() == "/slow" {
                ended.wait_for(|ended| *ended).await.unwrap();
            }
            Ok::<_, Infallible>(Response::new(Full::new(Bytes::from("ok"))))
        }
    };
    let layer = IdempotencyLayer::new(executor.build().unwrap(), SingleTenant);
    let inner = ServiceBuilder::new().concurrency_limit(2).service_fn(handler);
    let service = ServiceBuilder::new().layer(layer).service(inner);
    let start = |request: Request<Body>| tokio::spawn(service.clone().oneshot(request));
    let pause = || tokio::time::sleep(Duration::from_millis(20));
    let uploads = ["a", "b"].map(|key| start(request("/", key, frames(vec![b"part"], false))));
    pause().await;
    let holder = start(request("/slow", "k", ""));
    pause().await;
    let waiters = [start(request("/slow", "k", "")), start(request("/slow", "k", ""))];
    pause().await;
    // One permit is left.
    let quick = tokio::time::timeout(Duration::from_secs(10), service.clone().oneshot(request("/", "q", ""))).await;
    assert_eq!(quick.unwrap().unwrap().status(), 200);
    end.send(true).unwrap();
    for call in waiters.into_iter().chain([holder]) {
        assert_eq!(call.await.unwrap().unwrap().status(), 200);
    }
    uploads.iter().for_each(tokio::task::JoinHandle::abort);
}

/// Pitfalls 3, 20 and 21: another request is told so on every path, with and without a near-cache.
#[tokio::test]
async fn a_mismatch_comes_first_on_every_path() {
    let store = idem_core::Cached::builder(idem_core::MemoryStore::new()).build();
    for layer in [layer(), IdempotencyLayer::new(Executor::new(store), SingleTenant)] {
        let (end, ended) = tokio::sync::watch::channel(false);
        let handler = move |body: Bytes| async move {
            let fails = &body[..] == b"fails";
            ended.clone().wait_for(|ended| *ended).await.unwrap();
            if fails { http::StatusCode::BAD_GATEWAY } else { http::StatusCode::OK }
        };
        let router = Router::new().route("/", post(handler)).layer(layer);
        let other = async |key: &str| {
            send(&router, request("/", key, "other")).await.assert_refused(Reason::Mismatch, 422);
        };
        let mut running = Vec::new();
        for body in ["works", "fails"] {
            let call = router.clone().oneshot(request("/", body, body));
            running.push(tokio::spawn(call));
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        // While it runs.
        other("works").await;
        other("fails").await;
        end.send(true).unwrap();
        for call in running {
            call.await.unwrap().unwrap();
        }
        // When it is completed, from the store and from the cache, and when it has failed.
        for _ in 0..2 {
            other("works").await;
            other("fails").await;
            assert!(send(&router, request("/", "works", "works")).await.is_replay());
        }
    }
}
