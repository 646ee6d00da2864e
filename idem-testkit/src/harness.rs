//! What a backend's author implements, once.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use idem_core::{Key, KeyStore};

/// An error of the harness itself, not of the store under test.
pub type HarnessError = Box<dyn Error + Send + Sync>;

/// Makes stores for the cases.
#[async_trait]
pub trait Harness: Send + Sync + 'static {
    /// The name of the store in reports.
    fn name(&self) -> String;

    /// What the fixtures can do beside giving a store. A case that needs more is listed as not run.
    fn abilities(&self) -> Abilities {
        Abilities::default()
    }

    /// The server that the store needs and that is not there, if so: then no case runs, each is listed as not run, and
    /// where `IDEM_REQUIRE` names the server, each fails instead.
    fn missing(&self) -> Option<Missing> {
        None
    }

    /// A fresh, empty store in a name space of its own.
    async fn build(&self) -> Result<Box<dyn Fixture>, HarnessError>;
}

/// A server that is not there.
#[derive(Debug, Clone)]
pub struct Missing {
    /// Its name in `IDEM_REQUIRE`, a list with commas: `postgres`, `redis`, `fdb`.
    pub server: &'static str,
    /// Why it cannot be used.
    pub reason: String,
}

/// One store for one case, and whatever has to live as long: it is dropped when the case is over.
#[async_trait]
pub trait Fixture: Send + Sync + 'static {
    /// The store. The same records on every call.
    fn store(&self) -> Arc<dyn KeyStore>;

    /// Moves the store's clock on, for [`Time::Manual`] and [`Time::Shifted`].
    async fn advance(&self, by: Duration) -> Result<(), HarnessError> {
        Err(format!("this fixture cannot move the clock by {by:?}").into())
    }

    /// Opens the same records anew, as a process would that was started again, for [`Abilities::reopen`]. What was
    /// opened before is not used any more.
    async fn reopen(&self) -> Result<Arc<dyn KeyStore>, HarnessError> {
        Err("this fixture cannot reopen its store".into())
    }

    /// Makes trouble that the store has to survive, for [`Abilities::disturb`]: breaks its connections, restarts its
    /// server. Calls made meanwhile may fail; calls made some seconds later must not. It is called again and again, also
    /// in the middle of calls, and comes back when the trouble is made and a server that was stopped is up again.
    async fn disturb(&self) -> Result<(), HarnessError> {
        Err("this fixture cannot disturb its store".into())
    }

    /// Puts bytes that are no record in place of the key's record, behind the store's back, for [`Abilities::garble`].
    async fn garble(&self, key: &Key) -> Result<(), HarnessError> {
        Err(format!("this fixture cannot garble the record of {key:?}").into())
    }
}

/// What a harness's fixtures can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Abilities {
    /// How the store's time passes.
    pub time: Time,
    /// Whether [`Fixture::reopen`] works.
    pub reopen: bool,
    /// Whether [`Fixture::disturb`] works.
    pub disturb: bool,
    /// Whether [`Fixture::garble`] works.
    pub garble: bool,
    /// How late deadlines may come: the margin of a store without a clock of its own (rule R10), beyond which a lease or a
    /// retention has to be over. Never early.
    pub late: Duration,
}

impl Abilities {
    /// With time that passes like that.
    #[must_use]
    pub fn with_time(self, time: Time) -> Self {
        Self { time, ..self }
    }

    /// With a working [`Fixture::reopen`].
    #[must_use]
    pub fn with_reopen(self) -> Self {
        Self { reopen: true, ..self }
    }

    /// With a working [`Fixture::disturb`].
    #[must_use]
    pub fn with_disturb(self) -> Self {
        Self { disturb: true, ..self }
    }

    /// With deadlines that come late by so much at most.
    #[must_use]
    pub fn with_late(self, late: Duration) -> Self {
        Self { late, ..self }
    }

    /// With a working [`Fixture::garble`].
    #[must_use]
    pub fn with_garble(self) -> Self {
        Self { garble: true, ..self }
    }
}

/// How the store's time passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Time {
    /// By itself, and nobody can move it: the cases wait.
    #[default]
    Real,
    /// By itself, and [`Fixture::advance`] moves it on.
    Shifted,
    /// Only when [`Fixture::advance`] moves it: the cases look at the very edge of a lease.
    Manual,
}

impl Time {
    /// The lease, the retention, and the step around an edge that is surely on one side of it.
    pub(crate) fn scale(self) -> Scale {
        let scale = |lease, retention, step| Scale {
            lease: Duration::from_millis(lease),
            retention: Duration::from_millis(retention),
            step: Duration::from_millis(step),
        };
        match self {
            Self::Real => scale(1_200, 2_600, 500),
            Self::Shifted => scale(30_000, 3_600_000, 8_000),
            Self::Manual => scale(30_000, 3_600_000, 1),
        }
    }
}

/// Durations for the cases.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scale {
    pub(crate) lease: Duration,
    pub(crate) retention: Duration,
    pub(crate) step: Duration,
}
