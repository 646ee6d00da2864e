//! R6: complete, fail and renew act for the holder alone. R8: what fail leaves behind.

use std::future::Future;
use std::sync::Arc;

use idem_core::{ErrorKind, Key, KeyStore, Lease, Origin, Outcome, Record, Reservation, State, StoreError};
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use super::cases;
use super::repeats::timeless;
use crate::context::{Ctx, expect_error, note, stranger};
use crate::verdict::{Verdict, ensure, ensure_eq, ensure_is};

cases! {
    R6 r06_complete_after_a_takeover_is_refused;
    R6 r06_fail_after_a_takeover_is_refused;
    R6 r06_renew_after_a_takeover_does_not_take_the_key_back;
    R6 r06_a_foreign_token_changes_nothing;
    R6 r06_calls_under_a_lease_on_an_absent_key_are_refused;
    R6 r06_a_late_complete_that_nobody_overtook_is_kept;
    R6 r06_a_late_fail_that_nobody_overtook_counts;
    R6 r06_a_late_renew_that_nobody_overtook_revives_the_lease;
    R6 r06_renew_never_shortens_a_lease;
    R6 r06_after_a_fail_the_attempt_is_over;
    R6 r06_after_a_complete_the_attempt_is_over;
    R6 r06_the_attempt_grows_with_every_acquire;
    R6 r06_a_late_complete_and_a_takeover_exclude_each_other;
    R6 r06_a_late_renew_and_a_takeover_exclude_each_other;
    R8 r08_fail_frees_the_key_for_a_retry_at_once;
    R8 r08_fail_keeps_note_attempt_and_fingerprint;
}

/// Wants all three calls refused and the record untouched.
async fn powerless(ctx: &Ctx, lease: &Lease, kind: ErrorKind, what: &str) -> Verdict {
    let before = ctx.store.fetch(&lease.key).await?.as_ref().map(timeless);
    expect_error(ctx.store.complete(lease, &Outcome::new(500, "intruder")).await, kind, &format!("complete {what}"))?;
    expect_error(ctx.store.fail(lease, &note("intruder")?).await, kind, &format!("fail {what}"))?;
    expect_error(ctx.store.renew(lease, ctx.scale.lease).await, kind, &format!("renew {what}"))?;
    let after = ctx.store.fetch(&lease.key).await?.as_ref().map(timeless);
    ensure_eq!(after, before, "the record after calls {what}");
    Ok(())
}

async fn taken_over(ctx: &Ctx, key: &Key) -> Verdict<(Lease, Lease)> {
    let lost = ctx.abandoned(key).await?;
    Ok((lost, ctx.acquire(key).await?))
}

async fn r06_complete_after_a_takeover_is_refused(ctx: &Ctx) -> Verdict {
    let key = ctx.key("k")?;
    let (lost, held) = taken_over(ctx, &key).await?;
    expect_error(
        ctx.store.complete(&lost, &Outcome::new(200, "late")).await,
        ErrorKind::LeaseLost,
        "a complete after a takeover",
    )?;
    ctx.store.complete(&held, &Outcome::new(200, "current")).await?;
    // Also with the very outcome that is stored: it is another attempt's.
    expect_error(
        ctx.store.complete(&lost, &Outcome::new(200, "current")).await,
        ErrorKind::LeaseLost,
        "a complete after a takeover",
    )?;
    ensure_eq!(ctx.replay(&key).await?.outcome(), Some(&Outcome::new(200, "current")), "the outcome");
    Ok(())
}

async fn r06_fail_after_a_takeover_is_refused(ctx: &Ctx) -> Verdict {
    let key = ctx.key("k")?;
    let (lost, held) = taken_over(ctx, &key).await?;
    expect_error(ctx.store.fail(&lost, &note("late")?).await, ErrorKind::LeaseLost, "a fail after a takeover")?;
    ctx.refused(&key).await?;
    ctx.store.complete(&held, &Outcome::new(200, "current")).await?;
    expect_error(ctx.store.fail(&lost, &note("late")?).await, ErrorKind::LeaseLost, "a fail after a takeover")?;
    ctx.replay(&key).await?;
    Ok(())
}

