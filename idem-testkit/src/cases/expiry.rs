//! R9: two durations, and an expired record is absent.

use idem_core::{ErrorKind, KeyStore, Origin, Outcome};

use super::cases;
use crate::context::{Ctx, expect_error, note};
use crate::verdict::{Verdict, ensure, ensure_eq};

cases! {
    R9 r09_a_crash_blocks_a_key_for_its_lease_and_not_for_its_retention;
    R9 r09_a_completed_record_lives_for_its_retention;
    R9 r09_an_expired_record_is_absent_for_every_call;
    R9 r09_retention_counts_from_the_complete;
    R9 r09_a_late_fail_counts_its_retention_from_then;
    R9 r09_a_retry_counts_its_retention_from_its_acquire;
    R9 r09_a_record_outlives_its_renewed_lease;
    R9 r09_the_lease_handle_sets_the_retention_of_the_result;
    R9 r09_times_of_a_record_are_in_order;
}

async fn r09_a_crash_blocks_a_key_for_its_lease_and_not_for_its_retention(ctx: &Ctx) -> Verdict {
    let key = ctx.key("k")?;
    let began = ctx.now();
    ctx.abandoned(&key).await?;
    let lease = ctx.acquire(&key).await?;
    ctx.in_time(began, ctx.scale.retention)?;
    ensure!(matches!(lease.origin, Origin::Takeover(_)), "a takeover is due after the lease, not after the retention");
    Ok(())
}

async fn r09_a_completed_record_lives_for_its_retention(ctx: &Ctx) -> Verdict {
    let key = ctx.key("k")?;
    let lease = ctx.acquire(&key).await?;
    let began = ctx.now();
    ctx.store.complete(&lease, &Outcome::new(200, "kept")).await?;
    let done = ctx.now();
    ctx.pass(ctx.scale.retention - ctx.scale.step).await?;
    let edge = ctx.replay(&key).await;
    ctx.in_time(began, ctx.scale.retention)?;
    edge?;
    ctx.pass_until(done, ctx.scale.retention).await?;
    let lease = ctx.acquire(&key).await?;
    ensure_eq!((lease.attempt, lease.origin), (1, Origin::Fresh), "the attempt after the record expired");
    Ok(())
}

async fn r09_an_expired_record_is_absent_for_every_call(ctx: &Ctx) -> Verdict {
    let (held, done, failed) = (ctx.key("held")?, ctx.key("done")?, ctx.key("failed")?);
    let leases =
        [ctx.acquire(&held).await?, ctx.completed(&done, &Outcome::new(200, "old")).await?, ctx.failed(&failed).await?];
    ctx.pass_until(ctx.now(), ctx.scale.retention).await?;
    for lease in &leases {
        ensure_eq!(ctx.store.fetch(&lease.key).await?, None, "fetching an expired record");
        expect_error(
            ctx.store.complete(lease, &Outcome::new(200, "old")).await,
            ErrorKind::LeaseLost,
            "completing an expired record",
        )?;
        expect_error(
            ctx.store.fail(lease, &note("first try")?).await,
            ErrorKind::LeaseLost,
            "failing an expired record",
        )?;
        expect_error(
            ctx.store.renew(lease, ctx.scale.lease).await,
            ErrorKind::LeaseLost,
            "renewing an expired record",
        )?;
        let (_, print) = crate::context::prints();
        let fresh = ctx.acquire_by(&ctx.request(&lease.key).with_fingerprint(print)).await?;
        ensure_eq!((fresh.attempt, fresh.origin), (1, Origin::Fresh), "the attempt after the record expired");
        ensure_eq!(ctx.record(&lease.key).await?.fingerprint, Some(print), "the fingerprint of the new record");
        expect_error(
            ctx.store.complete(lease, &Outcome::new(200, "old")).await,
            ErrorKind::LeaseLost,
            "completing another's record",
        )?;
    }
    Ok(())
}

async fn r09_retention_counts_from_the_complete(ctx: &Ctx) -> Verdict {
    let key = ctx.key("k")?;
    let lease = ctx.acquire(&key).await?;
    ctx.pass(ctx.scale.retention / 2).await?;
    let began = ctx.now();
    ctx.store.complete(&lease, &Outcome::new(200, "kept")).await?;
    ctx.pass(ctx.scale.retention * 3 / 4).await?;
    let replay = ctx.replay(&key).await;
    ctx.in_time(began, ctx.scale.retention)?;
    replay.map(drop)
}

