//! What is stored of a response, and what a replay is.

use std::convert::Infallible;
use std::task::Poll;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::routing::{any, post};
use http::{HeaderName, HeaderValue, Method, Request, Response};
use idem_core::executor::Executor;
use idem_core::{Key, KeyStore, MemoryStore, Outcome, Reserve, Withheld};
use idem_http::{Decision, IdempotencyLayer, Reason, Recorded, Recording, SingleTenant};

use crate::support::{Answer, Polled, Runs, frames, layer, request, send, service};

fn limited(bytes: usize) -> IdempotencyLayer {
    let store = MemoryStore::builder().outcome_limit(bytes).build();
    IdempotencyLayer::new(Executor::new(store), SingleTenant)
}

fn recorded(answer: &Answer) -> Option<Recorded> {
    match answer.decision {
        Some(Decision::Ran { recorded, .. }) => Some(recorded),
        _ => None,
    }
}

/// Pitfalls 26, 32 and 33.
#[tokio::test]
async fn a_replay_has_status_headers_in_order_and_bytes_of_the_first() {
    let respond = |run: usize| {
        let mut response = Response::builder().status(201).header("location", format!("/charges/{run}"));
        for line in 0..100 {
            let value = HeaderValue::from_bytes(&[b"a, \xff\x80".as_slice(), line.to_string().as_bytes()].concat());
            response = response.header("x-repeated", value.unwrap()).header(format!("x-{line}"), "");
        }
        let response = response.header("etag", "\"1\"").header("link", "<a>; rel=next, <b>").header("link", "<c>");
        response.body(Body::from(vec![0, 0xff, 0xc3, b'\n'])).unwrap()
    };
    let (router, runs) = service(&layer(), respond);
    let first = send(&router, request("/", "k", "")).await;
    let mut again = send(&router, request("/", "k", "")).await;
    assert!(!first.is_replay() && again.is_replay());
    again.headers.remove("idempotent-replayed");
    assert_eq!((first.status, &first.body), (again.status, &again.body));
    let lines = |answer: &Answer| -> Vec<(HeaderName, HeaderValue)> {
        // The server makes it anew.
        answer.headers.iter().filter(|(n, _)| *n != "content-length").map(|(n, v)| (n.clone(), v.clone())).collect()
    };
    assert_eq!(lines(&first), lines(&again));
    assert_eq!((first.headers["content-length"].clone(), runs.count()), (again.headers["content-length"].clone(), 1));
    assert_eq!(again.headers.get_all("x-repeated").iter().count(), 100);
}

/// Pitfalls 31 and 34.
#[tokio::test]
async fn what_belongs_to_one_exchange_is_sent_once() {
    let respond = |_| {
        Response::builder()
            .header("set-cookie", "session=secret")
            .header("www-authenticate", "Basic")
            .header("authentication-info", "x")
            .header("connection", "x-hop")
            .header("x-hop", "1")
            .header("keep-alive", "timeout=5")
            .header("date", "Mon, 01 Jan 2024 00:00:00 GMT")
            .header("x-request-id", "7")
            .header("x-kept", "1")
            .body(Body::from("whole"))
            .unwrap()
    };
    let layer = layer().with_unstored_headers([HeaderName::from_static("x-request-id")]);
    let (router, _) = service(&layer, respond);
    let first = send(&router, request("/", "k", "")).await;
    assert!(first.headers.contains_key("set-cookie") && first.headers.contains_key("x-request-id"));
    let again = send(&router, request("/", "k", "")).await;
    let names: Vec<_> = again.headers.keys().map(HeaderName::as_str).collect();
    assert_eq!(names, ["x-kept", "idempotent-replayed", "content-length"]);
    assert_eq!((&again.body[..], &again.headers["content-length"]), (&b"whole"[..], &HeaderValue::from(5)));
}

/// A length that the handler has set is the server's to make anew.
#[tokio::test]
async fn framing_that_a_handler_has_set_is_not_stored() {
    let respond =
        |_| Response::builder().header("content-length", "5").body(frames(vec![b"who", b"le"], true)).unwrap();
    let layer = layer();
    let (router, _) = service(&layer, respond);
    send(&router, request("/", "k", "")).await;
    let store = layer.executor().store();
    let record = store.fetch(&Key::new("", "k").unwrap()).await.unwrap().unwrap();
    let outcome = record.outcome().unwrap();
    assert!(outcome.headers.is_empty() && *outcome == Outcome::new(200, "whole"));
    assert_eq!(send(&router, request("/", "k", "")).await.headers["content-length"], "5");
}

