//! The conformance kit with a margin for clocks that differ.

mod absent;
#[cfg(fdb_client)]
mod stores;

fn main() -> std::process::ExitCode {
    #[cfg(fdb_client)]
    return idem_testkit::run(stores::Skewed);
    #[cfg(not(fdb_client))]
    idem_testkit::run(absent::Absent)
}
