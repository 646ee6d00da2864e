//! Random concurrent histories with lost replies, dropped calls and jumps of time, checked for a legal order; in peace
//! and while the store is disturbed.

use super::cases;
use crate::context::Ctx;
use crate::harness::Time;
use crate::history::{self, CALM, DISTURBED};
use crate::settings::seeds;
use crate::verdict::{Failed, Verdict};

cases! {
    ALL histories_have_a_legal_order [once];
    ALL histories_under_disturbance_have_a_legal_order [disturb, once];
}

async fn histories_have_a_legal_order(ctx: &Ctx) -> Verdict {
    let default = match ctx.time {
        Time::Manual | Time::Shifted => 50,
        Time::Real => 8,
    };
    for seed in seeds(default) {
        history::run(ctx, seed, 0, CALM).await?;
    }
    Ok(())
}

async fn histories_under_disturbance_have_a_legal_order(ctx: &Ctx) -> Verdict {
    const RUNS: u32 = 5;
    let default = match ctx.time {
        Time::Manual | Time::Shifted => 16,
        Time::Real => 3,
    };
    for seed in seeds(default) {
        let mut run = 0;
        loop {
            match history::run(ctx, seed, run, DISTURBED).await {
                // The seed alone once more, not those before it.
                Err(Failed::Inconclusive(_)) if run + 1 < RUNS => run += 1,
                verdict => break verdict?,
            }
        }
    }
    Ok(())
}
