#![doc = include_str!("../README.md")]

pub mod backends;
#[cfg_attr(not(feature = "fdb"), path = "no_fdb.rs")]
pub mod fdb;
pub mod floors;
pub mod load;
pub mod process;
pub mod proxy;
pub mod servers;
pub mod subject;
pub mod workloads;

/// What went wrong: a server's trouble, or an answer that no correct store gives.
pub type Failed = Box<dyn std::error::Error + Send + Sync>;

/// Whether this is a smoke run: that it works, not how fast.
#[must_use]
pub fn is_smoke() -> bool {
    std::env::args().any(|argument| argument == "--test")
}

/// A key's id of that number: scattered, as clients' keys are, and of one length.
#[must_use]
pub fn id(number: u64) -> String {
    format!("{:016x}-{number:012}", number.wrapping_mul(0x9e37_79b9_7f4a_7c15))
}
