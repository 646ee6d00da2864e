//! The servers under the backends: those that the environment names, or private ones, started when they are first needed.

use std::io;
use std::path::Path;
use std::sync::OnceLock;

use idem_testkit::servers::{PostgresServer, RedisCluster, RedisServer};

use crate::backends::Kind;
use crate::{Failed, fdb};

/// A server that is not there, and why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no {server}: {reason}")]
pub struct Absent {
    /// Its name, as `IDEM_REQUIRE` has it.
    pub server: &'static str,
    /// Why it is not there.
    pub reason: String,
}

impl Absent {
    /// Makes an error of it where `IDEM_REQUIRE` names the server.
    ///
    /// # Errors
    /// Itself.
    pub fn allow(self) -> Result<Self, Failed> {
        let required = std::env::var("IDEM_REQUIRE").unwrap_or_default();
        if required.split(',').any(|name| name.trim().eq_ignore_ascii_case(self.server)) {
            return Err(Box::new(self));
        }
        Ok(self)
    }
}

/// A private Postgres or one of the user's.
#[derive(Debug)]
pub struct Postgres {
    /// Its URL.
    pub url: String,
    own: Option<PostgresServer>,
}

/// A private Redis or one of the user's.
#[derive(Debug)]
pub struct Redis {
    /// Its URL.
    pub url: String,
    own: Option<RedisServer>,
}

impl Postgres {
    /// The user's server of that URL.
    #[must_use]
    pub fn given(url: String) -> Self {
        Self { url, own: None }
    }

    fn start() -> io::Result<Self> {
        let own = PostgresServer::start(&[])?;
        Ok(Self { url: own.url(), own: Some(own) })
    }

    /// The process ids of its postmaster, where it is private.
    #[must_use]
    pub fn processes(&self) -> Vec<u32> {
        let file = |server: &PostgresServer| server.directory().join("data").join("postmaster.pid");
        self.own.as_ref().and_then(|server| pid(&file(server))).into_iter().collect()
    }

    /// The loopback port, where it is private.
    #[must_use]
    pub fn port(&self) -> Option<u16> {
        self.own.as_ref().map(PostgresServer::port)
    }
}

impl Redis {
    /// The user's server of that URL.
    #[must_use]
    pub fn given(url: String) -> Self {
        Self { url, own: None }
    }

    fn start() -> io::Result<Self> {
        let own = RedisServer::start(&[])?;
        Ok(Self { url: own.url(), own: Some(own) })
    }

    /// The id of its process, where it is private.
    #[must_use]
    pub fn processes(&self) -> Vec<u32> {
        self.own.iter().filter_map(redis_pid).collect()
    }

    /// The loopback port, where it is private.
    #[must_use]
    pub fn port(&self) -> Option<u16> {
        self.own.as_ref().map(RedisServer::port)
    }
}

/// The ids of the processes of a private cluster, replicas among them.
#[must_use]
pub fn cluster_processes(cluster: &RedisCluster) -> Vec<u32> {
    cluster.nodes().iter().filter_map(redis_pid).collect()
}

fn redis_pid(server: &RedisServer) -> Option<u32> {
    pid(&server.directory().join("pid"))
}

/// The number on the first line.
fn pid(file: &Path) -> Option<u32> {
    std::fs::read_to_string(file).ok()?.lines().next()?.trim().parse().ok()
}

/// The servers of this process. Private ones are stopped when this is dropped.
#[derive(Debug, Default)]
pub struct Servers {
    postgres: OnceLock<Result<Postgres, Absent>>,
    redis: OnceLock<Result<Redis, Absent>>,
    cluster: OnceLock<Result<RedisCluster, Absent>>,
    fdb: OnceLock<Result<fdb::Server, Absent>>,
}

fn absent(server: &'static str) -> impl Fn(io::Error) -> Absent {
    move |error| Absent { server, reason: error.to_string() }
}

