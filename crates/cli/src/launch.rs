//! Starts a daemon in the background: this program again, in a session of its own. The plan goes
//! through its standard input, so that nothing of it stands on a command line; its standard output
//! is a socket, through which it reports whether the mount is up, and hears that its mount was
//! taken: a start that fails, or whose starter is killed before that, leaves nothing behind.

use crate::exit::{Context, Failure};
use crate::plan::Plan;
use crate::{cachedir, mounts};
use ebb_fs_client::registry;
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

/// A daemon that has not come up after so long will not.
const START_LIMIT: Duration = Duration::from_secs(60);

/// After so long a start that goes on says so.
const SILENT_FOR: Duration = Duration::from_secs(3);

/// After its report the mount must answer within this time.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// Lines of the log that are shown when a daemon died without a word.
const LOG_LINES: usize = 12;

/// A mount that is up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Up {
    /// The node's name.
    pub node: String,
    /// Address of the metadata service.
    pub meta: String,
    /// Where it is mounted.
    pub mountpoint: PathBuf,
    /// The daemon.
    pub pid: u32,
}

/// What a daemon says about its start, once, as one line of JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Report {
    /// The mount is up.
    Ready(Up),
    /// It did not come up.
    Failed {
        /// Exit status for the command.
        status: i32,
        /// Cause and remedy.
        text: String,
    },
}

/// A mount that is up and ends again, unless it is taken: when this process dies first, nobody
/// was told of it.
#[must_use]
pub struct Started {
    up: Up,
    line: UnixStream,
}

impl Started {
    /// What is mounted where.
    pub fn up(&self) -> &Up {
        &self.up
    }

    /// From here on the mount does without its starter.
    pub fn take(mut self) -> Up {
        // A daemon that has ended since shows at the next use of the mount.
        let _ = self.line.write_all(&TAKEN);
        self.up
    }
}

/// What a daemon waits for after its report.
const TAKEN: [u8; 1] = [b'\n'];

/// On the daemon's side: waits until the mount was taken, or never will be.
pub fn was_taken(line: OwnedFd) -> bool {
    let mut word = TAKEN;
    UnixStream::from(line).read_exact(&mut word).is_ok()
}

/// Starts the daemon of a plan and waits until its mount answers.
pub fn start(plan: &Plan) -> Result<Started, Failure> {
    cachedir::prepare(&plan.config.cache)?;
    let log = plan.log_file();
    let (mut child, line, offset) = spawn(plan, &log)?;
    let outcome = await_report(&line, plan).and_then(|report| match report {
        Some(Report::Ready(up)) if mounts::answers(&up.mountpoint, ANSWER_LIMIT) => {
            Ok(Started { up, line })
        }
        Some(Report::Ready(_)) => Err(Failure::failed("the mount is up but does not answer")),
        Some(Report::Failed { status, text }) => Err(Failure::with_status(status, text)),
        None => Err(died(&mut child, &log, offset)),
    });
    if outcome.is_err() {
        clean_up(&mut child, plan);
    }
    outcome
}

/// The daemon process with its plan on the way, the line to it, and how long its log was before.
fn spawn(plan: &Plan, log: &Path) -> Result<(Child, UnixStream, u64), Failure> {
    let what = format!("log {}", log.display());
    let file =
        OpenOptions::new().create(true).append(true).mode(0o600).open(log).or_usage(&what)?;
    let offset = file.metadata().or_usage(&what)?.len();
    let program = std::env::current_exe().or_failed("/proc/self/exe")?;
    let (line, theirs) = UnixStream::pair().or_failed("a line to the daemon")?;
    let mut child = Command::new(&program)
        .arg("daemon")
        .arg(&plan.config.mountpoint)
        .stdin(Stdio::piped())
        .stdout(OwnedFd::from(theirs))
        .stderr(file)
        .current_dir("/")
        .spawn()
        .or_failed(program.display())?;
    let text = serde_json::to_vec(plan).or_failed("the daemon's configuration")?;
    if let Some(mut stdin) = child.stdin.take() {
        // A daemon that died before reading it says why by its report or its log.
        let _ = stdin.write_all(&text);
    }
    Ok((child, line, offset))
}

