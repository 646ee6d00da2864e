//! The backends, by name.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use idem_core::{Cached, KeyStore, MemoryStore};
use idem_postgres::sqlx::{self, AssertSqlSafe};
use idem_postgres::{Batching, PostgresStore, Schema};
use idem_redis::{Policy, Prefix, RedisStore};

use crate::servers::{Absent, Servers, cluster_processes};
use crate::{Failed, fdb};

/// Connections for each of the two queues where calls are not gathered: with the direct ones, as many as the floor's pool
/// has.
const UNBATCHED: usize = 4;

/// What a backend's records are kept in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The process's memory.
    Memory,
    /// Postgres, calls gathered.
    Postgres,
    /// Postgres, a statement for each call.
    PostgresUnbatched,
    /// One Redis.
    Redis,
    /// A Redis cluster.
    RedisCluster,
    /// FoundationDB, calls gathered.
    Fdb,
    /// FoundationDB, a transaction for each call.
    FdbUnbatched,
}

/// A backend to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backend {
    /// Its name, on the command line and in tables.
    pub name: &'static str,
    /// Where its records are kept.
    pub kind: Kind,
    /// Whether the near-cache stands before it.
    pub cached: bool,
}

/// All backends, in the order of the tables.
pub const BACKENDS: &[Backend] = &[
    Backend { name: "memory", kind: Kind::Memory, cached: false },
    Backend { name: "memory-cached", kind: Kind::Memory, cached: true },
    Backend { name: "postgres", kind: Kind::Postgres, cached: false },
    Backend { name: "postgres-cached", kind: Kind::Postgres, cached: true },
    Backend { name: "postgres-unbatched", kind: Kind::PostgresUnbatched, cached: false },
    Backend { name: "postgres-unbatched-cached", kind: Kind::PostgresUnbatched, cached: true },
    Backend { name: "redis", kind: Kind::Redis, cached: false },
    Backend { name: "redis-cached", kind: Kind::Redis, cached: true },
    Backend { name: "redis-cluster", kind: Kind::RedisCluster, cached: false },
    Backend { name: "redis-cluster-cached", kind: Kind::RedisCluster, cached: true },
    Backend { name: "fdb", kind: Kind::Fdb, cached: false },
    Backend { name: "fdb-cached", kind: Kind::Fdb, cached: true },
    Backend { name: "fdb-unbatched", kind: Kind::FdbUnbatched, cached: false },
    Backend { name: "fdb-unbatched-cached", kind: Kind::FdbUnbatched, cached: true },
];

/// A store that is open, in a schema, under a prefix or in a subspace of its own.
#[derive(Debug)]
pub struct Opened {
    /// The store, behind the near-cache where that is asked for.
    pub store: Arc<dyn KeyStore>,
    /// The same without it, where it is Postgres: for its days.
    pub postgres: Option<Arc<PostgresStore>>,
    /// The same where it is FoundationDB.
    pub fdb: Option<fdb::Open>,
    /// The schema, the prefix or the subspace.
    pub namespace: String,
    /// What a crash of the server loses, as the server tells.
    pub durability: String,
    /// The processes of a private server: the first ones, not what they have started.
    pub processes: Vec<u32>,
    /// Tells what remains to be done when the store is no longer needed.
    kind: Kind,
}

