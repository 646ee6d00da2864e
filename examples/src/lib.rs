//! Examples of idem in use.
//!
//! - [`redb_store`]: a backend over an embedded database, as somebody outside of this project would write it. The
//!   conformance kit's proof of it is `tests/redb.rs`.
//! - [`write_a_backend`]: the guide, compiled.

pub mod redb_store;

#[doc = include_str!("../../docs/write-a-backend.md")]
pub mod write_a_backend {}
