//! The backing of a run: a directory, or a small file system that can be made full.

use ebb_testkit::mounts;
use ebb_tests::tools::shell;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// More than all programs write, several times.
const SMALL: &str = "64m";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Directory,
    Small,
}

/// Taken away when it is dropped.
pub struct Backing {
    path: PathBuf,
    _dir: tempfile::TempDir,
}

impl Backing {
    pub fn new(kind: Kind) -> Backing {
        let dir = tempfile::TempDir::with_prefix_in("ebb-chaos-", "/dev/shm").expect("tempdir");
        let path = dir.path().canonicalize().expect("it was just made");
        // SAFETY: no arguments, no failure.
        let is_root = unsafe { libc::geteuid() } == 0;
        if kind == Kind::Small && is_root {
            let command = format!("mount -t tmpfs -o size={SMALL} ebb-test '{}'", path.display());
            shell(Path::new("/"), &command, Duration::from_secs(10));
        }
        Backing { path, _dir: dir }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    fn filler(&self) -> PathBuf {
        self.path.join("filler")
    }

    /// Not a byte more fits. Nothing happens in a directory of a large file system.
    pub fn fill(&self) {
        if !mounts::is_mounted(&self.path) {
            return;
        }
        let mut filler = File::create(self.filler()).expect("a file on the backing");
        let block = vec![1; 1 << 16];
        while filler.write_all(&block).is_ok() {}
    }

    pub fn make_room(&self) {
        let _ = std::fs::remove_file(self.filler());
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        assert!(mounts::clear(&self.path) || std::thread::panicking(), "tmpfs stays");
    }
}