async fn r06_renew_after_a_takeover_does_not_take_the_key_back(ctx: &Ctx) -> Verdict {
    let key = ctx.key("k")?;
    let (lost, held) = taken_over(ctx, &key).await?;
    let before = ctx.record(&key).await?;
    expect_error(ctx.store.renew(&lost, ctx.scale.lease).await, ErrorKind::LeaseLost, "a renewal after a takeover")?;
    ensure_eq!(timeless(&ctx.record(&key).await?), timeless(&before), "the record after a late renewal");
    ctx.store.complete(&held, &Outcome::new(200, "current")).await?;
    Ok(())
}

async fn r06_a_foreign_token_changes_nothing(ctx: &Ctx) -> Verdict {
    let (held, done, failed) = (ctx.key("held")?, ctx.key("done")?, ctx.key("failed")?);
    let leases = [
        ctx.acquire(&held).await?,
        ctx.completed(&done, &Outcome::new(200, "done")).await?,
        ctx.failed(&failed).await?,
    ];
    for lease in &leases {
        powerless(ctx, &stranger(lease), ErrorKind::LeaseLost, "under a foreign token").await?;
    }
    Ok(())
}

async fn r06_calls_under_a_lease_on_an_absent_key_are_refused(ctx: &Ctx) -> Verdict {
    let lease = ctx.acquire(&ctx.key("other")?).await?;
    let absent = Lease::new(ctx.key("absent")?, lease.token, 1, Origin::Fresh, ctx.scale.retention);
    powerless(ctx, &absent, ErrorKind::LeaseLost, "on an absent key").await?;
    ensure_eq!(ctx.store.fetch(&absent.key).await?, None, "a key that nobody reserved");
    Ok(())
}

async fn r06_a_late_complete_that_nobody_overtook_is_kept(ctx: &Ctx) -> Verdict {
    let key = ctx.key("k")?;
    let lease = ctx.abandoned(&key).await?;
    ctx.store.complete(&lease, &Outcome::new(200, "late but mine")).await?;
    ensure_eq!(ctx.replay(&key).await?.outcome(), Some(&Outcome::new(200, "late but mine")), "the outcome");
    Ok(())
}

async fn r06_a_late_fail_that_nobody_overtook_counts(ctx: &Ctx) -> Verdict {
    let key = ctx.key("k")?;
    let lease = ctx.abandoned(&key).await?;
    ctx.store.fail(&lease, &note("late but mine")?).await?;
    let retry = ctx.acquire(&key).await?;
    ensure_eq!((retry.attempt, retry.origin), (2, Origin::Retry), "the attempt after a late fail");
    Ok(())
}

async fn r06_a_late_renew_that_nobody_overtook_revives_the_lease(ctx: &Ctx) -> Verdict {
    let key = ctx.key("k")?;
    let lease = ctx.abandoned(&key).await?;
    let began = ctx.now();
    ctx.store.renew(&lease, ctx.scale.lease).await?;
    let refused = ctx.refused(&key).await;
    ctx.in_time(began, ctx.scale.lease)?;
    refused?;
    ctx.store.complete(&lease, &Outcome::new(200, "")).await?;
    Ok(())
}

async fn r06_renew_never_shortens_a_lease(ctx: &Ctx) -> Verdict {
    let key = ctx.key("k")?;
    let began = ctx.now();
    let lease = ctx.acquire(&key).await?;
    let before = ctx.record(&key).await?.lease_until;
    ctx.store.renew(&lease, ctx.scale.lease / 8).await?;
    let record = ctx.record(&key).await?;
    ensure!(record.lease_until >= before, "the lease's end moved back from {before:?} to {:?}", record.lease_until);
    ctx.pass(ctx.scale.lease / 4).await?;
    let refused = ctx.refused(&key).await;
    ctx.in_time(began, ctx.scale.lease)?;
    refused.map(drop)
}

