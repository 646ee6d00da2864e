//! The HTTP side: a layer makes charges idempotent, and what is left is what the API does.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use idem_core::executor::Executor;
use idem_core::{Fingerprint, Reserve, Scope};
use idem_http::{Attempt, Fingerprinting, IdempotencyLayer};

use crate::ledger::{Ledger, OnAccount};
use crate::problem::Problem;
use crate::provider::{Account, Charge, ChargeError, Order, Provider};

#[derive(Debug, Clone)]
struct App {
    provider: Arc<Provider>,
    /// Where charges, balances and keys are committed together.
    ledger: Option<Arc<Ledger>>,
}

pub(crate) fn router(executor: Executor, provider: Arc<Provider>, ledger: Option<Arc<Ledger>>) -> Router {
    // The account is the scope: nobody meets another's keys.
    let idempotency = IdempotencyLayer::new(executor, |request: &Parts| request.extensions.get::<Scope>().cloned())
        .with_fingerprinting(Fingerprinting::default().with_canonical_json())
        .with_check(is_an_order);
    let policy = idempotency.policy();
    Router::new()
        .route("/charges", post(create_charge).route_layer(idempotency))
        .route("/charges-on-account", post(charge_on_account))
        .route("/balance", get(balance))
        .route_layer(middleware::from_fn(authenticate))
        .route_service("/idempotency", policy)
        .with_state(App { provider, ledger })
}

/// Runs once per key. A declined card is an answer, and every repeat gets it; after a time-out (504) the next repeat tries
/// again, as after every 5xx.
async fn create_charge(
    State(App { provider, ledger }): State<App>,
    Extension(account): Extension<Scope>,
    Extension(attempt): Extension<Attempt>,
    Json(order): Json<Order>,
) -> Result<Response, Problem> {
    let account = account.as_str();
    let response = match ledger {
        None => created(&provider.charge(account, &order, attempt.number()).await?),
        Some(ledger) => {
            // No transaction is open while the card network is asked.
            provider.authorize(account, &order, attempt.number()).await?;
            ledger.charge(&attempt, account, &order, created).await?
        }
    };
    Ok(response.map(Body::from))
}

/// A charge that asks nobody is one transaction with its key. It needs no lease, and so no layer.
async fn charge_on_account(
    State(app): State<App>,
    Extension(account): Extension<Scope>,
    headers: HeaderMap,
    Json(order): Json<Order>,
) -> Result<Response, Problem> {
    let ledger = app.ledger.ok_or_else(|| Problem::new(StatusCode::NOT_FOUND, "Not here", "there is no ledger"))?;
    let bad = |detail: String| Problem::new(StatusCode::BAD_REQUEST, "Idempotency-Key needed", detail);
    let id = idem_http::parse_key(&headers, "idempotency-key").map_err(|error| bad(error.to_string()))?;
    let key = account.key(&id).map_err(|error| bad(error.to_string()))?;
    let fingerprint = Fingerprint::of_value(&order).map_err(|error| bad(error.to_string()))?;
    let request = Reserve::new(key).with_fingerprint(fingerprint);
    match ledger.charge_on_account(&request, account.as_str(), &order).await? {
        OnAccount::Charged(charge) => Ok(created(&charge).map(Body::from)),
        OnAccount::Before(charge) => {
            Ok(([("idempotent-replayed", "true")], created(&charge).map(Body::from)).into_response())
        }
        OnAccount::InProgress(retry_after) => {
            let title = "A request with this key is in progress";
            Err(Problem::new(StatusCode::CONFLICT, title, "repeat it later").retry_after(retry_after))
        }
        OnAccount::Mismatch => {
            let title = "This key was used for another request";
            Err(Problem::new(StatusCode::UNPROCESSABLE_ENTITY, title, "another order needs a key of its own"))
        }
    }
}

/// Whole, so that it can be stored as it is.
fn created(charge: &Charge) -> axum::http::Response<Bytes> {
    let mut response = axum::http::Response::new(serde_json::to_vec(charge).unwrap_or_default().into());
    *response.status_mut() = StatusCode::CREATED;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    if let Ok(location) = format!("/charges/{}", charge.id).parse() {
        headers.insert(header::LOCATION, location);
    }
    response
}

impl From<ChargeError> for Problem {
    fn from(error: ChargeError) -> Self {
        let a_moment = Duration::from_secs(1);
        match error {
            ChargeError::Declined => Self::new(StatusCode::PAYMENT_REQUIRED, "Card declined", error.to_string()),
            ChargeError::Timeout => {
                Self::new(StatusCode::GATEWAY_TIMEOUT, "Provider timed out", error.to_string()).retry_after(a_moment)
            }
            ChargeError::Ledger(_) => {
                let detail = "repeat the request with its key";
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "The ledger is unavailable", detail).retry_after(a_moment)
            }
        }
    }
}

async fn balance(State(app): State<App>, Extension(account): Extension<Scope>) -> Result<Json<Account>, Problem> {
    let provider = app.provider.account(account.as_str());
    let Some(ledger) = app.ledger else { return Ok(Json(provider)) };
    let booked = ledger.account(account.as_str()).await.map_err(ChargeError::from)?;
    Ok(Json(Account { calls: provider.calls, ..booked }))
}

/// Tells whose request it is. A real service would look the bearer token up.
async fn authenticate(mut request: Request, next: Next) -> Result<Response, Problem> {
    let value = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let account = value.and_then(|value| value.strip_prefix("Bearer ")).filter(|account| !account.is_empty());
    let Some(scope) = account.and_then(|account| Scope::new(account).ok()) else {
        return Err(Problem::new(StatusCode::UNAUTHORIZED, "Who are you?", "send Authorization: Bearer <account>"));
    };
    request.extensions_mut().insert(scope);
    Ok(next.run(request).await)
}

/// What is no order is refused before its key is used.
fn is_an_order(request: &Parts, body: &Bytes) -> Option<axum::http::Response<Bytes>> {
    let kind = request.headers.get(header::CONTENT_TYPE).map(|value| value.as_bytes());
    let (status, detail) = if !kind.is_some_and(|kind| kind.starts_with(b"application/json")) {
        (StatusCode::UNSUPPORTED_MEDIA_TYPE, "send application/json".to_owned())
    } else {
        (StatusCode::UNPROCESSABLE_ENTITY, serde_json::from_slice::<Order>(body).err()?.to_string())
    };
    Some(Problem::new(status, "Not an order", detail).into_bytes())
}
