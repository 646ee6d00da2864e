//! The store: a thin front of the scripts.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use idem_core::limits::{check_lease, check_retention};
use idem_core::{
    Capabilities, Failure, InvalidInput, Key, KeyStore, Lease, Operation, Outcome, PurgeBudget, Purged, Record,
    Reservation, Reserve, StoreError,
};
use redis::IntoConnectionInfo;

use crate::calls::{Call, Calls, read_reservation, read_settled};
use crate::check::{self, ServerReport};
use crate::config::Config;
use crate::error::{RedisStoreError, STORE, own_error, setup_error};
use crate::link::{self, Connection, Link};

/// A store in Redis or Valkey, 6.2 and later. Cheap to share behind an `Arc`.
///
/// It belongs to the tokio runtime in which it is used, as its connections do.
pub struct RedisStore {
    pub(crate) calls: Calls,
    pub(crate) config: Config,
}

impl RedisStore {
    /// A store over a client or a connection of the caller's. Connects, and looks whether the server can be used and how it
    /// is set up.
    ///
    /// # Errors
    /// [`Misconfigured`](idem_core::ErrorKind::Misconfigured), with a [`RedisStoreError`] or the driver's error as its
    /// source: a wrong password, no right to scripts, a replica, a server that is too old, a cluster given as a single
    /// server or the other way round; and where [`Config::on_eviction`] and [`Config::on_data_loss`] refuse how it is set
    /// up. The store's own trouble otherwise.
    ///
    /// # Cancellation
    /// Nothing stays behind.
    ///
    /// # Cost
    /// A connection, and four round trips or so, on a cluster to each master.
    pub async fn open(connection: impl Into<Connection>, config: Config) -> Result<Self, StoreError> {
        if config.acknowledge.waits() && config.acknowledge.timeout >= config.response_timeout {
            return Err(own_error(RedisStoreError::AcknowledgeTimeout, Operation::Setup));
        }
        let link = Link::new(connection.into(), &config).map_err(setup_error)?;
        let store = Self { calls: Calls::new(link, &config), config };
        check::judge(&store.check_server().await?, &store.config)?;
        check::check_rights(&store.calls).await?;
        Ok(store)
    }

    /// A store on the server of that URL: `redis://user:password@host:port/database`, `rediss://…` for TLS (with one of this
    /// crate's `tls-…` features), `redis+unix:///path`.
    ///
    /// # Errors
    /// As [`open`](Self::open), and for a URL that is none.
    pub async fn connect(url: &str, config: Config) -> Result<Self, StoreError> {
        Self::open(link::client(url).map_err(setup_error)?, config).await
    }

    /// A store on the cluster of which these are some nodes.
    ///
    /// # Errors
    /// As [`open`](Self::open), and for URLs that are none or of different users.
    pub async fn connect_cluster<T: IntoConnectionInfo + Clone>(
        nodes: impl IntoIterator<Item = T>,
        config: Config,
    ) -> Result<Self, StoreError> {
        let nodes: Vec<T> = nodes.into_iter().collect();
        link::check_nodes(&nodes, config.response_timeout).await?;
        Self::open(link::cluster_client(nodes), config).await
    }

    /// A store on the master of that name, as these sentinels tell it. For a master with a password or TLS, build a
    /// [`SentinelClient`](redis::sentinel::SentinelClient) and [`open`](Self::open) it.
    ///
    /// # Errors
    /// As [`open`](Self::open), and for URLs that are none.
    pub async fn connect_sentinel<T: IntoConnectionInfo>(
        sentinels: impl IntoIterator<Item = T>,
        master: &str,
        config: Config,
    ) -> Result<Self, StoreError> {
        Self::open(link::sentinel_client(sentinels, master).map_err(setup_error)?, config).await
    }

    /// How the server is set up, and what it may lose by that; a report of each master, on a cluster.
    ///
    /// # Errors
    /// As [`open`](Self::open), but for what the configuration refuses.
    ///
    /// # Cost
    /// Three round trips or so, on a cluster to each master.
    pub async fn check_server(&self) -> Result<Vec<ServerReport>, StoreError> {
        check::report(&self.calls, &self.config).await
    }