impl Backend {
    /// The backend of that name.
    #[must_use]
    pub fn named(name: &str) -> Option<&'static Self> {
        BACKENDS.iter().find(|backend| backend.name == name)
    }

    /// Those that `IDEM_BENCH_BACKENDS` names, with commas between them, in the order of the tables; all where it
    /// is not set.
    ///
    /// # Errors
    /// For a name that is none.
    pub fn chosen() -> Result<Vec<&'static Self>, Failed> {
        let Ok(names) = std::env::var("IDEM_BENCH_BACKENDS") else { return Ok(BACKENDS.iter().collect()) };
        let names: Vec<&str> = names.split(',').map(str::trim).collect();
        match names.iter().find(|name| Self::named(name).is_none()) {
            Some(name) => Err(unknown(name).into()),
            None => Ok(BACKENDS.iter().filter(|backend| names.contains(&backend.name)).collect()),
        }
    }

    /// Opens it, empty.
    ///
    /// # Errors
    /// That it is absent, as the inner error where `IDEM_REQUIRE` does not name its server; otherwise as the outer one, and
    /// when its server refuses.
    pub async fn open(&self, servers: &Servers) -> Result<Result<Opened, Absent>, Failed> {
        match self.try_open(servers).await {
            Ok(opened) => Ok(Ok(opened)),
            Err(failed) => match failed.downcast::<Absent>() {
                Ok(absent) => absent.allow().map(Err),
                Err(failed) => Err(failed),
            },
        }
    }

    async fn try_open(&self, servers: &Servers) -> Result<Opened, Failed> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let namespace = format!("bench_{}_{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let kind = self.kind;
        match kind {
            Kind::Memory => Ok(Opened {
                // As many as a long run makes.
                store: self.front(MemoryStore::builder().max_records(usize::MAX).build()),
                postgres: None,
                fdb: None,
                namespace,
                durability: "none: gone with the process".to_owned(),
                processes: Vec::new(),
                kind,
            }),
            Kind::Postgres | Kind::PostgresUnbatched => {
                let server = servers.postgres()?;
                let mut config = idem_postgres::Config::default().with_schema(Schema::new(&namespace)?);
                if kind == Kind::PostgresUnbatched {
                    config = config.with_batching(Batching::off(UNBATCHED));
                }
                let store = Arc::new(PostgresStore::connect_and_migrate(&server.url, config).await?);
                let durability = sqlx::query_scalar(
                    "SELECT 'fsync ' || current_setting('fsync') || ', synchronous_commit ' \
                     || current_setting('synchronous_commit')",
                );
                Ok(Opened {
                    store: self.front(store.clone()),
                    namespace,
                    durability: durability.fetch_one(store.pool()).await?,
                    postgres: Some(store),
                    fdb: None,
                    processes: server.processes(),
                    kind,
                })
            }
            Kind::Redis => {
                let server = servers.redis()?;
                let store = RedisStore::connect(&server.url, redis_config(&namespace)?).await?;
                self.redis(store, namespace, server.processes()).await
            }
            Kind::RedisCluster => {
                let cluster = servers.cluster()?;
                let store = RedisStore::connect_cluster(cluster.urls(), redis_config(&namespace)?).await?;
                self.redis(store, namespace, cluster_processes(cluster)).await
            }
            Kind::Fdb | Kind::FdbUnbatched => {
                let server = servers.fdb()?;
                let fdb = server.open(&namespace, kind == Kind::Fdb).await?;
                Ok(Opened {
                    store: self.front(fdb.store.clone()),
                    postgres: None,
                    namespace,
                    durability: fdb.durability.clone(),
                    fdb: Some(fdb),
                    processes: server.processes(),
                    kind,
                })
            }
        }
    }

    async fn redis(&self, store: RedisStore, namespace: String, processes: Vec<u32>) -> Result<Opened, Failed> {
        let mut lines = Vec::new();
        for report in store.check_server().await? {
            let line = match report.findings.first() {
                None => "loses nothing that it has acknowledged".to_owned(),
                Some(worst) => worst.to_string(),
            };
            if !lines.contains(&line) {
                lines.push(line);
            }
        }
        let durability = lines.join("; ");
        Ok(Opened {
            store: self.front(store),
            postgres: None,
            fdb: None,
            namespace,
            durability,
            processes,
            kind: self.kind,
        })
    }

    fn front(&self, store: impl KeyStore) -> Arc<dyn KeyStore> {
        if self.cached { Arc::new(Cached::new(store)) } else { Arc::new(store) }
    }
}

/// That there is no backend of that name, and which there are.
#[must_use]
pub fn unknown(name: &str) -> String {
    let names: Vec<&str> = BACKENDS.iter().map(|backend| backend.name).collect();
    format!("no backend {name:?}; there are {}", names.join(", "))
}

/// The server may lose what it likes: what it may lose is said.
fn redis_config(namespace: &str) -> Result<idem_redis::Config, Failed> {
    Ok(idem_redis::Config::default().with_prefix(Prefix::new(namespace)?).with_on_data_loss(Policy::Ignore))
}

impl Opened {
    /// Whether it is behind a network.
    #[must_use]
    pub fn is_remote(&self) -> bool {
        self.kind != Kind::Memory
    }

    /// Takes its records out of the server, as far as the server has a way to do that at once. Those in Redis expire.
    ///
    /// # Errors
    /// The server's trouble.
    pub async fn close(self) -> Result<(), Failed> {
        if let Some(postgres) = &self.postgres {
            let sql = format!("DROP SCHEMA \"{}\" CASCADE", self.namespace);
            sqlx::raw_sql(AssertSqlSafe(sql)).execute(postgres.pool()).await?;
        }
        if let Some(fdb) = &self.fdb {
            fdb.remove().await?;
        }
        Ok(())
    }
}
