//! Stores behind a pgbouncer in transaction mode, each behind one of its own.
#![allow(dead_code, clippy::unwrap_used, clippy::panic, reason = "the helpers of tests are tests, each using some")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::KeyStore;
use idem_postgres::sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use idem_postgres::sqlx::{self, ConnectOptions, PgPool};
use idem_postgres::{Batching, Config};
use idem_testkit::servers::{PgBouncer, PostgresServer};
use idem_testkit::{Abilities, Fixture, Harness, HarnessError, Missing, Time};

use super::{Fresh, fresh_config};

/// The server that all of them lead to.
pub(crate) static BEHIND: LazyLock<Result<PostgresServer, Missing>> = LazyLock::new(|| {
    let missing = |server| move |error: std::io::Error| Missing { server, reason: error.to_string() };
    PgBouncer::find().map_err(missing("pgbouncer"))?;
    PostgresServer::start(&[]).map_err(missing("postgres"))
});

pub(crate) fn missing() -> Option<Missing> {
    BEHIND.as_ref().err().cloned()
}

pub(crate) fn behind() -> &'static PostgresServer {
    BEHIND.as_ref().unwrap_or_else(|missing| panic!("{missing:?}"))
}

/// Far fewer connections to the server than clients have to it.
pub(crate) fn bouncer() -> PgBouncer {
    PgBouncer::start(behind(), 2, &[]).unwrap()
}

pub(crate) fn pooled_config() -> Config {
    fresh_config().with_prepared_statements(false)
}

/// As the documentation says that a caller's pool is to be.
pub(crate) async fn pooled(bouncer: &PgBouncer, config: &Config, connections: u32) -> Result<PgPool, sqlx::Error> {
    let options: PgConnectOptions = bouncer.url().parse()?;
    let options = options.extra_float_digits(None).application_name(config.schema.as_str()).disable_statement_logging();
    PgPoolOptions::new().max_connections(connections).connect_with(options).await
}

pub(crate) struct Pooled(pub(crate) Batching);

struct Behind {
    fresh: Fresh,
    bouncer: Arc<PgBouncer>,
    disturbed: AtomicU64,
}

#[async_trait]
impl Harness for Pooled {
    fn name(&self) -> String {
        "postgres behind pgbouncer in transaction mode".to_owned()
    }

    fn abilities(&self) -> Abilities {
        Abilities::default().with_time(Time::Shifted).with_reopen().with_disturb()
    }

    fn missing(&self) -> Option<Missing> {
        missing()
    }

    async fn build(&self) -> Result<Box<dyn Fixture>, HarnessError> {
        let config = pooled_config().with_batching(self.0);
        let bouncer = Arc::new(bouncer());
        let fresh = Fresh::over(pooled(&bouncer, &config, 8).await?, config).await?;
        Ok(Box::new(Behind { fresh, bouncer, disturbed: AtomicU64::new(0) }))
    }
}

#[async_trait]
impl Fixture for Behind {
    fn store(&self) -> Arc<dyn KeyStore> {
        self.fresh.store()
    }

    async fn advance(&self, by: Duration) -> Result<(), HarnessError> {
        self.fresh.advance(by).await
    }

    async fn reopen(&self) -> Result<Arc<dyn KeyStore>, HarnessError> {
        self.fresh.reopen().await
    }

    /// By turns, the pooler's connections to the server are killed, and the pooler is.
    async fn disturb(&self) -> Result<(), HarnessError> {
        if self.disturbed.fetch_add(1, Ordering::SeqCst).is_multiple_of(2) {
            return self.fresh.kill_connections(&behind().url()).await;
        }
        let bouncer = self.bouncer.clone();
        tokio::task::spawn_blocking(move || bouncer.crash_and_restart()).await??;
        Ok(())
    }
}
