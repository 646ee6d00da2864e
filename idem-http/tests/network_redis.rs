//! Over real HTTP, on Redis; and with the server's process killed while a handler runs.
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
use idem_redis::{Config, Policy, Prefix, RedisStore};
use idem_testkit::servers::RedisServer;

static SERVER: LazyLock<Result<RedisServer, String>> =
    LazyLock::new(|| RedisServer::start(&[]).map_err(|error| error.to_string()));

fn url() -> String {
    std::env::var("IDEM_REDIS_URL").unwrap_or_else(|_| SERVER.as_ref().unwrap().url())
}

async fn open(url: &str, schema: &str) -> Arc<dyn KeyStore> {
    // The server lives as long as the test.
    let config = Config::default().with_prefix(Prefix::new(schema).unwrap()).with_on_data_loss(Policy::Ignore);
    Arc::new(RedisStore::connect(url, config).await.unwrap())
}

fn main() -> ExitCode {
    backend::run("redis", || match std::env::var("IDEM_REDIS_URL") {
        Ok(_) => None,
        Err(_) => SERVER.as_ref().err().cloned(),
    })
}
