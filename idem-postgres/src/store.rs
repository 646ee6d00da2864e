//! The store: a thin front of the batchers.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use idem_core::limits::{check_lease, check_retention};
use idem_core::{
    Capabilities, Failure, InvalidInput, Key, KeyStore, Lease, Operation, Outcome, PurgeBudget, Purged, Record,
    Reservation, Reserve, StoreError,
};
use sqlx::postgres::{PgConnectOptions, PgConnection, PgPoolOptions};
use sqlx::{ConnectOptions, PgPool};
use tokio::time::{Instant, timeout_at};

use crate::batch::{Batched, Batcher};
use crate::calls::{Patience, Settle, Statements};
use crate::config::Config;
use crate::connections::Connections;
use crate::error::{STORE, Stage, store_error};
use crate::schema;

/// A store in Postgres 14 or later. Cheap to share behind an `Arc`.
///
/// Calls go through the pool that it is given. It belongs to the tokio runtime in which it is first used, as the pool
/// does.
pub struct PostgresStore {
    pub(crate) pool: PgPool,
    pub(crate) config: Config,
    pub(crate) statements: Arc<Statements>,
    connections: Arc<Connections>,
    reserves: Batcher<Reserves>,
    settles: Batcher<Settles>,
}

impl PostgresStore {
    /// A store over the caller's pool. Looks whether the schema is there and of this crate's version.
    ///
    /// # Errors
    /// [`Misconfigured`](idem_core::ErrorKind::Misconfigured), with a [`PostgresError`](crate::PostgresError) or the
    /// driver's error as its source: no migration, a newer schema, no rights, a wrong password; and where the server is
    /// read-only and this is the first store with so long a retention, which has to be noted. The store's own trouble
    /// otherwise.
    ///
    /// # Cost
    /// Two round trips, and a third for the first store with so long a retention.
    pub async fn open(pool: PgPool, config: Config) -> Result<Self, StoreError> {
        schema::check(&pool, &config.schema, config.max_retention).await?;
        Ok(Self::over(pool, config))
    }

    /// A store over a pool of its own, of as many connections as it can use.
    ///
    /// # Errors
    /// As [`open`](Self::open), and for a URL that is none.
    pub async fn connect(url: &str, config: Config) -> Result<Self, StoreError> {
        Self::open(own_pool(url, &config).await?, config).await
    }

    /// As [`connect`](Self::connect), and makes the schema first or brings it to this crate's version.
    ///
    /// # Errors
    /// As [`connect`](Self::connect) and [`migrate`](Self::migrate).
    pub async fn connect_and_migrate(url: &str, config: Config) -> Result<Self, StoreError> {
        let pool = own_pool(url, &config).await?;
        Self::migrate(&pool, &config).await?;
        Self::open(pool, config).await
    }

    fn over(pool: PgPool, config: Config) -> Self {
        let statements = Arc::new(Statements::new(&config));
        let connections = Connections::new(pool.clone());
        let (batching, call_timeout) = (config.batching, config.call_timeout);
        Self {
            reserves: Batcher::new(Reserves(statements.clone()), connections.clone(), batching, call_timeout),
            settles: Batcher::new(Settles(statements.clone()), connections.clone(), batching, call_timeout),
            connections,
            statements,
            pool,
            config,
        }
    }

    /// Makes the schema's tables and functions, or brings them to this crate's version. Safe in many processes at once.
    ///
    /// # Errors
    /// [`Misconfigured`](idem_core::ErrorKind::Misconfigured) where the role may not create, or the schema is of a newer
    /// version. Nothing has changed then.
    ///
    /// # Cancellation
    /// All is done or nothing.
    pub async fn migrate(pool: &PgPool, config: &Config) -> Result<(), StoreError> {
        schema::migrate(pool, &config.schema).await
    }

    /// The pool that the store uses.
    #[must_use]
    pub fn pool(&self) -> &PgPool {
        &self.pool
    }

    pub(crate) fn check_lease_handle(&self, lease: &Lease, operation: Operation) -> Result<(), StoreError> {
        check_retention(lease.retention, self.config.max_retention).map_err(invalid(operation))
    }

    pub(crate) fn check_reserve(&self, request: &Reserve) -> Result<(), StoreError> {
        request.validate(self.config.max_retention).map_err(invalid(Operation::Reserve))
    }

    pub(crate) fn check_complete(&self, lease: &Lease, outcome: &Outcome) -> Result<(), StoreError> {
        self.check_lease_handle(lease, Operation::Complete)?;
        outcome.validate(self.config.outcome_limit).map_err(invalid(Operation::Complete))
    }
}

async fn own_pool(url: &str, config: &Config) -> Result<PgPool, StoreError> {
    let connections = u32::try_from(config.batching.statements).unwrap_or(u32::MAX).saturating_mul(4).saturating_add(2);
    let failed = |error| store_error(error, Stage::Acquire, Operation::Setup);
    // A setting for numbers that are not used here, which pgbouncer refuses.
    let mut options: PgConnectOptions = url.parse().map_err(failed)?;
    options = options.extra_float_digits(None);
    if !config.prepared_statements {
        // Their text holds keys and outcomes.
        options = options.disable_statement_logging();
    }
    PgPoolOptions::new()
        .max_connections(connections)
        .acquire_timeout(config.call_timeout)
        .connect_with(options)
        .await
        .map_err(failed)
}

