//! R5: a lease holds until its end and not beyond. R10: by the store's clock.

use std::time::Duration;

use idem_core::{KeyStore, Origin, Outcome, Reservation};

use super::cases;
use crate::context::{Ctx, note, refusing};
use crate::verdict::{Verdict, ensure, ensure_eq, ensure_is};

cases! {
    R5 r05_a_key_is_refused_until_the_lease_ends;
    R5 r05_a_key_can_be_taken_over_once_the_lease_is_over;
    R5 r05_an_abandoned_key_is_reported_once_the_lease_is_over;
    R5 r05_retry_after_is_what_is_left_of_the_lease;
    R5 r05_a_takeover_tells_the_previous_attempt;
    R5 r05_the_leases_of_retry_and_takeover_count_from_their_acquire;
    R5 r05_a_renewed_lease_holds_until_its_new_end;
    R10 r10_deadlines_follow_the_stores_clock [advance];
}

/// Wants the key refused under both policies.
async fn held(ctx: &Ctx, key: &idem_core::Key) -> Verdict {
    ctx.refused(key).await?;
    let answer = ctx.reserve(&refusing(ctx.request(key))).await?;
    ensure_is!(answer, Reservation::InProgress { .. } => (), "a key whose lease runs, asked for without takeover");
    Ok(())
}

async fn r05_a_key_is_refused_until_the_lease_ends(ctx: &Ctx) -> Verdict {
    let key = ctx.key("k")?;
    let began = ctx.now();
    ctx.acquire(&key).await?;
    held(ctx, &key).await?;
    ctx.pass(ctx.scale.lease - ctx.scale.step).await?;
    let edge = held(ctx, &key).await;
    ctx.in_time(began, ctx.scale.lease)?;
    edge
}

async fn r05_a_key_can_be_taken_over_once_the_lease_is_over(ctx: &Ctx) -> Verdict {
    let key = ctx.key("k")?;
    ctx.abandoned(&key).await?;
    let lease = ctx.acquire(&key).await?;
    ensure_eq!(lease.attempt, 2, "the attempt that took over");
    held(ctx, &key).await
}

async fn r05_an_abandoned_key_is_reported_once_the_lease_is_over(ctx: &Ctx) -> Verdict {
    let key = ctx.key("k")?;
    let lease = ctx.abandoned(&key).await?;
    for _ in 0..2 {
        let answer = ctx.reserve(&refusing(ctx.request(&key))).await?;
        let record = ensure_is!(answer, Reservation::Abandoned(record) => record, "an abandoned key, asked for without takeover");
        ensure_eq!(record.lease(), lease, "the handle of the abandoned attempt");
        ensure_eq!(record.lease_remaining(), Duration::ZERO, "what is left of the lease");
    }
    // A reconciler found out, and says so by the ordinary call.
    ctx.store.complete(&ctx.record(&key).await?.lease(), &Outcome::new(200, "found out")).await?;
    ensure_eq!(ctx.replay(&key).await?.outcome(), Some(&Outcome::new(200, "found out")), "the outcome found out");

    let freed = ctx.key("freed")?;
    let lease = ctx.abandoned(&freed).await?;
    ctx.store.fail(&lease, &note("it never happened")?).await?;
    let retry = ctx.acquire_by(&refusing(ctx.request(&freed))).await?;
    ensure_eq!((retry.attempt, retry.origin), (2, Origin::Retry), "the attempt after the reconciled one");
    Ok(())
}

async fn r05_retry_after_is_what_is_left_of_the_lease(ctx: &Ctx) -> Verdict {
    let key = ctx.key("k")?;
    let began = ctx.now();
    ctx.acquire(&key).await?;
    let first = ctx.refused(&key).await?;
    ctx.pass(ctx.scale.lease / 4).await?;
    let second = ctx.refused(&key).await?;
    ctx.in_time(began, ctx.scale.lease)?;
    ensure!(!first.is_zero() && first <= ctx.scale.lease, "retry_after must lie in (0, lease]: {first:?}");
    ensure!(!second.is_zero() && second <= ctx.scale.lease, "retry_after must lie in (0, lease]: {second:?}");
    // Stores count in their own units: a millisecond more or less is none.
    let most = first.saturating_sub(ctx.scale.lease / 4) + ctx.late + Duration::from_millis(1);
    ensure!(second <= most, "retry_after must shrink as time passes: {first:?}, then {second:?}");
    Ok(())
}

