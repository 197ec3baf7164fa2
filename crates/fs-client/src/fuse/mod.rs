//! The FUSE adapter: takes requests, calls, replies. It decides nothing. Operations are here by
//! family; what they share is in this file.
//!
//! Event loops answer what is local; whatever may wait goes to the runtime with its reply.

mod answers;
mod attributes;
mod convert;
mod data;
mod directories;
mod handles;
mod library;
mod locks;
mod mount;
mod names;
mod passing;
mod places;
mod xattrs;

pub use ebb_fuse::unmount;
pub use mount::{Moment, MountError, Mounted, mount};

use crate::awaited;
use crate::handles::OpenFile;
use crate::metrics::Operation;
use crate::node::Node;
use convert::{errno, ino};
use ebb_fuse::{
    Call, FileHandle, Filesystem, FopenFlags, Handshake, Head, INodeNo, InitFlags, Reply, RequestId,
};
use ebb_handover::AGAIN;
use ebb_meta_client::{Caller, on_behalf_of};
use ebb_types::Errno;
use places::Places;
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::{Duration, Instant};

/// Attributes and names are asked for every time: what a node sees is decided by the model and
/// the metadata service alone.
const TTL: Duration = Duration::ZERO;

/// Largest write and read of one request.
const REQUEST_BYTES_MAX: u32 = 1 << 20;

/// The kernel's default of 12 starves anything that waits for a network.
const BACKGROUND_REQUESTS_MAX: u16 = 128;

/// The file system as the session calls it.
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
        head: &Head,
        work: impl Future<Output = Result<T, Errno>> + Send + 'static,
        reply: impl FnOnce(Result<T, Errno>) + Send + 'static,
    ) {
        let node = Arc::clone(&self.node);
        let unique = head.unique.0;
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
        head: &Head,
        work: impl Future<Output = Result<T, Errno>> + Send + 'static,
        reply: impl FnOnce(Result<T, Errno>) + Send + 'static,
    ) {
        self.spawn(operation, on_behalf_of(caller(head), work), reply);
    }

    fn resends(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.resends)
    }

    fn places(&self) -> Arc<Places> {
        Arc::clone(&self.places)
    }

    fn handle(&self, handle: FileHandle) -> Result<Arc<OpenFile>, Errno> {
        self.node.handles.file(handle.0).ok_or(Errno::EBADF)
    }

    /// The same, unless what this handle or `owner` had locked may be others' by now.
    fn handle_with_locks(
        &self,
        handle: FileHandle,
        owner: Option<u64>,
    ) -> Result<Arc<OpenFile>, Errno> {
        let open = self.handle(handle)?;
        self.node.locks_hold(&open, owner)?;
        Ok(open)
    }
}

/// Which call of an application it is.
fn caller(head: &Head) -> Caller {
    let unique = head.unique.0;
    Caller { number: unique & !AGAIN, again: unique & AGAIN != 0 }
}

/// What was checked, and the reply that still waits; an error is answered at once.
fn checked<T, R: Reply>(result: Result<T, Errno>, reply: R) -> Option<(T, R)> {
    match result {
        Ok(value) => Some((value, reply)),
        Err(e) => {
            reply.error(errno(e));
            None
        }
    }
}

/// What is of use whatever a mount does: asks the kernel for it. True when requests that a dead daemon
/// had are sent again.
pub fn ask_kernel(kernel: &mut Handshake) -> bool {
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
        if !kernel.ask_for(flag) {
            tracing::info!(?flag, "this kernel does not have it");
        }
    }
    kernel.set_max_write(REQUEST_BYTES_MAX);
    kernel.set_max_background(BACKGROUND_REQUESTS_MAX);
    kernel.ask_for(InitFlags::FUSE_HAS_RESEND)
}

/// Data always travels through the daemon, and mappings are allowed beside that.
pub fn open_flags() -> FopenFlags {
    FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES
}

impl Filesystem for Adapter {
    fn init(&mut self, kernel: &mut Handshake) -> io::Result<()> {
        passing::negotiate(&self.node, kernel);
        self.resends.store(ask_kernel(kernel), Release);
        Ok(())
    }

    fn refuses(&self) -> Option<ebb_fuse::Errno> {
        let out = self.node.is_out.load(Acquire) || self.node.is_ending.load(Acquire);
        out.then(|| errno(Errno::ENOTCONN))
    }

    fn interrupt(&self, unique: RequestId) {
        self.node.interrupts.interrupt(unique.0);
    }

    fn forget(&self, inode: INodeNo, lookups: u64) {
        if awaited::is_awaited(ino(inode)) {
            return self.node.awaited.forget(ino(inode), lookups);
        }
        self.places.forget(ino(inode));
        self.node.gone.forget(ino(inode));
        self.node.forget(ino(inode));
    }

    fn serve(&self, head: &Head, call: Call<'_>) {
        match call {
            Call::Lookup(asked, reply) => self.lookup(head, &asked, reply),
            Call::MkNod(asked, reply) => self.mknod(head, &asked, reply),
            Call::MkDir(asked, reply) => self.mkdir(head, &asked, reply),
            Call::SymLink(asked, reply) => self.symlink(head, &asked, reply),
            Call::Unlink(asked, reply) => self.remove(head, &asked, false, reply),
            Call::RmDir(asked, reply) => self.remove(head, &asked, true, reply),
            Call::Rename(asked, reply) => self.rename(head, &asked, reply),
            Call::Link(asked, reply) => self.link(head, &asked, reply),
            Call::GetAttr(asked, reply) => self.getattr(head, &asked, reply),
            Call::SetAttr(asked, reply) => self.setattr(head, &asked, reply),
            Call::ReadLink(asked, reply) => self.readlink(&asked, reply),
            Call::StatFs(_, reply) => self.statfs(reply),
            // With default_permissions the kernel checks and never asks.
            Call::Access(_, reply) => reply.error(errno(Errno::ENOSYS)),
            Call::Open(asked, reply) => self.open(head, &asked, reply),
            Call::Create(asked, reply) => self.create(head, &asked, reply),
            Call::Flush(asked, reply) => self.flush(head, &asked, reply),
            Call::Release(asked, reply) => self.release(&asked, reply),
            Call::Read(asked, reply) => self.read(head, &asked, reply),
            Call::Write(asked, reply) => self.write(head, &asked, reply),
            Call::Fsync(asked, reply) => self.fsync(&asked, reply),
            Call::Fallocate(asked, reply) => self.fallocate(&asked, reply),
            Call::Lseek(asked, reply) => self.lseek(&asked, reply),
            Call::CopyFileRange(asked, reply) => self.copy_file_range(&asked, reply),
            Call::Ioctl(asked, reply) => self.ioctl(head, &asked, reply),
            Call::OpenDir(asked, reply) => self.opendir(&asked, reply),
            Call::ReadDir(asked, reply) => self.readdir(head, &asked, reply),
            Call::ReadDirPlus(asked, reply) => self.readdirplus(head, &asked, reply),
            Call::ReleaseDir(asked, reply) => self.releasedir(&asked, reply),
            Call::FsyncDir(_, reply) => self.fsyncdir(reply),
            Call::SetXattr(asked, reply) => self.setxattr(head, &asked, reply),
            Call::GetXattr(asked, reply) => self.getxattr(&asked, reply),
            Call::ListXattr(asked, reply) => self.listxattr(&asked, reply),
            Call::RemoveXattr(asked, reply) => self.removexattr(head, &asked, reply),
            Call::GetLock(asked, reply) => self.getlk(&asked, reply),
            Call::SetLock(asked, reply) => self.setlk(head, &asked, reply),
        }
    }
}
