//! The named workloads, the same for every backend and every floor.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::Barrier;

use crate::subject::Subject;
use crate::{Failed, id, is_smoke};

/// Callers where many are asked for.
const MANY: usize = 64;
/// Keys that repeats are made of.
const REPEATED: u64 = 256;
/// Records that one purge takes away.
pub const PURGED: usize = 1_000;
/// Keys of a batch.
pub const BATCH: usize = 500;
/// How long records live that are to be purged. It takes less to make them.
const SHORT: Duration = Duration::from_millis(400);

/// What is done in a workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    FirstRun { body: usize },
    Replay { body: usize },
    InFlight,
    HotKey,
    Mismatch,
    Batch,
    Purge,
}

/// A workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Workload {
    /// Its name.
    pub name: &'static str,
    /// What one iteration is.
    pub unit: &'static str,
    callers: usize,
    what: What,
}

/// All workloads, in the order of the tables.
pub const WORKLOADS: &[Workload] = &[
    Workload { name: "first run", unit: "pair", callers: 1, what: What::FirstRun { body: 256 } },
    Workload { name: "first run, 64 callers", unit: "pair", callers: MANY, what: What::FirstRun { body: 256 } },
    Workload { name: "first run, 1 KiB", unit: "pair", callers: 1, what: What::FirstRun { body: 1 << 10 } },
    Workload { name: "first run, 16 KiB", unit: "pair", callers: 1, what: What::FirstRun { body: 16 << 10 } },
    Workload { name: "first run, 256 KiB", unit: "pair", callers: 1, what: What::FirstRun { body: 256 << 10 } },
    Workload { name: "replay", unit: "replay", callers: 1, what: What::Replay { body: 256 } },
    Workload { name: "replay, 64 callers", unit: "replay", callers: MANY, what: What::Replay { body: 256 } },
    Workload { name: "replay, 256 KiB", unit: "replay", callers: 1, what: What::Replay { body: 256 << 10 } },
    Workload { name: "in flight", unit: "refusal", callers: 1, what: What::InFlight },
    Workload { name: "hot key, 64 callers", unit: "round", callers: MANY, what: What::HotKey },
    Workload { name: "mismatch", unit: "refusal", callers: 1, what: What::Mismatch },
    Workload { name: "batch of 500", unit: "batch", callers: 1, what: What::Batch },
    Workload { name: "purge of 1,000", unit: "purge", callers: 1, what: What::Purge },
];

/// A number that no key of this process has yet.
pub fn next() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// A body of that size, with no pattern that could be compressed.
#[must_use]
pub fn body(size: usize) -> Bytes {
    let mut x = 0x9e37_79b9_7f4a_7c15_u64;
    let byte = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x.to_le_bytes()[0]
    };
    std::iter::repeat_with(byte).take(size).collect()
}

/// A workload that is prepared for a subject.
#[allow(missing_debug_implementations, reason = "a subject has none")]
pub struct Prepared {
    workload: Workload,
    subject: Arc<dyn Subject>,
    body: Bytes,
    ids: Arc<[String]>,
}

impl Workload {
    /// Prepares it. `None` where the subject has no such thing.
    ///
    /// # Errors
    /// The server's trouble, or a wrong answer.
    pub async fn prepare(&self, subject: Arc<dyn Subject>) -> Result<Option<Prepared>, Failed> {
        let size = match self.what {
            What::FirstRun { body } | What::Replay { body } => body,
            _ => 256,
        };
        let body = body(size);
        let mut ids = Vec::new();
        if matches!(self.what, What::Replay { .. } | What::InFlight | What::Mismatch) {
            // A cache of megabytes holds few of the large ones.
            let count = if size > 4_096 || is_smoke() { REPEATED / 16 } else { REPEATED };
            for _ in 0..count {
                let id = id(next());
                match self.what {
                    What::InFlight => subject.hold(&id).await?,
                    _ => subject.run(&id, &body).await?,
                }
                ids.push(id);
            }
        }
        let prepared = Prepared { workload: *self, subject, body, ids: ids.into() };
        // Also whether there is such a thing.
        Ok(prepared.time(1).await?.map(|_| prepared))
    }
}

