//! The contract over a transaction of FoundationDB's.

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::time::{Duration, SystemTime};

use foundationdb::future::{FdbSlice, FdbValue};
use foundationdb::options::StreamingMode;
use foundationdb::{FdbResult, RangeOption, Transaction};
use idem_core::decision::{self, Change, Decision, Refusal};
use idem_core::limits::MAX_LEASE;
use idem_core::{
    Capabilities, ErrorKind, Failure, Key, Lease, Operation, Outcome, Record, Reservation, Reserve, StoreError,
};

use crate::calls::{Answer, Call};
use crate::config::Config;
use crate::error::{CallError, Effect, FdbStoreError, STORE, Stop, own_error};
use crate::keys::{self, Keys};
use crate::settings::{Known, Settings};
use crate::value::{self, ValueError};

/// Calls within the caller's own transaction: the record and the caller's data are committed together or not at all.
///
/// **The operation is only work in FoundationDB** and takes less than the five seconds that a transaction may: the whole is
/// one transaction, in the driver's retry loop.
///
/// ```no_run
/// # use idem_core::{Key, Outcome, Reservation, Reserve};
/// # use idem_fdb::FdbStore;
/// # async fn charge(store: &FdbStore) -> Result<(), Box<dyn std::error::Error>> {
/// let request = Reserve::new(Key::new("tenant-7", "order-42")?);
/// let (records, request) = (store.records(), &request);
/// let replayed = store
///     .database()
///     .run(|transaction, _| async move {
///         match records.reserve(&transaction, request).await? {
///             Reservation::Acquired(lease) => {
///                 transaction.set(b"balance/7", b"42");
///                 records.complete(&transaction, &lease, &Outcome::new(201, "charged")).await?;
///                 Ok(false)
///             }
///             _ => Ok(true),
///         }
///     })
///     .await?;
/// # Ok(())
/// # }
/// ```
///
/// - **Make the request before the loop**, not in the closure: its token is what recognises the transaction whose commit was
///   not acknowledged, when the loop runs the closure again. The closure may run many times: nothing outside of the
///   transaction belongs into it.
/// - **Errors**: hand [`CallError`] to the loop as it is, by `?`. Wrapped in a type of your own, FoundationDB's error is not
///   retried.
/// - **Nothing has happened before the commit.** An answer counts when the transaction is committed. Where the loop ends with
///   an error whose [`is_maybe_committed`](foundationdb::FdbError::is_maybe_committed) holds, or with a time-out, run the
///   whole again with the same request.
/// - **Five seconds**: a transaction that was open for longer fails with `transaction_too_old` (1007) when it reads or
///   commits, and the loop begins it anew.
/// - The calls set the option `READ_SYSTEM_KEYS` on the transaction.
///
/// [`FdbStore`](crate::FdbStore) does the same in transactions of its own.
#[derive(Debug)]
pub struct Records {
    config: Config,
    keys: Keys,
    settings: Settings,
}

/// A record to be found.
#[derive(Debug, Clone, Copy)]
struct Wanted<'k> {
    key: &'k Key,
    /// The only day to look at, unless it is not there.
    likely: Option<u64>,
}

/// A record as it was found.
struct Found {
    record: Option<Record>,
    /// Where it lies, and where an expired one lies that it has replaced.
    places: Vec<Place>,
}

struct Place {
    key: Vec<u8>,
    /// Whether it has further pieces.
    pieces: bool,
}

impl Records {
    /// Calls with these settings. [`set_up`](Self::set_up) has to have been committed once, which
    /// [`FdbStore::open`](crate::FdbStore::open) does.
    #[must_use]
    pub fn new(config: Config) -> Self {
        let keys = Keys::new(&config.subspace);
        // A renewed lease keeps its record for as long as it runs.
        let settings = Settings::new(config.max_retention.max(MAX_LEASE));
        Self { config, keys, settings }
    }

