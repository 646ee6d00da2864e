//! The harnesses of the conformance kit, and what other tests need of them.
#![allow(
    dead_code,
    unused_imports,
    clippy::unwrap_used,
    clippy::panic,
    reason = "the helpers of tests are tests, each using some"
)]

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use idem_core::clock::{Clock, ManualClock, SystemClock};
use idem_core::{ErrorClass, Key, KeyStore, Lease, Reservation, Reserve, StoreError};
use idem_fdb::foundationdb::tuple::Subspace;
use idem_fdb::foundationdb::{Database, RangeOption};
use idem_fdb::{Batching, Config, FdbStore};
use idem_testkit::servers::FdbCluster;
use idem_testkit::{Abilities, Fixture, Harness, HarnessError, Missing, Time};

use crate::absent;

/// The cluster of this test binary: the one that `IDEM_FDB_CLUSTER_FILE` names, or one of its own.
pub(crate) static CLUSTER: LazyLock<Cluster> = LazyLock::new(|| match std::env::var_os("IDEM_FDB_CLUSTER_FILE") {
    Some(file) => Cluster::Given(file.into()),
    None => match FdbCluster::start() {
        Ok(cluster) => Cluster::Own(cluster),
        Err(error) => Cluster::Missing(error.to_string()),
    },
});

pub(crate) enum Cluster {
    Given(PathBuf),
    Own(FdbCluster),
    Missing(String),
}

impl Cluster {
    pub(crate) fn file(&self) -> PathBuf {
        match self {
            Self::Given(file) => file.clone(),
            Self::Own(cluster) => cluster.cluster_file(),
            Self::Missing(reason) => panic!("no FoundationDB: {reason}"),
        }
    }

    pub(crate) fn missing(&self) -> Option<Missing> {
        match self {
            Self::Missing(reason) => Some(absent::missing(reason.clone())),
            Self::Given(_) | Self::Own(_) => None,
        }
    }
}

pub(crate) fn block_on(test: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap().block_on(test);
}

/// A configuration with a subspace of its own.
pub(crate) fn fresh_config() -> Config {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let begun = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_micros() as u64;
    Config::default().with_subspace(Subspace::from(("idem-kit", begun, std::process::id(), number)))
}

/// A store in this binary's cluster.
pub(crate) async fn open(config: Config) -> FdbStore {
    FdbStore::open(Some(&CLUSTER.file()), config).await.unwrap()
}

pub(crate) async fn acquire(store: &dyn KeyStore, request: &Reserve) -> Lease {
    match store.reserve(request).await.unwrap() {
        Reservation::Acquired(lease) => lease,
        other => panic!("{other:?}"),
    }
}

