//! R1: many callers at once. R2: what they are told.

use std::sync::Arc;

use idem_core::{ErrorKind, Failure, Key, KeyStore, OnAbandoned, Origin, Outcome, Reservation, Reserve, StoreError};
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use super::cases;
use crate::context::{Ctx, refusing};
use crate::verdict::{Failed, Verdict, ensure, ensure_eq, ensure_is};

cases! {
    R1 r01_exactly_one_of_many_callers_acquires_an_absent_key;
    R1 r01_exactly_one_of_many_callers_takes_an_abandoned_key_over;
    R1 r01_exactly_one_of_many_callers_retries_a_failed_key;
    R1 r01_exactly_one_of_many_callers_acquires_an_expired_key;
    R1 r01_one_attempt_at_a_time_while_attempts_fail [once];
    R2 r02_a_duplicate_is_an_answer_and_never_an_error;
    R2 r02_every_caller_of_a_completed_key_gets_the_outcome;
}

const CALLERS: usize = 32;
const ROUNDS: usize = 8;

/// Sends all requests at once, each from a task of its own.
async fn race(ctx: &Ctx, requests: Vec<Reserve>) -> Verdict<Vec<Result<Reservation, StoreError>>> {
    let barrier = Arc::new(Barrier::new(requests.len()));
    let mut tasks = JoinSet::new();
    for request in requests {
        let (store, barrier) = (ctx.store.clone(), barrier.clone());
        tasks.spawn(async move {
            barrier.wait().await;
            store.reserve(&request).await
        });
    }
    Ok(tasks.join_all().await)
}

/// Races for the key and wants one winner, of that attempt, and all others told that it is in progress.
async fn one_winner(ctx: &Ctx, key: &Key, attempt: u32, origin: impl Fn(Origin) -> bool) -> Verdict {
    let requests = (0..CALLERS).map(|_| ctx.request(key)).collect();
    let mut winners = Vec::new();
    for answer in race(ctx, requests).await? {
        match answer? {
            Reservation::Acquired(lease) => winners.push(lease),
            Reservation::InProgress { attempt: holder, .. } => ensure_eq!(holder, attempt, "the attempt in progress"),
            other => return Err(Failed::Broken(format!("a caller in a race was told {other:?}"))),
        }
    }
    ensure_eq!(winners.len(), 1, "winners among {CALLERS} callers of one key");
    ensure!(
        winners.iter().all(|lease| lease.attempt == attempt && origin(lease.origin)),
        "the winner is attempt {attempt} of the right origin: {winners:?}"
    );
    Ok(())
}

async fn r01_exactly_one_of_many_callers_acquires_an_absent_key(ctx: &Ctx) -> Verdict {
    for round in 0..ROUNDS {
        one_winner(ctx, &ctx.key(&format!("absent-{round}"))?, 1, |origin| origin == Origin::Fresh).await?;
    }
    Ok(())
}

async fn r01_exactly_one_of_many_callers_takes_an_abandoned_key_over(ctx: &Ctx) -> Verdict {
    let keys: Vec<Key> = (0..ROUNDS).map(|round| ctx.key(&format!("abandoned-{round}"))).collect::<Verdict<_>>()?;
    for key in &keys {
        ctx.acquire(key).await?;
    }
    ctx.pass_until(ctx.now(), ctx.scale.lease).await?;
    for key in &keys {
        one_winner(ctx, key, 2, |origin| matches!(origin, Origin::Takeover(previous) if previous.attempt == 1)).await?;
    }
    Ok(())
}

async fn r01_exactly_one_of_many_callers_retries_a_failed_key(ctx: &Ctx) -> Verdict {
    for round in 0..ROUNDS {
        let key = ctx.key(&format!("failed-{round}"))?;
        ctx.failed(&key).await?;
        one_winner(ctx, &key, 2, |origin| origin == Origin::Retry).await?;
    }
    Ok(())
}

