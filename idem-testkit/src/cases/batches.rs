//! Batches: an answer each, as if called one by one.

use std::time::Duration;

use idem_core::{ErrorKind, Failure, KeyStore, Lease, Origin, Outcome, Reservation, Reserve, Token};

use super::cases;
use crate::context::{Ctx, expect_error, prints, refusing, stranger};
use crate::verdict::{Failed, Verdict, ensure, ensure_eq, ensure_is};

cases! {
    R6 r06_a_batch_goes_by_its_keys_and_not_by_its_tokens [once];
    R2 r02_a_batch_of_reserves_answers_each_on_its_own;
    R1 r01_a_key_twice_in_a_batch_is_acquired_once;
    R6 r06_a_batch_of_completes_is_fenced_each_on_its_own;
    R12 r12_one_bad_call_in_a_batch_does_not_touch_its_neighbours;
    R3 r03_mismatch_within_a_batch;
    R4 r04_a_request_twice_in_a_batch_is_one_attempt;
    R5 r05_a_batch_takes_over_as_a_single_reserve_does;
    R7 r07_a_key_twice_in_a_batch_of_completes_gets_one_outcome;
    R9 r09_expired_records_are_absent_for_a_batch;
    R1 r01_batches_that_overlap_acquire_each_key_once [once];
}

async fn r02_a_batch_of_reserves_answers_each_on_its_own(ctx: &Ctx) -> Verdict {
    let (print, other) = prints();
    let (free, held, done, failed, gone) =
        (ctx.key("free")?, ctx.key("held")?, ctx.key("done")?, ctx.key("failed")?, ctx.key("gone")?);
    ctx.abandoned(&gone).await?;
    let began = ctx.now();
    ctx.acquire_by(&ctx.request(&held).with_fingerprint(print)).await?;
    ctx.completed(&done, &Outcome::new(200, "done")).await?;
    ctx.failed(&failed).await?;
    let requests = [
        ctx.request(&done),
        ctx.request(&free),
        ctx.request(&held).with_fingerprint(print),
        ctx.request(&held).with_fingerprint(other),
        refusing(ctx.request(&gone)),
        ctx.request(&failed),
    ];
    let answers = ctx.store.reserve_many(&requests).await;
    ctx.in_time(began, ctx.scale.lease)?;
    let [done, free, held, mismatch, gone, failed] = <[_; 6]>::try_from(answers)
        .map_err(|answers| Failed::Broken(format!("6 requests, {} answers", answers.len())))?;
    let record = ensure_is!(done?, Reservation::Completed(record) => record, "a completed key in a batch");
    ensure_eq!(record.outcome(), Some(&Outcome::new(200, "done")), "the outcome");
    let lease = ensure_is!(free?, Reservation::Acquired(lease) => lease, "a free key in a batch");
    ensure_eq!((lease.key, lease.token), (requests[1].key.clone(), requests[1].token), "the lease on a free key");
    ensure_is!(held?, Reservation::InProgress { attempt: 1, .. } => (), "a held key in a batch");
    ensure_eq!(mismatch?, Reservation::Mismatch, "another fingerprint in a batch");
    ensure_is!(gone?, Reservation::Abandoned(_) => (), "an abandoned key in a batch");
    let lease = ensure_is!(failed?, Reservation::Acquired(lease) => lease, "a failed key in a batch");
    ensure_eq!(lease.attempt, 2, "the attempt on a failed key");
    ensure!(ctx.store.reserve_many(&[]).await.is_empty(), "an empty batch has no answers");
    Ok(())
}

async fn r01_a_key_twice_in_a_batch_is_acquired_once(ctx: &Ctx) -> Verdict {
    let key = ctx.key("k")?;
    let requests: Vec<Reserve> = (0..5).map(|_| ctx.request(&key)).collect();
    let mut acquired = Vec::new();
    for (at, answer) in ctx.store.reserve_many(&requests).await.into_iter().enumerate() {
        if let Reservation::Acquired(_) = answer? {
            acquired.push(at);
        }
    }
    // Not always the first: it may have to be sent again.
    ensure_eq!(acquired.len(), 1, "requests for one key in one batch that were given it, namely {acquired:?}");
    Ok(())
}

