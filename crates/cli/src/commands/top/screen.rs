//! What `ebb top` shows, as plain text: from the statuses seen so far to one frame. Pure.

use ebb_types::units::Size;
use serde_json::Value;
use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::time::Instant;

/// Statuses that are remembered: a wide terminal full.
const REMEMBERED: usize = 400;

/// Steps of a bar one character high.
const STEPS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Lines of the diagram of dirty bytes.
const DIAGRAM_LINES: usize = 4;

/// Rates: name, and where the growing number stands in the status.
const RATES: [(&str, &str); 5] = [
    ("written", "/ledger/absorbed_bytes"),
    ("flushed", "/ledger/flushed_bytes"),
    ("fetched", "/fetched_bytes_backing"),
    ("from peers", "/fetched_bytes_peer"),
    ("evicted", "/ledger/evicted_bytes"),
];

/// One look at a mount.
#[derive(Clone, Debug)]
pub struct Sample {
    /// When.
    pub at: Instant,
    /// The object of `ebb status --json`.
    pub status: Value,
}

/// What is kept of a look.
struct Point {
    dirty: u64,
    flushing: bool,
}

/// The looks so far.
#[derive(Default)]
pub struct History {
    points: VecDeque<Point>,
    last: Option<Sample>,
    before: Option<Sample>,
    /// Most dirty bytes of a file since it was last clean: its progress is measured by that.
    most: BTreeMap<String, u64>,
}

fn number(status: &Value, at: &str) -> u64 {
    status.pointer(at).and_then(Value::as_u64).unwrap_or(0)
}

fn word<'a>(status: &'a Value, at: &str) -> &'a str {
    status.pointer(at).and_then(Value::as_str).unwrap_or("-")
}

fn items<'a>(status: &'a Value, at: &str) -> &'a [Value] {
    status.pointer(at).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

impl History {
    /// Takes the newest look in.
    pub fn add(&mut self, sample: Sample) {
        let status = &sample.status;
        let flushing = word(status, "/flush_state") == "flushing";
        self.points.push_back(Point { dirty: number(status, "/dirty_bytes"), flushing });
        if self.points.len() > REMEMBERED {
            self.points.pop_front();
        }
        let dirty: BTreeMap<String, u64> = items(status, "/dirty_files")
            .iter()
            .map(|f| (word(f, "/path").to_owned(), number(f, "/bytes")))
            .collect();
        self.most.retain(|path, _| dirty.contains_key(path));
        for (path, bytes) in dirty {
            let most = self.most.entry(path).or_default();
            *most = (*most).max(bytes);
        }
        self.before = self.last.replace(sample);
    }

    /// One frame; every line ends with a newline and none is wider than `columns`.
    #[must_use]
    pub fn frame(&self, columns: usize, rows: usize) -> String {
        let Some(last) = &self.last else { return String::new() };
        let mut out = String::new();
        self.head(&last.status, &mut out);
        self.diagram(columns, number(&last.status, "/cache_capacity_bytes"), &mut out);
        self.files(&last.status, rows.saturating_sub(out.lines().count()), &mut out);
        errors(&last.status, &mut out);
        let fit = |line: &str| line.chars().take(columns).collect::<String>() + "\n";
        out.lines().take(rows).map(fit).collect()
    }

    fn head(&self, s: &Value, out: &mut String) {
        let size = |at| Size(number(s, at)).to_string();
        let _ = writeln!(
            out,
            "{}  {}  policy {}  {} on {}",
            word(s, "/node"),
            word(s, "/consistency"),
            word(s, "/flush_policy"),
            word(s, "/backing"),
            word(s, "/mountpoint"),
        );
        let _ = writeln!(
            out,
            "activity {:<6} open {:<6} flush {:<9} writing {:<4} stopped p99 {}",
            number(s, "/activity"),
            number(s, "/open_files"),
            word(s, "/flush_state"),
            number(s, "/flush/in_flight"),
            stop_time(s),
        );
        let _ = writeln!(
            out,
            "buffer   {} of {}: {} dirty, {} clean",
            size("/cache_bytes"),
            size("/cache_capacity_bytes"),
            size("/dirty_bytes"),
            size("/clean_bytes"),
        );
        let _ = writeln!(
            out,
            "ledger   {} absorbed, {} flushed, {} skipped, {} failed, {} evicted",
            size("/ledger/absorbed_bytes"),
            size("/ledger/flushed_bytes"),
            size("/ledger/skipped_bytes"),
            size("/ledger/failed_bytes"),
            size("/ledger/evicted_bytes"),
        );
        let rates: Vec<String> = RATES
            .iter()
            .map(|(name, at)| format!("{name} {}/s", Size(self.rate(at) as u64)))
            .collect();
        let _ = writeln!(out, "rates    {}", rates.join(", "));
    }

    /// Growth per second between the last two looks.
    fn rate(&self, at: &str) -> f64 {
        let (Some(before), Some(last)) = (&self.before, &self.last) else { return 0.0 };
        let grown = number(&last.status, at).saturating_sub(number(&before.status, at));
        grown as f64 / last.at.duration_since(before.at).as_secs_f64().max(1e-3)
    }

