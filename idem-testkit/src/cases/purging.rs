//! R15: purge removes what has expired and nothing else, and does bounded work.

use idem_core::{Key, KeyStore, Outcome, PurgeBudget, Reservation, StoreError};
use tokio::task::JoinSet;

use super::cases;
use crate::context::{Ctx, prints};
use crate::verdict::{Failed, Verdict, ensure, ensure_eq};

cases! {
    R15 r15_purge_removes_nothing_that_lives;
    R15 r15_purge_removes_what_has_expired_within_its_budget [once];
    R15 r15_purge_spares_the_successor_of_an_expired_record;
    R15 r15_purge_is_safe_beside_everything_else [once];
}

/// Purges until the store says that it is done.
async fn purge_all(ctx: &Ctx, budget: usize) -> Verdict<u64> {
    let mut removed = 0;
    for _ in 0..10_000 {
        let purged = ctx.store.purge_expired(PurgeBudget::records(budget)).await?;
        removed += purged.removed;
        if !purged.more {
            return Ok(removed);
        }
    }
    Err(Failed::Broken("10,000 purges and the store still says that there is more".to_owned()))
}

async fn r15_purge_removes_nothing_that_lives(ctx: &Ctx) -> Verdict {
    let (print, _) = prints();
    let (held, gone, done, failed) = (ctx.key("held")?, ctx.key("gone")?, ctx.key("done")?, ctx.key("failed")?);
    let abandoned = ctx.acquire_by(&ctx.request(&gone).with_fingerprint(print)).await?;
    ctx.completed(&done, &Outcome::new(200, "done")).await?;
    ctx.failed(&failed).await?;
    ctx.pass_until(ctx.now(), ctx.scale.lease).await?;
    let began = ctx.now();
    let lease = ctx.acquire(&held).await?;
    let removed = purge_all(ctx, 1_000).await?;
    // The oldest of these began more than a lease ago.
    ctx.in_time(began, ctx.scale.retention - ctx.scale.lease - ctx.scale.step)?;
    ensure_eq!(removed, 0, "records purged while all live");
    ctx.refused(&held).await?;
    ctx.store.complete(&lease, &Outcome::new(200, "")).await?;
    ctx.replay(&done).await?;
    ensure_eq!(ctx.acquire(&failed).await?.attempt, 2, "the attempt after a failed one, purged in between");
    ensure_eq!(ctx.record(&gone).await?.token, abandoned.token, "the holder of an abandoned record");
    ensure_eq!(ctx.acquire(&gone).await?.attempt, 2, "the attempt after an abandoned one, purged in between");
    ensure_eq!(ctx.record(&gone).await?.fingerprint, Some(print), "the fingerprint of an abandoned record");
    Ok(())
}

async fn r15_purge_removes_what_has_expired_within_its_budget(ctx: &Ctx) -> Verdict {
    const EXPIRED: u64 = 50;
    for at in 0..EXPIRED {
        ctx.completed(&ctx.key(&format!("old-{at}"))?, &Outcome::new(200, "old")).await?;
    }
    ctx.pass_until(ctx.now(), ctx.scale.retention).await?;
    let live: Vec<Key> = (0..20).map(|at| ctx.key(&format!("new-{at}"))).collect::<Verdict<_>>()?;
    for key in &live {
        ctx.completed(key, &Outcome::new(200, "new")).await?;
    }
    if !ctx.store.capabilities().purges {
        ensure_eq!(purge_all(ctx, 7).await?, 0, "records purged by a store that removes them by itself");
        return Ok(());
    }
    let first = ctx.store.purge_expired(PurgeBudget::records(7)).await?;
    ensure!(first.removed <= EXPIRED, "more were purged than had expired: {first:?}");
    ensure!(first.more || first.removed == EXPIRED, "the purge ended before all expired records were gone: {first:?}");
    let removed = first.removed + purge_all(ctx, 7).await?;
    // Some may have been swept by the calls before.
    ensure!(removed <= EXPIRED, "{removed} were purged of {EXPIRED} that had expired");
    ensure_eq!(purge_all(ctx, 7).await?, 0, "records purged when none was left");
    for key in &live {
        ctx.replay(key).await?;
    }
    Ok(())
}

async fn r15_purge_spares_the_successor_of_an_expired_record(ctx: &Ctx) -> Verdict {
    let key = ctx.key("k")?;
    ctx.completed(&key, &Outcome::new(200, "old")).await?;
    ctx.pass_until(ctx.now(), ctx.scale.retention).await?;
    let lease = ctx.acquire(&key).await?;
    purge_all(ctx, 1_000).await?;
    ctx.refused(&key).await?;
    ctx.store.complete(&lease, &Outcome::new(200, "new")).await?;
    purge_all(ctx, 1_000).await?;
    ensure_eq!(ctx.replay(&key).await?.outcome(), Some(&Outcome::new(200, "new")), "the outcome");
    Ok(())
}

async fn r15_purge_is_safe_beside_everything_else(ctx: &Ctx) -> Verdict {
    for at in 0..100 {
        ctx.completed(&ctx.key(&format!("k{at}"))?, &Outcome::new(200, "old")).await?;
    }
    ctx.pass_until(ctx.now(), ctx.scale.retention).await?;
    let began = ctx.now();
    let mut tasks = JoinSet::new();
    for worker in 0..4 {
        let store = ctx.store.clone();
        let requests: Vec<_> =
            (0..100).map(|at| ctx.key(&format!("k{at}")).map(|key| ctx.request(&key))).collect::<Verdict<_>>()?;
        tasks.spawn(async move {
            let mut won = 0_usize;
            for (at, request) in requests.iter().enumerate() {
                if at % 5 == worker {
                    store.purge_expired(PurgeBudget::records(20)).await?;
                }
                if let Reservation::Acquired(lease) = store.reserve(request).await? {
                    store.complete(&lease, &Outcome::new(200, "new")).await?;
                    won += 1;
                }
            }
            Ok::<_, StoreError>(won)
        });
    }
    let mut won = 0;
    for part in tasks.join_all().await {
        won += part?;
    }
    purge_all(ctx, 1_000).await?;
    ctx.in_time(began, ctx.scale.retention)?;
    ensure_eq!(won, 100, "runs of 100 keys by 4 workers beside the purge");
    for at in 0..100 {
        let key = ctx.key(&format!("k{at}"))?;
        ensure_eq!(ctx.replay(&key).await?.outcome(), Some(&Outcome::new(200, "new")), "the outcome of {key:?}");
    }
    Ok(())
}