async fn r06_a_batch_of_completes_is_fenced_each_on_its_own(ctx: &Ctx) -> Verdict {
    let (held, lost, done) = (ctx.key("held")?, ctx.key("lost")?, ctx.key("done")?);
    let held = ctx.acquire(&held).await?;
    let lost = ctx.acquire(&lost).await?;
    let done = ctx.completed(&done, &Outcome::new(200, "first")).await?;
    let calls = [
        (stranger(&lost), Outcome::new(200, "intruder")),
        (held.clone(), Outcome::new(200, "mine")),
        (done.clone(), Outcome::new(200, "second")),
        (done.clone(), Outcome::new(200, "first")),
    ];
    let answers = ctx.store.complete_many(&calls).await;
    let [intruder, mine, second, first] =
        <[_; 4]>::try_from(answers).map_err(|answers| Failed::Broken(format!("4 calls, {} answers", answers.len())))?;
    expect_error(intruder, ErrorKind::LeaseLost, "a foreign token in a batch")?;
    mine?;
    expect_error(second, ErrorKind::AlreadyCompleted, "another outcome in a batch")?;
    first?;
    ensure_eq!(ctx.replay(&held.key).await?.outcome(), Some(&Outcome::new(200, "mine")), "the outcome");
    ensure_eq!(ctx.replay(&done.key).await?.outcome(), Some(&Outcome::new(200, "first")), "the outcome");
    ctx.store.complete(&lost, &Outcome::new(200, "still mine")).await?;
    Ok(())
}

async fn r12_one_bad_call_in_a_batch_does_not_touch_its_neighbours(ctx: &Ctx) -> Verdict {
    let keys = [ctx.key("a")?, ctx.key("b")?, ctx.key("c")?];
    let mut requests = keys.each_ref().map(|key| ctx.request(key));
    requests[1].lease = Duration::ZERO;
    let mut answers = ctx.store.reserve_many(&requests).await.into_iter();
    let (Some(Ok(Reservation::Acquired(first))), Some(bad), Some(Ok(Reservation::Acquired(third)))) =
        (answers.next(), answers.next(), answers.next())
    else {
        return Err(Failed::Broken("the neighbours of a bad request must be acquired".to_owned()));
    };
    expect_error(bad, ErrorKind::InvalidInput, "a bad request in a batch")?;
    ensure_eq!(ctx.store.fetch(&keys[1]).await?, None, "the key of the bad request");
    let limit = ctx.store.capabilities().max_outcome_bytes;
    let calls = [(first, Outcome::new(200, vec![0; limit + 1])), (third, Outcome::new(200, "fine"))];
    let mut answers = ctx.store.complete_many(&calls).await.into_iter();
    let (Some(bad), Some(Ok(()))) = (answers.next(), answers.next()) else {
        return Err(Failed::Broken("the neighbour of a bad complete must be completed".to_owned()));
    };
    expect_error(bad, ErrorKind::InvalidInput, "a bad complete in a batch")?;
    ctx.refused(&keys[0]).await?;
    ctx.replay(&keys[2]).await?;
    Ok(())
}

/// Two requests of one batch that differ: one of them has the key, and the other is told so.
async fn r03_mismatch_within_a_batch(ctx: &Ctx) -> Verdict {
    let (print, other) = prints();
    let key = ctx.key("k")?;
    let requests = [print, other].map(|print| ctx.request(&key).with_fingerprint(print));
    let answers = ctx.store.reserve_many(&requests).await.into_iter().collect::<Result<Vec<_>, _>>()?;
    let count = |wanted: fn(&Reservation) -> bool| answers.iter().filter(|answer| wanted(answer)).count();
    // Not always the first of them: it may have to be sent again.
    ensure!(
        count(|answer| matches!(answer, Reservation::Acquired(_))) == 1
            && count(|answer| *answer == Reservation::Mismatch) == 1,
        "two fingerprints for one free key in one batch were answered {answers:?}"
    );
    Ok(())
}

