//! A backend as a stranger would write it: idempotency keys in an embedded database, [redb](https://docs.rs/redb).
//!
//! Two tables. `records` holds a record's bytes ([`codec`]) under its key; `expiries` holds the same keys by the time at
//! which their records expire, so that a purge finds them without looking at the others. Both are written in one
//! transaction. redb has one write transaction at a time, so that reading a record, deciding and writing are one step.

use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use bytes::Bytes;
use idem_core::clock::Clock;
use idem_core::codec;
use idem_core::decision::{self, Change, Decision, Refusal};
use idem_core::limits::{DEFAULT_OUTCOME_LIMIT, MAX_RETENTION, check_lease, check_retention};
use idem_core::{
    Capabilities, ErrorClass, ErrorKind, Failure, InvalidInput, Key, KeyStore, Lease, Operation, Outcome, PurgeBudget,
    Purged, Record, Reservation, Reserve, StoreError,
};
use redb::{Database, ReadableDatabase, ReadableTable, Table, TableDefinition};

const NAME: &str = "redb";
/// The bytes of a key ([`frame`]) and the bytes of its record.
const RECORDS: TableDefinition<'static, &[u8], &[u8]> = TableDefinition::new("records");
/// When a record expires, in nanoseconds since the Unix epoch, and the bytes of its key.
const EXPIRIES: TableDefinition<'static, (u64, &[u8]), ()> = TableDefinition::new("expiries");
/// The most records that one purge removes, whatever its budget: everybody else waits for its transaction.
const MAX_PURGE: usize = 10_000;

/// A store in one file, for one process at a time: redb locks the file.
///
/// - **Durable.** A call that changes a record is on the disk before it is answered. That is one fsync per call, or per
///   batch of [`reserve_many`](KeyStore::reserve_many) and [`complete_many`](KeyStore::complete_many). A call that
///   changes nothing, such as a replay, costs none.
/// - **Waiting.** Calls run on tokio's threads for blocking work, one at a time but for [`fetch`](KeyStore::fetch).
/// - **Cancellation.** A call whose future is dropped still runs to its end on its thread.
/// - **Trouble.** When a commit fails, it may have happened: class unknown. redb then refuses all further work, with
///   errors of class retryable, until the file is opened anew by [`reopen`](Self::reopen); the call repeated then tells.
/// - **Time** is that of its [`Clock`]; see [`WallClock`].
#[derive(Clone)]
pub struct RedbStore(Arc<Shared>);

struct Shared {
    /// `None` when it could not be opened anew.
    database: RwLock<Option<Database>>,
    open: Box<dyn Fn() -> Result<Database, redb::Error> + Send + Sync>,
    clock: Arc<dyn Clock>,
}

impl RedbStore {
    /// Opens the file, and makes it if it is not there. Blocks.
    ///
    /// The records outlive the process, so the clock has to go on where the one before it stopped, as [`WallClock`]
    /// does; one that starts anew with the process does not.
    ///
    /// # Errors
    /// [`ErrorKind::Misconfigured`] when the file is open elsewhere, may not be written, or has other tables;
    /// [`ErrorKind::Unreadable`] when it is damaged or another program's; what the file system says.
    pub fn open(path: &Path, clock: Arc<dyn Clock>) -> Result<Self, StoreError> {
        let path = path.to_owned();
        let open = move || {
            let database = Database::create(&path)?;
            // A new file is there after a power failure once its directory is written too.
            #[cfg(unix)]
            if let Some(directory) = path.parent().filter(|directory| !directory.as_os_str().is_empty()) {
                std::fs::File::open(directory)?.sync_all()?;
            }
            Ok(database)
        };
        Self::open_with(open, clock)
    }

    /// As [`open`](Self::open), with a database that the caller opens: with other settings or another storage. The
    /// function is called now and by each [`reopen`](Self::reopen).
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_with(
        open: impl Fn() -> Result<Database, redb::Error> + Send + Sync + 'static,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, StoreError> {
        let store = Self(Arc::new(Shared { database: RwLock::new(None), open: Box::new(open), clock }));
        store.reopen()?;
        Ok(store)
    }

