//! A time-line as SVG: when the program wrote, how many bytes were dirty, and how fast they went
//! to the backing. One panel for each run.

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
    let height = PANEL * panels.len() as f64;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" \
         fill=\"white\"/>\n"
    );
    for (i, panel) in panels.iter().enumerate() {
        let _ = writeln!(out, "<g transform=\"translate(0 {})\">", PANEL * i as f64);
        draw(panel, seconds, dirty, rate, &mut out);
        out.push_str("</g>\n");
    }
    out.push_str("</svg>\n");
    out
}

/// Bytes per second between two looks, at the later one.
fn rates(looks: &[Look]) -> Vec<(f64, f64)> {
    let pairs = looks.windows(2);
    pairs
        .map(|w| (w[1].at, (w[1].flushed - w[0].flushed) / (w[1].at - w[0].at).max(1e-3)))
        .collect()
}

fn draw(panel: &Panel, seconds: f64, dirty: f64, rate: f64, out: &mut String) {
    const MIB: f64 = (1 << 20) as f64;
    let x = |s: f64| LEFT + s / seconds * (WIDTH - LEFT - RIGHT);
    let y = |share: f64| PANEL - BOTTOM - share * (PANEL - TOP - BOTTOM);
    let _ = writeln!(out, "<text x=\"{LEFT}\" y=\"18\">{}</text>", panel.title);
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
        let points: Vec<String> =
            points.iter().map(|(s, share)| format!("{:.1},{:.1}", x(*s), y(*share))).collect();
        let _ = writeln!(
            out,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"/>",
            points.join(" ")
        );
    };
    line(panel.looks.iter().map(|l| (l.at, l.dirty / dirty)).collect(), "#1f5fbf", out);
    line(rates(&panel.looks).into_iter().map(|(s, r)| (s, r / rate)).collect(), "#c0392b", out);
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
