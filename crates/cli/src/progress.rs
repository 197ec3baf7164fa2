//! Shows how far a drain or a staging is, and how it ended: a bar on a terminal, one line at the end
//! elsewhere, and every path that is not on the backing.

use crate::exit::{Code, Failure};
use ebb_fs_client::control::{Event, Outcome, Remaining};
use ebb_fs_client::ledger::Ledger;
use ebb_types::Errno;
use ebb_types::units::Size;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::cell::Cell;
use std::io::IsTerminal;
use std::time::Instant;

/// More paths than this are summed up.
const PATHS_SHOWN: usize = 50;

/// The bar of one drain.
pub struct Progress {
    bar: ProgressBar,
    began: Instant,
    /// Most bytes and files that were reported as done.
    done: Cell<(u64, u64)>,
    /// The books of the node, when it has sent them.
    ledger: Cell<Option<Ledger>>,
}

impl Progress {
    /// A bar on standard error when that is a terminal; silent otherwise.
    #[must_use]
    pub fn new() -> Progress {
        let target = match std::io::stderr().is_terminal() {
            true => ProgressDrawTarget::stderr(),
            false => ProgressDrawTarget::hidden(),
        };
        let bar = ProgressBar::with_draw_target(Some(0), target);
        let template = "{msg:>10} [{bar:30}] {binary_bytes}/{binary_total_bytes} \
                        {binary_bytes_per_sec} {prefix} eta {eta}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        Progress { bar, began: Instant::now(), done: Cell::default(), ledger: Cell::default() }
    }

    /// Takes one event of the daemon.
    pub fn update(&self, event: &Event) {
        if let Event::Summary { ledger } = event {
            self.ledger.set(Some(*ledger));
        }
        if let Event::Waiting { text } = event {
            self.bar.suspend(|| eprintln!("ebb: {text}"));
        }
        if let Event::Progress { bytes_done, bytes_total, files_done, files_total, stage } = event {
            // Names are counted as well, in a stage of their own.
            if stage != "namespace" {
                let (bytes, files) = self.done.get();
                self.done.set((bytes.max(*bytes_done), files.max(*files_done)));
            }
            self.bar.set_length(*bytes_total);
            self.bar.set_position(*bytes_done);
            self.bar.set_prefix(format!("{files_done}/{files_total} files"));
            self.bar.set_message(stage.clone());
        }
    }

    /// Takes the bar away and says how it ended.
    pub fn finish(self, what: &str, outcome: Outcome) -> Result<(), Failure> {
        self.finish_as(what, "brought to the backing", outcome)
    }

    /// Takes the bar away.
    pub fn clear(&self) {
        self.bar.finish_and_clear();
    }

    /// The same for something else than a drain.
    pub fn finish_as(self, what: &str, done: &str, outcome: Outcome) -> Result<(), Failure> {
        self.clear();
        if let Some(ledger) = self.ledger.get() {
            eprintln!("{what}: job summary: {ledger}");
        }
        let (bytes, files) = judge(what, outcome)?;
        // The answer to an unmount counts only what came after the drain before it.
        let (bytes, files) = (bytes.max(self.done.get().0), files.max(self.done.get().1));
        let (size, seconds) = (Size(bytes), self.began.elapsed().as_secs_f64());
        eprintln!("{what}: {size} of {files} file(s) {done} in {seconds:.1} s");
        Ok(())
    }
}

/// Bytes and files that were brought to the backing, or what the user must know instead.
pub fn judge(what: &str, outcome: Outcome) -> Result<(u64, u64), Failure> {
    let (code, text) = match outcome {
        Outcome::Ok { bytes, files } => return Ok((bytes, files)),
        Outcome::Incomplete { remaining } => {
            (Code::Incomplete, format!("not everything is on the backing:\n{}", list(&remaining)))
        }
        Outcome::TimedOut { remaining } => {
            (Code::TimedOut, format!("time ran out; not on the backing yet:\n{}", list(&remaining)))
        }
        Outcome::Unreachable { text } => (Code::Unreachable, text),
        Outcome::Failed { text } => (Code::Failed, text),
    };
    Err(Failure::new(code, format!("{what}: {text}")))
}

