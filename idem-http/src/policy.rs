//! What clients have to know, as the draft asks a server to publish (section 2.5.2).

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::{ALLOW, CONTENT_LENGTH, CONTENT_TYPE};
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::Full;
use idem_core::limits::MAX_KEY_ID_BYTES;
use serde::Serialize;
use tower_service::Service;

use crate::refusal::Reason;
use crate::settings::Settings;

/// The published policy of a layer. It is a service too, which answers GET and HEAD with itself as JSON:
///
/// ```
/// # use idem_core::{Executor, MemoryStore};
/// # use idem_http::{IdempotencyLayer, SingleTenant};
/// # let layer = IdempotencyLayer::new(Executor::new(MemoryStore::new()), SingleTenant);
/// let router: axum::Router = axum::Router::new().route_service("/idempotency", layer.policy());
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PublishedPolicy {
    /// The header of the key.
    pub header: String,
    /// Whether a key is required.
    pub required: bool,
    /// The methods that keys are for.
    pub methods: Vec<String>,
    /// What a key has to be, in words.
    pub key_format: String,
    /// The most bytes of a key.
    pub key_max_bytes: usize,
    /// For how long a key and its response are kept, in seconds, from the response on.
    pub retention_seconds: u64,
    /// The most bytes of a request's body.
    pub request_max_bytes: usize,
    /// The most bytes of a response that is kept, its headers included.
    pub response_max_bytes: usize,
    /// Which responses are kept, in words.
    pub kept_responses: &'static str,
    /// The header that marks a replay.
    pub replayed_header: String,
    /// The server's answers about keys.
    pub problems: Vec<PublishedProblem>,
}

/// One of the server's answers about keys.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PublishedProblem {
    /// The problem's type.
    pub r#type: String,
    /// The status.
    pub status: u16,
    /// The problem's title.
    pub title: &'static str,
}

impl PublishedPolicy {
    pub(crate) fn of(settings: &Settings) -> Self {
        let problem = |reason: &Reason| PublishedProblem {
            r#type: settings.answers.problem_type(*reason),
            status: settings.answers.status(*reason).as_u16(),
            title: reason.title(),
        };
        Self {
            header: settings.header.to_string(),
            required: settings.required,
            methods: settings.methods.iter().map(Method::to_string).collect(),
            key_format: settings.key_format.description().to_owned(),
            key_max_bytes: MAX_KEY_ID_BYTES,
            retention_seconds: settings.executor.retention().as_secs(),
            request_max_bytes: settings.body_limit,
            response_max_bytes: settings.executor.outcome_limit(),
            kept_responses: settings.finality.description(),
            replayed_header: settings.replayed_header.to_string(),
            problems: Reason::ALL.iter().map(problem).collect(),
        }
    }

    /// As JSON.
    #[must_use]
    pub fn to_json(&self) -> Bytes {
        // It cannot fail: texts and numbers.
        serde_json::to_vec(self).unwrap_or_default().into()
    }
}

impl<B> Service<Request<B>> for PublishedPolicy {
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let json = self.to_json();
        let length = HeaderValue::from(json.len());
        let (status, body) = match *request.method() {
            Method::GET => (StatusCode::OK, json),
            Method::HEAD => (StatusCode::OK, Bytes::new()),
            _ => (StatusCode::METHOD_NOT_ALLOWED, Bytes::new()),
        };
        let mut response = Response::new(Full::new(body));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        if status == StatusCode::OK {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
            headers.insert(CONTENT_LENGTH, length);
        } else {
            headers.insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        }
        ready(Ok(response))
    }
}
