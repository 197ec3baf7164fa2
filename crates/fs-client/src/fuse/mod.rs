//! The FUSE adapter: decodes, calls, replies. It decides nothing.
//!
//! Event loops answer what is local; whatever may wait goes to the runtime with its reply.

mod convert;
mod mount;
mod passing;
mod places;

pub use mount::{Moment, MountError, Mounted, mount, unmount};

use crate::handles::{DirHandle, OpenFile};
use crate::heir::AGAIN;
use crate::metrics::Operation;
use crate::node::Node;
use crate::ops::data::Written;
use crate::ops::dirs::behind;
use crate::ops::locks::LockRequest;
use crate::ops::names::MakeArgs;
use crate::passing::Opening;
use crate::virtual_files;
use convert::{attr, errno, ino, kind};
use ebb_meta_client::{Caller, SetAttr, on_behalf_of, on_behalf_of_now};
use ebb_types::{Errno, FileKind, Ino, Name};
use fuser::{
    AccessFlags, BsdFileFlags, CopyFileRangeFlags, FileHandle, Filesystem, FopenFlags, Generation,
    INodeNo, InitFlags, IoctlFlags, KernelConfig, LockOwner, OpenFlags, RenameFlags, ReplyAttr,
    ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyIoctl,
    ReplyLock, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request, RequestId,
    TimeOrNow, WriteFlags,
};
use places::Places;
use std::cell::RefCell;
use std::ffi::OsStr;
use std::future::Future;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::{Duration, Instant, SystemTime};

/// Attributes and names are asked for every time: what a node sees is decided by the model and
/// the metadata service alone.
const TTL: Duration = Duration::ZERO;

/// Largest write and read of one request.
const REQUEST_BYTES_MAX: u32 = 1 << 20;

/// The kernel's default of 12 starves anything that waits for a network.
const BACKGROUND_REQUESTS_MAX: u16 = 128;

thread_local! {
    /// Local reads of an event loop go through this one buffer.
    static READ_BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// The file system as fuser calls it.
pub struct Adapter {
    node: Arc<Node>,
    places: Arc<Places>,
    /// The kernel sends requests again that were not answered.
    resends: Arc<AtomicBool>,
}

impl Adapter {
    pub fn new(node: Arc<Node>) -> Adapter {
        Adapter { node, places: Arc::default(), resends: Arc::default() }
    }

    /// Runs an operation that may wait, then replies.
    fn spawn<T: Send + 'static>(
        &self,
        operation: Operation,
        work: impl Future<Output = Result<T, Errno>> + Send + 'static,
        reply: impl FnOnce(Result<T, Errno>) + Send + 'static,
    ) {
        let node = Arc::clone(&self.node);
        let start = Instant::now();
        let active = node.activity.enter_owned();
        let watched = node.watchdog.begin(operation);
        self.node.runtime.spawn(async move {
            let result = work.await;
            drop(watched);
            node.metrics.finished(operation, start);
            drop(active);
            reply(result);
        });
    }

    /// The same for one that changes nothing: when it is stuck, a signal ends it. Not at once,
    /// because local file systems never answer EINTR to these.
    fn spawn_waiting<T: Send + 'static>(
        &self,
        operation: Operation,
        request: &Request,
        work: impl Future<Output = Result<T, Errno>> + Send + 'static,
        reply: impl FnOnce(Result<T, Errno>) + Send + 'static,
    ) {
        let node = Arc::clone(&self.node);
        let unique = request.unique().0;
        self.spawn(
            operation,
            async move { node.interrupts.run_patiently(unique, work).await },
            reply,
        );
    }

    /// The same for one that must not be done twice when it comes again after the death of a
    /// daemon.
    fn spawn_once<T: Send + 'static>(
        &self,
        operation: Operation,
        request: &Request,
        work: impl Future<Output = Result<T, Errno>> + Send + 'static,
        reply: impl FnOnce(Result<T, Errno>) + Send + 'static,
    ) {
        self.spawn(operation, on_behalf_of(caller(request), work), reply);
    }

    fn resends(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.resends)
    }

    fn places(&self) -> Arc<Places> {
        Arc::clone(&self.places)
    }

    /// The handle that a daemon before this one gave to a request that comes again.
    fn given(&self, request: &Request) -> Option<(u64, Arc<OpenFile>)> {
        let caller = caller(request);
        if caller.again { self.node.handles.given(caller.number) } else { None }
    }

    /// Where an append that comes again was put by a daemon before this one.
    fn placed(&self, request: u64) -> Option<u64> {
        Some(self.node.placed.get()?.get(&request)?.range.start())
    }

    /// A file of `.ebb` that a daemon before this one opened.
    fn read_anew(&self, i: Ino, fh: FileHandle, offset: u64, size: u32, reply: ReplyData) {
        let node = Arc::clone(&self.node);
        let work = async move {
            let made = node.open_virtual(i, libc::O_RDONLY).await?;
            let content = node.handles.content(made).ok_or(Errno::EIO)?;
            node.handles.rename_content(made, fh.0);
            Ok(content)
        };
        self.spawn(Operation::Read, work, move |r| match r {
            Ok(content) => {
                let start = (offset as usize).min(content.len());
                reply.data(&content[start..(start + size as usize).min(content.len())]);
            }
            Err(e) => reply.error(errno(e)),
        });
    }

    fn handle(&self, fh: FileHandle) -> Result<Arc<OpenFile>, Errno> {
        self.node.handles.file(fh.0).ok_or(Errno::EBADF)
    }
}