    /// Closes the file, once the calls that use it are done, and opens it again, for all clones of this store: what redb
    /// wants after input or output has failed. Blocks.
    ///
    /// # Errors
    /// As [`open`](Self::open). The store is unavailable then until another `reopen` succeeds.
    pub fn reopen(&self) -> Result<(), StoreError> {
        let mut database = self.0.database.write().unwrap_or_else(PoisonError::into_inner);
        *database = None;
        *database = Some(self.0.open().map_err(|stop| stop.error(Operation::Setup))?);
        Ok(())
    }

    /// Applies calls, one after the other in one transaction, and gives an answer each. A call that is refused does not
    /// touch its neighbours; when the transaction fails, all of them fail.
    async fn transact<C, A>(
        &self,
        operation: Operation,
        calls: Vec<Result<C, InvalidInput>>,
        apply: impl Fn(&mut Tables<'_>, &C, SystemTime) -> Result<A, Stop> + Send + 'static,
    ) -> Vec<Result<A, StoreError>>
    where
        C: Send + 'static,
        A: Send + 'static,
    {
        let shared = self.0.clone();
        let mut valid = Vec::with_capacity(calls.len());
        let checked: Vec<_> = calls.into_iter().map(|call| call.map(|call| valid.push(call))).collect();
        let mut answers = Vec::new();
        if !valid.is_empty() {
            let work = move || match shared.transact(operation, &valid, apply) {
                Ok(answers) => answers,
                Err(stop) => valid.iter().map(|_| Err(stop.error(operation))).collect(),
            };
            answers = tokio::task::spawn_blocking(work).await.unwrap_or_default();
        }
        let mut answers = answers.into_iter();
        let answer = |checked| match checked {
            Ok(()) => answers.next().unwrap_or_else(|| Err(lost(operation))),
            Err(input) => Err(StoreError::invalid(input, NAME, operation)),
        };
        checked.into_iter().map(answer).collect()
    }

    async fn transact_one<C, A>(
        &self,
        operation: Operation,
        call: Result<C, InvalidInput>,
        apply: impl Fn(&mut Tables<'_>, &C, SystemTime) -> Result<A, Stop> + Send + 'static,
    ) -> Result<A, StoreError>
    where
        C: Send + 'static,
        A: Send + 'static,
    {
        self.transact(operation, vec![call], apply).await.pop().unwrap_or_else(|| Err(lost(operation)))
    }
}

/// The error for a call whose thread panicked, or never ran as the runtime ended: what became of it is not known.
fn lost(operation: Operation) -> StoreError {
    StoreError::new(ErrorKind::Other, NAME, operation).with_context("the call's thread did not finish")
}

impl Shared {
    fn open(&self) -> Result<Database, Stop> {
        let database = (self.open)()?;
        // So that a read finds the tables, and that wrong ones are found out now.
        let transaction = database.begin_write()?;
        Tables::open(&transaction, Operation::Setup)?;
        transaction.commit()?;
        Ok(database)
    }

    fn transact<C, A>(
        &self,
        operation: Operation,
        calls: &[C],
        apply: impl Fn(&mut Tables<'_>, &C, SystemTime) -> Result<A, Stop>,
    ) -> Result<Vec<Result<A, StoreError>>, Stop> {
        let database = self.database.read().unwrap_or_else(PoisonError::into_inner);
        let transaction = database.as_ref().ok_or(redb::Error::DatabaseClosed)?.begin_write()?;
        let mut tables = Tables::open(&transaction, operation)?;
        // Read behind the wait for the transaction: a time from before it could be older than what is stored.
        let now = self.clock.now();
        let mut answers = Vec::with_capacity(calls.len());
        for call in calls {
            match apply(&mut tables, call, now) {
                Err(Stop::Call(error)) => answers.push(Err(error)),
                answer => answers.push(Ok(answer?)),
            }
        }
        let changed = tables.changed;
        drop(tables);
        if changed {
            transaction.commit().map_err(|error| Stop::Commit(Arc::new(error.into())))?;
        }
        Ok(answers)
    }

    fn fetch(&self, key: &Key) -> Result<Option<Record>, Stop> {
        // Read before the snapshot is taken: behind it, a record that has been prolonged since could look expired.
        let now = self.clock.now();
        let database = self.database.read().unwrap_or_else(PoisonError::into_inner);
        let transaction = database.as_ref().ok_or(redb::Error::DatabaseClosed)?.begin_read()?;
        let record = read(&transaction.open_table(RECORDS)?, key, now, Operation::Fetch)?;
        Ok(record.filter(|record| !record.is_expired(now)))
    }
}

/// The tables within a write transaction.
struct Tables<'t> {
    records: Table<'t, &'static [u8], &'static [u8]>,
    expiries: Table<'t, (u64, &'static [u8]), ()>,
    operation: Operation,
    /// Whether there is something to commit.
    changed: bool,
}

impl<'t> Tables<'t> {
    fn open(transaction: &'t redb::WriteTransaction, operation: Operation) -> Result<Self, Stop> {
        let (records, expiries) = (transaction.open_table(RECORDS)?, transaction.open_table(EXPIRIES)?);
        Ok(Self { records, expiries, operation, changed: false })
    }

