//! Charges and balances in the database of the keys, so that all three are committed together or not at all.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::http::Response;
use idem_core::{Outcome, Reservation, Reserve, StoreError};
use idem_http::Attempt;
use idem_postgres::PostgresStore;
use idem_postgres::sqlx::{self, PgConnection};

use crate::provider::{Account, Charge, ChargeError, Order};

/// The lock lets several processes do this at once.
const TABLES: &str = "SELECT pg_advisory_xact_lock(hashtextextended('payments', 0));
CREATE SCHEMA IF NOT EXISTS payments;
CREATE TABLE IF NOT EXISTS payments.charges (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    account text NOT NULL,
    amount bigint NOT NULL
);
CREATE TABLE IF NOT EXISTS payments.balances (
    account text PRIMARY KEY,
    balance bigint NOT NULL,
    charges bigint NOT NULL
)";

#[derive(Debug)]
pub(crate) struct Ledger {
    store: Arc<PostgresStore>,
}

/// What became of a charge on account.
#[derive(Debug)]
pub(crate) enum OnAccount {
    Charged(Charge),
    /// By an earlier request of this key.
    Before(Charge),
    InProgress(Duration),
    /// The key was used for another request.
    Mismatch,
}

impl Ledger {
    pub(crate) async fn open(store: Arc<PostgresStore>) -> Result<Self, sqlx::Error> {
        sqlx::raw_sql(TABLES).execute(store.pool()).await?;
        Ok(Self { store })
    }

    /// The last step of a handler behind the layer: while it did what is slow, only the lease was held. What is stored is the
    /// response, made of the charge, which the handler returns.
    ///
    /// Whatever fails here, the handler says so by a status that frees the key, and the layer finds out whether the commit
    /// has happened.
    pub(crate) async fn charge(
        &self,
        attempt: &Attempt,
        account: &str,
        order: &Order,
        respond: impl Fn(&Charge) -> Response<Bytes>,
    ) -> Result<Response<Bytes>, ChargeError> {
        let mut transaction = self.store.pool().begin().await?;
        let response = respond(&write(&mut transaction, account, order).await?);
        self.store.complete_and_commit(transaction, attempt, idem_http::outcome(&response)).await?;
        Ok(response)
    }

    /// A charge that nobody has to be asked about is only database work: it needs no lease, and the whole, from reserve to
    /// complete, is one transaction. After an error, with a commit without an answer among them, the client repeats its
    /// request: that waits for this transaction, if it is not over yet, and meets its record or nothing.
    pub(crate) async fn charge_on_account(
        &self,
        request: &Reserve,
        account: &str,
        order: &Order,
    ) -> Result<OnAccount, ChargeError> {
        let mut transaction = self.store.pool().begin().await?;
        let record = match self.store.reserve_in(&mut transaction, request).await? {
            Reservation::Acquired(lease) => {
                let charge = write(&mut transaction, account, order).await?;
                let outcome = Outcome::new(201, serde_json::to_vec(&charge)?);
                self.store.complete_in(&mut transaction, &lease, &outcome).await?;
                transaction.commit().await?;
                return Ok(OnAccount::Charged(charge));
            }
            Reservation::Completed(record) => record,
            Reservation::InProgress { retry_after, .. } => return Ok(OnAccount::InProgress(retry_after)),
            Reservation::Mismatch => return Ok(OnAccount::Mismatch),
            Reservation::Abandoned(_) => return Err(ChargeError::Ledger("abandoned, which was not asked for".into())),
        };
        match record.outcome().map(|outcome| &outcome.body) {
            Some(idem_core::Body::Stored(body)) => Ok(OnAccount::Before(serde_json::from_slice(body)?)),
            _ => Err(ChargeError::Ledger("the charge was made, but its answer is not kept".into())),
        }
    }

    /// What the account was charged. The calls to the card network are not booked here.
    pub(crate) async fn account(&self, account: &str) -> Result<Account, sqlx::Error> {
        let found: Option<(i64, i64)> =
            sqlx::query_as("SELECT balance, charges FROM payments.balances WHERE account = $1")
                .bind(account)
                .fetch_optional(self.store.pool())
                .await?;
        let (balance, charges) = found.unwrap_or_default();
        Ok(Account { balance: balance.unsigned_abs(), charges: charges.unsigned_abs(), calls: 0 })
    }
}

/// The rows of a charge.
async fn write(transaction: &mut PgConnection, account: &str, order: &Order) -> Result<Charge, sqlx::Error> {
    let id: i64 = sqlx::query_scalar("INSERT INTO payments.charges (account, amount) VALUES ($1, $2) RETURNING id")
        .bind(account)
        .bind(i64::from(order.amount))
        .fetch_one(&mut *transaction)
        .await?;
    sqlx::query(
        "INSERT INTO payments.balances AS b VALUES ($1, $2, 1)
         ON CONFLICT (account) DO UPDATE SET balance = b.balance + excluded.balance, charges = b.charges + 1",
    )
    .bind(account)
    .bind(i64::from(order.amount))
    .execute(&mut *transaction)
    .await?;
    Ok(Charge { id: format!("ch_{id}"), amount: order.amount, status: "succeeded".to_owned() })
}

impl From<sqlx::Error> for ChargeError {
    fn from(error: sqlx::Error) -> Self {
        Self::Ledger(error.to_string())
    }
}

impl From<StoreError> for ChargeError {
    fn from(error: StoreError) -> Self {
        Self::Ledger(error.to_string())
    }
}

impl From<serde_json::Error> for ChargeError {
    fn from(error: serde_json::Error) -> Self {
        Self::Ledger(error.to_string())
    }
}
