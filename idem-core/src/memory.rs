//! A store in the process's memory.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use hashbrown::HashTable;

use crate::clock::{Clock, MonotonicClock};
use crate::decision::{self, Change, Refusal, Ruling};
use crate::error::{ErrorKind, Operation, StoreError};
use crate::key::Key;
use crate::limits::{
    DEFAULT_OUTCOME_LIMIT, InvalidInput, MAX_OUTCOME_LIMIT, MAX_RETENTION, check_lease, check_retention,
};
use crate::outcome::{Failure, Outcome};
use crate::record::Record;
use crate::request::{Lease, PurgeBudget, Purged, Reservation, Reserve};
use crate::store::{Capabilities, KeyStore};

/// The number of shards for each processor: enough that two callers seldom meet and that a shard is small, and few
/// enough that their locks stay in its cache.
const SHARDS_PER_PROCESSOR: usize = 128;
/// The most slots that a caller looks through, under one shard's lock, to make room for a new record.
const SWEEP: usize = 64;
/// The most slots that a purge looks through for each record that it may remove.
const SLOTS_PER_RECORD: usize = 16;

/// An embedded store: for one process, and gone with it.
///
/// - **Time** is that of its [`Clock`]; the default never jumps.
/// - **Bounded.** It holds at most [`max_records`](MemoryStoreBuilder::max_records) records, and as many outcomes of at
///   most [`outcome_limit`](MemoryStoreBuilder::outcome_limit) bytes. A full store refuses new keys with
///   [`ErrorKind::Full`]; it never drops a live record, since a dropped record is a second run. What is held can always
///   be completed.
/// - **Expiry.** A record that has expired is absent at once. Its room is freed by later reserves, a few slots of the
///   same shard at a time, or by [`purge_expired`](KeyStore::purge_expired). Neither holds up other callers for longer
///   than it takes to look through 64 slots.
/// - **Cost.** No call waits: each takes one shard's lock for a look-up. A replay copies no body.
///
/// ```
/// use idem_core::{Key, KeyStore, MemoryStore, Outcome, Reservation, Reserve};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let store = MemoryStore::new();
/// let key = Key::new("tenant-7", "order-42")?;
///
/// let Reservation::Acquired(lease) = store.reserve(&Reserve::new(key.clone())).await? else { panic!() };
/// store.complete(&lease, &Outcome::new(201, "charged once")).await?;
///
/// let Reservation::Completed(record) = store.reserve(&Reserve::new(key)).await? else { panic!() };
/// assert_eq!(record.outcome(), Some(&Outcome::new(201, "charged once")));
/// # Ok(())
/// # }
/// ```
pub struct MemoryStore {
    shards: Box<[Padded<Mutex<Shard>>]>,
    hasher: RandomState,
    clock: Arc<dyn Clock>,
    records: Padded<AtomicUsize>,
    max_records: usize,
    outcome_limit: usize,
}

/// On cache lines of its own, so that neighbours do not slow each other down.
#[repr(align(128))]
#[derive(Default)]
struct Padded<T>(T);

/// Settings of a [`MemoryStore`].
#[derive(Debug, Clone)]
pub struct MemoryStoreBuilder {
    clock: Arc<dyn Clock>,
    max_records: usize,
    outcome_limit: usize,
}

impl MemoryStoreBuilder {
    /// The clock to write and compare deadlines by. Default: a [`MonotonicClock`].
    #[must_use]
    pub fn clock(self, clock: Arc<dyn Clock>) -> Self {
        Self { clock, ..self }
    }

    /// The most records to hold, expired ones that are not swept yet among them. Default: 10,000,000. A record takes
    /// about 400 bytes beside its key's id, header lines and body.
    #[must_use]
    pub fn max_records(self, max_records: usize) -> Self {
        Self { max_records, ..self }
    }

    /// The largest outcome to hold, in bytes. Default: 1 MiB; more than 8 MiB counts as 8 MiB.
    #[must_use]
    pub fn outcome_limit(self, bytes: usize) -> Self {
        Self { outcome_limit: bytes.min(MAX_OUTCOME_LIMIT), ..self }
    }

    /// The store.
    #[must_use]
    pub fn build(self) -> MemoryStore {
        MemoryStore {
            shards: (0..shards()).map(|_| Padded::default()).collect(),
            hasher: RandomState::new(),
            clock: self.clock,
            records: Padded::default(),
            max_records: self.max_records,
            outcome_limit: self.outcome_limit,
        }
    }
}