    /// The settings.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    pub(crate) fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::default();
        capabilities.max_outcome_bytes = self.config.outcome_limit;
        capabilities.max_retention = self.config.max_retention;
        capabilities.durable = true;
        // By the day, and nobody counts.
        capabilities.purges = false;
        capabilities
    }

    /// Stores what all processes have to agree on, where it is not stored yet or this process's longest retention is longer.
    ///
    /// # Errors
    /// FoundationDB's own; [`FdbStoreError::Settings`](crate::FdbStoreError::Settings).
    ///
    /// # Cost
    /// One read, and none but the first time a write.
    pub async fn set_up(&self, transaction: &Transaction) -> Result<(), CallError> {
        self.prepare(transaction).await.map_err(|stop| stop.in_transaction(Operation::Setup))
    }

    pub(crate) async fn prepare(&self, transaction: &Transaction) -> Result<(), Stop> {
        self.settings.raise(transaction, self.keys.settings()).await
    }

    /// [`reserve`](idem_core::KeyStore::reserve).
    ///
    /// # Errors
    /// As [`reserve`](idem_core::KeyStore::reserve), before anything is read; FoundationDB's own.
    ///
    /// # Cost
    /// A read for each day on which a record may expire from now, all at once: two with retentions up to a day. One more
    /// where the record has pieces.
    pub async fn reserve(&self, transaction: &Transaction, request: &Reserve) -> Result<Reservation, CallError> {
        Ok(self.one(transaction, Call::Reserve(request)).await?.reserved()?)
    }

    /// [`complete`](idem_core::KeyStore::complete).
    ///
    /// # Errors
    /// As [`complete`](idem_core::KeyStore::complete); FoundationDB's own. After `LeaseLost`, do not commit: another attempt
    /// holds the key.
    ///
    /// # Cost
    /// As [`reserve`](Self::reserve).
    pub async fn complete(&self, transaction: &Transaction, lease: &Lease, outcome: &Outcome) -> Result<(), CallError> {
        self.one(transaction, Call::Complete(lease, outcome)).await.map(drop)
    }

    /// [`fail`](idem_core::KeyStore::fail).
    ///
    /// # Errors
    /// As [`fail`](idem_core::KeyStore::fail); FoundationDB's own.
    ///
    /// # Cost
    /// As [`reserve`](Self::reserve).
    pub async fn fail(&self, transaction: &Transaction, lease: &Lease, failure: &Failure) -> Result<(), CallError> {
        self.one(transaction, Call::Fail(lease, failure)).await.map(drop)
    }

    /// [`renew`](idem_core::KeyStore::renew).
    ///
    /// # Errors
    /// As [`renew`](idem_core::KeyStore::renew); FoundationDB's own.
    ///
    /// # Cost
    /// As [`reserve`](Self::reserve).
    pub async fn renew(&self, transaction: &Transaction, lease: &Lease, extend_by: Duration) -> Result<(), CallError> {
        self.one(transaction, Call::Renew(lease, extend_by)).await.map(drop)
    }

    /// [`fetch`](idem_core::KeyStore::fetch). A transaction that writes something commits only where the record is still the
    /// same.
    ///
    /// # Errors
    /// As [`fetch`](idem_core::KeyStore::fetch); FoundationDB's own.
    ///
    /// # Cost
    /// As [`reserve`](Self::reserve).
    pub async fn fetch(&self, transaction: &Transaction, key: &Key) -> Result<Option<Record>, CallError> {
        let found = self.look(transaction, key).await.map_err(|stop| stop.in_transaction(Operation::Fetch))?;
        Ok(found.map_err(|error| own_error(error.into(), Operation::Fetch))?)
    }

    pub(crate) async fn look(
        &self,
        transaction: &Transaction,
        key: &Key,
    ) -> Result<Result<Option<Record>, ValueError>, Stop> {
        let now = self.config.clock.now();
        let found = self.find(transaction, Wanted { key, likely: None }, now).await?;
        Ok(found.map(|found| found.record.filter(|record| !record.is_expired(now))))
    }

    /// Clears the days that are over, all their records at once. Answers whether there was one.
    ///
    /// A day is over when its end lies behind by the clocks' margin, so that no other process takes one of its records for
    /// live.
    ///
    /// # Errors
    /// FoundationDB's own.
    ///
    /// # Cost
    /// One read of one key, and one clear, however many records there are.
    pub async fn purge(&self, transaction: &Transaction) -> Result<bool, CallError> {
        self.clear_days(transaction).await.map_err(CallError::Fdb)
    }

    pub(crate) async fn clear_days(&self, transaction: &Transaction) -> FdbResult<bool> {
        let now = self.config.clock.now();
        let today = keys::day(now.checked_sub(self.config.max_clock_skew).unwrap_or(SystemTime::UNIX_EPOCH));
        let (begin, end) = self.keys.before(today);
        // A snapshot: the clear is the same, whatever else is written there.
        let one = RangeOption { limit: Some(1), ..RangeOption::from((&*begin, &*end)) };
        let any = !transaction.get_range(&one, 1, true).await?.is_empty();
        if any {
            transaction.clear_range(&begin, &end);
        }
        Ok(any)
    }

    /// Makes a call.
    pub(crate) async fn one(&self, transaction: &Transaction, call: Call<'_>) -> Result<Answer, CallError> {
        let operation = call.operation();
        call.check(&self.config)?;
        // Before the reads: what is read is no older than this, so that nothing looks older than it is.
        let now = self.config.clock.now();
        let wanted = self.want(call, now);
        let found = self.find(transaction, wanted, now).await.map_err(|stop| stop.in_transaction(operation))?;
        let mut found = found.map_err(|error| own_error(error.into(), operation))?;
        let answer = self.apply(transaction, call, &mut found, now);
        Ok(answer.map_err(|refusal| StoreError::refused(refusal, STORE, operation))?)
    }

    /// Makes calls, which have been checked, as if one after the other. One that is refused does not touch its neighbours.
    /// Whether an earlier try may have been committed decides which answers can be given.
    ///
    /// An error is FoundationDB's, or one of the settings', and all calls'.
    pub(crate) async fn many(
        &self,
        transaction: &Transaction,
        calls: &[Call<'_>],
        before: Effect,
    ) -> Result<Vec<Result<Answer, StoreError>>, Stop> {
        let now = self.config.clock.now();
        let mut wanted: Vec<Wanted<'_>> = Vec::with_capacity(calls.len());
        let mut places: HashMap<&Key, usize> = HashMap::with_capacity(calls.len());
        let at: Vec<usize> = calls
            .iter()
            .map(|call| {
                let want = self.want(*call, now);
                *places
                    .entry(call.key())
                    .and_modify(|at| wanted[*at].likely = wanted[*at].likely.filter(|_| want.likely.is_some()))
                    .or_insert_with(|| {
                        wanted.push(want);
                        wanted.len() - 1
                    })
            })
            .collect();
        let mut found = self.find_all(transaction, &wanted, now).await?;
        let answers = calls.iter().zip(at).map(|(call, at)| {
            let operation = call.operation();
            match found.get_mut(at) {
                // What an earlier call of these has written is what a later one finds.
                Some(Ok(found)) => {
                    let answer = self.apply(transaction, *call, found, now);
                    let record = found.record.as_ref();
                    if before == Effect::Possible && !call.tells(&answer, record, self.config.call_timeout) {
                        return Err(own_error(FdbStoreError::Overtaken, operation));
                    }
                    answer.map_err(|refusal| StoreError::refused(refusal, STORE, operation))
                }
                Some(Err(error)) => Err(own_error((*error).into(), operation)),
                None => Err(StoreError::new(ErrorKind::Other, STORE, operation)),
            }
        });
        Ok(answers.collect())
    }

    /// Decides a call on what was found, and writes what it changes.
    fn apply(
        &self,
        transaction: &Transaction,
        call: Call<'_>,
        found: &mut Found,
        now: SystemTime,
    ) -> Result<Answer, Refusal> {
        let skew = self.config.max_clock_skew;
        let change = match call {
            Call::Reserve(request) => match decision::decide(found.record.as_ref(), request, now) {
                Decision::Acquire(mut record) => {
                    // Whose clock is ahead must not take over early, nor find it expired.
                    record.lease_until += skew;
                    record.expires_at += skew;
                    let lease = record.lease();
                    found.record = Some(record);
                    self.write(transaction, found);
                    return Ok(Answer::Reserved(Reservation::Acquired(lease)));
                }
                Decision::Answer(Reservation::InProgress { attempt, retry_after }) => {
                    let granted = found.record.as_ref().map(|record| self.granted(record));
                    let retry_after = granted.map_or(retry_after, |granted| retry_after.min(granted));
                    return Ok(Answer::Reserved(Reservation::InProgress { attempt, retry_after }));
                }
                Decision::Answer(answer) => return Ok(Answer::Reserved(answer)),
                Decision::LeaseLost => return Err(Refusal::LeaseLost),
            },
            Call::Complete(lease, outcome) => decision::complete(found.record.as_mut(), lease, outcome, now)?,
            Call::Fail(lease, failure) => decision::fail(found.record.as_mut(), lease, failure, now)?,
            Call::Renew(lease, extend_by) => decision::renew(found.record.as_mut(), lease, extend_by + skew, now)?,
        };
        if change == Change::Write {
            if let (Call::Complete(..) | Call::Fail(..), Some(record)) = (call, &mut found.record) {
                // It was counted anew.
                record.expires_at += skew;
            }
            self.write(transaction, found);
        }
        Ok(Answer::Done)
    }

    /// For how long the lease was granted, margin aside: nobody is told to wait for longer.
    fn granted(&self, record: &Record) -> Duration {
        let until = record.lease_until.checked_sub(self.config.max_clock_skew).unwrap_or(record.lease_until);
        until.duration_since(record.updated_at).unwrap_or_default().max(Duration::from_nanos(1))
    }

    /// Reads the record of a key, wherever it lies.
    async fn find(
        &self,
        transaction: &Transaction,
        wanted: Wanted<'_>,
        now: SystemTime,
    ) -> Result<Result<Found, ValueError>, Stop> {
        let found = self.find_all(transaction, &[wanted], now).await?.pop();
        // There is one for each key. If there were none, it would not mean that the record is absent.
        Ok(found.unwrap_or(Err(ValueError::Version)))
    }

    /// What a call has to find. One under a lease mostly finds its record on the day to which it would write it itself.
    ///
    /// If that day lies ahead, nobody has a newer record of the key on another one: whoever makes one looks at that day too,
    /// unless his clock says that it is over, which is beyond the bound on the skew.
    fn want<'c>(&self, call: Call<'c>, now: SystemTime) -> Wanted<'c> {
        let day = call.lease().map(|lease| keys::day(now + lease.retention + self.config.max_clock_skew));
        Wanted { key: call.key(), likely: day.filter(|day| *day > keys::day(now)) }
    }

    /// Reads the records of keys, all of which differ, wherever they lie.
    async fn find_all(
        &self,
        transaction: &Transaction,
        wanted: &[Wanted<'_>],
        now: SystemTime,
    ) -> Result<Vec<Result<Found, ValueError>>, Stop> {
        let mut known = self.settings.known();
        let mut days = self.days(now, known);
        // The latest day first.
        let read_days = |days: RangeInclusive<u64>, key: &Key| -> Vec<_> {
            days.rev().map(|day| self.read(transaction, day, key)).collect()
        };
        // All are on their way before the first is waited for.
        let reads: Vec<_> = wanted
            .iter()
            .map(|wanted| read_days(wanted.likely.map_or(days.clone(), |day| day..=day), wanted.key))
            .collect();
        let version = Settings::version(transaction)?;
        let mut values = Vec::with_capacity(wanted.len());
        for reads in reads {
            values.push(arrived(reads).await?);
        }
        // Those that are not where they were expected.
        let elsewhere: Vec<_> = (0..wanted.len())
            .filter(|&at| wanted[at].likely.is_some() && values[at].is_empty())
            .map(|at| (at, read_days(days.clone(), wanted[at].key)))
            .collect();
        for (at, reads) in elsewhere {
            values[at] = arrived(reads).await?;
        }
        // It came with the first read.
        let version = version.await?;
        let settings = self.keys.settings();
        while let Some(more) = self.settings.check(transaction, settings, known, version).await? {
            let further = *days.end() + 1..=*self.days(now, more).end();
            for (wanted, values) in wanted.iter().zip(&mut values) {
                let later = arrived(read_days(further.clone(), wanted.key)).await?;
                values.splice(0..0, later);
            }
            (known, days) = (more, self.days(now, more));
        }
        let mut found = Vec::with_capacity(wanted.len());
        for (wanted, values) in wanted.iter().zip(values) {
            found.push(found_in(transaction, wanted.key, now, values).await?);
        }
        Ok(found)
    }

    fn read(
        &self,
        transaction: &Transaction,
        day: u64,
        key: &Key,
    ) -> (Vec<u8>, impl Future<Output = FdbResult<Option<FdbSlice>>> + Send + use<>) {
        let place = self.keys.record(day, key);
        let read = transaction.get(&place, false);
        (place, read)
    }

    /// The days on which a live record may lie: from today to the one on which a record expires that a process has just
    /// written whose clock is ahead.
    fn days(&self, now: SystemTime, known: Known) -> RangeInclusive<u64> {
        let furthest = known.longest + 2 * self.config.max_clock_skew;
        keys::day(now)..=keys::day(now.checked_add(furthest).unwrap_or(now))
    }

    /// Writes the record on the day on which it expires, in place of what was found.
    fn write(&self, transaction: &Transaction, found: &mut Found) {
        let Some(record) = &found.record else { return };
        let key = self.keys.record(keys::day(record.expires_at), &record.key);
        for before in &found.places {
            if before.pieces {
                let (begin, end) = keys::pieces(&before.key);
                transaction.clear_range(&begin, &end);
            }
            if before.key != key {
                transaction.clear(&before.key);
            }
        }
        let values = value::split(record);
        transaction.set(&key, &values.first);
        for (number, piece) in (1..).zip(&values.further) {
            transaction.set(&keys::piece(&key, number), piece);
        }
        found.places = vec![Place { key, pieces: !values.further.is_empty() }];
    }
}

