//! R4: any call may be delivered twice, and late. Beside these, most cases are run once more with every call delivered
//! twice.

use std::sync::Arc;

use idem_core::{ErrorKind, KeyStore, Origin, Outcome, Record, Reservation};
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use super::cases;
use crate::context::{Ctx, expect_error, note, refusing};
use crate::verdict::{Verdict, ensure, ensure_eq, ensure_is};

cases! {
    R4 r04_a_repeated_reserve_meets_itself_and_no_rival [once];
    R4 r04_a_repeated_takeover_keeps_its_origin [once];
    R4 r04_a_repeated_retry_keeps_its_origin [once];
    R4 r04_a_repeated_complete_changes_nothing [once];
    R4 r04_a_repeated_fail_changes_nothing [once];
    R4 r04_a_late_reserve_of_a_failed_attempt_is_refused [once];
    R4 r04_a_late_reserve_of_a_completed_attempt_is_a_replay [once];
    R4 r04_a_late_reserve_of_an_attempt_that_was_taken_over_is_a_rival [once];
    R4 r04_many_deliveries_of_one_reserve_at_once_are_one_attempt [once];
}

/// A record apart from when it was read.
pub(super) fn timeless(record: &Record) -> Record {
    record.read(std::time::SystemTime::UNIX_EPOCH)
}

async fn r04_a_repeated_reserve_meets_itself_and_no_rival(ctx: &Ctx) -> Verdict {
    let request = ctx.request(&ctx.key("k")?);
    let first = ctx.acquire_by(&request).await?;
    let before = ctx.record(&request.key).await?;
    // Let some time pass: a repeat that wrote the record anew would move its times.
    ctx.pass(ctx.scale.lease / 8).await?;
    ensure_eq!(ctx.acquire_by(&request).await?, first, "the lease given to a repeated reserve");
    ensure_eq!(timeless(&ctx.record(&request.key).await?), timeless(&before), "the record after a repeated reserve");
    Ok(())
}

async fn r04_a_repeated_takeover_keeps_its_origin(ctx: &Ctx) -> Verdict {
    let key = ctx.key("k")?;
    let lost = ctx.abandoned(&key).await?;
    let request = ctx.request(&key);
    let first = ctx.acquire_by(&request).await?;
    let again = ctx.acquire_by(&request).await?;
    ensure_eq!(again, first, "the lease given to a repeated takeover");
    let previous =
        ensure_is!(again.origin, Origin::Takeover(previous) => previous, "the origin of a repeated takeover");
    ensure!(
        previous.token == lost.token && previous.attempt == lost.attempt,
        "the previous attempt told to a repeated takeover: {previous:?}"
    );
    Ok(())
}

async fn r04_a_repeated_retry_keeps_its_origin(ctx: &Ctx) -> Verdict {
    let key = ctx.key("k")?;
    ctx.failed(&key).await?;
    let request = ctx.request(&key);
    let first = ctx.acquire_by(&request).await?;
    ensure_eq!(first.origin, Origin::Retry, "the origin of a retry");
    ensure_eq!(ctx.acquire_by(&request).await?, first, "the lease given to a repeated retry");
    Ok(())
}

async fn r04_a_repeated_complete_changes_nothing(ctx: &Ctx) -> Verdict {
    let key = ctx.key("k")?;
    let outcome = Outcome::new(200, "once").with_header("a", "1");
    let lease = ctx.completed(&key, &outcome).await?;
    let before = ctx.record(&key).await?;
    ctx.pass(ctx.scale.lease / 8).await?;
    ctx.store.complete(&lease, &outcome).await?;
    ensure_eq!(timeless(&ctx.record(&key).await?), timeless(&before), "the record after a repeated complete");
    Ok(())
}