async fn r06_after_a_fail_the_attempt_is_over(ctx: &Ctx) -> Verdict {
    let key = ctx.key("k")?;
    let lease = ctx.failed(&key).await?;
    powerless(ctx, &lease, ErrorKind::LeaseLost, "after the attempt failed").await?;
    let retry = ctx.acquire(&key).await?;
    powerless(ctx, &lease, ErrorKind::LeaseLost, "after the attempt failed and another began").await?;
    ctx.store.complete(&retry, &Outcome::new(200, "second try")).await?;
    powerless(ctx, &lease, ErrorKind::LeaseLost, "after the attempt failed and another completed").await
}

async fn r06_after_a_complete_the_attempt_is_over(ctx: &Ctx) -> Verdict {
    let key = ctx.key("k")?;
    let lease = ctx.completed(&key, &Outcome::new(200, "first")).await?;
    powerless(ctx, &lease, ErrorKind::AlreadyCompleted, "after the attempt completed").await?;
    ensure_eq!(ctx.replay(&key).await?.outcome(), Some(&Outcome::new(200, "first")), "the outcome");
    Ok(())
}

async fn r06_the_attempt_grows_with_every_acquire(ctx: &Ctx) -> Verdict {
    let key = ctx.key("k")?;
    for round in 1..=3_u32 {
        let taken = ctx.abandoned(&key).await?;
        ensure_eq!(taken.attempt, 2 * round - 1, "the attempt's number");
        let held = ctx.acquire(&key).await?;
        ensure_eq!(held.attempt, 2 * round, "the attempt's number after a takeover");
        ctx.store.fail(&held, &note("again")?).await?;
    }
    ensure_eq!(ctx.record(&key).await?.attempt, 6, "the attempt's number in the record");
    Ok(())
}

/// How many want to take over while the lost attempt makes a late call.
const RIVALS: usize = 3;

/// Attempts whose leases are over, all at the same time: where nobody can move the clock, the case waits once.
async fn abandoned_attempts(ctx: &Ctx) -> Verdict<Vec<Lease>> {
    let mut lost = Vec::new();
    for round in 0..40 {
        let request = ctx.request(&ctx.key(&format!("k{round}"))?);
        lost.push(ctx.acquire_by(&request.with_retention(ctx.long_retention())).await?);
    }
    ctx.pass_until(ctx.now(), ctx.scale.lease).await?;
    Ok(lost)
}

/// A late call of the lost attempt beside reserves of rivals, each from a task of its own: the answer to its call, the
/// lease of the rival who took over, and what the others were told.
async fn late_beside_rivals<F>(
    ctx: &Ctx,
    round: usize,
    lost: &Lease,
    late: impl FnOnce(Arc<dyn KeyStore>, Lease) -> F,
) -> Verdict<(Result<(), StoreError>, Option<Lease>, Vec<Reservation>)>
where
    F: Future<Output = Result<(), StoreError>> + Send + 'static,
{
    let barrier = Arc::new(Barrier::new(RIVALS + 1));
    let (mut call, mut called) = (Some(late(ctx.store.clone(), lost.clone())), JoinSet::new());
    let mut rivals = JoinSet::new();
    // Who comes first to the barrier is not first behind it: every place in turn.
    for place in 0..=RIVALS {
        let here = barrier.clone();
        match call.take_if(|_| place == round % (RIVALS + 1)) {
            Some(call) => drop(called.spawn(async move {
                here.wait().await;
                call.await
            })),
            None => {
                let (store, request) = (ctx.store.clone(), ctx.request(&lost.key));
                rivals.spawn(async move {
                    here.wait().await;
                    store.reserve(&request).await
                });
            }
        }
    }
    let (mut held, mut others) = (None, Vec::new());
    for answer in rivals.join_all().await {
        match answer? {
            Reservation::Acquired(lease) if held.is_none() => held = Some(lease),
            answer => others.push(answer),
        }
    }
    let late = ensure_is!(called.join_all().await.pop(), Some(late) => late, "the late call");
    Ok((late, held, others))
}

