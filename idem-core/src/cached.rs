//! A near-cache of completed records.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use async_trait::async_trait;
use moka::Expiry;
use moka::sync::Cache;

use crate::clock::{Clock, MonotonicClock, after};
use crate::decision::{Decision, decide};
use crate::error::{ErrorKind, Operation, StoreError};
use crate::key::Key;
use crate::outcome::{Failure, Outcome};
use crate::record::Record;
use crate::request::{Lease, PurgeBudget, Purged, Reservation, Reserve};
use crate::store::{Capabilities, KeyStore};

/// What an entry counts beside its key and its outcome: the record and the cache's own book-keeping.
const ENTRY_BYTES: usize = 700;
/// What a header line counts beside its name and its value.
const HEADER_BYTES: usize = 64;

/// A store in front of another one, that answers repeats of completed records without a round trip.
///
/// A completed record is final until it expires (rule R7), so a copy of it cannot be out of date, only over. That is
/// all that is cached:
///
/// - **Filled** by the store's own answer `Completed` to a reserve, and by a fetch that finds a completed record: after
///   the durable write and after the store's own check of the fingerprint. Not at `complete`: neither the fingerprint
///   nor the store's times are known there, so the first repeat still makes one round trip.
/// - **Answered from** by reserve, reserve_many and fetch. The fingerprint is compared here as well (rule R3), by the
///   same function that stores use.
/// - **Kept** for what was left of the record's life when the store answered, counted from *before* the call was sent.
///   That is a duration on this process's [`Clock`]; no time of the store is compared with it (rule R10). Should the
///   clock have gone back since, the entry does not count. A clock that stands still while the machine sleeps keeps the
///   entry that much longer; a repeat then gets the first result once more, never a second run.
/// - **Bounded** in bytes, see [`max_bytes`](CachedBuilder::max_bytes). An entry that goes early costs a round trip.
///
/// A [`Record`] from the cache has aged: its `read_at` is the store's time of reading plus the time it has been held,
/// so that [`expires_in`](Record::expires_in) tells what is left now.
///
/// Everything else goes to the store as it is. **Cancellation**: as of the store; the cache is written only when the
/// store has answered, so a dropped future leaves nothing wrong in it.
///
/// There is no way to take an entry out: what could make that necessary (a record removed by hand) breaks R7.
///
/// ```
/// use idem_core::{Cached, Key, KeyStore, MemoryStore, Outcome, Reservation, Reserve};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // In earnest, a store at the other end of a network.
/// let store = Cached::builder(MemoryStore::new()).max_bytes(16 * 1024 * 1024).build();
/// assert_eq!(store.to_string(), "cached memory");
///
/// let key = Key::new("tenant-7", "order-42")?;
/// let Reservation::Acquired(lease) = store.reserve(&Reserve::new(key.clone())).await? else { panic!() };
/// store.complete(&lease, &Outcome::new(201, "charged once")).await?;
/// for _ in 0..3 {
///     // The first of these asks the store, the others do not.
///     let Reservation::Completed(_) = store.reserve(&Reserve::new(key.clone())).await? else { panic!() };
/// }
/// # Ok(())
/// # }
/// ```
pub struct Cached<S> {
    inner: S,
    clock: Arc<dyn Clock>,
    cache: Cache<Key, Arc<Entry>>,
}

/// A completed record, and when the call that brought it was sent, by the cache's clock.
struct Entry {
    record: Record,
    sent_at: SystemTime,
}

/// Settings of a [`Cached`] store.
#[derive(Debug)]
pub struct CachedBuilder<S> {
    inner: S,
    clock: Arc<dyn Clock>,
    max_bytes: u64,
}

impl<S: KeyStore> CachedBuilder<S> {
    /// The clock that counts how long an entry has been held. Default: a [`MonotonicClock`].
    #[must_use]
    pub fn clock(self, clock: Arc<dyn Clock>) -> Self {
        Self { clock, ..self }
    }

    /// The most bytes to hold: keys, header lines, bodies, and a fixed sum for the book-keeping of each. Default:
    /// 64 MiB. Under load it may be exceeded for a moment by entries that the cache has not yet weighed. A body counts
    /// what it has; where a store hands out slices of larger buffers, those are held.
    #[must_use]
    pub fn max_bytes(self, max_bytes: u64) -> Self {
        Self { max_bytes, ..self }
    }

    /// The store.
    #[must_use]
    pub fn build(self) -> Cached<S> {
        let cache = Cache::builder()
            .max_capacity(self.max_bytes)
            .weigher(|key: &Key, entry: &Arc<Entry>| weight(key, &entry.record))
            .expire_after(Remaining)
            .build();
        Cached { inner: self.inner, clock: self.clock, cache }
    }
}

/// Bytes that an entry counts. The key's text is shared by the cache and the record.
fn weight(key: &Key, record: &Record) -> u32 {
    let outcome = record.outcome().map_or(0, |outcome| outcome.size() + outcome.headers.len() * HEADER_BYTES);
    u32::try_from(ENTRY_BYTES + key.size() + outcome).unwrap_or(u32::MAX)
}

/// Tells the cache when an entry is of no more use, so that it goes without being asked for. That counts by the cache's
/// own clock and only frees memory: whether an entry may answer is decided in [`Entry::at`].
struct Remaining;

impl Expiry<Key, Arc<Entry>> for Remaining {
    fn expire_after_create(&self, _: &Key, entry: &Arc<Entry>, _: Instant) -> Option<Duration> {
        Some(entry.record.expires_in())
    }

    fn expire_after_update(&self, _: &Key, entry: &Arc<Entry>, _: Instant, _: Option<Duration>) -> Option<Duration> {
        Some(entry.record.expires_in())
    }
}

