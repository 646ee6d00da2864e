//! R13: trouble is an error and never "absent". R14: dropped calls.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::{Duration, Instant};

use idem_core::{ErrorClass, ErrorKind, KeyStore, Outcome, Reservation, State};
use rand::RngExt;

use super::cases;
use crate::context::Ctx;
use crate::verdict::{Failed, Verdict, ensure, ensure_eq, ensure_is};

cases! {
    R13 r13_trouble_is_never_taken_for_an_absent_record [disturb, once];
    R13 r13_what_was_acknowledged_survives_trouble [disturb, once];
    R13 r13_errors_of_input_are_permanent;
    R14 r14_a_dropped_call_is_done_or_not_done [once];
    R14 r14_dropped_calls_leak_nothing [once];
}

/// Asks for a completed and a held key, while the store is in trouble and after.
async fn r13_trouble_is_never_taken_for_an_absent_record(ctx: &Ctx) -> Verdict {
    let (done, held) = (ctx.key("done")?, ctx.key("held")?);
    ctx.completed(&done, &Outcome::new(200, "kept")).await?;
    let lease = ctx.acquire_by(&ctx.request(&held).with_lease(ctx.scale.retention)).await?;
    // The bare store: the errors are what this is about.
    let store = ctx.fixture.store();
    let mut disturbance = pin!(ctx.fixture.disturb());
    let mut disturbed = false;
    let (mut calm, mut calls) = (0, 0);
    let end = Instant::now() + Duration::from_secs(20);
    while calm < 10 && Instant::now() < end {
        if !disturbed {
            let mut ended = None;
            poll_fn(|cx| {
                if let Poll::Ready(result) = disturbance.as_mut().poll(cx) {
                    ended = Some(result);
                }
                Poll::Ready(())
            })
            .await;
            if let Some(result) = ended {
                result?;
                disturbed = true;
            }
        }
        calls += 1;
        let answers = (
            store.fetch(&done).await,
            store.reserve(&ctx.request(&done)).await,
            store.reserve(&ctx.request(&held)).await,
        );
        ctx.log.add(&format!("in trouble: {answers:?}"));
        calm = if answers.0.is_ok() && answers.1.is_ok() && answers.2.is_ok() && disturbed { calm + 1 } else { 0 };
        if let Ok(found) = answers.0 {
            ensure!(found.is_some(), "a completed record was not found while the store was in trouble");
        }
        if let Ok(answer) = answers.1 {
            ensure_is!(answer, Reservation::Completed(_) => (), "a completed key while the store was in trouble");
        }
        if let Ok(answer) = answers.2 {
            ensure_is!(answer, Reservation::InProgress { .. } => (), "a held key while the store was in trouble");
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    ensure!(calm >= 10, "the store did not recover in 20 s, after {calls} rounds of calls");
    ctx.store.complete(&lease, &Outcome::new(200, "")).await?;
    Ok(())
}

async fn r13_what_was_acknowledged_survives_trouble(ctx: &Ctx) -> Verdict {
    let mut acknowledged = Vec::new();
    for round in 0..3 {
        for at in 0..10 {
            let key = ctx.key(&format!("{round}-{at}"))?;
            let outcome = Outcome::new(200, format!("{round}-{at}"));
            ctx.completed(&key, &outcome).await?;
            acknowledged.push((key, outcome));
        }
        ctx.fixture.disturb().await?;
    }
    for (key, outcome) in &acknowledged {
        ensure!(ctx.replay(key).await?.outcome() == Some(outcome), "{key:?} lost its outcome");
    }
    Ok(())
}

async fn r13_errors_of_input_are_permanent(ctx: &Ctx) -> Verdict {
    let request = ctx.request(&ctx.key("k")?).with_lease(Duration::ZERO);
    let error = ensure_is!(ctx.store.reserve(&request).await, Err(error) => error, "a lease of nothing");
    ensure_eq!((error.kind(), error.class()), (ErrorKind::InvalidInput, ErrorClass::Permanent), "kind and class");
    ensure!(error.invalid_input().is_some(), "the source of {error:?} must be an InvalidInput");
    let lease = ctx.failed(&ctx.key("lost")?).await?;
    let error =
        ensure_is!(ctx.store.complete(&lease, &Outcome::new(200, "")).await, Err(error) => error, "a lost lease");
    ensure_eq!((error.kind(), error.class()), (ErrorKind::LeaseLost, ErrorClass::Permanent), "kind and class");
    Ok(())
}

/// Polls a call a few times and drops it, as a time-out or a client that hangs up does.
async fn dropped<T>(call: impl Future<Output = T>, polls: u32) -> Option<T> {
    let mut call = pin!(call);
    let mut left = polls;
    let polled = poll_fn(|cx| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        call.as_mut().poll(cx).map(Some)
    });
    tokio::time::timeout(Duration::from_millis(u64::from(polls)), polled).await.ok().flatten()
}

async fn r14_a_dropped_call_is_done_or_not_done(ctx: &Ctx) -> Verdict {
    let store = ctx.fixture.store();
    let mut rng = ctx.rng();
    for round in 0..60 {
        let key = ctx.key(&format!("k{round}"))?;
        let request = ctx.request(&key);
        let mut polls = || rng.random_range(0..5);
        dropped(store.reserve(&request), polls()).await;
        // The same request tells, and holds the key whether or not the first was delivered.
        let lease = ctx.acquire_by(&request).await?;
        ensure_eq!(lease.attempt, 1, "the attempt after a dropped reserve");
        dropped(store.renew(&lease, ctx.scale.lease), polls()).await;
        let outcome = Outcome::new(200, vec![b'x'; 5_000]);
        match round % 2 {
            0 => {
                dropped(store.complete(&lease, &outcome), polls()).await;
                let record = ctx.record(&key).await?;
                match &record.state {
                    State::InProgress => {}
                    state => ensure!(*state == State::Completed(outcome.clone()), "a half-done complete: {record:?}"),
                }
                ctx.store.complete(&lease, &outcome).await?;
                ensure!(ctx.replay(&key).await?.outcome() == Some(&outcome), "the outcome after a dropped complete");
            }
            _ => {
                let failure = crate::context::note("dropped")?;
                dropped(store.fail(&lease, &failure), polls()).await;
                ctx.store.fail(&lease, &failure).await?;
                ensure_eq!(ctx.acquire(&key).await?.attempt, 2, "the attempt after a dropped fail");
            }
        }
    }
    Ok(())
}

/// Drops far more calls than a store can have connections, and wants it as quick as before.
async fn r14_dropped_calls_leak_nothing(ctx: &Ctx) -> Verdict {
    let store = ctx.fixture.store();
    let mut rng = ctx.rng();
    for round in 0..300 {
        let key = ctx.key(&format!("k{round}"))?;
        let request = ctx.request(&key);
        dropped(store.reserve(&request), rng.random_range(0..3)).await;
        dropped(store.fetch(&key), rng.random_range(0..3)).await;
    }
    let work = async {
        for round in 0..20 {
            ctx.completed(&ctx.key(&format!("after-{round}"))?, &Outcome::new(200, "")).await?;
        }
        Ok(())
    };
    match tokio::time::timeout(Duration::from_secs(10), work).await {
        Ok(verdict) => verdict,
        Err(_) => Err(Failed::Broken("after 600 dropped calls, 20 keys could not be completed in 10 s".to_owned())),
    }
}
