//! The highest rate that is held.

use super::report::Step;
use crate::Failed;

/// By how much the rate grows until it is held no more.
const GROWTH: f64 = 2.0;
/// How close the highest rate that is held and the lowest that is not have to be.
const CLOSE: f64 = 1.06;
/// More arrivals a second than any of this would hold.
const MOST: f64 = 10_000_000.0;

/// Runs at growing rates from that one on, and then between the last that was held and the first that was not. Gives all
/// runs, and the highest rate that was held under that limit of p99, in milliseconds. Stops at a wrong answer.
///
/// # Errors
/// Those of a run.
pub fn sweep(
    first: f64,
    limit: f64,
    mut run: impl FnMut(f64) -> Result<Step, Failed>,
) -> Result<(Vec<Step>, Option<f64>), Failed> {
    let (mut steps, mut held, mut not_held) = (Vec::new(), None::<f64>, None::<f64>);
    let mut rate = first;
    loop {
        let mut step = run(rate)?;
        if !step.is_held(limit) && held.is_some() && step.faults == 0 {
            // Once more: on a machine with others, a stall of a moment is not the store's.
            steps.push(step);
            step = run(rate)?;
        }
        let (is_held, is_wrong) = (step.is_held(limit), step.faults > 0);
        steps.push(step);
        if is_wrong {
            return Ok((steps, held));
        }
        if is_held {
            held = Some(rate);
        } else {
            not_held = Some(rate);
        }
        rate = match (held, not_held) {
            (Some(held), None) => held * GROWTH,
            (Some(held), Some(not_held)) if not_held / held > CLOSE => (held * not_held).sqrt().round(),
            (None, Some(not_held)) if not_held > 16.0 => (not_held / GROWTH / GROWTH).round(),
            _ => return Ok((steps, held)),
        };
        if rate > MOST {
            return Ok((steps, held));
        }
    }
}
