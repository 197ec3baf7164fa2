//! Bar charts as SVG text: groups of bars with the range of the rounds, a legend, one axis. No
//! scripts, so that it can be put into a paper.

use crate::Spread;
use crate::paper::{label, sheet, tick};
use std::fmt::Write;

const HEIGHT: f64 = 260.0;
const LEFT: f64 = 64.0;
const TOP: f64 = 44.0;
const BOTTOM: f64 = 34.0;
const BAR: f64 = 16.0;
const GAP: f64 = 22.0;
const LEGEND: f64 = 170.0;
/// Colours that are told apart in print and by the colour-blind.
const COLOURS: [&str; 8] =
    ["#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#222222"];

/// One chart: for each group a bar of each series; no bar where there is no number.
pub struct Bars {
    /// Above it.
    pub title: String,
    /// What the numbers count.
    pub unit: String,
    /// Names of the series.
    pub series: Vec<String>,
    /// Name of a group, and its numbers in the order of the series.
    pub groups: Vec<(String, Vec<Option<Spread>>)>,
}

impl Bars {
    /// The chart as an SVG element.
    #[must_use]
    pub fn draw(&self) -> String {
        let group = BAR * self.series.len() as f64 + GAP;
        let plot = (group * self.groups.len() as f64).max(180.0);
        let (width, bottom) = (LEFT + plot + LEGEND, HEIGHT - BOTTOM);
        let numbers = self.groups.iter().flat_map(|(_, bars)| bars.iter().flatten());
        let most = numbers.map(|s| s.most).fold(0.0, f64::max).max(1e-9);
        let step = tick(most);
        let top = (most / step).ceil() * step;
        let y = |value: f64| bottom - value / top * (bottom - TOP);
        let mut svg = String::new();
        label(&mut svg, LEFT, 18.0, "start", &format!("{} ({})", self.title, self.unit));
        let mut value = 0.0;
        while value <= top * 1.0001 {
            let _ = writeln!(
                svg,
                "<line x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{1:.1}\" y2=\"{1:.1}\" stroke=\"#ddd\"/>",
                LEFT + plot,
                y(value)
            );
            label(&mut svg, LEFT - 6.0, y(value) + 4.0, "end", &short(value));
            value += step;
        }
        for (g, (name, bars)) in self.groups.iter().enumerate() {
            let x0 = LEFT + group * g as f64 + GAP / 2.0;
            label(&mut svg, x0 + (group - GAP) / 2.0, bottom + 16.0, "middle", name);
            for (s, bar) in bars.iter().enumerate() {
                if let Some(bar) = bar {
                    draw_bar(&mut svg, x0 + BAR * s as f64, bar, COLOURS[s % COLOURS.len()], &y);
                }
            }
        }
        for (s, name) in self.series.iter().enumerate() {
            let (x, at) = (LEFT + plot + 14.0, TOP + 16.0 * s as f64);
            let colour = COLOURS[s % COLOURS.len()];
            let _ = writeln!(
                svg,
                "<rect x=\"{x:.1}\" y=\"{at:.1}\" width=\"10\" height=\"10\" fill=\"{colour}\"/>"
            );
            label(&mut svg, x + 15.0, at + 9.0, "start", name);
        }
        sheet(width, HEIGHT, 11, &[svg])
    }
}

fn draw_bar(svg: &mut String, x: f64, bar: &Spread, colour: &str, y: &impl Fn(f64) -> f64) {
    let (top, base, middle) = (y(bar.median), y(0.0), x + BAR / 2.0 - 1.0);
    let _ = writeln!(
        svg,
        "<rect x=\"{x:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{colour}\"/>\n\
         <line x1=\"{middle:.1}\" x2=\"{middle:.1}\" y1=\"{:.1}\" y2=\"{:.1}\" stroke=\"#333\"/>",
        BAR - 2.0,
        (base - top).max(0.5),
        y(bar.least),
        y(bar.most)
    );
}

/// A number with three digits or so.
#[must_use]
pub fn short(value: f64) -> String {
    match value {
        v if v >= 100_000.0 => format!("{:.0}k", v / 1000.0),
        v if v >= 100.0 || v == 0.0 => format!("{v:.0}"),
        v if v >= 10.0 => format!("{v:.1}"),
        v => format!("{v:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_a_bar_and_gaps_are_gaps() {
        let bar = Spread::of(&[1.0, 2.0, 3.0]);
        let chart = Bars {
            title: "a < b".into(),
            unit: "MiB/s".into(),
            series: vec!["x".into(), "y".into()],
            groups: vec![("1".into(), vec![bar, None]), ("2".into(), vec![bar, bar])],
        };
        let svg = chart.draw();
        // The paper, two in the legend, three bars.
        assert_eq!(svg.matches("<rect").count(), 1 + 2 + 3);
        assert!(svg.contains("a &lt; b"));
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!((short(0.0).as_str(), short(3.456).as_str()), ("0", "3.46"));
        assert_eq!((short(12_345.6).as_str(), short(123_456.0).as_str()), ("12346", "123k"));
    }
}
