//! FoundationDB: its server, its store, and the floor beside it.

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use bytes::Bytes;
use idem_core::clock::{Clock, SystemClock};
use idem_fdb::foundationdb::tuple::Subspace;
use idem_fdb::foundationdb::{Database, FdbBindingError, RangeOption, RetryableTransaction};
use idem_fdb::{Batching, Config, FdbStore};
use idem_testkit::servers::FdbCluster;

use crate::Failed;
use crate::floors::{schema, wrong};
use crate::servers::Absent;
use crate::subject::Subject;

/// A value may have 100,000 bytes; larger bodies lie in pieces.
const PIECE: usize = 90_000;
const HELD: &[u8] = b"held";

/// A private cluster or one of the user's.
pub struct Server {
    database: Arc<Database>,
    own: Option<FdbCluster>,
}

fn absent(reason: &dyn fmt::Display) -> Absent {
    Absent { server: "fdb", reason: reason.to_string() }
}

/// The subspace of that name, which only this process has.
fn subspace(namespace: &str) -> Subspace {
    static BEGUN: LazyLock<u64> = LazyLock::new(|| {
        let begun = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        begun.as_micros() as u64
    });
    Subspace::from(("idem-bench", *BEGUN, namespace))
}

/// Runs a transaction by the driver's retry loop.
async fn run<T, F>(database: &Database, work: impl Fn(RetryableTransaction) -> F + Sync) -> Result<T, Failed>
where
    F: Future<Output = Result<T, FdbBindingError>>,
{
    database.run(|transaction, _| work(transaction)).await.map_err(|error| match error.get_fdb_error() {
        Some(error) => error.to_string().into(),
        None => error.into(),
    })
}

async fn clear(database: &Database, subspace: &Subspace) -> Result<(), Failed> {
    let (begin, end) = &subspace.range();
    let clear = |transaction: RetryableTransaction| async move {
        transaction.clear_range(begin, end);
        Ok(())
    };
    run(database, clear).await
}

impl Server {
    /// The user's cluster of that cluster file.
    ///
    /// # Errors
    /// When there is no such file, or no network thread.
    pub fn given(file: &str) -> Result<Self, Absent> {
        Self::connect(Path::new(file), None)
    }

    pub(crate) fn start() -> Result<Self, Absent> {
        let own = FdbCluster::start().map_err(|error| absent(&error))?;
        Self::connect(&own.cluster_file(), Some(own))
    }

    /// Whether a private one can be started.
    pub(crate) fn find() -> io::Result<()> {
        FdbCluster::find().map(drop)
    }

    fn connect(file: &Path, own: Option<FdbCluster>) -> Result<Self, Absent> {
        // The library would tell when it is first used.
        std::fs::metadata(file).map_err(|error| absent(&format_args!("{}: {error}", file.display())))?;
        idem_fdb::boot().map_err(|error| absent(&error))?;
        // The driver would panic.
        let path = file.to_str().filter(|path| !path.contains('\0'));
        let path = path.ok_or_else(|| absent(&"the cluster file's name is not text"))?;
        let database = Database::new(Some(path)).map_err(|error| absent(&format_args!("{path}: {error}")))?;
        Ok(Self { database: Arc::new(database), own })
    }

    /// The ids of its processes, where it is private.
    #[must_use]
    pub fn processes(&self) -> Vec<u32> {
        self.own.iter().flat_map(|own| (0..own.processes()).filter_map(|number| own.pid(number).ok())).collect()
    }

    /// What the cluster tells of itself.
    async fn status(&self) -> Result<serde_json::Value, Failed> {
        let read = |transaction: RetryableTransaction| async move {
            Ok(transaction.get(b"\xff\xff/status/json", false).await?.map(|status| status.to_vec()))
        };
        Ok(serde_json::from_slice(&run(&self.database, read).await?.ok_or("the cluster tells no status")?)?)
    }

    /// Bytes of the keys and values of that name.
    ///
    /// # Errors
    /// The server's trouble.
    pub async fn used(&self, namespace: &str) -> Result<f64, Failed> {
        let (mut used, mut rest) = (0, Some(RangeOption::from(&subspace(namespace))));
        while let Some(range) = &rest {
            // A transaction may take five seconds: each reads as much as comes at once.
            let read = |transaction: RetryableTransaction| async move {
                let found = transaction.get_range(range, 1, true).await?;
                let bytes = found.iter().map(|one| one.key().len() + one.value().len()).sum::<usize>();
                Ok((bytes, range.clone().next_range(&found)))
            };
            let (bytes, next) = run(&self.database, read).await?;
            used += bytes;
            rest = next;
        }
        Ok(used as f64)
    }

    /// Opens a store, empty; each call in a transaction of its own, unless it is `batched`.
    pub(crate) async fn open(&self, namespace: &str, batched: bool) -> Result<Open, Failed> {
        let (subspace, clock) = (subspace(namespace), Arc::new(Ahead::default()));
        let batching = if batched { Batching::default() } else { Batching::off() };
        let config =
            Config::default().with_subspace(subspace.clone()).with_batching(batching).with_clock(clock.clone());
        let store = Arc::new(FdbStore::with_database(self.database.clone(), config).await?);
        let status = self.status().await?;
        let told = |what: &str| status["cluster"]["configuration"][what].as_str().unwrap_or("unknown").to_owned();
        let durability = format!("redundancy {}, engine {}", told("redundancy_mode"), told("storage_engine"));
        Ok(Open { store, durability, subspace, clock })
    }

    /// The floor.
    pub(crate) fn floor(&self) -> Arc<dyn Subject> {
        Arc::new(Transactions { database: self.database.clone(), subspace: subspace(&schema()) })
    }

