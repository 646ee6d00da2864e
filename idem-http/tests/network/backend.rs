//! What the network tests have in common on every backend that has a server: a file of a backend's gives `url` and `open`.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use idem_core::KeyStore;
use idem_testkit::Missing;

use crate::{all, killed, open, url};

/// A name for a store's own part of the server.
pub(crate) fn fresh_schema() -> String {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    format!("http_{}_{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed))
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

/// The `main` of a backend's tests. The server is asked for when it is needed, and why it is not there.
pub(crate) fn run(server: &'static str, missing: impl FnOnce() -> Option<String>) -> ExitCode {
    if let Ok(served) = std::env::var("IDEM_HTTP_SERVE") {
        block_on(killed::serve(&served));
        return ExitCode::SUCCESS;
    }
    let missing = missing().map(|reason| Missing { server, reason });
    let mut tests = all::list!(tests).to_vec();
    tests.push(("the_server_is_killed_while_the_handler_runs", || block_on(killed::killed())));
    tests.push(("a_server_that_is_asked_to_stop_finishes_what_runs", || block_on(killed::stopped())));
    idem_testkit::run_tests(missing.as_ref(), &tests)
}
