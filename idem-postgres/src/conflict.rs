//! Telling a duplicate from every other error: a unique violation of one named constraint.

use std::error::Error;
use std::fmt;
use std::iter::successors;

use sqlx::error::DatabaseError;
use sqlx::postgres::PgDatabaseError;

/// SQLSTATE `unique_violation`.
const UNIQUE_VIOLATION: &str = "23505";

/// Whether the error is a unique violation of the constraint of that name: by SQLSTATE (23505) and by the name that the
/// server reports, never by the message, whose language is the server's choice.
///
/// Every other error is none: another constraint of the table, a foreign key (23503), a check (23514), an exclusion
/// constraint (23P01), a serialization failure (40001), a broken connection. So a duplicate that was expected is told from
/// a fault that nobody thought of.
///
/// It looks through whatever wraps the driver's error, as [`UniqueViolation::find`] does.
///
/// # A key of the operation's own
/// Where the rows have a natural key, the violation of its constraint *is* the duplicate:
///
/// ```no_run
/// use idem_postgres::is_unique_violation;
/// use idem_postgres::sqlx::{self, Acquire, Postgres, Transaction};
///
/// # type Error = Box<dyn std::error::Error>;
/// /// Whether the order is new. Where it is not: read it, and compare.
/// async fn insert(transaction: &mut Transaction<'_, Postgres>, number: &str, cents: i64) -> Result<bool, Error> {
///     // An error aborts a transaction of Postgres, but only back to its latest savepoint.
///     let mut savepoint = transaction.begin().await?;
///     let inserted = sqlx::query("INSERT INTO orders (number, cents) VALUES ($1, $2)")
///         .bind(number)
///         .bind(cents)
///         .execute(&mut *savepoint)
///         .await;
///     match inserted {
///         Ok(_) => savepoint.commit().await?,
///         Err(error) if is_unique_violation(&error, "orders_number_key") => {
///             savepoint.rollback().await?;
///             return Ok(false);
///         }
///         Err(error) => return Err(error.into()),
///     }
///     Ok(true)
/// }
/// ```
///
/// `INSERT … ON CONFLICT (number) DO NOTHING` raises no error and needs no savepoint: prefer it where the insert is yours.
/// This function is for inserts that are not, such as an ORM's or a trigger's. Both are worked out in the project's
/// examples, `natural_key.rs` and `versioned_append.rs`.
///
/// # Which name arrives
/// - That of the constraint, or of the unique index where there is no constraint: `<table>_<columns>_key` and
///   `<table>_pkey` unless you name it. Do, and keep it within 63 bytes: the server cuts longer ones, and reports them cut.
/// - On a **partitioned table** that of the *partition's* index, such as `orders_2026_11_number_day_key`, with the
///   partition as the table. Compare [`UniqueViolation::table`] or a prefix there, or use `ON CONFLICT`, which goes by
///   columns.
/// - A name is unique within its schema only: where another schema has a constraint of the same name, compare
///   [`UniqueViolation::schema`] too.
/// - A `DEFERRABLE INITIALLY DEFERRED` constraint is checked at the commit, and that is the call that fails.
#[must_use]
pub fn is_unique_violation(error: &(dyn Error + 'static), constraint: &str) -> bool {
    UniqueViolation::find(error).is_some_and(|violation| violation.constraint() == Some(constraint))
}

/// A unique violation (SQLSTATE 23505), and where it was.
///
/// `Debug` shows names, never the values of the row.
#[derive(Clone, Copy)]
pub struct UniqueViolation<'e>(&'e PgDatabaseError);

impl<'e> UniqueViolation<'e> {
    /// The unique violation that the error is, or that caused it: in the error itself, or the first one along its
    /// [sources](Error::source). `None` for every other error.
    ///
    /// So it is found in a `sqlx::Error`, in an error of yours that has one as its source or passes it on by
    /// `#[error(transparent)]`, and in an [`idem_core::StoreError`]. Of a `Box<dyn Error + Send + Sync>` give `&*error`.
    #[must_use]
    pub fn find(error: &'e (dyn Error + 'static)) -> Option<Self> {
        successors(Some(error), |&error| error.source())
            .find_map(driver_error)
            .filter(|error| error.code() == UNIQUE_VIOLATION)
            .map(Self)
    }

    /// The name of the constraint or unique index. `None` where a function of the database has raised the code by itself
    /// without naming one.
    #[must_use]
    pub fn constraint(&self) -> Option<&'e str> {
        self.0.constraint()
    }

    /// The name of the table; of the partition, where it is partitioned.
    #[must_use]
    pub fn table(&self) -> Option<&'e str> {
        self.0.table()
    }

    /// The name of the table's schema.
    #[must_use]
    pub fn schema(&self) -> Option<&'e str> {
        self.0.schema()
    }
}

/// The server's error, where this one is it. A wrapper that is transparent shows what it wraps as its source's source
/// only: there, the driver's own box comes without its `sqlx::Error`.
fn driver_error<'e>(error: &'e (dyn Error + 'static)) -> Option<&'e PgDatabaseError> {
    let database: &'e dyn DatabaseError = if let Some(error) = error.downcast_ref::<sqlx::Error>() {
        error.as_database_error()?
    } else if let Some(boxed) = error.downcast_ref::<Box<dyn DatabaseError>>() {
        &**boxed
    } else {
        return error.downcast_ref();
    };
    database.try_downcast_ref()
}

impl fmt::Debug for UniqueViolation<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UniqueViolation")
            .field("schema", &self.schema())
            .field("table", &self.table())
            .field("constraint", &self.constraint())
            .finish()
    }
}
