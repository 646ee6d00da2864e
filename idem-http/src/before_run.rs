//! Extractors that refuse a request before its handler runs.

use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};

use crate::finality::Recording;

/// An extractor whose rejection is not kept: the handler has not run, so the key is free, whatever the status.
///
/// ```
/// use axum::Json;
/// use idem_http::BeforeRun;
///
/// #[derive(serde::Deserialize)]
/// struct Order {
///     amount: u32,
/// }
///
/// async fn create(BeforeRun(Json(order)): BeforeRun<Json<Order>>) -> String {
///     format!("charged {}", order.amount)
/// }
/// # let _: axum::Router = axum::Router::new().route("/charges", axum::routing::post(create));
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct BeforeRun<T>(pub T);

fn not_kept(rejection: impl IntoResponse) -> Response {
    let mut response = rejection.into_response();
    response.extensions_mut().insert(Recording::Free);
    response
}

impl<S: Send + Sync, T: FromRequest<S>> FromRequest<S> for BeforeRun<T> {
    type Rejection = Response;

    async fn from_request(request: Request, state: &S) -> Result<Self, Response> {
        T::from_request(request, state).await.map(Self).map_err(not_kept)
    }
}

impl<S: Send + Sync, T: FromRequestParts<S>> FromRequestParts<S> for BeforeRun<T> {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Response> {
        T::from_request_parts(parts, state).await.map(Self).map_err(not_kept)
    }
}
