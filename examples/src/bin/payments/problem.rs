//! Refusals, as `application/problem+json` (RFC 9457).

use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

/// Why a request was refused.
#[derive(Debug, Serialize)]
pub(crate) struct Problem {
    #[serde(skip)]
    status: StatusCode,
    #[serde(skip)]
    retry_after: Option<u64>,
    title: &'static str,
    detail: String,
    /// Whether the same request may succeed later.
    retryable: bool,
}

impl Problem {
    pub(crate) fn new(status: StatusCode, title: &'static str, detail: impl Into<String>) -> Self {
        Self { status, retry_after: None, title, detail: detail.into(), retryable: false }
    }

    /// The same request may succeed in a while. Whole seconds, at least one.
    pub(crate) fn retry_after(self, wait: Duration) -> Self {
        let seconds = wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
        Self { retry_after: Some(seconds.max(1)), retryable: true, ..self }
    }
}

impl Problem {
    pub(crate) fn into_bytes(self) -> axum::http::Response<Bytes> {
        let mut response = axum::http::Response::new(serde_json::to_vec(&self).unwrap_or_default().into());
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if let Some(seconds) = self.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        self.into_bytes().map(Body::from)
    }
}