    fn read(&self, key: &Key, now: SystemTime) -> Result<Option<Record>, Stop> {
        read(&self.records, key, now, self.operation)
    }

    /// Writes a record in place of one that was to expire at `before`.
    fn write(&mut self, record: &Record, before: Option<SystemTime>) -> Result<(), Stop> {
        let key = frame(&record.key);
        if let Some(before) = before {
            self.expiries.remove((nanos(before), &*key))?;
        }
        self.expiries.insert((nanos(record.expires_at), &*key), ())?;
        self.records.insert(&*key, &*codec::encode(record))?;
        self.changed = true;
        Ok(())
    }

    /// Applies a call under a lease.
    fn change(
        &mut self,
        lease: &Lease,
        now: SystemTime,
        call: impl FnOnce(Option<&mut Record>) -> Result<Change, Refusal>,
    ) -> Result<(), Stop> {
        let mut record = self.read(&lease.key, now)?;
        let before = record.as_ref().map(|record| record.expires_at);
        match (call(record.as_mut()), record) {
            (Ok(Change::Write), Some(record)) => self.write(&record, before),
            (Ok(_), _) => Ok(()),
            (Err(refusal), _) => Err(Stop::Call(StoreError::refused(refusal, NAME, self.operation))),
        }
    }

    fn purge(&mut self, budget: PurgeBudget, now: SystemTime) -> Result<Purged, Stop> {
        let mut removed = 0;
        for _ in 0..budget.records.min(MAX_PURGE) {
            let Some((at, bytes)) = self.first_due(now)? else { return Ok(Purged::new(removed, false)) };
            self.expiries.remove((at, &*bytes))?;
            self.changed = true;
            let expired = match unframe(&bytes).map(|key| self.read(&key, now)) {
                Some(Ok(Some(record))) => record.is_expired(now),
                // What cannot be read is not known to have expired. It stays, and its key with it.
                None | Some(Ok(None) | Err(Stop::Call(_))) => false,
                Some(Err(stop)) => return Err(stop),
            };
            if expired {
                self.records.remove(&*bytes)?;
                removed += 1;
            }
        }
        Ok(Purged::new(removed, self.first_due(now)?.is_some()))
    }

