//! What the layer adds to a handler, in process, on the memory store.
//!
//! `cargo bench -p idem-http --bench layer`
//!
//! The bare handler and the same behind the layer are timed in turns, a few hundred requests each, so that what else the
//! machine does befalls both; `added` is the difference. Requests are made beforehand and responses are dropped unread,
//! behind the clock. The body of every request is 256 bytes of JSON.

#![allow(missing_docs, clippy::expect_used)]

use std::convert::Infallible;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use criterion::{Criterion, criterion_group, criterion_main};
use http::{Request, Response};
use http_body::Body;
use http_body_util::Full;
use idem_core::MemoryStore;
use idem_core::executor::Executor;
use idem_http::{IdempotencyLayer, SingleTenant};
use tokio::runtime::Builder;
use tower::{Layer, Service, ServiceExt, service_fn};

/// Requests timed in one go.
const TURN: u64 = 200;
/// Records expire while the benchmark runs, so that the table stays small: it is not what is measured.
const RETENTION: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, PartialEq)]
enum Keys {
    /// Another for every request.
    New,
    /// One that is used.
    Used,
    None,
}

fn requests(keys: Keys, count: u64) -> Vec<Request<Full<Bytes>>> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let body = Bytes::from(vec![b'x'; 256]);
    (0..count)
        .map(|_| {
            let request = Request::post("/charges").header("content-type", "application/json");
            let request = match keys {
                Keys::New => {
                    let number = NEXT.fetch_add(1, Ordering::Relaxed);
                    request.header("idempotency-key", format!("\"8e03978e-40d5-43dd-bc93-{number:012x}\""))
                }
                Keys::Used => request.header("idempotency-key", "\"8e03978e-40d5-43dd-bc93-6894a57f9324\""),
                Keys::None => request,
            };
            request.body(Full::new(body.clone())).expect("it is a request")
        })
        .collect()
}

async fn timed<S, B>(service: &S, requests: Vec<Request<Full<Bytes>>>) -> Duration
where
    S: Service<Request<Full<Bytes>>, Response = Response<B>, Error = Infallible> + Clone,
{
    let mut responses = Vec::with_capacity(requests.len());
    let begun = Instant::now();
    for request in requests {
        responses.push(service.clone().oneshot(request).await.expect("it does not fail"));
    }
    begun.elapsed()
}

/// A figure from the time of the bare handler and the time behind the layer.
type Figure = fn(Duration, Duration) -> Duration;

const FIGURES: [(&str, Figure); 3] = [
    ("bare", |bare, _| bare),
    ("layer", |_, layer| layer),
    ("added", |bare, layer| layer.saturating_sub(bare).max(Duration::from_nanos(1))),
];

async fn respond<B: Body>(_: Request<B>, body: Bytes) -> Result<Response<Full<Bytes>>, Infallible> {
    let response = Response::builder().status(201).header("content-type", "application/json");
    Ok(response.header("location", "/charges/1").body(Full::new(body)).expect("it is a response"))
}

fn added(criterion: &mut Criterion) {
    let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime can be built");
    for (name, keys, size) in [
        ("first", Keys::New, 1024),
        ("replay_1KiB", Keys::Used, 1024),
        ("replay_100KiB", Keys::Used, 100 * 1024),
        ("without_a_key", Keys::None, 1024),
    ] {
        let retention = if keys == Keys::New { RETENTION } else { Duration::from_secs(3_600) };
        let executor = Executor::builder(MemoryStore::builder().max_records(usize::MAX).build()).lease(RETENTION);
        let executor = executor.retention(retention).build().expect("the settings are valid");
        let layer = IdempotencyLayer::new(executor, SingleTenant).with_optional_key();
        let body = Bytes::from(vec![7; size]);
        let of_layer = body.clone();
        if keys == Keys::Used {
            // So that replays are timed.
            let first = layer.layer(service_fn({
                let body = body.clone();
                move |request| respond(request, body.clone())
            }));
            runtime.block_on(timed(&first, requests(keys, 1)));
        }
        let bare = service_fn(move |request: Request<Full<Bytes>>| respond(request, body.clone()));
        let within = layer.layer(service_fn(move |request| respond(request, of_layer.clone())));
        let mut group = criterion.benchmark_group(name);
        for (figure, choose) in FIGURES {
            group.bench_function(figure, |bencher| {
                bencher.to_async(&runtime).iter_custom(|calls| {
                    let (bare, within) = (bare.clone(), within.clone());
                    async move {
                        let (mut without, mut with, mut left) = (Duration::ZERO, Duration::ZERO, calls);
                        while left > 0 {
                            let turn = left.min(TURN);
                            left -= turn;
                            without += timed(&bare, requests(keys, turn)).await;
                            with += timed(&within, requests(keys, turn)).await;
                        }
                        choose(without, with)
                    }
                });
            });
        }
        group.finish();
    }
}

criterion_group!(benches, added);
criterion_main!(benches);