#[tokio::test]
async fn responses_without_a_body_stay_without() {
    let runs = Runs::default();
    let counted = runs.clone();
    let handler = move |request: axum::extract::Request| async move {
        counted.run();
        let status = if request.method() == Method::HEAD { "200" } else { request.uri().query().unwrap() };
        let response = Response::builder().status(status.parse::<u16>().unwrap());
        if request.method() == Method::HEAD { response.header("content-length", "99") } else { response }
            .body(Body::empty())
            .unwrap()
    };
    let layer = layer().with_methods([Method::POST, Method::HEAD]);
    let router = Router::new().route("/", any(handler)).layer(layer);
    for status in [204_u16, 205, 304, 200] {
        let again = || request(&format!("/?{status}"), &format!("k{status}"), "");
        let first = send(&router, again()).await;
        let replay = send(&router, again()).await;
        assert!(replay.is_replay());
        assert_eq!((first.status, replay.status, replay.body.len()), (status, status, 0));
        assert_eq!(first.headers.get("content-length"), replay.headers.get("content-length"));
    }
    for replayed in [false, true] {
        let head = Request::head("/").header("idempotency-key", "head").body(Body::empty()).unwrap();
        let answer = send(&router, head).await;
        assert_eq!((answer.is_replay(), answer.body.len()), (replayed, 0));
        assert_eq!(answer.headers["content-length"], "99");
    }
    assert_eq!(runs.count(), 5);
}

/// Pitfall 25.
#[tokio::test]
async fn a_response_over_the_limit_is_whole_for_the_first_and_withheld_from_repeats() {
    // "location" and its value are 10 bytes of the 110.
    for (bytes, fits) in [(100, true), (101, false)] {
        for exact in [true, false] {
            let respond = move |_| {
                let whole = vec![b'x'; bytes];
                let body = if exact { Body::from(whole) } else { frames(vec![b"x"; bytes], true) };
                Response::builder().status(201).header("location", "/1").body(body).unwrap()
            };
            let (router, runs) = service(&limited(110), respond);
            let first = send(&router, request("/", "k", "")).await;
            assert_eq!((first.status, first.body.len()), (201, bytes));
            let again = send(&router, request("/", "k", "")).await;
            if fits {
                assert_eq!(recorded(&first), Some(Recorded::Whole));
                assert!(again.is_replay() && again.body == first.body);
            } else {
                assert_eq!(recorded(&first), Some(Recorded::Withheld(Withheld::TooLarge)));
                again.assert_refused(Reason::Withheld, 410);
                let problem = again.problem();
                assert_eq!((&problem["original_status"], &problem["retryable"]), (&201.into(), &false.into()));
                // It says where the result is.
                assert_eq!(again.headers["location"], "/1");
            }
            assert_eq!(runs.count(), 1);
        }
    }
}

/// More headers than an outcome can hold, or larger ones.
#[tokio::test]
async fn headers_over_the_limit_are_withheld_too() {
    for (count, size) in [(1025, 0), (1, 2_000)] {
        let respond = move |_| {
            let mut response = Response::new(Body::from("whole"));
            for _ in 0..count {
                response.headers_mut().append("x", HeaderValue::from_bytes(&vec![b'x'; size]).unwrap());
            }
            response
        };
        let (router, runs) = service(&limited(1_500), respond);
        let first = send(&router, request("/", "k", "")).await;
        assert_eq!((&first.body[..], recorded(&first)), (&b"whole"[..], Some(Recorded::Withheld(Withheld::TooLarge))));
        send(&router, request("/", "k", "")).await.assert_refused(Reason::Withheld, 410);
        assert_eq!(runs.count(), 1);
    }
}

async fn next(body: &mut Body) -> Bytes {
    use http_body_util::BodyExt;
    body.frame().await.unwrap().unwrap().into_data().unwrap()
}