    /// Takes out what the floor has left.
    pub(crate) async fn remove_floor(&self) -> Result<(), Failed> {
        clear(&self.database, &subspace(&schema())).await
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("own", &self.own).finish_non_exhaustive()
    }
}

/// The machine's clock, moved on.
#[derive(Debug, Default)]
struct Ahead(AtomicU64);

impl Clock for Ahead {
    fn now(&self) -> SystemTime {
        SystemClock.now() + Duration::from_secs(self.0.load(Ordering::Relaxed))
    }
}

/// An open store, and what is needed to end its days.
#[derive(Debug, Clone)]
pub struct Open {
    pub(crate) store: Arc<FdbStore>,
    pub(crate) durability: String,
    subspace: Subspace,
    clock: Arc<Ahead>,
}

impl Open {
    /// Moves the store's clock on.
    pub(crate) fn move_on(&self, time: Duration) {
        self.clock.0.fetch_add(time.as_secs(), Ordering::Relaxed);
    }

    /// The first key, which is of the first record of the oldest day.
    pub(crate) async fn first(&self) -> Result<Option<Vec<u8>>, Failed> {
        let range = &RangeOption { limit: Some(1), ..RangeOption::from(&self.subspace) };
        let read = |transaction: RetryableTransaction| async move {
            let found = transaction.get_range(range, 1, true).await?;
            Ok(found.first().map(|first| first.key().to_vec()))
        };
        run(self.store.database(), read).await
    }

    /// Takes all its records out of the cluster.
    pub(crate) async fn remove(&self) -> Result<(), Failed> {
        clear(self.store.database(), &self.subspace).await
    }
}

/// Transactions of a get and a set, by the driver's retry loop.
struct Transactions {
    database: Arc<Database>,
    subspace: Subspace,
}

impl Transactions {
    /// The key of a body's piece of that number; the first is also that of what is in progress.
    fn place(&self, id: &str, piece: usize) -> Vec<u8> {
        self.subspace.pack(&(id, piece as u64))
    }

    /// Which of these are new, and have been taken.
    async fn take(&self, ids: &[&str]) -> Result<usize, Failed> {
        let places = &ids.iter().map(|id| self.place(id, 0)).collect::<Vec<_>>();
        let take = |transaction: RetryableTransaction| async move {
            let (mut asked, mut taken) = (Vec::with_capacity(places.len()), 0);
            // All at once.
            asked.extend(places.iter().map(|place| transaction.get(place, false)));
            for (place, found) in places.iter().zip(asked) {
                if found.await?.is_none() {
                    transaction.set(place, HELD);
                    taken += 1;
                }
            }
            Ok::<usize, FdbBindingError>(taken)
        };
        run(&self.database, take).await
    }

    async fn put(&self, ids: &[&str], body: &Bytes) -> Result<(), Failed> {
        let put = |transaction: RetryableTransaction| async move {
            let mut asked = Vec::with_capacity(ids.len());
            asked.extend(ids.iter().map(|id| transaction.get(&self.place(id, 0), false)));
            let mut held = 0;
            for (id, found) in ids.iter().zip(asked) {
                if found.await?.is_some_and(|found| *found == *HELD) {
                    for (number, piece) in body.chunks(PIECE).enumerate() {
                        transaction.set(&self.place(id, number), piece);
                    }
                    held += 1;
                }
            }
            Ok::<usize, FdbBindingError>(held)
        };
        if run(&self.database, put).await? == ids.len() { Ok(()) } else { Err(wrong("lost")) }
    }
}

#[async_trait]
impl Subject for Transactions {
    async fn run(&self, id: &str, body: &Bytes) -> Result<(), Failed> {
        self.hold(id).await?;
        self.put(&[id], body).await
    }

    async fn hold(&self, id: &str) -> Result<(), Failed> {
        if self.take(&[id]).await? == 1 { Ok(()) } else { Err(wrong("not new")) }
    }

    async fn replay(&self, id: &str, body: &Bytes) -> Result<(), Failed> {
        let pieces = body.len().div_ceil(PIECE).max(1);
        let read = |transaction: RetryableTransaction| async move {
            let mut asked = Vec::with_capacity(pieces);
            asked.extend((0..pieces).map(|number| transaction.get(&self.place(id, number), false)));
            let mut found = Vec::with_capacity(body.len());
            for piece in asked {
                found.extend_from_slice(piece.await?.as_deref().unwrap_or_default());
            }
            Ok::<_, FdbBindingError>(found)
        };
        if run(&self.database, read).await? == *body { Ok(()) } else { Err(wrong("another body")) }
    }

    async fn refuse(&self, id: &str) -> Result<(), Failed> {
        if self.take(&[id]).await? == 0 { Ok(()) } else { Err(wrong("taken twice")) }
    }

    async fn mismatch(&self, _: &str) -> Option<Result<(), Failed>> {
        None
    }

    async fn race(&self, id: &str, body: &Bytes) -> Result<bool, Failed> {
        let won = self.take(&[id]).await? == 1;
        if won {
            self.put(&[id], body).await?;
        }
        Ok(won)
    }

    async fn run_many(&self, ids: &[String], body: &Bytes) -> Option<Result<(), Failed>> {
        let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
        let run = async {
            if self.take(&ids).await? != ids.len() {
                return Err(wrong("not all are new"));
            }
            self.put(&ids, body).await
        };
        Some(run.await)
    }

    async fn make_short(&self, _: &[String], _: Duration) -> Result<(), Failed> {
        Ok(())
    }

    async fn purge(&self) -> Option<Result<u64, Failed>> {
        None
    }
}