    /// Dirty bytes over time, newest on the right, and below it when the flusher was at work.
    fn diagram(&self, columns: usize, capacity: u64, out: &mut String) {
        let width = columns.saturating_sub(11).clamp(1, REMEMBERED);
        let shown: Vec<&Point> =
            self.points.iter().skip(self.points.len().saturating_sub(width)).collect();
        let most = shown.iter().map(|p| p.dirty).max().unwrap_or(0);
        let _ = writeln!(
            out,
            "dirty    most here {} ({} of the buffer)",
            Size(most),
            percent(most, capacity)
        );
        for line in (0..DIAGRAM_LINES).rev() {
            let bar = |p: &&Point| cell(p.dirty, most, line);
            let _ = writeln!(out, "         |{}", shown.iter().map(bar).collect::<String>());
        }
        let mark = |p: &&Point| if p.flushing { '#' } else { '.' };
        let _ = writeln!(out, "flushing |{}", shown.iter().map(mark).collect::<String>());
    }

    fn files(&self, s: &Value, rows: usize, out: &mut String) {
        let (files, total) = (items(s, "/dirty_files"), number(s, "/dirty_files_total"));
        let _ = writeln!(out, "files    {total} with dirty bytes");
        let working = items(s, "/flush/working");
        for file in files.iter().take(rows.saturating_sub(4).min(15)) {
            let (path, bytes) = (word(file, "/path"), number(file, "/bytes"));
            let most = self.most.get(path).copied().unwrap_or(bytes);
            let step = working.iter().find(|w| word(w, "/path") == path);
            let step = step.map_or(String::new(), |w| {
                let seconds = w["seconds"].as_f64().unwrap_or(0.0);
                format!("{} {seconds:.1} s", word(w, "/operation"))
            });
            let done = percent(most - bytes, most);
            let _ = writeln!(out, "  {done:>5} {:>10} {path}  {step}", Size(bytes).to_string());
        }
    }
}

fn errors(s: &Value, out: &mut String) {
    let errors = items(s, "/errors");
    let _ = writeln!(out, "errors   {}", errors.len());
    for e in errors.iter().take(5) {
        let (path, operation, text) = (word(e, "/path"), word(e, "/operation"), word(e, "/text"));
        let _ = writeln!(out, "  {path}: {operation}: {text}");
    }
}

fn stop_time(s: &Value) -> String {
    match s.pointer("/flush/stop_latency/p99_us").and_then(Value::as_u64) {
        Some(us) => format!("{:.1} ms", us as f64 / 1e3),
        None => "-".to_owned(),
    }
}

fn percent(part: u64, whole: u64) -> String {
    format!("{:.0}%", part as f64 / whole.max(1) as f64 * 100.0)
}

/// What of a bar `value` high (the highest is `most`) is seen in one line of the diagram.
fn cell(value: u64, most: u64, line: usize) -> char {
    let eighths = (value as f64 / most.max(1) as f64 * (DIAGRAM_LINES * 8) as f64).ceil() as usize;
    STEPS[eighths.saturating_sub(line * 8).min(8)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::time::Duration;

    fn sample(at: Instant, dirty: u64, flushed: u64, state: &str) -> Sample {
        let status = json!({
            "node": "n1", "backing": "/pfs", "mountpoint": "/m", "consistency": "session",
            "flush_policy": "idle", "flush_state": state, "activity": 3, "open_files": 2,
            "cache_bytes": dirty, "cache_capacity_bytes": 100 << 20, "dirty_bytes": dirty,
            "ledger": {"flushed_bytes": flushed, "absorbed_bytes": dirty + flushed},
            "flush": {"in_flight": 1, "stop_latency": {"p99_us": 1500},
                      "working": [{"path": "a", "operation": "write", "seconds": 0.25}]},
            "dirty_files": [{"path": "a", "bytes": dirty}], "dirty_files_total": 1,
            "errors": [{"path": "b", "operation": "write", "text": "No space"}],
        });
        Sample { at, status }
    }

    #[test]
    fn a_frame_shows_state_rates_and_progress() {
        let (mut history, start) = (History::default(), Instant::now());
        history.add(sample(start, 40 << 20, 0, "waiting"));
        history.add(sample(start + Duration::from_secs(2), 10 << 20, 30 << 20, "flushing"));
        let frame = history.frame(100, 30);
        for part in [
            "n1  session  policy idle  /pfs on /m",
            "activity 3",
            "flushed 15MiB/s",
            "stopped p99 1.5 ms",
            "most here 40MiB (40% of the buffer)",
            "flushing |.#",
            "75%      10MiB a  write 0.2",
            "b: write: No space",
        ] {
            assert!(frame.contains(part), "{part} in\n{frame}");
        }
    }

    #[test]
    fn frames_fit_whatever_the_size_and_bear_what_is_missing() {
        let mut history = History::default();
        assert_eq!(history.frame(80, 24), "");
        history.add(Sample { at: Instant::now(), status: json!({}) });
        for _ in 0..2 * REMEMBERED {
            history.add(sample(Instant::now(), 7, 1, "idle"));
        }
        for (columns, rows) in [(1, 1), (20, 5), (80, 24), (500, 60)] {
            let frame = history.frame(columns, rows);
            assert!(frame.lines().count() <= rows);
            assert!(frame.lines().all(|l| l.chars().count() <= columns), "{frame}");
        }
    }

    #[test]
    fn bars_are_as_high_as_their_value() {
        let column = |v| (0..DIAGRAM_LINES).map(|l| cell(v, 32, l)).collect::<String>();
        assert_eq!(column(0), "    ");
        assert_eq!(column(1), "▁   ");
        assert_eq!(column(12), "█▄  ");
        assert_eq!(column(32), "████");
    }
}