/// A caller that repeats what was not answered, as the contract says.
#[track_caller]
pub(crate) fn persist<T, F: Future<Output = Result<T, StoreError>>>(call: impl Fn() -> F) -> impl Future<Output = T> {
    let asked = std::panic::Location::caller();
    async move {
        let begun = std::time::Instant::now();
        loop {
            match call().await {
                Ok(answer) => return answer,
                Err(error) => {
                    assert_ne!(error.class(), ErrorClass::Permanent, "{asked}: {error:?}");
                    assert!(begun.elapsed() < Duration::from_secs(90), "{asked}: no answer: {error:?}");
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        }
    }
}

/// The machine's clock, moved on.
#[derive(Debug, Default)]
pub(crate) struct ShiftedClock(AtomicU64);

impl ShiftedClock {
    pub(crate) fn advance(&self, by: Duration) {
        self.0.fetch_add(by.as_micros() as u64, Ordering::SeqCst);
    }
}

impl Clock for ShiftedClock {
    fn now(&self) -> SystemTime {
        SystemClock.now() + Duration::from_micros(self.0.load(Ordering::SeqCst))
    }
}

/// All that a store has stored, by the key.
pub(crate) async fn stored(store: &FdbStore) -> Vec<(Vec<u8>, Vec<u8>)> {
    let read = store.database().run(|transaction, _| async move {
        let (begin, end) = store.records().config().subspace.range();
        let mut range = Some(RangeOption::from((begin, end)));
        let mut all = Vec::new();
        while let Some(wanted) = range {
            let values = transaction.get_range(&wanted, 1, true).await?;
            range = wanted.next_range(&values);
            all.extend(values.iter().map(|value| (value.key().to_vec(), value.value().to_vec())));
        }
        Ok(all)
    });
    read.await.unwrap()
}

/// A clock that stands still unless the kit moves it, and no bound on skew: the cases look at the very edges.
pub(crate) struct Exact(pub(crate) Batching);

/// A store by itself, and what moves its clock.
struct Fresh {
    config: Config,
    advance: Box<dyn Fn(Duration) + Send + Sync>,
    store: Arc<FdbStore>,
}

impl Fresh {
    async fn build(
        config: Config,
        advance: impl Fn(Duration) + Send + Sync + 'static,
    ) -> Result<Box<dyn Fixture>, HarnessError> {
        let store = Arc::new(FdbStore::open(Some(&CLUSTER.file()), config.clone()).await?);
        Ok(Box::new(Self { config, advance: Box::new(advance), store }))
    }
}

#[async_trait]
impl Harness for Exact {
    fn name(&self) -> String {
        "fdb".to_owned()
    }

    fn abilities(&self) -> Abilities {
        Abilities::default().with_time(Time::Manual).with_reopen().with_garble()
    }

    fn missing(&self) -> Option<Missing> {
        CLUSTER.missing()
    }

    async fn build(&self) -> Result<Box<dyn Fixture>, HarnessError> {
        let clock = Arc::new(ManualClock::default());
        let config = fresh_config().with_clock(clock.clone()).with_max_clock_skew(Duration::ZERO).with_batching(self.0);
        Fresh::build(config, move |by| clock.advance(by)).await
    }
}

#[async_trait]
impl Fixture for Fresh {
    fn store(&self) -> Arc<dyn KeyStore> {
        self.store.clone()
    }

    async fn advance(&self, by: Duration) -> Result<(), HarnessError> {
        (self.advance)(by);
        Ok(())
    }

    async fn reopen(&self) -> Result<Arc<dyn KeyStore>, HarnessError> {
        Ok(Arc::new(FdbStore::open(Some(&CLUSTER.file()), self.config.clone()).await?))
    }

    async fn garble(&self, key: &Key) -> Result<(), HarnessError> {
        garble(&self.store, key).await;
        Ok(())
    }
}

/// Puts bytes that are no record in place of a key's record.
pub(crate) async fn garble(store: &FdbStore, key: &Key) {
    let mut tail = Vec::new();
    idem_fdb::foundationdb::tuple::pack_into(&(key.scope(), key.id()), &mut tail);
    let places: Vec<Vec<u8>> =
        stored(store).await.into_iter().map(|(place, _)| place).filter(|place| place.ends_with(&tail)).collect();
    assert_eq!(places.len(), 1, "the places of a record");
    let place = &places[0];
    let written = store.database().run(|transaction, _| async move {
        transaction.set(place, b"no record");
        Ok(())
    });
    written.await.unwrap();
}

/// As a service has it: the wall clock, and a bound of five seconds.
pub(crate) struct Skewed;

#[async_trait]
impl Harness for Skewed {
    fn name(&self) -> String {
        "fdb, clocks 5 s apart".to_owned()
    }

    fn abilities(&self) -> Abilities {
        Abilities::default().with_time(Time::Shifted).with_reopen().with_late(Config::default().max_clock_skew)
    }

    fn missing(&self) -> Option<Missing> {
        CLUSTER.missing()
    }

    async fn build(&self) -> Result<Box<dyn Fixture>, HarnessError> {
        let clock = Arc::new(ShiftedClock::default());
        let config = fresh_config().with_clock(clock.clone());
        Fresh::build(config, move |by| clock.advance(by)).await
    }
}