/// One shard: a table of records, and where the search for expired ones stands.
///
/// In this order, so that a look-up finds lock and table on one cache line.
#[repr(C)]
struct Shard {
    table: HashTable<Slot>,
    /// No record of this shard expires earlier, so that nothing is looked for in vain.
    earliest: SystemTime,
    /// The bucket at which the sweep goes on.
    cursor: usize,
    /// The earliest expiry that this round of the sweep has seen.
    seen: SystemTime,
}

/// What a look-up needs before it follows the pointer.
struct Slot {
    hash: u64,
    expires_at: SystemTime,
    record: Box<Record>,
}

impl Default for Shard {
    fn default() -> Self {
        Self { table: HashTable::new(), earliest: far(), cursor: 0, seen: far() }
    }
}

/// A power of two.
fn shards() -> usize {
    let processors = std::thread::available_parallelism().map_or(8, NonZeroUsize::get);
    (processors * SHARDS_PER_PROCESSOR).next_power_of_two().clamp(256, 8192)
}

/// Later than any expiry.
fn far() -> SystemTime {
    crate::clock::after(SystemTime::UNIX_EPOCH, Duration::from_secs(u64::from(u32::MAX) * 64))
}

impl Shard {
    fn find(&self, hash: u64, key: &Key) -> Option<&Slot> {
        self.table.find(hash, |slot| slot.hash == hash && slot.record.key == *key)
    }

    fn find_mut(&mut self, hash: u64, key: &Key) -> Option<&mut Slot> {
        self.table.find_mut(hash, |slot| slot.hash == hash && slot.record.key == *key)
    }

    fn insert(&mut self, hash: u64, record: Box<Record>) {
        if self.table.len() == self.table.capacity() {
            // The table moves its entries: the sweep's round starts anew, or it would miss some.
            self.table.reserve(1, |slot| slot.hash);
            (self.cursor, self.seen) = (0, far());
        }
        let expires_at = record.expires_at;
        self.note(expires_at);
        self.table.insert_unique(hash, Slot { hash, expires_at, record }, |slot| slot.hash);
    }

    /// A record expires then.
    fn note(&mut self, expires_at: SystemTime) {
        self.earliest = self.earliest.min(expires_at);
        self.seen = self.seen.min(expires_at);
    }

    /// Looks through at most `slots` slots, from where the last sweep stopped to the end of the table, and takes out
    /// at most `most` records that have expired.
    fn sweep(&mut self, now: SystemTime, slots: usize, most: usize, out: &mut Vec<Slot>) {
        let end = self.table.num_buckets();
        for _ in 0..slots {
            if self.cursor >= end {
                (self.earliest, self.seen, self.cursor) = (self.seen, far(), 0);
                return;
            }
            if out.len() >= most {
                return;
            }
            if let Ok(entry) = self.table.get_bucket_entry(self.cursor) {
                let expires_at = entry.get().expires_at;
                if now >= expires_at {
                    out.push(entry.remove().0);
                } else {
                    self.seen = self.seen.min(expires_at);
                }
            }
            self.cursor += 1;
        }
    }
}

impl MemoryStore {
    /// A store with the default settings.
    #[must_use]
    pub fn new() -> Self {
        Self::builder().build()
    }

    /// The settings to change.
    #[must_use]
    pub fn builder() -> MemoryStoreBuilder {
        MemoryStoreBuilder {
            clock: Arc::new(MonotonicClock::new()),
            max_records: 10_000_000,
            outcome_limit: DEFAULT_OUTCOME_LIMIT,
        }
    }

    /// The number of records held, expired ones that are not swept yet among them.
    #[must_use]
    pub fn len(&self) -> usize {
        self.records.0.load(Ordering::Relaxed)
    }

