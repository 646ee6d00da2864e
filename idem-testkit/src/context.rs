//! What a case works with.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use idem_core::{
    ErrorKind, Failure, Fingerprint, Key, KeyStore, Lease, OnAbandoned, Outcome, Record, Reservation, Reserve,
    StoreError, Token,
};
use rand::SeedableRng;
use rand::rngs::StdRng;

use crate::harness::{Abilities, Fixture, Scale, Time};
use crate::probe::{Log, Probe};
use crate::verdict::{Failed, Verdict, ensure, ensure_is};

/// One run of one case: a fresh store, a scale of time, a seed.
pub(crate) struct Ctx {
    pub(crate) fixture: Box<dyn Fixture>,
    /// The store, recorded, persistent, and where the run wants it delivering everything twice.
    pub(crate) store: Arc<dyn KeyStore>,
    pub(crate) log: Arc<Log>,
    pub(crate) seed: u64,
    pub(crate) time: Time,
    pub(crate) scale: Scale,
    /// How late deadlines may come.
    pub(crate) late: Duration,
    watch: Watch,
}

/// Time as it passes for the store, from the beginning of the case: of the clocks involved only durations are compared.
#[derive(Debug, Clone)]
pub(crate) struct Watch {
    time: Time,
    /// Nanoseconds by which the fixture's clock was moved.
    moved: Arc<AtomicU64>,
    start: Instant,
}

impl Watch {
    pub(crate) fn now(&self) -> Duration {
        let moved = Duration::from_nanos(self.moved.load(Ordering::SeqCst));
        match self.time {
            Time::Manual => moved,
            Time::Real | Time::Shifted => moved + self.start.elapsed(),
        }
    }
}

impl Ctx {
    pub(crate) fn new(fixture: Box<dyn Fixture>, log: Arc<Log>, seed: u64, abilities: Abilities, twice: bool) -> Self {
        let Abilities { time, late, .. } = abilities;
        let store = Arc::new(Probe { store: fixture.store(), log: log.clone(), twice });
        Self {
            fixture,
            store,
            log,
            seed,
            time,
            scale: time.scale(),
            late,
            watch: Watch { time, moved: Arc::default(), start: Instant::now() },
        }
    }

    /// Random choices that the seed repeats.
    pub(crate) fn rng(&self) -> StdRng {
        StdRng::seed_from_u64(self.seed)
    }

    /// Lets time pass for the store: moves its clock where that is possible, and waits otherwise.
    pub(crate) async fn pass(&self, by: Duration) -> Verdict {
        self.log.add(&format!("-- {by:?} pass --"));
        match self.time {
            Time::Real => tokio::time::sleep(by).await,
            Time::Shifted | Time::Manual => {
                self.fixture.advance(by).await?;
                self.watch.moved.fetch_add(u64::try_from(by.as_nanos()).unwrap_or(u64::MAX), Ordering::SeqCst);
            }
        }
        Ok(())
    }

    /// Now, by the case's watch.
    pub(crate) fn now(&self) -> Duration {
        self.watch.now()
    }

    pub(crate) fn watch(&self) -> Watch {
        self.watch.clone()
    }

    /// To be called behind a check that something still lasts, with the moment from before it began: tells a store
    /// that let go too early from a machine that looked too late.
    pub(crate) fn in_time(&self, began: Duration, lasts: Duration) -> Verdict {
        if self.now() < began + lasts {
            return Ok(());
        }
        Err(Failed::Inconclusive(format!("{lasts:?} were over before it was looked at")))
    }

    /// Lets pass what remains until `since + by` is surely over.
    pub(crate) async fn pass_until(&self, since: Duration, by: Duration) -> Verdict {
        let edge = match self.time {
            Time::Manual => by,
            Time::Real => by + Duration::from_millis(30),
            Time::Shifted => by + Duration::from_millis(1),
        };
        self.pass((since + edge + self.late).saturating_sub(self.now())).await
    }

    #[expect(clippy::unused_self, reason = "a key of this case, as everything else that it works with")]
    pub(crate) fn key(&self, id: &str) -> Verdict<Key> {
        Key::new("kit", id).map_err(|error| Failed::Broken(error.to_string()))
    }