async fn r09_a_late_fail_counts_its_retention_from_then(ctx: &Ctx) -> Verdict {
    let key = ctx.key("k")?;
    let lease = ctx.acquire(&key).await?;
    ctx.pass(ctx.scale.retention * 3 / 4).await?;
    let began = ctx.now();
    ctx.store.fail(&lease, &note("late")?).await?;
    ctx.pass(ctx.scale.retention / 2).await?;
    let record = ctx.record(&key).await;
    ctx.in_time(began, ctx.scale.retention)?;
    record?;
    ensure_eq!(ctx.acquire(&key).await?.attempt, 2, "the attempt after a late fail");
    Ok(())
}

async fn r09_a_retry_counts_its_retention_from_its_acquire(ctx: &Ctx) -> Verdict {
    let key = ctx.key("k")?;
    ctx.failed(&key).await?;
    ctx.pass(ctx.scale.retention / 2).await?;
    let began = ctx.now();
    ctx.acquire(&key).await?;
    ctx.pass(ctx.scale.retention * 3 / 4).await?;
    let record = ctx.record(&key).await;
    ctx.in_time(began, ctx.scale.retention)?;
    ensure_eq!(record?.attempt, 2, "the attempt in the record");
    Ok(())
}

/// A record that expired under a running lease would let a second caller in.
async fn r09_a_record_outlives_its_renewed_lease(ctx: &Ctx) -> Verdict {
    let request = ctx.request(&ctx.key("k")?).with_retention(ctx.scale.lease);
    let lease = ctx.acquire_by(&request).await?;
    ctx.pass(ctx.scale.lease / 2).await?;
    let began = ctx.now();
    ctx.store.renew(&lease, ctx.scale.lease).await?;
    ctx.pass(ctx.scale.lease * 3 / 4).await?;
    let refused = ctx.refused(&request.key).await;
    ctx.in_time(began, ctx.scale.lease)?;
    refused.map(drop)
}

async fn r09_the_lease_handle_sets_the_retention_of_the_result(ctx: &Ctx) -> Verdict {
    let key = ctx.key("k")?;
    let lease = ctx.acquire(&key).await?.with_retention(ctx.scale.retention / 2);
    ctx.store.complete(&lease, &Outcome::new(200, "short-lived")).await?;
    ctx.pass_until(ctx.now(), ctx.scale.retention / 2).await?;
    ensure_eq!(ctx.store.fetch(&key).await?, None, "a record after the shorter retention of its result");
    Ok(())
}

async fn r09_times_of_a_record_are_in_order(ctx: &Ctx) -> Verdict {
    let key = ctx.key("k")?;
    ctx.failed(&key).await?;
    let first = ctx.record(&key).await?;
    ctx.pass(ctx.scale.lease / 8).await?;
    let lease = ctx.acquire(&key).await?;
    let second = ctx.record(&key).await?;
    ctx.pass(ctx.scale.lease / 8).await?;
    ctx.store.complete(&lease, &Outcome::new(200, "")).await?;
    let third = ctx.record(&key).await?;
    ensure!(
        first.created_at == second.created_at && second.created_at == third.created_at,
        "the time of creation moved: {first:?}, {second:?}, {third:?}"
    );
    ensure!(second.started_at > first.started_at, "the start of a retry: {first:?}, then {second:?}");
    ensure_eq!(third.started_at, second.started_at, "the start of a completed attempt");
    ensure!(third.updated_at > second.updated_at, "the time of the latest write: {second:?}, then {third:?}");
    for record in [&first, &second, &third] {
        ensure!(
            record.created_at <= record.started_at && record.started_at <= record.updated_at,
            "times out of order: {record:?}"
        );
        let longest = ctx.scale.retention + ctx.late;
        ensure!(record.expires_in() <= longest, "a record lives longer than its retention: {record:?}");
        ensure!(!record.expires_in().is_zero(), "a live record says that it has no time left: {record:?}");
    }
    Ok(())
}
