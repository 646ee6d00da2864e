//! Examples of idem in use.
//!
//! - [`redb_store`]: a backend over an embedded database, as somebody outside of this project would write it. The
//!   conformance kit's proof of it is `tests/redb.rs`.
//! - [`write_a_backend`] and [`readme`]: the guide and the project's README, compiled.
//! - [`natural_key`] and [`versioned_append`]: operations that have a key of their own in Postgres. Run them by
//!   `cargo run -p idem-examples --bin recipes -- postgres://…`; the proof is `tests/recipes.rs`.
//! - The payments API is a program: `cargo run -p idem-examples --bin payments -- --demo`.

pub mod natural_key;
pub mod redb_store;
pub mod versioned_append;

#[doc = include_str!("../../docs/write-a-backend.md")]
pub mod write_a_backend {}

#[doc = include_str!("../../README.md")]
pub mod readme {}
