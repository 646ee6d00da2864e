//! FoundationDB, where this was built without the feature `fdb`: there is none.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use idem_core::MemoryStore;

use crate::Failed;
use crate::servers::Absent;
use crate::subject::Subject;

const REASON: &str = "built without the feature fdb";

/// A cluster, of which there is none.
#[derive(Debug)]
pub enum Server {}

impl Server {
    /// That there is none.
    ///
    /// # Errors
    /// Always.
    pub fn given(_: &str) -> Result<Self, Absent> {
        Self::start()
    }

    pub(crate) fn start() -> Result<Self, Absent> {
        Err(Absent { server: "fdb", reason: REASON.to_owned() })
    }

    pub(crate) fn find() -> io::Result<()> {
        Err(io::Error::other(REASON))
    }

    /// Of none.
    #[must_use]
    pub fn processes(&self) -> Vec<u32> {
        match *self {}
    }

    /// Of none.
    ///
    /// # Errors
    /// None.
    pub async fn used(&self, _: &str) -> Result<f64, Failed> {
        match *self {}
    }

    pub(crate) async fn open(&self, _: &str, _: bool) -> Result<Open, Failed> {
        match *self {}
    }

    pub(crate) fn floor(&self) -> Arc<dyn Subject> {
        match *self {}
    }

    pub(crate) async fn remove_floor(&self) -> Result<(), Failed> {
        match *self {}
    }
}

/// An open store, of which there is none.
#[derive(Debug, Clone)]
pub struct Open {
    /// Of any type.
    pub(crate) store: Arc<MemoryStore>,
    pub(crate) durability: String,
    none: std::convert::Infallible,
}

impl Open {
    pub(crate) fn move_on(&self, _: Duration) {
        match self.none {}
    }

    pub(crate) async fn first(&self) -> Result<Option<Vec<u8>>, Failed> {
        match self.none {}
    }

    pub(crate) async fn remove(&self) -> Result<(), Failed> {
        match self.none {}
    }
}
