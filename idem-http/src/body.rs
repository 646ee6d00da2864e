//! Bodies: of requests, read whole before anything is reserved, and of responses, read as far as they can be kept.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use idem_core::Withheld;
use pin_project_lite::pin_project;
use tokio::time::{Instant, timeout_at};

/// The next frame of a body.
async fn next<B: Body>(body: &mut Pin<Box<B>>) -> Option<Result<Frame<B::Data>, B::Error>> {
    std::future::poll_fn(|context| body.as_mut().poll_frame(context)).await
}

/// What has been read of a body: the one chunk as it came, or several in one buffer. Not a list of them: each takes more
/// room than its bytes when a peer sends them one by one.
struct Gathered {
    one: Bytes,
    several: BytesMut,
    /// How long the whole will be, at least.
    expected: usize,
}

impl Gathered {
    fn new(expected: u64) -> Self {
        // No more is made room for than has come, or nearly: a length is only announced.
        let expected = usize::try_from(expected).unwrap_or(usize::MAX).min(64 * 1024);
        Self { one: Bytes::new(), several: BytesMut::new(), expected }
    }

    fn len(&self) -> usize {
        self.one.len() + self.several.len()
    }

    fn push(&mut self, chunk: Bytes) {
        if self.len() == 0 {
            self.one = chunk;
            return;
        }
        if !self.one.is_empty() {
            self.several.reserve(self.expected.max(self.one.len() + chunk.len()));
            self.several.extend_from_slice(&std::mem::take(&mut self.one));
        }
        self.several.extend_from_slice(&chunk);
    }

    fn whole(self) -> Bytes {
        if self.several.is_empty() { self.one } else { self.several.freeze() }
    }
}

pin_project! {
    /// The body of a request behind the layer: as it came, where the layer had no part in it, or read whole.
    pub struct RequestBody<B> {
        #[pin]
        inner: Inner<B>,
    }
}

pin_project! {
    #[project = InnerProjection]
    enum Inner<B> {
        Passed { #[pin] body: B },
        Whole { data: Option<Bytes>, trailers: Option<HeaderMap> },
    }
}

impl<B> RequestBody<B> {
    pub(crate) fn passed(body: B) -> Self {
        Self { inner: Inner::Passed { body } }
    }

    pub(crate) fn whole(received: Received) -> Self {
        let data = Some(received.data).filter(|data| !data.is_empty());
        Self { inner: Inner::Whole { data, trailers: received.trailers } }
    }
}

impl<B: Body<Data = Bytes>> Body for RequestBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        match self.project().inner.project() {
            InnerProjection::Passed { body } => body.poll_frame(context),
            InnerProjection::Whole { data, trailers } => Poll::Ready(
                data.take()
                    .map(|data| Ok(Frame::data(data)))
                    .or_else(|| trailers.take().map(|t| Ok(Frame::trailers(t)))),
            ),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.inner {
            Inner::Passed { body } => body.is_end_stream(),
            Inner::Whole { data, trailers } => data.is_none() && trailers.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.inner {
            Inner::Passed { body } => body.size_hint(),
            Inner::Whole { data, .. } => SizeHint::with_exact(data.as_ref().map_or(0, Bytes::len) as u64),
        }
    }
}

impl<B> fmt::Debug for RequestBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequestBody").finish_non_exhaustive()
    }
}

/// A request's body, whole.
#[derive(Clone)]
pub(crate) struct Received {
    pub(crate) data: Bytes,
    trailers: Option<HeaderMap>,
}

/// Why a request's body is not whole.
pub(crate) enum Cut {
    TooLarge,
    /// The client has gone, or has broken the framing.
    Broken,
}

/// Reads a request's body to its end, or until it is over the limit.
pub(crate) async fn receive<B: Body<Data = Bytes>>(body: B, limit: usize) -> Result<Received, Cut> {
    // Said before anything is read, so that a client that waits for "100 Continue" sends nothing.
    if body.size_hint().lower() > limit as u64 {
        return Err(Cut::TooLarge);
    }
    let mut received = Received { data: Bytes::new(), trailers: None };
    if body.is_end_stream() {
        return Ok(received);
    }
    let mut data = Gathered::new(body.size_hint().lower());
    let mut body = Box::pin(body);
    while let Some(frame) = next(&mut body).await {
        match frame.map_err(|_| Cut::Broken)?.into_data() {
            Ok(chunk) if chunk.len() > limit - data.len() => return Err(Cut::TooLarge),
            Ok(chunk) => data.push(chunk),
            Err(frame) => received.trailers = frame.into_trailers().ok(),
        }
    }
    received.data = data.whole();
    Ok(received)
}

pin_project! {
    /// The body of a response of the layer: as the handler gave it, or whole, from the store or for it.
    pub struct ResponseBody<B: Body> {
        #[pin]
        inner: Answer<B>,
    }
}

