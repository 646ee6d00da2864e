//! The store: the contract over transactions of its own.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use foundationdb::{Database, RetryableTransaction};
use idem_core::{
    Capabilities, Failure, Key, KeyStore, Lease, Operation, Outcome, PurgeBudget, Purged, Record, Reservation, Reserve,
    StoreError,
};

use crate::batch::Batcher;
use crate::calls::{Answer, Call};
use crate::config::Config;
use crate::error::{Effect, FdbStoreError, STORE, Stop, fdb_error, own_error};
use crate::network;
use crate::records::Records;
use crate::run::{Bounds, run};

/// A store of idempotency keys in FoundationDB.
///
/// FoundationDB's serializable isolation decides between callers, and nothing else does.
///
/// - **Round trips**: a transaction is a read version, the reads (all at once), and a commit where something is written. Few
///   calls at once have a transaction each; many share some ([`Batching`](crate::Batching)).
/// - **Repeats**: conflicts and short outages are tried again, with FoundationDB's own pauses, until
///   [`Config::call_timeout`] or [`Config::max_tries`]. Where a commit's result is unknown, the transaction is run again and
///   the token tells; where that ends without an answer, the error is of class unknown.
/// - **Cancellation**: a dropped call is done or not done.
/// - **Time** is the process's own: see [`Config::max_clock_skew`].
pub struct FdbStore {
    database: Arc<Database>,
    records: Arc<Records>,
    batcher: Batcher,
}

impl FdbStore {
    /// Opens the store in the cluster of that cluster file; `None` takes the default one, or that of the environment variable
    /// `FDB_CLUSTER_FILE`. [Starts the network](crate::boot) where it does not run.
    ///
    /// # Errors
    /// [`ErrorKind::Misconfigured`](idem_core::ErrorKind::Misconfigured) where the cluster file cannot be read or the client library is too old,
    /// [`ErrorKind::Timeout`](idem_core::ErrorKind::Timeout) where the cluster does not answer within [`Config::call_timeout`].
    ///
    /// # Cost
    /// One transaction, which writes where the store is new.
    pub async fn open(cluster_file: Option<&Path>, config: Config) -> Result<Self, StoreError> {
        network::boot()?;
        let path = match cluster_file {
            None => None,
            Some(path) => {
                // The driver would panic.
                let path = path.to_str().filter(|path| !path.contains('\0'));
                Some(path.ok_or_else(|| own_error(FdbStoreError::ClusterFile, Operation::Setup))?)
            }
        };
        let database = Database::new(path).map_err(|error| fdb_error(error, Operation::Setup))?;
        Self::with_database(Arc::new(database), config).await
    }

    /// Opens the store in a database of the caller's, for whom the network runs: see [`boot`](crate::boot).
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub async fn with_database(database: Arc<Database>, config: Config) -> Result<Self, StoreError> {
        let records = Arc::new(Records::new(config));
        let batcher = Batcher::new(Arc::clone(&database), Arc::clone(&records));
        let store = Self { database, records, batcher };
        let records = &store.records;
        let prepared =
            store.run(Operation::Setup, |transaction| async move { records.prepare(&transaction).await }).await;
        network::used(prepared.is_ok());
        prepared?;
        Ok(store)
    }

    /// The database.
    #[must_use]
    pub fn database(&self) -> &Arc<Database> {
        &self.database
    }

    /// The same calls within a transaction of the caller's.
    #[must_use]
    pub fn records(&self) -> &Records {
        &self.records
    }

    async fn run<T, F>(
        &self,
        operation: Operation,
        work: impl Fn(RetryableTransaction) -> F + Sync,
    ) -> Result<T, StoreError>
    where
        F: Future<Output = Result<T, Stop>> + Send,
        T: Send,
    {
        let config = self.records.config();
        let bounds = Bounds { time: config.call_timeout, tries: config.max_tries, before: Effect::None };
        run(&self.database, bounds, |transaction, _| work(transaction))
            .await
            .map_err(|failed| failed.into_error(operation))
    }
}

#[async_trait]
impl KeyStore for FdbStore {
    fn capabilities(&self) -> Capabilities {
        self.records.capabilities()
    }

    async fn reserve(&self, request: &Reserve) -> Result<Reservation, StoreError> {
        self.batcher.call(Call::Reserve(request)).await.and_then(Answer::reserved)
    }

    async fn complete(&self, lease: &Lease, outcome: &Outcome) -> Result<(), StoreError> {
        self.batcher.call(Call::Complete(lease, outcome)).await.map(drop)
    }

    async fn fail(&self, lease: &Lease, failure: &Failure) -> Result<(), StoreError> {
        self.batcher.call(Call::Fail(lease, failure)).await.map(drop)
    }

    async fn renew(&self, lease: &Lease, extend_by: Duration) -> Result<(), StoreError> {
        self.batcher.call(Call::Renew(lease, extend_by)).await.map(drop)
    }

    async fn fetch(&self, key: &Key) -> Result<Option<Record>, StoreError> {
        let records = &self.records;
        let found = self.run(Operation::Fetch, |transaction| async move { records.look(&transaction, key).await });
        found.await?.map_err(|error| own_error(error.into(), Operation::Fetch))
    }

    /// Clears the days that are over, however many records they hold: the budget is not needed, and nothing is counted.
    async fn purge_expired(&self, _budget: PurgeBudget) -> Result<Purged, StoreError> {
        let records = &self.records;
        self.run(Operation::Purge, |transaction| async move { Ok(records.clear_days(&transaction).await?) }).await?;
        Ok(Purged::default())
    }

    /// As few transactions as hold the calls: up to a thousand calls, and 4 MiB, in one.
    async fn reserve_many(&self, requests: &[Reserve]) -> Vec<Result<Reservation, StoreError>> {
        let calls: Vec<_> = requests.iter().map(Call::Reserve).collect();
        let answers = self.batcher.call_many(&calls).await;
        answers.into_iter().map(|answer| answer.and_then(Answer::reserved)).collect()
    }

    /// As few transactions as hold the calls: up to a thousand calls, and 4 MiB, in one.
    async fn complete_many(&self, calls: &[(Lease, Outcome)]) -> Vec<Result<(), StoreError>> {
        let calls: Vec<_> = calls.iter().map(|(lease, outcome)| Call::Complete(lease, outcome)).collect();
        let answers = self.batcher.call_many(&calls).await;
        answers.into_iter().map(|answer| answer.map(drop)).collect()
    }
}

impl fmt::Debug for FdbStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FdbStore").field("config", self.records.config()).finish_non_exhaustive()
    }
}

impl fmt::Display for FdbStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(STORE)
    }
}