async fn r05_a_takeover_tells_the_previous_attempt(ctx: &Ctx) -> Verdict {
    let key = ctx.key("k")?;
    let lost = ctx.acquire(&key).await?;
    let started_at = ctx.record(&key).await?.started_at;
    ctx.pass_until(ctx.now(), ctx.scale.lease).await?;
    let lease = ctx.acquire(&key).await?;
    let previous = ensure_is!(lease.origin, Origin::Takeover(previous) => previous, "the origin of a takeover");
    ensure_eq!(previous.attempt, lost.attempt, "the previous attempt's number");
    ensure_eq!(previous.token, lost.token, "the previous attempt's token");
    ensure_eq!(previous.started_at, started_at, "the previous attempt's start");
    ensure_eq!(ctx.record(&key).await?.origin, lease.origin, "the origin in the record");
    Ok(())
}

async fn r05_the_leases_of_retry_and_takeover_count_from_their_acquire(ctx: &Ctx) -> Verdict {
    for id in ["retry", "takeover"] {
        let key = ctx.key(id)?;
        if id == "retry" {
            let lease = ctx.acquire(&key).await?;
            ctx.pass(ctx.scale.lease / 2).await?;
            ctx.store.fail(&lease, &note("no")?).await?;
        } else {
            ctx.abandoned(&key).await?;
        }
        let began = ctx.now();
        ctx.acquire(&key).await?;
        let acquired = ctx.now();
        ctx.pass(ctx.scale.lease - ctx.scale.step).await?;
        let edge = held(ctx, &key).await;
        ctx.in_time(began, ctx.scale.lease)?;
        edge?;
        ctx.pass_until(acquired, ctx.scale.lease).await?;
        ctx.acquire(&key).await?;
    }
    Ok(())
}

async fn r05_a_renewed_lease_holds_until_its_new_end(ctx: &Ctx) -> Verdict {
    let key = ctx.key("k")?;
    let lease = ctx.acquire(&key).await?;
    ctx.pass(ctx.scale.lease / 2).await?;
    let began = ctx.now();
    ctx.store.renew(&lease, ctx.scale.lease).await?;
    let renewed = ctx.now();
    ctx.pass(ctx.scale.lease - ctx.scale.step).await?;
    let edge = held(ctx, &key).await;
    ctx.in_time(began, ctx.scale.lease)?;
    edge?;
    ctx.pass_until(renewed, ctx.scale.lease).await?;
    ctx.acquire(&key).await?;
    Ok(())
}

async fn r10_deadlines_follow_the_stores_clock(ctx: &Ctx) -> Verdict {
    let (leased, kept) = (ctx.key("leased")?, ctx.key("kept")?);
    ctx.acquire(&leased).await?;
    ctx.completed(&kept, &Outcome::new(200, "")).await?;
    let before = ctx.record(&kept).await?;
    ctx.pass_until(ctx.now(), ctx.scale.lease).await?;
    let after = ctx.record(&kept).await?;
    let passed = after.read_at.duration_since(before.read_at).unwrap_or_default();
    ensure!(passed >= ctx.scale.lease, "the store's clock was moved by a lease, its records say {passed:?}");
    ensure_eq!(ctx.acquire(&leased).await?.attempt, 2, "the attempt after the lease, by the store's clock");
    ctx.pass_until(ctx.now(), ctx.scale.retention).await?;
    ensure_eq!(ctx.store.fetch(&kept).await?, None, "a record after its retention, by the store's clock");
    Ok(())
}
