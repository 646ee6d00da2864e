//! The conformance kit on the store over redb.

use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::clock::ManualClock;
use idem_core::{Key, KeyStore};
use idem_examples::redb_store::RedbStore;
use idem_testkit::{Abilities, Fixture, Harness, HarnessError, Time};
use redb::{Database, ReadableTable, TableDefinition};
use tempfile::TempDir;

fn main() -> ExitCode {
    idem_testkit::run(Redb)
}

struct Redb;

/// The store's own table of records.
const RECORDS: TableDefinition<'static, &[u8], &[u8]> = TableDefinition::new("records");

/// A file of its own for each case.
struct File {
    clock: Arc<ManualClock>,
    store: RedbStore,
    /// Keys whose records are spoilt when the file is opened next.
    spoil: Arc<Mutex<Vec<Key>>>,
    _directory: TempDir,
}

#[async_trait]
impl Harness for Redb {
    fn name(&self) -> String {
        "redb".to_owned()
    }

    fn abilities(&self) -> Abilities {
        Abilities::default().with_time(Time::Manual).with_reopen().with_disturb().with_garble()
    }

    async fn build(&self) -> Result<Box<dyn Fixture>, HarnessError> {
        let (clock, directory) = (Arc::new(ManualClock::default()), TempDir::new()?);
        let (path, spoil) = (directory.path().join("keys.redb"), Arc::new(Mutex::new(Vec::new())));
        let spoilt = spoil.clone();
        let open = move || {
            let database = Database::create(&path)?;
            for key in spoilt.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
                overwrite(&database, &key)?;
            }
            Ok(database)
        };
        let store = RedbStore::open_with(open, clock.clone())?;
        Ok(Box::new(File { clock, store, spoil, _directory: directory }))
    }
}

/// Puts what is no record where the key's record is: its name ends with the id.
fn overwrite(database: &Database, key: &Key) -> Result<(), redb::Error> {
    let transaction = database.begin_write()?;
    {
        let mut records = transaction.open_table(RECORDS)?;
        let names =
            records.iter()?.map(|entry| Ok(entry?.0.value().to_vec())).collect::<Result<Vec<_>, redb::Error>>()?;
        for name in names.iter().filter(|name| name.ends_with(key.id().as_bytes())) {
            records.insert(&**name, &b"{\"state\":\"done\"}"[..])?;
        }
    }
    transaction.commit()?;
    Ok(())
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

    async fn garble(&self, key: &Key) -> Result<(), HarnessError> {
        self.spoil.lock().unwrap_or_else(PoisonError::into_inner).push(key.clone());
        self.disturb().await
    }

    async fn disturb(&self) -> Result<(), HarnessError> {
        let store = self.store.clone();
        Ok(tokio::task::spawn_blocking(move || store.reopen()).await??)
    }
}
