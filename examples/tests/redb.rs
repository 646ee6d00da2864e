//! The conformance kit on the store over redb.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use idem_core::KeyStore;
use idem_core::clock::ManualClock;
use idem_examples::redb_store::RedbStore;
use idem_testkit::{Abilities, Fixture, Harness, HarnessError, Time};
use tempfile::TempDir;

fn main() -> ExitCode {
    idem_testkit::run(Redb)
}

struct Redb;

/// A file of its own for each case.
struct File {
    clock: Arc<ManualClock>,
    store: RedbStore,
    _directory: TempDir,
}

#[async_trait]
impl Harness for Redb {
    fn name(&self) -> String {
        "redb".to_owned()
    }

    fn abilities(&self) -> Abilities {
        Abilities::default().with_time(Time::Manual).with_reopen().with_disturb()
    }

    async fn build(&self) -> Result<Box<dyn Fixture>, HarnessError> {
        let (clock, directory) = (Arc::new(ManualClock::default()), TempDir::new()?);
        let store = RedbStore::open(&directory.path().join("keys.redb"), clock.clone())?;
        Ok(Box::new(File { clock, store, _directory: directory }))
    }
}

#[async_trait]
impl Fixture for File {
    fn store(&self) -> Arc<dyn KeyStore> {
        Arc::new(self.store.clone())
    }

    async fn advance(&self, by: Duration) -> Result<(), HarnessError> {
        self.clock.advance(by);
        Ok(())
    }

    async fn reopen(&self) -> Result<Arc<dyn KeyStore>, HarnessError> {
        self.disturb().await?;
        Ok(self.store())
    }

    async fn disturb(&self) -> Result<(), HarnessError> {
        let store = self.store.clone();
        Ok(tokio::task::spawn_blocking(move || store.reopen()).await??)
    }
}
