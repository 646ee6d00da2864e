//! The table at the end.

use std::fmt::Write as _;

use idem_benches::load::report::{Latency, Report, Step};

/// All of it, as text. What is wrong comes last, where it is seen.
pub(crate) fn show(report: &Report) -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = write_all(&mut text, report);
    text
}

/// What each store was asked for, and what it holds.
pub(crate) fn compare(reports: &[Report]) -> String {
    let mut text = String::new();
    let _ = write_compared(&mut text, reports);
    text
}

fn write_compared(text: &mut String, reports: &[Report]) -> std::fmt::Result {
    writeln!(
        text,
        "\n| | arrivals/s | answered/s | p50 ms | p99 ms | refused | errors | CPU s client + server per million | held, arrivals/s |"
    )?;
    writeln!(text, "|---|{}", "---:|".repeat(8))?;
    for report in reports {
        let Some(step) = report.steps.first() else { continue };
        writeln!(
            text,
            "| {} | {:.0} | {:.0} | {:.2} | {:.2} | {} | {} | {} + {} | {} |",
            report.store,
            step.rate,
            step.achieved,
            step.latency.p50,
            step.latency.p99,
            step.refused,
            step.errors(),
            per_million(step.client_cpu_seconds, step),
            per_million(step.server_cpu_seconds, step),
            report.held.map_or_else(|| "none".to_owned(), |held| format!("{held:.0}")),
        )?;
    }
    if let Some(limit) = reports.iter().find_map(|report| report.limit) {
        writeln!(text, "\nheld: with p99 of at most {limit} ms")?;
    }
    Ok(())
}

fn write_all(text: &mut String, report: &Report) -> std::fmt::Result {
    let mix = &report.mix;
    writeln!(text, "\n{} (what a crash loses: {})", report.store, report.durability)?;
    match mix.zipf {
        Some(exponent) => write!(text, "keys by Zipf's law with exponent {exponent} from {}", mix.keys)?,
        None => write!(text, "repeats {}, duplicates {}", mix.repeats, mix.duplicates)?,
    }
    writeln!(text, ", failures {}, outcomes of {} bytes, {} records before", mix.failures, mix.body, report.preloaded)?;
    writeln!(
        text,
        "\n| arrivals/s | answered/s | p50 ms | p90 ms | p99 ms | p99.9 ms | max ms | refused | errors | late p50, p99 ms | CPU s \
         client + server per million | {}",
        if report.limit.is_some() { "held |" } else { "" }
    )?;
    let columns = if report.limit.is_some() { 12 } else { 11 };
    writeln!(text, "|{}", "---:|".repeat(columns))?;
    for step in &report.steps {
        let Latency { p50, p90, p99, p999, max, .. } = step.latency;
        write!(
            text,
            "| {:.0} | {:.0} | {p50:.2} | {p90:.2} | {p99:.2} | {p999:.2} | {max:.2} | {} | {} | {:.2}, {:.2} | {} + {} |",
            step.rate,
            step.achieved,
            step.refused,
            step.errors(),
            step.late.p50,
            step.late.p99,
            per_million(step.client_cpu_seconds, step),
            per_million(step.server_cpu_seconds, step),
        )?;
        match report.limit {
            Some(limit) => writeln!(text, " {} |", if step.is_held(limit) { "yes" } else { "no" })?,
            None => writeln!(text)?,
        }
    }
    if let [step] = &report.steps[..] {
        writeln!(text, "\n| answer | arrivals | p50 ms | p90 ms | p99 ms | p99.9 ms | max ms |")?;
        writeln!(text, "|---|{}", "---:|".repeat(6))?;
        for (name, latency) in [("ran", step.ran), ("replayed", step.replayed), ("in flight", step.in_flight)] {
            let Latency { count, p50, p90, p99, p999, max } = latency;
            writeln!(text, "| {name} | {count} | {p50:.2} | {p90:.2} | {p99:.2} | {p999:.2} | {max:.2} |")?;
        }
    }
    if let (Some(limit), held) = (report.limit, report.held) {
        match held {
            Some(held) => writeln!(text, "\nheld with p99 of at most {limit} ms: {held:.0} arrivals a second")?,
            None => writeln!(text, "\nno rate was held with p99 of at most {limit} ms")?,
        }
    }
    writeln!(text)?;
    for step in &report.steps {
        trouble(text, step)?;
    }
    let sum = |of: fn(&Step) -> u64| report.steps.iter().map(of).sum::<u64>();
    let (effects, failed, audited, faults) = (
        sum(|step| step.effects),
        sum(|step| step.failed_on_purpose),
        sum(|step| step.audited),
        sum(|step| step.faults),
    );
    if faults == 0 {
        writeln!(
            text,
            "{effects} keys took effect, each once; {failed} attempts failed on purpose; {audited} keys were asked for again \
             at the end, and replayed"
        )
    } else {
        writeln!(text, "WRONG ANSWERS: {faults}; {effects} keys took effect")
    }
}

fn trouble(text: &mut String, step: &Step) -> std::fmt::Result {
    let rate = step.rate;
    for event in &step.events {
        writeln!(text, "at {:.1} s, for {:.0} ms: {}", event.seconds, event.lasted * 1e3, event.what)?;
    }
    if !step.kept_up {
        writeln!(
            text,
            "at {rate:.0}/s the generator did not keep up: it was {:.1} ms late (p99), so these latencies are its own too",
            step.late.p99
        )?;
    }
    if step.refused > 0 {
        writeln!(text, "at {rate:.0}/s {} arrivals were refused: too many were under way", step.refused)?;
    }
    if step.unanswered > 0 {
        writeln!(text, "at {rate:.0}/s {} arrivals were never answered", step.unanswered)?;
    }
    for (error, count) in &step.errors {
        writeln!(text, "at {rate:.0}/s, {count} times: {error}")?;
    }
    for fault in &step.shown_faults {
        writeln!(text, "at {rate:.0}/s, wrong: {fault}")?;
    }
    Ok(())
}

fn per_million(seconds: Option<f64>, step: &Step) -> String {
    match seconds {
        Some(seconds) if step.answered > 0 => format!("{:.1}", seconds * 1e6 / step.answered as f64),
        _ => "-".to_owned(),
    }
}