    /// Whether no record is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn locate(&self, key: &Key) -> (u64, MutexGuard<'_, Shard>) {
        let hash = self.hasher.hash_one(key);
        // The table itself uses the hash's lowest and highest bits.
        let shard = (hash >> 32) as usize & (self.shards.len() - 1);
        (hash, lock(&self.shards[shard].0))
    }

    /// Takes the place of one more record, if there is one.
    fn take_place(&self) -> bool {
        let places = |records| (records < self.max_records).then_some(records + 1);
        self.records.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, places).is_ok()
    }

    /// Drops swept records, outside of any lock.
    fn bury(&self, swept: Vec<Slot>) {
        if !swept.is_empty() {
            self.records.0.fetch_sub(swept.len(), Ordering::Relaxed);
            drop(swept);
        }
    }

    /// Applies a call under a lease.
    fn change(
        &self,
        lease: &Lease,
        operation: Operation,
        call: impl FnOnce(Option<&mut Record>, SystemTime) -> Result<Change, Refusal>,
    ) -> Result<(), StoreError> {
        let (hash, mut shard) = self.locate(&lease.key);
        let now = self.clock.now();
        let mut slot = shard.find_mut(hash, &lease.key);
        let change = call(slot.as_mut().map(|slot| &mut *slot.record), now)
            .map_err(|refusal| StoreError::refused(refusal, STORE, operation))?;
        if let (Change::Write, Some(slot)) = (change, slot) {
            let expires_at = slot.record.expires_at;
            let before = std::mem::replace(&mut slot.expires_at, expires_at);
            // As a rule a life is prolonged, and nothing need be noted: what the sweep knows may be early, never late.
            if expires_at < before {
                shard.note(expires_at);
            }
        }
        Ok(())
    }

    /// Makes room in any shard, for a caller that found the store full. Looks through a bounded number of slots.
    fn make_room(&self, now: SystemTime) {
        let mut swept = Vec::new();
        for shard in &self.shards {
            let mut shard = lock(&shard.0);
            if now >= shard.earliest {
                shard.sweep(now, SWEEP, usize::MAX, &mut swept);
            }
            if !swept.is_empty() {
                break;
            }
        }
        self.bury(swept);
    }

    /// Writes the record of a key that was acquired, in place of another where there is one; false if the store is full.
    fn write(
        &self,
        mut shard: MutexGuard<'_, Shard>,
        hash: u64,
        record: Box<Record>,
        replaces: bool,
        now: SystemTime,
    ) -> bool {
        if replaces && let Some(slot) = shard.find_mut(hash, &record.key) {
            let expires_at = record.expires_at;
            slot.expires_at = expires_at;
            let replaced = std::mem::replace(&mut slot.record, record);
            shard.note(expires_at);
            // What goes is dropped after the lock is released.
            drop(shard);
            drop(replaced);
            return true;
        }
        let mut swept = Vec::new();
        if now >= shard.earliest {
            shard.sweep(now, SWEEP, usize::MAX, &mut swept);
        }
        if swept.is_empty() && !self.take_place() {
            return false;
        }
        // The new record takes the place of one that was swept.
        let replaced = swept.pop();
        shard.insert(hash, record);
        drop(shard);
        drop(replaced);
        self.bury(swept);
        true
    }

    /// `full` is what to do about a full store.
    #[inline]
    fn reserve_now(
        &self,
        request: &Reserve,
        full: impl FnOnce() -> Result<Reservation, StoreError>,
    ) -> Result<Reservation, StoreError> {
        let (hash, shard) = self.locate(&request.key);
        let now = self.clock.now();
        let found = shard.find(hash, &request.key);
        let replaces = found.is_some();
        match decision::rule(found.map(|slot| &*slot.record), request, now) {
            Ruling::Answer(answer) => Ok(answer.reservation(request, now)),
            Ruling::LeaseLost => Err(StoreError::new(ErrorKind::LeaseLost, STORE, Operation::Reserve)),
            Ruling::Acquire(grant) => {
                let (attempt, origin) = (grant.attempt, grant.origin);
                // The box first, so that the record is written into it instead of being copied there.
                let record = Box::write(Box::new_uninit(), grant.record(request, now));
                if !self.write(shard, hash, record, replaces, now) {
                    return full();
                }
                Ok(Reservation::Acquired(Lease::new(
                    request.key.clone(),
                    request.token,
                    attempt,
                    origin,
                    request.retention,
                )))
            }
        }
    }
}

const STORE: &str = "memory";

fn lock(shard: &Mutex<Shard>) -> MutexGuard<'_, Shard> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

fn invalid(operation: Operation) -> impl Fn(InvalidInput) -> StoreError {
    move |input| StoreError::invalid(input, STORE, operation)
}

#[async_trait]
impl KeyStore for MemoryStore {
    fn capabilities(&self) -> Capabilities {
        Capabilities { max_outcome_bytes: self.outcome_limit, ..Capabilities::default() }
    }