    /// How many values this store has met that it could not read. Each was told as an error of kind
    /// [`Unreadable`](idem_core::ErrorKind::Unreadable), and none was taken for absent: something else writes under the same
    /// prefix, or a newer version does.
    #[must_use]
    pub fn unreadable(&self) -> u64 {
        self.calls.unreadable()
    }

    fn check_lease_handle(&self, lease: &Lease, operation: Operation) -> Result<(), StoreError> {
        check_retention(lease.retention, self.config.max_retention).map_err(invalid(operation))
    }

    fn check_reserve(&self, request: &Reserve) -> Result<(), StoreError> {
        request.validate(self.config.max_retention).map_err(invalid(Operation::Reserve))
    }

    fn check_complete(&self, lease: &Lease, outcome: &Outcome) -> Result<(), StoreError> {
        self.check_lease_handle(lease, Operation::Complete)?;
        outcome.validate(self.config.outcome_limit).map_err(invalid(Operation::Complete))
    }
}

fn invalid(operation: Operation) -> impl Fn(InvalidInput) -> StoreError {
    move |input| StoreError::invalid(input, STORE, operation)
}

#[async_trait]
impl KeyStore for RedisStore {
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
        self.calls.reserve(request).await
    }

    async fn complete(&self, lease: &Lease, outcome: &Outcome) -> Result<(), StoreError> {
        self.check_complete(lease, outcome)?;
        self.calls.settle(Call::Complete(lease, outcome)).await
    }

    async fn fail(&self, lease: &Lease, failure: &Failure) -> Result<(), StoreError> {
        self.check_lease_handle(lease, Operation::Fail)?;
        self.calls.settle(Call::Fail(lease, failure)).await
    }

    async fn renew(&self, lease: &Lease, extend_by: Duration) -> Result<(), StoreError> {
        check_lease(extend_by).map_err(invalid(Operation::Renew))?;
        self.calls.settle(Call::Renew(lease, extend_by)).await
    }

    async fn fetch(&self, key: &Key) -> Result<Option<Record>, StoreError> {
        self.calls.fetch(key).await
    }

    /// Does nothing: the server removes what has expired.
    async fn purge_expired(&self, _budget: PurgeBudget) -> Result<Purged, StoreError> {
        Ok(Purged::default())
    }

    async fn reserve_many(&self, requests: &[Reserve]) -> Vec<Result<Reservation, StoreError>> {
        let checked = requests.iter().map(|request| self.check_reserve(request)).collect();
        let sent = self.good(requests, checked, Call::Reserve).await;
        let read = |(answer, request)| Result::and_then(answer, |answer| read_reservation(answer, request));
        sent.into_iter().zip(requests).map(read).map(|answer| self.calls.count(answer)).collect()
    }

    async fn complete_many(&self, calls: &[(Lease, Outcome)]) -> Vec<Result<(), StoreError>> {
        let checked = calls.iter().map(|(lease, outcome)| self.check_complete(lease, outcome)).collect();
        let sent = self.good(calls, checked, |(lease, outcome)| Call::Complete(lease, outcome)).await;
        let read = |answer| Result::and_then(answer, |answer| read_settled(&answer, Operation::Complete));
        sent.into_iter().map(read).map(|answer| self.calls.count(answer)).collect()
    }
}

impl RedisStore {
    /// Sends the calls that were found good, and answers for all in their order.
    async fn good<'a, T>(
        &self,
        items: &'a [T],
        checked: Vec<Result<(), StoreError>>,
        call: impl Fn(&'a T) -> Call<'a>,
    ) -> Vec<Result<redis::Value, StoreError>> {
        let good: Vec<Call<'_>> =
            items.iter().zip(&checked).filter(|(_, checked)| checked.is_ok()).map(|(item, _)| call(item)).collect();
        let mut answers = self.calls.many(&good).await.into_iter();
        let missing = || Err(own_error(RedisStoreError::Answer, Operation::Setup));
        checked
            .into_iter()
            .map(|checked| match checked {
                Ok(()) => answers.next().unwrap_or_else(missing),
                Err(error) => Err(error),
            })
            .collect()
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Not the clients, which hold passwords.
        f.debug_struct("RedisStore").field("config", &self.config).field("calls", &self.calls).finish()
    }
}

impl fmt::Display for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(STORE)
    }
}
