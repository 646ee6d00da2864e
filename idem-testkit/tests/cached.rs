//! The conformance kit on the near-cache in front of the in-memory store.

mod stores;

fn main() -> std::process::ExitCode {
    idem_testkit::run(stores::CachedMemory)
}