pin_project! {
    #[project = AnswerProjection]
    enum Answer<B: Body> {
        Passed { #[pin] body: B },
        Whole { data: Option<Bytes> },
        // What was read of it, and the rest.
        Partly { part: Box<Part<B>> },
    }
}

struct Part<B: Body> {
    read: Option<Bytes>,
    then: Option<Result<HeaderMap, B::Error>>,
    left: Pin<Box<B>>,
}

impl<B: Body<Data = Bytes>> ResponseBody<B> {
    pub(crate) fn passed(body: B) -> Self {
        Self { inner: Answer::Passed { body } }
    }

    pub(crate) fn whole(data: Bytes) -> Self {
        Self { inner: Answer::Whole { data: Some(data).filter(|data| !data.is_empty()) } }
    }

    fn partly(read: Bytes, then: Option<Result<HeaderMap, B::Error>>, left: Pin<Box<B>>) -> Self {
        let read = Some(read).filter(|read| !read.is_empty());
        Self { inner: Answer::Partly { part: Box::new(Part { read, then, left }) } }
    }
}

impl<B: Body<Data = Bytes>> Body for ResponseBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        match self.project().inner.project() {
            AnswerProjection::Passed { body } => body.poll_frame(context),
            AnswerProjection::Whole { data } => Poll::Ready(data.take().map(|data| Ok(Frame::data(data)))),
            AnswerProjection::Partly { part } => {
                if let Some(data) = part.read.take() {
                    return Poll::Ready(Some(Ok(Frame::data(data))));
                }
                match part.then.take() {
                    Some(then) => Poll::Ready(Some(then.map(Frame::trailers))),
                    None => part.left.as_mut().poll_frame(context),
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.inner {
            Answer::Passed { body } => body.is_end_stream(),
            Answer::Whole { data } => data.is_none(),
            Answer::Partly { part } => part.read.is_none() && part.then.is_none() && part.left.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.inner {
            Answer::Passed { body } => body.size_hint(),
            Answer::Whole { data } => SizeHint::with_exact(data.as_ref().map_or(0, Bytes::len) as u64),
            Answer::Partly { part } => {
                let read = part.read.as_ref().map_or(0, Bytes::len) as u64;
                let (left, mut hint) = (part.left.size_hint(), SizeHint::new());
                hint.set_lower(read.saturating_add(left.lower()));
                if let Some(upper) = left.upper().and_then(|upper| upper.checked_add(read)) {
                    hint.set_upper(upper);
                }
                hint
            }
        }
    }
}

impl<B: Body> fmt::Debug for ResponseBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseBody").finish_non_exhaustive()
    }
}

/// A response's body, as far as it can be kept.
pub(crate) enum Kept<B: Body> {
    Whole(Bytes),
    /// All of it for the first caller, and for repeats that it is not kept.
    Withheld(Withheld, ResponseBody<B>),
}

/// Reads a response's body to its end, if that is not beyond the limit and, where its length is not known, comes soon.
pub(crate) async fn keep<B: Body<Data = Bytes>>(body: B, limit: usize, patience: Duration) -> Kept<B> {
    let hint = body.size_hint();
    if hint.lower() > limit as u64 {
        return Kept::Withheld(Withheld::TooLarge, ResponseBody::passed(body));
    }
    if body.is_end_stream() {
        return Kept::Whole(Bytes::new());
    }
    // One whose length is known ends: it is waited for as the handler was.
    let until = if hint.exact().is_some() { None } else { Some(Instant::now() + patience) };
    let (mut body, mut read) = (Box::pin(body), Gathered::new(hint.lower()));
    loop {
        let frame = match until {
            None => next(&mut body).await,
            Some(until) => match timeout_at(until, next(&mut body)).await {
                Ok(frame) => frame,
                Err(_) => return Kept::Withheld(Withheld::Streamed, ResponseBody::partly(read.whole(), None, body)),
            },
        };
        match frame {
            None => return Kept::Whole(read.whole()),
            Some(Ok(frame)) => match frame.into_data() {
                Ok(data) => {
                    read.push(data);
                    if read.len() > limit {
                        return Kept::Withheld(Withheld::TooLarge, ResponseBody::partly(read.whole(), None, body));
                    }
                    // One that never waits would never be timed out.
                    if until.is_some_and(|until| Instant::now() >= until) {
                        return Kept::Withheld(Withheld::Streamed, ResponseBody::partly(read.whole(), None, body));
                    }
                }
                // An outcome has no place for trailers, and a replay without them would be another response.
                Err(frame) => {
                    let trailers = frame.into_trailers().ok().map(Ok);
                    return Kept::Withheld(Withheld::Streamed, ResponseBody::partly(read.whole(), trailers, body));
                }
            },
            Some(Err(error)) => {
                return Kept::Withheld(
                    Withheld::Unserializable,
                    ResponseBody::partly(read.whole(), Some(Err(error)), body),
                );
            }
        }
    }
}