/// Which call of an application it is.
fn caller(request: &Request) -> Caller {
    let unique = request.unique().0;
    Caller { number: unique & !AGAIN, again: unique & AGAIN != 0 }
}

fn empty(reply: ReplyEmpty) -> impl FnOnce(Result<(), Errno>) + Send {
    move |r| match r {
        Ok(()) => reply.ok(),
        Err(e) => reply.error(errno(e)),
    }
}

fn entry(reply: ReplyEntry) -> impl FnOnce(Result<ebb_types::Attr, Errno>) + Send {
    move |r| match r {
        Ok(a) => reply.entry(&TTL, &attr(&a), Generation(0)),
        Err(e) => reply.error(errno(e)),
    }
}

/// A listing with attributes is a look-up of every name but the dots.
fn note_listed(node: &Node, places: &Places, parent: Ino, name: &[u8], attr: &ebb_types::Attr) {
    if let (FileKind::Directory, Ok(name)) = (attr.kind, Name::new(name)) {
        node.gone.saw(attr);
        places.note(attr.ino, parent, &name);
    }
}

fn attributes(reply: ReplyAttr) -> impl FnOnce(Result<ebb_types::Attr, Errno>) + Send {
    move |r| match r {
        Ok(a) => reply.attr(&TTL, &attr(&a)),
        Err(e) => reply.error(errno(e)),
    }
}

fn xattr(reply: ReplyXattr, size: u32) -> impl FnOnce(Result<Vec<u8>, Errno>) + Send {
    move |r| match r {
        Ok(v) if size == 0 => reply.size(v.len() as u32),
        Ok(v) if v.len() > size as usize => reply.error(errno(Errno::ERANGE)),
        Ok(v) => reply.data(&v),
        Err(e) => reply.error(errno(e)),
    }
}

/// Decodes a name or answers the error at once.
macro_rules! name {
    ($bytes:expr, $reply:expr) => {
        match Name::new($bytes.as_bytes()) {
            Ok(name) => name,
            Err(e) => return $reply.error(errno(e)),
        }
    };
}

/// The same for a name that is to be made, changed or removed.
macro_rules! name_to_change {
    ($parent:expr, $bytes:expr, $reply:expr) => {{
        if let Err(e) = virtual_files::may_change(ino($parent), $bytes.as_bytes()) {
            return $reply.error(errno(e));
        }
        name!($bytes, $reply)
    }};
}

/// An inode that is to be changed; answers at once when it is one of `.ebb`.
macro_rules! inode_to_change {
    ($inode:expr, $reply:expr) => {{
        let inode = ino($inode);
        if virtual_files::is_virtual(inode) {
            return $reply.error(errno(Errno::EPERM));
        }
        inode
    }};
}

