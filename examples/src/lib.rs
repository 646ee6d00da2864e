//! Examples of idem in use.
//!
//! - [`redb_store`]: a backend over an embedded database, as somebody outside of this project would write it. The
//!   conformance kit's proof of it is `tests/redb.rs`.
//! - [`write_a_backend`] and [`readme`]: the guide and the project's README, compiled.
//! - The payments API is a program: `cargo run -p idem-examples --bin payments -- --demo`.

pub mod redb_store;

#[doc = include_str!("../../docs/write-a-backend.md")]
pub mod write_a_backend {}

#[doc = include_str!("../../README.md")]
pub mod readme {}
