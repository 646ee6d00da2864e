//! The future of the service.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::Response;
use http_body::Body;
use pin_project_lite::pin_project;

use crate::body::ResponseBody;

pin_project! {
    /// The future of [`Idempotency`](crate::Idempotency): as large as the service's own where the layer has no part in the
    /// request, and on the heap otherwise.
    pub struct ResponseFuture<F, B: Body, E> {
        #[pin]
        inner: Inner<F, B, E>,
    }
}

type Protected<B, E> = Pin<Box<dyn Future<Output = Result<Response<ResponseBody<B>>, E>> + Send>>;

pin_project! {
    #[project = Projection]
    enum Inner<F, B: Body, E> {
        Passed { #[pin] future: F },
        Answered { response: Option<Response<ResponseBody<B>>> },
        Protected { future: Protected<B, E> },
    }
}

impl<F, B: Body, E> ResponseFuture<F, B, E> {
    pub(crate) fn passed(future: F) -> Self {
        Self { inner: Inner::Passed { future } }
    }

    pub(crate) fn answered(response: Response<ResponseBody<B>>) -> Self {
        Self { inner: Inner::Answered { response: Some(response) } }
    }

    pub(crate) fn protected(future: Protected<B, E>) -> Self {
        Self { inner: Inner::Protected { future } }
    }
}

impl<F, B, E> Future for ResponseFuture<F, B, E>
where
    F: Future<Output = Result<Response<B>, E>>,
    B: Body<Data = Bytes>,
{
    type Output = Result<Response<ResponseBody<B>>, E>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().inner.project() {
            Projection::Passed { future } => {
                Poll::Ready(ready!(future.poll(context)).map(|response| response.map(ResponseBody::passed)))
            }
            // Not polled again after its end.
            Projection::Answered { response } => {
                response.take().map_or(Poll::Pending, |response| Poll::Ready(Ok(response)))
            }
            Projection::Protected { future } => future.as_mut().poll(context),
        }
    }
}

impl<F, B: Body, E> fmt::Debug for ResponseFuture<F, B, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}
