//! The layer in process, request by request.
#![allow(missing_docs, clippy::panic, clippy::unwrap_used, reason = "tests")]

mod executions;
mod finality;
mod keys;
mod observing;
mod policy;
mod requests;
mod statuses;
mod storing;
mod support;
mod trouble;
