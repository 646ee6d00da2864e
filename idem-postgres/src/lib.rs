#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod batch;
mod calls;
mod config;
mod conflict;
mod connections;
mod error;
mod headers;
mod maintain;
mod query;
mod schema;
mod store;
mod transaction;

pub use config::{Batching, Config, Schema};
pub use conflict::{UniqueViolation, is_unique_violation};
pub use error::PostgresError;
pub use maintain::{Maintained, Maintenance};
pub use sqlx;
pub use store::PostgresStore;
