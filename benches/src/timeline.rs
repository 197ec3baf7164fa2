//! A time-line as SVG: when the program wrote, how many bytes were dirty, and how fast they went
//! to the backing. One panel for each run.

use ebb_workloads::paper::{label, polyline, sheet};
use std::fmt::Write as _;

const WIDTH: f64 = 900.0;
const PANEL: f64 = 180.0;
const LEFT: f64 = 80.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 28.0;
const BOTTOM: f64 = 30.0;

/// One look at a run.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    /// Seconds since its beginning.
    pub at: f64,
    /// Bytes that were not on the backing.
    pub dirty: f64,
    /// Bytes brought to the backing so far.
    pub flushed: f64,
}

/// One run.
#[derive(Clone, Debug, Default)]
pub struct Panel {
    /// Above it.
    pub title: String,
    /// Seconds from and to which the program wrote.
    pub bursts: Vec<(f64, f64)>,
    /// In the order of time.
    pub looks: Vec<Look>,
}

/// All panels on one scale, one below the other.
#[must_use]
pub fn svg(panels: &[Panel]) -> String {
    let most = |of: fn(&Look) -> f64| {
        panels.iter().flat_map(|p| p.looks.iter()).map(of).fold(1.0, f64::max)
    };
    let (seconds, dirty) = (most(|l| l.at), most(|l| l.dirty));
    let rate = panels.iter().flat_map(|p| rates(&p.looks)).map(|r| r.1).fold(1.0, f64::max);
    let drawn: Vec<String> = panels.iter().map(|p| draw(p, seconds, dirty, rate)).collect();
    sheet(WIDTH, PANEL, 12, &drawn)
}

/// Bytes per second between two looks, at the later one.
fn rates(looks: &[Look]) -> Vec<(f64, f64)> {
    let pairs = looks.windows(2);
    pairs
        .map(|w| (w[1].at, (w[1].flushed - w[0].flushed) / (w[1].at - w[0].at).max(1e-3)))
        .collect()
}

fn draw(panel: &Panel, seconds: f64, dirty: f64, rate: f64) -> String {
    const MIB: f64 = (1 << 20) as f64;
    let x = |s: f64| LEFT + s / seconds * (WIDTH - LEFT - RIGHT);
    let y = |share: f64| PANEL - BOTTOM - share * (PANEL - TOP - BOTTOM);
    let mut out = String::new();
    label(&mut out, LEFT, 18.0, "start", &panel.title);
    for (from, to) in &panel.bursts {
        let _ = writeln!(
            out,
            "<rect x=\"{:.1}\" y=\"{TOP}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"#dddddd\"/>",
            x(*from),
            (x(*to) - x(*from)).max(1.0),
            PANEL - TOP - BOTTOM
        );
    }
    let line = |points: Vec<(f64, f64)>, colour: &str, out: &mut String| {
        polyline(out, points.iter().map(|(s, share)| (x(*s), y(*share))), colour);
    };
    line(panel.looks.iter().map(|l| (l.at, l.dirty / dirty)).collect(), "#1f5fbf", &mut out);
    let rates = rates(&panel.looks).into_iter().map(|(s, r)| (s, r / rate)).collect();
    line(rates, "#c0392b", &mut out);
    let base = y(0.0);
    let _ = writeln!(
        out,
        "<path d=\"M{LEFT} {TOP} V{base} H{}\" fill=\"none\" stroke=\"black\"/>\n\
         <text x=\"4\" y=\"{:.1}\" fill=\"#1f5fbf\">{:.0} MiB</text>\n\
         <text x=\"4\" y=\"{:.1}\" fill=\"#c0392b\">{:.0} MiB/s</text>\n\
         <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{seconds:.1} s; grey: the program writes, \
         blue: dirty bytes, red: flushing</text>",
        WIDTH - RIGHT,
        TOP + 10.0,
        dirty / MIB,
        TOP + 26.0,
        rate / MIB,
        WIDTH - RIGHT,
        PANEL - 8.0
    );
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_run_has_its_lines_and_bursts() {
        let look = |at: f64| Look { at, dirty: 100.0 - at, flushed: at * 10.0 };
        let panel = |title: &str| Panel {
            title: title.into(),
            bursts: vec![(0.0, 1.0), (2.0, 3.0)],
            looks: (0..5).map(|s| look(f64::from(s))).collect(),
        };
        let svg = svg(&[panel("idle"), panel("immediate")]);
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
        assert_eq!(svg.matches("<polyline").count(), 4);
        assert_eq!(svg.matches("fill=\"#dddddd\"").count(), 4);
        assert_eq!(rates(&panel("").looks), [(1.0, 10.0), (2.0, 10.0), (3.0, 10.0), (4.0, 10.0)]);
        assert!(!svg.contains("NaN"));
    }
}
