#![doc = include_str!("../README.md")]

mod batch;
mod calls;
mod config;
mod error;
mod keys;
mod network;
mod records;
mod run;
mod settings;
mod store;
mod value;

pub use config::{Batching, Config};
pub use error::{CallError, FdbStoreError};
pub use foundationdb;
pub use network::boot;
pub use records::Records;
pub use store::FdbStore;
pub use value::ValueError;
