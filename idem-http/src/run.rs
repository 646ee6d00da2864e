//! A request with a key, from its body to its response.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, LOCATION};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, Request, Response};
use http_body::Body;
use idem_core::executor::{Attempt, Ending, Run, Settlement};
use idem_core::{Body as Stored, ErrorKind, Failure, Headers, Key, Origin, Outcome, StoreError, Withheld};
use tower_service::Service;
use tracing::Instrument;

use crate::body::{Cut, Kept, Received, RequestBody, ResponseBody, keep, receive};
use crate::decision::{Decision, Recorded};
use crate::finality::Recording;
use crate::observe::Watch;
use crate::refusal::{Reason, Refusal};
use crate::settings::{OnStoreError, Settings};
use crate::stored::{head, kept_headers};

/// When a client may come back to a store that was down.
const STORE_PAUSE: Duration = Duration::from_secs(1);

/// What the handler's run gives for the first caller.
struct Handled<R: Body, E> {
    result: Result<Response<ResponseBody<R>>, E>,
    took_over: bool,
    recorded: Recorded,
}

pub(crate) async fn protect<S, B, R>(
    settings: Arc<Settings>,
    watch: Watch,
    service: S,
    key: Key,
    parts: Parts,
    body: B,
) -> Result<Response<ResponseBody<R>>, S::Error>
where
    S: Service<Request<RequestBody<B>>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Send + 'static,
{
    let span = Watch::span(&settings, &key);
    let (answer, decision) = decide(&settings, service, &key, parts, body).instrument(span.clone()).await;
    watch.decided(&span, &key, &settings, decision);
    answer.map(|mut response| {
        response.extensions_mut().insert(decision);
        response
    })
}

type Answer<R, E> = (Result<Response<ResponseBody<R>>, E>, Decision);

async fn decide<S, B, R>(settings: &Arc<Settings>, service: S, key: &Key, parts: Parts, body: B) -> Answer<R, S::Error>
where
    S: Service<Request<RequestBody<B>>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Send + 'static,
{
    let refuse = |refusal: Refusal| {
        let decision = Decision::Refused(refusal.reason());
        (Ok(settings.refuse(refusal).map(ResponseBody::whole)), decision)
    };
    let received = match receive(body, settings.body_limit).await {
        Ok(received) => received,
        Err(Cut::TooLarge) => return refuse(Refusal::too_large(settings.body_limit)),
        Err(Cut::Broken) => return refuse(Reason::BodyUnreadable.into()),
    };
    if let Some(check) = &settings.check
        && let Some(response) = check(&parts, &received.data)
    {
        return (Ok(response.map(ResponseBody::whole)), Decision::Rejected);
    }
    let fingerprint = settings.fingerprinting.of(&parts, &received.data);
    let unprotected = match settings.on_store_error {
        OnStoreError::Refuse => None,
        OnStoreError::RunUnprotected => Some((service.clone(), parts.clone(), received.clone())),
    };
    // On the heap once, as it is large, and moved from future to future.
    let handler = Box::new(Call { settings: Arc::clone(settings), service, parts, received });
    let handle = move |attempt: Attempt| handle(handler, attempt);
    let run = settings.executor.run_outcome(key, fingerprint, handle).await;
    match run {
        Run::Ended { value, attempt, recorded, .. } => {
            let recorded = if recorded.is_ok() { value.recorded } else { Recorded::Failed };
            (value.result, Decision::Ran { attempt, took_over: value.took_over, recorded })
        }
        Run::Stored { outcome, attempt, replayed } => match replay(settings, &outcome, replayed) {
            Ok(response) if replayed => (Ok(response), Decision::Replayed { attempt }),
            Ok(response) => (Ok(response), Decision::Ran { attempt, took_over: false, recorded: Recorded::Whole }),
            Err(refusal) => refuse(refusal),
        },
        Run::InProgress { retry_after, .. } => refuse(Refusal::from(Reason::InProgress).after(retry_after)),
        Run::Mismatch => refuse(Reason::Mismatch.into()),
        Run::Abandoned(_) => refuse(Reason::Abandoned.into()),
        Run::OutcomeUnknown { .. } => refuse(Refusal::from(Reason::OutcomeUnknown).after(settings.executor.lease())),
        Run::Panicked { .. } => refuse(Reason::Panicked.into()),
        Run::Unreserved(error) => match unprotected {
            Some((service, parts, received)) if may_run_unprotected(&error) => {
                tracing::warn!(%error, "the store of keys failed, and a request is processed unprotected");
                let request = Request::from_parts(parts, RequestBody::whole(received));
                let response = call(service, request).await.map(|response| response.map(ResponseBody::passed));
                (response, Decision::Unprotected)
            }
            _ => {
                tracing::warn!(%error, "the store of keys failed, and a request was refused");
                refuse(Refusal::from(Reason::StoreUnavailable).after(STORE_PAUSE))
            }
        },
        Run::Store(error) => {
            tracing::warn!(%error, "the store of keys failed, and a request was refused");
            refuse(Refusal::from(Reason::StoreUnavailable).after(STORE_PAUSE))
        }
        Run::NoRuntime => refuse(Reason::StoreUnavailable.into()),
        Run::Interrupted(_) => refuse(Reason::Interrupted.into()),
    }
}

