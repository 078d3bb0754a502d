//! The chart: a panel for each figure, a line for each policy. Axes begin at 0.

use std::fmt::Write;

const WIDTH: f64 = 420.0;
const HEIGHT: f64 = 150.0;
const COLOURS: [&str; 3] = ["#777777", "#0072b2", "#d55e00"];

type Curves = [Vec<(f64, f64)>; 3];

/// Panels below each other.
pub struct Chart(Vec<(String, Curves)>);

impl Chart {
    /// Without a panel.
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// Adds a panel.
    pub fn panel(&mut self, title: &str, curves: &Curves) {
        self.0.push((title.to_owned(), curves.clone()));
    }

    /// All panels as SVG.
    pub fn draw(&self, names: &[&str; 3]) -> String {
        let height = 40.0 + self.0.len() as f64 * (HEIGHT + 50.0);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 540 {height}\" font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"540\" height=\"{height}\" fill=\"white\"/>\n"
        );
        for (place, name) in names.iter().enumerate() {
            let x = 80 + place * 110;
            let colour = COLOURS[place];
            let _ = writeln!(
                svg,
                "<text x=\"{x}\" y=\"18\" fill=\"{colour}\">{name}</text>"
            );
        }
        for (place, (title, curves)) in self.0.iter().enumerate() {
            let top = 50.0 + place as f64 * (HEIGHT + 50.0);
            let points = || curves.iter().flatten();
            let right = points().map(|point| point.0).fold(0.0, f64::max).max(0.001);
            let high = points().map(|point| point.1).fold(0.0, f64::max).max(0.001);
            let _ = writeln!(
                svg,
                "<g transform=\"translate(80 {top})\"><text y=\"-6\">{title}</text><rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"none\" stroke=\"#999\"/><text x=\"-6\" y=\"10\" text-anchor=\"end\">{high:.0}</text><text x=\"-6\" y=\"{HEIGHT}\" text-anchor=\"end\">0</text><text x=\"{WIDTH}\" y=\"{}\" text-anchor=\"end\">{right}</text>",
                HEIGHT + 14.0
            );
            for (curve, colour) in curves.iter().zip(COLOURS) {
                let path: Vec<String> = curve
                    .iter()
                    .map(|(x, y)| {
                        format!("{:.1},{:.1}", x / right * WIDTH, HEIGHT * (1.0 - y / high))
                    })
                    .collect();
                let _ = writeln!(
                    svg,
                    "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
                    path.join(" ")
                );
            }
            svg.push_str("</g>\n");
        }
        svg + "</svg>\n"
    }
}