/// The places that hold a value, in the order of the reads.
async fn arrived(
    reads: Vec<(Vec<u8>, impl Future<Output = FdbResult<Option<FdbSlice>>>)>,
) -> FdbResult<Vec<(Vec<u8>, FdbSlice)>> {
    let mut values = Vec::new();
    for (place, read) in reads {
        values.extend(read.await?.map(|value| (place, value)));
    }
    Ok(values)
}

/// The record of these values, of which that of the latest day comes first.
async fn found_in(
    transaction: &Transaction,
    key: &Key,
    now: SystemTime,
    values: Vec<(Vec<u8>, FdbSlice)>,
) -> FdbResult<Result<Found, ValueError>> {
    let mut found = Found { record: None, places: Vec::with_capacity(values.len()) };
    for (place, first) in values {
        let further = match value::further(&first) {
            Ok(further) => further,
            Err(error) => return Ok(Err(error)),
        };
        // Where there are two, somebody's clock is ahead, and has found the one of the earlier day expired.
        if found.record.is_none() {
            let pieces = if further == 0 { Vec::new() } else { pieces(transaction, &place).await? };
            match value::join(key, &first, pieces.iter().map(|piece| piece.value()), now) {
                Ok(record) => found.record = Some(record),
                Err(error) => return Ok(Err(error)),
            }
        }
        found.places.push(Place { key: place, pieces: further > 0 });
    }
    Ok(Ok(found))
}

/// All further pieces of a record, in their order.
async fn pieces(transaction: &Transaction, place: &[u8]) -> FdbResult<Vec<FdbValue>> {
    let (begin, end) = keys::pieces(place);
    let mut range = Some(RangeOption { mode: StreamingMode::WantAll, ..RangeOption::from((begin, end)) });
    let mut pieces = Vec::new();
    while let Some(wanted) = range {
        let values = transaction.get_range(&wanted, 1, false).await?;
        range = wanted.next_range(&values);
        pieces.extend(values);
    }
    Ok(pieces)
}
