//! Scratch directories on file systems of several kinds, and writes of every kind.

use ebb_tracker::{Limits, Tracker, Watched};
use rand::Rng;
use rand_chacha::ChaCha8Rng;
use rangemap::RangeSet;
use rustix::pipe::{SpliceFlags, pipe, splice};
use std::cell::Cell;
use std::fs::{File, OpenOptions};
use std::io::{IoSlice, Seek, SeekFrom, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A tracker, or a word why not.
pub fn tracker(dir: &Path, limits: Limits) -> Option<Tracker> {
    match Tracker::with(dir, limits) {
        Ok(tracker) => Some(tracker),
        Err(e) if std::env::var_os("EBB_REQUIRE_TRACKER").is_some() => panic!("no tracker: {e}"),
        Err(e) => skip(&e.to_string()),
    }
}

fn skip<T>(why: &str) -> Option<T> {
    eprintln!("SKIPPED: {why}");
    None
}

/// A ring of one page.
pub fn fast_limits() -> Limits {
    Limits { ring_bytes: 4096, ..Limits::default() }
}

pub fn drained(watched: &Watched) -> RangeSet<u64> {
    let ranges = watched.drain().expect("nothing is lost").ranges;
    assert!(ranges.windows(2).all(|pair| pair[0].end < pair[1].start), "in order");
    ranges.into_iter().collect()
}

/// A directory, perhaps on a file system of its own.
pub struct Scratch {
    dir: PathBuf,
    mounted: bool,
    files: Cell<u32>,
    _home: tempfile::TempDir,
}

impl Scratch {
    /// Where the tests are.
    pub fn here() -> Scratch {
        let home = tempfile::tempdir().unwrap();
        Scratch { dir: home.path().into(), mounted: false, files: Cell::new(0), _home: home }
    }

    /// A file system of its own on a loop device.
    fn mounted(make: &Path, args: &str, options: &str, mib: u64) -> Option<Scratch> {
        if !rustix::process::geteuid().is_root() {
            return skip("only root can mount a file system");
        }
        let home = tempfile::tempdir().unwrap();
        let (image, dir) = (home.path().join("image"), home.path().join("mnt"));
        File::create(&image).unwrap().set_len(mib << 20).unwrap();
        std::fs::create_dir(&dir).unwrap();
        let quiet = |command: &mut Command| match command.output() {
            Ok(done) if done.status.success() => Ok(()),
            Ok(done) => Err(String::from_utf8_lossy(&done.stderr).into_owned()),
            Err(e) => Err(e.to_string()),
        };
        if let Err(e) = quiet(Command::new(make).args(args.split_whitespace()).arg(&image)) {
            return skip(&format!("{}: {e}", make.display()));
        }
        let options = format!("loop,{options}");
        if let Err(e) = quiet(Command::new("mount").args(["-o", &options]).args([&image, &dir])) {
            return skip(&format!("mount: {e}"));
        }
        Some(Scratch { dir, mounted: true, files: Cell::new(0), _home: home })
    }

    pub fn ext4(options: &str, args: &str) -> Option<Scratch> {
        Scratch::mounted("mkfs.ext4".as_ref(), &format!("-q -F {args}"), options, 64)
    }

    /// mkfs.xfs is looked for in EBB_MKFS_XFS, too.
    pub fn xfs() -> Option<Scratch> {
        let make = std::env::var_os("EBB_MKFS_XFS").unwrap_or("mkfs.xfs".into());
        Scratch::mounted(make.as_ref(), "-q -f", "defaults", 320)
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// A new file.
    pub fn file(&self) -> (PathBuf, File) {
        self.files.set(self.files.get() + 1);
        let path = self.dir.join(format!("file-{}", self.files.get()));
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
        (path, file)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if self.mounted {
            let _ = Command::new("umount").arg("-l").arg(&self.dir).status();
        }
    }
}

/// Writes something, and says where. `appends`: the caller is the only one behind `base`.
pub fn write_randomly(
    path: &Path,
    rng: &mut ChaCha8Rng,
    base: u64,
    appends: bool,
) -> Option<Range<u64>> {
    let len_max = [20, 5_000, 20_000, 3 << 20][rng.random_range(0..4)];
    let bytes = vec![rng.random(); rng.random_range(0..len_max)];
    let len = bytes.len() as u64;
    let mut at = rng.random_range(0..base - len);
    let file = OpenOptions::new().write(true).open(path).unwrap();
    match rng.random_range(0..if appends { 6 } else { 5 }) {
        0 => file.write_all_at(&bytes, at).unwrap(),
        1 => in_pieces(&file, &bytes, at),
        2 => spliced(&file, &bytes, at),
        3 => copied(&file, &bytes, at),
        4 => sent(&file, &bytes, at),
        _ => {
            at = file.metadata().unwrap().len();
            let mut file = OpenOptions::new().append(true).open(path).unwrap();
            file.write_all(&bytes).unwrap();
        }
    }
    (len > 0).then_some(at..at + len)
}

/// One call with several buffers.
fn in_pieces(file: &File, bytes: &[u8], at: u64) {
    let slices: Vec<IoSlice<'_>> = bytes.chunks(bytes.len() / 5 + 1).map(IoSlice::new).collect();
    if !slices.is_empty() {
        assert_eq!(rustix::io::pwritev(file, &slices, at).unwrap(), bytes.len());
    }
}

/// By way of a pipe.
fn spliced(file: &File, bytes: &[u8], mut at: u64) {
    let (from, to) = pipe().unwrap();
    for chunk in bytes.chunks(60_000) {
        let mut left = rustix::io::write(&to, chunk).unwrap();
        assert_eq!(left, chunk.len());
        while left > 0 {
            left -= splice(&from, None, file, Some(&mut at), left, SpliceFlags::empty()).unwrap();
        }
    }
}

/// From another file of the same file system, which may share its blocks.
fn copied(file: &File, bytes: &[u8], mut at: u64) {
    let dir = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(file));
    let path = std::fs::read_link(dir).unwrap();
    let from = tempfile::tempfile_in(path.parent().unwrap()).unwrap();
    from.write_all_at(bytes, 0).unwrap();
    let (mut begin, mut left) = (0, bytes.len());
    while left > 0 {
        let n = rustix::fs::copy_file_range(&from, Some(&mut begin), file, Some(&mut at), left);
        left -= n.unwrap();
    }
}

fn sent(mut file: &File, bytes: &[u8], at: u64) {
    let from = tempfile::tempfile().unwrap();
    from.write_all_at(bytes, 0).unwrap();
    file.seek(SeekFrom::Start(at)).unwrap();
    let (mut begin, mut left) = (0, bytes.len());
    while left > 0 {
        left -= rustix::fs::sendfile(file, &from, Some(&mut begin), left).unwrap();
    }
}
