//! The node-local buffer on disk: one sparse file per inode with the same offsets as the real
//! file. What of it means something is known by the file's view, not by this.

use crate::medium::Medium;
use crate::parting::{OldBody, thaw_after};
use ebb_locks::Mutex;
use ebb_types::{ByteRange, Ino};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Seek, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Cache files are spread over so many directories, so that none of them gets huge.
const FANOUT: u64 = 256;

/// The directory with the cache files.
#[derive(Debug)]
pub struct CacheDir {
    data: PathBuf,
    /// The same directory, mounted once more for this process alone, without access times.
    timeless: OnceLock<OwnedFd>,
    /// What is known of the disk below.
    pub(crate) medium: Medium,
    /// Whether files can be kept from being written to; see [`crate::parting`].
    pub(crate) freezes: OnceLock<bool>,
    /// Bodies that only programs of before have.
    pub(crate) old: Mutex<Vec<OldBody>>,
}

/// Where a cache file is in the directory.
fn name_of(ino: Ino) -> PathBuf {
    Path::new(&format!("{:02x}", ino.0 % FANOUT)).join(format!("{:016x}", ino.0))
}

/// The length of a cache file in a cache directory; 0: there is none.
pub(crate) fn len_in(root: &Path, ino: Ino) -> u64 {
    CacheDir::at(root.join("data")).len(ino).unwrap_or(0)
}

impl CacheDir {
    /// Opens or makes `root/data`.
    pub fn open(root: &Path) -> io::Result<CacheDir> {
        let data = root.join("data");
        for shard in 0..FANOUT {
            DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(data.join(format!("{shard:02x}")))?;
        }
        Ok(CacheDir::at(data))
    }

    pub(crate) fn at(data: PathBuf) -> CacheDir {
        CacheDir {
            data,
            timeless: OnceLock::new(),
            medium: Medium::default(),
            freezes: OnceLock::new(),
            old: Mutex::default(),
        }
    }

    /// Files that [`CacheDir::for_kernel`] opens from now on have no access times: looking whether one
    /// must be set is a fifth of what a small read past the daemon costs more than a bare one.
    pub fn leave_times_alone(&self) -> io::Result<()> {
        use rustix::mount::OpenTreeFlags;
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        let tree = rustix::mount::open_tree(rustix::fs::CWD, &self.data, flags)?;
        let attr = libc::mount_attr {
            attr_set: libc::MOUNT_ATTR_NOATIME,
            attr_clr: libc::MOUNT_ATTR__ATIME,
            propagation: 0,
            userns_fd: 0,
        };
        // SAFETY: the descriptor and both pointers live through the call, which writes to none.
        let done = unsafe {
            libc::syscall(
                libc::SYS_mount_setattr,
                tree.as_raw_fd(),
                c"".as_ptr(),
                libc::AT_EMPTY_PATH,
                &raw const attr,
                size_of_val(&attr),
            )
        };
        if done != 0 {
            return Err(io::Error::last_os_error());
        }
        let _ = self.timeless.set(tree);
        Ok(())
    }

    /// A cache file as the kernel is to read and write it past the daemon.
    pub fn for_kernel(&self, ino: Ino) -> io::Result<File> {
        let Some(tree) = self.timeless.get() else { return self.read_only(ino) };
        let path = PathBuf::from(format!("/proc/self/fd/{}", tree.as_raw_fd())).join(name_of(ino));
        OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(path)
    }

    pub(crate) fn path(&self, ino: Ino) -> PathBuf {
        self.data.join(name_of(ino))
    }

    /// Where bytes are kept that nobody reads.
    pub(crate) fn aside(&self) -> PathBuf {
        self.data.with_file_name("aside")
    }

    /// The cache file of an inode, made when missing.
    pub fn file(&self, ino: Ino) -> io::Result<File> {
        let path = self.path(ino);
        let mut how = OpenOptions::new();
        let how = how.read(true).write(true).create(true).truncate(false).mode(0o600);
        let how = how.custom_flags(libc::O_NOFOLLOW | libc::O_NOATIME);
        match how.open(&path) {
            Err(e) if thaw_after(&e, &path) => how.open(&path),
            other => other,
        }
    }

    /// The cache file of an inode, for reading only, when there is one.
    pub fn read_only(&self, ino: Ino) -> io::Result<File> {
        OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(self.path(ino))
    }