/// Pitfall 35.
#[tokio::test(start_paused = true)]
async fn a_stream_is_passed_through_and_withheld() {
    use tower::ServiceExt;
    for (kind, patient) in [("text/event-stream; charset=utf-8", false), ("text/plain", true)] {
        let respond = move |_| {
            Response::builder().header("content-type", kind).body(frames(vec![b"one", b"two"], false)).unwrap()
        };
        let (router, runs) = service(&layer().with_streaming_after(Duration::from_secs(3)), respond);
        let begun = tokio::time::Instant::now();
        let first = router.clone().oneshot(request("/", "k", "")).await.unwrap();
        let waited = begun.elapsed().as_millis();
        assert!(if patient { (3_000..3_100).contains(&waited) } else { waited == 0 }, "{kind}: {waited} ms");
        // It has not ended, and the record says so already.
        send(&router, request("/", "k", "")).await.assert_refused(Reason::Withheld, 410);
        let mut body = first.into_body();
        if patient {
            // What had come by then is one piece.
            assert_eq!(next(&mut body).await, "onetwo");
        } else {
            assert_eq!((next(&mut body).await, next(&mut body).await), (Bytes::from("one"), Bytes::from("two")));
        }
        assert_eq!(runs.count(), 1);
    }
}

/// One that always has more, and never waits, is a stream too.
#[tokio::test]
async fn an_endless_body_ends_at_the_limit() {
    use tower::ServiceExt;
    let respond = |_| {
        Body::new(Polled(|_: &mut std::task::Context<'_>| {
            Poll::Ready(Some(Ok::<_, Infallible>(http_body::Frame::data(Bytes::from_static(b"more")))))
        }))
    };
    let (router, _) = service(&limited(1_000), respond);
    let mut body = router.clone().oneshot(request("/", "k", "")).await.unwrap().into_body();
    let limit = next(&mut body).await;
    assert!((1_000..1_010).contains(&limit.len()), "{} bytes were held", limit.len());
    for _ in 0..1_000 {
        assert_eq!(next(&mut body).await, "more");
    }
    send(&router, request("/", "k", "")).await.assert_refused(Reason::Withheld, 410);
}

