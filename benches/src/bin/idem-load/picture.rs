//! The picture: latency against the rate, or over time.

use std::path::Path;

use idem_benches::Failed;
use idem_benches::load::report::{Latency, Report, Step};
use plotters::prelude::*;

const SIZE: (u32, u32) = (1_000, 560);
type Line = (&'static str, RGBColor, fn(&Latency) -> f64);

/// The lines, with their colours.
const LINES: [Line; 4] = [
    ("p50", RGBColor(31, 119, 180), |latency| latency.p50),
    ("p99", RGBColor(255, 127, 14), |latency| latency.p99),
    ("p99.9", RGBColor(214, 39, 40), |latency| latency.p999),
    ("max", RGBColor(160, 160, 160), |latency| latency.max),
];

/// Draws that report into that file.
pub(crate) fn draw(report: &Report, file: &Path) -> Result<(), Failed> {
    let mut svg = String::new();
    match (report.limit, &report.steps[..]) {
        (None, [step]) => over_time(&mut svg, report, step)?,
        _ => against_rate(&mut svg, report)?,
    }
    Ok(std::fs::write(file, svg)?)
}

/// The lowest and the highest latency, a little apart, for an axis by powers.
fn bounds<'a>(latencies: impl Iterator<Item = &'a Latency>) -> (f64, f64) {
    let (low, high) =
        latencies.fold((f64::MAX, 0.0_f64), |(low, high), latency| (low.min(latency.p50), high.max(latency.max)));
    let low = if low > 0.0 && low < f64::MAX { low } else { 0.001 };
    (low / 1.5, (high * 1.5).max(low * 10.0))
}

fn against_rate(svg: &mut String, report: &Report) -> Result<(), Failed> {
    let mut steps: Vec<&Step> = report.steps.iter().filter(|step| step.latency.count > 0).collect();
    // Of a rate that was tried twice, the better.
    steps.sort_by(|a, b| a.rate.total_cmp(&b.rate).then(a.latency.p99.total_cmp(&b.latency.p99)));
    steps.dedup_by(|later, first| later.rate == first.rate);
    let (Some(first), Some(last)) = (steps.first(), steps.last()) else {
        return Err("there is nothing to draw".into());
    };
    let (low, high) = bounds(steps.iter().map(|step| &step.latency));
    let (from, to) = (first.rate / 1.1, last.rate * 1.1);
    let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(format!("{}: latency against the rate of arrivals", report.store), ("sans-serif", 22))
        .margin(16)
        .x_label_area_size(44)
        .y_label_area_size(70)
        .build_cartesian_2d((from..to).log_scale(), (low..high).log_scale())?;
    chart
        .configure_mesh()
        .x_desc("arrivals a second")
        .y_desc("milliseconds from the intended start")
        .x_label_formatter(&|rate| format!("{rate:.0}"))
        .light_line_style(WHITE)
        .draw()?;
    for (name, colour, of) in LINES {
        let points: Vec<(f64, f64)> = steps.iter().map(|step| (step.rate, of(&step.latency).max(low))).collect();
        chart
            .draw_series(LineSeries::new(points.iter().copied(), colour.stroke_width(2)))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
        chart.draw_series(points.iter().map(|point| Circle::new(*point, 3, colour.filled())))?;
    }
    if let Some(limit) = report.limit {
        chart.draw_series(LineSeries::new([(from, limit), (to, limit)], BLACK.stroke_width(1)))?;
        chart.draw_series([Text::new(format!("limit of p99: {limit} ms"), (from * 1.02, limit * 1.15), font())])?;
    }
    if let Some(held) = report.held {
        chart.draw_series(LineSeries::new([(held, low), (held, high)], BLACK.stroke_width(1)))?;
        chart.draw_series([Text::new(format!("{held:.0}/s held"), (held, high / 1.2), font())])?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .draw()?;
    root.present()?;
    Ok(())
}

fn over_time(svg: &mut String, report: &Report, step: &Step) -> Result<(), Failed> {
    let (low, high) = bounds(step.timeline.iter().map(|point| &point.latency));
    let end = step.timeline.iter().fold(step.seconds, |end, point| end.max(point.seconds));
    let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(format!("{}: {:.0} arrivals a second", report.store, step.rate), ("sans-serif", 22))
        .margin(16)
        .x_label_area_size(44)
        .y_label_area_size(70)
        .build_cartesian_2d(0.0..end, (low..high).log_scale())?;
    chart
        .configure_mesh()
        .x_desc("seconds")
        .y_desc("milliseconds from the intended start")
        .light_line_style(WHITE)
        .draw()?;
    for (name, colour, of) in LINES {
        let points = step.timeline.iter().map(|point| (point.seconds, of(&point.latency).max(low)));
        chart
            .draw_series(LineSeries::new(points, colour.stroke_width(2)))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
    }
    for (at, event) in step.events.iter().enumerate() {
        let to = event.seconds + event.lasted;
        chart.draw_series([Rectangle::new([(event.seconds, low), (to, high)], BLACK.mix(0.12).filled())])?;
        chart.draw_series(LineSeries::new([(event.seconds, low), (event.seconds, high)], BLACK.stroke_width(1)))?;
        let height = high / 1.3_f64.powi(i32::try_from(at).unwrap_or_default() + 1);
        chart.draw_series([Text::new(event.what.clone(), (end.mul_add(0.005, event.seconds), height), font())])?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .draw()?;
    root.present()?;
    Ok(())
}

fn font() -> TextStyle<'static> {
    ("sans-serif", 14).into_font().color(&BLACK)
}