    /// A file without a name in the cache.
    pub fn nameless(&self) -> io::Result<File> {
        nameless_in(&self.data)
    }

    /// Returns when the name of a cache file is on stable storage.
    pub fn sync_name(&self, ino: Ino) -> io::Result<()> {
        match self.path(ino).parent() {
            Some(shard) => File::open(shard)?.sync_all(),
            None => Ok(()),
        }
    }

    /// Returns when the directories themselves are on stable storage.
    pub fn sync_dirs(&self) -> io::Result<()> {
        File::open(&self.data)?.sync_all()
    }

    /// Every inode that has a cache file.
    pub fn inos(&self) -> io::Result<Vec<Ino>> {
        let mut found = Vec::new();
        for shard in 0..FANOUT {
            for entry in std::fs::read_dir(self.data.join(format!("{shard:02x}")))? {
                let name = entry?.file_name();
                let ino = name.to_str().and_then(|n| u64::from_str_radix(n, 16).ok()).map(Ino);
                // Anything else in there is not ours.
                found.extend(ino.filter(|i| self.path(*i).file_name() == Some(&*name)));
            }
        }
        Ok(found)
    }

    /// Length of a cache file; 0 when there is none.
    pub fn len(&self, ino: Ino) -> io::Result<u64> {
        match std::fs::symlink_metadata(self.path(ino)) {
            Ok(meta) => Ok(meta.len()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(0),
            Err(e) => Err(e),
        }
    }

    /// Gives the cache file of `from` another name as well: that of `to`.
    pub fn link(&self, from: Ino, to: Ino) -> io::Result<()> {
        self.remove(to)?;
        std::fs::hard_link(self.path(from), self.path(to))
    }

    /// Gives up the cache file of an inode; open descriptors keep it alive.
    pub fn remove(&self, ino: Ino) -> io::Result<()> {
        let path = self.path(ino);
        let removed = match std::fs::remove_file(&path) {
            Err(e) if thaw_after(&e, &path) => std::fs::remove_file(&path),
            other => other,
        };
        match removed {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }

    /// Bytes of the file system that holds the buffer: (all, free for us).
    pub fn space(&self) -> io::Result<(u64, u64)> {
        let s = rustix::fs::statvfs(&self.data)?;
        // What is kept for others counts neither as free nor as there.
        let usable = s.f_blocks.saturating_sub(s.f_bfree) + s.f_bavail;
        Ok((usable * s.f_frsize, s.f_bavail * s.f_frsize))
    }

    /// How many more files fit there; none where the file system has no such bound.
    pub fn free_inodes(&self) -> io::Result<Option<u64>> {
        let s = rustix::fs::statvfs(&self.data)?;
        Ok((s.f_files > 0).then_some(s.f_favail))
    }
}

fn nameless_in(dir: &Path) -> io::Result<File> {
    let flags = libc::O_TMPFILE;
    OpenOptions::new().read(true).write(true).mode(0o600).custom_flags(flags).open(dir)
}

/// A file without a name on the file system that holds `file`.
pub fn nameless_beside(file: &File) -> io::Result<File> {
    let path = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    nameless_in(path.parent().unwrap_or(Path::new("/")))
}

/// Makes a file at least `len` long without ever shortening it, whoever else writes to it.
pub fn extend(file: &File, len: u64) -> io::Result<()> {
    if len == 0 || file.metadata()?.len() >= len {
        return Ok(());
    }
    match rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), len - 1, 1) {
        Err(rustix::io::Errno::OPNOTSUPP) => file.set_len(len),
        other => other.map_err(io::Error::from),
    }
}

