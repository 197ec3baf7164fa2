//! What a journal asks of the disk, and a directory that gives it. Nothing else: whatever is
//! between the calls may be lost when the power goes, and [`crate::power`] loses it.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A directory of journal files.
pub trait Storage: Send + Sync {
    /// The content of a file; nothing when there is none.
    fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>>;
    /// A new empty file, in the place of an older one of this name.
    fn create(&self, name: &str) -> io::Result<Arc<dyn Stored>>;
    /// Gives a file the name of another one, which is gone then.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;
    /// Returns when the names are on stable storage.
    fn sync_names(&self) -> io::Result<()>;
}

/// One file, open for writing.
pub trait Stored: Send + Sync {
    /// Writes all of `bytes` at `offset`.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;
    /// Returns when content and length are on stable storage.
    fn sync(&self) -> io::Result<()>;
    /// Takes room on the disk behind `offset`, if that is possible.
    fn reserve(&self, offset: u64, len: u64);
}

/// A real directory.
#[derive(Clone, Debug)]
pub struct Directory(PathBuf);

impl Directory {
    /// The journal files in `path`.
    #[must_use]
    pub fn new(path: &Path) -> Directory {
        Directory(path.to_owned())
    }
}

impl Storage for Directory {
    fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        let mut bytes = Vec::new();
        match File::open(self.0.join(name)) {
            Ok(mut file) => file.read_to_end(&mut bytes).map(|_| Some(bytes)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn Stored>> {
        let mut options = OpenOptions::new();
        let options = options.create(true).read(true).write(true).truncate(true).mode(0o600);
        Ok(Arc::new(options.custom_flags(libc::O_NOFOLLOW).open(self.0.join(name))?))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        // Freeing a large file can take seconds; whoever waits for the new one does not wait for
        // that.
        let old = File::open(self.0.join(to)).ok();
        std::fs::rename(self.0.join(from), self.0.join(to))?;
        if old.as_ref().and_then(|f| f.metadata().ok()).is_some_and(|m| m.len() > 1 << 20) {
            std::thread::spawn(move || drop(old));
        }
        Ok(())
    }

    fn sync_names(&self) -> io::Result<()> {
        File::open(&self.0)?.sync_all()
    }
}

impl Stored for File {
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.write_all_at(bytes, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }

    fn reserve(&self, offset: u64, len: u64) {
        // Best effort: not every file system can.
        let keep_size = rustix::fs::FallocateFlags::KEEP_SIZE;
        let _ = rustix::fs::fallocate(self, keep_size, offset, len);
    }
}