    async fn reserve(&self, request: &Reserve) -> Result<Reservation, StoreError> {
        request.validate(MAX_RETENTION).map_err(invalid(Operation::Reserve))?;
        self.reserve_now(request, || {
            self.make_room(self.clock.now());
            self.reserve_now(request, || Err(StoreError::new(ErrorKind::Full, STORE, Operation::Reserve)))
        })
    }

    async fn complete(&self, lease: &Lease, outcome: &Outcome) -> Result<(), StoreError> {
        check_retention(lease.retention, MAX_RETENTION).map_err(invalid(Operation::Complete))?;
        outcome.validate(self.outcome_limit).map_err(invalid(Operation::Complete))?;
        self.change(lease, Operation::Complete, |record, now| decision::complete(record, lease, outcome, now))
    }

    async fn fail(&self, lease: &Lease, failure: &Failure) -> Result<(), StoreError> {
        check_retention(lease.retention, MAX_RETENTION).map_err(invalid(Operation::Fail))?;
        self.change(lease, Operation::Fail, |record, now| decision::fail(record, lease, failure, now))
    }

    async fn renew(&self, lease: &Lease, extend_by: Duration) -> Result<(), StoreError> {
        check_lease(extend_by).map_err(invalid(Operation::Renew))?;
        self.change(lease, Operation::Renew, |record, now| decision::renew(record, lease, extend_by, now))
    }

    async fn fetch(&self, key: &Key) -> Result<Option<Record>, StoreError> {
        let (hash, shard) = self.locate(key);
        let now = self.clock.now();
        Ok(shard.find(hash, key).filter(|slot| now < slot.expires_at).map(|slot| slot.record.read_as(key, now)))
    }

    async fn purge_expired(&self, budget: PurgeBudget) -> Result<Purged, StoreError> {
        let now = self.clock.now();
        let mut slots = budget.records.saturating_mul(SLOTS_PER_RECORD).max(SWEEP);
        let mut removed = 0;
        for shard in &self.shards {
            loop {
                let mut swept = Vec::new();
                let due = {
                    let mut shard = lock(&shard.0);
                    if now >= shard.earliest && removed < budget.records && slots > 0 {
                        shard.sweep(now, SWEEP, budget.records - removed, &mut swept);
                        slots = slots.saturating_sub(SWEEP);
                    }
                    now >= shard.earliest
                };
                removed += swept.len();
                self.bury(swept);
                if !due {
                    break;
                }
                if removed >= budget.records || slots == 0 {
                    return Ok(Purged::new(removed as u64, true));
                }
            }
        }
        Ok(Purged::new(removed as u64, false))
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore")
            .field("records", &self.len())
            .field("max_records", &self.max_records)
            .field("outcome_limit", &self.outcome_limit)
            .field("clock", &self.clock)
            .finish_non_exhaustive()
    }
}

impl fmt::Display for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(STORE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decision::Decision;
    use crate::request::Reserve;

    /// Growth moves entries from behind the sweep's cursor to before it, and from before it to behind.
    #[test]
    fn a_table_that_grows_during_a_sweep_hides_no_expired_record() {
        let hasher = RandomState::new();
        let start = SystemTime::UNIX_EPOCH;
        let soon = start + Duration::from_secs(60);
        for swept_slots in (0..450).step_by(7) {
            let mut shard = Shard::default();
            let insert = |shard: &mut Shard, number: usize, retention| {
                let key = Key::new("", &number.to_string()).unwrap();
                let request = Reserve::new(key).with_retention(Duration::from_secs(retention));
                let Decision::Acquire(record) = decision::decide(None, &request, start) else { panic!() };
                shard.insert(hasher.hash_one(&request.key), Box::new(record));
            };
            // 448 is what 512 buckets hold; every second record expires soon.
            (0..448).for_each(|number| insert(&mut shard, number, if number % 2 == 0 { 60 } else { 600 }));
            assert_eq!(shard.table.num_buckets(), 512);
            let mut swept = Vec::new();
            // A whole round first, so that the next one knows only of what it has seen itself.
            shard.sweep(start, usize::MAX, usize::MAX, &mut swept);
            shard.sweep(soon, swept_slots, usize::MAX, &mut swept);
            (1000..1500).for_each(|number| insert(&mut shard, number, 600));
            assert!(shard.table.num_buckets() > 512);
            while soon >= shard.earliest {
                shard.sweep(soon, 64, usize::MAX, &mut swept);
            }
            assert_eq!(swept.len(), 224, "after a sweep of {swept_slots} slots");
        }
    }
}