    /// The record that expired first.
    fn first_due(&self, now: SystemTime) -> Result<Option<(u64, Vec<u8>)>, Stop> {
        let first = self.expiries.first()?;
        let first = first.as_ref().map(|(key, _)| key.value());
        Ok(first.filter(|(at, _)| *at <= nanos(now)).map(|(at, bytes)| (at, bytes.to_vec())))
    }
}

fn read(
    records: &impl ReadableTable<&'static [u8], &'static [u8]>,
    key: &Key,
    now: SystemTime,
    operation: Operation,
) -> Result<Option<Record>, Stop> {
    let Some(bytes) = records.get(&*frame(key))? else { return Ok(None) };
    codec::decode(key, Bytes::copy_from_slice(bytes.value()), now)
        .map(Some)
        .map_err(|error| Stop::Call(StoreError::new(ErrorKind::Unreadable, NAME, operation).with_source(error)))
}

/// A key's bytes: the scope's length, the scope, the id. The length tells "ab" + "c" from "a" + "bc".
fn frame(key: &Key) -> Vec<u8> {
    // A scope has 64 bytes at most.
    [&[key.scope().len() as u8], key.scope().as_bytes(), key.id().as_bytes()].concat()
}

fn unframe(bytes: &[u8]) -> Option<Key> {
    let (length, rest) = bytes.split_first()?;
    let (scope, id) = rest.split_at_checked(usize::from(*length))?;
    Key::new(str::from_utf8(scope).ok()?, str::from_utf8(id).ok()?).ok()
}

/// As [`codec`] counts time.
fn nanos(time: SystemTime) -> u64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// Why work in a transaction ended early.
enum Stop {
    /// One call is refused; the others go on.
    Call(StoreError),
    /// The transaction failed before its commit: nothing happened.
    Before(Arc<redb::Error>),
    /// The commit failed: it may have happened.
    Commit(Arc<redb::Error>),
}

impl<E: Into<redb::Error>> From<E> for Stop {
    fn from(error: E) -> Self {
        Self::Before(Arc::new(error.into()))
    }
}

impl Stop {
    /// The error of each call that this stopped.
    fn error(&self, operation: Operation) -> StoreError {
        match self {
            Self::Call(error) => StoreError::new(error.kind(), NAME, operation),
            Self::Before(source) => {
                let kind = kind(source);
                let class = match kind.class() {
                    ErrorClass::Unknown => ErrorClass::Retryable,
                    class => class,
                };
                StoreError::new(kind, NAME, operation).with_class(class).with_source(source.clone())
            }
            Self::Commit(source) => StoreError::new(kind(source), NAME, operation)
                .with_class(ErrorClass::Unknown)
                .with_source(source.clone()),
        }
    }
}

/// By variant, never by text.
fn kind(error: &redb::Error) -> ErrorKind {
    use std::io::ErrorKind as Io;
    match error {
        redb::Error::Io(error) => match error.kind() {
            Io::StorageFull | Io::QuotaExceeded | Io::FileTooLarge => ErrorKind::Full,
            // redb's word for a file that is none of its own.
            Io::InvalidData => ErrorKind::Unreadable,
            Io::NotFound | Io::PermissionDenied | Io::ReadOnlyFilesystem | Io::IsADirectory => ErrorKind::Misconfigured,
            _ => ErrorKind::Unavailable,
        },
        redb::Error::PreviousIo | redb::Error::DatabaseClosed => ErrorKind::Unavailable,
        redb::Error::Corrupted(_) => ErrorKind::Unreadable,
        redb::Error::DatabaseAlreadyOpen
        | redb::Error::LockProtocolMismatch
        | redb::Error::UpgradeRequired(_)
        | redb::Error::Unsupported
        | redb::Error::TableTypeMismatch { .. }
        | redb::Error::TypeDefinitionChanged { .. }
        | redb::Error::TableIsMultimap(_)
        | redb::Error::TableDoesNotExist(_) => ErrorKind::Misconfigured,
        _ => ErrorKind::Other,
    }
}

#[async_trait]
impl KeyStore for RedbStore {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::default();
        capabilities.durable = true;
        capabilities
    }

    async fn reserve(&self, request: &Reserve) -> Result<Reservation, StoreError> {
        self.transact_one(Operation::Reserve, checked_reserve(request), reserve).await
    }

    async fn complete(&self, lease: &Lease, outcome: &Outcome) -> Result<(), StoreError> {
        self.transact_one(Operation::Complete, checked_complete(lease, outcome), complete).await
    }

    async fn fail(&self, lease: &Lease, failure: &Failure) -> Result<(), StoreError> {
        let call = check_retention(lease.retention, MAX_RETENTION).map(|()| (lease.clone(), failure.clone()));
        self.transact_one(Operation::Fail, call, |tables, (lease, failure), now| {
            tables.change(lease, now, |record| decision::fail(record, lease, failure, now))
        })
        .await
    }

    async fn renew(&self, lease: &Lease, extend_by: Duration) -> Result<(), StoreError> {
        let call = check_lease(extend_by).map(|()| lease.clone());
        self.transact_one(Operation::Renew, call, move |tables, lease, now| {
            tables.change(lease, now, |record| decision::renew(record, lease, extend_by, now))
        })
        .await
    }

