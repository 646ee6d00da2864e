//! What a run has shown.

use std::collections::BTreeMap;

use hdrhistogram::Histogram;
use serde::Serialize;

use super::mix::Mix;
use crate::Failed;

/// Latencies in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Default)]
pub struct Latency {
    /// How many.
    pub count: u64,
    /// The median.
    pub p50: f64,
    /// What 90 of a hundred do not exceed.
    pub p90: f64,
    /// What 99 of a hundred do not exceed.
    pub p99: f64,
    /// What 999 of a thousand do not exceed.
    pub p999: f64,
    /// The longest.
    pub max: f64,
}

impl Latency {
    /// Of all these together, which hold nanoseconds.
    ///
    /// # Errors
    /// None, but for a mistake here.
    pub fn of(histograms: &[Histogram<u32>]) -> Result<Self, Failed> {
        let mut all = Histogram::<u32>::new_with_bounds(1, 600_000_000_000, 3)?;
        for histogram in histograms {
            all.add(histogram)?;
        }
        Ok(Self::of_one(&all))
    }

    /// Of one, which holds nanoseconds.
    #[must_use]
    pub fn of_one<C: hdrhistogram::Counter>(histogram: &Histogram<C>) -> Self {
        let at = |quantile: f64| histogram.value_at_quantile(quantile) as f64 / 1e6;
        if histogram.is_empty() {
            return Self::default();
        }
        Self {
            count: histogram.len(),
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p999: at(0.999),
            max: histogram.max() as f64 / 1e6,
        }
    }
}

/// A piece of a run.
#[derive(Debug, Clone, Serialize)]
pub struct Point {
    /// Its end, since the first counted arrival.
    pub seconds: f64,
    /// Answered a second.
    pub rate: f64,
    /// Of those that were answered in it.
    pub latency: Latency,
}

/// Something that happened meanwhile.
#[derive(Debug, Clone, Serialize)]
pub struct Event {
    /// When it began, since the first counted arrival.
    pub seconds: f64,
    /// How long it lasted.
    pub lasted: f64,
    /// What.
    pub what: String,
}

/// A run at one rate.
#[derive(Debug, Clone, Serialize)]
pub struct Step {
    /// Arrivals a second.
    pub rate: f64,
    /// For so long.
    pub seconds: f64,
    /// Answered a second, until the last one was.
    pub achieved: f64,
    /// Whether arrivals were handed over in time: otherwise the figures are those of the generator.
    pub kept_up: bool,
    /// How late arrivals were handed over. It is part of their latency.
    pub late: Latency,
    /// Arrivals answered.
    pub answered: u64,
    /// Of all, from the intended start on.
    pub latency: Latency,
    /// Of those that ran: reserve and complete, or fail.
    pub ran: Latency,
    /// Of those that were replayed.
    pub replayed: Latency,
    /// Of those that were told that their key is in progress.
    pub in_flight: Latency,
    /// Arrivals that were not sent, because too many were under way.
    pub refused: u64,
    /// Arrivals that were not answered half a minute after the last one.
    pub unanswered: u64,
    /// Runs that failed because the mix wants it so.
    pub failed_on_purpose: u64,
    /// Keys that took effect.
    pub effects: u64,
    /// Completed keys that were asked for once more at the end.
    pub audited: u64,
    /// Wrong answers: a key took effect twice, or was replayed with another outcome, or the like.
    pub faults: u64,
    /// Some of them.
    pub shown_faults: Vec<String>,
    /// The store's trouble, and how often.
    pub errors: BTreeMap<String, u64>,
    /// Processor's time of this process, generator and client together.
    pub client_cpu_seconds: Option<f64>,
    /// Processor's time of a private server.
    pub server_cpu_seconds: Option<f64>,
    /// Memory that this process holds at the end.
    pub client_memory_bytes: Option<u64>,
    /// What happened meanwhile.
    pub events: Vec<Event>,
    /// Piece by piece.
    pub timeline: Vec<Point>,
}

impl Step {
    /// Whether the rate was held under that limit of p99, in milliseconds: nothing refused, nothing failed, nothing left.
    #[must_use]
    pub fn is_held(&self, limit: f64) -> bool {
        self.latency.count > 0
            && self.latency.p99 <= limit
            && self.refused == 0
            && self.unanswered == 0
            && self.errors.is_empty()
            && self.achieved >= 0.97 * self.rate
    }

    /// Errors of all kinds.
    #[must_use]
    pub fn errors(&self) -> u64 {
        self.errors.values().sum()
    }
}

/// All of it.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// The backend's name.
    pub store: String,
    /// What a crash of the server loses.
    pub durability: String,
    /// Records that were there before.
    pub preloaded: u64,
    /// What came.
    pub mix: Mix,
    /// The limit under which a rate is held: p99 in milliseconds.
    pub limit: Option<f64>,
    /// The highest rate that was held under it.
    pub held: Option<f64>,
    /// The runs, in their order.
    pub steps: Vec<Step>,
}

impl Report {
    /// Whether no answer was wrong and there were some; and, where the rate was given, whether every arrival got one.
    #[must_use]
    pub fn is_right(&self) -> bool {
        let is_answered = |step: &Step| self.limit.is_some() || (step.errors() == 0 && step.unanswered == 0);
        !self.steps.is_empty()
            && self.steps.iter().all(|step| step.faults == 0 && step.answered > 0 && is_answered(step))
    }
}
