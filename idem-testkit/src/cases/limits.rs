//! R12: limits in bytes, checked before anything is sent. R16: scopes.

use std::time::Duration;

use idem_core::limits::{
    MAX_FAILURE_BYTES, MAX_HEADER_NAME_BYTES, MAX_HEADERS, MAX_LEASE, MAX_RETENTION, MIN_DURATION,
};
use idem_core::{ErrorKind, Key, KeyStore, Outcome, Reserve, State};

use super::cases;
use crate::context::{Ctx, expect_error};
use crate::verdict::{Failed, Verdict, ensure, ensure_eq};

cases! {
    R12 r12_keys_of_every_allowed_form_are_keys_of_their_own;
    R12 r12_an_outcome_of_exactly_the_limit_is_stored;
    R12 r12_an_outcome_over_the_limit_is_refused_and_the_key_still_held;
    R12 r12_leases_and_retentions_beyond_the_limits_are_refused;
    R12 r12_the_longest_lease_and_retention_are_accepted;
    R12 r12_the_longest_note_and_the_most_header_lines_are_kept;
    R12 r12_a_renewal_beyond_the_limits_is_refused;
    R16 r16_the_same_id_in_two_scopes_is_two_keys;
    R16 r16_the_border_between_scope_and_id_cannot_be_moved;
}

fn key(scope: &str, id: &str) -> Verdict<Key> {
    Key::new(scope, id).map_err(|error| Failed::Broken(error.to_string()))
}

/// Completes every key with an outcome of its own and wants each back.
async fn distinct(ctx: &Ctx, keys: &[Key]) -> Verdict {
    for (at, key) in keys.iter().enumerate() {
        let lease = ctx.acquire(key).await?;
        ctx.store.complete(&lease, &Outcome::new(200, at.to_string())).await?;
    }
    for (at, key) in keys.iter().enumerate() {
        let record = ctx.replay(key).await?;
        ensure_eq!(record.key, *key, "the key of the record");
        ensure!(record.outcome() == Some(&Outcome::new(200, at.to_string())), "{key:?} got the outcome of another key");
    }
    Ok(())
}

async fn r12_keys_of_every_allowed_form_are_keys_of_their_own(ctx: &Ctx) -> Verdict {
    let long = "k".repeat(254);
    let ids = [
        "a",
        "A",
        "a ",
        " a",
        "á",
        "a\u{301}",
        "%61",
        "a%",
        "a_",
        "a'",
        "a\"",
        "a\\",
        "a:b",
        "a/b",
        "a{b}",
        "0",
        "00",
        "日本語",
        "🙂",
        "null",
    ];
    let mut keys =
        vec![key("kit", &format!("{long}1"))?, key("kit", &format!("{long}2"))?, key("kit", &"é".repeat(127))?];
    for id in ids {
        keys.push(key("kit", id)?);
    }
    distinct(ctx, &keys).await
}

/// An outcome with so many header lines.
fn with_lines(count: usize) -> Outcome {
    (0..count).fold(Outcome::new(200, ""), |outcome, at| outcome.with_header("n", (at % 10).to_string()))
}

async fn r12_the_longest_note_and_the_most_header_lines_are_kept(ctx: &Ctx) -> Verdict {
    let failed = ctx.acquire(&ctx.key("failed")?).await?;
    // Of two bytes each: a field that counts characters would take more of them, and one of 255 bytes less.
    let longest = crate::context::note(&"é".repeat(MAX_FAILURE_BYTES / 2))?;
    ctx.store.fail(&failed, &longest).await?;
    ensure!(ctx.record(&failed.key).await?.state == State::Failed(longest), "the longest note came back otherwise");

    let limit = ctx.store.capabilities().max_outcome_bytes;
    let name = Outcome::new(200, "").with_header("n".repeat(MAX_HEADER_NAME_BYTES), "the longest name");
    let outcomes = [name, with_lines(MAX_HEADERS)];
    for (at, outcome) in outcomes.iter().enumerate().filter(|(_, outcome)| outcome.size() <= limit) {
        let key = ctx.key(&format!("lines-{at}"))?;
        ctx.completed(&key, outcome).await?;
        ensure!(
            ctx.replay(&key).await?.outcome() == Some(outcome),
            "the header lines at their limits came back otherwise"
        );
    }
    Ok(())
}

async fn r12_an_outcome_of_exactly_the_limit_is_stored(ctx: &Ctx) -> Verdict {
    let limit = ctx.store.capabilities().max_outcome_bytes;
    let key = ctx.key("k")?;
    let outcome = Outcome::new(200, vec![b'x'; limit - 10]).with_header("name", "value!");
    ensure_eq!(outcome.size(), limit, "the size of the outcome");
    ctx.completed(&key, &outcome).await?;
    ensure!(ctx.replay(&key).await?.outcome() == Some(&outcome), "an outcome of exactly the limit came back otherwise");
    Ok(())
}

