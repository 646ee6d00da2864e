//! Over real HTTP, on Postgres; and with the server's process killed while a handler runs.
//!
//! Another backend does the same: a file as this one, with a `fresh` of its own.
#![allow(missing_docs, clippy::panic, clippy::unwrap_used, reason = "tests")]

#[path = "network/all.rs"]
mod all;
#[path = "network/killed.rs"]
mod killed;

use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

use idem_core::KeyStore;
use idem_postgres::{Config, PostgresStore, Schema};
use idem_testkit::Missing;
use idem_testkit::servers::PostgresServer;

static SERVER: LazyLock<Result<PostgresServer, String>> =
    LazyLock::new(|| PostgresServer::start(&[]).map_err(|error| error.to_string()));

fn url() -> String {
    std::env::var("IDEM_POSTGRES_URL").unwrap_or_else(|_| SERVER.as_ref().unwrap().url())
}

fn fresh_schema() -> String {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    format!("http_{}_{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed))
}

async fn open(url: &str, schema: &str) -> Arc<dyn KeyStore> {
    let config = Config::default().with_schema(Schema::new(schema.to_owned()).unwrap());
    Arc::new(PostgresStore::connect_and_migrate(url, config).await.unwrap())
}

async fn fresh() -> Arc<dyn KeyStore> {
    open(&url(), &fresh_schema()).await
}

fn block_on(test: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap().block_on(test);
}

macro_rules! tests {
    ($($name:ident,)+) => {
        [$((stringify!($name), (|| block_on(async { all::$name(fresh().await).await })) as fn()),)+]
    };
}

fn main() -> ExitCode {
    if let Ok(served) = std::env::var("IDEM_HTTP_SERVE") {
        block_on(killed::serve(&served));
        return ExitCode::SUCCESS;
    }
    let given = std::env::var("IDEM_POSTGRES_URL").is_ok();
    let missing = if given { None } else { SERVER.as_ref().err() };
    let missing = missing.map(|reason| Missing { server: "postgres", reason: reason.clone() });
    let mut tests = all::list!(tests).to_vec();
    tests.push(("the_server_is_killed_while_the_handler_runs", || block_on(killed::killed())));
    tests.push(("a_server_that_is_asked_to_stop_finishes_what_runs", || block_on(killed::stopped())));
    idem_testkit::run_tests(missing.as_ref(), &tests)
}