pub(crate) fn invalid(operation: Operation) -> impl Fn(InvalidInput) -> StoreError {
    move |input| StoreError::invalid(input, STORE, operation)
}

#[async_trait]
impl KeyStore for PostgresStore {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::default();
        capabilities.max_outcome_bytes = self.config.outcome_limit;
        capabilities.max_retention = self.config.max_retention;
        capabilities.durable = true;
        capabilities.purges = false;
        capabilities
    }

    async fn reserve(&self, request: &Reserve) -> Result<Reservation, StoreError> {
        self.check_reserve(request)?;
        self.reserves.call(request.clone()).await
    }

    async fn complete(&self, lease: &Lease, outcome: &Outcome) -> Result<(), StoreError> {
        self.check_complete(lease, outcome)?;
        self.settles.call((lease.clone(), Settle::Complete(outcome.clone()))).await
    }

    async fn fail(&self, lease: &Lease, failure: &Failure) -> Result<(), StoreError> {
        self.check_lease_handle(lease, Operation::Fail)?;
        self.settles.call((lease.clone(), Settle::Fail(failure.clone()))).await
    }

    async fn renew(&self, lease: &Lease, extend_by: Duration) -> Result<(), StoreError> {
        check_lease(extend_by).map_err(invalid(Operation::Renew))?;
        self.settles.call((lease.clone(), Settle::Renew(extend_by))).await
    }

    async fn fetch(&self, key: &Key) -> Result<Option<Record>, StoreError> {
        let deadline = Instant::now() + self.config.call_timeout;
        let mut connection = self.connections.acquire(deadline, Operation::Fetch).await?;
        let answer = timeout_at(deadline, self.statements.fetch(&mut *connection, key)).await;
        self.connections.after(connection, Operation::Fetch, answer)
    }

    async fn purge_expired(&self, _budget: PurgeBudget) -> Result<Purged, StoreError> {
        self.maintain().await?;
        Ok(Purged::default())
    }

    async fn reserve_many(&self, requests: &[Reserve]) -> Vec<Result<Reservation, StoreError>> {
        let checked = requests.iter().map(|request| self.check_reserve(request)).collect();
        forward(&self.reserves, requests, checked, Clone::clone).await
    }

    async fn complete_many(&self, calls: &[(Lease, Outcome)]) -> Vec<Result<(), StoreError>> {
        let checked = calls.iter().map(|(lease, outcome)| self.check_complete(lease, outcome)).collect();
        forward(&self.settles, calls, checked, |(lease, outcome)| (lease.clone(), Settle::Complete(outcome.clone())))
            .await
    }
}

/// Sends the calls that were found good, and answers for all in their order.
async fn forward<S: Batched, T>(
    batcher: &Batcher<S>,
    calls: &[T],
    checked: Vec<Result<(), StoreError>>,
    call: impl Fn(&T) -> S::Call,
) -> Vec<Result<S::Answer, StoreError>> {
    let good = calls.iter().zip(&checked).filter(|(_, checked)| checked.is_ok()).map(|(item, _)| call(item)).collect();
    let mut answers = batcher.call_many(good).await.into_iter();
    let missing = || Err(StoreError::new(idem_core::ErrorKind::Other, STORE, Operation::Setup));
    checked
        .into_iter()
        .map(|checked| match checked {
            Ok(()) => answers.next().unwrap_or_else(missing),
            Err(error) => Err(error),
        })
        .collect()
}

impl fmt::Debug for PostgresStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Not the pool, whose options hold a password.
        f.debug_struct("PostgresStore").field("config", &self.config).finish_non_exhaustive()
    }
}

impl fmt::Display for PostgresStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(STORE)
    }
}

#[derive(Debug)]
struct Reserves(Arc<Statements>);

#[async_trait]
impl Batched for Reserves {
    type Call = Reserve;
    type Answer = Reservation;

    fn operation(_: &Reserve) -> Operation {
        Operation::Reserve
    }

    fn size(request: &Reserve) -> usize {
        request.key.size() + 100
    }

    fn key(request: &Reserve) -> &Key {
        &request.key
    }

    async fn send(
        &self,
        connection: &mut PgConnection,
        requests: &[Reserve],
    ) -> Result<Vec<Result<Reservation, StoreError>>, StoreError> {
        self.0.reserve(connection, requests, Patience::Short).await
    }
}

#[derive(Debug)]
struct Settles(Arc<Statements>);

#[async_trait]
impl Batched for Settles {
    type Call = (Lease, Settle);
    type Answer = ();

    fn operation((_, call): &Self::Call) -> Operation {
        call.operation()
    }

    fn size((lease, call): &Self::Call) -> usize {
        let content = match call {
            Settle::Complete(outcome) => outcome.size(),
            Settle::Fail(failure) => failure.note().len(),
            Settle::Renew(_) => 0,
        };
        lease.key.size() + 100 + content
    }

    fn key((lease, _): &Self::Call) -> &Key {
        &lease.key
    }

    async fn send(
        &self,
        connection: &mut PgConnection,
        calls: &[Self::Call],
    ) -> Result<Vec<Result<(), StoreError>>, StoreError> {
        self.0.settle(connection, calls, Patience::Short).await
    }
}
