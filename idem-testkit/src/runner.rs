//! Runs cases, as a test binary or one by one.

use std::fmt;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use libtest_mimic::{Arguments, Failed as TrialFailed, Trial};

use crate::cases::{self, Case};
use crate::context::Ctx;
use crate::harness::{Harness, Missing};
use crate::history::{self, CALM, DISTURBED};
use crate::probe::Log;
use crate::settings;
use crate::verdict::{Failed, Verdict};

/// A case that takes longer hangs.
const LIMIT: Duration = Duration::from_secs(300);
/// What is added for each history that was asked for.
const LIMIT_PER_SEED: Duration = Duration::from_secs(30);
/// How often a case is run whose result could not be told in time.
const TRIES: u32 = 5;

/// Why a case failed: all that is needed to look into it.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Report {
    /// The case, with `twice::` before its name where every call was delivered twice.
    pub case: String,
    /// The rule that it is about.
    pub rule: &'static str,
    /// The store, by its harness's name.
    pub store: String,
    /// The seed of its random choices.
    pub seed: u64,
    /// What was found.
    pub found: String,
    /// The last operations and what they were answered, a line each.
    pub operations: String,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "case:  {}", self.case)?;
        writeln!(f, "rule:  {}", self.rule)?;
        writeln!(f, "store: {}", self.store)?;
        writeln!(f, "seed:  {} (again: IDEM_SEED={})", self.seed, self.seed)?;
        writeln!(f, "found: {}", self.found)?;
        write!(f, "last operations:\n{}", self.operations)
    }
}

impl std::error::Error for Report {}

/// The body of a test binary: runs every case as a test of its own and gives the exit code.
///
/// The arguments are those of any Rust test binary: a part of a name selects, `--list` lists. A case that needs an
/// ability which the harness lacks is listed as ignored, with what it needs, and not counted as passed. Every case
/// whose rule allows it is run a second time, as `twice::…`, with every call delivered twice.
///
/// The test target needs `harness = false` in `Cargo.toml`.
pub fn run(harness: impl Harness) -> ExitCode {
    let harness: Arc<dyn Harness> = Arc::new(harness);
    let arguments = Arguments::from_args();
    let trials = cases::all().flat_map(|case| {
        let twice = case.needs.also_twice().then(|| trial(&harness, case, true));
        [Some(trial(&harness, case, false)), twice].into_iter().flatten()
    });
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}

