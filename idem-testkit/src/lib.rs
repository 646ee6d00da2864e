#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub mod broken;

mod cases;
mod checker;
mod context;
mod harness;
mod history;
mod noisy;
mod probe;
mod runner;
#[cfg(unix)]
pub mod servers;
mod settings;
mod verdict;

pub use harness::{Abilities, Fixture, Harness, HarnessError, Missing, Time};
pub use noisy::Noisy;
pub use runner::{Report, case_names, run, run_disturbed_histories, run_histories, run_one, run_tests};