/// What the daemon says; nothing when it ended without a word.
fn await_report(line: &UnixStream, plan: &Plan) -> Result<Option<Report>, Failure> {
    let line = line.try_clone().or_failed("the line to the daemon")?;
    let (tx, rx) = mpsc::channel();
    std::thread::spawn(move || tx.send(read_report(line)));
    if let Ok(report) = rx.recv_timeout(SILENT_FOR) {
        return Ok(report);
    }
    let log = plan.log_file();
    eprintln!(
        "ebb: not mounted yet: what an earlier mount left is put together, or the metadata service \
         does not answer or waits for other nodes (see {})",
        log.display()
    );
    rx.recv_timeout(START_LIMIT - SILENT_FOR).map_err(|_| {
        Failure::new(
            crate::exit::Code::TimedOut,
            format!(
                "the daemon did not come up within {} s (see {})",
                START_LIMIT.as_secs(),
                log.display()
            ),
        )
    })
}

fn read_report(line: UnixStream) -> Option<Report> {
    let mut text = String::new();
    BufReader::new(line).read_line(&mut text).ok()?;
    serde_json::from_str(&text).ok()
}

fn died(child: &mut Child, log: &Path, offset: u64) -> Failure {
    let how = match child.wait() {
        Ok(status) => status.to_string(),
        Err(e) => e.to_string(),
    };
    let lines = tail(log, offset).unwrap_or_default();
    let shown = log.display();
    Failure::failed(format!("the daemon ended while it started ({how}); {shown} says:\n{lines}"))
}

/// The last lines that were written to a log since it was `offset` long.
fn tail(log: &Path, offset: u64) -> std::io::Result<String> {
    const MOST: u64 = 64 << 10;
    let mut file = File::open(log)?;
    let end = file.metadata()?.len();
    file.seek(SeekFrom::Start(offset.max(end.saturating_sub(MOST))))?;
    let mut bytes = Vec::new();
    file.take(MOST).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().collect();
    Ok(lines[lines.len().saturating_sub(LOG_LINES)..].join("\n"))
}

/// Ends what a failed start may have left: the process, its mount, its record, its socket.
fn clean_up(child: &mut Child, plan: &Plan) {
    let pid = child.id();
    let _ = child.kill();
    let _ = child.wait();
    let point = &plan.config.mountpoint;
    if matches!(mounts::at(point), Ok(Some(m)) if m.is_ebb()) {
        let _ = mounts::lazy_unmount(point);
    }
    if let Ok(Some(record)) = registry::find(point)
        && record.pid == pid
    {
        let _ = std::fs::remove_file(&record.socket);
        let _ = registry::leave(point);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tail_is_what_is_new() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let old = "old line\n".repeat(5);
        let new: String = (0..40).map(|i| format!("new {i}\n")).collect();
        std::fs::write(file.path(), format!("{old}{new}")).unwrap();
        let text = tail(file.path(), old.len() as u64).unwrap();
        assert_eq!(text.lines().count(), LOG_LINES);
        assert!(text.starts_with("new 28") && text.ends_with("new 39"), "{text}");
        assert_eq!(tail(file.path(), (old.len() + new.len()) as u64).unwrap(), "");
    }

    #[test]
    fn reports_survive_the_pipe() {
        let up = Up { node: "n".into(), meta: "h:1".into(), mountpoint: "/m".into(), pid: 7 };
        for report in [Report::Ready(up), Report::Failed { status: 2, text: "a\nb".into() }] {
            let line = serde_json::to_string(&report).unwrap();
            assert!(!line.contains('\n'));
            assert_eq!(serde_json::from_str::<Report>(&line).unwrap(), report);
        }
    }
}
