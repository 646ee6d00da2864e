//! The record and the business rows, committed together.

use std::slice;

use idem_core::{ErrorKind, Failure, Lease, Operation, Outcome, Reservation, Reserve, StoreError};
use sqlx::{Postgres, Transaction};

use crate::calls::{Patience, Settle};
use crate::error::STORE;
use crate::store::PostgresStore;

/// Calls within the caller's own transaction: the record and the rows of the business commit together or not at all, which
/// is the strongest guarantee there is.
///
/// ```no_run
/// # use idem_core::{Key, Outcome, Reservation, Reserve};
/// # use idem_postgres::{PostgresStore, sqlx};
/// # async fn charge(store: &PostgresStore) -> Result<(), Box<dyn std::error::Error>> {
/// let mut transaction = store.pool().begin().await?;
/// match store.reserve_in(&mut transaction, &Reserve::new(Key::new("tenant-7", "order-42")?)).await? {
///     Reservation::Acquired(lease) => {
///         sqlx::query("UPDATE account SET balance = balance - 1200 WHERE id = 7").execute(&mut *transaction).await?;
///         store.complete_in(&mut transaction, &lease, &Outcome::new(201, "charged")).await?;
///         transaction.commit().await?;
///     }
///     // Nothing to do: the transaction is as it was.
///     _ => transaction.rollback().await?,
/// }
/// # Ok(())
/// # }
/// ```
///
/// - **No duplicate aborts the transaction**: every answer of the contract leaves it usable.
/// - **Isolation** has to be READ COMMITTED, the default: at any other, nothing is done and the error is
///   [`Misconfigured`](ErrorKind::Misconfigured); the transaction stays usable.
/// - **Others wait**: until the transaction ends, a reserve of the same key waits for it (and with it the calls of its
///   batch, for as long as a call may take), and the day cannot change. Keep it short. For effects outside of the database,
///   reserve by [`reserve`](idem_core::KeyStore::reserve) and call only [`complete_in`](Self::complete_in) in the
///   transaction.
/// - **An error of the server's** aborts the transaction, as always in Postgres; what was written in it is gone.
/// - **A commit whose reply is lost** has happened or not: repeat the whole with the same request, whose token tells.
impl PostgresStore {
    /// [`reserve`](idem_core::KeyStore::reserve) within a transaction.
    ///
    /// # Errors
    /// As [`reserve`](idem_core::KeyStore::reserve), and
    /// [`PostgresError::Isolation`](crate::PostgresError::Isolation).
    ///
    /// # Cancellation
    /// Roll the transaction back then.
    ///
    /// # Cost
    /// One round trip.
    pub async fn reserve_in(
        &self,
        transaction: &mut Transaction<'_, Postgres>,
        request: &Reserve,
    ) -> Result<Reservation, StoreError> {
        self.check_reserve(request)?;
        let answers =
            self.statements.reserve(&mut **transaction, slice::from_ref(request), Patience::OfTheTransaction).await?;
        one(answers, Operation::Reserve)
    }

    /// [`complete`](idem_core::KeyStore::complete) within a transaction.
    ///
    /// # Errors
    /// As [`complete`](idem_core::KeyStore::complete), and
    /// [`PostgresError::Isolation`](crate::PostgresError::Isolation). After `LeaseLost`, roll back: another attempt holds
    /// the key.
    ///
    /// # Cancellation
    /// Roll the transaction back then.
    ///
    /// # Cost
    /// One round trip.
    pub async fn complete_in(
        &self,
        transaction: &mut Transaction<'_, Postgres>,
        lease: &Lease,
        outcome: &Outcome,
    ) -> Result<(), StoreError> {
        self.check_complete(lease, outcome)?;
        let call = (lease.clone(), Settle::Complete(outcome.clone()));
        one(
            self.statements.settle(&mut **transaction, slice::from_ref(&call), Patience::OfTheTransaction).await?,
            Operation::Complete,
        )
    }

    /// [`fail`](idem_core::KeyStore::fail) within a transaction.
    ///
    /// # Errors
    /// As [`fail`](idem_core::KeyStore::fail), and [`PostgresError::Isolation`](crate::PostgresError::Isolation).
    ///
    /// # Cancellation
    /// Roll the transaction back then.
    ///
    /// # Cost
    /// One round trip.
    pub async fn fail_in(
        &self,
        transaction: &mut Transaction<'_, Postgres>,
        lease: &Lease,
        failure: &Failure,
    ) -> Result<(), StoreError> {
        self.check_lease_handle(lease, Operation::Fail)?;
        let call = (lease.clone(), Settle::Fail(failure.clone()));
        one(
            self.statements.settle(&mut **transaction, slice::from_ref(&call), Patience::OfTheTransaction).await?,
            Operation::Fail,
        )
    }
}

fn one<T>(mut answers: Vec<Result<T, StoreError>>, operation: Operation) -> Result<T, StoreError> {
    answers.pop().unwrap_or_else(|| Err(StoreError::new(ErrorKind::Other, STORE, operation)))
}