async fn r04_a_request_twice_in_a_batch_is_one_attempt(ctx: &Ctx) -> Verdict {
    let request = ctx.request(&ctx.key("k")?);
    for answer in ctx.store.reserve_many(&[request.clone(), request.clone()]).await {
        let lease = ensure_is!(answer?, Reservation::Acquired(lease) => lease, "a request that is twice in a batch");
        ensure_eq!((lease.token, lease.attempt), (request.token, 1), "token and attempt of the lease");
    }
    Ok(())
}

async fn r05_a_batch_takes_over_as_a_single_reserve_does(ctx: &Ctx) -> Verdict {
    let lost = ctx.abandoned(&ctx.key("gone")?).await?;
    let requests = [ctx.request(&ctx.key("free")?), ctx.request(&lost.key)];
    let mut answers = ctx.store.reserve_many(&requests).await;
    let held =
        ensure_is!(answers.pop(), Some(Ok(Reservation::Acquired(lease))) => lease, "an abandoned key in a batch");
    let previous = ensure_is!(held.origin, Origin::Takeover(previous) => previous, "the origin of a takeover");
    ensure_eq!((held.attempt, previous.attempt, previous.token), (2, 1, lost.token), "both attempts of a takeover");
    let calls = [(lost, Outcome::new(200, "late")), (held.clone(), Outcome::new(200, "current"))];
    let mut answers = ctx.store.complete_many(&calls).await;
    ensure_is!(answers.pop(), Some(Ok(())) => (), "the holder's complete in a batch");
    let late = ensure_is!(answers.pop(), Some(answer) => answer, "the answer to a late complete in a batch");
    expect_error(late, ErrorKind::LeaseLost, "a complete after a takeover, in a batch")?;
    ensure_eq!(ctx.replay(&held.key).await?.outcome(), Some(&Outcome::new(200, "current")), "the outcome");
    Ok(())
}

async fn r07_a_key_twice_in_a_batch_of_completes_gets_one_outcome(ctx: &Ctx) -> Verdict {
    let (same, other) = (ctx.acquire(&ctx.key("same")?).await?, ctx.acquire(&ctx.key("other")?).await?);
    let outcomes = [Outcome::new(200, "first"), Outcome::new(200, "second")];
    let calls = [
        (same.clone(), outcomes[0].clone()),
        (other.clone(), outcomes[0].clone()),
        (same.clone(), outcomes[0].clone()),
        (other.clone(), outcomes[1].clone()),
    ];
    let answers = ctx.store.complete_many(&calls).await;
    let [once, first, again, second] =
        <[_; 4]>::try_from(answers).map_err(|answers| Failed::Broken(format!("4 calls, {} answers", answers.len())))?;
    once?;
    again?;
    // Not always the first of them: it may have to be sent again.
    let (kept, refused) = if first.is_ok() { (&outcomes[0], second) } else { (&outcomes[1], first) };
    expect_error(refused, ErrorKind::AlreadyCompleted, "another outcome for the same key in one batch")?;
    ensure!(ctx.replay(&other.key).await?.outcome() == Some(kept), "the outcome kept is not the one that was accepted");
    Ok(())
}

async fn r09_expired_records_are_absent_for_a_batch(ctx: &Ctx) -> Verdict {
    let (held, done, failed) = (ctx.key("held")?, ctx.key("done")?, ctx.key("failed")?);
    let (print, other) = prints();
    let mut leases: Vec<Lease> = Vec::new();
    for key in [&held, &done, &failed] {
        leases.push(ctx.acquire_by(&ctx.request(key).with_fingerprint(print)).await?);
    }
    ctx.store.complete(&leases[1], &Outcome::new(200, "old")).await?;
    ctx.store.fail(&leases[2], &Failure::default()).await?;
    ctx.pass_until(ctx.now(), ctx.scale.retention).await?;
    let calls: Vec<_> = leases.iter().map(|lease| (lease.clone(), Outcome::new(200, "old"))).collect();
    for answer in ctx.store.complete_many(&calls).await {
        expect_error(answer, ErrorKind::LeaseLost, "completing an expired record in a batch")?;
    }
    let requests = leases.iter().map(|lease| ctx.request(&lease.key).with_fingerprint(other)).collect::<Vec<_>>();
    for answer in ctx.store.reserve_many(&requests).await {
        let lease = ensure_is!(answer?, Reservation::Acquired(lease) => lease, "an expired record in a batch");
        ensure_eq!((lease.attempt, lease.origin), (1, Origin::Fresh), "the attempt after the record expired");
    }
    Ok(())
}