impl Servers {
    /// With that Postgres.
    #[must_use]
    pub fn with_postgres(postgres: Postgres) -> Self {
        Self { postgres: OnceLock::from(Ok(postgres)), ..Self::default() }
    }

    /// With that Redis.
    #[must_use]
    pub fn with_redis(redis: Redis) -> Self {
        Self { redis: OnceLock::from(Ok(redis)), ..Self::default() }
    }

    /// With that FoundationDB.
    #[must_use]
    pub fn with_fdb(fdb: fdb::Server) -> Self {
        Self { fdb: OnceLock::from(Ok(fdb)), ..Self::default() }
    }

    /// Why a backend of that kind cannot be there, as far as that is known without starting its server.
    #[must_use]
    pub fn absent(kind: Kind) -> Option<Absent> {
        let given = |name| std::env::var_os(name).is_some();
        match kind {
            Kind::Memory => None,
            Kind::Postgres | Kind::PostgresUnbatched if given("IDEM_POSTGRES_URL") => None,
            Kind::Postgres | Kind::PostgresUnbatched => PostgresServer::find().err().map(absent("postgres")),
            Kind::Redis if given("IDEM_REDIS_URL") => None,
            Kind::Redis | Kind::RedisCluster => RedisServer::find().err().map(absent("redis")),
            Kind::Fdb | Kind::FdbUnbatched if cfg!(feature = "fdb") && given("IDEM_FDB_CLUSTER_FILE") => None,
            Kind::Fdb | Kind::FdbUnbatched => fdb::Server::find().err().map(absent("fdb")),
        }
    }

    /// Postgres: the one of `IDEM_POSTGRES_URL`, or a private one with `fsync` and `synchronous_commit` on.
    ///
    /// # Errors
    /// That there is none.
    pub fn postgres(&self) -> Result<&Postgres, Absent> {
        let start = || match std::env::var("IDEM_POSTGRES_URL") {
            Ok(url) => Ok(Postgres::given(url)),
            Err(_) => Postgres::start().map_err(absent("postgres")),
        };
        self.postgres.get_or_init(start).as_ref().map_err(Absent::clone)
    }

    /// The same, if it was asked for.
    #[must_use]
    pub fn used_postgres(&self) -> Option<&Postgres> {
        self.postgres.get()?.as_ref().ok()
    }

    /// Redis: the one of `IDEM_REDIS_URL`, or a private one without persistence.
    ///
    /// # Errors
    /// That there is none.
    pub fn redis(&self) -> Result<&Redis, Absent> {
        let start = || match std::env::var("IDEM_REDIS_URL") {
            Ok(url) => Ok(Redis::given(url)),
            Err(_) => Redis::start().map_err(absent("redis")),
        };
        self.redis.get_or_init(start).as_ref().map_err(Absent::clone)
    }

    /// A private cluster of three masters with a replica each, without persistence.
    ///
    /// # Errors
    /// That there is none.
    pub fn cluster(&self) -> Result<&RedisCluster, Absent> {
        let start = || RedisCluster::start(&[]).map_err(absent("redis"));
        self.cluster.get_or_init(start).as_ref().map_err(Absent::clone)
    }

    /// FoundationDB: the cluster of `IDEM_FDB_CLUSTER_FILE`, or a private one of one process.
    ///
    /// # Errors
    /// That there is none.
    pub fn fdb(&self) -> Result<&fdb::Server, Absent> {
        let start = || match std::env::var("IDEM_FDB_CLUSTER_FILE") {
            Ok(file) => fdb::Server::given(&file),
            Err(_) => fdb::Server::start(),
        };
        self.fdb.get_or_init(start).as_ref().map_err(Absent::clone)
    }

    /// The same, if it was asked for.
    #[must_use]
    pub fn used_fdb(&self) -> Option<&fdb::Server> {
        self.fdb.get()?.as_ref().ok()
    }
}
