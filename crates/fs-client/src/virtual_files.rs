//! `MOUNTPOINT/.ebb/`: the daemon's status, metrics and configuration as readable files. Not
//! listed by readdir; found by name only.

use ebb_types::{Attr, Errno, FileKind, Ino, Time};
use std::sync::OnceLock;

const DIRECTORY: Ino = Ino(u64::MAX - 1);
const DIRECTORY_NAME: &[u8] = b".ebb";

/// The files in `.ebb`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VirtualFile {
    /// The object of `ebb status --json`.
    Status,
    /// Prometheus text.
    Metrics,
    /// The effective configuration as JSON.
    Config,
}

const FILES: [(VirtualFile, &[u8], Ino); 3] = [
    (VirtualFile::Status, b"status.json", Ino(u64::MAX - 2)),
    (VirtualFile::Metrics, b"metrics", Ino(u64::MAX - 3)),
    (VirtualFile::Config, b"config", Ino(u64::MAX - 4)),
];

/// True for inode numbers that stand for virtual files.
#[must_use]
pub fn is_virtual(ino: Ino) -> bool {
    ino.0 >= u64::MAX - 4
}

/// The virtual file with this inode number.
pub fn file(ino: Ino) -> Result<VirtualFile, Errno> {
    FILES.iter().find(|f| f.2 == ino).map(|f| f.0).ok_or(Errno::EISDIR)
}

/// The virtual entry of that name, if it is one.
#[must_use]
pub fn lookup(parent: Ino, name: &[u8]) -> Option<Attr> {
    if parent == Ino::ROOT && name == DIRECTORY_NAME {
        return getattr(DIRECTORY);
    }
    if parent == DIRECTORY {
        return FILES.iter().find(|f| f.1 == name).and_then(|f| getattr(f.2));
    }
    None
}

/// Everything in `.ebb`.
#[must_use]
pub fn listing() -> Vec<(&'static [u8], Attr)> {
    FILES.iter().filter_map(|f| Some((f.1, getattr(f.2)?))).collect()
}

/// Nothing may be made, changed or removed in `.ebb`, nor anything else take its place.
pub fn may_change(parent: Ino, name: &[u8]) -> Result<(), Errno> {
    let ours = is_virtual(parent) || (parent == Ino::ROOT && name == DIRECTORY_NAME);
    if ours { Err(Errno::EPERM) } else { Ok(()) }
}

/// Attributes of a virtual inode. Sizes are 0 as in /proc: content is made when it is opened.
#[must_use]
pub fn getattr(ino: Ino) -> Option<Attr> {
    static STARTED: OnceLock<Time> = OnceLock::new();
    if !is_virtual(ino) {
        return None;
    }
    let at = *STARTED.get_or_init(Time::now);
    let directory = ino == DIRECTORY;
    Some(Attr {
        ino,
        kind: if directory { FileKind::Directory } else { FileKind::Regular },
        // They tell of everybody's files; under --allow-other too they are for our user alone.
        perm: if directory { 0o555 } else { 0o400 },
        nlink: 1,
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        rdev: 0,
        size: 0,
        atime: at,
        mtime: at,
        ctime: at,
    })
}
