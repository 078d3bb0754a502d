//! The chart: one panel for each workload (columns), and for orders of commits and kinds of flushes
//! (rows); a line for each mode over the number of appliers. Both axes are logarithmic.

use std::fmt::Write;

use crate::engine::{Flush, Mode, Order};
use crate::{APPLIERS, MODES, Point};

const WIDTH: f64 = 190.0;
const HEIGHT: f64 = 130.0;
const GAP: f64 = 34.0;
const LEFT: f64 = 96.0;
const TOP: f64 = 64.0;
/// Range of the throughput axis: powers of 10.
const DECADES: (i32, i32) = (3, 6);

fn colour(mode: Mode) -> &'static str {
    match mode {
        Mode::Serial => "#777777",
        Mode::Parallel => "#0072b2",
        Mode::Batch => "#d55e00",
        Mode::Consolidate => "#009e73",
    }
}

fn name(mode: Mode) -> &'static str {
    match mode {
        Mode::Serial => "serial",
        Mode::Parallel => "parallel",
        Mode::Batch => "batch",
        Mode::Consolidate => "batch, consolidated",
    }
}

fn x(appliers: usize) -> f64 {
    let steps = APPLIERS.len() - 1;
    let place = APPLIERS
        .iter()
        .position(|count| *count == appliers)
        .unwrap_or(0);
    WIDTH * number(place) / number(steps)
}

fn number(of: usize) -> f64 {
    f64::from(u32::try_from(of).unwrap_or(u32::MAX))
}

fn y(throughput: f64) -> f64 {
    let (low, high) = (f64::from(DECADES.0), f64::from(DECADES.1));
    let part = (throughput.max(1.0).log10() - low) / (high - low);
    HEIGHT * (1.0 - part.clamp(0.0, 1.0))
}

/// Draws all points as SVG.
#[must_use]
pub fn draw(points: &[Point]) -> String {
    let mut workloads: Vec<&str> = Vec::new();
    for point in points {
        if !workloads.contains(&point.workload.as_str()) {
            workloads.push(&point.workload);
        }
    }
    let rows = [
        (Flush::None, Order::Source, "source order"),
        (Flush::None, Order::Relaxed, "relaxed"),
        (Flush::Leader, Order::Source, "source order, leader flushes"),
        (
            Flush::Appliers,
            Order::Source,
            "source order, appliers flush",
        ),
    ];
    let width = LEFT + number(workloads.len()) * (WIDTH + GAP);
    let height = TOP + number(rows.len()) * (HEIGHT + GAP) + 20.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"white\"/>\n\
         <text x=\"{LEFT}\" y=\"18\" font-size=\"14\">Simulated: transactions a second over appliers</text>\n"
    );
    for (place, mode) in MODES.into_iter().enumerate() {
        let at = LEFT + number(place) * 150.0;
        let _ = writeln!(
            svg,
            "<line x1=\"{at}\" y1=\"32\" x2=\"{}\" y2=\"32\" stroke=\"{}\" stroke-width=\"2\"/><text x=\"{}\" y=\"36\">{}</text>",
            at + 20.0,
            colour(mode),
            at + 26.0,
            name(mode)
        );
    }
    for (column, workload) in workloads.iter().enumerate() {
        let left = LEFT + number(column) * (WIDTH + GAP);
        let _ = writeln!(
            svg,
            "<text x=\"{left}\" y=\"{}\">{workload}</text>",
            TOP - 8.0
        );
        for (row, (flush, order, label)) in rows.into_iter().enumerate() {
            let top = TOP + number(row) * (HEIGHT + GAP);
            let _ = writeln!(svg, "<g transform=\"translate({left} {top})\">");
            axes(&mut svg, column == 0, label);
            for mode in MODES {
                let of = |point: &&Point| {
                    point.workload == *workload
                        && point.setup.mode == mode
                        && point.setup.flush == flush
                        && (point.setup.order == order || mode == Mode::Serial)
                };
                line(&mut svg, mode, points.iter().filter(of));
            }
            svg.push_str("</g>\n");
        }
    }
    svg.push_str("</svg>\n");
    svg
}

fn axes(svg: &mut String, labelled: bool, label: &str) {
    let _ = writeln!(
        svg,
        "<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"none\" stroke=\"#999\"/>"
    );
    for decade in DECADES.0..=DECADES.1 {
        let at = y(10_f64.powi(decade));
        let _ = writeln!(
            svg,
            "<line x1=\"0\" y1=\"{at}\" x2=\"{WIDTH}\" y2=\"{at}\" stroke=\"#ddd\"/>"
        );
        if labelled {
            let text = match decade {
                3 => "1,000",
                4 => "10,000",
                5 => "100,000",
                _ => "1,000,000",
            };
            let _ = writeln!(
                svg,
                "<text x=\"-6\" y=\"{}\" text-anchor=\"end\">{text}</text>",
                at + 4.0
            );
        }
    }
    for appliers in APPLIERS {
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{appliers}</text>",
            x(appliers),
            HEIGHT + 14.0
        );
    }
    let _ = writeln!(svg, "<text x=\"6\" y=\"14\" fill=\"#555\">{label}</text>");
}

/// Draws the line of a mode; each point has a tooltip.
fn line<'p>(svg: &mut String, mode: Mode, points: impl Iterator<Item = &'p Point>) {
    let points: Vec<&Point> = points.collect();
    let path: Vec<String> = points
        .iter()
        .map(|point| {
            let throughput = point.outcome.transactions_per_second;
            format!("{:.1},{:.1}", x(point.setup.appliers), y(throughput))
        })
        .collect();
    let colour = colour(mode);
    let _ = writeln!(
        svg,
        "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
        path.join(" ")
    );
    for point in points {
        let throughput = point.outcome.transactions_per_second;
        let _ = writeln!(
            svg,
            "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"2.5\" fill=\"{colour}\"><title>{}, {} appliers: {throughput:.0} a second, limited by: {}</title></circle>",
            x(point.setup.appliers),
            y(throughput),
            name(mode),
            point.setup.appliers,
            point.outcome.bottleneck
        );
    }
}
