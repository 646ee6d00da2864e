//! Going through the records, for operators.

use std::collections::VecDeque;

use idem_core::{Key, Operation, Record, StoreError};
use redis::{Value, cmd};

use crate::calls::{Call, read_fetched};
use crate::error::{RedisStoreError, Trouble, own_error};
use crate::layout;
use crate::store::RedisStore;

/// A walk through the records of a store, by [`RedisStore::scan`].
#[derive(Debug)]
pub struct Scan<'a> {
    store: &'a RedisStore,
    scope: Option<String>,
    /// Nodes to go through, and where the walk through the first of them is; `None` before it has begun.
    nodes: Option<VecDeque<(Option<String>, u64)>>,
}

/// One record of a [`Scan`]: what lies under a key.
#[derive(Debug)]
#[non_exhaustive]
pub struct Scanned {
    /// The key.
    pub key: Key,
    /// Its record, or why it cannot be read.
    pub record: Result<Record, StoreError>,
}

/// How many keys one step looks at, about.
const STEP: u32 = 500;

impl RedisStore {
    /// Goes through the records of this store, or of one scope: for operators, by `SCAN`, which holds nobody up, and never
    /// by `KEYS`.
    ///
    /// A record that lives from the beginning to the end of the walk is met at least once, perhaps twice; one that comes or
    /// goes meanwhile may be met or not.
    ///
    /// ```no_run
    /// # async fn run(store: idem_redis::RedisStore) -> Result<(), idem_core::StoreError> {
    /// let mut scan = store.scan(Some("tenant-7"));
    /// while let Some(page) = scan.next().await? {
    ///     for found in page {
    ///         println!("{:?}: {:?}", found.key, found.record);
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn scan(&self, scope: Option<&str>) -> Scan<'_> {
        Scan { store: self, scope: scope.map(str::to_owned), nodes: None }
    }
}

impl Scan<'_> {
    /// The next records, perhaps none; `None` when all have been met.
    ///
    /// # Errors
    /// The store's own trouble: the same call again goes on where this one was. A record that cannot be read is no error
    /// of the walk.
    ///
    /// # Cancellation
    /// The same call again goes on where this one was.
    ///
    /// # Cost
    /// Two round trips, through about 500 keys of the server, be they this store's or not.
    pub async fn next(&mut self) -> Result<Option<Vec<Scanned>>, StoreError> {
        let failed = |trouble: Trouble| {
            let cluster = self.store.calls.link.is_cluster();
            let class = trouble.classify(cluster).1;
            trouble.into_error(class, cluster, Operation::Fetch)
        };
        if self.nodes.is_none() {
            let masters =
                self.store.calls.link.each_master(&cmd("PING"), self.store.calls.deadline()).await.map_err(failed)?;
            self.nodes = Some(masters.into_iter().map(|(node, _)| (node, 0)).collect());
        }
        let Some((node, cursor)) = self.nodes.as_ref().and_then(|nodes| nodes.front().cloned()) else {
            return Ok(None);
        };
        let mut command = cmd("SCAN");
        command.arg(cursor).arg("MATCH").arg(format!("{}*", self.store.config.prefix.as_str())).arg("COUNT").arg(STEP);
        let answer = match self
            .store
            .calls
            .link
            .to_node(node.as_deref(), &command, self.store.calls.deadline())
            .await
            .map_err(failed)?
        {
            Value::ServerError(error) => return Err(failed(Trouble::Server(error))),
            value => value,
        };
        let (next, names): (u64, Vec<Vec<u8>>) = redis::from_redis_value(answer)
            .map_err(|error| own_error(RedisStoreError::Answer, Operation::Fetch).with_context(error.to_string()))?;
        let keys: Vec<Key> = names
            .iter()
            .filter_map(|name| layout::parse_name(&self.store.config.prefix, name))
            .filter(|key| self.scope.as_ref().is_none_or(|scope| key.scope() == scope))
            .collect();
        let calls: Vec<Call<'_>> = keys.iter().map(Call::Fetch).collect();
        let answers = self.store.calls.many(&calls).await;
        let mut page = Vec::with_capacity(keys.len());
        for (key, answer) in keys.iter().zip(answers) {
            let record = match answer.and_then(|answer| read_fetched(answer, key, Operation::Fetch)) {
                // Gone since.
                Ok(None) => continue,
                Ok(Some(record)) => Ok(record),
                Err(error) if error.kind() == idem_core::ErrorKind::Unreadable => Err(error),
                Err(error) => return Err(error),
            };
            page.push(Scanned { key: key.clone(), record });
        }
        if let Some(nodes) = &mut self.nodes {
            match next {
                0 => drop(nodes.pop_front()),
                next => nodes.iter_mut().take(1).for_each(|(_, cursor)| *cursor = next),
            }
        }
        Ok(Some(page))
    }
}
