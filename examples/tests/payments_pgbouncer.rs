//! The payments API with its keys in Postgres behind pgbouncer, as a user runs it.
#![allow(clippy::panic, clippy::unwrap_used, reason = "the helpers of tests are tests")]

use std::process::{Command, ExitCode};

use idem_testkit::Missing;
use idem_testkit::servers::{PgBouncer, PostgresServer};

fn main() -> ExitCode {
    let missing = |server| move |error: std::io::Error| Missing { server, reason: error.to_string() };
    let found =
        PgBouncer::find().map_err(missing("pgbouncer")).and(PostgresServer::find().map_err(missing("postgres")));
    idem_testkit::run_tests(
        found.err().as_ref(),
        &[("the_demo_runs_through_pgbouncer", the_demo_runs_through_pgbouncer)],
    )
}

fn the_demo_runs_through_pgbouncer() {
    let server = PostgresServer::start(&[]).unwrap();
    let bouncer = PgBouncer::start(&server, 2, &[]).unwrap();
    for _ in 0..2 {
        let mut payments = Command::new(env!("CARGO_BIN_EXE_payments"));
        let output = payments.args(["--demo", "--pgbouncer", "--store", &bouncer.url()]).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        let (success, text, errors) = (output.status.success(), text(output.stdout), text(output.stderr));
        assert!(success, "{text}\n{errors}");
        assert!(text.contains("idempotency keys in: postgres"), "{text}");
        assert!(text.ends_with("Every order took effect once.\n"), "{text}");
    }
}
