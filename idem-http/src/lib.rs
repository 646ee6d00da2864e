#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod body;
mod canonical;
mod decision;
mod finality;
mod fingerprint;
mod future;
mod key;
mod layer;
mod observe;
mod policy;
mod refusal;
mod run;
mod scope;
mod service;
mod settings;
mod stored;

#[cfg(feature = "axum")]
mod before_run;

pub use idem_core::executor::Attempt;
pub use idem_core::{Fingerprint, Scope};

#[cfg(feature = "axum")]
pub use before_run::BeforeRun;
pub use body::{RequestBody, ResponseBody};
pub use decision::{Decision, Recorded};
pub use finality::{Finality, Recording};
pub use fingerprint::Fingerprinting;
pub use future::ResponseFuture;
pub use key::{InvalidKey, KeyFormat, parse_key};
pub use layer::{IdempotencyLayer, StillRunning};
pub use observe::KeysInLogs;
pub use policy::PublishedPolicy;
pub use refusal::{Reason, Refusal};
pub use scope::{RequestScope, SingleTenant};
pub use service::Idempotency;
pub use settings::OnStoreError;
pub use stored::outcome;
