//! The same workloads on every backend that is present, and on the floor beside it: `cargo bench -p idem-benches --bench
//! compare`. `IDEM_BENCH_BACKENDS=redis,memory` chooses backends; criterion's own arguments choose among the benchmarks.
#![allow(clippy::print_stdout, missing_docs, reason = "a program for the terminal")]

use std::cell::RefCell;
use std::collections::HashMap;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, SamplingMode};
use idem_benches::backends::Backend;
use idem_benches::floors::name_beside;
use idem_benches::servers::{Absent, Servers};
use idem_benches::subject::{Store, Subject};
use idem_benches::workloads::{WORKLOADS, Workload};
use idem_benches::{Failed, floors, is_smoke};
use tokio::runtime::Runtime;

/// Samples of each figure: the fewest that criterion takes.
const SAMPLES: usize = 10;

/// The median time of an iteration by subject and workload.
#[derive(Default)]
struct Figures(HashMap<(&'static str, &'static str), Duration>);

fn main() -> ExitCode {
    let criterion = Criterion::default()
        .sample_size(SAMPLES)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(900))
        .configure_from_args();
    match compare(criterion) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("failed: {error}");
            ExitCode::FAILURE
        }
    }
}

fn compare(mut criterion: Criterion) -> Result<(), Failed> {
    let begun = Instant::now();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let servers = Servers::default();
    let (mut figures, mut lines, mut floors) = (Figures::default(), Vec::new(), Vec::new());
    let chosen = Backend::chosen()?;
    for together in chosen.chunk_by(|a, b| name_beside(a.kind) == name_beside(b.kind)) {
        let (mut subjects, mut all) = (Vec::new(), Vec::new());
        for backend in together {
            match runtime.block_on(backend.open(&servers))? {
                Err(absent) => lines.push((*backend, Err(absent))),
                Ok(opened) => {
                    if subjects.is_empty() {
                        let floor = runtime.block_on(floors::beside(backend.kind, &servers))?;
                        subjects.push((name_beside(backend.kind), floor.subject));
                        floors.push((name_beside(backend.kind), floor.name));
                    }
                    let subject: Arc<dyn Subject> = Arc::new(Store::new(opened.store.clone()));
                    subjects.push((backend.name, subject));
                    lines.push((*backend, Ok(opened.durability.clone())));
                    all.push(opened);
                }
            }
        }
        if let [(floor, _), ..] = &subjects[..] {
            let server = floor.trim_start_matches("floor-");
            measure(&mut criterion, &runtime, server, &subjects, &mut figures)?;
        }
        for opened in all {
            runtime.block_on(opened.close())?;
        }
    }
    runtime.block_on(floors::remove(&servers))?;
    criterion.final_summary();
    if !is_smoke() {
        figures.show(
            &lines
                .iter()
                .filter(|line| line.1.is_ok())
                .map(|line| (line.0.name, name_beside(line.0.kind)))
                .collect::<Vec<_>>(),
        );
    }
    println!();
    for (name, what) in &floors {
        println!("{name}: {what}");
    }
    for (backend, state) in &lines {
        match state {
            Ok(durability) => println!("{}: what a crash loses: {durability}", backend.name),
            Err(Absent { server, reason }) => println!("{}: absent: no {server}: {reason}", backend.name),
        }
    }
    println!("{:.0?} in all", begun.elapsed());
    Ok(())
}

/// Measures each workload on the floor and then on the backends, so that what is compared was measured one after the other.
fn measure(
    criterion: &mut Criterion,
    runtime: &Runtime,
    server: &str,
    subjects: &[(&'static str, Arc<dyn Subject>)],
    figures: &mut Figures,
) -> Result<(), Failed> {
    let mut group = criterion.benchmark_group(server);
    // Each iteration is as long as the others: no need for samples of growing length.
    group.sampling_mode(SamplingMode::Flat);
    for (workload, (name, subject)) in WORKLOADS.iter().flat_map(|one| subjects.iter().map(move |two| (one, two))) {
        let wrong = |error: Failed| -> Failed { format!("{name}, {}: {error}", workload.name).into() };
        let Some(prepared) = runtime.block_on(workload.prepare(subject.clone())).map_err(wrong)? else { continue };
        // What went wrong in the closure, which cannot return it.
        let (failed, samples) = (RefCell::new(None), RefCell::new(Vec::new()));
        group.bench_function(BenchmarkId::new(workload.name, name), |bencher| {
            bencher.iter_custom(|iterations| match runtime.block_on(prepared.time(iterations)) {
                Ok(Some(time)) => {
                    samples.borrow_mut().push(time / u32::try_from(iterations).unwrap_or(u32::MAX));
                    time
                }
                result => {
                    *failed.borrow_mut() = result.err();
                    Duration::from_millis(1)
                }
            });
        });
        if let Some(error) = failed.into_inner() {
            return Err(wrong(error));
        }
        // The last ones; those before were to warm up.
        let samples = samples.into_inner();
        let mut last: Vec<Duration> = samples.iter().rev().take(SAMPLES).copied().collect();
        last.sort_unstable();
        if let Some(median) = last.get(last.len() / 2) {
            figures.0.insert((name, workload.name), *median);
        }
    }
    group.finish();
    Ok(())
}

impl Figures {
    fn of(&self, name: &'static str, workload: &Workload) -> Option<Duration> {
        self.0.get(&(name, workload.name)).copied()
    }

    /// Ratios first: how many times as long as the floor; then the times.
    fn show(&self, subjects: &[(&'static str, &'static str)]) {
        println!("\nTime of each backend as a multiple of its floor's (below 1: faster than by hand)\n");
        header();
        for (name, floor) in subjects {
            row(name, |workload| {
                Some(self.of(name, workload)?.as_secs_f64() / self.of(floor, workload)?.as_secs_f64())
            });
        }
        println!("\nMedian time in microseconds\n");
        header();
        let mut shown = Vec::new();
        for (name, floor) in subjects {
            for one in [floor, name] {
                if !shown.contains(one) {
                    row(one, |workload| Some(self.of(one, workload)?.as_secs_f64() * 1e6));
                    shown.push(*one);
                }
            }
        }
    }
}

fn header() {
    let names: Vec<&str> = WORKLOADS.iter().map(|workload| workload.name).collect();
    println!("| | {} |\n|---|{}", names.join(" | "), "---:|".repeat(names.len()));
}

fn row(name: &str, figure: impl Fn(&Workload) -> Option<f64>) {
    let cells: Vec<String> = WORKLOADS
        .iter()
        .map(|workload| match figure(workload) {
            None => "-".to_owned(),
            Some(figure) if figure < 0.1 => format!("{figure:.4}"),
            Some(figure) if figure < 10.0 => format!("{figure:.2}"),
            Some(figure) if figure < 100.0 => format!("{figure:.1}"),
            Some(figure) => format!("{figure:.0}"),
        })
        .collect();
    println!("| {name} | {} |", cells.join(" | "));
}
