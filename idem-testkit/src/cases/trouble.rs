//! R13: trouble is an error and never "absent". R14: dropped calls.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use idem_core::{ErrorClass, ErrorKind, KeyStore, Outcome, PurgeBudget, Reservation, State, StoreError};
use rand::RngExt;
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use super::cases;
use crate::context::{Ctx, expect_error, note};
use crate::probe::dropped;
use crate::verdict::{Failed, Verdict, ensure, ensure_eq, ensure_is};

cases! {
    R13 r13_trouble_is_never_taken_for_an_absent_record [disturb, once];
    R13 r13_what_was_acknowledged_survives_trouble [disturb, once];
    R13 r13_a_retryable_error_means_that_nothing_happened [disturb, once];
    R13 r13_what_cannot_be_read_is_an_error_of_every_call [garble];
    R13 r13_errors_of_input_are_permanent;
    R14 r14_a_dropped_call_is_done_or_not_done [once];
    R14 r14_a_dropped_batch_is_done_or_not_done_key_by_key [once];
    R14 r14_a_dropped_call_does_not_hold_its_neighbours_up [once];
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
        for error in
            [answers.0.as_ref().err(), answers.1.as_ref().err(), answers.2.as_ref().err()].into_iter().flatten()
        {
            ensure!(error.class() != ErrorClass::Permanent, "trouble passes, and a caller must not give up: {error:?}");
        }
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

/// Reserves keys while the store is in trouble: where it says that nothing has happened, nothing must have.
async fn r13_a_retryable_error_means_that_nothing_happened(ctx: &Ctx) -> Verdict {
    let store = ctx.fixture.store();
    let mut unharmed = Vec::new();
    for round in 0..3 {
        let (disturbed, answers) = tokio::join!(ctx.fixture.disturb(), async {
            let mut answers = Vec::new();
            for at in 0..20 {
                let request = ctx.key(&format!("{round}-{at}")).map(|key| ctx.request(&key))?;
                // Still there when it is looked for.
                let request = request.with_retention(ctx.long_retention());
                let answer = store.reserve(&request).await;
                ctx.log.add(&format!("in trouble: {answer:?}"));
                answers.push((request.key, answer));
                tokio::task::yield_now().await;
            }
            Ok::<_, Failed>(answers)
        });
        disturbed?;
        let retryable =
            |answer: &Result<_, StoreError>| answer.as_ref().is_err_and(|error| error.class() == ErrorClass::Retryable);
        unharmed.extend(answers?.into_iter().filter(|(_, answer)| retryable(answer)).map(|(key, _)| key));
    }
    for key in unharmed {
        let found = ctx.store.fetch(&key).await?;
        ensure!(found.is_none(), "a reserve was said to have had no effect, and has left {found:?}");
    }
    Ok(())
}

async fn r13_what_cannot_be_read_is_an_error_of_every_call(ctx: &Ctx) -> Verdict {
    let (held, done, good) = (ctx.key("held")?, ctx.key("done")?, ctx.key("good")?);
    let outcome = Outcome::new(200, "done");
    // Long-lived: where the store removes what has expired by itself, it is right to remove these then.
    let kept = |key| ctx.request(key).with_retention(ctx.long_retention());
    let leases = [ctx.acquire_by(&kept(&held)).await?, ctx.acquire_by(&kept(&done)).await?];
    ctx.store.complete(&leases[1], &outcome).await?;
    let purge = async || ctx.store.purge_expired(PurgeBudget::default()).await;
    for lease in &leases {
        ctx.fixture.garble(&lease.key).await?;
    }
    for lease in &leases {
        let (kind, request) = (ErrorKind::Unreadable, ctx.request(&lease.key));
        for round in 0..2 {
            expect_error(ctx.store.fetch(&lease.key).await, kind, "a fetch of what cannot be read")?;
            expect_error(ctx.store.reserve(&request).await, kind, "a reserve of what cannot be read")?;
            expect_error(ctx.store.complete(lease, &outcome).await, kind, "a complete of what cannot be read")?;
            expect_error(ctx.store.fail(lease, &note("no")?).await, kind, "a fail of what cannot be read")?;
            expect_error(ctx.store.renew(lease, ctx.scale.lease).await, kind, "a renewal of what cannot be read")?;
            if round == 0 {
                // Nor may a purge make room for a second run. Whether it tells is its own affair.
                drop(purge().await);
            }
        }
    }
    // Its neighbours are well, also in a batch.
    let requests = [ctx.request(&held), ctx.request(&good)];
    let mut answers = ctx.store.reserve_many(&requests).await;
    ensure_is!(answers.pop(), Some(Ok(Reservation::Acquired(_))) => (), "the neighbour of what cannot be read");
    let answer = ensure_is!(answers.pop(), Some(answer) => answer, "the answer on what cannot be read, in a batch");
    expect_error(answer, ErrorKind::Unreadable, "a reserve of what cannot be read, in a batch")
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

async fn r14_a_dropped_batch_is_done_or_not_done_key_by_key(ctx: &Ctx) -> Verdict {
    let store = ctx.fixture.store();
    let mut rng = ctx.rng();
    for round in 0..20 {
        let requests = (0..10)
            .map(|at| ctx.key(&format!("{round}-{at}")).map(|key| ctx.request(&key)))
            .collect::<Verdict<Vec<_>>>()?;
        dropped(store.reserve_many(&requests), rng.random_range(0..12)).await;
        let mut calls = Vec::new();
        for request in &requests {
            // The same request tells, and holds the key whether or not the first was delivered.
            let lease = ctx.acquire_by(request).await?;
            ensure_eq!(lease.attempt, 1, "the attempt after a dropped batch of reserves");
            calls.push((lease, Outcome::new(200, format!("{round}"))));
        }
        dropped(store.complete_many(&calls), rng.random_range(0..12)).await;
        for (lease, outcome) in &calls {
            let record = ctx.record(&lease.key).await?;
            match &record.state {
                State::InProgress => {}
                state => ensure!(*state == State::Completed(outcome.clone()), "a half-done complete: {record:?}"),
            }
            ctx.store.complete(lease, outcome).await?;
            ensure!(ctx.replay(&lease.key).await?.outcome() == Some(outcome), "the outcome after a dropped batch");
        }
    }
    Ok(())
}

/// Calls that are under way together may travel together: one that is dropped must not strand the others.
async fn r14_a_dropped_call_does_not_hold_its_neighbours_up(ctx: &Ctx) -> Verdict {
    const CALLERS: usize = 24;
    let mut rng = ctx.rng();
    for round in 0..10 {
        ctx.log.add(&format!("-- {CALLERS} callers reserve a key each, and two of three are dropped --"));
        let barrier = Arc::new(Barrier::new(CALLERS));
        let mut tasks = JoinSet::new();
        for caller in 0..CALLERS {
            let request = ctx.key(&format!("{round}-{caller}")).map(|key| ctx.request(&key))?;
            let (bare, store, barrier) = (ctx.fixture.store(), ctx.store.clone(), barrier.clone());
            // Every third stays.
            let polls = (caller % 3 != 0).then(|| rng.random_range(1..4));
            tasks.spawn(async move {
                barrier.wait().await;
                if let Some(polls) = polls {
                    dropped(bare.reserve(&request), polls).await;
                    return Ok(());
                }
                let answer = store.reserve(&request).await?;
                let lease = ensure_is!(answer, Reservation::Acquired(lease) => lease, "a key of one's own");
                store.complete(&lease, &Outcome::new(200, "")).await?;
                Ok::<_, Failed>(())
            });
        }
        let Ok(ended) = tokio::time::timeout(Duration::from_secs(10), tasks.join_all()).await else {
            return Err(Failed::Broken("beside calls that were dropped, others were not answered in 10 s".to_owned()));
        };
        ended.into_iter().collect::<Verdict<Vec<()>>>()?;
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
