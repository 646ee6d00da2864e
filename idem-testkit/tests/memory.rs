//! The conformance kit on the in-memory store.

mod stores;

fn main() -> std::process::ExitCode {
    idem_testkit::run(stores::Memory)
}