impl Entry {
    /// What the store's clock shows at least, by how long the entry has been held; `None` when the entry no longer
    /// counts.
    fn at(&self, now: SystemTime) -> Option<SystemTime> {
        let held = now.duration_since(self.sent_at).ok()?;
        (held < self.record.expires_in()).then(|| after(self.record.read_at, held))
    }
}

impl<S: KeyStore> Cached<S> {
    /// A cache of the default size in front of that store.
    #[must_use]
    pub fn new(inner: S) -> Self {
        Self::builder(inner).build()
    }

    /// The settings to change.
    #[must_use]
    pub fn builder(inner: S) -> CachedBuilder<S> {
        CachedBuilder { inner, clock: Arc::new(MonotonicClock::new()), max_bytes: 64 * 1024 * 1024 }
    }

    /// The store behind the cache.
    #[must_use]
    pub fn inner(&self) -> &S {
        &self.inner
    }

    /// Bytes held now, as [`max_bytes`](CachedBuilder::max_bytes) counts them. The cache catches up with what it has
    /// put off first, so this is for gauges, not for every call.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.cache.run_pending_tasks();
        self.cache.weighted_size()
    }

    /// The entry of that key, and the store's time to read it at.
    fn entry(&self, key: &Key) -> Option<(Arc<Entry>, SystemTime)> {
        let entry = self.cache.get(key)?;
        let at = entry.at(self.clock.now())?;
        Some((entry, at))
    }

    /// The answer to a reserve, if the cache has it.
    fn answer(&self, request: &Reserve) -> Option<Reservation> {
        let (entry, at) = self.entry(&request.key)?;
        // What the store would refuse is refused here too: by the store, in its own words.
        request.validate(self.inner.capabilities().max_retention).ok()?;
        match decide(Some(&entry.record), request, at) {
            Decision::Answer(answer) => Some(answer),
            Decision::Acquire(_) | Decision::LeaseLost => None,
        }
    }

    /// Keeps a record that the store has answered with to a call sent at that time.
    fn keep(&self, record: &Record, sent_at: SystemTime) {
        if record.outcome().is_none() {
            return;
        }
        let entry = Entry { record: record.clone(), sent_at };
        if entry.at(self.clock.now()).is_some() {
            self.cache.insert(record.key.clone(), Arc::new(entry));
        }
    }

    fn keep_answer(&self, answer: &Result<Reservation, StoreError>, sent_at: SystemTime) {
        if let Ok(Reservation::Completed(record)) = answer {
            self.keep(record, sent_at);
        }
    }
}

#[async_trait]
impl<S: KeyStore> KeyStore for Cached<S> {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn reserve(&self, request: &Reserve) -> Result<Reservation, StoreError> {
        if let Some(answer) = self.answer(request) {
            return Ok(answer);
        }
        let sent_at = self.clock.now();
        let answer = self.inner.reserve(request).await;
        self.keep_answer(&answer, sent_at);
        answer
    }

    async fn complete(&self, lease: &Lease, outcome: &Outcome) -> Result<(), StoreError> {
        self.inner.complete(lease, outcome).await
    }

    async fn fail(&self, lease: &Lease, failure: &Failure) -> Result<(), StoreError> {
        self.inner.fail(lease, failure).await
    }

    async fn renew(&self, lease: &Lease, extend_by: Duration) -> Result<(), StoreError> {
        self.inner.renew(lease, extend_by).await
    }

    async fn fetch(&self, key: &Key) -> Result<Option<Record>, StoreError> {
        if let Some((entry, at)) = self.entry(key) {
            return Ok(Some(entry.record.read(at)));
        }
        let sent_at = self.clock.now();
        let record = self.inner.fetch(key).await?;
        if let Some(record) = &record {
            self.keep(record, sent_at);
        }
        Ok(record)
    }

    async fn purge_expired(&self, budget: PurgeBudget) -> Result<Purged, StoreError> {
        self.inner.purge_expired(budget).await
    }

    /// Answers what the cache has, and asks the store for the rest in one call.
    async fn reserve_many(&self, requests: &[Reserve]) -> Vec<Result<Reservation, StoreError>> {
        let known: Vec<Option<Reservation>> = requests.iter().map(|request| self.answer(request)).collect();
        let rest: Vec<Reserve> = requests
            .iter()
            .zip(&known)
            .filter(|(_, known)| known.is_none())
            .map(|(request, _)| request.clone())
            .collect();
        if rest.is_empty() {
            return known.into_iter().flatten().map(Ok).collect();
        }
        let sent_at = self.clock.now();
        let mut answers = self.inner.reserve_many(&rest).await.into_iter();
        let mut next = || {
            let answer = answers.next().unwrap_or_else(|| {
                let error = StoreError::new(ErrorKind::Other, self.to_string(), Operation::Reserve);
                Err(error.with_context("the store gave fewer answers than it was asked for"))
            });
            self.keep_answer(&answer, sent_at);
            answer
        };
        known.into_iter().map(|known| known.map_or_else(&mut next, Ok)).collect()
    }

    async fn complete_many(&self, calls: &[(Lease, Outcome)]) -> Vec<Result<(), StoreError>> {
        self.inner.complete_many(calls).await
    }
}

impl<S: KeyStore> fmt::Debug for Cached<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cached")
            .field("inner", &self.inner)
            .field("clock", &self.clock)
            .field("max_bytes", &self.cache.policy().max_capacity())
            .finish_non_exhaustive()
    }
}

impl<S: KeyStore> fmt::Display for Cached<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cached {}", self.inner)
    }
}
