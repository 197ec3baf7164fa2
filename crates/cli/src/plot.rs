//! Line charts as SVG text, as plain as can be: one line, two axes, one marked level. No
//! interaction, no styles beyond what every viewer knows.

use ebb_workloads::paper::{label, polyline, sheet, tick};
use std::fmt::Write;

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 36.0;
const BOTTOM: f64 = 48.0;

/// One chart.
pub struct Chart {
    /// Above it.
    pub title: String,
    /// Below it.
    pub x_label: String,
    /// The line, from left to right.
    pub points: Vec<(f64, f64)>,
    /// A level to compare with, and its name.
    pub mark: Option<(f64, String)>,
}

/// The charts one below the other, as a whole SVG file.
#[must_use]
pub fn document(charts: &[Chart]) -> String {
    let panels: Vec<String> = charts.iter().map(Chart::draw).collect();
    sheet(WIDTH, HEIGHT, 12, &panels)
}

/// From numbers to places on the paper.
struct Scale {
    x_most: f64,
    y_most: f64,
}

impl Scale {
    fn x(&self, x: f64) -> f64 {
        LEFT + x / self.x_most * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, y: f64) -> f64 {
        HEIGHT - BOTTOM - y / self.y_most * (HEIGHT - TOP - BOTTOM)
    }
}

impl Chart {
    fn draw(&self) -> String {
        let mut drawn = String::new();
        let svg = &mut drawn;
        let most = |of: fn(&(f64, f64)) -> f64| self.points.iter().map(of).fold(0.0, f64::max);
        let marked = self.mark.as_ref().map_or(0.0, |m| m.0);
        let (x_step, y_step) = (tick(most(|p| p.0)), tick(most(|p| p.1).max(marked)));
        let up = |value: f64, step: f64| (value / step).ceil() * step;
        let scale = Scale {
            x_most: up(most(|p| p.0), x_step).max(x_step),
            y_most: up(most(|p| p.1).max(marked), y_step).max(y_step),
        };
        label(svg, WIDTH / 2.0, TOP - 14.0, "middle", &self.title);
        label(svg, WIDTH / 2.0, HEIGHT - 10.0, "middle", &self.x_label);
        axes(svg, &scale, x_step, y_step);
        if let Some((level, name)) = &self.mark {
            let y = scale.y(*level);
            line(svg, (LEFT, y), (WIDTH - RIGHT, y), "#c0392b\" stroke-dasharray=\"5 4");
            label(svg, WIDTH - RIGHT, y - 4.0, "end", name);
        }
        self.draw_line(svg, &scale);
        drawn
    }

    fn draw_line(&self, svg: &mut String, scale: &Scale) {
        let places = self.points.iter().map(|(x, y)| (scale.x(*x), scale.y(*y)));
        polyline(svg, places, "#1f5fa8");
        // A line of one point would not be seen.
        if let [only] = self.points.as_slice() {
            let (x, y) = (scale.x(only.0), scale.y(only.1));
            let _ = writeln!(svg, "<circle cx=\"{x:.2}\" cy=\"{y:.2}\" r=\"3\" fill=\"#1f5fa8\"/>");
        }
    }
}

fn axes(svg: &mut String, scale: &Scale, x_step: f64, y_step: f64) {
    let mut x = 0.0;
    while x <= scale.x_most + x_step / 2.0 {
        let at = scale.x(x);
        line(svg, (at, TOP), (at, HEIGHT - BOTTOM), "#dddddd");
        label(svg, at, HEIGHT - BOTTOM + 16.0, "middle", &number(x));
        x += x_step;
    }
    let mut y = 0.0;
    while y <= scale.y_most + y_step / 2.0 {
        let at = scale.y(y);
        line(svg, (LEFT, at), (WIDTH - RIGHT, at), "#dddddd");
        label(svg, LEFT - 6.0, at + 4.0, "end", &number(y));
        y += y_step;
    }
}

fn line(svg: &mut String, from: (f64, f64), to: (f64, f64), stroke: &str) {
    let ((x1, y1), (x2, y2)) = (from, to);
    let _ = writeln!(
        svg,
        "<line x1=\"{x1:.2}\" y1=\"{y1:.2}\" x2=\"{x2:.2}\" y2=\"{y2:.2}\" stroke=\"{stroke}\"/>"
    );
}

fn number(x: f64) -> String {
    let text = format!("{x:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_no_needless_zeros() {
        assert_eq!(
            (number(2.5), number(100.0), number(0.0)),
            ("2.5".into(), "100".into(), "0".into())
        );
    }

    #[test]
    fn the_line_stays_on_the_paper_and_words_are_escaped() {
        let chart = Chart {
            title: "a < b & c".to_owned(),
            x_label: "jobs".to_owned(),
            points: (1..=10).map(|n| (f64::from(n), f64::from(n * n))).collect(),
            mark: Some((150.0, "all".to_owned())),
        };
        let svg = document(&[chart]);
        assert!(svg.contains("a &lt; b &amp; c"), "{svg}");
        let points = svg.split("points=\"").nth(1).and_then(|s| s.split('"').next()).unwrap();
        let places: Vec<(f64, f64)> = points
            .split(' ')
            .map(|p| {
                p.split_once(',').map(|(x, y)| (x.parse().unwrap(), y.parse().unwrap())).unwrap()
            })
            .collect();
        assert_eq!(places.len(), 10);
        for (x, y) in &places {
            assert!((LEFT..=WIDTH - RIGHT).contains(x) && (TOP..=HEIGHT - BOTTOM).contains(y));
        }
        // Larger values are further right and higher up.
        assert!(places.windows(2).all(|p| p[0].0 < p[1].0 && p[0].1 > p[1].1));
        assert_eq!(svg.matches("<g ").count(), svg.matches("</g>").count());
    }
}
