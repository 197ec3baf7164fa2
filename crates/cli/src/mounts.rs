//! What the kernel says about mount points, without touching them: a mount whose daemon is dead
//! or stopped answers nothing, so the path itself may not be looked at before this was asked.

use rustix::mount::UnmountFlags;
use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// One line of /proc/self/mountinfo.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Where it is.
    pub point: PathBuf,
    /// File system type, like `fuse.ebb`.
    pub fstype: String,
    /// What is mounted.
    pub source: String,
    /// The minor number of its device: with FUSE the connection's number.
    pub minor: u32,
}

impl Mount {
    /// True for a mount that a daemon of Ebb made.
    #[must_use]
    pub fn is_ebb(&self) -> bool {
        self.fstype == "fuse.ebb" || (self.fstype == "fuse" && self.source == "ebb")
    }
}

/// Undoes the octal escapes of blanks, tabs, newlines and backslashes.
fn unescape(field: &str) -> OsString {
    let bytes = field.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut i = 0;
    while i < bytes.len() {
        let octal = bytes.get(i + 1..i + 4).filter(|d| d.iter().all(|c| (b'0'..=b'7').contains(c)));
        match (bytes[i], octal) {
            (b'\\', Some(d)) => {
                out.push((d[0] - b'0').wrapping_mul(64) + (d[1] - b'0') * 8 + (d[2] - b'0'));
                i += 4;
            }
            (byte, _) => {
                out.push(byte);
                i += 1;
            }
        }
    }
    OsString::from_vec(out)
}

fn parse(mountinfo: &str) -> Vec<Mount> {
    let line = |l: &str| {
        let (before, after) = l.split_once(" - ")?;
        let mut before = before.split(' ').skip(2);
        let minor = before.next()?.split_once(':')?.1.parse().ok()?;
        let point = before.nth(1)?;
        let mut after = after.split(' ');
        Some(Mount {
            point: PathBuf::from(unescape(point)),
            fstype: after.next()?.to_owned(),
            source: after.next()?.to_owned(),
            minor,
        })
    };
    mountinfo.lines().filter_map(line).collect()
}

/// The topmost mount at exactly this path.
pub fn at(point: &Path) -> io::Result<Option<Mount>> {
    let all = parse(&std::fs::read_to_string("/proc/self/mountinfo")?);
    Ok(all.into_iter().rev().find(|m| m.point == point))
}

/// The mount in which a resolved path lies.
pub fn holding(path: &Path) -> io::Result<Option<Mount>> {
    let all = parse(&std::fs::read_to_string("/proc/self/mountinfo")?);
    let above = all.into_iter().filter(|m| path.starts_with(&m.point));
    // Of several at one point the last one made is seen.
    Ok(above.max_by_key(|m| m.point.as_os_str().len()))
}

/// The canonical form of a path that may be a dead mount point: its parent is resolved, itself
/// only when nothing is mounted there.
pub fn resolve(path: &Path) -> io::Result<PathBuf> {
    let absolute = std::path::absolute(path)?;
    let Some(name) = absolute.file_name() else { return absolute.canonicalize() };
    let parent = absolute.parent().unwrap_or(Path::new("/")).canonicalize()?;
    let plain = parent.join(name);
    if at(&plain)?.is_some() {
        return Ok(plain);
    }
    match plain.canonicalize() {
        Ok(p) => Ok(p),
        // Let the caller say what is wrong with it.
        Err(_) => Ok(plain),
    }
}

/// Takes a mount away even when its daemon is gone or files in it are open.
pub fn lazy_unmount(point: &Path) -> io::Result<()> {
    let direct = rustix::mount::unmount(point, UnmountFlags::DETACH);
    match direct {
        Ok(()) => Ok(()),
        // Without the privilege the setuid helper of fuse3 does it for the mount's owner.
        Err(rustix::io::Errno::PERM) => fusermount(point),
        Err(e) => Err(e.into()),
    }
}

fn fusermount(point: &Path) -> io::Result<()> {
    let output = Command::new("fusermount3")
        .args(["-u", "-z", "--"])
        .arg(point)
        .stdin(Stdio::null())
        .output()
        .map_err(|e| io::Error::new(e.kind(), format!("fusermount3 (package fuse3): {e}")))?;
    if output.status.success() {
        return Ok(());
    }
    Err(io::Error::other(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
}

/// Waits until nothing is mounted there any more; false when time ran out.
pub fn wait_gone(point: &Path, limit: Duration) -> bool {
    poll(limit, || matches!(at(point), Ok(None)))
}

/// True when something is mounted there and answers a stat within the time.
pub fn answers(point: &Path, limit: Duration) -> bool {
    if !matches!(at(point), Ok(Some(_))) {
        return false;
    }
    // A stat in a hung mount cannot be interrupted: it is left to a thread of its own.
    let (tx, rx) = mpsc::channel();
    let path = point.to_owned();
    std::thread::spawn(move || tx.send(std::fs::metadata(path).is_ok()));
    rx.recv_timeout(limit).unwrap_or(false)
}

/// Asks `done` every 20 ms until it says yes or time runs out.
pub fn poll(limit: Duration, mut done: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + limit;
    loop {
        if done() {
            return true;
        }
        if Instant::now() >= end {
            return false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mountinfo_lines_are_understood() {
        let text = "36 35 98:0 / /mnt/a\\040b rw,noatime master:1 - fuse.ebb ebb rw\n\
                    37 35 0:5 / /proc rw - proc proc rw\n\
                    garbage\n\
                    38 35 0:6 / /x\\134y rw shared:2 shared:3 - fuse ebb rw\n";
        let mounts = parse(text);
        assert_eq!(mounts.len(), 3);
        assert_eq!(mounts[0].point, Path::new("/mnt/a b"));
        assert!(mounts[0].is_ebb() && !mounts[1].is_ebb() && mounts[2].is_ebb());
        assert_eq!(mounts[2].point, Path::new("/x\\y"));
        assert_eq!(mounts[2].minor, 6);
    }

    #[test]
    fn a_plain_directory_is_no_mount_and_proc_is_one() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(at(&dir.path().canonicalize().unwrap()).unwrap(), None);
        assert!(at(Path::new("/proc")).unwrap().is_some());
        assert!(answers(Path::new("/proc"), Duration::from_secs(5)));
        assert!(!answers(dir.path(), Duration::from_secs(5)));
    }

    #[test]
    fn resolving_follows_links_but_accepts_what_is_missing() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().canonicalize().unwrap();
        std::fs::create_dir(base.join("real")).unwrap();
        std::os::unix::fs::symlink("real", base.join("link")).unwrap();
        assert_eq!(resolve(&base.join("link")).unwrap(), base.join("real"));
        assert_eq!(resolve(&base.join("none")).unwrap(), base.join("none"));
    }
}
