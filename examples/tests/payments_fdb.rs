//! The payments API with its keys in FoundationDB, as a user runs it.
#![allow(clippy::panic, clippy::unwrap_used, reason = "the helpers of tests are tests")]

use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::LazyLock;

use idem_testkit::Missing;
use idem_testkit::servers::FdbCluster;

static CLUSTER: LazyLock<Result<FdbCluster, String>> =
    LazyLock::new(|| FdbCluster::start().map_err(|error| error.to_string()));

fn main() -> ExitCode {
    let missing = CLUSTER.as_ref().err().map(|reason| Missing { server: "fdb", reason: reason.clone() });
    idem_testkit::run_tests(
        missing.as_ref(),
        &[
            ("the_demo_runs_to_its_end_again_and_again", the_demo_runs_to_its_end_again_and_again),
            ("a_cluster_file_that_is_not_there_is_told", a_cluster_file_that_is_not_there_is_told),
        ],
    )
}

fn demo(file: &Path) -> (bool, String, String) {
    let store = format!("fdb:{}", file.display());
    let output = Command::new(env!("CARGO_BIN_EXE_payments")).args(["--demo", "--store", &store]).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.success(), text(output.stdout), text(output.stderr))
}

fn the_demo_runs_to_its_end_again_and_again() {
    for _ in 0..2 {
        let (success, text, errors) = demo(&CLUSTER.as_ref().unwrap().cluster_file());
        assert!(success, "{text}\n{errors}");
        assert!(text.contains("idempotency keys in: fdb") && text.contains("alice was charged 1x"), "{text}");
        assert!(text.ends_with("Every order took effect once.\n"), "{text}");
    }
}

fn a_cluster_file_that_is_not_there_is_told() {
    let (success, text, errors) = demo(Path::new("/nowhere/fdb.cluster"));
    assert!(!success, "{text}");
    assert!(errors.contains("Misconfigured"), "{errors}");
}
