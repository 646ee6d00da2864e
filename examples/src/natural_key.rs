//! An operation with a key of its own: an order number.
//!
//! Where the row that an operation writes has a natural key, a unique constraint on it makes a repeat harmless, and no
//! record of idem is needed: the row itself tells. What has to be right is what happens at a duplicate. The same order
//! again is answered with the row that is there; *another* order under the same number is an error, never a success.

use idem_postgres::is_unique_violation;
use idem_postgres::sqlx::{self, Acquire, PgConnection, Postgres, Transaction};

/// The constraint has a name that the code relies on.
pub const TABLE: &str = "CREATE TABLE IF NOT EXISTS orders (
    number text NOT NULL CONSTRAINT orders_number_key UNIQUE,
    customer text NOT NULL,
    cents bigint NOT NULL,
    invoice bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY
)";

/// What a customer sends, under a number of their own choice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order {
    /// The natural key.
    pub number: String,
    /// Who orders.
    pub customer: String,
    /// For how much.
    pub cents: i64,
}

/// The order is in the table, once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placed {
    /// The same for every repeat.
    pub invoice: i64,
    /// Whether it was there already.
    pub repeated: bool,
}

/// Why an order was not placed.
#[derive(Debug, thiserror::Error)]
pub enum PlaceError {
    /// A duplicate number is not a duplicate order.
    #[error("another order has this number")]
    AnotherOrder,
    /// The row is in the way of an insert and cannot be read, again and again.
    #[error("the order's row comes and goes, or is hidden by a row-level policy or the transaction's isolation")]
    Unsettled,
    /// Everything else, other constraints among it.
    #[error("the database failed")]
    Database(#[from] sqlx::Error),
}

/// A row can be deleted between the conflict and the read. Who meets that so often in a row meets something else.
const ROUNDS: usize = 10;

/// Places an order without an error that would abort the caller's transaction, or in no transaction at all.
///
/// Where a transaction under way holds the number, the insert waits for its end: bound that by `lock_timeout`. Above READ
/// COMMITTED, the database refuses a row that is newer than the caller's snapshot (40001): repeat the transaction.
pub async fn place(connection: &mut PgConnection, order: &Order) -> Result<Placed, PlaceError> {
    for _ in 0..ROUNDS {
        let inserted = sqlx::query_scalar(
            "INSERT INTO orders (number, customer, cents) VALUES ($1, $2, $3)
             ON CONFLICT ON CONSTRAINT orders_number_key DO NOTHING RETURNING invoice",
        )
        .bind(&order.number)
        .bind(&order.customer)
        .bind(order.cents)
        .fetch_optional(&mut *connection)
        .await?;
        if let Some(invoice) = inserted {
            return Ok(Placed { invoice, repeated: false });
        }
        if let Some(placed) = existing(connection, order).await? {
            return Ok(placed);
        }
    }
    Err(PlaceError::Unsettled)
}

/// The same for an insert that raises the violation, such as one that is not yours. The savepoint keeps the caller's
/// transaction alive. Above READ COMMITTED, a row that is newer than the caller's snapshot is in the way and not seen:
/// [`PlaceError::Unsettled`], or 40001.
pub async fn place_catching(transaction: &mut Transaction<'_, Postgres>, order: &Order) -> Result<Placed, PlaceError> {
    for _ in 0..ROUNDS {
        let mut savepoint = transaction.begin().await?;
        let inserted =
            sqlx::query_scalar("INSERT INTO orders (number, customer, cents) VALUES ($1, $2, $3) RETURNING invoice")
                .bind(&order.number)
                .bind(&order.customer)
                .bind(order.cents)
                .fetch_one(&mut *savepoint)
                .await;
        match inserted {
            Ok(invoice) => {
                savepoint.commit().await?;
                return Ok(Placed { invoice, repeated: false });
            }
            Err(error) if is_unique_violation(&error, "orders_number_key") => savepoint.rollback().await?,
            Err(error) => return Err(error.into()),
        }
        if let Some(placed) = existing(transaction, order).await? {
            return Ok(placed);
        }
    }
    Err(PlaceError::Unsettled)
}

/// What is there under the number. In a statement of its own: the insert does not see the row that it has waited for.
async fn existing(connection: &mut PgConnection, order: &Order) -> Result<Option<Placed>, PlaceError> {
    let found: Option<(i64, String, i64)> =
        sqlx::query_as("SELECT invoice, customer, cents FROM orders WHERE number = $1")
            .bind(&order.number)
            .fetch_optional(connection)
            .await?;
    match found {
        None => Ok(None),
        Some((invoice, customer, cents)) if (&customer, cents) == (&order.customer, order.cents) => {
            Ok(Some(Placed { invoice, repeated: true }))
        }
        Some(_) => Err(PlaceError::AnotherOrder),
    }
}