impl Prepared {
    /// How long so many iterations take. `None` where the subject has no such thing.
    ///
    /// # Errors
    /// The server's trouble, or a wrong answer.
    pub async fn time(&self, iterations: u64) -> Result<Option<Duration>, Failed> {
        let subject = &self.subject;
        let begun = Instant::now();
        match self.workload.what {
            What::HotKey => return self.hot_keys(iterations).await.map(Some),
            What::Purge => return self.purge(iterations).await,
            What::Batch => {
                let ids: Vec<Vec<String>> = (0..iterations).map(|_| (0..BATCH).map(|_| id(next())).collect()).collect();
                let begun = Instant::now();
                for ids in &ids {
                    match subject.run_many(ids, &self.body).await {
                        Some(result) => result?,
                        None => return Ok(None),
                    }
                }
                return Ok(Some(begun.elapsed()));
            }
            What::Mismatch => {
                for (_, id) in (0..iterations).zip(self.ids.iter().cycle()) {
                    match subject.mismatch(id).await {
                        Some(result) => result?,
                        None => return Ok(None),
                    }
                }
            }
            What::FirstRun { .. } | What::Replay { .. } | What::InFlight => {
                if self.workload.callers == 1 {
                    for number in 0..iterations {
                        once(self.workload.what, &**subject, &self.ids, &self.body, number).await?;
                    }
                } else {
                    self.by_many(iterations).await?;
                }
            }
        }
        Ok(Some(begun.elapsed()))
    }

    async fn by_many(&self, iterations: u64) -> Result<(), Failed> {
        let taken = Arc::new(AtomicU64::new(0));
        let tasks: Vec<_> = (0..self.workload.callers)
            .map(|_| {
                let (what, subject, taken) = (self.workload.what, self.subject.clone(), taken.clone());
                let (ids, body) = (self.ids.clone(), self.body.clone());
                tokio::spawn(async move {
                    loop {
                        let number = taken.fetch_add(1, Ordering::Relaxed);
                        if number >= iterations {
                            return Ok::<(), Failed>(());
                        }
                        once(what, &*subject, &ids, &body, number).await?;
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await??;
        }
        Ok(())
    }

    /// Rounds in which many callers want one new key at once, and one gets it.
    async fn hot_keys(&self, rounds: u64) -> Result<Duration, Failed> {
        let (callers, first) = (self.workload.callers, next());
        let barrier = Arc::new(Barrier::new(callers));
        let wins: Arc<[AtomicU64]> = (0..rounds).map(|_| AtomicU64::new(0)).collect();
        let begun = Instant::now();
        let tasks: Vec<_> = (0..callers)
            .map(|_| {
                let (subject, body, barrier, wins) =
                    (self.subject.clone(), self.body.clone(), barrier.clone(), wins.clone());
                tokio::spawn(async move {
                    let mut result = Ok(());
                    for (round, wins) in wins.iter().enumerate() {
                        barrier.wait().await;
                        // The others wait at the barrier, whatever happens to this one.
                        match subject.race(&format!("hot-{first}-{round}"), &body).await {
                            Ok(won) => {
                                wins.fetch_add(u64::from(won), Ordering::Relaxed);
                            }
                            Err(error) => result = Err(error),
                        }
                    }
                    result
                })
            })
            .collect();
        for task in tasks {
            task.await??;
        }
        let time = begun.elapsed();
        match wins.iter().map(|wins| wins.load(Ordering::Relaxed)).find(|wins| *wins != 1) {
            None => Ok(time),
            Some(wins) => Err(format!("of {callers} callers of one key, {wins} have run").into()),
        }
    }

    async fn purge(&self, iterations: u64) -> Result<Option<Duration>, Failed> {
        let mut time = Duration::ZERO;
        // What earlier calls have left.
        let mut left = match self.subject.purge().await {
            None => return Ok(None),
            Some(_) => iterations,
        };
        while left > 0 {
            let purges = left.min(32);
            let ids: Vec<String> = (0..purges * PURGED as u64).map(|_| id(next())).collect();
            let made = Instant::now();
            self.subject.make_short(&ids, SHORT).await?;
            // Those that expire meanwhile would be taken away before the clock runs.
            if made.elapsed() >= SHORT {
                return Err(format!("it took {:?} to make {} records", made.elapsed(), ids.len()).into());
            }
            tokio::time::sleep(SHORT + Duration::from_millis(10)).await;
            let begun = Instant::now();
            let removed = self.subject.purge().await.transpose()?;
            time += begun.elapsed();
            if removed != Some(ids.len() as u64) {
                return Err(format!("of {} expired records, {removed:?} were purged", ids.len()).into());
            }
            left -= purges;
        }
        Ok(Some(time))
    }
}

async fn once(what: What, subject: &dyn Subject, ids: &[String], body: &Bytes, number: u64) -> Result<(), Failed> {
    let repeated = || ids.get(number as usize % ids.len().max(1)).map_or("", String::as_str);
    match what {
        What::FirstRun { .. } => subject.run(&id(next()), body).await,
        What::Replay { .. } => subject.replay(repeated(), body).await,
        _ => subject.refuse(repeated()).await,
    }
}
