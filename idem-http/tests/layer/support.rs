//! What the tests share.

use std::convert::Infallible;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use axum::Router;
use axum::body::Body;
use axum::routing::post;
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::BodyExt;
use idem_core::executor::Executor;
use idem_core::{
    Capabilities, ErrorKind, Failure, Key, KeyStore, Lease, MemoryStore, Operation, Outcome, PurgeBudget, Purged,
    Record, Reservation, Reserve, StoreError,
};
use idem_http::{Decision, IdempotencyLayer, Reason, SingleTenant};
use tower::ServiceExt;

/// A response, read whole.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: http::HeaderMap,
    pub(crate) body: Bytes,
    pub(crate) decision: Option<Decision>,
}

impl Answer {
    pub(crate) async fn of<B: http_body::Body<Data = Bytes>>(response: Response<B>) -> Self
    where
        B::Error: fmt::Debug,
    {
        let (parts, body) = response.into_parts();
        Self {
            status: parts.status.as_u16(),
            headers: parts.headers,
            body: body.collect().await.unwrap().to_bytes(),
            decision: parts.extensions.get().copied(),
        }
    }

    pub(crate) fn is_replay(&self) -> bool {
        assert_eq!(
            self.headers.contains_key("idempotent-replayed"),
            matches!(self.decision, Some(Decision::Replayed { .. })),
            "{self:?}"
        );
        self.headers.contains_key("idempotent-replayed")
    }

    pub(crate) fn problem(&self) -> serde_json::Value {
        assert_eq!(self.headers["content-type"], "application/problem+json");
        serde_json::from_slice(&self.body).unwrap()
    }

    /// It is the layer's own answer, for that reason.
    #[track_caller]
    pub(crate) fn assert_refused(&self, reason: Reason, status: u16) {
        assert_eq!((self.decision, self.status), (Some(Decision::Refused(reason)), status), "{self:?}");
        let problem = self.problem();
        assert_eq!(problem["type"], format!("urn:idem:problem:{}", reason.as_str()));
        assert_eq!(problem["title"], reason.title());
        assert_eq!(problem["status"], status);
        assert!(problem["detail"].as_str().is_some_and(|detail| !detail.is_empty()), "{problem}");
    }
}

pub(crate) async fn send(router: &Router, request: Request<Body>) -> Answer {
    Answer::of(router.clone().oneshot(request).await.unwrap()).await
}

/// A POST to that path under that key.
pub(crate) fn request(uri: &str, key: &str, body: impl Into<Body>) -> Request<Body> {
    Request::post(uri).header("idempotency-key", key).body(body.into()).unwrap()
}

pub(crate) fn executor() -> Executor {
    Executor::new(MemoryStore::new())
}

pub(crate) fn layer() -> IdempotencyLayer {
    IdempotencyLayer::new(executor(), SingleTenant)
}

/// Counts how often a handler runs.
#[derive(Debug, Clone, Default)]
pub(crate) struct Runs(Arc<AtomicUsize>);

impl Runs {
    pub(crate) fn run(&self) -> usize {
        self.0.fetch_add(1, Ordering::SeqCst) + 1
    }

    pub(crate) fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

/// A service whose every response is what the function makes of the number of the run, behind the layer, on `/`.
pub(crate) fn service<R>(
    layer: &IdempotencyLayer,
    respond: impl Fn(usize) -> R + Clone + Send + Sync + 'static,
) -> (Router, Runs)
where
    R: axum::response::IntoResponse + Send + 'static,
{
    let runs = Runs::default();
    let counted = runs.clone();
    let handler = move || {
        let response = respond(counted.run());
        async move { response }
    };
    (Router::new().route("/", post(handler)).layer(layer.clone()), runs)
}

/// A body that gives these frames, and then waits for ever, where it says so.
pub(crate) fn frames(frames: Vec<&'static [u8]>, ends: bool) -> Body {
    let mut left = frames.into_iter();
    let next = move |_: &mut std::task::Context<'_>| match left.next() {
        Some(data) => {
            std::task::Poll::Ready(Some(Ok::<_, Infallible>(http_body::Frame::data(Bytes::from_static(data)))))
        }
        None if ends => std::task::Poll::Ready(None),
        None => std::task::Poll::Pending,
    };
    Body::new(Polled(next))
}

/// A body that is what a function polls.
pub(crate) struct Polled<F>(pub(crate) F);

impl<F, E> http_body::Body for Polled<F>
where
    F: FnMut(&mut std::task::Context<'_>) -> std::task::Poll<Option<Result<http_body::Frame<Bytes>, E>>> + Unpin,
{
    type Data = Bytes;
    type Error = E;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<http_body::Frame<Bytes>, E>>> {
        (self.0)(context)
    }
}

/// A memory store whose calls fail as long as they are told to.
#[derive(Debug, Default)]
pub(crate) struct Frail {
    pub(crate) store: MemoryStore,
    failing: Mutex<Vec<(Operation, ErrorKind)>>,
    calls: AtomicUsize,
}

impl Frail {
    pub(crate) fn fail(&self, operation: Operation, kind: ErrorKind) {
        self.failing.lock().unwrap().push((operation, kind));
    }

    pub(crate) fn mend(&self) {
        self.failing.lock().unwrap().clear();
    }

    /// All calls so far.
    pub(crate) fn calls(&self) -> usize {
        self.calls.load(Ordering::SeqCst)
    }

    fn check(&self, operation: Operation) -> Result<(), StoreError> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        match self.failing.lock().unwrap().iter().find(|(of, _)| *of == operation) {
            Some((_, kind)) => Err(StoreError::new(*kind, "frail", operation)),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Frail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("frail")
    }
}

#[async_trait]
impl KeyStore for Frail {
    fn capabilities(&self) -> Capabilities {
        self.store.capabilities()
    }

    async fn reserve(&self, request: &Reserve) -> Result<Reservation, StoreError> {
        self.check(Operation::Reserve)?;
        self.store.reserve(request).await
    }

    async fn complete(&self, lease: &Lease, outcome: &Outcome) -> Result<(), StoreError> {
        self.check(Operation::Complete)?;
        self.store.complete(lease, outcome).await
    }

    async fn fail(&self, lease: &Lease, failure: &Failure) -> Result<(), StoreError> {
        self.check(Operation::Fail)?;
        self.store.fail(lease, failure).await
    }

    async fn renew(&self, lease: &Lease, extend_by: Duration) -> Result<(), StoreError> {
        self.check(Operation::Renew)?;
        self.store.renew(lease, extend_by).await
    }

    async fn fetch(&self, key: &Key) -> Result<Option<Record>, StoreError> {
        self.check(Operation::Fetch)?;
        self.store.fetch(key).await
    }

    async fn purge_expired(&self, budget: PurgeBudget) -> Result<Purged, StoreError> {
        self.store.purge_expired(budget).await
    }
}
