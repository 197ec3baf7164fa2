//! The backing of a run: a directory, or a small file system that can be made full, slow, or hang.

use ebb_testkit::{Disk, mounts};
use ebb_tests::tools::shell;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// More than all programs write in small files, several times, and than their large ones.
const MIB: u64 = 256;
/// Less than what is there by then: nothing more goes in.
const QUOTA_BYTES: u64 = 64 << 10;
/// A slow disk takes so many bytes per second.
const SLOW: u64 = 200_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Of a large file system: nothing can be done to it.
    Directory,
    /// A tmpfs, which can be full.
    Small,
    /// A disk, which can be full, slow, or hang.
    Disk,
    /// A disk with a quota that can be exceeded.
    Quota,
}

impl Kind {
    pub const ALL: [Kind; 4] = [Kind::Directory, Kind::Small, Kind::Disk, Kind::Quota];
}

/// Taken away when it is dropped.
pub enum Backing {
    Directory(tempfile::TempDir),
    Small(Small),
    Disk(Disk),
    Quota(Disk),
}

impl Backing {
    /// It; or why this machine has none of that kind.
    pub fn new(kind: Kind) -> Result<Backing, String> {
        Backing::of_mib(kind, MIB)
    }

    /// The same of another size.
    pub fn of_mib(kind: Kind, mib: u64) -> Result<Backing, String> {
        match kind {
            Kind::Directory => Ok(Backing::Directory(directory())),
            Kind::Small => Small::new(&format!("{mib}m")).map(Backing::Small),
            Kind::Disk => Disk::new(mib).map(Backing::Disk),
            Kind::Quota => Disk::with_quota(mib).map(Backing::Quota),
        }
    }

    pub fn path(&self) -> PathBuf {
        match self {
            Backing::Directory(dir) => dir.path().canonicalize().expect("it was made"),
            Backing::Small(small) => small.path().to_owned(),
            Backing::Disk(disk) | Backing::Quota(disk) => disk.path(),
        }
    }

    /// Not a byte more fits; or everything again.
    pub fn fill(&self, full: bool) {
        match (self, full) {
            (Backing::Directory(_), _) => {}
            (Backing::Small(small), _) => small.fill(full),
            (Backing::Disk(disk), true) => disk.fill(),
            (Backing::Disk(disk), false) => disk.unfill(),
            (Backing::Quota(disk), _) => disk.limit(full.then_some(QUOTA_BYTES)),
        }
    }

    /// Whoever writes waits; or goes on.
    pub fn hang(&self, hangs: bool) {
        match self {
            Backing::Disk(disk) if hangs => disk.freeze(),
            Backing::Disk(disk) => disk.thaw(),
            _ => {}
        }
    }

    /// Whether that is possible on this machine.
    pub fn slow_down(&mut self, slow: bool) -> Result<(), String> {
        match self {
            Backing::Disk(disk) => disk.throttle(if slow { SLOW } else { 0 }),
            _ => Ok(()),
        }
    }
}

fn directory() -> tempfile::TempDir {
    tempfile::TempDir::with_prefix_in("ebb-chaos-", "/dev/shm").expect("tempdir")
}

/// A tmpfs.
pub struct Small {
    path: PathBuf,
    _dir: tempfile::TempDir,
}

impl Small {
    pub fn new(size: &str) -> Result<Small, String> {
        // SAFETY: no arguments, no failure.
        if unsafe { libc::geteuid() } != 0 {
            return Err("only root may mount a tmpfs".to_owned());
        }
        let dir = directory();
        let path = dir.path().canonicalize().expect("it was just made");
        let command = format!("mount -t tmpfs -o size={size} ebb-test '{}'", path.display());
        shell(Path::new("/"), &command, Duration::from_secs(10));
        Ok(Small { path, _dir: dir })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn fill(&self, full: bool) {
        let filler = self.path.join("filler");
        if !full {
            std::fs::remove_file(filler).expect("it was made");
            return;
        }
        let mut filler = File::create(filler).expect("a file on it");
        let block = vec![1; 1 << 16];
        while filler.write_all(&block).is_ok() {}
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        assert!(mounts::clear(&self.path) || std::thread::panicking(), "tmpfs stays");
    }
}
