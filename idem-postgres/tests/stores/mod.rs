//! The harness of the conformance kit, and what other tests need of it.
#![allow(
    dead_code,
    unused_imports,
    unused_macros,
    clippy::unwrap_used,
    clippy::panic,
    reason = "the helpers of tests are tests, each using some"
)]

pub(crate) mod midnight;
pub(crate) mod pooled;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::{ErrorClass, KeyStore, StoreError};
use idem_postgres::sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use idem_postgres::sqlx::{self, AssertSqlSafe, PgPool};
use idem_postgres::{Batching, Config, PostgresStore, Schema};
use idem_testkit::servers::PostgresServer;
use idem_testkit::{Abilities, Fixture, Harness, HarnessError, Missing, Time};

/// The server of this test binary: the one that `IDEM_POSTGRES_URL` names, or one of its own.
pub(crate) static SERVER: LazyLock<Server> = LazyLock::new(|| match std::env::var("IDEM_POSTGRES_URL") {
    Ok(url) => Server::Given(url),
    Err(_) => match PostgresServer::start(&[]) {
        Ok(server) => Server::Own(server),
        Err(error) => Server::Missing(error.to_string()),
    },
});

pub(crate) enum Server {
    Given(String),
    Own(PostgresServer),
    Missing(String),
}

impl Server {
    pub(crate) fn url(&self) -> String {
        match self {
            Self::Given(url) => url.clone(),
            Self::Own(server) => server.url(),
            Self::Missing(reason) => panic!("no Postgres: {reason}"),
        }
    }

    pub(crate) fn missing(&self) -> Option<Missing> {
        match self {
            Self::Missing(reason) => Some(Missing { server: "postgres", reason: reason.clone() }),
            Self::Given(_) | Self::Own(_) => None,
        }
    }
}

/// The `main` of a test binary: its tests by name, each on a runtime of its own.
macro_rules! tests {
    ($($name:ident,)+) => {
        fn main() -> std::process::ExitCode {
            let missing = $crate::stores::SERVER.missing();
            idem_testkit::run_tests(missing.as_ref(), &[$((stringify!($name), || $crate::stores::block_on($name()))),+])
        }
    };
}

pub(crate) use tests;

pub(crate) fn block_on(test: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap().block_on(test);
}

/// A configuration with a schema of its own.
pub(crate) fn fresh_config() -> Config {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    Config::default().with_schema(Schema::new(format!("kit_{}_{number}", std::process::id())).unwrap())
}

/// A pool whose connections are known by the schema's name.
pub(crate) async fn pool(config: &Config, connections: u32) -> Result<PgPool, sqlx::Error> {
    pool_of(&SERVER.url(), config, connections).await
}

/// The same, of another server.
pub(crate) async fn pool_of(url: &str, config: &Config, connections: u32) -> Result<PgPool, sqlx::Error> {
    let options: PgConnectOptions = url.parse()?;
    let options = options.application_name(config.schema.as_str());
    PgPoolOptions::new().max_connections(connections).connect_with(options).await
}

/// Moves the database's clock on, as the store sees it.
pub(crate) async fn advance(pool: &PgPool, config: &Config, by: Duration) -> Result<(), sqlx::Error> {
    let (schema, micros) = (config.schema.as_str(), by.as_micros());
    let sql = format!("UPDATE \"{schema}\".epoch SET shift = shift + {micros} * interval '1 us'");
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(pool).await.map(drop)
}

pub(crate) struct Postgres(Batching);

impl Postgres {
    pub(crate) fn new(batching: Batching) -> Self {
        Self(batching)
    }
}

/// A store of its own schema, on the server of this binary. Its connections are killed when it is disturbed.
pub(crate) struct Fresh {
    pool: PgPool,
    config: Config,
    store: Arc<PostgresStore>,
}

impl Fresh {
    pub(crate) async fn over(pool: PgPool, config: Config) -> Result<Self, HarnessError> {
        PostgresStore::migrate(&pool, &config).await?;
        let store = Arc::new(PostgresStore::open(pool.clone(), config.clone()).await?);
        Ok(Self { pool, config, store })
    }

    /// Kills every connection to the server that the store's pool uses.
    pub(crate) async fn kill_connections(&self, server: &str) -> Result<(), HarnessError> {
        let others = PgPoolOptions::new().max_connections(1).connect(server).await?;
        sqlx::query("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1")
            .bind(self.config.schema.as_str())
            .execute(&others)
            .await?;
        Ok(())
    }
}

#[async_trait]
impl Harness for Postgres {
    fn name(&self) -> String {
        format!("postgres, {} calls in a statement", self.0.calls)
    }

    fn abilities(&self) -> Abilities {
        Abilities::default().with_time(Time::Shifted).with_reopen().with_disturb()
    }

    fn missing(&self) -> Option<Missing> {
        SERVER.missing()
    }

    async fn build(&self) -> Result<Box<dyn Fixture>, HarnessError> {
        let config = fresh_config().with_batching(self.0);
        Ok(Box::new(Fresh::over(pool(&config, 8).await?, config).await?))
    }
}

#[async_trait]
impl Fixture for Fresh {
    fn store(&self) -> Arc<dyn KeyStore> {
        self.store.clone()
    }

    async fn advance(&self, by: Duration) -> Result<(), HarnessError> {
        Ok(advance(&self.pool, &self.config, by).await?)
    }

    async fn reopen(&self) -> Result<Arc<dyn KeyStore>, HarnessError> {
        Ok(Arc::new(PostgresStore::open(self.pool.clone(), self.config.clone()).await?))
    }

    async fn disturb(&self) -> Result<(), HarnessError> {
        self.kill_connections(&SERVER.url()).await
    }
}

/// A caller that repeats what was not answered, as the contract says.
pub(crate) async fn persist<T, F: Future<Output = Result<T, StoreError>>>(call: impl Fn() -> F) -> T {
    let begun = std::time::Instant::now();
    loop {
        match call().await {
            Ok(answer) => return answer,
            Err(error) => {
                assert_ne!(error.class(), ErrorClass::Permanent, "{error:?}");
                assert!(begun.elapsed() < Duration::from_secs(120), "no answer in two minutes: {error:?}");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}
