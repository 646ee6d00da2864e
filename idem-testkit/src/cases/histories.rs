//! Random concurrent histories with lost replies, dropped calls and jumps of time, checked for a legal order.

use super::cases;
use crate::context::Ctx;
use crate::harness::Time;
use crate::history;
use crate::settings::seeds;
use crate::verdict::Verdict;

cases! {
    ALL histories_have_a_legal_order [once];
}

async fn histories_have_a_legal_order(ctx: &Ctx) -> Verdict {
    let default = match ctx.time {
        Time::Manual | Time::Shifted => 50,
        Time::Real => 8,
    };
    for seed in seeds(default) {
        history::run(ctx, seed).await?;
    }
    Ok(())
}
