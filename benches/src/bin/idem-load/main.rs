//! An open-loop load generator for the backends of idem: `idem-load --help`.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program for the terminal")]

mod options;
mod picture;
mod table;

use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;
use idem_benches::Failed;
use idem_benches::backends::{Backend, Opened};
use idem_benches::load::events::Events;
use idem_benches::load::mix::Mix;
use idem_benches::load::preload::preload;
use idem_benches::load::report::{Report, Step};
use idem_benches::load::run::{Plan, Progress, run};
use idem_benches::load::sweep::sweep;
use idem_benches::servers::Servers;
use options::Options;
use serde::Serialize;
use tokio::runtime::Runtime;

fn main() -> ExitCode {
    match load(&Options::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("idem-load: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Whether all answers were right.
fn load(options: &Options) -> Result<bool, Failed> {
    let mix = options.mix()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    if options.is_all() {
        return all(options, mix, &runtime);
    }
    let (servers, backend) = options.store()?;
    // Who asks for a store by name needs it, whatever IDEM_REQUIRE says.
    let opened = runtime.block_on(backend.open(&servers))??;
    let report = measure(options, mix, &runtime, backend, &opened)?;
    print!("{}", table::show(&report));
    write(options, &report)?;
    if let Some(file) = &options.svg {
        picture::draw(&report, file)?;
    }
    runtime.block_on(opened.close())?;
    Ok(report.is_right())
}

/// Each backend that is present, one after the other.
fn all(options: &Options, mix: Mix, runtime: &Runtime) -> Result<bool, Failed> {
    let servers = Servers::default();
    let (mut reports, mut absent) = (Vec::new(), Vec::new());
    for backend in Backend::chosen()?.into_iter().filter(|backend| !backend.cached) {
        match runtime.block_on(backend.open(&servers))? {
            Ok(opened) => {
                let report = measure(options, mix, runtime, backend, &opened)?;
                print!("{}", table::show(&report));
                reports.push(report);
                runtime.block_on(opened.close())?;
            }
            Err(reason) => absent.push(format!("{}: absent: {reason}", backend.name)),
        }
    }
    print!("{}", table::compare(&reports));
    absent.iter().for_each(|line| println!("{line}"));
    write(options, &reports)?;
    Ok(reports.iter().all(Report::is_right))
}

/// Writes all figures where they are wanted.
fn write(options: &Options, figures: &impl Serialize) -> Result<(), Failed> {
    match &options.json {
        Some(file) => Ok(std::fs::write(file, serde_json::to_vec_pretty(figures)?)?),
        None => Ok(()),
    }
}

/// Loads a store that is open.
fn measure(
    options: &Options,
    mix: Mix,
    runtime: &Runtime,
    backend: &Backend,
    opened: &Opened,
) -> Result<Report, Failed> {
    eprintln!("{}: what a crash loses: {}", backend.name, opened.durability);
    let first = options.plan(mix, options.rate.unwrap_or(options::FIRST_RATE));
    // Before the records that are to last, since the clock may be moved on.
    let mut events = match options.events {
        true => Some(runtime.block_on(Events::prepare(opened, options.old, first.time))?),
        false => None,
    };
    if options.preload > 0 {
        fill(runtime, opened, &first, options.preload)?;
    }
    let mut number = 0;
    let mut at = |plan: Plan| {
        number += 1;
        eprintln!("{:.0} arrivals a second", plan.rate);
        one(runtime, opened, &Plan { number, ..plan }, events.take())
    };
    let (steps, held) = match options.p99 {
        None => (vec![at(first)?], None),
        Some(limit) if options.sweep => sweep(first.rate, limit, |rate| at(options.plan(mix, rate)))?,
        Some(limit) => {
            let step = at(first)?;
            if step.is_held(limit) {
                (vec![step], Some(first.rate))
            } else if step.faults > 0 {
                (vec![step], None)
            } else {
                // A store that has too much to do answers about as many as it would hold, or some more.
                let lower = (step.achieved / 2.0).round().max(1.0);
                let (mut steps, held) = sweep(lower, limit, |rate| at(options.step(mix, rate)))?;
                steps.insert(0, step);
                (steps, held)
            }
        }
    };
    Ok(Report {
        store: backend.name.to_owned(),
        durability: opened.durability.clone(),
        preloaded: options.preload,
        mix,
        limit: options.p99,
        held,
        steps,
    })
}

fn fill(runtime: &Runtime, opened: &Opened, plan: &Plan, preloaded: u64) -> Result<(), Failed> {
    // The keys of the run itself are not wanted here.
    let effects = Arc::new(Plan { rate: 1.0, ..*plan }.effects());
    let told = move |made: u64| {
        if made.is_multiple_of(preloaded.div_ceil(10).next_multiple_of(500)) || made == preloaded {
            eprintln!("{made} of {preloaded} records are there");
        }
    };
    runtime.block_on(preload(&opened.store, &effects, told))
}

fn one(runtime: &Runtime, opened: &Opened, plan: &Plan, events: Option<Events>) -> Result<Step, Failed> {
    let effects = Arc::new(plan.effects());
    let mut show = |progress: &Progress| {
        let Progress { seconds, rate, latency, under_way, refused } = progress;
        if *seconds < 0.0 {
            return eprintln!("warming up: {under_way} under way, {refused} refused");
        }
        eprintln!(
            "{seconds:>6.1} s {rate:>9.0}/s  p50 {:>8.2} ms  p99 {:>8.2} ms  max {:>8.2} ms  {under_way:>6} under way  \
             {refused} refused",
            latency.p50, latency.p99, latency.max
        );
    };
    run(runtime.handle(), &opened.store, &effects, plan, events, &opened.processes, &mut show)
}
