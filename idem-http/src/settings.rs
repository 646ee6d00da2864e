//! All that a layer is set to.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderName, Method, Response};
use idem_core::executor::Executor;

use crate::decision::Decision;
use crate::finality::Finality;
use crate::fingerprint::Fingerprinting;
use crate::key::KeyFormat;
use crate::observe::KeysInLogs;
use crate::refusal::{Answers, Reason, Refusal};
use crate::scope::RequestScope;

/// What happens to a request whose key cannot be reserved because the store is down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum OnStoreError {
    /// The handler does not run, and the client is told to come back: [`StoreUnavailable`](Reason::StoreUnavailable).
    #[default]
    Refuse,
    /// The handler runs, **unprotected**: while the store is down, repeats run again. Not where the store answers that there
    /// is a record that it cannot read.
    RunUnprotected,
}

pub(crate) type Responder = dyn Fn(&Refusal, Response<Bytes>) -> Response<Bytes> + Send + Sync;

pub(crate) type Check = dyn Fn(&Parts, &Bytes) -> Option<Response<Bytes>> + Send + Sync;

#[derive(Clone)]
pub(crate) struct Settings {
    pub(crate) executor: Executor,
    pub(crate) scope: Arc<dyn RequestScope>,
    pub(crate) header: HeaderName,
    pub(crate) replayed_header: HeaderName,
    pub(crate) methods: Vec<Method>,
    pub(crate) required: bool,
    pub(crate) key_format: KeyFormat,
    pub(crate) fingerprinting: Fingerprinting,
    pub(crate) body_limit: usize,
    pub(crate) check: Option<Arc<Check>>,
    pub(crate) finality: Finality,
    pub(crate) unstored: Vec<HeaderName>,
    pub(crate) streaming_after: Duration,
    pub(crate) on_store_error: OnStoreError,
    pub(crate) answers: Answers,
    pub(crate) responder: Option<Arc<Responder>>,
    pub(crate) keys_in_logs: KeysInLogs,
}

impl Settings {
    /// As the draft asks for.
    pub(crate) fn ietf(executor: Executor, scope: Arc<dyn RequestScope>) -> Self {
        Self {
            executor,
            scope,
            header: HeaderName::from_static("idempotency-key"),
            replayed_header: HeaderName::from_static("idempotent-replayed"),
            methods: vec![Method::POST, Method::PATCH],
            required: true,
            key_format: KeyFormat::default(),
            fingerprinting: Fingerprinting::default(),
            body_limit: 2 * 1024 * 1024,
            check: None,
            finality: Finality::default(),
            unstored: Vec::new(),
            streaming_after: Duration::from_secs(1),
            on_store_error: OnStoreError::default(),
            answers: Answers::default(),
            responder: None,
            keys_in_logs: KeysInLogs::default(),
        }
    }

    /// As Stripe does it.
    pub(crate) fn stripe(executor: Executor, scope: Arc<dyn RequestScope>) -> Self {
        let mut settings = Self::ietf(executor, scope);
        settings.answers.set_status(Reason::Mismatch, http::StatusCode::BAD_REQUEST);
        Self { methods: vec![Method::POST], required: false, finality: Finality::Executions, ..settings }
    }

    /// The layer's own answer.
    pub(crate) fn refuse(&self, refusal: Refusal) -> Response<Bytes> {
        let status = self.answers.status(refusal.reason());
        let refusal = refusal.with_status(status);
        let standard = self.answers.response(&refusal);
        let mut response = match &self.responder {
            None => standard,
            Some(responder) => responder(&refusal, standard),
        };
        response.extensions_mut().insert(Decision::Refused(refusal.reason()));
        response
    }
}
