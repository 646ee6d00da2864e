//! Over real HTTP, on Postgres; and with the server's process killed while a handler runs.
//!
//! Another backend does the same: a file as this one, with `url` and `open` of its own.
#![allow(missing_docs, clippy::panic, clippy::unwrap_used, reason = "tests")]

#[path = "network/all.rs"]
mod all;
#[path = "network/backend.rs"]
mod backend;
#[path = "network/killed.rs"]
mod killed;

use std::process::ExitCode;
use std::sync::{Arc, LazyLock};

use idem_core::KeyStore;
use idem_postgres::{Config, PostgresStore, Schema};
use idem_testkit::servers::PostgresServer;

static SERVER: LazyLock<Result<PostgresServer, String>> =
    LazyLock::new(|| PostgresServer::start(&[]).map_err(|error| error.to_string()));

fn url() -> String {
    std::env::var("IDEM_POSTGRES_URL").unwrap_or_else(|_| SERVER.as_ref().unwrap().url())
}

async fn open(url: &str, schema: &str) -> Arc<dyn KeyStore> {
    let config = Config::default().with_schema(Schema::new(schema.to_owned()).unwrap());
    Arc::new(PostgresStore::connect_and_migrate(url, config).await.unwrap())
}

fn main() -> ExitCode {
    backend::run("postgres", || match std::env::var("IDEM_POSTGRES_URL") {
        Ok(_) => None,
        Err(_) => SERVER.as_ref().err().cloned(),
    })
}