    /// A request with a new token and the scale's lease and retention.
    pub(crate) fn request(&self, key: &Key) -> Reserve {
        Reserve::new(key.clone()).with_lease(self.scale.lease).with_retention(self.scale.retention)
    }

    /// A retention that outlives the case, as far as the store allows.
    pub(crate) fn long_retention(&self) -> Duration {
        (self.scale.retention * 100).min(self.store.capabilities().max_retention)
    }

    pub(crate) async fn reserve(&self, request: &Reserve) -> Verdict<Reservation> {
        Ok(self.store.reserve(request).await?)
    }

    /// Reserves and wants to hold the key.
    pub(crate) async fn acquire_by(&self, request: &Reserve) -> Verdict<Lease> {
        let answer = self.reserve(request).await?;
        let lease = ensure_is!(answer, Reservation::Acquired(lease) => lease, "reserving a key that is free");
        ensure!(
            lease.key == request.key && lease.token == request.token && lease.retention == request.retention,
            "the lease is not of the request: {lease:?} for {request:?}"
        );
        Ok(lease)
    }

    pub(crate) async fn acquire(&self, key: &Key) -> Verdict<Lease> {
        self.acquire_by(&self.request(key)).await
    }

    /// A key that was completed with that outcome.
    pub(crate) async fn completed(&self, key: &Key, outcome: &Outcome) -> Verdict<Lease> {
        let lease = self.acquire(key).await?;
        self.store.complete(&lease, outcome).await?;
        Ok(lease)
    }

    /// A key whose latest attempt failed.
    pub(crate) async fn failed(&self, key: &Key) -> Verdict<Lease> {
        let lease = self.acquire(key).await?;
        self.store.fail(&lease, &note("first try")?).await?;
        Ok(lease)
    }

    /// A key whose holder is silent and whose lease is over.
    pub(crate) async fn abandoned(&self, key: &Key) -> Verdict<Lease> {
        self.abandoned_by(&self.request(key)).await
    }

    pub(crate) async fn abandoned_by(&self, request: &Reserve) -> Verdict<Lease> {
        let lease = self.acquire_by(request).await?;
        self.pass_until(self.now(), request.lease).await?;
        Ok(lease)
    }

    /// Reserves and wants to be told that another holds the key.
    pub(crate) async fn refused(&self, key: &Key) -> Verdict<Duration> {
        let answer = self.reserve(&self.request(key)).await?;
        Ok(
            ensure_is!(answer, Reservation::InProgress { retry_after, .. } => retry_after, "reserving a key that is held"),
        )
    }

    /// Reserves and wants a replay.
    pub(crate) async fn replay(&self, key: &Key) -> Verdict<Record> {
        let answer = self.reserve(&self.request(key)).await?;
        Ok(ensure_is!(answer, Reservation::Completed(record) => record, "reserving a key that is completed"))
    }

    /// Fetches and wants a record.
    pub(crate) async fn record(&self, key: &Key) -> Verdict<Record> {
        let found = self.store.fetch(key).await?;
        Ok(ensure_is!(found, Some(record) => record, "fetching a record that lives"))
    }
}

impl fmt::Debug for Ctx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ctx").field("store", &self.store).field("seed", &self.seed).finish_non_exhaustive()
    }
}

/// Wants an error of that kind.
pub(crate) fn expect_error<T: fmt::Debug>(answer: Result<T, StoreError>, kind: ErrorKind, what: &str) -> Verdict {
    let error = ensure_is!(answer, Err(error) => error, "{what} must be refused with {kind:?}");
    if error.kind() != kind {
        return Err(Failed::Broken(format!("{what} must be refused with {kind:?}: found {error:?}")));
    }
    Ok(())
}

pub(crate) fn note(text: &str) -> Verdict<Failure> {
    Failure::new(text).map_err(|error| Failed::Broken(error.to_string()))
}

/// Two fingerprints that differ.
pub(crate) fn prints() -> (Fingerprint, Fingerprint) {
    (Fingerprint::of("amount=1"), Fingerprint::of("amount=2"))
}

/// A handle that nobody ever acquired.
pub(crate) fn stranger(lease: &Lease) -> Lease {
    Lease::new(lease.key.clone(), Token::random(), lease.attempt, lease.origin, lease.retention)
}

pub(crate) fn refusing(request: Reserve) -> Reserve {
    request.with_on_abandoned(OnAbandoned::Refuse)
}
