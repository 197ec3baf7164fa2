//! Programs that the tests run: found or reported missing, bounded in time, loud when they fail.
//! Also a bound for calls in this process that must not hang.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// A number from the environment: how much a test does.
#[must_use]
pub fn amount(variable: &str, default: u64) -> u64 {
    match std::env::var(variable) {
        Ok(text) => text.parse().unwrap_or_else(|e| panic!("{variable}={text}: {e}")),
        Err(_) => default,
    }
}

/// A program by name: the variable `EBB_NAME`, then PATH, then `target/tools/bin`.
#[must_use]
pub fn find(name: &str) -> Option<PathBuf> {
    let variable = format!("EBB_{}", name.to_uppercase().replace('-', "_"));
    if let Some(set) = std::env::var_os(&variable) {
        let path = PathBuf::from(set);
        assert!(path.is_file(), "{variable}={}: no such file", path.display());
        return Some(path);
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent()?;
    let paths = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&paths)
        .chain([root.join("target/tools/bin")])
        .map(|dir| dir.join(name))
        .find(|path| path.is_file())
}

/// Whether all these programs are there. Without one the test is skipped with a message, or
/// fails when EBB_REQUIRE_TOOLS=1 says that they must be there.
#[must_use]
pub fn available(names: &[&str]) -> bool {
    let missing: Vec<&&str> = names.iter().filter(|n| find(n).is_none()).collect();
    if missing.is_empty() {
        return true;
    }
    let required = std::env::var("EBB_REQUIRE_TOOLS").is_ok_and(|v| v == "1");
    assert!(!required, "missing programs: {missing:?}");
    println!("SKIPPED: missing programs: {missing:?}");
    false
}

/// How a program ended.
#[derive(Debug)]
pub struct Ended {
    /// Its status; none when it was killed because its time was up.
    pub status: Option<ExitStatus>,
    /// What it wrote to standard output.
    pub out: String,
    /// What it wrote to standard error.
    pub err: String,
    /// How long it ran.
    pub time: Duration,
}

/// Runs a program to its end, or kills it and its children when `limit` is over. Its output goes
/// through files: a child that keeps a pipe open cannot hold us up.
pub fn try_run(command: &mut Command, limit: Duration) -> io::Result<Ended> {
    let (mut out, mut err) = (tempfile::tempfile()?, tempfile::tempfile()?);
    let start = Instant::now();
    let mut child = command
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(out.try_clone()?)
        .stderr(err.try_clone()?)
        .spawn()?;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break Some(status);
        }
        if start.elapsed() > limit {
            // SAFETY: the child is not reaped, so its group's number is still its own.
            unsafe { libc::kill(-(child.id() as libc::pid_t), libc::SIGKILL) };
            break None;
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let time = start.elapsed();
    Ok(Ended { status, out: text(&mut out)?, err: text(&mut err)?, time })
}

fn text(file: &mut File) -> io::Result<String> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Runs a program that must succeed within `limit`; its standard output.
pub fn run(command: &mut Command, limit: Duration) -> String {
    let ended = try_run(command, limit).unwrap_or_else(|e| panic!("{command:?}: {e}"));
    match ended.status {
        Some(status) if status.success() => ended.out,
        status => panic!(
            "{command:?}\n{}: after {:?}\n{}\n{}",
            status.map_or("killed: its time was up".to_string(), |s| s.to_string()),
            ended.time,
            tail(&ended.out),
            tail(&ended.err)
        ),
    }
}

/// A shell script that must succeed, run in `dir`.
pub fn shell(dir: &Path, script: &str, limit: Duration) -> String {
    let script = format!("set -eu\n{script}");
    run(Command::new("bash").arg("-c").arg(script).current_dir(dir), limit)
}

fn tail(text: &str) -> &str {
    let from = text.len().saturating_sub(4000);
    let from = (from..text.len()).find(|i| text.is_char_boundary(*i)).unwrap_or(text.len());
    &text[from..]
}

/// Calls `work` in a thread of its own and panics when it is not done within `limit`. The thread
/// is left behind then: what hangs in the kernel cannot be taken back.
pub fn within<T: Send + 'static>(
    limit: Duration,
    what: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    let (tx, rx) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        let _ = tx.send(work());
    });
    match rx.recv_timeout(limit) {
        Ok(value) => value,
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("{what}: not done within {limit:?}"),
        Err(mpsc::RecvTimeoutError::Disconnected) => match thread.join() {
            Err(cause) => std::panic::resume_unwind(cause),
            Ok(()) => panic!("{what}: ended without a result"),
        },
    }
}

/// Polls until `done` says yes; panics after `limit`.
pub fn wait_until(limit: Duration, what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < limit, "{what}: not within {limit:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// All names in a directory, sorted, but what recoveries say to each other.
#[must_use]
pub fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).expect("list").flatten();
    let names = entries.map(|e| e.file_name().into_string().expect("a name"));
    let mut names: Vec<_> = names.filter(|n| !n.starts_with(".ebb-part-recovery-")).collect();
    names.sort();
    names
}
