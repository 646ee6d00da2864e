//! The layer, and all that can be set of it.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::InvalidHeaderValue;
use http::request::Parts;
use http::{HeaderName, HeaderValue, Method, Response, StatusCode};
use idem_core::executor::Executor;
use tokio::time::timeout;
use tower_layer::Layer;

use crate::finality::Finality;
use crate::fingerprint::Fingerprinting;
use crate::key::KeyFormat;
use crate::observe::KeysInLogs;
use crate::policy::PublishedPolicy;
use crate::refusal::{Reason, Refusal};
use crate::scope::RequestScope;
use crate::service::Idempotency;
use crate::settings::{OnStoreError, Settings};

/// Makes a service idempotent; see the [crate](crate). Cheap to clone.
///
/// How long a key is held and kept, what a repeat does while the first request runs (refuse or wait), what is done about a
/// process that died and about a panic: these are the [`Executor`]'s settings. Routes that differ in them get layers with
/// [siblings](Executor::sibling) of one executor:
///
/// ```
/// use std::time::Duration;
///
/// use idem_core::MemoryStore;
/// use idem_core::executor::{Executor, Recovery, Waiting};
/// use idem_http::{IdempotencyLayer, SingleTenant};
///
/// let executor = Executor::builder(MemoryStore::new()).waiting(Waiting::UpTo(Duration::from_secs(5))).build()?;
/// let orders = IdempotencyLayer::new(executor.clone(), SingleTenant);
/// let money = executor.sibling().on_abandoned(Recovery::Refuse).build()?;
/// let charges = orders.clone().with_executor(money);
/// # Ok::<(), idem_core::InvalidInput>(())
/// ```
#[derive(Clone)]
#[must_use]
pub struct IdempotencyLayer(Arc<Settings>);

impl IdempotencyLayer {
    /// A layer as the IETF's draft asks for: the key is required for POST and PATCH (400 without one), 422 for a key that
    /// was used for another request, 409 while the first request runs.
    pub fn new(executor: Executor, scope: impl RequestScope) -> Self {
        Self(Arc::new(Settings::ietf(executor, Arc::new(scope))))
    }

    /// A layer as Stripe's API is: the key is optional and for POST, 400 for a key that was used for another request, and
    /// responses are kept also when the handler went wrong.
    pub fn stripe(executor: Executor, scope: impl RequestScope) -> Self {
        Self(Arc::new(Settings::stripe(executor, Arc::new(scope))))
    }

    fn with(mut self, change: impl FnOnce(&mut Settings)) -> Self {
        change(Arc::make_mut(&mut self.0));
        self
    }

    /// Another executor: a [sibling](Executor::sibling) with other settings, for some routes.
    pub fn with_executor(self, executor: Executor) -> Self {
        self.with(|settings| settings.executor = executor)
    }

    /// The name of the key's header. Default: `Idempotency-Key`.
    pub fn with_header_name(self, name: HeaderName) -> Self {
        self.with(|settings| settings.header = name)
    }

    /// The name of the header that marks replays. Default: `Idempotent-Replayed`.
    pub fn with_replayed_header_name(self, name: HeaderName) -> Self {
        self.with(|settings| settings.replayed_header = name)
    }

    /// The methods that the layer is about; on all others a key is ignored. Default: POST and PATCH.
    pub fn with_methods(self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.with(|settings| settings.methods = methods.into_iter().collect())
    }

    /// A request without a key is refused by [`KeyMissing`](Reason::KeyMissing). Default, but for [`stripe`](Self::stripe).
    pub fn with_required_key(self) -> Self {
        self.with(|settings| settings.required = true)
    }

    /// A request without a key is passed through, unprotected.
    pub fn with_optional_key(self) -> Self {
        self.with(|settings| settings.required = false)
    }

    /// Which keys are admitted. Default: any.
    pub fn with_key_format(self, format: KeyFormat) -> Self {
        self.with(|settings| settings.key_format = format)
    }

    /// What has to be the same in a repeat. Default: method, path, query and body.
    pub fn with_fingerprinting(self, fingerprinting: Fingerprinting) -> Self {
        self.with(|settings| settings.fingerprinting = fingerprinting)
    }

    /// The largest body, in bytes, of a request with a key: it is held in memory whole before anything is reserved. A larger
    /// one is refused by [`BodyTooLarge`](Reason::BodyTooLarge). Default: 2 MiB.
    pub fn with_body_limit(self, bytes: usize) -> Self {
        self.with(|settings| settings.body_limit = bytes)
    }

    /// Looks at a request, whole, before anything is reserved, and refuses it by a response. What is refused here does not use
    /// the key up, so that a corrected request may come under the same key. A request that the handler refuses fixes what
    /// the key is for, also where its response is not kept.
    ///
    /// ```
    /// # use bytes::Bytes;
    /// # use idem_core::{Executor, MemoryStore};
    /// # use idem_http::{IdempotencyLayer, SingleTenant};
    /// # let layer = IdempotencyLayer::new(Executor::new(MemoryStore::new()), SingleTenant);
    /// let layer = layer.with_check(|_, body| {
    ///     let error = serde_json::from_slice::<serde_json::Value>(body).err()?;
    ///     let mut response = http::Response::new(Bytes::from(error.to_string()));
    ///     *response.status_mut() = http::StatusCode::UNPROCESSABLE_ENTITY;
    ///     Some(response)
    /// });
    /// ```
    pub fn with_check(self, check: impl Fn(&Parts, &Bytes) -> Option<Response<Bytes>> + Send + Sync + 'static) -> Self {
        self.with(|settings| settings.check = Some(Arc::new(check)))
    }