/// One line for each path, and a sum.
pub fn list(remaining: &[Remaining]) -> String {
    let mut lines: Vec<String> = remaining
        .iter()
        .take(PATHS_SHOWN)
        .map(|r| format!("  {}: {} bytes ({})", r.path, r.bytes, r.why))
        .collect();
    if remaining.len() > PATHS_SHOWN {
        lines.push(format!("  ... and {} more", remaining.len() - PATHS_SHOWN));
    }
    let bytes = remaining.iter().fold(0u64, |sum, r| sum.saturating_add(r.bytes));
    lines.push(format!("  in all {} path(s), {bytes} bytes", remaining.len()));
    lines.extend(advice(remaining));
    lines.join("\n")
}

/// What to do about reasons that do not pass by themselves.
fn advice(remaining: &[Remaining]) -> impl Iterator<Item = String> {
    const ADVICE: [(Errno, &str); 4] = [
        (Errno::ENOSPC, "no room, or no inodes, on the backing (df, df -i): make room"),
        (Errno::EDQUOT, "the quota on the backing is used up: make room, or have it raised"),
        (Errno::EACCES, "the backing refuses this user: have the permission given"),
        (Errno::EROFS, "the backing is mounted read-only: have that changed"),
    ];
    // Whoever lacks an attribute lacks nothing else.
    const ATTRIBUTE: &str = "extended attribute";
    let (attributes, others): (Vec<&Remaining>, Vec<&Remaining>) =
        remaining.iter().partition(|r| r.why.contains(ATTRIBUTE));
    let is_why = |errno: &Errno| others.iter().any(|r| r.why.contains(&errno.to_string()));
    let mut found: Vec<_> = ADVICE.into_iter().filter(|(errno, _)| is_why(errno)).collect();
    if !attributes.is_empty() {
        let text = "the backing does not take an attribute: remove it (setfattr -x FILE)";
        found.push((Errno::EIO, text));
    }
    found.into_iter().map(|(_, text)| format!("  {text}, then do this again; nothing is lost"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finish(outcome: Outcome) -> Result<(), Failure> {
        Progress::new().finish("drain of /m", outcome)
    }

    #[test]
    fn outcomes_have_the_statuses_of_the_contract() {
        let one = || vec![Remaining { path: "a/b".into(), bytes: 7, why: "write: ENOSPC".into() }];
        assert!(finish(Outcome::Ok { bytes: 1, files: 1 }).is_ok());
        for (outcome, status) in [
            (Outcome::Failed { text: "x".into() }, 1),
            (Outcome::Incomplete { remaining: one() }, 3),
            (Outcome::TimedOut { remaining: one() }, 4),
            (Outcome::Unreachable { text: "x".into() }, 5),
        ] {
            assert_eq!(finish(outcome).unwrap_err().status, status);
        }
        let text = finish(Outcome::Incomplete { remaining: one() }).unwrap_err().text;
        assert!(text.contains("a/b: 7 bytes (write: ENOSPC)"), "{text}");
    }

    #[test]
    fn reasons_that_stay_come_with_advice_once() {
        let r = |errno: Errno| Remaining { path: "p".into(), bytes: 1, why: format!("w: {errno}") };
        let text = list(&[r(Errno::ENOSPC), r(Errno::ENOSPC), r(Errno::EIO)]);
        assert_eq!((text.matches("inodes").count(), text.matches("again").count()), (1, 1));
        assert!(list(&[r(Errno::EDQUOT)]).contains("quota"));
        assert!(!list(&[r(Errno::EIO)]).contains("again"));
        let why =
            format!("set extended attribute user.a (published without it): {}", Errno::ENOSPC);
        let text = list(&[Remaining { path: "p".into(), bytes: 0, why }]);
        assert!(text.contains("setfattr") && !text.contains("df"), "{text}");
    }

    #[test]
    fn long_lists_are_summed_up() {
        let r = Remaining { path: "p".into(), bytes: u64::MAX, why: String::new() };
        let text = list(&vec![r; 60]);
        assert!(text.contains("10 more") && text.contains("60 path(s)"), "{text}");
    }
}
