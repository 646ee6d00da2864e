//! The HTTP side: what a request's key, scope and fingerprint are, and what each answer of the executor becomes.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::extract::rejection::JsonRejection;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use idem_core::executor::{Attempt, Executor, OnError, RunError};
use idem_core::{Fingerprint, Key, Reserve, Scope};

use crate::ledger::{Ledger, OnAccount};
use crate::problem::Problem;
use crate::provider::{Account, Charge, ChargeError, Order, Provider};

#[derive(Debug, Clone)]
struct App {
    executor: Executor,
    provider: Arc<Provider>,
    /// Where charges, balances and keys are committed together.
    ledger: Option<Arc<Ledger>>,
}

pub(crate) fn router(executor: Executor, provider: Arc<Provider>, ledger: Option<Arc<Ledger>>) -> Router {
    Router::new().route("/charges", post(create_charge)).route("/balance", get(balance)).with_state(App {
        executor,
        provider,
        ledger,
    })
}

/// A declined card is an answer, and every repeat gets it. A time-out is none: the next repeat tries again.
fn policy(error: &ChargeError) -> OnError {
    match error {
        ChargeError::Declined => OnError::Final,
        ChargeError::Timeout | ChargeError::Ledger(_) => OnError::Free,
    }
}

async fn create_charge(
    State(App { executor, provider, ledger }): State<App>,
    headers: HeaderMap,
    order: Result<Json<Order>, JsonRejection>,
) -> Result<Response, Problem> {
    let account = authenticate(&headers)?;
    let key = idempotency_key(&headers, &account)?;
    let Json(order) = order.map_err(|error| Problem::new(error.status(), "Not an order", error.body_text()))?;
    let fingerprint = Fingerprint::builder()
        .field("POST /charges")
        .value(&order)
        .map_err(|error| Problem::new(StatusCode::BAD_REQUEST, "Not an order", error.to_string()))?
        .finish();

    let result = match ledger {
        None => {
            let operation = move |attempt: Attempt| async move {
                provider.charge(account.as_str(), &order, attempt.number()).await
            };
            executor.run_with(&key, fingerprint, policy, operation).await
        }
        Some(ledger) if order.card == "account" => {
            let request = Reserve::new(key).with_fingerprint(fingerprint);
            return on_account(ledger.charge_on_account(&request, account.as_str(), &order).await);
        }
        Some(ledger) => {
            let operation = move |attempt: Attempt| async move {
                // No transaction is open while the card network is asked.
                provider.authorize(account.as_str(), &order, attempt.number()).await?;
                ledger.charge(&attempt, account.as_str(), &order).await
            };
            executor.run_with(&key, fingerprint, policy, operation).await
        }
    };
    match result {
        Ok(done) => Ok(replayable(done.replayed, created(&done.value))),
        Err(RunError::Failed { error, replayed, .. }) => Ok(replayable(replayed, failed(&error).into_response())),
        // It was charged: the client gets its answer although it could not be recorded.
        Err(RunError::Unrecorded { result: Ok(charge), .. }) => Ok(created(&charge)),
        // Another attempt may hold the key now; a repeat finds out what was committed.
        Err(RunError::Unrecorded { result: Err(error @ ChargeError::Ledger(_)), .. }) => Err(failed(&error)),
        Err(error) => Err(refused(&error)),
    }
}

fn on_account(result: Result<OnAccount, ChargeError>) -> Result<Response, Problem> {
    match result {
        Ok(OnAccount::Charged(charge)) => Ok(created(&charge)),
        Ok(OnAccount::Before(charge)) => Ok(replayable(true, created(&charge))),
        Ok(OnAccount::InProgress(retry_after)) => Err(in_progress("another request holds the key", retry_after)),
        Ok(OnAccount::Mismatch) => Err(mismatch("the key was used for another request")),
        Err(error) => Err(failed(&error)),
    }
}

fn created(charge: &Charge) -> Response {
    (StatusCode::CREATED, [(header::LOCATION, format!("/charges/{}", charge.id))], Json(charge)).into_response()
}

fn failed(error: &ChargeError) -> Problem {
    match error {
        ChargeError::Declined => Problem::new(StatusCode::PAYMENT_REQUIRED, "Card declined", error.to_string()),
        ChargeError::Timeout => Problem::new(StatusCode::GATEWAY_TIMEOUT, "Provider timed out", error.to_string())
            .retry_after(Duration::from_secs(1)),
        ChargeError::Ledger(_) => Problem::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "The ledger is unavailable",
            "repeat the request with its key",
        )
        .retry_after(Duration::from_secs(1)),
    }
}

fn in_progress(detail: &str, retry_after: Duration) -> Problem {
    Problem::new(StatusCode::CONFLICT, "A request with this key is in progress", detail).retry_after(retry_after)
}

fn mismatch(detail: &str) -> Problem {
    Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "This key was used for another request", detail)
}

fn refused(error: &RunError<Charge, ChargeError>) -> Problem {
    let detail = error.to_string();
    match error {
        RunError::InProgress { retry_after, .. } => in_progress(&detail, *retry_after),
        RunError::Mismatch => mismatch(&detail),
        RunError::Store(_) => Problem::new(StatusCode::SERVICE_UNAVAILABLE, "The store of keys is unavailable", detail)
            .retry_after(Duration::from_secs(1)),
        _ => Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "The charge's outcome is not known", detail),
    }
}

fn replayable(replayed: bool, mut response: Response) -> Response {
    if replayed {
        response.headers_mut().insert("idempotent-replayed", header::HeaderValue::from_static("true"));
    }
    response
}

async fn balance(State(app): State<App>, headers: HeaderMap) -> Result<Json<Account>, Problem> {
    let account = authenticate(&headers)?;
    let provider = app.provider.account(account.as_str());
    let Some(ledger) = app.ledger else { return Ok(Json(provider)) };
    let booked = ledger.account(account.as_str()).await.map_err(|error| failed(&error.into()))?;
    Ok(Json(Account { calls: provider.calls, ..booked }))
}

/// The account is the scope: nobody meets another's keys. A real service would look the bearer token up.
fn authenticate(headers: &HeaderMap) -> Result<Scope, Problem> {
    let refused = || Problem::new(StatusCode::UNAUTHORIZED, "Who are you?", "send Authorization: Bearer <account>");
    let value = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok()).ok_or_else(refused)?;
    let account = value.strip_prefix("Bearer ").filter(|account| !account.is_empty()).ok_or_else(refused)?;
    Scope::new(account).map_err(|_| refused())
}

/// One line of `Idempotency-Key`, bare or quoted.
fn idempotency_key(headers: &HeaderMap, account: &Scope) -> Result<Key, Problem> {
    let refused = |detail: String| Problem::new(StatusCode::BAD_REQUEST, "Idempotency-Key needed", detail);
    let mut lines = headers.get_all("idempotency-key").iter();
    let (Some(line), None) = (lines.next(), lines.next()) else {
        return Err(refused("send one Idempotency-Key header, and the same with every repeat".to_owned()));
    };
    let text = line.to_str().map_err(|_| refused("it must be ASCII".to_owned()))?;
    let id = text.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).unwrap_or(text);
    if id.contains(['"', '\\', ',']) {
        return Err(refused("it must be one key".to_owned()));
    }
    account.key(id).map_err(|error| refused(error.to_string()))
}
