//! The conformance kit on a single server.

mod stores;

fn main() -> std::process::ExitCode {
    idem_testkit::run(stores::Single)
}