/// A replay without them would be another response.
#[tokio::test]
async fn a_response_with_trailers_is_whole_for_the_first_and_withheld() {
    use http_body_util::BodyExt;
    use tower::ServiceExt;
    let respond = |_| {
        let trailers = [(HeaderName::from_static("checksum"), HeaderValue::from_static("c"))].into_iter().collect();
        let mut parts = vec![http_body::Frame::trailers(trailers), http_body::Frame::data(Bytes::from("data"))];
        Body::new(Polled(move |_: &mut std::task::Context<'_>| Poll::Ready(parts.pop().map(Ok::<_, Infallible>))))
    };
    let (router, _) = service(&layer(), respond);
    let first = router.clone().oneshot(request("/", "k", "")).await.unwrap().into_body().collect().await.unwrap();
    assert_eq!(
        (first.trailers().unwrap()["checksum"].clone(), first.to_bytes()),
        ("c".parse().unwrap(), "data".into())
    );
    send(&router, request("/", "k", "")).await.assert_refused(Reason::Withheld, 410);
}

/// The handler ran: what is broken is only its answer.
#[tokio::test]
async fn a_response_that_breaks_off_is_broken_for_the_first_and_withheld() {
    use http_body_util::BodyExt;
    use tower::ServiceExt;
    let respond = |_| {
        let mut parts = vec![Err("broken"), Ok("data")];
        Body::new(Polled(move |_: &mut std::task::Context<'_>| {
            Poll::Ready(parts.pop().map(|part| part.map(|data| http_body::Frame::data(Bytes::from(data)))))
        }))
    };
    let (router, runs) = service(&layer(), respond);
    let mut body = router.clone().oneshot(request("/", "k", "")).await.unwrap().into_body();
    assert_eq!(next(&mut body).await, "data");
    assert!(body.frame().await.unwrap().is_err());
    send(&router, request("/", "k", "")).await.assert_refused(Reason::Withheld, 410);
    assert_eq!(runs.count(), 1);
}

#[tokio::test]
async fn an_upgrade_is_passed_through_and_withheld() {
    let respond = |_| Response::builder().status(101).header("upgrade", "x").body(Body::empty()).unwrap();
    let (router, _) = service(&layer(), respond);
    let first = send(&router, request("/", "k", "")).await;
    assert_eq!((first.status, first.headers.contains_key("upgrade")), (101, true));
    send(&router, request("/", "k", "")).await.assert_refused(Reason::Withheld, 410);
}

#[tokio::test]
async fn a_secret_is_withheld_by_the_handlers_word() {
    let layer = layer();
    let respond = |_| (axum::Extension(Recording::Withhold), [("location", "/secret/1")], "the password is 1234");
    let (router, runs) = service(&layer, respond);
    let first = send(&router, request("/", "k", "")).await;
    assert_eq!(
        (&first.body[..], recorded(&first)),
        (&b"the password is 1234"[..], Some(Recorded::Withheld(Withheld::Secret)))
    );
    let again = send(&router, request("/", "k", "")).await;
    again.assert_refused(Reason::Withheld, 410);
    // Not even where it is.
    assert!(!again.headers.contains_key("location"));
    let record = layer.executor().store().fetch(&Key::new("", "k").unwrap()).await.unwrap().unwrap();
    assert_eq!(*record.outcome().unwrap(), Outcome::withheld(200, Withheld::Secret));
    assert_eq!(runs.count(), 1);
}

/// Of another program, or a reconciler that made a mistake.
#[tokio::test]
async fn a_stored_outcome_that_is_no_response_is_told_and_runs_nothing() {
    for outcome in [Outcome::new(0, "{}"), Outcome::new(200, "").with_header("no name", "x")] {
        let layer = layer();
        let (router, runs) = service(&layer, |run| run.to_string());
        let store = layer.executor().store();
        let reserve = Reserve::new(Key::new("", "k").unwrap());
        let idem_core::Reservation::Acquired(lease) = store.reserve(&reserve).await.unwrap() else {
            panic!("it is new")
        };
        store.complete(&lease, &outcome).await.unwrap();
        send(&router, request("/", "k", "")).await.assert_refused(Reason::Unreadable, 500);
        assert_eq!(runs.count(), 0);
    }
}

/// The bytes that a replay sends are the store's own.
#[tokio::test]
async fn a_replay_copies_no_body() {
    use http_body_util::BodyExt;
    use tower::ServiceExt;
    let layer = layer();
    let (router, _) = service(&layer, |_| vec![7_u8; 100_000]);
    send(&router, request("/", "k", "")).await;
    let record = layer.executor().store().fetch(&Key::new("", "k").unwrap()).await.unwrap().unwrap();
    let idem_core::Body::Stored(stored) = &record.outcome().unwrap().body else { panic!("it is stored") };
    let mut replay = router.oneshot(request("/", "k", "")).await.unwrap().into_body();
    let sent = replay.frame().await.unwrap().unwrap().into_data().unwrap();
    assert_eq!((sent.as_ptr(), sent.len()), (stored.as_ptr(), stored.len()));
}

/// The layer is for every tower server: here bodies of other types, and an error of the service's own.
#[tokio::test]
async fn it_works_without_axum() {
    use http_body_util::Full;
    use idem_http::RequestBody;
    use tower::{Layer, ServiceExt};
    let runs = Runs::default();
    let counted = runs.clone();
    let inner = tower::service_fn(move |request: Request<RequestBody<Full<Bytes>>>| {
        let run = counted.run();
        async move {
            use http_body_util::BodyExt;
            let body = request.into_body().collect().await.unwrap().to_bytes();
            if run == 1 { Err("an error of its own") } else { Ok(Response::new(Full::new(body))) }
        }
    });
    let service = layer().layer(inner);
    let request = || Request::post("/").header("idempotency-key", "k").body(Full::new(Bytes::from("x"))).unwrap();
    // It freed the key.
    assert_eq!(service.clone().oneshot(request()).await.unwrap_err(), "an error of its own");
    for replayed in [false, true] {
        let answer = Answer::of(service.clone().oneshot(request()).await.unwrap()).await;
        assert_eq!((&answer.body[..], answer.is_replay()), (&b"x"[..], replayed));
    }
    assert_eq!(runs.count(), 2);
    let passed = service.oneshot(Request::get("/").body(Full::new(Bytes::from("y"))).unwrap()).await.unwrap();
    assert_eq!(Answer::of(passed).await.body, "y");
}

/// As large as the store's limit, not larger.
#[tokio::test]
async fn bodies_of_every_size_around_the_limits_are_replayed_whole() {
    for size in [0, 1, 1_023, 1_024, 1024 * 1024] {
        let router = Router::new().route("/", post(move || async move { vec![7_u8; size] })).layer(layer());
        let first = send(&router, request("/", "k", "")).await;
        let again = send(&router, request("/", "k", "")).await;
        if size < 1024 * 1024 {
            assert!(again.is_replay() && again.body == first.body && again.body.len() == size);
        } else {
            // Its content type comes on top.
            assert_eq!(first.body.len(), size);
            again.assert_refused(Reason::Withheld, 410);
        }
    }
}
