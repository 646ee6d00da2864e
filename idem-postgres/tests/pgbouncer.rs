//! The conformance kit on Postgres through pgbouncer in transaction mode.

mod stores;

fn main() -> std::process::ExitCode {
    idem_testkit::run(stores::pooled::Pooled(idem_postgres::Batching::default()))
}