/// Not where the store was reached, and has a record.
fn may_run_unprotected(error: &StoreError) -> bool {
    !matches!(
        error.kind(),
        ErrorKind::Unreadable | ErrorKind::LeaseLost | ErrorKind::AlreadyCompleted | ErrorKind::InvalidInput
    )
}

async fn call<S: Service<Request<B>>, B>(mut service: S, request: Request<B>) -> Result<S::Response, S::Error> {
    std::future::poll_fn(|context| service.poll_ready(context)).await?;
    service.call(request).await
}

/// What the handler is to be called with.
struct Call<S> {
    settings: Arc<Settings>,
    service: S,
    parts: Parts,
    received: Received,
}

/// Runs the handler under its attempt.
async fn handle<S, B, R>(called: Box<Call<S>>, attempt: Attempt) -> Ending<Handled<R, S::Error>>
where
    S: Service<Request<RequestBody<B>>, Response = Response<R>>,
    B: Body<Data = Bytes>,
    R: Body<Data = Bytes>,
{
    let Call { settings, service, mut parts, received } = *called;
    let took_over = matches!(attempt.origin(), Origin::Takeover(_));
    let method = parts.method.clone();
    parts.extensions.insert(attempt);
    match call(service, Request::from_parts(parts, RequestBody::whole(received))).await {
        Ok(response) => {
            let (response, recorded, settlement) = record(&settings, &method, response).await;
            Ending { value: Handled { result: Ok(response), took_over, recorded }, settlement }
        }
        Err(error) => {
            let value = Handled { result: Err(error), took_over, recorded: Recorded::Freed };
            Ending::fail(value, Failure::truncated("the service returned an error"))
        }
    }
}

/// What of a response goes to the first caller, and what to the store.
async fn record<R: Body<Data = Bytes>>(
    settings: &Settings,
    method: &Method,
    response: Response<R>,
) -> (Response<ResponseBody<R>>, Recorded, Settlement) {
    let (parts, body) = response.into_parts();
    let recording = parts.extensions.get().copied();
    let recording = recording.unwrap_or_else(|| match settings.finality.is_final(&parts) {
        true => Recording::Keep,
        false => Recording::Free,
    });
    let code = parts.status.as_u16();
    let withheld = |reason: Withheld, headers: Headers| {
        let mut outcome = Outcome::withheld(code, reason);
        outcome.headers = headers;
        (Recorded::Withheld(reason), Settlement::Complete(outcome))
    };
    let (body, (recorded, settlement)) = match recording {
        Recording::Free => {
            let failure = Failure::truncated(&format!("responded with {code}"));
            (ResponseBody::passed(body), (Recorded::Freed, Settlement::Fail(failure)))
        }
        Recording::Withhold => (ResponseBody::passed(body), withheld(Withheld::Secret, Headers::default())),
        Recording::Keep => {
            let limit = settings.executor.outcome_limit();
            let headers = kept_headers(&parts.headers, &settings.unstored, method);
            match headers.and_then(|(headers, bytes)| Some((headers, limit.checked_sub(bytes)?))) {
                None => (ResponseBody::passed(body), withheld(Withheld::TooLarge, Headers::default())),
                Some((headers, _)) if parts.status.is_informational() || is_stream(&parts.headers) => {
                    (ResponseBody::passed(body), withheld(Withheld::Streamed, headers))
                }
                Some((headers, room)) => match keep(body, room, settings.streaming_after).await {
                    Kept::Withheld(reason, body) => (body, withheld(reason, headers)),
                    Kept::Whole(data) => {
                        let mut outcome = Outcome::new(code, data.clone());
                        outcome.headers = headers;
                        (ResponseBody::whole(data), (Recorded::Whole, Settlement::Complete(outcome)))
                    }
                },
            }
        }
    };
    (Response::from_parts(parts, body), recorded, settlement)
}

/// Types of content that have no end of their own.
fn is_stream(headers: &HeaderMap) -> bool {
    let Some(value) = headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes) else { return false };
    [&b"text/event-stream"[..], b"multipart/x-mixed-replace", b"application/grpc"]
        .iter()
        .any(|kind| value.get(..kind.len()).is_some_and(|start| start.eq_ignore_ascii_case(kind)))
}

/// A stored outcome as a response.
fn replay<R: Body<Data = Bytes>>(
    settings: &Settings,
    outcome: &Outcome,
    replayed: bool,
) -> Result<Response<ResponseBody<R>>, Refusal> {
    match &outcome.body {
        Stored::Withheld(reason) => {
            let location = outcome.headers.iter().find(|line| *line.name == *LOCATION.as_str());
            let location = location.and_then(|line| HeaderValue::from_maybe_shared(line.value.clone()).ok());
            Err(Refusal::withheld(outcome.code, *reason, location))
        }
        Stored::Stored(data) => {
            let mut parts = head(outcome).ok_or(Reason::Unreadable)?;
            if replayed {
                parts.headers.insert(settings.replayed_header.clone(), HeaderValue::from_static("true"));
            }
            Ok(Response::from_parts(parts, ResponseBody::whole(data.clone())))
        }
    }
}
