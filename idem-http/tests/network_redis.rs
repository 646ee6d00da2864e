//! Over real HTTP, on Redis; and with the server's process killed while a handler runs.
#![allow(missing_docs, clippy::panic, clippy::unwrap_used, reason = "tests")]

#[path = "network/all.rs"]
mod all;
#[path = "network/killed.rs"]
mod killed;

use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

use idem_core::KeyStore;
use idem_redis::{Config, Policy, Prefix, RedisStore};
use idem_testkit::Missing;
use idem_testkit::servers::RedisServer;

static SERVER: LazyLock<Result<RedisServer, String>> =
    LazyLock::new(|| RedisServer::start(&[]).map_err(|error| error.to_string()));

fn url() -> String {
    std::env::var("IDEM_REDIS_URL").unwrap_or_else(|_| SERVER.as_ref().unwrap().url())
}

fn fresh_schema() -> String {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    format!("http_{}_{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed))
}

async fn open(url: &str, schema: &str) -> Arc<dyn KeyStore> {
    // The server lives as long as the test.
    let config = Config::default().with_prefix(Prefix::new(schema).unwrap()).with_on_data_loss(Policy::Ignore);
    Arc::new(RedisStore::connect(url, config).await.unwrap())
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
    let given = std::env::var("IDEM_REDIS_URL").is_ok();
    let missing = if given { None } else { SERVER.as_ref().err() };
    let missing = missing.map(|reason| Missing { server: "redis", reason: reason.clone() });
    let mut tests = all::list!(tests).to_vec();
    tests.push(("the_server_is_killed_while_the_handler_runs", || block_on(killed::killed())));
    tests.push(("a_server_that_is_asked_to_stop_finishes_what_runs", || block_on(killed::stopped())));
    idem_testkit::run_tests(missing.as_ref(), &tests)
}
