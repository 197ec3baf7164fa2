//! A file system of one directory in memory, which counts what it is asked and can be told to
//! misbehave. The names `waits` (reads wait for a signal) and `drops` (reads are never answered) are
//! special.

use ebb_fuse::{
    BackingId, Call, Create, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags,
    Handshake, Head, INodeNo, InitFlags, Listing, Lock, ReadDir, ReplyAttr, ReplyCreate, ReplyData,
    ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyLock, ReplyOpen, RequestId,
};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, UNIX_EPOCH};

/// Requests that come again have this bit in their number.
const AGAIN: u64 = 1 << 63;

#[derive(Default)]
struct State {
    names: BTreeMap<Vec<u8>, u64>,
    bytes: BTreeMap<u64, Vec<u8>>,
    last: u64,
    waiting: BTreeMap<u64, ReplyData>,
    /// Interrupts that came before what they interrupt.
    early: Vec<u64>,
    locks: Vec<(bool, bool)>,
    passed: Option<(Vec<u8>, File)>,
    ids: Vec<Arc<BackingId>>,
    /// Replies that are kept and never used.
    kept: Vec<ReplyAttr>,
}

/// What a test sees of it.
#[derive(Default)]
pub struct Shared {
    state: Mutex<State>,
    refuses: AtomicBool,
    caches: AtomicBool,
    deaf: AtomicBool,
    resends: AtomicBool,
    passes: AtomicBool,
    released: AtomicU64,
    lookups: AtomicU64,
    reads: AtomicU64,
    largest_write: AtomicU64,
    again: AtomicU64,
}

impl Shared {
    pub fn waiting(&self) -> usize {
        self.state.lock().unwrap().waiting.len()
    }

    /// Of each lock that was set: whether it is flock's, and whether it was waited for.
    pub fn locks(&self) -> Vec<(bool, bool)> {
        self.state.lock().unwrap().locks.clone()
    }

    pub fn refuse(&self, refuses: bool) {
        self.refuses.store(refuses, SeqCst);
    }

    /// Lets the kernel keep what it has seen.
    pub fn cache(&self, caches: bool) {
        self.caches.store(caches, SeqCst);
    }

    /// Attributes are not answered.
    pub fn deaf(&self, deaf: bool) {
        self.deaf.store(deaf, SeqCst);
    }

    pub fn unanswered(&self) -> usize {
        self.state.lock().unwrap().kept.len()
    }

    pub fn resends(&self) -> bool {
        self.resends.load(SeqCst)
    }

    pub fn passes_through(&self) -> bool {
        self.passes.load(SeqCst)
    }

    pub fn released(&self) -> u64 {
        self.released.load(SeqCst)
    }

    pub fn lookups(&self) -> u64 {
        self.lookups.load(SeqCst)
    }

    pub fn reads(&self) -> u64 {
        self.reads.load(SeqCst)
    }

    pub fn largest_write(&self) -> u64 {
        self.largest_write.load(SeqCst)
    }

    pub fn came_again(&self) -> u64 {
        self.again.load(SeqCst)
    }

    /// Another content, of which the kernel is not told.
    pub fn change(&self, name: &str, bytes: &[u8]) {
        let mut state = self.state.lock().unwrap();
        let inode = state.names[name.as_bytes()];
        state.bytes.insert(inode, bytes.to_vec());
    }

    /// Opens of this name are answered with a file.
    pub fn pass(&self, name: &str, file: File) {
        self.state.lock().unwrap().passed = Some((name.as_bytes().to_vec(), file));
    }

    fn ttl(&self) -> Duration {
        Duration::from_secs(if self.caches.load(SeqCst) { 1000 } else { 0 })
    }

    fn flags(&self) -> FopenFlags {
        match self.caches.load(SeqCst) {
            true => FopenFlags::FOPEN_KEEP_CACHE,
            false => FopenFlags::FOPEN_DIRECT_IO,
        }
    }
}