/// The body of a test binary for tests of one's own that need a server: each is a test by its name, all are listed as
/// ignored where the server is missing, and fail where `IDEM_REQUIRE` names it. A test fails by a panic.
///
/// The test target needs `harness = false` in `Cargo.toml`.
pub fn run_tests(missing: Option<&Missing>, tests: &[(&'static str, fn())]) -> ExitCode {
    let arguments = Arguments::from_args();
    let trials = tests.iter().map(|&(name, test)| match missing {
        Some(missing) => not_there(name.to_owned(), missing),
        None => Trial::test(name, move || {
            test();
            Ok(())
        }),
    });
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}

/// The trial of a test whose server is missing.
fn not_there(name: String, missing: &Missing) -> Trial {
    if settings::required(missing.server) {
        let why = format!("{} is required by IDEM_REQUIRE and cannot be used: {}", missing.server, missing.reason);
        return Trial::test(name, move || Err(TrialFailed::from(why)));
    }
    Trial::test(name, || Ok(())).with_kind(format!("no {}", missing.server)).with_ignored_flag(true)
}

fn trial(harness: &Arc<dyn Harness>, case: &'static Case, twice: bool) -> Trial {
    let name = full_name(case, twice);
    if let Some(missing) = harness.missing() {
        return not_there(name, &missing);
    }
    if let Some(need) = case.needs.missing(harness.abilities()) {
        return Trial::test(name, || Ok(())).with_kind(format!("needs {need}")).with_ignored_flag(true);
    }
    let harness = harness.clone();
    Trial::test(name, move || {
        run_case(&*harness, case, twice).map_err(|report| TrialFailed::from(format!("\n{report}")))
    })
}

fn full_name(case: &Case, twice: bool) -> String {
    format!("{}{}", if twice { "twice::" } else { "" }, case.name)
}

/// The names of all cases, as [`run_one`] takes them.
pub fn case_names() -> impl Iterator<Item = &'static str> {
    cases::all().map(|case| case.name)
}

/// Runs one case by its name: for tests of the kit itself, and for a debugger.
///
/// # Errors
/// The [`Report`] of the failed case. A name that is no case's, and a case that needs what the harness lacks, are
/// failures too: nothing passes that did not run.
pub fn run_one(harness: &dyn Harness, name: &str) -> Result<(), Box<Report>> {
    let (twice, plain) = match name.strip_prefix("twice::") {
        Some(plain) => (true, plain),
        None => (false, name),
    };
    let Some(case) = cases::all().find(|case| case.name == plain) else {
        return not_run(harness, name, "", "there is no such case".to_owned());
    };
    if let Some(need) = case.needs.missing(harness.abilities()) {
        return not_run(harness, name, case.rule, format!("the harness lacks what the case needs: {need}"));
    }
    run_case(harness, case, twice)
}

/// Runs random histories of these seeds, each on a fresh store, and gives how many there were.
///
/// # Errors
/// The [`Report`] of the first seed for which no order of the calls is legal.
pub fn run_histories(harness: &dyn Harness, seeds: impl IntoIterator<Item = u64>) -> Result<u64, Box<Report>> {
    count(seeds, |seed| {
        attempt(harness, "histories_have_a_legal_order", "ALL", seed, false, |ctx| {
            Box::pin(history::run(ctx, ctx.seed, 0, CALM))
        })
    })
}

/// Runs random histories of these seeds, each on a fresh store that is [disturbed](crate::Fixture::disturb) in the middle
/// of calls, again and again, and gives how many there were. For a harness whose way to disturb is too slow, or too hard
/// on others, to run all cases with it: one that kills its server, say.
///
/// The seeds count from 0 on; `IDEM_SEED` and `IDEM_SEEDS` ask for others.
///
/// # Errors
/// The [`Report`] of the first seed for which no order of the calls is legal: an acknowledged call was lost, a key was
/// given out twice. A harness that cannot disturb fails too.
pub fn run_disturbed_histories(harness: &dyn Harness, seeds: u64) -> Result<u64, Box<Report>> {
    const NAME: &str = "histories_under_disturbance_have_a_legal_order";
    if !harness.abilities().disturb {
        return not_run(harness, NAME, "ALL", "the harness lacks what the case needs: disturb".to_owned());
    }
    count(settings::seeds(seeds), |seed| {
        attempt(harness, NAME, "ALL", seed, false, |ctx| Box::pin(history::run(ctx, ctx.seed, 0, DISTURBED)))
    })
}

fn count(
    seeds: impl IntoIterator<Item = u64>,
    run: impl Fn(u64) -> Result<(), Box<Report>>,
) -> Result<u64, Box<Report>> {
    let mut count = 0;
    for seed in seeds {
        run(seed)?;
        count += 1;
    }
    Ok(count)
}

/// The report of a case that could not be run.
fn not_run<T>(harness: &dyn Harness, name: &str, rule: &'static str, found: String) -> Result<T, Box<Report>> {
    let (case, store, operations) = (name.to_owned(), harness.name(), String::new());
    Err(Box::new(Report { case, rule, store, seed: 0, found, operations }))
}

fn run_case(harness: &dyn Harness, case: &Case, twice: bool) -> Result<(), Box<Report>> {
    let seed = settings::seed().unwrap_or(0);
    attempt(harness, &full_name(case, twice), case.rule, seed, twice, case.run)
}

type Body = for<'a> fn(&'a Ctx) -> std::pin::Pin<Box<dyn Future<Output = Verdict> + Send + 'a>>;

/// Runs a body on a fresh store, again where it could not be told in time what happened.
fn attempt(
    harness: &dyn Harness,
    name: &str,
    rule: &'static str,
    seed: u64,
    twice: bool,
    body: Body,
) -> Result<(), Box<Report>> {
    let report = |found: String, log: &Log| {
        Box::new(Report { case: name.to_owned(), rule, store: harness.name(), seed, found, operations: log.text() })
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.map_err(|error| report(format!("no runtime: {error}"), &Log::new()))?;
    let more = u32::try_from(settings::asked_seeds().unwrap_or(0)).unwrap_or(u32::MAX);
    let limit = LIMIT + LIMIT_PER_SEED.saturating_mul(more);
    let mut tries = 0;
    loop {
        tries += 1;
        let log = Log::new();
        let verdict = runtime.block_on(async {
            let fixture = harness.build().await.map_err(Failed::from)?;
            let ctx = Ctx::new(fixture, log.clone(), seed, harness.abilities(), twice);
            tokio::time::timeout(limit, body(&ctx))
                .await
                .unwrap_or_else(|_| Err(Failed::Broken(format!("it hangs: not done after {limit:?}"))))
        });
        match verdict {
            Ok(()) => return Ok(()),
            Err(Failed::Inconclusive(_)) if tries < TRIES => {}
            Err(Failed::Illegal { seed, found }) => return Err(Box::new(Report { seed, ..*report(found, &log) })),
            Err(failed) => return Err(report(failed.to_string(), &log)),
        }
    }
}