async fn r06_a_late_complete_and_a_takeover_exclude_each_other(ctx: &Ctx) -> Verdict {
    for (round, lost) in abandoned_attempts(ctx).await?.iter().enumerate() {
        let outcome = Outcome::new(200, "late but mine");
        let stored = outcome.clone();
        let complete = |store: Arc<dyn KeyStore>, lost: Lease| async move { store.complete(&lost, &stored).await };
        let (late, held, others) = late_beside_rivals(ctx, round, lost, complete).await?;
        let record = ctx.record(&lost.key).await?;
        if let Some(held) = held {
            expect_error(late, ErrorKind::LeaseLost, "a complete beside a takeover that was granted")?;
            ensure_eq!((held.attempt, record.token), (2, held.token), "the attempt granted, and the holder's token");
            ensure_eq!(record.state, State::InProgress, "the state under a takeover that was granted");
            for answer in others {
                ensure_is!(answer, Reservation::InProgress { attempt: 2, .. } => (), "a rival beside a takeover");
            }
        } else {
            late?;
            ensure_eq!(record.token, lost.token, "the token of a late complete that was accepted");
            ensure_eq!(record.outcome(), Some(&outcome), "the outcome of a late complete that was accepted");
            for answer in others {
                ensure_is!(answer, Reservation::Completed(_) => (), "a rival beside a complete that was accepted");
            }
        }
    }
    Ok(())
}

async fn r06_a_late_renew_and_a_takeover_exclude_each_other(ctx: &Ctx) -> Verdict {
    let extend_by = ctx.scale.lease;
    for (round, lost) in abandoned_attempts(ctx).await?.iter().enumerate() {
        let began = ctx.now();
        let renew = |store: Arc<dyn KeyStore>, lost: Lease| async move { store.renew(&lost, extend_by).await };
        let (late, held, others) = late_beside_rivals(ctx, round, lost, renew).await?;
        let holder = ctx.record(&lost.key).await?.token;
        ctx.in_time(began, ctx.scale.lease)?;
        let attempt = if let Some(held) = held {
            expect_error(late, ErrorKind::LeaseLost, "a renewal beside a takeover that was granted")?;
            ensure_eq!((held.attempt, holder), (2, held.token), "the attempt granted, and the holder's token");
            2
        } else {
            late?;
            ensure_eq!(holder, lost.token, "the holder's token after a late renewal that was accepted");
            1
        };
        for answer in others {
            let told =
                ensure_is!(answer, Reservation::InProgress { attempt, .. } => attempt, "a rival that comes too late");
            ensure_eq!(told, attempt, "the attempt that a rival is told of");
        }
    }
    Ok(())
}

async fn r08_fail_frees_the_key_for_a_retry_at_once(ctx: &Ctx) -> Verdict {
    let key = ctx.key("k")?;
    ctx.failed(&key).await?;
    let retry = ctx.acquire(&key).await?;
    ensure_eq!((retry.attempt, retry.origin), (2, Origin::Retry), "the attempt after a failed one");
    ctx.store.complete(&retry, &Outcome::new(200, "second try")).await?;
    ensure_eq!(ctx.replay(&key).await?.outcome(), Some(&Outcome::new(200, "second try")), "the outcome");
    Ok(())
}

async fn r08_fail_keeps_note_attempt_and_fingerprint(ctx: &Ctx) -> Verdict {
    let (print, _) = crate::context::prints();
    let request = ctx.request(&ctx.key("k")?).with_fingerprint(print);
    let lease = ctx.acquire_by(&request).await?;
    ctx.store.fail(&lease, &note("the provider said: 日本 \"no\"\nand hung up")?).await?;
    let record: Record = ctx.record(&request.key).await?;
    let failure = ensure_is!(&record.state, State::Failed(failure) => failure.clone(), "the state of a failed key");
    ensure_eq!(failure.note(), "the provider said: 日本 \"no\"\nand hung up", "the failure note");
    ensure_eq!((record.attempt, record.token), (1, lease.token), "attempt and token of a failed key");
    ensure_eq!(record.fingerprint, Some(print), "the fingerprint of a failed key");
    Ok(())
}