/// The first data at or behind `at`; none when there is only a hole.
pub fn next_data(file: &File, at: u64) -> io::Result<Option<u64>> {
    match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(at)) {
        Ok(found) => Ok(Some(found)),
        Err(rustix::io::Errno::NXIO) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// The first hole at or behind `at`; the end of the file counts as one.
pub fn next_hole(file: &File, at: u64) -> io::Result<u64> {
    Ok(rustix::fs::seek(file, rustix::fs::SeekFrom::Hole(at))?)
}

/// The same file once more, for reading only.
pub fn reopened_for_reading(file: &File) -> io::Result<File> {
    File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// The same file once more, for writing behind its end.
pub fn reopened_for_appending(file: &File) -> io::Result<File> {
    OpenOptions::new().append(true).open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Writes behind the end of a file that was opened for that, also while others do; where it went. Less
/// than all only where no more fits.
pub fn append(mut file: &File, data: &[u8]) -> io::Result<ByteRange> {
    let n = file.write(data)? as u64;
    let end = file.stream_position()?;
    Ok(ByteRange::new(end.saturating_sub(n), end))
}

/// True when nobody has `file` open for writing or mapped writably; `file` must be open for
/// reading only. The error says that this file system cannot tell.
pub fn has_no_writers(file: &File) -> io::Result<bool> {
    let fd = file.as_raw_fd();
    // SAFETY: plain integers go in, nothing comes out but a status.
    let lease = |kind: i32| match unsafe { libc::fcntl(fd, libc::F_SETLEASE, kind) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    match lease(libc::F_RDLCK) {
        Ok(()) => lease(libc::F_UNLCK).map(|()| true),
        Err(e) if e.raw_os_error() == Some(libc::EAGAIN) => Ok(false),
        Err(e) => Err(e),
    }
}

/// True when two writes that follow each other at once, with a look at the times in between, get
/// different times. Where times come from a coarse clock some pair of many has the same.
pub fn has_fine_times(file: &File) -> io::Result<bool> {
    use std::os::unix::fs::MetadataExt;
    let mut last = (0, 0);
    for _ in 0..64 {
        file.write_all_at(b"x", 0)?;
        let meta = file.metadata()?;
        let now = (meta.mtime(), meta.mtime_nsec());
        if now == last {
            return Ok(false);
        }
        last = now;
    }
    Ok(true)
}

/// An access time that no access leaves.
const NEVER_ACCESSED: libc::timespec = libc::timespec { tv_sec: 1, tv_nsec: 0 };

/// From now on [`was_accessed`] tells whether anybody but this daemon has read or mapped `file`.
pub fn mark_unaccessed(file: &File) -> io::Result<()> {
    let keep = libc::timespec { tv_sec: 0, tv_nsec: libc::UTIME_OMIT };
    let times = [NEVER_ACCESSED, keep];
    // SAFETY: the array lives for the call.
    match unsafe { libc::futimens(file.as_raw_fd(), times.as_ptr()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// True when the attributes are not those of a file that was marked and not accessed since.
#[must_use]
pub fn was_accessed(meta: &std::fs::Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    (meta.atime(), meta.atime_nsec()) != (NEVER_ACCESSED.tv_sec, NEVER_ACCESSED.tv_nsec)
}

/// True when mapping a file counts as an access here: not where access times are switched off.
/// `file` must be open without O_NOATIME.
pub fn has_access_times(file: &File) -> io::Result<bool> {
    file.write_all_at(b"x", 0)?;
    mark_unaccessed(file)?;
    if was_accessed(&file.metadata()?) {
        return Ok(false);
    }
    let (how, fd) = (libc::PROT_READ | libc::PROT_WRITE, file.as_raw_fd());
    // SAFETY: a new mapping at an address of the kernel's choice, taken away at once, unused.
    unsafe {
        let at = libc::mmap(std::ptr::null_mut(), 1, how, libc::MAP_SHARED, fd, 0);
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        libc::munmap(at, 1);
    }
    Ok(was_accessed(&file.metadata()?))
}

/// Takes the space for `range`, so that writing there does not find the disk full; the length stays.
/// Where the file system cannot, nothing is promised.
pub fn reserve(file: &File, range: ByteRange) -> io::Result<()> {
    if range.is_empty() {
        return Ok(());
    }
    let flags = rustix::fs::FallocateFlags::KEEP_SIZE;
    match rustix::fs::fallocate(file, flags, range.start(), range.len()) {
        Err(rustix::io::Errno::OPNOTSUPP) => Ok(()),
        other => other.map_err(io::Error::from),
    }
}

/// Makes the bytes of `range` a hole (zeros) and frees their space.
pub fn punch(file: &File, range: ByteRange) -> io::Result<()> {
    use rustix::fs::FallocateFlags;
    if range.is_empty() {
        return Ok(());
    }
    // Some file systems cannot; zeros are right everywhere.
    let end = range.end().min(i64::MAX as u64);
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    match rustix::fs::fallocate(file, flags, range.start(), end - range.start()) {
        Err(rustix::io::Errno::OPNOTSUPP) => write_zeros(file, ByteRange::new(range.start(), end)),
        other => other.map_err(io::Error::from),
    }
}

fn write_zeros(file: &File, range: ByteRange) -> io::Result<()> {
    let zeros = [0u8; 1 << 16];
    let end = range.end().min(file.metadata()?.len());
    let mut at = range.start();
    while at < end {
        let n = (end - at).min(zeros.len() as u64) as usize;
        file.write_all_at(&zeros[..n], at)?;
        at += n as u64;
    }
    Ok(())
}

/// Copies `ranges` from one file to the same places of another.
pub fn copy(from: &File, to: &File, ranges: &[ByteRange]) -> io::Result<()> {
    let mut buf = vec![0; 1 << 20];
    for range in ranges {
        let mut at = range.start();
        while at < range.end() {
            let n = (range.end() - at).min(buf.len() as u64) as usize;
            read_padded(from, &mut buf[..n], at)?;
            to.write_all_at(&buf[..n], at)?;
            at += n as u64;
        }
    }
    Ok(())
}

/// Fills `buf` from `offset`; what lies behind the end of the cache file is zeros.
pub fn read_padded(file: &File, buf: &mut [u8], offset: u64) -> io::Result<()> {
    let mut done = 0;
    while done < buf.len() {
        match file.read_at(&mut buf[done..], offset + done as u64) {
            Ok(0) => {
                buf[done..].fill(0);
                break;
            }
            Ok(n) => done += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_is_an_access_and_a_write_is_none() {
        let dir = tempfile::tempdir().expect("tempdir");
        let file = nameless_in(dir.path()).expect("file");
        if !has_access_times(&file).expect("mapped") {
            return println!("no access times on {}", dir.path().display());
        }
        mark_unaccessed(&file).expect("marked");
        file.write_all_at(b"more", 0).expect("write");
        assert!(!was_accessed(&file.metadata().expect("stat")));
        let mut byte = [0];
        file.read_exact_at(&mut byte, 0).expect("read");
        assert!(was_accessed(&file.metadata().expect("stat")));
    }

    /// Only root may mount it once more.
    #[test]
    fn reads_of_the_kernel_leave_no_times() {
        let dir = tempfile::tempdir().expect("tempdir");
        let cache = CacheDir::open(dir.path()).expect("cache");
        let file = cache.file(Ino(7)).expect("file");
        if !has_access_times(&file).expect("mapped") || !rustix::process::geteuid().is_root() {
            return println!("no access times on {}, or not root", dir.path().display());
        }
        file.write_all_at(b"bytes", 0).expect("write");
        let accessed_by = |reader: &File| {
            mark_unaccessed(&file).expect("marked");
            let mut byte = [0];
            reader.read_exact_at(&mut byte, 0).expect("read");
            assert_eq!(&byte, b"b");
            was_accessed(&file.metadata().expect("stat"))
        };
        assert!(accessed_by(&cache.for_kernel(Ino(7)).expect("open")));
        cache.leave_times_alone().expect("mounted");
        assert!(!accessed_by(&cache.for_kernel(Ino(7)).expect("open")));
        assert!(accessed_by(&cache.read_only(Ino(7)).expect("open")), "elsewhere it is as it was");
    }

    #[test]
    fn a_punched_range_reads_zeros_and_the_rest_stays() {
        let dir = tempfile::tempdir().expect("tempdir");
        let cache = CacheDir::open(dir.path()).expect("cache");
        let file = cache.file(Ino(77)).expect("file");
        file.write_all_at(&[7; 10_000], 0).expect("write");
        punch(&file, ByteRange::new(100, 9_000)).expect("punch");
        let mut got = vec![1; 12_000];
        read_padded(&file, &mut got, 0).expect("read");
        for (i, b) in got.iter().enumerate() {
            let want = if i < 100 || (9_000..10_000).contains(&i) { 7 } else { 0 };
            assert_eq!(*b, want, "byte {i}");
        }
        cache.remove(Ino(77)).expect("remove");
        cache.remove(Ino(77)).expect("twice is fine");
    }
}