/// Answers at once when what this handle or process had locked may be others' by now.
macro_rules! locks_hold {
    ($self:expr, $handle:expr, $owner:expr, $reply:expr) => {
        if let Err(e) = $self.node.locks_hold(&$handle, $owner) {
            return $reply.error(errno(e));
        }
    };
}

macro_rules! handle {
    ($self:expr, $fh:expr, $reply:expr) => {
        match $self.handle($fh) {
            Ok(handle) => handle,
            Err(e) => return $reply.error(errno(e)),
        }
    };
}

/// What is of use whatever a mount does: asks the kernel for it. True when requests that a dead daemon
/// had are sent again.
pub fn ask_kernel(config: &mut KernelConfig) -> bool {
    let wanted = [
        InitFlags::FUSE_ASYNC_READ,
        InitFlags::FUSE_BIG_WRITES,
        InitFlags::FUSE_POSIX_LOCKS,
        InitFlags::FUSE_FLOCK_LOCKS,
        InitFlags::FUSE_ATOMIC_O_TRUNC,
        InitFlags::FUSE_PARALLEL_DIROPS,
        InitFlags::FUSE_ASYNC_DIO,
        InitFlags::FUSE_DO_READDIRPLUS,
        InitFlags::FUSE_READDIRPLUS_AUTO,
        InitFlags::FUSE_HANDLE_KILLPRIV_V2,
        InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP,
        InitFlags::FUSE_MAX_PAGES,
    ];
    for flag in wanted {
        if config.add_capabilities(flag).is_err() {
            tracing::info!(?flag, "this kernel does not have it");
        }
    }
    let _ = config.set_max_write(REQUEST_BYTES_MAX);
    let _ = config.set_max_background(BACKGROUND_REQUESTS_MAX);
    let _ = config.set_time_granularity(Duration::from_nanos(1));
    config.add_capabilities(InitFlags::FUSE_HAS_RESEND).is_ok()
}

/// Data always travels through the daemon, and mappings are allowed beside that.
pub fn open_flags() -> FopenFlags {
    FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES
}

