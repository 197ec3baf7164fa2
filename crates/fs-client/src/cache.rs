//! The node-local buffer on disk: one sparse file per inode with the same offsets as the real
//! file. What of it means something is known by the file's view, not by this.

use ebb_types::{ByteRange, Ino};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Cache files are spread over so many directories, so that none of them gets huge.
const FANOUT: u64 = 256;

/// The directory with the cache files.
#[derive(Debug)]
pub struct CacheDir {
    data: PathBuf,
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
        Ok(CacheDir { data })
    }

    fn path(&self, ino: Ino) -> PathBuf {
        self.data.join(format!("{:02x}", ino.0 % FANOUT)).join(format!("{:016x}", ino.0))
    }

    /// The cache file of an inode, made when missing.
    pub fn file(&self, ino: Ino) -> io::Result<File> {
        OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NOATIME)
            .open(self.path(ino))
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
        match std::fs::remove_file(self.path(ino)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }

    /// Bytes of the file system that holds the buffer: (all, free for us).
    pub fn space(&self) -> io::Result<(u64, u64)> {
        let s = rustix::fs::statvfs(&self.data)?;
        Ok((s.f_blocks * s.f_frsize, s.f_bavail * s.f_frsize))
    }

    /// How many more files fit there; none where the file system has no such bound.
    pub fn free_inodes(&self) -> io::Result<Option<u64>> {
        let s = rustix::fs::statvfs(&self.data)?;
        Ok((s.f_files > 0).then_some(s.f_favail))
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

/// Takes blocks for `range`, without a change of the file that can be seen.
pub fn reserve(file: &File, range: ByteRange) -> io::Result<()> {
    let keep = rustix::fs::FallocateFlags::KEEP_SIZE;
    match rustix::fs::fallocate(file, keep, range.start(), range.len()) {
        // Some file systems cannot.
        Err(rustix::io::Errno::OPNOTSUPP) => Ok(()),
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
