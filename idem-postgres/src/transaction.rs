//! The record and the business rows, committed together.

use std::slice;

use idem_core::executor::Attempt;
use idem_core::{ErrorKind, Failure, Lease, Operation, Outcome, Reservation, Reserve, StoreError};
use sqlx::{Postgres, Transaction};

use crate::calls::{Patience, Settle};
use crate::error::{STORE, Stage, store_error};
use crate::store::PostgresStore;

/// Calls within the caller's own transaction: the record and the rows of the business commit together or not at all, which
/// is the strongest guarantee there is.
///
/// **The operation is only database work**: the whole is one transaction.
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
/// **The operation also does something slow** or outside of the database: an [`Executor`](idem_core::executor::Executor)
/// reserves, and only the lease is held meanwhile; the transaction at the end [completes
/// it](Self::complete_and_commit). The crate's front page shows it.
///
/// - **No duplicate aborts the transaction**: every answer of the contract leaves it usable.
/// - **Isolation** has to be READ COMMITTED, the default: at any other, nothing is done and the error is
///   [`Misconfigured`](ErrorKind::Misconfigured); the transaction stays usable.
/// - **Others wait**: from its first call here until the transaction ends, a reserve of the same key waits for it (and with
///   it the calls of its batch, for as long as a call may take), and the day cannot change. So make `complete_in` the last
///   step before the commit, and bound what is left by `idle_in_transaction_session_timeout`.
/// - **`LeaseLost` means roll back**: another attempt holds the key. Where this transaction has completed the lease, nobody
///   can take the key over until it ends.
/// - **An error of the server's** aborts the transaction, as always in Postgres; what was written in it is gone. The server
///   answers the COMMIT of an aborted transaction with success, having rolled it back: never go on to it after an error.
/// - **A commit whose reply is lost** has happened or not, or may yet happen. Never look at the rows then: repeat the
///   whole with the same request, whose token tells, or let the executor do so. Both wait for the transaction to end.
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

    /// Completes the attempt of an [`Executor`](idem_core::executor::Executor) as the last step of its operation's
    /// transaction, commits, and tells the attempt, so that the executor does not complete it once more.
    ///
    /// The outcome is [`attempt.success(&value)`](Attempt::success) of the value that the operation returns, or
    /// [`attempt.final_error(&error)`](Attempt::final_error). The transaction is one of a pool's: that within another is a
    /// savepoint, whose commit commits nothing, and its type does not fit.
    ///
    /// # Errors
    /// As [`complete_in`](Self::complete_in); the transaction is rolled back then, and nothing has happened. Where the
    /// commit fails, the driver's error is the source, and its class says what is known: nothing has happened, as after the
    /// violation of a deferred constraint, or **unknown**. Return the error from the operation in any case: the executor
    /// finds out.
    ///
    /// # Cancellation
    /// The transaction is rolled back, or committed where that was on its way; the executor finds out.
    ///
    /// # Cost
    /// Two round trips.
    pub async fn complete_and_commit(
        &self,
        mut transaction: Transaction<'static, Postgres>,
        attempt: &Attempt,
        outcome: Outcome,
    ) -> Result<(), StoreError> {
        self.complete_in(&mut transaction, attempt.lease(), &outcome).await?;
        transaction.commit().await.map_err(|error| store_error(error, Stage::Execute, Operation::Complete))?;
        attempt.mark_completed(outcome);
        Ok(())
    }
}

fn one<T>(mut answers: Vec<Result<T, StoreError>>, operation: Operation) -> Result<T, StoreError> {
    answers.pop().unwrap_or_else(|| Err(StoreError::new(ErrorKind::Other, STORE, operation)))
}
