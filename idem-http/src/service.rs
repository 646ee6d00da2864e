//! The service: what is decided before the body is read.

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::request::Parts;
use http::{Request, Response};
use http_body::Body;
use idem_core::Key;
use tower_service::Service;

use crate::body::{RequestBody, ResponseBody};
use crate::future::ResponseFuture;
use crate::key::parse_key;
use crate::observe::Watch;
use crate::refusal::{Reason, Refusal};
use crate::run::protect;
use crate::settings::Settings;

/// The service of [`IdempotencyLayer`](crate::IdempotencyLayer). Its error is that of the service within.
#[derive(Clone)]
pub struct Idempotency<S> {
    inner: S,
    settings: Arc<Settings>,
}

impl<S> Idempotency<S> {
    pub(crate) fn new(inner: S, settings: Arc<Settings>) -> Self {
        Self { inner, settings }
    }
}

impl<S, B, R> Service<Request<B>> for Idempotency<S>
where
    S: Service<Request<RequestBody<B>>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Send + 'static,
{
    type Response = Response<ResponseBody<R>>;
    type Error = S::Error;
    type Future = ResponseFuture<S::Future, R, S::Error>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let settings = &self.settings;
        let is_concerned = settings.methods.contains(request.method())
            && (settings.required || request.headers().contains_key(&settings.header));
        if !is_concerned {
            return ResponseFuture::passed(self.inner.call(request.map(RequestBody::passed)));
        }
        let watch = Watch::start();
        let (parts, body) = request.into_parts();
        let key = match key(settings, &parts) {
            Ok(key) => key,
            Err(refusal) => {
                watch.refused(None, settings, refusal.reason());
                return ResponseFuture::answered(settings.refuse(refusal).map(ResponseBody::whole));
            }
        };
        // Not the one that is ready: what that holds, such as a permit to run, is for handlers, not for uploads, for those
        // who wait, or for replays.
        let inner = self.inner.clone();
        ResponseFuture::protected(Box::pin(protect(Arc::clone(settings), watch, inner, key, parts, body)))
    }
}

/// The scope comes first: nobody unknown makes the server look at a key.
fn key(settings: &Settings, request: &Parts) -> Result<Key, Refusal> {
    if !request.headers.contains_key(&settings.header) {
        return Err(Reason::KeyMissing.into());
    }
    let scope = settings.scope.scope(request).ok_or(Reason::ScopeUnknown)?;
    let id = parse_key(&request.headers, &settings.header).map_err(Refusal::invalid_key)?;
    if !settings.key_format.admits(&id) {
        return Err(Refusal::not_admitted(settings.key_format.description()));
    }
    // What was parsed is printable ASCII of a length that a key may have.
    scope.key(&id).map_err(|_| Reason::KeyInvalid.into())
}

impl<S: fmt::Debug> fmt::Debug for Idempotency<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Idempotency").field("inner", &self.inner).finish_non_exhaustive()
    }
}
