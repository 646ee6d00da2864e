//! The network is started once for the process, whoever comes first.

mod absent;
#[cfg(fdb_client)]
mod stores;

absent::tests! { cases:
    it_may_be_started_any_number_of_times,
    a_database_of_ones_own_shares_it,
    a_program_that_has_booted_by_itself_opens_stores,
    a_program_whose_store_does_not_open_ends_well,
}

#[cfg(fdb_client)]
mod cases {
    #![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

    use std::process::Command;
    use std::sync::Arc;
    use std::time::Duration;

    use idem_core::{Key, KeyStore, Reserve};
    use idem_fdb::FdbStore;
    use idem_fdb::foundationdb::Database;

    use super::stores::{CLUSTER, acquire, fresh_config, open};

    fn request() -> Reserve {
        Reserve::new(Key::new("scope", "id").unwrap())
    }

    pub(crate) async fn it_may_be_started_any_number_of_times() {
        let threads: Vec<_> = (0..8).map(|_| std::thread::spawn(|| idem_fdb::boot().unwrap())).collect();
        for thread in threads {
            thread.join().unwrap();
        }
        for _ in 0..3 {
            acquire(&open(fresh_config()).await, &request()).await;
        }
    }

    pub(crate) async fn a_database_of_ones_own_shares_it() {
        idem_fdb::boot().unwrap();
        let database = Database::from_path(CLUSTER.file().to_str().unwrap()).unwrap();
        let store = FdbStore::with_database(Arc::new(database), fresh_config()).await.unwrap();
        acquire(&store, &request()).await;
        assert!(store.fetch(&request().key).await.unwrap().is_some());
    }

    /// A process of its own each: one that boots by the driver before it opens a store, and one that opens a store first.
    pub(crate) async fn a_program_that_has_booted_by_itself_opens_stores() {
        const HOW: &str = "IDEM_FDB_TEST_BOOT";
        match std::env::var(HOW).as_deref() {
            Ok("theirs") => booted_by_itself().await,
            Ok(_) => drop(acquire(&open(fresh_config()).await, &request()).await),
            Err(_) => {
                for how in ["theirs", "ours"] {
                    let output = Command::new(std::env::current_exe().unwrap())
                        .args(["--exact", "a_program_that_has_booted_by_itself_opens_stores"])
                        .env(HOW, how)
                        .env("IDEM_FDB_CLUSTER_FILE", CLUSTER.file())
                        .output()
                        .unwrap();
                    let (out, error) =
                        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
                    assert!(output.status.success(), "{how}: {}: {out}{error}", output.status);
                    assert!(out.contains("1 passed"), "{how}: {out}");
                    assert_eq!(error, "", "{how}");
                }
            }
        }
    }

    /// A process of its own.
    pub(crate) async fn a_program_whose_store_does_not_open_ends_well() {
        const INSIDE: &str = "IDEM_FDB_TEST_ABSENT";
        if std::env::var_os(INSIDE).is_some() {
            let config = fresh_config().with_call_timeout(Duration::from_secs(1));
            let absent = std::env::temp_dir().join("idem-there-is-no-such.cluster");
            FdbStore::open(Some(&absent), config).await.unwrap_err();
            return;
        }
        // Without the network's stop, most of them end by a signal.
        for _ in 0..4 {
            let output = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "a_program_whose_store_does_not_open_ends_well"])
                .env(INSIDE, "1")
                .output()
                .unwrap();
            let error = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{}: {error}", output.status);
        }
    }

    #[allow(unsafe_code, reason = "the driver's own boot is unsafe")]
    async fn booted_by_itself() {
        // SAFETY: it is dropped before the process ends.
        let network = unsafe { idem_fdb::foundationdb::boot() };
        let store = open(fresh_config()).await;
        acquire(&store, &request()).await;
        idem_fdb::boot().unwrap();
        drop(store);
        drop(network);
    }
}
