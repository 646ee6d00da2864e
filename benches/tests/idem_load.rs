//! `idem-load` as it is run: two seconds on each kind of server, and a sweep. A server that is not there is listed as
//! ignored, and fails where `IDEM_REQUIRE` names it.
#![allow(missing_docs, reason = "a test")]

use std::process::{Command, ExitCode, Output};

use idem_benches::backends::Backend;
use idem_benches::servers::Servers;
use libtest_mimic::{Arguments, Failed, Trial};

fn main() -> ExitCode {
    let mut trials = vec![
        Trial::test("a_sweep_finds_a_rate_and_draws_it", sweep),
        Trial::test("all_that_are_present_are_loaded_one_after_the_other", all),
        Trial::test("all_tells_what_is_held_where_the_rate_is_not", all_with_too_much),
        Trial::test("what_makes_no_sense_is_refused", refused),
    ];
    for name in ["memory", "postgres-cached", "redis", "redis-cluster", "fdb"] {
        let absent = Backend::named(name).and_then(|backend| Servers::absent(backend.kind));
        let (ignored, required) = match absent.map(|absent| absent.allow()) {
            None => (false, None),
            Some(Ok(_)) => (true, None),
            Some(Err(required)) => (false, Some(required.to_string())),
        };
        let test = move || required.map_or_else(|| load(name), |reason| Err(reason.into()));
        trials.push(
            Trial::test(format!("two_seconds_on_{name}"), test)
                .with_kind(if ignored { "no server" } else { "" })
                .with_ignored_flag(ignored),
        );
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn idem_load(arguments: &[&str]) -> Result<Output, Failed> {
    Ok(Command::new(env!("CARGO_BIN_EXE_idem-load")).args(arguments).output()?)
}

fn check(holds: bool, output: &Output) -> Result<(), Failed> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if holds {
        Ok(())
    } else {
        Err(format!("{}\n{}{}", output.status, text(&output.stdout), text(&output.stderr)).into())
    }
}

/// Runs it, with its figures and its picture in a directory.
fn run(arguments: &[&str]) -> Result<(Output, serde_json::Value, String), Failed> {
    let directory = tempfile::tempdir()?;
    let (json, svg) = (directory.path().join("load.json"), directory.path().join("load.svg"));
    let files = [json.display().to_string(), svg.display().to_string()];
    let output = idem_load(&[arguments, &["--json", &files[0], "--svg", &files[1]]].concat())?;
    check(output.status.success(), &output)?;
    Ok((output, serde_json::from_slice(&std::fs::read(json)?)?, std::fs::read_to_string(svg)?))
}

fn load(store: &str) -> Result<(), Failed> {
    let arguments =
        ["--store", store, "--rate", "300", "--seconds", "2", "--warm-up", "0.2", "--preload", "600", "--events"];
    let (output, figures, picture) = run(&[&arguments[..], &["--old", "100"]].concat())?;
    let step = &figures["steps"][0];
    let is_right = step["answered"].as_u64() == Some(600)
        && step["replayed"]["count"].as_u64() > Some(20)
        && step["faults"].as_u64() == Some(0)
        && step["audited"].as_u64() > Some(600)
        && step["events"].as_array().is_some_and(|events| !events.is_empty())
        && picture.contains("<svg");
    check(is_right && String::from_utf8_lossy(&output.stdout).contains("each once"), &output)
}

fn sweep() -> Result<(), Failed> {
    let arguments =
        ["--sweep", "--p99", "2s", "--rate", "2000000", "--seconds", "0.2", "--warm-up", "0", "--queue", "50"];
    let (output, figures, picture) = run(&arguments)?;
    // No machine hands over two millions a second to a queue of fifty, so it goes down from there.
    let rates: Vec<f64> =
        figures["steps"].as_array().into_iter().flatten().filter_map(|step| step["rate"].as_f64()).collect();
    let held = figures["held"].as_f64();
    check(rates.len() > 1 && held.is_none_or(|held| held < 2_000_000.0) && picture.contains("limit of p99"), &output)
}

/// Runs it on the backends of these names, of which FoundationDB is one that may be absent.
fn run_all(names: &str, arguments: &[&str]) -> Result<(Output, serde_json::Value), Failed> {
    let directory = tempfile::tempdir()?;
    let json = directory.path().join("all.json");
    let mut command = Command::new(env!("CARGO_BIN_EXE_idem-load"));
    command.args(["--store", "all", "--json"]).arg(&json).args(arguments).env("IDEM_BENCH_BACKENDS", names);
    let output = command.output()?;
    check(output.status.success(), &output)?;
    Ok((output, serde_json::from_slice(&std::fs::read(json)?)?))
}

fn all() -> Result<(), Failed> {
    let names = "memory,memory-cached,redis,fdb";
    let (output, figures) = run_all(names, &["--rate", "200", "--seconds", "1", "--warm-up", "0.2", "--p99", "10s"])?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    for name in ["memory", "redis", "fdb"] {
        let found = figures.as_array().into_iter().flatten().find(|report| report["store"] == name);
        let is_held = found.is_some_and(|report| report["held"] == 200.0 && report["steps"][0]["answered"] == 200);
        check(is_held || text.contains(&format!("{name}: absent")), &output)?;
    }
    check(!text.contains("memory-cached") && text.contains("| memory | 200 | 200 |"), &output)
}

fn all_with_too_much() -> Result<(), Failed> {
    let too_much = ["--rate", "2000000", "--seconds", "0.2", "--warm-up", "0", "--queue", "50", "--p99", "2s"];
    let (output, figures) = run_all("memory", &too_much)?;
    let report = &figures[0];
    let steps = report["steps"].as_array().map_or(0, Vec::len);
    check(steps > 1 && report["held"].as_f64().is_none_or(|held| held < 2_000_000.0), &output)
}

fn refused() -> Result<(), Failed> {
    for arguments in
        [&["--store", "redid"][..], &["--rate", "0"], &["--repeats", "1.5"], &["--sweep"], &["--store", "all"]]
    {
        let output = idem_load(arguments)?;
        check(!output.status.success() && output.stdout.is_empty() && !output.stderr.is_empty(), &output)?;
    }
    Ok(())
}
