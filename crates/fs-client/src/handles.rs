//! Open files, directories and virtual files by the number the kernel holds for them.

use crate::file::CachedFile;
use crate::read_ahead::ReadAhead;
use ebb_consistency::IoPath;
use ebb_handover::Heirloom;
use ebb_locks::{Mutex, RwLock};
use ebb_types::{Access, Attr, Ino};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

/// One `open` of a file.
pub struct OpenFile {
    /// The kernel's number of it.
    pub fh: u64,
    /// The file.
    pub file: Arc<CachedFile>,
    /// Which way its reads and writes go.
    pub path: IoPath,
    /// How it was opened; `None`: by a daemon before this one, which did not tell.
    pub access: Option<Access>,
    /// Open for reading and writing ([`CachedFile::may_be_mapped`]).
    pub mappable: Option<Arc<()>>,
    /// Where a sequential reader would go on.
    pub read_ahead: Mutex<ReadAhead>,
    /// The number under which it counts as an open of a coupled file; 0: it does not.
    pub couple: u64,
    /// Somebody has closed it who was not being killed. Who is killed while the open is under way never closes it.
    pub closed_well: AtomicBool,
    /// Somebody who had it open was killed, with all that it was to write into it.
    pub killed: AtomicBool,
    /// Who has it open has said how it ends, and the service knows, or is told.
    pub told: AtomicBool,
}

/// One entry of a listed directory.
#[derive(Clone, Debug)]
pub struct DirItem {
    /// Its name.
    pub name: Vec<u8>,
    /// Its attributes.
    pub attr: Attr,
    /// Where the next entry is looked for: the same in every listing that has this name.
    pub position: u64,
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
    heir: OnceLock<Arc<Heirloom>>,
    /// Handles that a dead daemon gave and perhaps never told, by the request that asked for them.
    given: RwLock<HashMap<u64, u64>>,
}

impl Handles {
    fn number(&self) -> u64 {
        self.last.fetch_add(1, Relaxed) + 1
    }

    /// Before anything is opened: what is open outlives this daemon, and numbers go on above those
    /// of the daemons before it.
    pub fn outlive(&self, heir: Arc<Heirloom>) {
        self.last.store(heir.first_number(), Relaxed);
        let _ = self.heir.set(heir);
    }

    /// True for a number that a daemon before this one gave.
    pub fn is_inherited(&self, fh: u64) -> bool {
        self.heir.get().is_some_and(|heir| fh <= heir.first_number())
    }

    /// Takes in what a daemon before this one had open.
    pub fn adopt(&self, request: u64, file: OpenFile) {
        let fh = file.fh;
        self.files.write().insert(fh, Arc::new(file));
        self.given.write().insert(request, fh);
    }

    /// The handle that a request was given by a daemon before this one.
    pub fn given(&self, request: u64) -> Option<(u64, Arc<OpenFile>)> {
        let fh = self.given.read().get(&request).copied()?;
        Some((fh, self.file(fh)?))
    }

    /// The handle is of no use to an heir any more: everything that belongs to it is done.
    pub fn forget(&self, fh: u64) {
        if let Some(heir) = self.heir.get() {
            heir.table.closed(fh);
        }
    }

    /// Somebody has locked something through it.
    pub fn locked(&self, fh: u64, owner: u64, flock: bool) {
        if let Some(heir) = self.heir.get()
            && !heir.table.locked(fh, owner, flock)
        {
            tracing::warn!("too many locks: some would not outlive this daemon");
        }
    }

    /// The locks of a handle were given up.
    pub fn broken(&self, fh: u64) {
        if let Some(heir) = self.heir.get()
            && !heir.table.broken(fh)
        {
            tracing::warn!("too many open files: one whose locks are lost is not noted as such");
        }
    }

    /// An owner has no locks any more that were taken through it.
    pub fn unlocked(&self, fh: u64, owner: u64, flock: bool) {
        if let Some(heir) = self.heir.get() {
            heir.table.unlocked(fh, owner, flock);
        }
    }

    /// Takes an open file in.
    pub fn insert_file(&self, mut file: OpenFile) -> u64 {
        let fh = self.number();
        file.fh = fh;
        if let Some(heir) = self.heir.get() {
            let request = ebb_meta_client::caller().map_or(0, |c| c.number);
            if !heir.table.opened(fh, file.file.ino, request, file.access) {
                tracing::warn!("too many open files: some would not outlive this daemon");
            }
        }
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

    /// The open directory of a number; one that a daemon before this one gave is made again.
    pub fn dir_or_again(&self, fh: u64, ino: Ino) -> Option<Arc<DirHandle>> {
        let known = self.dir(fh);
        if known.is_some() || !self.is_inherited(fh) {
            return known;
        }
        let mut dirs = self.dirs.write();
        Some(Arc::clone(dirs.entry(fh).or_insert_with(|| Arc::new(DirHandle::new(ino)))))
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

    /// Gives the content of an opened virtual file another number.
    pub fn rename_content(&self, from: u64, to: u64) {
        let mut contents = self.contents.write();
        if let Some(content) = contents.remove(&from) {
            contents.insert(to, content);
        }
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
