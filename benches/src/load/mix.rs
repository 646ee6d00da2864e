//! Which arrivals come.

use std::sync::{Arc, Mutex, PoisonError};

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, Zipf};
use serde::Serialize;

use super::effects::{Effects, State};
use crate::Failed;

/// The shares of arrivals.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Mix {
    /// The share that repeats a key which is completed, and must be replays.
    pub repeats: f64,
    /// The share that comes together with the first request of its key.
    pub duplicates: f64,
    /// The share of runs that fail, and are retried.
    pub failures: f64,
    /// The exponent of Zipf's law, by which all keys are drawn from a fixed number of them: then repeats and duplicates are
    /// what comes of it.
    pub zipf: Option<f64>,
    /// That number of keys.
    pub keys: u64,
    /// Bytes of each outcome.
    pub body: usize,
}

/// Why an arrival comes, and so how it may be answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The only request of a new key: runs.
    New,
    /// The first or the second of two requests of a new key at once, or the retry of one of them.
    Twin,
    /// A repeat of a completed key: is replayed.
    Repeat,
    /// The retry of the only request of its key, which has failed: runs.
    Retry,
    /// Drawn by Zipf's law: anything.
    Drawn,
}

/// An arrival.
#[derive(Debug, Clone, Copy)]
pub struct Arrival {
    /// Its key's number.
    pub number: u64,
    /// Why it comes.
    pub kind: Kind,
    /// Whether it fails if it runs.
    pub fails: bool,
    /// Tells its attempt from all others.
    pub tag: u64,
}

/// Keys whose attempt has failed, to be tried again, and why that attempt came.
pub type Retries = Arc<Mutex<Vec<(u64, Kind)>>>;

/// Makes arrivals.
#[derive(Debug)]
pub struct Source {
    mix: Mix,
    effects: Arc<Effects>,
    retries: Retries,
    zipf: Option<Zipf<f64>>,
    random: SmallRng,
    /// The next new key.
    next: u64,
    twin: Option<u64>,
}

impl Mix {
    /// Checks the shares.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn validate(&self) -> Result<(), Failed> {
        for (name, share) in [("repeats", self.repeats), ("duplicates", self.duplicates), ("failures", self.failures)] {
            if !(0.0..=1.0).contains(&share) {
                return Err(format!("--{name} is a share from 0 to 1, not {share}").into());
            }
        }
        if self.repeats + self.duplicates > 1.0 {
            return Err("--repeats and --duplicates are more than all arrivals together".into());
        }
        if self.zipf.is_some_and(|exponent| !(0.0..=10.0).contains(&exponent)) || self.keys == 0 {
            return Err("--zipf is an exponent from 0 to 10, over at least one of --keys".into());
        }
        if self.body < super::effects::SMALLEST_BODY {
            return Err(format!("--body is {} bytes at least", super::effects::SMALLEST_BODY).into());
        }
        Ok(())
    }
}

impl Source {
    /// Arrivals of that mix.
    ///
    /// # Errors
    /// For an exponent or a number of keys that there is no distribution of.
    pub fn new(mix: Mix, effects: Arc<Effects>, retries: Retries) -> Result<Self, Failed> {
        let zipf = mix.zipf.map(|exponent| Zipf::new(mix.keys as f64, exponent)).transpose()?;
        let next = effects.preloaded();
        Ok(Self { mix, effects, retries, zipf, random: SmallRng::seed_from_u64(7), next, twin: None })
    }

    /// The next arrival; `None` when there is no key left for it.
    pub fn arrival(&mut self) -> Option<Arrival> {
        let tag = self.random.random::<u64>() >> 8;
        let fails = self.mix.failures > 0.0 && self.random.random_bool(self.mix.failures);
        let some = |number, kind| Some(Arrival { number, kind, fails, tag });
        if let Some(number) = self.twin.take() {
            return some(number, Kind::Twin);
        }
        if self.mix.failures > 0.0 {
            let retry = self.retries.lock().unwrap_or_else(PoisonError::into_inner).pop();
            if let Some((number, kind)) = retry {
                return some(number, if kind == Kind::New { Kind::Retry } else { kind });
            }
        }
        if let Some(zipf) = &self.zipf {
            let rank = zipf.sample(&mut self.random) as u64 - 1;
            return some(self.effects.preloaded() + rank, Kind::Drawn);
        }
        let drawn: f64 = self.random.random();
        if drawn < self.mix.repeats {
            // Most of the early ones are completed.
            for _ in 0..8 {
                let number = self.random.random_range(0..self.next.max(1));
                if matches!(self.effects.state(number), State::Completed(_)) {
                    return some(number, Kind::Repeat);
                }
            }
        }
        let number = self.next;
        if number >= self.effects.len() {
            return None;
        }
        self.next += 1;
        if (self.mix.repeats..self.mix.repeats + self.mix.duplicates).contains(&drawn) {
            self.twin = Some(number);
            return some(number, Kind::Twin);
        }
        some(number, Kind::New)
    }
}
