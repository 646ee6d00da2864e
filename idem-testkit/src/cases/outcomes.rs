//! R7: completed is final, bit for bit. R11: executed, but not kept.

use std::sync::Arc;

use idem_core::{Body, ErrorKind, Key, KeyStore, Outcome, State, Withheld};
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use super::cases;
use super::repeats::timeless;
use crate::context::{Ctx, expect_error};
use crate::verdict::{Verdict, ensure, ensure_eq, ensure_is};

cases! {
    R7 r07_bodies_come_back_bit_for_bit;
    R7 r07_header_lines_come_back_in_order_with_repeats_and_raw_values;
    R7 r07_every_code_comes_back;
    R7 r07_another_outcome_under_the_same_token_is_refused;
    R7 r07_of_many_outcomes_at_once_one_is_kept;
    R7 r07_a_completed_record_tells_its_attempt;
    R7 r07_a_completed_key_stays_completed_when_its_lease_is_over;
    R7 r07_no_live_record_is_evicted [once];
    R7 r07_acknowledged_outcomes_survive_the_process [reopen, once];
    R11 r11_withheld_is_an_outcome_of_its_own;
}

async fn comes_back(ctx: &Ctx, key: &Key, outcome: &Outcome, what: &str) -> Verdict {
    ctx.completed(key, outcome).await?;
    for record in [ctx.replay(key).await?, ctx.record(key).await?] {
        // Not by `Debug`, which hides the contents.
        if record.outcome() != Some(outcome) {
            let found = ensure_is!(record.state, State::Completed(outcome) => outcome, "the state of a completed key");
            ensure_eq!(
                (found.code, found.headers, found.body.size()),
                (outcome.code, outcome.headers.clone(), outcome.body.size()),
                "{what}"
            );
            let (Body::Stored(found), Body::Stored(wanted)) = (&found.body, &outcome.body) else {
                ensure_eq!(found.body, outcome.body, "{what}");
                return Ok(());
            };
            let at = found.iter().zip(wanted).position(|(found, wanted)| found != wanted);
            ensure_eq!(at, None, "{what}: the first byte that differs");
            ensure_eq!(found.len(), wanted.len(), "{what}: the length");
        }
    }
    Ok(())
}

async fn r07_bodies_come_back_bit_for_bit(ctx: &Ctx) -> Verdict {
    let every_byte: Vec<u8> = (0..=u8::MAX).collect();
    let limit = ctx.store.capabilities().max_outcome_bytes;
    let bodies: [(&str, Vec<u8>); 9] = [
        ("an empty body", vec![]),
        ("a body of one NUL", vec![0]),
        ("every byte", every_byte.clone()),
        ("cut UTF-8", "日本".as_bytes()[..4].to_vec()),
        ("text with quotes, backslashes and line ends", b"\"\\'\r\n\t\0{}[]$1%s".to_vec()),
        ("89,999 bytes", every_byte.iter().copied().cycle().take(89_999.min(limit)).collect()),
        ("90,001 bytes", every_byte.iter().copied().cycle().take(90_001.min(limit)).collect()),
        ("100,001 bytes", every_byte.iter().copied().cycle().take(100_001.min(limit)).collect()),
        ("as many bytes as allowed", every_byte.iter().copied().cycle().take(limit).collect()),
    ];
    for (at, (what, body)) in bodies.into_iter().enumerate() {
        comes_back(ctx, &ctx.key(&format!("body-{at}"))?, &Outcome::new(200, body), what).await?;
    }
    Ok(())
}

async fn r07_header_lines_come_back_in_order_with_repeats_and_raw_values(ctx: &Ctx) -> Verdict {
    let outcome = Outcome::new(200, "")
        .with_header("link", "<a>; rel=\"x\", <b>; rel=\"y\"")
        .with_header("Warning", "199 - \"first\"")
        .with_header("x-raw", &b"\x80\xff obs-text \0"[..])
        .with_header("warning", "199 - \"second\"")
        .with_header("Warning", "")
        .with_header("a", "last");
    comes_back(ctx, &ctx.key("k")?, &outcome, "the header lines").await
}

async fn r07_every_code_comes_back(ctx: &Ctx) -> Verdict {
    for code in [0, 1, 200, 599, 32_768, u16::MAX] {
        comes_back(ctx, &ctx.key(&format!("code-{code}"))?, &Outcome::new(code, "x"), "the code").await?;
    }
    Ok(())
}

async fn r07_another_outcome_under_the_same_token_is_refused(ctx: &Ctx) -> Verdict {
    let key = ctx.key("k")?;
    let outcome = Outcome::new(200, "first").with_header("a", "1");
    let lease = ctx.completed(&key, &outcome).await?;
    let before = ctx.record(&key).await?;
    let others = [
        Outcome::new(200, "second").with_header("a", "1"),
        Outcome::new(201, "first").with_header("a", "1"),
        Outcome::new(200, "first").with_header("a", "2"),
        Outcome::new(200, "first"),
        Outcome::withheld(200, Withheld::TooLarge),
    ];
    for other in &others {
        expect_error(ctx.store.complete(&lease, other).await, ErrorKind::AlreadyCompleted, "another outcome")?;
    }
    ensure_eq!(timeless(&ctx.record(&key).await?), timeless(&before), "the record after other outcomes");
    Ok(())
}

