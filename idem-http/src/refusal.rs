//! The layer's own answers, as `application/problem+json` (RFC 9457).

use std::borrow::Cow;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, LINK, LOCATION, RETRY_AFTER};
use http::{HeaderName, HeaderValue, Response, StatusCode};
use idem_core::Withheld;
use serde::Serialize;

use crate::key::InvalidKey;

/// Why the layer answered by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// A key is required, and the request has none.
    KeyMissing,
    /// The header gives no key, or several.
    KeyInvalid,
    /// The key is not of the [format](crate::KeyFormat) that is admitted.
    KeyNotAdmitted,
    /// The [scope](crate::RequestScope) is not known.
    ScopeUnknown,
    /// The request's body is over the limit.
    BodyTooLarge,
    /// The request's body could not be read to its end.
    BodyUnreadable,
    /// A request with this key is being processed.
    InProgress,
    /// The key was used for another request.
    Mismatch,
    /// A request with this key was given up by whoever processed it, and its outcome is unknown until somebody has found
    /// out: by [`Recovery::Refuse`](idem_core::executor::Recovery::Refuse), or since the policy is to abandon after a panic.
    Abandoned,
    /// As `Abandoned`, and the hook that is asked could not tell now.
    OutcomeUnknown,
    /// It was processed, but its response is not kept.
    Withheld,
    /// It was processed, but its stored response cannot be read as one of HTTP.
    Unreadable,
    /// The handler panicked.
    Panicked,
    /// The store of keys failed before the handler ran.
    StoreUnavailable,
    /// The server was shut down while the handler ran.
    Interrupted,
}

impl Reason {
    /// All there are.
    pub const ALL: [Self; 15] = [
        Self::KeyMissing,
        Self::KeyInvalid,
        Self::KeyNotAdmitted,
        Self::ScopeUnknown,
        Self::BodyTooLarge,
        Self::BodyUnreadable,
        Self::InProgress,
        Self::Mismatch,
        Self::Abandoned,
        Self::OutcomeUnknown,
        Self::Withheld,
        Self::Unreadable,
        Self::Panicked,
        Self::StoreUnavailable,
        Self::Interrupted,
    ];

