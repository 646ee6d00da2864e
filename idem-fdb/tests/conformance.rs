//! The conformance kit, at the very edges of leases and retentions, every call in a batch.

mod absent;
#[cfg(fdb_client)]
mod stores;

fn main() -> std::process::ExitCode {
    #[cfg(fdb_client)]
    return idem_testkit::run(stores::Exact(idem_fdb::Batching::default().with_alone(0)));
    #[cfg(not(fdb_client))]
    idem_testkit::run(absent::Absent)
}