async fn r01_exactly_one_of_many_callers_acquires_an_expired_key(ctx: &Ctx) -> Verdict {
    let keys: Vec<Key> = (0..ROUNDS).map(|round| ctx.key(&format!("expired-{round}"))).collect::<Verdict<_>>()?;
    for key in &keys {
        ctx.completed(key, &Outcome::new(200, "old")).await?;
    }
    ctx.pass_until(ctx.now(), ctx.scale.retention).await?;
    for key in &keys {
        one_winner(ctx, key, 1, |origin| origin == Origin::Fresh).await?;
    }
    Ok(())
}

/// Workers that fail and are retried: never two at once, and every acquire is a new attempt.
async fn r01_one_attempt_at_a_time_while_attempts_fail(ctx: &Ctx) -> Verdict {
    use std::sync::atomic::{AtomicUsize, Ordering};

    let key = ctx.key("contended")?;
    let running = Arc::new(AtomicUsize::new(0));
    let began = ctx.now();
    let mut tasks = JoinSet::new();
    for _ in 0..8 {
        let (store, running, request) = (ctx.store.clone(), running.clone(), ctx.request(&key));
        tasks.spawn(async move {
            let mut attempts = Vec::new();
            for _ in 0..20 {
                let request =
                    Reserve::new(request.key.clone()).with_lease(request.lease).with_retention(request.retention);
                if let Reservation::Acquired(lease) = store.reserve(&request).await? {
                    let others = running.fetch_add(1, Ordering::SeqCst);
                    tokio::task::yield_now().await;
                    running.fetch_sub(1, Ordering::SeqCst);
                    attempts.push((lease.attempt, others));
                    match store.fail(&lease, &Failure::default()).await {
                        // The reply of the first delivery was lost, and another attempt has begun since.
                        Err(error) if error.kind() == ErrorKind::LeaseLost => {}
                        answer => answer?,
                    }
                }
                tokio::task::yield_now().await;
            }
            Ok::<_, StoreError>(attempts)
        });
    }
    let mut attempts = Vec::new();
    for part in tasks.join_all().await {
        attempts.extend(part?);
    }
    ctx.in_time(began, ctx.scale.lease)?;
    ensure!(attempts.iter().all(|(_, others)| *others == 0), "two attempts held the key at once: {attempts:?}");
    attempts.sort_unstable();
    let numbers: Vec<u32> = attempts.iter().map(|(attempt, _)| *attempt).collect();
    let expected: Vec<u32> = (1..=u32::try_from(numbers.len()).unwrap_or(u32::MAX)).collect();
    ensure_eq!(numbers, expected, "the numbers of the attempts");
    Ok(())
}

async fn r02_a_duplicate_is_an_answer_and_never_an_error(ctx: &Ctx) -> Verdict {
    let (held, done, gone) = (ctx.key("held")?, ctx.key("done")?, ctx.key("gone")?);
    let began = ctx.now();
    ctx.acquire(&held).await?;
    ctx.completed(&done, &Outcome::new(200, "done")).await?;
    ctx.refused(&held).await?;
    ctx.in_time(began, ctx.scale.lease)?;
    ctx.replay(&done).await?;
    let lease = ctx.abandoned(&gone).await?;
    let answer = ctx.reserve(&refusing(ctx.request(&gone))).await?;
    let record = ensure_is!(answer, Reservation::Abandoned(record) => record, "an abandoned key under {:?}", OnAbandoned::Refuse);
    ensure_eq!(record.lease(), lease, "the handle of the abandoned attempt");
    Ok(())
}

async fn r02_every_caller_of_a_completed_key_gets_the_outcome(ctx: &Ctx) -> Verdict {
    let key = ctx.key("popular")?;
    let outcome = Outcome::new(201, "the one result").with_header("location", "/charges/1");
    ctx.completed(&key, &outcome).await?;
    for answer in race(ctx, (0..CALLERS).map(|_| ctx.request(&key)).collect()).await? {
        let record = ensure_is!(answer?, Reservation::Completed(record) => record, "a completed key");
        ensure_eq!(record.outcome(), Some(&outcome), "the outcome replayed");
    }
    Ok(())
}