    /// The last part of the problem's `type`, which is stable, and the word of it in logs and metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::KeyMissing => "key-missing",
            Self::KeyInvalid => "key-invalid",
            Self::KeyNotAdmitted => "key-not-admitted",
            Self::ScopeUnknown => "scope-unknown",
            Self::BodyTooLarge => "body-too-large",
            Self::BodyUnreadable => "body-unreadable",
            Self::InProgress => "in-progress",
            Self::Mismatch => "mismatch",
            Self::Abandoned => "abandoned",
            Self::OutcomeUnknown => "outcome-unknown",
            Self::Withheld => "response-withheld",
            Self::Unreadable => "response-unreadable",
            Self::Panicked => "handler-panicked",
            Self::StoreUnavailable => "store-unavailable",
            Self::Interrupted => "interrupted",
        }
    }

    /// The problem's `title`.
    #[must_use]
    pub const fn title(self) -> &'static str {
        match self {
            Self::KeyMissing => "An idempotency key is required",
            Self::KeyInvalid => "The idempotency key cannot be read",
            Self::KeyNotAdmitted => "The idempotency key has the wrong format",
            Self::ScopeUnknown => "It is not known whose idempotency key this is",
            Self::BodyTooLarge => "The request is too large",
            Self::BodyUnreadable => "The request could not be read",
            Self::InProgress => "A request with this key is in progress",
            Self::Mismatch => "This key was used for another request",
            Self::Abandoned | Self::OutcomeUnknown => "The outcome of this request is unknown",
            Self::Withheld | Self::Unreadable => "The request was processed, but its response is not available",
            Self::Panicked => "The request could not be processed",
            Self::StoreUnavailable => "Idempotency keys cannot be checked now",
            Self::Interrupted => "The server was stopped while it processed the request",
        }
    }

    /// The status that the draft asks for, or where it is silent the one that fits.
    const fn status(self) -> StatusCode {
        match self {
            Self::KeyMissing | Self::KeyInvalid | Self::KeyNotAdmitted | Self::BodyUnreadable => {
                StatusCode::BAD_REQUEST
            }
            Self::ScopeUnknown => StatusCode::FORBIDDEN,
            Self::BodyTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::InProgress => StatusCode::CONFLICT,
            Self::Mismatch => StatusCode::UNPROCESSABLE_ENTITY,
            Self::Withheld => StatusCode::GONE,
            Self::Abandoned | Self::Unreadable | Self::Panicked => StatusCode::INTERNAL_SERVER_ERROR,
            Self::OutcomeUnknown | Self::StoreUnavailable | Self::Interrupted => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    /// Whether the same request with the same key may get another answer without anybody's doing.
    const fn is_retryable(self) -> bool {
        match self {
            Self::BodyUnreadable
            | Self::InProgress
            | Self::OutcomeUnknown
            | Self::StoreUnavailable
            | Self::Panicked
            | Self::Interrupted => true,
            Self::KeyMissing
            | Self::KeyInvalid
            | Self::KeyNotAdmitted
            | Self::ScopeUnknown
            | Self::BodyTooLarge
            | Self::Mismatch
            | Self::Abandoned
            | Self::Withheld
            | Self::Unreadable => false,
        }
    }

    const fn detail(self) -> &'static str {
        match self {
            Self::KeyMissing => "send one key, and the same with every repeat of the request",
            Self::KeyInvalid | Self::KeyNotAdmitted => "",
            Self::ScopeUnknown => "the caller could not be told",
            Self::BodyTooLarge => "nothing was done",
            Self::BodyUnreadable => "it did not arrive whole, and nothing was done",
            Self::InProgress => "repeat the request with its key later to get its response",
            Self::Mismatch => "another request needs a key of its own",
            Self::Abandoned => "it was given up while it was processed, and somebody has to find out what became of it",
            Self::OutcomeUnknown => "it was given up while it was processed; repeat the request with its key later",
            Self::Withheld => "it is not processed again",
            Self::Unreadable => "it is not processed again",
            Self::Panicked => "an error of the server",
            Self::StoreUnavailable => "the request was not processed; repeat it with its key",
            Self::Interrupted => "repeat the request with its key to learn its outcome",
        }
    }
}

/// An answer of the layer's own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    reason: Reason,
    status: StatusCode,
    detail: Cow<'static, str>,
    retryable: bool,
    retry_after: Option<u64>,
    original_status: Option<u16>,
    location: Option<HeaderValue>,
}

impl Refusal {
    /// Why.
    #[must_use]
    pub fn reason(&self) -> Reason {
        self.reason
    }

    /// The status that is answered.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// A sentence for whoever reads the client's log. It holds nothing of what the client has sent.
    #[must_use]
    pub fn detail(&self) -> &str {
        &self.detail
    }

