//! What the kit cannot see of the store over redb: foreign bytes in its file, a disk that fails, and other files.
#![allow(clippy::panic, clippy::unwrap_used, reason = "the helpers of tests are tests")]

use std::error::Error;
use std::fs::OpenOptions;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use idem_core::clock::ManualClock;
use idem_core::codec::DecodeError;
use idem_core::{
    ErrorClass, ErrorKind, Failure, Key, KeyStore, Lease, Outcome, PurgeBudget, Purged, Reservation, Reserve,
    StoreError,
};
use idem_examples::redb_store::RedbStore;
use redb::backends::FileBackend;
use redb::{Database, ReadableTable, StorageBackend, TableDefinition};

const RECORDS: TableDefinition<'static, &[u8], &[u8]> = TableDefinition::new("records");
const RETENTION: Duration = Duration::from_secs(3_600);

fn request(id: &str) -> Reserve {
    Reserve::new(Key::new("scope", id).unwrap()).with_retention(RETENTION)
}

async fn acquire(store: &RedbStore, request: &Reserve) -> Lease {
    match store.reserve(request).await.unwrap() {
        Reservation::Acquired(lease) => lease,
        other => panic!("{other:?}"),
    }
}

/// Changes the bytes of every record whose id is that, behind the store's back.
fn tamper(path: &Path, id: &str, change: impl Fn(&[u8]) -> Vec<u8>) {
    let database = Database::open(path).unwrap();
    let transaction = database.begin_write().unwrap();
    {
        let mut records = transaction.open_table(RECORDS).unwrap();
        let found: Vec<(Vec<u8>, Vec<u8>)> = records
            .iter()
            .unwrap()
            .map(|entry| entry.map(|(key, value)| (key.value().to_vec(), value.value().to_vec())).unwrap())
            .filter(|(key, _)| key.ends_with(id.as_bytes()))
            .collect();
        assert_eq!(found.len(), 1);
        for (key, value) in found {
            records.insert(&*key, &*change(&value)).unwrap();
        }
    }
    transaction.commit().unwrap();
}

fn unreadable<T: std::fmt::Debug>(answer: Result<T, StoreError>) {
    let error = answer.unwrap_err();
    assert_eq!((error.kind(), error.class()), (ErrorKind::Unreadable, ErrorClass::Permanent));
    assert!(error.source().unwrap().is::<DecodeError>(), "{error:?}");
}

#[tokio::test]
async fn foreign_bytes_are_an_error_of_every_call_and_never_absent() {
    type Damage = fn(&[u8]) -> Vec<u8>;
    let damages: [Damage; 6] = [
        |_| Vec::new(),
        |_| b"{\"state\":\"done\"}".to_vec(),
        // A newer version.
        |value| [&[2], &value[1..]].concat(),
        |value| value[..value.len() - 1].to_vec(),
        |value| [value, &[0]].concat(),
        |value| value.iter().map(|byte| byte ^ 0xff).collect(),
    ];
    for damage in damages {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("keys");
        let clock = Arc::new(ManualClock::default());
        let store = RedbStore::open(&path, clock.clone()).unwrap();
        let (bad, good) = (request("bad"), request("good"));
        let lease = acquire(&store, &bad).await;
        drop(store);
        tamper(&path, "bad", damage);

        let store = RedbStore::open(&path, clock.clone()).unwrap();
        let outcome = Outcome::new(200, "done");
        let all_unreadable = async || {
            unreadable(store.fetch(&bad.key).await);
            unreadable(store.reserve(&bad).await);
            unreadable(store.reserve(&request("bad")).await);
            unreadable(store.complete(&lease, &outcome).await);
            unreadable(store.fail(&lease, &Failure::truncated("no")).await);
            unreadable(store.renew(&lease, Duration::from_secs(1)).await);
        };
        all_unreadable().await;
        // Its neighbours in a batch are not touched.
        let mut answers = store.reserve_many(&[bad.clone(), good.clone()]).await;
        let Ok(Reservation::Acquired(held)) = answers.pop().unwrap() else { panic!("the good one") };
        unreadable(answers.pop().unwrap());
        let mut answers = store.complete_many(&[(held, outcome.clone()), (lease.clone(), outcome.clone())]).await;
        unreadable(answers.pop().unwrap());
        answers.pop().unwrap().unwrap();

        // Nor is it purged, although it was to expire: nobody knows what it says.
        clock.advance(RETENTION * 2);
        assert_eq!(store.purge_expired(PurgeBudget::default()).await.unwrap(), Purged::new(1, false));
        assert_eq!(store.fetch(&good.key).await.unwrap(), None);
        all_unreadable().await;
    }
}

