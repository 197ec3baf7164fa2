//! Leads from a mount point to its daemon: one small file a mount in a directory that only the
//! user can write.

use serde::{Deserialize, Serialize};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// What is known of a mount from outside it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Process id of the daemon.
    pub pid: u32,
    /// Start time of that process (field 22 of /proc/PID/stat), against reused pids.
    pub started: u64,
    /// Where it is mounted.
    pub mountpoint: PathBuf,
    /// Its control socket.
    pub socket: PathBuf,
    /// Its cache directory.
    pub cache: PathBuf,
    /// The process that starts another daemon when this one ends unexpectedly.
    #[serde(default)]
    pub supervisor: Option<Process>,
}

/// A process, and no other that gets its number later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Its number.
    pub pid: u32,
    /// When it was started (field 22 of /proc/PID/stat).
    pub started: u64,
}

impl Process {
    /// True while it lives.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        process_start(self.pid) == Some(self.started)
    }
}

impl Record {
    /// True when the daemon is gone and its supervisor will start another one, or has.
    #[must_use]
    pub fn is_between(&self) -> bool {
        !self.is_alive() && self.supervisor.is_some_and(|s| s.is_alive())
    }

    /// True while that very process lives.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        process_start(self.pid) == Some(self.started)
    }
}

/// When process `pid` was started, in clock ticks since boot; none when it has ended, also when
/// nobody has collected it yet.
#[must_use]
pub fn process_start(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let after_name = stat.rsplit_once(')')?.1;
    if after_name.trim_start().starts_with(['Z', 'X']) {
        return None;
    }
    after_name.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// The registry directory of this user: made when missing, refused when others could write it.
pub fn directory() -> io::Result<PathBuf> {
    let uid = rustix::process::geteuid().as_raw();
    let dir = match std::env::var_os("EBB_RUNTIME_DIR") {
        Some(d) => PathBuf::from(d),
        None => PathBuf::from(format!("/tmp/.ebb-{uid}")),
    };
    match std::fs::DirBuilder::new().mode(0o700).create(&dir) {
        Ok(()) => {}
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
        Err(e) => return Err(e),
    }
    let meta = std::fs::symlink_metadata(&dir)?;
    if !meta.is_dir() || meta.uid() != uid || meta.mode() & 0o022 != 0 {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!("{}: not a directory of this user's own (set EBB_RUNTIME_DIR)", dir.display()),
        ));
    }
    Ok(dir)
}

fn file_of(mountpoint: &Path) -> io::Result<PathBuf> {
    let mut name: String = mountpoint
        .as_os_str()
        .as_bytes()
        .iter()
        .map(|b| match b {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' => char::from(*b).to_string(),
            other => format!("_{other:02x}"),
        })
        .collect();
    if name.len() > 200 {
        let sum = crate::hash::bytes(mountpoint.as_os_str().as_bytes());
        name = format!("{}_{sum:016x}", &name[..160]);
    }
    Ok(directory()?.join(format!("{name}.json")))
}

/// Writes the record of a mount.
pub fn enter(record: &Record) -> io::Result<()> {
    let path = file_of(&record.mountpoint)?;
    let temporary = path.with_extension(format!("{}.new", record.pid));
    let file = std::fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&temporary)?;
    serde_json::to_writer(file, record)?;
    std::fs::rename(temporary, path)
}

/// The record of a mount, if there is one.
pub fn find(mountpoint: &Path) -> io::Result<Option<Record>> {
    match std::fs::read(file_of(mountpoint)?) {
        Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// Takes the record of a mount away.
pub fn leave(mountpoint: &Path) -> io::Result<()> {
    match std::fs::remove_file(file_of(mountpoint)?) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}