impl Filesystem for Adapter {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        passing::negotiate(&self.node, config);
        self.resends.store(ask_kernel(config), Release);
        Ok(())
    }

    fn refuses(&self) -> Option<fuser::Errno> {
        let out = self.node.is_out.load(Acquire) || self.node.is_ending.load(Acquire);
        out.then(|| errno(Errno::ENOTCONN))
    }

    fn interrupt(&self, unique: RequestId) {
        self.node.interrupts.interrupt(unique.0);
    }

    fn lookup(&self, _req: &Request, parent: INodeNo, file: &OsStr, reply: ReplyEntry) {
        if let Some(found) = virtual_files::lookup(ino(parent), file.as_bytes()) {
            return reply.entry(&TTL, &attr(&found), Generation(0));
        }
        if virtual_files::is_virtual(ino(parent)) {
            return reply.error(errno(Errno::ENOENT));
        }
        let name = name!(file, reply);
        let parent = ino(parent);
        let start = Instant::now();
        let known = self.node.known_name(parent, &name);
        // What is another place of a directory must be told to the kernel first.
        let stays = |a: &ebb_types::Attr| {
            a.kind != FileKind::Directory || self.places.is_at(a.ino, parent, &name)
        };
        if let Some(known) = known.filter(|k| k.as_ref().map_or(true, stays)) {
            self.node.metrics.finished(Operation::Lookup, start);
            return entry(reply)(known);
        }
        let (node, places) = (Arc::clone(&self.node), Arc::clone(&self.places));
        self.spawn(
            Operation::Lookup,
            async move {
                let found = node.lookup(parent, &name).await?;
                if found.kind == FileKind::Directory {
                    node.gone.saw(&found);
                    places.found(found.ino, parent, &name).await;
                }
                Ok(found)
            },
            entry(reply),
        );
    }

    fn forget(&self, _req: &Request, inode: INodeNo, _nlookup: u64) {
        self.places.forget(ino(inode));
        self.node.gone.forget(ino(inode));
        self.node.forget(ino(inode));
    }

    fn getattr(&self, req: &Request, i: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        if let Some(found) = virtual_files::getattr(ino(i)) {
            return reply.attr(&TTL, &attr(&found));
        }
        let start = Instant::now();
        if let Some(found) = self.node.leased_attr(ino(i)) {
            self.node.metrics.finished(Operation::GetAttr, start);
            return reply.attr(&TTL, &attr(&found));
        }
        let node = Arc::clone(&self.node);
        let i = ino(i);
        let work = async move { node.getattr(i).await };
        self.spawn_waiting(Operation::GetAttr, req, work, attributes(reply));
    }

    fn setattr(
        &self,
        req: &Request,
        i: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let args = SetAttr {
            mode,
            uid,
            gid,
            size,
            atime: atime.map(convert::time),
            mtime: mtime.map(convert::time),
            // Whoever has CAP_FSETID keeps them when the size changes.
            kill_priv: size.is_some() && req.uid() != 0,
            only_grow: false,
        };
        let node = Arc::clone(&self.node);
        let i = inode_to_change!(i, reply);
        self.spawn(
            Operation::SetAttr,
            async move { node.setattr(i, args).await },
            attributes(reply),
        );
    }

    fn readlink(&self, _req: &Request, i: INodeNo, reply: ReplyData) {
        let node = Arc::clone(&self.node);
        let i = ino(i);
        self.spawn(Operation::ReadLink, async move { node.readlink(i).await }, move |r| match r {
            Ok(target) => reply.data(&target),
            Err(e) => reply.error(errno(e)),
        });
    }

    fn mknod(
        &self,
        req: &Request,
        parent: INodeNo,
        file: &OsStr,
        mode: u32,
        umask: u32,
        rdev: u32,
        reply: ReplyEntry,
    ) {
        let name = name_to_change!(parent, file, reply);
        let _ = umask; // the kernel has applied it (FUSE_DONT_MASK is not asked for)
        let args = MakeArgs { mode, uid: req.uid(), gid: req.gid(), rdev, target: Vec::new() };
        let node = Arc::clone(&self.node);
        let parent = ino(parent);
        self.spawn_once(
            Operation::Make,
            req,
            async move { node.make(parent, &name, args).await },
            entry(reply),
        );
    }

    fn mkdir(
        &self,
        req: &Request,
        parent: INodeNo,
        file: &OsStr,
        mode: u32,
        _umask: u32,
        reply: ReplyEntry,
    ) {
        let name = name_to_change!(parent, file, reply);
        let mode = (mode & 0o7777) | libc::S_IFDIR;
        let args = MakeArgs { mode, uid: req.uid(), gid: req.gid(), rdev: 0, target: Vec::new() };
        let (node, places) = (Arc::clone(&self.node), Arc::clone(&self.places));
        let parent = ino(parent);
        self.spawn_once(
            Operation::Make,
            req,
            async move {
                let made = node.make(parent, &name, args).await?;
                node.gone.saw(&made);
                places.note(made.ino, parent, &name);
                Ok(made)
            },
            entry(reply),
        );
    }

    fn symlink(
        &self,
        req: &Request,
        parent: INodeNo,
        file: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        let name = name_to_change!(parent, file, reply);
        let args = MakeArgs {
            mode: libc::S_IFLNK | 0o777,
            uid: req.uid(),
            gid: req.gid(),
            rdev: 0,
            target: target.as_os_str().as_bytes().to_vec(),
        };
        let node = Arc::clone(&self.node);
        let parent = ino(parent);
        self.spawn_once(
            Operation::Make,
            req,
            async move { node.make(parent, &name, args).await },
            entry(reply),
        );
    }

    fn unlink(&self, req: &Request, parent: INodeNo, file: &OsStr, reply: ReplyEmpty) {
        let name = name_to_change!(parent, file, reply);
        let node = Arc::clone(&self.node);
        let parent = ino(parent);
        self.spawn_once(
            Operation::Unlink,
            req,
            async move { node.unlink(parent, &name, false).await },
            empty(reply),
        );
    }

    fn rmdir(&self, req: &Request, parent: INodeNo, file: &OsStr, reply: ReplyEmpty) {
        let name = name_to_change!(parent, file, reply);
        let node = Arc::clone(&self.node);
        let parent = ino(parent);
        self.spawn_once(
            Operation::Unlink,
            req,
            async move { node.unlink(parent, &name, true).await },
            empty(reply),
        );
    }

    fn rename(
        &self,
        req: &Request,
        parent: INodeNo,
        file: &OsStr,
        new_parent: INodeNo,
        new_file: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let name = name_to_change!(parent, file, reply);
        let new_name = name_to_change!(new_parent, new_file, reply);
        let (node, places) = (Arc::clone(&self.node), Arc::clone(&self.places));
        let (parent, new_parent, flags) = (ino(parent), ino(new_parent), flags.bits());
        self.spawn_once(
            Operation::Rename,
            req,
            async move {
                node.rename(parent, &name, new_parent, &new_name, flags).await?;
                let exchange = flags & libc::RENAME_EXCHANGE != 0;
                places.renamed((parent, &name), (new_parent, &new_name), exchange);
                Ok(())
            },
            empty(reply),
        );
    }

    fn link(
        &self,
        req: &Request,
        i: INodeNo,
        new_parent: INodeNo,
        new_file: &OsStr,
        reply: ReplyEntry,
    ) {
        let name = name_to_change!(new_parent, new_file, reply);
        let node = Arc::clone(&self.node);
        let (i, new_parent) = (inode_to_change!(i, reply), ino(new_parent));
        self.spawn_once(
            Operation::Link,
            req,
            async move { node.link(i, new_parent, &name).await },
            entry(reply),
        );
    }

    fn open(&self, req: &Request, i: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let node = Arc::clone(&self.node);
        let i = ino(i);
        if virtual_files::is_virtual(i) {
            let work = async move { node.open_virtual(i, flags.0).await };
            return self.spawn(Operation::Open, work, move |r| match r {
                Ok(fh) => reply.opened(FileHandle(fh), FopenFlags::FOPEN_DIRECT_IO),
                Err(e) => reply.error(errno(e)),
            });
        }
        let uid = req.uid();
        let given = self.given(req);
        let work = async move {
            let opened = match given {
                Some((fh, file)) => Ok(Opening { fh, path: file.path, id: None }),
                None => node.open(i, flags.0, uid, &reply).await,
            };
            Ok((opened, reply))
        };
        self.spawn_once(Operation::Open, req, work, passing::answer_open);
    }

    fn create(
        &self,
        req: &Request,
        parent: INodeNo,
        file: &OsStr,
        mode: u32,
        _umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let name = name_to_change!(parent, file, reply);
        let args = MakeArgs {
            mode: (mode & 0o7777) | libc::S_IFREG,
            uid: req.uid(),
            gid: req.gid(),
            rdev: 0,
            target: Vec::new(),
        };
        let (node, given) = (Arc::clone(&self.node), self.given(req));
        let parent = ino(parent);
        self.spawn_once(
            Operation::Create,
            req,
            async move {
                let created = match given {
                    Some((fh, open)) => {
                        let opening = Opening { fh, path: open.path, id: None };
                        node.getattr(open.file.ino).await.map(|a| (a, opening))
                    }
                    None => node.create(parent, &name, args, flags, &reply).await,
                };
                Ok((created, reply))
            },
            passing::answer_create,
        );
    }

    fn read(
        &self,
        req: &Request,
        i: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        if let Some(content) = self.node.handles.content(fh.0) {
            let start = (offset as usize).min(content.len());
            let end = (start + size as usize).min(content.len());
            return reply.data(&content[start..end]);
        }
        if virtual_files::is_virtual(ino(i)) {
            return self.read_anew(ino(i), fh, offset, size, reply);
        }
        let handle = handle!(self, fh, reply);
        locks_hold!(self, handle, owner.map(|o| o.0), reply);
        let start = Instant::now();
        let active = (self.node.activity.enter(), self.node.watchdog.in_loop());
        let answered = READ_BUFFER.with_borrow_mut(|buffer| {
            buffer.resize(buffer.len().max(size as usize), 0);
            self.node.read_local(&handle, offset, &mut buffer[..size as usize])
        });
        drop(active);
        match answered {
            Ok(Some(n)) => {
                self.node.metrics.finished(Operation::Read, start);
                return READ_BUFFER.with_borrow(|buffer| reply.data(&buffer[..n]));
            }
            Ok(None) => {}
            Err(e) => return reply.error(errno(e)),
        }
        let node = Arc::clone(&self.node);
        self.spawn_waiting(
            Operation::Read,
            req,
            async move { node.read(&handle, offset, size as usize).await },
            move |r| match r {
                Ok(bytes) => reply.data(&bytes),
                Err(e) => reply.error(errno(e)),
            },
        );
    }

    fn write(
        &self,
        req: &Request,
        _i: INodeNo,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        flags: OpenFlags,
        owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let handle = handle!(self, fh, reply);
        let owner = owner.map(|o| o.0);
        locks_hold!(self, handle, owner, reply);
        let start = Instant::now();
        let active = (self.node.activity.enter(), self.node.watchdog.in_loop());
        // Pages of a mapping carry their own offset whatever the open flags say.
        let mapped = write_flags.contains(WriteFlags::FUSE_WRITE_CACHE);
        let append = flags.0 & libc::O_APPEND != 0 && !mapped;
        let caller = caller(req);
        let placed = if append && caller.again { self.placed(caller.number) } else { None };
        let (offset, append) = placed.map_or((offset, append), |at| (at, false));
        let kill_priv = write_flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID);
        let write = || self.node.write_local(&handle, offset, append, kill_priv, data);
        let written = if append { on_behalf_of_now(caller, write) } else { write() };
        drop(active);
        match written {
            Ok(Written::Done(n)) => {
                // The node can have been silent in between.
                locks_hold!(self, handle, owner, reply);
                self.node.metrics.finished(Operation::Write, start);
                reply.written(n);
            }
            Ok(Written::Then(rest)) => {
                let node = Arc::clone(&self.node);
                self.spawn_once(
                    Operation::Write,
                    req,
                    async move {
                        let n = node.finish_write(&handle, rest).await?;
                        node.locks_hold(&handle, owner).map(|()| n)
                    },
                    move |r| match r {
                        Ok(n) => reply.written(n),
                        Err(e) => reply.error(errno(e)),
                    },
                );
            }
            Err(e) => reply.error(errno(e)),
        }
    }

    fn flush(
        &self,
        _req: &Request,
        _i: INodeNo,
        fh: FileHandle,
        owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        if self.node.handles.content(fh.0).is_some() {
            return reply.ok();
        }
        let handle = handle!(self, fh, reply);
        if self.node.nothing_to_do_at_close(&handle, owner.0) {
            return reply.ok();
        }
        let node = Arc::clone(&self.node);
        self.spawn(
            Operation::Flush,
            async move { node.close(&handle, owner.0).await },
            empty(reply),
        );
    }

    fn release(
        &self,
        _req: &Request,
        _i: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        let Some(handle) = self.node.handles.remove_file(fh.0) else {
            self.node.handles.remove_content(fh.0);
            return reply.ok();
        };
        // Nobody waits for a release, so it is answered when it is done: an open that follows
        // an unlink then finds the last handle really gone.
        let node = Arc::clone(&self.node);
        self.spawn(
            Operation::Release,
            async move {
                node.release(&handle).await;
                node.handles.forget(fh.0);
                Ok(())
            },
            empty(reply),
        );
    }

    fn fsync(
        &self,
        _req: &Request,
        _i: INodeNo,
        fh: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        let handle = handle!(self, fh, reply);
        locks_hold!(self, handle, None, reply);
        let node = Arc::clone(&self.node);
        self.spawn(Operation::Fsync, async move { node.fsync(&handle).await }, empty(reply));
    }

    fn opendir(&self, _req: &Request, i: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let handle = DirHandle::new(ino(i));
        reply.opened(FileHandle(self.node.handles.insert_dir(handle)), FopenFlags::empty());
    }

    fn readdir(
        &self,
        req: &Request,
        i: INodeNo,
        fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let Some(dir) = self.node.handles.dir_or_again(fh.0, ino(i)) else {
            return reply.error(errno(Errno::EBADF));
        };
        let node = Arc::clone(&self.node);
        let work = async move { node.list(&dir, offset).await };
        self.spawn_waiting(Operation::ReadDir, req, work, move |r| match r {
            Ok(items) => {
                for item in behind(&items, offset) {
                    let name = OsStr::from_bytes(&item.name);
                    if reply.add(
                        INodeNo(item.attr.ino.0),
                        item.position,
                        kind(item.attr.kind),
                        name,
                    ) {
                        break;
                    }
                }
                reply.ok();
            }
            Err(e) => reply.error(errno(e)),
        });
    }

    fn readdirplus(
        &self,
        req: &Request,
        i: INodeNo,
        fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let Some(dir) = self.node.handles.dir_or_again(fh.0, ino(i)) else {
            return reply.error(errno(Errno::EBADF));
        };
        let (node, places, parent) = (Arc::clone(&self.node), Arc::clone(&self.places), ino(i));
        let lister = Arc::clone(&node);
        let work = async move { lister.list(&dir, offset).await };
        self.spawn_waiting(Operation::ReadDir, req, work, move |r| match r {
            Ok(items) => {
                for item in behind(&items, offset) {
                    let name = OsStr::from_bytes(&item.name);
                    note_listed(&node, &places, parent, &item.name, &item.attr);
                    if reply.add(
                        INodeNo(item.attr.ino.0),
                        item.position,
                        name,
                        &TTL,
                        &attr(&item.attr),
                        Generation(0),
                    ) {
                        break;
                    }
                }
                reply.ok();
            }
            Err(e) => reply.error(errno(e)),
        });
    }

    fn releasedir(
        &self,
        _req: &Request,
        _i: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        reply: ReplyEmpty,
    ) {
        self.node.handles.remove_dir(fh.0);
        reply.ok();
    }

    fn fsyncdir(
        &self,
        _req: &Request,
        _i: INodeNo,
        _fh: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        let node = Arc::clone(&self.node);
        self.spawn(Operation::Fsync, async move { node.sync_names().await }, empty(reply));
    }

    fn statfs(&self, _req: &Request, _i: INodeNo, reply: ReplyStatfs) {
        let node = Arc::clone(&self.node);
        self.spawn(Operation::StatFs, async move { node.statfs().await }, move |r| match r {
            Ok(s) => reply.statfs(
                s.blocks, s.bfree, s.bavail, s.files, s.ffree, s.bsize, s.namelen, s.frsize,
            ),
            Err(e) => reply.error(errno(e)),
        });
    }

    fn setxattr(
        &self,
        req: &Request,
        i: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        let node = Arc::clone(&self.node);
        let i = inode_to_change!(i, reply);
        let (name, value) = (name.as_bytes().to_vec(), value.to_vec());
        self.spawn_once(
            Operation::Xattr,
            req,
            async move { node.set_xattr(i, name, value, flags as u32).await },
            empty(reply),
        );
    }

    fn getxattr(&self, _req: &Request, i: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let node = Arc::clone(&self.node);
        let (i, name) = (ino(i), name.as_bytes().to_vec());
        self.spawn(
            Operation::Xattr,
            async move { node.get_xattr(i, name).await },
            xattr(reply, size),
        );
    }

    fn listxattr(&self, _req: &Request, i: INodeNo, size: u32, reply: ReplyXattr) {
        let node = Arc::clone(&self.node);
        let i = ino(i);
        self.spawn(Operation::Xattr, async move { node.list_xattr(i).await }, xattr(reply, size));
    }

    fn removexattr(&self, req: &Request, i: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let node = Arc::clone(&self.node);
        let (i, name) = (inode_to_change!(i, reply), name.as_bytes().to_vec());
        self.spawn_once(
            Operation::Xattr,
            req,
            async move { node.remove_xattr(i, name).await },
            empty(reply),
        );
    }

    fn access(&self, _req: &Request, _i: INodeNo, _mask: AccessFlags, reply: ReplyEmpty) {
        // With default_permissions the kernel checks and never asks.
        reply.error(errno(Errno::ENOSYS));
    }

    fn getlk(
        &self,
        _req: &Request,
        i: INodeNo,
        _fh: FileHandle,
        owner: LockOwner,
        start: u64,
        end: u64,
        typ: i32,
        pid: u32,
        flock: bool,
        reply: ReplyLock,
    ) {
        let lock = LockRequest { ino: ino(i), owner: owner.0, pid, start, end, typ, flock };
        let node = Arc::clone(&self.node);
        self.spawn(Operation::Lock, async move { node.get_lock(lock).await }, move |r| match r {
            Ok(l) => reply.locked(l.start, l.end, l.typ, l.pid),
            Err(e) => reply.error(errno(e)),
        });
    }

    fn setlk(
        &self,
        req: &Request,
        i: INodeNo,
        fh: FileHandle,
        owner: LockOwner,
        start: u64,
        end: u64,
        typ: i32,
        pid: u32,
        sleep: bool,
        flock: bool,
        reply: ReplyEmpty,
    ) {
        let handle = handle!(self, fh, reply);
        let lock = LockRequest { ino: ino(i), owner: owner.0, pid, start, end, typ, flock };
        let node = Arc::clone(&self.node);
        let unique = req.unique().0;
        let places = Arc::clone(&self.places);
        let work = async move {
            node.set_lock(&handle, lock, sleep, unique).await?;
            // Past the daemon the kernel has no pages of its own.
            if typ != libc::F_UNLCK && handle.file.state.read().passing.is_none() {
                places.refresh(handle.file.ino).await;
            }
            Ok(())
        };
        self.spawn(Operation::Lock, work, empty(reply));
    }

    fn ioctl(
        &self,
        _req: &Request,
        _i: INodeNo,
        _fh: FileHandle,
        _flags: IoctlFlags,
        _cmd: u32,
        _in_data: &[u8],
        _out_size: u32,
        reply: ReplyIoctl,
    ) {
        // Nothing is wrong with asking: isatty(3) does, at every open of many languages.
        reply.error(fuser::Errno::ENOTTY);
    }

    fn fallocate(
        &self,
        _req: &Request,
        _i: INodeNo,
        fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let handle = handle!(self, fh, reply);
        locks_hold!(self, handle, None, reply);
        let node = Arc::clone(&self.node);
        self.spawn(
            Operation::Fallocate,
            async move { node.fallocate(&handle, offset, length, mode).await },
            empty(reply),
        );
    }

    fn lseek(
        &self,
        _req: &Request,
        _i: INodeNo,
        fh: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let handle = handle!(self, fh, reply);
        let node = Arc::clone(&self.node);
        self.spawn(
            Operation::Seek,
            async move { node.seek(&handle, offset, whence).await },
            move |r| match r {
                Ok(at) => reply.offset(at),
                Err(e) => reply.error(errno(e)),
            },
        );
    }

    fn copy_file_range(
        &self,
        _req: &Request,
        _ino_in: INodeNo,
        fh_in: FileHandle,
        offset_in: u64,
        _ino_out: INodeNo,
        fh_out: FileHandle,
        offset_out: u64,
        len: u64,
        _flags: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        let from = handle!(self, fh_in, reply);
        let to = handle!(self, fh_out, reply);
        locks_hold!(self, from, None, reply);
        locks_hold!(self, to, None, reply);
        let node = Arc::clone(&self.node);
        self.spawn(
            Operation::Copy,
            async move { node.copy_range(&from, offset_in, &to, offset_out, len).await },
            move |r| match r {
                Ok(n) => reply.written(n),
                Err(e) => reply.error(errno(e)),
            },
        );
    }
}
