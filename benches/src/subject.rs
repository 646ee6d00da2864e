//! What a workload asks of that which it measures: a store, or a floor beside it. Every answer is checked.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use idem_core::{Body, Fingerprint, Key, KeyStore, Outcome, PurgeBudget, Reservation, Reserve};

use crate::Failed;

/// The scope of all keys.
const SCOPE: &str = "bench";

/// Something that makes an operation take effect once, by whatever means.
#[async_trait]
pub trait Subject: Send + Sync + 'static {
    /// A first run: takes the key, and stores the result.
    async fn run(&self, id: &str, body: &Bytes) -> Result<(), Failed>;

    /// Takes the key, and leaves it in progress.
    async fn hold(&self, id: &str) -> Result<(), Failed>;

    /// A repeat of what is done: gets the result back.
    async fn replay(&self, id: &str, body: &Bytes) -> Result<(), Failed>;

    /// A repeat of what is in progress: is refused.
    async fn refuse(&self, id: &str) -> Result<(), Failed>;

    /// The key of another request: is told so. `None` where the subject has no such notion.
    async fn mismatch(&self, id: &str) -> Option<Result<(), Failed>>;

    /// One of many callers of a key: whether this one has run.
    async fn race(&self, id: &str, body: &Bytes) -> Result<bool, Failed>;

    /// First runs of many keys together. `None` where the subject has no way to do that.
    async fn run_many(&self, ids: &[String], body: &Bytes) -> Option<Result<(), Failed>>;

    /// Makes records that live for so long, and are to be purged.
    async fn make_short(&self, ids: &[String], life: Duration) -> Result<(), Failed>;

    /// Removes all that has expired, and tells how many that were. `None` where that is not done record by record.
    async fn purge(&self) -> Option<Result<u64, Failed>>;
}

/// A store of the project.
#[derive(Debug)]
pub struct Store {
    store: Arc<dyn KeyStore>,
    fingerprint: Fingerprint,
    other: Fingerprint,
}

impl Store {
    /// A subject of that store.
    #[must_use]
    pub fn new(store: Arc<dyn KeyStore>) -> Self {
        Self { store, fingerprint: Fingerprint::of("POST /charges"), other: Fingerprint::of("POST /refunds") }
    }

    fn request(&self, id: &str) -> Result<Reserve, Failed> {
        Ok(Reserve::new(Key::new(SCOPE, id)?).with_fingerprint(self.fingerprint))
    }
}

/// An answer that no correct store gives.
fn wrong(wanted: &str, answer: &Reservation) -> Failed {
    format!("a wrong answer, not {wanted}: {answer:?}").into()
}

/// Checks that an answer is a replay of that body.
fn is_replay(answer: &Reservation, body: &Bytes) -> Result<(), Failed> {
    match answer {
        Reservation::Completed(record)
            if record.outcome().is_some_and(|o| o.code == CODE && matches!(&o.body, Body::Stored(b) if b == body)) =>
        {
            Ok(())
        }
        other => Err(wrong("a replay of the very outcome", other)),
    }
}

const CODE: u16 = 201;

fn outcome(body: &Bytes) -> Outcome {
    Outcome::new(CODE, body.clone())
}

#[async_trait]
impl Subject for Store {
    async fn run(&self, id: &str, body: &Bytes) -> Result<(), Failed> {
        match self.store.reserve(&self.request(id)?).await? {
            Reservation::Acquired(lease) if lease.attempt == 1 => {
                Ok(self.store.complete(&lease, &outcome(body)).await?)
            }
            other => Err(wrong("a first run", &other)),
        }
    }

    async fn hold(&self, id: &str) -> Result<(), Failed> {
        match self.store.reserve(&self.request(id)?).await? {
            Reservation::Acquired(_) => Ok(()),
            other => Err(wrong("a first run", &other)),
        }
    }

    async fn replay(&self, id: &str, body: &Bytes) -> Result<(), Failed> {
        is_replay(&self.store.reserve(&self.request(id)?).await?, body)
    }

    async fn refuse(&self, id: &str) -> Result<(), Failed> {
        match self.store.reserve(&self.request(id)?).await? {
            Reservation::InProgress { attempt: 1, retry_after } if retry_after > Duration::ZERO => Ok(()),
            other => Err(wrong("in progress", &other)),
        }
    }

    async fn mismatch(&self, id: &str) -> Option<Result<(), Failed>> {
        let ask = async {
            let request = self.request(id)?.with_fingerprint(self.other);
            match self.store.reserve(&request).await? {
                Reservation::Mismatch => Ok(()),
                other => Err(wrong("a mismatch", &other)),
            }
        };
        Some(ask.await)
    }

    async fn race(&self, id: &str, body: &Bytes) -> Result<bool, Failed> {
        match self.store.reserve(&self.request(id)?).await? {
            Reservation::Acquired(lease) => {
                self.store.complete(&lease, &outcome(body)).await?;
                Ok(true)
            }
            Reservation::InProgress { .. } => Ok(false),
            completed => is_replay(&completed, body).map(|()| false),
        }
    }

    async fn run_many(&self, ids: &[String], body: &Bytes) -> Option<Result<(), Failed>> {
        let run = async {
            let requests = ids.iter().map(|id| self.request(id)).collect::<Result<Vec<_>, _>>()?;
            let mut calls = Vec::with_capacity(ids.len());
            for answer in self.store.reserve_many(&requests).await {
                match answer? {
                    Reservation::Acquired(lease) => calls.push((lease, outcome(body))),
                    other => return Err(wrong("a first run", &other)),
                }
            }
            let mut done = 0;
            for answer in self.store.complete_many(&calls).await {
                answer?;
                done += 1;
            }
            if done == ids.len() { Ok(()) } else { Err(format!("{done} of {} are done", ids.len()).into()) }
        };
        Some(run.await)
    }

    async fn make_short(&self, ids: &[String], life: Duration) -> Result<(), Failed> {
        for id in ids {
            self.store.reserve(&self.request(id)?.with_lease(life).with_retention(life)).await?;
        }
        Ok(())
    }

    async fn purge(&self) -> Option<Result<u64, Failed>> {
        if !self.store.capabilities().purges {
            return None;
        }
        let purge = async {
            let mut removed = 0;
            loop {
                let purged = self.store.purge_expired(PurgeBudget::default()).await?;
                removed += purged.removed;
                if !purged.more {
                    return Ok(removed);
                }
            }
        };
        Some(purge.await)
    }
}
