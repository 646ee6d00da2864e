//! Records that are there before the run.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use idem_core::{KeyStore, Reservation, Reserve};

use super::effects::{Effects, preloaded_tag};
use super::run::{LEASE, RETENTION};
use crate::Failed;

const BATCH: u64 = 500;
const TASKS: usize = 8;

/// Makes the preloaded records of that table, and says after each batch how many there are.
///
/// # Errors
/// The store's trouble, or a wrong answer.
pub async fn preload(
    store: &Arc<dyn KeyStore>,
    effects: &Arc<Effects>,
    done: impl Fn(u64) + Clone + Send + 'static,
) -> Result<(), Failed> {
    let (taken, made) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let tasks: Vec<_> = (0..TASKS)
        .map(|_| {
            let (store, effects, taken, made, done) =
                (store.clone(), effects.clone(), taken.clone(), made.clone(), done.clone());
            tokio::spawn(async move {
                loop {
                    let from = taken.fetch_add(BATCH, Ordering::Relaxed);
                    let to = (from + BATCH).min(effects.preloaded());
                    if from >= to {
                        return Ok::<(), Failed>(());
                    }
                    batch(&*store, &effects, from..to).await?;
                    done(made.fetch_add(to - from, Ordering::Relaxed) + to - from);
                }
            })
        })
        .collect();
    for task in tasks {
        task.await??;
    }
    Ok(())
}

async fn batch(store: &dyn KeyStore, effects: &Effects, numbers: std::ops::Range<u64>) -> Result<(), Failed> {
    let mut requests = Vec::with_capacity(BATCH as usize);
    for number in numbers.clone() {
        requests.push(request(effects, number)?);
    }
    let mut calls = Vec::with_capacity(requests.len());
    for (number, answer) in numbers.zip(store.reserve_many(&requests).await) {
        match answer? {
            Reservation::Acquired(lease) => calls.push((lease, effects.outcome(number, preloaded_tag(number)))),
            other => return Err(format!("a new key was not acquired: {other:?}").into()),
        }
    }
    if calls.len() != requests.len() {
        return Err("a batch has fewer answers than calls".into());
    }
    for answer in store.complete_many(&calls).await {
        answer?;
    }
    Ok(())
}

/// The request for that key.
pub(crate) fn request(effects: &Effects, number: u64) -> Result<Reserve, Failed> {
    Ok(Reserve::new(effects.key(number)?)
        .with_fingerprint(effects.fingerprint())
        .with_lease(LEASE)
        .with_retention(RETENTION))
}
