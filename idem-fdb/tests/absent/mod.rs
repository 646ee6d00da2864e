//! What the tests are where FoundationDB's client library is not: named, and not run.
#![allow(dead_code, unused_imports, unused_macros, reason = "the helpers of tests, each using some")]

use async_trait::async_trait;
use idem_testkit::{Fixture, Harness, HarnessError, Missing};

/// That the tests have no FoundationDB.
pub(crate) fn missing(reason: impl Into<String>) -> Missing {
    Missing { server: "fdb", reason: reason.into() }
}

/// That the tests were built without the client library.
#[cfg(not(fdb_client))]
pub(crate) fn no_client() -> Missing {
    missing("FoundationDB's client library was not found when this was built")
}

/// Whether the tests can run.
#[cfg(fdb_client)]
pub(crate) fn no_client() -> Option<Missing> {
    idem_testkit::servers::FdbCluster::find().err().map(|error| missing(error.to_string()))
}

/// The harness of a store that is not there.
#[cfg(not(fdb_client))]
pub(crate) struct Absent;

#[cfg(not(fdb_client))]
#[async_trait]
impl Harness for Absent {
    fn name(&self) -> String {
        "fdb".to_owned()
    }

    fn missing(&self) -> Option<Missing> {
        Some(no_client())
    }

    async fn build(&self) -> Result<Box<dyn Fixture>, HarnessError> {
        Err(no_client().reason.into())
    }
}

/// The `main` of a test binary: the tests of a module by name, each on a runtime of its own.
macro_rules! tests {
    ($module:ident: $($name:ident,)+) => {
        fn main() -> std::process::ExitCode {
            #[cfg(fdb_client)]
            {
                let missing = $crate::absent::no_client();
                idem_testkit::run_tests(missing.as_ref(), &[$((stringify!($name), || $crate::stores::block_on($module::$name()))),+])
            }
            #[cfg(not(fdb_client))]
            idem_testkit::run_tests(Some(&$crate::absent::no_client()), &[$((stringify!($name), || {})),+])
        }
    };
}

pub(crate) use tests;