impl State {
    fn attr(&self, inode: u64) -> Result<FileAttr, Errno> {
        let (kind, size) = match self.bytes.get(&inode) {
            Some(bytes) => (FileType::RegularFile, bytes.len() as u64),
            None if inode == 1 => (FileType::Directory, 0),
            None => return Err(Errno::ENOENT),
        };
        Ok(FileAttr {
            ino: INodeNo(inode),
            size,
            blocks: size.div_ceil(512),
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind,
            perm: 0o755,
            nlink: 1,
            uid: rustix::process::getuid().as_raw(),
            gid: rustix::process::getgid().as_raw(),
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }

    fn named(&self, name: &[u8]) -> Result<u64, Errno> {
        self.names.get(name).copied().ok_or(Errno::ENOENT)
    }

    fn is(&self, inode: INodeNo, name: &[u8]) -> bool {
        self.names.get(name) == Some(&inode.0)
    }
}

/// The file system.
pub struct Tiny(pub Arc<Shared>);

impl Tiny {
    fn lookup(&self, name: &[u8], reply: ReplyEntry) {
        self.0.lookups.fetch_add(1, SeqCst);
        let state = self.0.state.lock().unwrap();
        match state.named(name).and_then(|inode| state.attr(inode)) {
            Ok(attr) => reply.entry(self.0.ttl(), &attr),
            Err(e) => reply.error(e),
        }
    }

    fn getattr(&self, head: &Head, reply: ReplyAttr) {
        let mut state = self.0.state.lock().unwrap();
        if self.0.deaf.load(SeqCst) {
            return state.kept.push(reply);
        }
        self.0.again.fetch_add(u64::from(head.unique.0 & AGAIN != 0), SeqCst);
        match state.attr(head.inode.0) {
            Ok(attr) => reply.attr(self.0.ttl(), &attr),
            Err(e) => reply.error(e),
        }
    }

    fn create(&self, asked: &Create<'_>, reply: ReplyCreate) {
        let mut state = self.0.state.lock().unwrap();
        let inode = state.last.max(1) + 1;
        state.last = inode;
        state.names.insert(asked.name.to_vec(), inode);
        state.bytes.insert(inode, Vec::new());
        let attr = state.attr(inode).unwrap();
        reply.created(self.0.ttl(), &attr, FileHandle(inode), self.0.flags(), None);
    }

    fn open(&self, inode: INodeNo, reply: ReplyOpen) {
        let mut state = self.0.state.lock().unwrap();
        let passed = state.passed.as_ref().filter(|(name, _)| state.is(inode, name));
        let Some((_, file)) = passed else {
            return reply.opened(FileHandle(inode.0), self.0.flags(), None);
        };
        let id = Arc::new(reply.open_backing(file).unwrap());
        state.ids.push(Arc::clone(&id));
        reply.opened(FileHandle(inode.0), FopenFlags::empty(), Some(&id));
    }

    fn read(&self, head: &Head, offset: u64, size: u32, reply: ReplyData) {
        self.0.reads.fetch_add(1, SeqCst);
        let mut state = self.0.state.lock().unwrap();
        if state.is(head.inode, b"drops") {
            return drop(reply);
        }
        if state.is(head.inode, b"waits") {
            let unique = head.unique.0;
            match state.early.contains(&unique) {
                true => reply.error(Errno::EINTR),
                false => drop(state.waiting.insert(unique, reply)),
            }
            return;
        }
        let bytes = &state.bytes[&head.inode.0];
        let start = bytes.len().min(offset as usize);
        reply.data(&bytes[start..bytes.len().min(start + size as usize)]);
    }

    fn write(&self, inode: u64, offset: u64, data: &[u8]) -> u32 {
        self.0.largest_write.fetch_max(data.len() as u64, SeqCst);
        let mut state = self.0.state.lock().unwrap();
        let bytes = state.bytes.entry(inode).or_default();
        let end = offset as usize + data.len();
        bytes.resize(bytes.len().max(end), 0);
        bytes[offset as usize..end].copy_from_slice(data);
        data.len() as u32
    }

    fn readdir(&self, asked: &ReadDir, reply: ReplyDirectory) {
        let state = self.0.state.lock().unwrap();
        let mut listing = Listing::new(asked.size);
        for (n, (name, inode)) in (1..).zip(&state.names).skip(asked.offset as usize) {
            if !listing.add(INodeNo(*inode), n, FileType::RegularFile, name) {
                break;
            }
        }
        reply.listed(&listing);
    }

    fn rename(&self, from: &[u8], to: Option<&[u8]>, reply: ReplyEmpty) {
        let mut state = self.0.state.lock().unwrap();
        match (state.names.remove(from), to) {
            (Some(inode), Some(to)) => drop(state.names.insert(to.to_vec(), inode)),
            (Some(inode), None) => drop(state.bytes.remove(&inode)),
            (None, _) => return reply.error(Errno::ENOENT),
        }
        reply.ok();
    }

    fn locked(&self, asked: &Lock, reply: ReplyEmpty) {
        if asked.kind != libc::F_UNLCK {
            self.0.state.lock().unwrap().locks.push((asked.flock, asked.waits));
        }
        reply.ok();
    }
}

impl Filesystem for Tiny {
    fn init(&mut self, kernel: &mut Handshake) -> io::Result<()> {
        kernel.ask_for(InitFlags::FUSE_POSIX_LOCKS | InitFlags::FUSE_FLOCK_LOCKS);
        kernel.set_max_stack_depth(1);
        self.0.passes.store(kernel.ask_for(InitFlags::FUSE_PASSTHROUGH), SeqCst);
        self.0.resends.store(kernel.ask_for(InitFlags::FUSE_HAS_RESEND), SeqCst);
        Ok(())
    }

    fn refuses(&self) -> Option<Errno> {
        self.0.refuses.load(SeqCst).then_some(Errno::ENOTCONN)
    }

    fn interrupt(&self, unique: RequestId) {
        let mut state = self.0.state.lock().unwrap();
        match state.waiting.remove(&unique.0) {
            Some(reply) => reply.error(Errno::EINTR),
            None => state.early.push(unique.0),
        }
    }

    fn serve(&self, head: &Head, call: Call<'_>) {
        match call {
            Call::Lookup(asked, reply) => self.lookup(asked.name, reply),
            Call::GetAttr(_, reply) => self.getattr(head, reply),
            Call::SetAttr(asked, reply) => {
                if let Some(size) = asked.size {
                    let mut state = self.0.state.lock().unwrap();
                    state.bytes.entry(head.inode.0).or_default().resize(size as usize, 0);
                }
                self.getattr(head, reply);
            }
            Call::Create(asked, reply) => self.create(&asked, reply),
            Call::Open(_, reply) => self.open(head.inode, reply),
            Call::OpenDir(_, reply) => reply.opened(FileHandle(0), FopenFlags::empty(), None),
            Call::Read(asked, reply) => self.read(head, asked.offset, asked.size, reply),
            Call::Write(asked, reply) => {
                reply.written(self.write(head.inode.0, asked.offset, asked.data));
            }
            Call::ReadDir(asked, reply) => self.readdir(&asked, reply),
            Call::Rename(asked, reply) => self.rename(asked.name, Some(asked.new_name), reply),
            Call::Unlink(asked, reply) => self.rename(asked.name, None, reply),
            Call::SetLock(asked, reply) => self.locked(&asked, reply),
            Call::GetLock(_, reply) => ReplyLock::locked(reply, 0, 0, libc::F_UNLCK, 0),
            Call::Flush(_, reply) => reply.ok(),
            Call::Release(_, reply) => {
                self.0.released.fetch_add(1, SeqCst);
                reply.ok();
            }
            Call::ReleaseDir(_, reply) => reply.ok(),
            other => other.error(Errno::ENOSYS),
        }
    }
}
