//! The chart: a row for each figure of the report. On the left throughput over clients, a line for
//! each number of nodes; on the right the peak over nodes, as a multiple of one node's.

use std::fmt::Write;

use crate::{CLIENTS, NODES};

const WIDTH: f64 = 300.0;
const HEIGHT: f64 = 150.0;
const LEFT: f64 = 70.0;
const GAP: f64 = 90.0;
const ROW: f64 = HEIGHT + 60.0;
const COLOURS: [&str; 7] = [
    "#000000", "#999999", "#e69f00", "#56b4e9", "#009e73", "#0072b2", "#d55e00",
];

/// One row.
pub struct Row {
    /// The simulated setup, with the figure of the report.
    pub title: String,
    /// Throughput by number of nodes and of clients.
    pub throughput: Vec<Vec<f64>>,
    /// Lines of the right panel: name and multiples by number of nodes.
    pub peaks: Vec<(&'static str, Vec<f64>)>,
    /// The report's best: number of databases and multiple.
    pub report: Option<(usize, f64)>,
}

fn place(index: usize, of: usize) -> f64 {
    WIDTH * index as f64 / (of - 1) as f64
}

/// A number that is not much above the highest one.
fn round_up(high: f64) -> f64 {
    let step = 10_f64.powf(high.log10().floor());
    let fitting = [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0];
    let fitting = fitting.into_iter().find(|times| times * step >= high);
    fitting.unwrap_or(10.0) * step
}

fn line(svg: &mut String, values: &[f64], top: f64, colour: &str, style: &str) {
    let points = values.iter().enumerate().map(|(at, value)| {
        let x = place(at, values.len());
        format!("{x:.1},{:.1}", HEIGHT * (1.0 - value / top))
    });
    let points: Vec<String> = points.collect();
    let _ = writeln!(
        svg,
        "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\" {style}/>",
        points.join(" ")
    );
}

fn frame(svg: &mut String, title: &str, top: f64, digits: usize, ticks: &[usize]) {
    let _ = writeln!(
        svg,
        "<text y=\"-6\">{title}</text><rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"none\" stroke=\"#999\"/><text x=\"-6\" y=\"10\" text-anchor=\"end\">{top:.digits$}</text><text x=\"-6\" y=\"{HEIGHT}\" text-anchor=\"end\">0</text>"
    );
    for (at, tick) in ticks.iter().enumerate() {
        let x = place(at, ticks.len());
        let y = HEIGHT + 14.0;
        let _ = writeln!(
            svg,
            "<text x=\"{x:.0}\" y=\"{y}\" text-anchor=\"middle\">{tick}</text>"
        );
    }
}

/// All rows as SVG.
pub fn draw(rows: &[Row]) -> String {
    let width = LEFT + 2.0 * WIDTH + GAP + 20.0;
    let height = 50.0 + rows.len() as f64 * ROW;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"{width}\" height=\"{height}\" fill=\"white\"/>\n"
    );
    for (at, (nodes, colour)) in NODES.iter().zip(COLOURS).enumerate() {
        let x = LEFT + at as f64 * 45.0;
        let word = if at == 0 { "nodes: " } else { "" };
        let _ = writeln!(
            svg,
            "<text x=\"{x}\" y=\"18\" fill=\"{colour}\">{word}{nodes}</text>"
        );
    }
    for (at, row) in rows.iter().enumerate() {
        let y = 50.0 + at as f64 * ROW;
        let highest = row.throughput.iter().flatten().copied().fold(1.0, f64::max);
        let top = round_up(highest);
        let _ = writeln!(svg, "<g transform=\"translate({LEFT} {y})\">");
        let title = format!("{}: interactions a second over clients", row.title);
        frame(&mut svg, &title, top, 0, &CLIENTS);
        for (values, colour) in row.throughput.iter().zip(COLOURS) {
            line(&mut svg, values, top, colour, "");
        }
        let x = LEFT + WIDTH + GAP;
        let _ = writeln!(svg, "</g>\n<g transform=\"translate({x} {y})\">");
        let highest = row.peaks.iter().flat_map(|(_, values)| values).copied();
        let top = round_up(highest.fold(1.5, f64::max));
        frame(&mut svg, "peak over nodes, one node is 1", top, 1, &NODES);
        let even = HEIGHT * (1.0 - 1.0 / top);
        let _ = writeln!(
            svg,
            "<line x2=\"{WIDTH}\" y1=\"{even:.1}\" y2=\"{even:.1}\" stroke=\"#ccc\"/>"
        );
        let lines = row.peaks.iter().zip(["#0072b2", "#d55e00", "#009e73"]);
        for (place, ((name, values), colour)) in lines.enumerate() {
            line(&mut svg, values, top, colour, "");
            let y = 14 + 14 * place;
            let _ = writeln!(
                svg,
                "<text x=\"6\" y=\"{y}\" fill=\"{colour}\">{name}</text>"
            );
        }
        if let Some((nodes, times)) = row.report {
            let at = NODES.iter().position(|count| *count == nodes).unwrap_or(0);
            let (x, y) = (place(at, NODES.len()), HEIGHT * (1.0 - times / top));
            let _ = writeln!(
                svg,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\"/><text x=\"{:.1}\" y=\"{:.1}\">report {times}</text>",
                x + 7.0,
                y + 12.0
            );
        }
        svg.push_str("</g>\n");
    }
    svg + "</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_end_above_the_highest() {
        for (high, end) in [
            (1.5, 1.5),
            (1.51, 2.0),
            (7.0, 8.0),
            (1234.0, 1500.0),
            (99.0, 100.0),
        ] {
            assert!((round_up(high) - end).abs() < 0.001, "{high}");
        }
    }
}