    /// Whether the same request with the same key may get another answer later.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        self.retryable
    }

    /// After how many seconds the client may repeat its request.
    #[must_use]
    pub fn retry_after(&self) -> Option<u64> {
        self.retry_after
    }

    /// The status of a response that is withheld.
    #[must_use]
    pub fn original_status(&self) -> Option<u16> {
        self.original_status
    }

    fn new(reason: Reason) -> Self {
        Self {
            reason,
            status: reason.status(),
            detail: Cow::Borrowed(reason.detail()),
            retryable: reason.is_retryable(),
            retry_after: None,
            original_status: None,
            location: None,
        }
    }

    pub(crate) fn invalid_key(error: InvalidKey) -> Self {
        match error {
            InvalidKey::Missing => Reason::KeyMissing.into(),
            _ => Self { detail: error.to_string().into(), ..Reason::KeyInvalid.into() },
        }
    }

    pub(crate) fn not_admitted(format: &str) -> Self {
        Self { detail: format!("the key must be {format}").into(), ..Reason::KeyNotAdmitted.into() }
    }

    pub(crate) fn too_large(limit: usize) -> Self {
        Self { detail: format!("the most is {limit} bytes; nothing was done").into(), ..Reason::BodyTooLarge.into() }
    }

    pub(crate) fn withheld(status: u16, reason: Withheld, location: Option<HeaderValue>) -> Self {
        let detail = format!("its status was {status}, and {reason}; it is not processed again").into();
        Self { detail, original_status: Some(status), location, ..Reason::Withheld.into() }
    }

    /// The client may come back then: in whole seconds, at least one, and never past that time where it is longer.
    pub(crate) fn after(self, wait: Duration) -> Self {
        Self { retry_after: Some(wait.as_secs().max(1)), ..self }
    }

    pub(crate) fn with_status(self, status: StatusCode) -> Self {
        Self { status, ..self }
    }
}

impl From<Reason> for Refusal {
    fn from(reason: Reason) -> Self {
        Self::new(reason)
    }
}

#[derive(Serialize)]
struct Problem<'a> {
    r#type: &'a str,
    title: &'a str,
    status: u16,
    detail: &'a str,
    retryable: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    original_status: Option<u16>,
}

/// The statuses and the form of refusals.
#[derive(Clone)]
pub(crate) struct Answers {
    /// Where they are not the reasons' own.
    statuses: Vec<(Reason, StatusCode)>,
    pub(crate) type_base: Cow<'static, str>,
    pub(crate) documentation: Option<HeaderValue>,
}

impl Default for Answers {
    fn default() -> Self {
        Self { statuses: Vec::new(), type_base: Cow::Borrowed("urn:idem:problem:"), documentation: None }
    }
}

impl Answers {
    pub(crate) fn set_status(&mut self, reason: Reason, status: StatusCode) {
        self.statuses.retain(|(of, _)| *of != reason);
        self.statuses.push((reason, status));
    }

    pub(crate) fn status(&self, reason: Reason) -> StatusCode {
        self.statuses.iter().find(|(of, _)| *of == reason).map_or(reason.status(), |(_, status)| *status)
    }

    pub(crate) fn problem_type(&self, reason: Reason) -> String {
        format!("{}{}", self.type_base, reason.as_str())
    }

    pub(crate) fn response(&self, refusal: &Refusal) -> Response<Bytes> {
        let problem = Problem {
            r#type: &self.problem_type(refusal.reason),
            title: refusal.reason.title(),
            status: refusal.status.as_u16(),
            detail: &refusal.detail,
            retryable: refusal.retryable,
            original_status: refusal.original_status,
        };
        // It cannot fail: texts and numbers.
        let mut response = Response::new(serde_json::to_vec(&problem).unwrap_or_default().into());
        *response.status_mut() = refusal.status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        let mut set = |name: HeaderName, value: Option<HeaderValue>| {
            if let Some(value) = value {
                headers.insert(name, value);
            }
        };
        set(RETRY_AFTER, refusal.retry_after.map(HeaderValue::from));
        set(LINK, self.documentation.clone());
        set(LOCATION, refusal.location.clone());
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_distinct_and_the_list_is_whole() {
        let names: std::collections::HashSet<_> = Reason::ALL.iter().map(|reason| reason.as_str()).collect();
        assert_eq!(names.len(), Reason::ALL.len());
    }

    #[test]
    fn the_time_to_wait_is_whole_seconds_within_the_lease() {
        for (millis, seconds) in [(0, 1), (1, 1), (999, 1), (1_000, 1), (1_999, 1), (2_000, 2), (29_999, 29)] {
            let refusal = Refusal::from(Reason::InProgress).after(Duration::from_millis(millis));
            assert_eq!(refusal.retry_after(), Some(seconds), "{millis}");
        }
    }
}
