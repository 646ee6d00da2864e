//! Histories while the server is killed with -9 and started again, on a server that nobody else uses.
#![allow(clippy::panic, clippy::unwrap_used, clippy::print_stdout, reason = "the helpers of tests are tests")]

mod stores;

stores::tests! {
    nothing_is_lost_and_no_key_run_twice_while_the_server_is_killed,
}

use std::sync::{Arc, LazyLock};

use async_trait::async_trait;
use idem_postgres::sqlx::PgPool;
use idem_testkit::servers::PostgresServer;
use idem_testkit::{Abilities, Fixture, Harness, HarnessError, Time, run_disturbed_histories, run_one};
use stores::{Fresh, fresh_config, pool_of};

/// Its processes die, and no machine: what they have written is safe with the system, and `fsync` would make each start
/// slower by the time that it takes to sync every file. A commit waits for its write all the same.
static CRASHING: LazyLock<PostgresServer> = LazyLock::new(|| PostgresServer::start(&[("fsync", "off")]).unwrap());

struct Crashing;

struct Crashed(Fresh);

#[async_trait]
impl Harness for Crashing {
    fn name(&self) -> String {
        "postgres, killed and started again".to_owned()
    }

    fn abilities(&self) -> Abilities {
        Abilities::default().with_time(Time::Shifted).with_disturb()
    }

    async fn build(&self) -> Result<Box<dyn Fixture>, HarnessError> {
        let config = fresh_config();
        let pool: PgPool = pool_of(&CRASHING.url(), &config, 8).await?;
        Ok(Box::new(Crashed(Fresh::over(pool, config).await?)))
    }
}

#[async_trait]
impl Fixture for Crashed {
    fn store(&self) -> Arc<dyn idem_core::KeyStore> {
        self.0.store()
    }

    async fn advance(&self, by: std::time::Duration) -> Result<(), HarnessError> {
        self.0.advance(by).await
    }

    async fn disturb(&self) -> Result<(), HarnessError> {
        tokio::task::spawn_blocking(|| CRASHING.crash_and_restart()).await??;
        Ok(())
    }
}

async fn nothing_is_lost_and_no_key_run_twice_while_the_server_is_killed() {
    // The kit brings a runtime of its own.
    let test = || {
        for case in [
            "r13_trouble_is_never_taken_for_an_absent_record",
            "r13_what_was_acknowledged_survives_trouble",
            "r13_a_retryable_error_means_that_nothing_happened",
        ] {
            run_one(&Crashing, case).unwrap_or_else(|report| panic!("{report}"));
        }
        let histories = run_disturbed_histories(&Crashing, 12).unwrap_or_else(|report| panic!("{report}"));
        println!("{histories} histories");
    };
    tokio::task::spawn_blocking(test).await.unwrap();
}
