//! Which responses are final.

use std::fmt;
use std::sync::Arc;

use http::StatusCode;
use http::response::Parts;

/// Which responses are kept for repeats, where the handler does not say by a [`Recording`]. The others free the key: a
/// repeat runs the handler again.
///
/// A response that frees the key has to mean that nothing happened, or that it may happen again.
#[derive(Clone, Default)]
#[non_exhaustive]
pub enum Finality {
    /// All but 5xx, 408, 425 and 429, which a repeat may mend, and 405, 413 and 415, which refuse a request for its form
    /// before a handler runs. The default.
    #[default]
    Answers,
    /// All but 429: also that a handler went wrong (5xx) is an answer, as after an effect that cannot be told.
    Executions,
    /// What a function says; see [`custom`](Self::custom).
    Custom(Arc<dyn Fn(&Parts) -> bool + Send + Sync>),
}

impl Finality {
    /// Final is what the function says. It sees status, headers and extensions. A panic counts as one of the handler.
    pub fn custom(is_final: impl Fn(&Parts) -> bool + Send + Sync + 'static) -> Self {
        Self::Custom(Arc::new(is_final))
    }

    pub(crate) fn is_final(&self, response: &Parts) -> bool {
        let status = response.status;
        match self {
            Self::Answers => {
                !status.is_server_error()
                    && !matches!(
                        status,
                        StatusCode::REQUEST_TIMEOUT
                            | StatusCode::TOO_EARLY
                            | StatusCode::TOO_MANY_REQUESTS
                            | StatusCode::METHOD_NOT_ALLOWED
                            | StatusCode::PAYLOAD_TOO_LARGE
                            | StatusCode::UNSUPPORTED_MEDIA_TYPE
                    )
            }
            Self::Executions => status != StatusCode::TOO_MANY_REQUESTS,
            Self::Custom(is_final) => is_final(response),
        }
    }

    /// In words, for clients.
    pub(crate) fn description(&self) -> &'static str {
        match self {
            Self::Answers => "all responses but 405, 408, 413, 415, 425, 429 and 5xx",
            Self::Executions => "all responses but 429",
            Self::Custom(_) => "as documented for each operation",
        }
    }
}

impl fmt::Debug for Finality {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Finality({})", self.description())
    }
}

/// What a handler says of its own response, as an extension of it; it goes before [`Finality`].
///
/// ```
/// use axum::Extension;
/// use axum::http::StatusCode;
/// use axum::response::IntoResponse;
/// use idem_http::Recording;
///
/// async fn wrong_password() -> impl IntoResponse {
///     // The same request with the same password may be right later.
///     (StatusCode::BAD_REQUEST, Extension(Recording::Free), "wrong one-time password")
/// }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Recording {
    /// Final: keep it whatever its status.
    Keep,
    /// Do not keep it: the key is free, and a repeat runs the handler again. Nothing may have happened.
    Free,
    /// Keep that it ran, but neither its headers nor its body, which must not be at rest in the store. A repeat runs
    /// nothing, and is told [`Withheld`](crate::Reason::Withheld).
    Withhold,
}