#[tokio::test]
async fn a_purge_finds_after_a_restart_what_expired_before_and_since() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("keys");
    let clock = Arc::new(ManualClock::default());
    let store = RedbStore::open(&path, clock.clone()).unwrap();
    for at in 0..5 {
        let lease = acquire(&store, &request(&format!("old-{at}"))).await;
        store.complete(&lease, &Outcome::new(200, "")).await.unwrap();
    }
    clock.advance(RETENTION / 2);
    let live = request("live");
    acquire(&store, &live).await;
    drop(store);
    clock.advance(RETENTION / 2);

    let store = RedbStore::open(&path, clock.clone()).unwrap();
    assert_eq!(store.purge_expired(PurgeBudget::records(3)).await.unwrap(), Purged::new(3, true));
    assert_eq!(store.purge_expired(PurgeBudget::records(3)).await.unwrap(), Purged::new(2, false));
    assert_eq!(acquire(&store, &live).await.attempt, 1, "the live one was purged");
    clock.advance(RETENTION / 2);
    assert_eq!(store.purge_expired(PurgeBudget::records(3)).await.unwrap(), Purged::new(1, false));
    assert_eq!(store.purge_expired(PurgeBudget::records(3)).await.unwrap(), Purged::new(0, false));
}

/// A disk that can be made to fail.
#[derive(Debug)]
struct Disk {
    file: FileBackend,
    broken: Arc<AtomicBool>,
}

impl Disk {
    fn check(&self) -> io::Result<()> {
        if self.broken.load(Ordering::SeqCst) { Err(io::Error::other("the disk failed")) } else { Ok(()) }
    }
}

impl StorageBackend for Disk {
    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.file.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.file.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.check()?;
        self.file.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.file.write(offset, data)
    }

    fn close(&self) -> io::Result<()> {
        self.file.close()
    }
}

/// The fsync fails behind the write: what was to be committed may be on the disk or not.
#[tokio::test]
async fn a_commit_that_failed_is_unknown_and_the_same_call_tells() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("keys");
    let broken = Arc::new(AtomicBool::new(false));
    let open = {
        let broken = broken.clone();
        move || {
            let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path)?;
            let disk = Disk { file: FileBackend::new(file)?, broken: broken.clone() };
            Ok(Database::builder().create_with_backend(disk)?)
        }
    };
    let clock = Arc::new(ManualClock::default());
    let store = RedbStore::open_with(open, clock).unwrap();
    let done = request("done");
    let lease = acquire(&store, &done).await;
    store.complete(&lease, &Outcome::new(200, "kept")).await.unwrap();

    broken.store(true, Ordering::SeqCst);
    let unsure = request("unsure");
    for answer in store.reserve_many(&[unsure.clone(), request("other")]).await {
        let error = answer.unwrap_err();
        assert_eq!((error.kind(), error.class()), (ErrorKind::Unavailable, ErrorClass::Unknown));
        let source = error.source().unwrap().downcast_ref::<Arc<redb::Error>>().unwrap();
        assert!(matches!(**source, redb::Error::Io(_)), "{source:?}");
    }
    // From then on nothing is sent. A read may still be answered, but never with "absent".
    for _ in 0..3 {
        let error = store.complete(&lease, &Outcome::new(200, "kept")).await.unwrap_err();
        assert_eq!((error.kind(), error.class()), (ErrorKind::Unavailable, ErrorClass::Retryable));
        assert!(!matches!(store.fetch(&done.key).await, Ok(None)));
    }
    // Bad input is told as such all the while.
    let error = store.reserve(&request("zero").with_lease(Duration::ZERO)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);

    store.reopen().unwrap_err();
    let error = store.fetch(&done.key).await.unwrap_err();
    assert_eq!((error.kind(), error.class()), (ErrorKind::Unavailable, ErrorClass::Retryable));
    broken.store(false, Ordering::SeqCst);
    store.reopen().unwrap();

    let lease = acquire(&store, &unsure).await;
    assert_eq!((lease.attempt, lease.token), (1, unsure.token));
    store.complete(&lease, &Outcome::new(200, "once")).await.unwrap();
    let Reservation::Completed(record) = store.reserve(&done).await.unwrap() else { panic!("lost") };
    assert_eq!(record.outcome(), Some(&Outcome::new(200, "kept")));
}

fn refused(path: &Path, kind: ErrorKind) {
    let error = RedbStore::open(path, Arc::new(ManualClock::default())).unwrap_err();
    assert_eq!((error.kind(), error.class()), (kind, ErrorClass::Permanent), "{error:?}");
    assert!(error.source().is_some());
}

#[test]
fn a_file_that_is_not_the_stores_is_refused_when_it_is_opened() {
    let directory = tempfile::tempdir().unwrap();
    refused(&directory.path().join("missing/keys"), ErrorKind::Misconfigured);
    refused(directory.path(), ErrorKind::Misconfigured);

    let text = directory.path().join("text");
    std::fs::write(&text, "This is no database, but a letter. ".repeat(5_000)).unwrap();
    refused(&text, ErrorKind::Unreadable);

    let other = directory.path().join("other");
    let database = Database::create(&other).unwrap();
    let transaction = database.begin_write().unwrap();
    transaction.open_table(TableDefinition::<u64, u64>::new("records")).unwrap();
    transaction.commit().unwrap();
    // Open elsewhere, and then with tables of its own.
    refused(&other, ErrorKind::Misconfigured);
    drop(database);
    refused(&other, ErrorKind::Misconfigured);
}