    /// Which responses are kept. Default: [`Finality::Answers`].
    pub fn with_finality(self, finality: Finality) -> Self {
        self.with(|settings| settings.finality = finality)
    }

    /// Headers that are not kept, beside those of one exchange: such as the id of a request that a layer further in sets.
    pub fn with_unstored_headers(self, names: impl IntoIterator<Item = HeaderName>) -> Self {
        self.with(|settings| settings.unstored = names.into_iter().collect())
    }

    /// How long the body of a response is waited for whose length is not known. One that has not come to its end by then is
    /// streamed to the first client, and withheld from repeats. Default: 1 s.
    pub fn with_streaming_after(self, time: Duration) -> Self {
        self.with(|settings| settings.streaming_after = time)
    }

    /// What happens while the store is down. Default: [`OnStoreError::Refuse`].
    pub fn with_on_store_error(self, on_store_error: OnStoreError) -> Self {
        self.with(|settings| settings.on_store_error = on_store_error)
    }

    /// The status of one of the layer's own answers; the [crate's](crate#statuses) table has the defaults.
    pub fn with_status(self, reason: Reason, status: StatusCode) -> Self {
        self.with(|settings| settings.answers.set_status(reason, status))
    }

    /// What problem types begin with; [`Reason::as_str`] is behind it. Default: `urn:idem:problem:`.
    pub fn with_problem_types(self, base: impl Into<Cow<'static, str>>) -> Self {
        self.with(|settings| settings.answers.type_base = base.into())
    }

    /// Where clients read about all this: in a header `Link: <…>; rel="describedby"` of the layer's own answers.
    ///
    /// # Errors
    /// When the address is none that a header can hold.
    pub fn with_documentation(self, address: &str) -> Result<Self, InvalidHeaderValue> {
        let link = HeaderValue::from_str(&format!("<{address}>; rel=\"describedby\"; type=\"text/html\""))?;
        Ok(self.with(|settings| settings.answers.documentation = Some(link)))
    }

    /// Answers in a form of one's own: the function is given what is refused, and the answer as it would be.
    ///
    /// ```
    /// # use bytes::Bytes;
    /// # use idem_core::{Executor, MemoryStore};
    /// # use idem_http::{IdempotencyLayer, SingleTenant};
    /// # let layer = IdempotencyLayer::new(Executor::new(MemoryStore::new()), SingleTenant);
    /// let layer = layer.with_responder(|refusal, standard| {
    ///     standard.map(|_| Bytes::from(format!("error={}", refusal.reason().as_str())))
    /// });
    /// ```
    pub fn with_responder(
        self,
        responder: impl Fn(&Refusal, Response<Bytes>) -> Response<Bytes> + Send + Sync + 'static,
    ) -> Self {
        self.with(|settings| settings.responder = Some(Arc::new(responder)))
    }

    /// How keys are shown in logs. Default: [`KeysInLogs::Hashed`].
    pub fn with_keys_in_logs(self, keys_in_logs: KeysInLogs) -> Self {
        self.with(|settings| settings.keys_in_logs = keys_in_logs)
    }

    /// What clients have to know of these settings, to be served to them.
    #[must_use]
    pub fn policy(&self) -> PublishedPolicy {
        PublishedPolicy::of(&self.0)
    }

    /// The executor that handlers run by.
    #[must_use]
    pub fn executor(&self) -> &Executor {
        &self.0.executor
    }

    /// Waits for the handlers that still run, of this layer and of all whose executors are siblings, also those whose
    /// clients have gone: for a clean shutdown, when the server takes no more requests. May be dropped at any time.
    ///
    /// # Errors
    /// [`StillRunning`], when the time is over. Those that run end with the runtime then; their keys are held until their
    /// leases end.
    pub async fn drain(&self, at_most: Duration) -> Result<(), StillRunning> {
        let executor = &self.0.executor;
        timeout(at_most, executor.drain()).await.map_err(|_| StillRunning { handlers: executor.running() })
    }
}

/// The time to drain was too short.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct StillRunning {
    /// How many handlers still run.
    pub handlers: usize,
}

impl fmt::Display for StillRunning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} handlers still run", self.handlers)
    }
}

impl std::error::Error for StillRunning {}

impl<S> Layer<S> for IdempotencyLayer {
    type Service = Idempotency<S>;

    fn layer(&self, inner: S) -> Idempotency<S> {
        Idempotency::new(inner, Arc::clone(&self.0))
    }
}

impl fmt::Debug for IdempotencyLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyLayer")
            .field("executor", &self.0.executor)
            .field("header", &self.0.header)
            .field("methods", &self.0.methods)
            .field("required", &self.0.required)
            .finish_non_exhaustive()
    }
}
