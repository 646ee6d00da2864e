#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod batch;
mod calls;
mod check;
mod config;
mod error;
mod layout;
mod link;
mod scan;
mod store;

pub use check::{Finding, ServerReport};
#[doc(hidden)]
pub use config::ClockShift;
pub use config::{Acknowledge, Batching, Config, Fsync, Policy, Prefix};
pub use error::RedisStoreError;
pub use layout::LayoutError;
pub use link::Connection;
pub use redis;
pub use scan::{Scan, Scanned};
pub use store::RedisStore;
