//! The conformance kit while the client library injects errors, unknown results of commits among them, into more than
//! every tenth commit.
#![allow(clippy::panic, clippy::unwrap_used, clippy::print_stdout, reason = "the helpers of tests are tests")]

mod absent;
#[cfg(fdb_client)]
mod stores;

#[cfg(not(fdb_client))]
fn main() -> std::process::ExitCode {
    idem_testkit::run(absent::Absent)
}

#[cfg(fdb_client)]
fn main() -> std::process::ExitCode {
    use std::os::unix::process::CommandExt;

    // The library reads these when the network is set up; a process of its own has them from its beginning.
    const ENABLE: &str = "FDB_NETWORK_OPTION_CLIENT_BUGGIFY_ENABLE";
    if std::env::var_os(ENABLE).is_none() {
        let again = std::env::current_exe().map(|program| {
            std::process::Command::new(program)
                .args(std::env::args_os().skip(1))
                .env(ENABLE, "")
                .env("FDB_NETWORK_OPTION_CLIENT_BUGGIFY_SECTION_ACTIVATED_PROBABILITY", "100")
                .env("FDB_NETWORK_OPTION_CLIENT_BUGGIFY_SECTION_FIRED_PROBABILITY", "30")
                .exec()
        });
        panic!("{again:?}");
    }
    use std::io::Write;
    if stores::CLUSTER.missing().is_none() && !std::env::args().any(|argument| argument == "--list") {
        stores::block_on(count());
        std::io::stdout().flush().unwrap_or_default();
    }
    idem_testkit::run(stores::Exact(idem_fdb::Batching::default().with_alone(1)))
}

/// How many commits fail, and with what: so that nobody believes in injected errors that do not come.
#[cfg(fdb_client)]
async fn count() {
    const COMMITS: i32 = 400;
    // Opening it is a transaction as well.
    let store = stores::persist(|| async {
        idem_fdb::FdbStore::open(Some(&stores::CLUSTER.file()), stores::fresh_config()).await
    })
    .await;
    let (mut failed, mut unknown, mut happened) = (0, 0, 0);
    for at in 0..COMMITS {
        let place = store.records().config().subspace.pack(&("injected", at));
        let transaction = store.database().create_trx().unwrap();
        transaction.set(&place, b"x");
        let Err(error) = transaction.commit().await else { continue };
        failed += 1;
        if error.is_maybe_committed() {
            unknown += 1;
            let mut transaction = store.database().create_trx().unwrap();
            let found = loop {
                match transaction.get(&place, false).await {
                    Ok(found) => break found,
                    Err(error) => transaction = transaction.on_error(error).await.unwrap(),
                }
            };
            happened += i32::from(found.is_some());
        }
    }
    println!("of {COMMITS} commits {failed} fail, {unknown} with an unknown result, {happened} of which have happened");
    assert!(10 * unknown >= COMMITS, "too few");
    assert!(0 < happened && happened < unknown, "only of one kind");
}
