//! Mount points as the kernel lists them, and how to get rid of them whatever their state.

use rustix::mount::UnmountFlags;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Everything mounted at or below `dir`, deepest first.
#[must_use]
pub fn below(dir: &Path) -> Vec<PathBuf> {
    let text = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let points = text.lines().filter_map(|l| l.split(' ').nth(4)).map(PathBuf::from);
    let mut found: Vec<PathBuf> = points.filter(|p| p.starts_with(dir)).collect();
    found.reverse();
    found
}

/// True when something is mounted exactly there.
#[must_use]
pub fn is_mounted(point: &Path) -> bool {
    below(point).iter().any(|p| p == point)
}

/// Takes everything at or below `dir` away, dead mounts too; false when something stays.
pub fn clear(dir: &Path) -> bool {
    for point in below(dir) {
        if rustix::mount::unmount(&point, UnmountFlags::DETACH).is_err() {
            let _ = Command::new("fusermount3").args(["-u", "-z", "--"]).arg(&point).output();
        }
    }
    below(dir).is_empty()
}

/// Asks `done` every 20 ms until it says yes; false when `limit` is over.
pub fn wait_until(limit: Duration, mut done: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + limit;
    while !done() {
        if Instant::now() >= end {
            return false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    true
}