async fn r04_a_repeated_fail_changes_nothing(ctx: &Ctx) -> Verdict {
    let key = ctx.key("k")?;
    let lease = ctx.acquire(&key).await?;
    ctx.store.fail(&lease, &note("broken")?).await?;
    let before = ctx.record(&key).await?;
    ctx.pass(ctx.scale.lease / 8).await?;
    ctx.store.fail(&lease, &note("broken")?).await?;
    ensure_eq!(timeless(&ctx.record(&key).await?), timeless(&before), "the record after a repeated fail");
    // The attempt is over: it cannot fail for another reason.
    expect_error(
        ctx.store.fail(&lease, &note("other")?).await,
        ErrorKind::LeaseLost,
        "a second fail with another note",
    )?;
    ensure_eq!(timeless(&ctx.record(&key).await?), timeless(&before), "the record after another fail");
    Ok(())
}

async fn r04_a_late_reserve_of_a_failed_attempt_is_refused(ctx: &Ctx) -> Verdict {
    let request = ctx.request(&ctx.key("k")?);
    let lease = ctx.acquire_by(&request).await?;
    ctx.store.fail(&lease, &note("no")?).await?;
    let before = ctx.record(&request.key).await?;
    expect_error(
        ctx.store.reserve(&request).await,
        ErrorKind::LeaseLost,
        "a reserve that arrives after its attempt failed",
    )?;
    ensure_eq!(timeless(&ctx.record(&request.key).await?), timeless(&before), "the record after a late reserve");
    let retry = ctx.acquire(&request.key).await?;
    ensure_eq!(retry.attempt, 2, "the attempt after the failed one");
    Ok(())
}

async fn r04_a_late_reserve_of_a_completed_attempt_is_a_replay(ctx: &Ctx) -> Verdict {
    let request = ctx.request(&ctx.key("k")?);
    let lease = ctx.acquire_by(&request).await?;
    ctx.store.complete(&lease, &Outcome::new(200, "done")).await?;
    ensure_is!(ctx.reserve(&request).await?, Reservation::Completed(_) => (), "a reserve that arrives after its attempt completed");
    Ok(())
}

/// A token is known by the record alone: one that held the key once is as good as any other.
async fn r04_a_late_reserve_of_an_attempt_that_was_taken_over_is_a_rival(ctx: &Ctx) -> Verdict {
    let request = ctx.request(&ctx.key("k")?);
    ctx.abandoned_by(&request).await?;
    let began = ctx.now();
    let held = ctx.acquire(&request.key).await?;
    let before = ctx.record(&request.key).await?;
    for late in [request.clone(), refusing(request.clone())] {
        let answer = ctx.reserve(&late).await?;
        ctx.in_time(began, ctx.scale.lease)?;
        ensure_is!(answer, Reservation::InProgress { attempt: 2, .. } => (), "a reserve that arrives after its attempt was taken over");
    }
    ensure_eq!(timeless(&ctx.record(&request.key).await?), timeless(&before), "the record after a late reserve");
    ctx.store.complete(&held, &Outcome::new(200, "the successor's")).await?;
    ensure_is!(ctx.reserve(&request).await?, Reservation::Completed(_) => (), "a reserve that arrives after its successor completed");
    Ok(())
}

async fn r04_many_deliveries_of_one_reserve_at_once_are_one_attempt(ctx: &Ctx) -> Verdict {
    for round in 0..8 {
        let key = ctx.key(&format!("k{round}"))?;
        let requests = [ctx.request(&key), ctx.request(&key)];
        let barrier = Arc::new(Barrier::new(16));
        let mut tasks = JoinSet::new();
        for delivery in 0..16 {
            let (store, barrier, request) = (ctx.store.clone(), barrier.clone(), requests[delivery % 2].clone());
            tasks.spawn(async move {
                barrier.wait().await;
                (request.token, store.reserve(&request).await)
            });
        }
        let mut holders = Vec::new();
        for (token, answer) in tasks.join_all().await {
            match answer? {
                Reservation::Acquired(lease) => {
                    ensure!(lease.attempt == 1 && lease.token == token, "a wrong lease: {lease:?} for {token:?}");
                    holders.push(token);
                }
                answer => ensure_is!(answer, Reservation::InProgress { attempt: 1, .. } => (), "the rival of a holder"),
            }
        }
        ensure_eq!(holders.len(), 8, "deliveries of the holder's reserve that were told so");
        ensure!(holders.windows(2).all(|pair| pair[0] == pair[1]), "two tokens hold one key");
    }
    Ok(())
}
