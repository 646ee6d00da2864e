//! R3: another request under a used key is told so, on every path.

use idem_core::{KeyStore, Outcome, Reservation, Reserve};

use super::cases;
use crate::context::{Ctx, prints, refusing};
use crate::verdict::{Verdict, ensure_eq, ensure_is};

cases! {
    R3 r03_mismatch_while_in_progress;
    R3 r03_mismatch_when_completed;
    R3 r03_mismatch_when_failed;
    R3 r03_mismatch_when_the_lease_is_over;
    R3 r03_mismatch_under_the_same_token;
    R3 r03_fingerprint_survives_a_takeover;
    R3 r03_fingerprint_survives_a_retry_without_one;
    R3 r03_absent_fingerprint_matches_and_is_not_adopted;
    R3 r03_equal_fingerprints_of_two_keys_have_nothing_to_do_with_each_other;
}

/// The same wish again, but of another caller.
fn other(ctx: &Ctx, request: &Reserve) -> Reserve {
    ctx.request(&request.key).with_fingerprint(request.fingerprint)
}

async fn mismatched(ctx: &Ctx, request: &Reserve) -> Verdict {
    let before = ctx.store.fetch(&request.key).await?.map(|record| record.read(std::time::SystemTime::UNIX_EPOCH));
    ensure_eq!(ctx.reserve(request).await?, Reservation::Mismatch, "a used key with another fingerprint");
    let after = ctx.store.fetch(&request.key).await?.map(|record| record.read(std::time::SystemTime::UNIX_EPOCH));
    ensure_eq!(after, before, "the record after a mismatch");
    Ok(())
}

async fn r03_mismatch_while_in_progress(ctx: &Ctx) -> Verdict {
    let (first, second) = prints();
    let request = ctx.request(&ctx.key("k")?).with_fingerprint(first);
    ctx.acquire_by(&request).await?;
    mismatched(ctx, &other(ctx, &request).with_fingerprint(second)).await
}

async fn r03_mismatch_when_completed(ctx: &Ctx) -> Verdict {
    let (first, second) = prints();
    let request = ctx.request(&ctx.key("k")?).with_fingerprint(first);
    let lease = ctx.acquire_by(&request).await?;
    ctx.store.complete(&lease, &Outcome::new(200, "first")).await?;
    mismatched(ctx, &other(ctx, &request).with_fingerprint(second)).await?;
    let answer = ctx.reserve(&other(ctx, &request)).await?;
    let record = ensure_is!(answer, Reservation::Completed(record) => record, "the same fingerprint");
    ensure_eq!(record.fingerprint, Some(first), "the fingerprint kept");
    Ok(())
}

async fn r03_mismatch_when_failed(ctx: &Ctx) -> Verdict {
    let (first, second) = prints();
    let request = ctx.request(&ctx.key("k")?).with_fingerprint(first);
    let lease = ctx.acquire_by(&request).await?;
    ctx.store.fail(&lease, &crate::context::note("no")?).await?;
    mismatched(ctx, &other(ctx, &request).with_fingerprint(second)).await?;
    ctx.acquire_by(&other(ctx, &request)).await?;
    Ok(())
}

async fn r03_mismatch_when_the_lease_is_over(ctx: &Ctx) -> Verdict {
    let (first, second) = prints();
    let request = ctx.request(&ctx.key("k")?).with_fingerprint(first);
    ctx.abandoned_by(&request).await?;
    mismatched(ctx, &other(ctx, &request).with_fingerprint(second)).await?;
    mismatched(ctx, &refusing(other(ctx, &request)).with_fingerprint(second)).await
}

async fn r03_mismatch_under_the_same_token(ctx: &Ctx) -> Verdict {
    let (first, second) = prints();
    let request = ctx.request(&ctx.key("k")?).with_fingerprint(first);
    ctx.acquire_by(&request).await?;
    mismatched(ctx, &request.clone().with_fingerprint(second)).await
}

async fn r03_fingerprint_survives_a_takeover(ctx: &Ctx) -> Verdict {
    let (first, second) = prints();
    let request = ctx.request(&ctx.key("k")?).with_fingerprint(first);
    ctx.abandoned_by(&request).await?;
    let lease = ctx.acquire_by(&other(ctx, &request).with_fingerprint(None)).await?;
    mismatched(ctx, &other(ctx, &request).with_fingerprint(second)).await?;
    ctx.store.complete(&lease, &Outcome::new(200, "")).await?;
    mismatched(ctx, &other(ctx, &request).with_fingerprint(second)).await
}

async fn r03_fingerprint_survives_a_retry_without_one(ctx: &Ctx) -> Verdict {
    let (first, second) = prints();
    let request = ctx.request(&ctx.key("k")?).with_fingerprint(first);
    let lease = ctx.acquire_by(&request).await?;
    ctx.store.fail(&lease, &crate::context::note("no")?).await?;
    ctx.acquire_by(&other(ctx, &request).with_fingerprint(None)).await?;
    mismatched(ctx, &other(ctx, &request).with_fingerprint(second)).await
}

async fn r03_absent_fingerprint_matches_and_is_not_adopted(ctx: &Ctx) -> Verdict {
    let (first, second) = prints();
    let key = ctx.key("k")?;
    let lease = ctx.acquire(&key).await?;
    ensure_is!(
        ctx.reserve(&ctx.request(&key).with_fingerprint(first)).await?,
        Reservation::InProgress { .. } => (),
        "a key that was reserved without a fingerprint"
    );
    ctx.store.complete(&lease, &Outcome::new(200, "")).await?;
    for print in [first, second] {
        ensure_is!(
            ctx.reserve(&ctx.request(&key).with_fingerprint(print)).await?,
            Reservation::Completed(_) => (),
            "a key that was reserved without a fingerprint"
        );
    }
    ensure_eq!(ctx.record(&key).await?.fingerprint, None, "the fingerprint kept");

    let retried = ctx.key("retried")?;
    ctx.failed(&retried).await?;
    ctx.acquire_by(&ctx.request(&retried).with_fingerprint(first)).await?;
    ensure_eq!(ctx.record(&retried).await?.fingerprint, None, "the fingerprint after a retry that brought one");
    Ok(())
}

async fn r03_equal_fingerprints_of_two_keys_have_nothing_to_do_with_each_other(ctx: &Ctx) -> Verdict {
    let (first, _) = prints();
    for id in ["order-1", "order-2"] {
        let request = ctx.request(&ctx.key(id)?).with_fingerprint(first);
        let lease = ctx.acquire_by(&request).await?;
        ctx.store.complete(&lease, &Outcome::new(200, id)).await?;
    }
    for id in ["order-1", "order-2"] {
        let record = ctx.replay(&ctx.key(id)?).await?;
        ensure_eq!(record.outcome(), Some(&Outcome::new(200, id)), "the outcome of {id}");
    }
    Ok(())
}
