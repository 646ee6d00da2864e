//! The executor on stores that fail, with time that passes by hand.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod basics;
mod leases;
mod outcomes;
mod own_completion;
mod policies;
mod results;
mod support;
mod waiting;
