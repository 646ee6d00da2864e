#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub mod clock;
pub mod codec;
pub mod decision;
pub mod executor;
pub mod limits;
pub mod store;

mod cached;
mod error;
mod fingerprint;
mod key;
mod memory;
mod outcome;
mod record;
mod request;
mod token;

pub use cached::{Cached, CachedBuilder};
pub use error::{ErrorClass, ErrorKind, Operation, StoreError};
pub use executor::{Executor, RunError};
pub use fingerprint::{Fingerprint, FingerprintBuilder};
pub use key::{Key, Scope};
pub use limits::InvalidInput;
pub use memory::{MemoryStore, MemoryStoreBuilder};
pub use outcome::{Body, Failure, Header, Headers, Outcome, Withheld};
pub use record::{Record, State};
pub use request::{Lease, OnAbandoned, Origin, PreviousAttempt, PurgeBudget, Purged, Reservation, Reserve};
pub use store::{Capabilities, KeyStore};
pub use token::Token;