    async fn fetch(&self, key: &Key) -> Result<Option<Record>, StoreError> {
        let (shared, key) = (self.0.clone(), key.clone());
        match tokio::task::spawn_blocking(move || shared.fetch(&key)).await {
            Ok(Err(Stop::Call(error))) => Err(error),
            Ok(found) => found.map_err(|stop| stop.error(Operation::Fetch)),
            Err(_) => Err(lost(Operation::Fetch)),
        }
    }

    async fn purge_expired(&self, budget: PurgeBudget) -> Result<Purged, StoreError> {
        self.transact_one(Operation::Purge, Ok(budget), |tables, budget, now| tables.purge(*budget, now)).await
    }

    async fn reserve_many(&self, requests: &[Reserve]) -> Vec<Result<Reservation, StoreError>> {
        let calls = requests.iter().map(checked_reserve).collect();
        self.transact(Operation::Reserve, calls, reserve).await
    }

    async fn complete_many(&self, calls: &[(Lease, Outcome)]) -> Vec<Result<(), StoreError>> {
        let calls = calls.iter().map(|(lease, outcome)| checked_complete(lease, outcome)).collect();
        self.transact(Operation::Complete, calls, complete).await
    }
}

fn checked_reserve(request: &Reserve) -> Result<Reserve, InvalidInput> {
    request.validate(MAX_RETENTION).map(|()| request.clone())
}

fn checked_complete(lease: &Lease, outcome: &Outcome) -> Result<(Lease, Outcome), InvalidInput> {
    check_retention(lease.retention, MAX_RETENTION)?;
    outcome.validate(DEFAULT_OUTCOME_LIMIT)?;
    Ok((lease.clone(), outcome.clone()))
}

fn reserve(tables: &mut Tables<'_>, request: &Reserve, now: SystemTime) -> Result<Reservation, Stop> {
    let found = tables.read(&request.key, now)?;
    match decision::decide(found.as_ref(), request, now) {
        Decision::Acquire(record) => {
            tables.write(&record, found.map(|found| found.expires_at))?;
            Ok(Reservation::Acquired(record.lease()))
        }
        Decision::Answer(answer) => Ok(answer),
        Decision::LeaseLost => Err(Stop::Call(StoreError::new(ErrorKind::LeaseLost, NAME, tables.operation))),
    }
}

fn complete(tables: &mut Tables<'_>, (lease, outcome): &(Lease, Outcome), now: SystemTime) -> Result<(), Stop> {
    tables.change(lease, now, |record| decision::complete(record, lease, outcome, now))
}

impl fmt::Debug for RedbStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedbStore").field("clock", &self.0.clock).finish_non_exhaustive()
    }
}

impl fmt::Display for RedbStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(NAME)
    }
}

/// The machine's wall clock, which goes on across restarts, kept from running backwards within the process.
///
/// When somebody sets the machine's clock **back**, this one stands still until the machine has caught up; after a
/// restart it is back too. Either way leases and records last longer by as much: safe, and a crashed holder's key
/// waits longer. When the machine's clock jumps **forward**, leases and records end early by as much: a holder that
/// is still at work can be taken over. So let the machine's clock be slewed and not stepped while the process runs, and
/// choose leases far longer than it may jump.
#[derive(Debug)]
pub struct WallClock(Mutex<SystemTime>);

impl WallClock {
    /// A clock that begins at the machine's time.
    #[must_use]
    pub fn new() -> Self {
        Self(Mutex::new(SystemTime::now()))
    }
}

impl Default for WallClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for WallClock {
    fn now(&self) -> SystemTime {
        let mut latest = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *latest = SystemTime::now().max(*latest);
        *latest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wall_clock_stands_still_while_the_machines_is_behind() {
        let ahead = SystemTime::now() + Duration::from_secs(3_600);
        assert_eq!(WallClock(Mutex::new(ahead)).now(), ahead);
        let behind = SystemTime::now();
        let clock = WallClock(Mutex::new(behind - Duration::from_secs(3_600)));
        assert!(clock.now() >= behind);
    }
}
