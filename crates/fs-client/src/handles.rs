//! Open files, directories and virtual files by the number the kernel holds for them.

use crate::file::CachedFile;
use ebb_consistency::IoPath;
use ebb_types::{Attr, Ino};
use parking_lot::{Mutex, RwLock};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// One `open` of a file.
pub struct OpenFile {
    /// The file.
    pub file: Arc<CachedFile>,
    /// Which way its reads and writes go.
    pub path: IoPath,
    /// Where a sequential reader would go on.
    pub read_ahead: Mutex<ReadAhead>,
    /// Owners of record locks taken through this handle. Those that are left when the handle
    /// goes are open file description locks, of whose end the kernel does not tell.
    pub record_owners: Mutex<Vec<u64>>,
    /// The owner of a flock taken through this handle; 0: none.
    pub flock_owner: AtomicU64,
}

/// What is known of a handle's reading.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReadAhead {
    /// One past the last byte read.
    pub next: u64,
    /// Reads in a row that began where the one before ended.
    pub run: u32,
    /// How far ahead has been asked for.
    pub ahead: u64,
}

/// One entry of a listed directory.
#[derive(Clone, Debug)]
pub struct DirItem {
    /// Its name.
    pub name: Vec<u8>,
    /// Its attributes.
    pub attr: Attr,
}

/// One `opendir`: the listing is taken when reading begins, and again after a rewind.
pub struct DirHandle {
    /// The directory.
    pub ino: Ino,
    /// The listing, with `.` and `..`.
    pub listing: tokio::sync::Mutex<Option<Arc<Vec<DirItem>>>>,
}

impl DirHandle {
    /// A directory of which nothing was read yet.
    #[must_use]
    pub fn new(ino: Ino) -> DirHandle {
        DirHandle { ino, listing: tokio::sync::Mutex::new(None) }
    }
}

/// All handles of a mount.
#[derive(Default)]
pub struct Handles {
    last: AtomicU64,
    files: RwLock<HashMap<u64, Arc<OpenFile>>>,
    dirs: RwLock<HashMap<u64, Arc<DirHandle>>>,
    contents: RwLock<HashMap<u64, Arc<Vec<u8>>>>,
}

impl Handles {
    fn number(&self) -> u64 {
        self.last.fetch_add(1, Relaxed) + 1
    }

    /// Takes an open file in.
    pub fn insert_file(&self, file: OpenFile) -> u64 {
        let fh = self.number();
        self.files.write().insert(fh, Arc::new(file));
        fh
    }

    /// The open file of a number.
    pub fn file(&self, fh: u64) -> Option<Arc<OpenFile>> {
        self.files.read().get(&fh).cloned()
    }

    /// Forgets an open file.
    pub fn remove_file(&self, fh: u64) -> Option<Arc<OpenFile>> {
        self.files.write().remove(&fh)
    }

    /// Takes an open directory in.
    pub fn insert_dir(&self, dir: DirHandle) -> u64 {
        let fh = self.number();
        self.dirs.write().insert(fh, Arc::new(dir));
        fh
    }

    /// The open directory of a number.
    pub fn dir(&self, fh: u64) -> Option<Arc<DirHandle>> {
        self.dirs.read().get(&fh).cloned()
    }

    /// Forgets an open directory.
    pub fn remove_dir(&self, fh: u64) {
        self.dirs.write().remove(&fh);
    }

    /// Takes the content of an opened virtual file in.
    pub fn insert_content(&self, content: Vec<u8>) -> u64 {
        let fh = self.number();
        self.contents.write().insert(fh, Arc::new(content));
        fh
    }

    /// The content of an opened virtual file.
    pub fn content(&self, fh: u64) -> Option<Arc<Vec<u8>>> {
        let contents = self.contents.read();
        if contents.is_empty() { None } else { contents.get(&fh).cloned() }
    }

    /// Forgets an opened virtual file.
    pub fn remove_content(&self, fh: u64) {
        self.contents.write().remove(&fh);
    }

    /// Every open file.
    pub fn all_files(&self) -> Vec<Arc<OpenFile>> {
        self.files.read().values().cloned().collect()
    }

    /// How many files are open.
    pub fn open_files(&self) -> usize {
        self.files.read().len()
    }
}
