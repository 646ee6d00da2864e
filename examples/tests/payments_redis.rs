//! The payments API with its keys in Redis, as a user runs it.
#![allow(clippy::panic, clippy::unwrap_used, reason = "the helpers of tests are tests")]

use std::process::{Command, ExitCode};
use std::sync::LazyLock;

use idem_testkit::Missing;
use idem_testkit::servers::RedisServer;

static SERVER: LazyLock<Result<RedisServer, String>> =
    LazyLock::new(|| RedisServer::start(&[]).map_err(|error| error.to_string()));

fn main() -> ExitCode {
    let missing = SERVER.as_ref().err().map(|reason| Missing { server: "redis", reason: reason.clone() });
    idem_testkit::run_tests(
        missing.as_ref(),
        &[
            ("the_demo_runs_to_its_end_again_and_again", the_demo_runs_to_its_end_again_and_again),
            ("a_store_that_is_not_there_is_told", a_store_that_is_not_there_is_told),
        ],
    )
}

fn demo(store: &str) -> (bool, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_payments")).args(["--demo", "--store", store]).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.success(), text(output.stdout), text(output.stderr))
}

fn the_demo_runs_to_its_end_again_and_again() {
    for _ in 0..2 {
        let (success, text, errors) = demo(&SERVER.as_ref().unwrap().url());
        assert!(success, "{text}\n{errors}");
        assert!(text.contains("idempotency keys in: redis") && text.contains("alice was charged 1x"), "{text}");
        assert!(text.ends_with("Every order took effect once.\n"), "{text}");
    }
}

fn a_store_that_is_not_there_is_told() {
    let (success, text, errors) = demo("redis://app:secret@127.0.0.1:1");
    assert!(!success, "{text}");
    assert!(!errors.contains("secret") && !text.contains("secret"), "{errors}");
}
