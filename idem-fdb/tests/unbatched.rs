//! The conformance kit, every call in a transaction of its own.

mod absent;
#[cfg(fdb_client)]
mod stores;

fn main() -> std::process::ExitCode {
    #[cfg(fdb_client)]
    return idem_testkit::run(stores::Exact(idem_fdb::Batching::off()));
    #[cfg(not(fdb_client))]
    idem_testkit::run(absent::Absent)
}