/// Nothing keeps a caller from using one token for several keys.
async fn r06_a_batch_goes_by_its_keys_and_not_by_its_tokens(ctx: &Ctx) -> Verdict {
    let token = Token::random();
    let keys = (0..6).map(|at| ctx.key(&format!("k{at}"))).collect::<Verdict<Vec<_>>>()?;
    let began = ctx.now();
    // The first, the third and the fifth are another's.
    for key in keys.iter().step_by(2) {
        ctx.acquire(key).await?;
    }
    let requests: Vec<Reserve> = keys.iter().map(|key| ctx.request(key).with_token(token)).collect();
    let answers = ctx.store.reserve_many(&requests).await;
    ctx.in_time(began, ctx.scale.lease)?;
    ensure_eq!(answers.len(), keys.len(), "the answers of a batch");
    let mut calls = Vec::new();
    for (at, answer) in answers.into_iter().enumerate() {
        match answer? {
            Reservation::Acquired(lease) if at % 2 == 1 => calls.push((lease, Outcome::new(200, at.to_string()))),
            Reservation::InProgress { .. } if at % 2 == 0 => {
                let lease = Lease::new(keys[at].clone(), token, 1, Origin::Fresh, ctx.scale.retention);
                calls.push((lease, Outcome::new(200, "intruder")));
            }
            other => return Err(Failed::Broken(format!("key {at} of a batch with one token was told {other:?}"))),
        }
    }
    for (at, answer) in ctx.store.complete_many(&calls).await.into_iter().enumerate() {
        if at % 2 == 0 {
            expect_error(answer, ErrorKind::LeaseLost, "completing another's key")?;
        } else {
            answer?;
        }
    }
    for (at, key) in keys.iter().enumerate() {
        let outcome = ctx.record(key).await?.outcome().cloned();
        ensure_eq!(outcome, (at % 2 == 1).then(|| Outcome::new(200, at.to_string())), "the outcome of key {at}");
    }
    Ok(())
}

/// The same keys in opposite orders: each is acquired once, and nothing deadlocks.
async fn r01_batches_that_overlap_acquire_each_key_once(ctx: &Ctx) -> Verdict {
    const KEYS: usize = 60;
    for round in 0..5 {
        let keys = (0..KEYS).map(|at| ctx.key(&format!("{round}-{at}"))).collect::<Verdict<Vec<_>>>()?;
        let mut tasks = tokio::task::JoinSet::new();
        for worker in 0..4 {
            let store = ctx.store.clone();
            let mut requests: Vec<Reserve> = keys.iter().map(|key| ctx.request(key)).collect();
            if worker % 2 == 1 {
                requests.reverse();
            }
            tasks.spawn(async move {
                let mut calls = Vec::new();
                for answer in store.reserve_many(&requests).await {
                    if let Reservation::Acquired(lease) = answer? {
                        calls.push((lease, Outcome::new(200, "")));
                    }
                }
                for answer in store.complete_many(&calls).await {
                    answer?;
                }
                Ok::<_, idem_core::StoreError>(calls.len())
            });
        }
        let mut acquired = 0;
        for part in tasks.join_all().await {
            acquired += part?;
        }
        ensure_eq!(acquired, KEYS, "keys acquired by 4 batches of the same {KEYS} keys");
    }
    Ok(())
}