/// Under one token, as a program with a fault in it sends them.
async fn r07_of_many_outcomes_at_once_one_is_kept(ctx: &Ctx) -> Verdict {
    const CALLS: usize = 8;
    for round in 0..10 {
        let key = ctx.key(&format!("k{round}"))?;
        let lease = ctx.acquire(&key).await?;
        let barrier = Arc::new(Barrier::new(CALLS));
        let mut tasks = JoinSet::new();
        for call in 0..CALLS {
            let (store, lease, barrier) = (ctx.store.clone(), lease.clone(), barrier.clone());
            let outcome = Outcome::new(200, format!("outcome {call}"));
            tasks.spawn(async move {
                barrier.wait().await;
                (store.complete(&lease, &outcome).await, outcome)
            });
        }
        let mut accepted = Vec::new();
        for (answer, outcome) in tasks.join_all().await {
            match answer {
                Ok(()) => accepted.push(outcome),
                refused => expect_error(refused, ErrorKind::AlreadyCompleted, "another outcome under the same token")?,
            }
        }
        ensure_eq!(accepted.len(), 1, "outcomes accepted of {CALLS} under one token");
        ensure!(ctx.replay(&key).await?.outcome() == accepted.first(), "the outcome kept is not the one accepted");
    }
    Ok(())
}

async fn r07_a_completed_record_tells_its_attempt(ctx: &Ctx) -> Verdict {
    let (print, _) = crate::context::prints();
    let request = ctx.request(&ctx.key("k")?).with_fingerprint(print);
    ctx.abandoned_by(&request).await?;
    let lease = ctx.acquire(&request.key).await?;
    ctx.store.complete(&lease, &Outcome::new(200, "")).await?;
    let record = ctx.replay(&request.key).await?;
    ensure_eq!(record.key, request.key, "the key of the record");
    ensure_eq!((record.attempt, record.token), (2, lease.token), "attempt and token of the record");
    ensure_eq!(record.fingerprint, Some(print), "the fingerprint of the record");
    ensure_eq!(record.lease(), lease, "the handle that the record offers");
    Ok(())
}

async fn r07_a_completed_key_stays_completed_when_its_lease_is_over(ctx: &Ctx) -> Verdict {
    let key = ctx.key("k")?;
    ctx.completed(&key, &Outcome::new(200, "done")).await?;
    ctx.pass_until(ctx.now(), ctx.scale.lease).await?;
    ensure_eq!(ctx.replay(&key).await?.outcome(), Some(&Outcome::new(200, "done")), "the outcome");
    Ok(())
}

async fn r07_no_live_record_is_evicted(ctx: &Ctx) -> Verdict {
    const KEYS: usize = 300;
    for at in 0..KEYS {
        ctx.completed(&ctx.key(&format!("k{at}"))?, &Outcome::new(200, at.to_string())).await?;
    }
    for at in 0..KEYS {
        let record = ctx.replay(&ctx.key(&format!("k{at}"))?).await?;
        ensure_eq!(record.outcome(), Some(&Outcome::new(200, at.to_string())), "the outcome of key {at} of {KEYS}");
    }
    Ok(())
}

async fn r07_acknowledged_outcomes_survive_the_process(ctx: &Ctx) -> Verdict {
    let (done, held) = (ctx.key("done")?, ctx.key("held")?);
    ctx.completed(&done, &Outcome::new(200, "kept")).await?;
    let request = ctx.request(&held);
    let began = ctx.now();
    let lease = ctx.acquire_by(&request).await?;
    let store = ctx.fixture.reopen().await?;
    let answer = store.reserve(&ctx.request(&done)).await?;
    let record =
        ensure_is!(answer, idem_core::Reservation::Completed(record) => record, "a completed key after a restart");
    ensure_eq!(record.outcome(), Some(&Outcome::new(200, "kept")), "the outcome after a restart");
    let answer = store.reserve(&ctx.request(&held)).await?;
    ctx.in_time(began, ctx.scale.lease)?;
    ensure_is!(answer, idem_core::Reservation::InProgress { .. } => (), "a held key after a restart");
    store.complete(&lease, &Outcome::new(200, "by the first process")).await?;
    Ok(())
}

async fn r11_withheld_is_an_outcome_of_its_own(ctx: &Ctx) -> Verdict {
    let reasons = [Withheld::TooLarge, Withheld::Streamed, Withheld::Secret, Withheld::Unserializable];
    for reason in reasons {
        let key = ctx.key(&format!("{reason:?}"))?;
        let outcome = Outcome::withheld(201, reason).with_header("location", "/charges/1");
        comes_back(ctx, &key, &outcome, "a withheld outcome").await?;
        let record = ctx.record(&key).await?;
        ensure_eq!(record.outcome().map(|outcome| &outcome.body), Some(&Body::Withheld(reason)), "the body withheld");
    }
    // It is not an empty success.
    let lease = ctx.completed(&ctx.key("empty")?, &Outcome::new(201, "")).await?;
    let other = Outcome::withheld(201, Withheld::Secret);
    expect_error(ctx.store.complete(&lease, &other).await, ErrorKind::AlreadyCompleted, "withheld after an empty body")
}
