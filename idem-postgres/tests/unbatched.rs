//! The conformance kit on Postgres with a statement for each call.

mod stores;

fn main() -> std::process::ExitCode {
    idem_testkit::run(stores::Postgres::new(idem_postgres::Batching::off(4)))
}