async fn r12_an_outcome_over_the_limit_is_refused_and_the_key_still_held(ctx: &Ctx) -> Verdict {
    let limit = ctx.store.capabilities().max_outcome_bytes;
    let key = ctx.key("k")?;
    let lease = ctx.acquire(&key).await?;
    for outcome in [
        Outcome::new(200, vec![b'x'; limit + 1]),
        Outcome::new(200, vec![b'x'; limit - 9]).with_header("name", "value!"),
        Outcome::new(200, "").with_header("", "nameless"),
        Outcome::new(200, "").with_header("n".repeat(MAX_HEADER_NAME_BYTES + 1), ""),
        with_lines(MAX_HEADERS + 1),
    ] {
        expect_error(
            ctx.store.complete(&lease, &outcome).await,
            ErrorKind::InvalidInput,
            "an outcome beyond the limits",
        )?;
    }
    ctx.refused(&key).await?;
    ctx.store.complete(&lease, &Outcome::withheld(200, idem_core::Withheld::TooLarge)).await?;
    Ok(())
}

async fn r12_leases_and_retentions_beyond_the_limits_are_refused(ctx: &Ctx) -> Verdict {
    let key = ctx.key("k")?;
    let max = ctx.store.capabilities().max_retention;
    let nothing = Duration::ZERO;
    let request =
        |lease: Duration, retention: Duration| Reserve::new(key.clone()).with_lease(lease).with_retention(retention);
    for wrong in [
        request(nothing, max),
        request(MIN_DURATION / 2, max),
        request(MAX_LEASE + MIN_DURATION, max),
        request(Duration::MAX, Duration::MAX),
        request(MIN_DURATION, nothing),
        request(MIN_DURATION, max + MIN_DURATION),
        request(MIN_DURATION, MAX_RETENTION + MIN_DURATION),
        request(MIN_DURATION * 20, MIN_DURATION * 10),
    ] {
        expect_error(ctx.store.reserve(&wrong).await, ErrorKind::InvalidInput, &format!("{wrong:?}"))?;
    }
    ensure_eq!(ctx.store.fetch(&key).await?, None, "the key after requests beyond the limits");
    let lease = ctx.acquire(&key).await?;
    for wrong in [lease.clone().with_retention(nothing), lease.clone().with_retention(max + MIN_DURATION)] {
        expect_error(
            ctx.store.complete(&wrong, &Outcome::new(200, "")).await,
            ErrorKind::InvalidInput,
            "a complete with a wrong retention",
        )?;
        expect_error(
            ctx.store.fail(&wrong, &crate::context::note("no")?).await,
            ErrorKind::InvalidInput,
            "a fail with a wrong retention",
        )?;
    }
    ctx.refused(&key).await?;
    Ok(())
}

async fn r12_the_longest_lease_and_retention_are_accepted(ctx: &Ctx) -> Verdict {
    let max = ctx.store.capabilities().max_retention;
    let longest = Reserve::new(ctx.key("longest")?).with_lease(MAX_LEASE.min(max)).with_retention(max);
    let lease = ctx.acquire_by(&longest).await?;
    ctx.refused(&longest.key).await?;
    ctx.store.complete(&lease, &Outcome::new(200, "")).await?;
    ctx.replay(&longest.key).await?;
    let even = Reserve::new(ctx.key("even")?).with_lease(ctx.scale.lease).with_retention(ctx.scale.lease);
    ctx.acquire_by(&even).await?;
    let shortest = Reserve::new(ctx.key("shortest")?).with_lease(MIN_DURATION).with_retention(MIN_DURATION);
    ctx.acquire_by(&shortest).await.or_else(|failed| match ctx.time {
        // Delivered twice, the second may come when all is over, and be fresh again.
        crate::harness::Time::Manual => Err(failed),
        _ => Ok(idem_core::Lease::new(shortest.key.clone(), shortest.token, 1, idem_core::Origin::Fresh, MIN_DURATION)),
    })?;
    Ok(())
}

async fn r12_a_renewal_beyond_the_limits_is_refused(ctx: &Ctx) -> Verdict {
    let key = ctx.key("k")?;
    let lease = ctx.acquire(&key).await?;
    let before = ctx.record(&key).await?.lease_until;
    for wrong in [Duration::ZERO, MAX_LEASE + MIN_DURATION, Duration::MAX] {
        expect_error(
            ctx.store.renew(&lease, wrong).await,
            ErrorKind::InvalidInput,
            &format!("a renewal by {wrong:?}"),
        )?;
    }
    ensure_eq!(ctx.record(&key).await?.lease_until, before, "the lease's end after renewals beyond the limits");
    Ok(())
}

async fn r16_the_same_id_in_two_scopes_is_two_keys(ctx: &Ctx) -> Verdict {
    let long = "s".repeat(64);
    distinct(
        ctx,
        &[key("", "id")?, key("tenant-1", "id")?, key("tenant-2", "id")?, key("Tenant-1", "id")?, key(&long, "id")?],
    )
    .await
}

async fn r16_the_border_between_scope_and_id_cannot_be_moved(ctx: &Ctx) -> Verdict {
    let pairs = [
        ("", "ab"),
        ("a", "b"),
        ("a:", "b"),
        ("a", ":b"),
        ("a/", "b"),
        ("a", "/b"),
        ("a b", "c"),
        ("a", "b c"),
        ("", "a:b"),
        ("", "a/b"),
    ];
    let keys = pairs.iter().map(|(scope, id)| key(scope, id)).collect::<Verdict<Vec<_>>>()?;
    distinct(ctx, &keys).await
}
