//! Passthrough as FUSE speaks of it: what is negotiated at the start, whether this machine can do
//! it, and the answers to opens.

use super::convert::{attr, errno};
use super::{TTL, open_flags};
use crate::cache;
use crate::config::IoMode;
use crate::node::Node;
use crate::passing::{Door, Opening, obstacle_of};
use ebb_consistency::{IoPath, Reason};
use ebb_fuse::{
    BackingId, Device, FileHandle, FopenFlags, Handshake, InitFlags, ReplyCreate, ReplyOpen,
};
use ebb_types::{Attr, Errno};
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// The cache may be on an overlay file system.
const STACK_DEPTH: u32 = 2;

impl Door for ReplyOpen {
    fn register(&self, file: BorrowedFd<'_>) -> io::Result<BackingId> {
        self.open_backing(file)
    }
}

impl Door for ReplyCreate {
    fn register(&self, file: BorrowedFd<'_>) -> io::Result<BackingId> {
        self.open_backing(file)
    }
}

/// What the user has chosen that is in the way.
fn chosen(node: &Node) -> Option<Reason> {
    if node.config.io_path == IoMode::Daemon {
        Some(Reason::SwitchedOff)
    } else {
        (node.config.replicas > 1).then_some(Reason::Copies)
    }
}

/// Asks the kernel for passthrough when a mount is made.
pub fn negotiate(node: &Node, kernel: &mut Handshake) {
    if let Some(reason) = chosen(node) {
        return node.paths.set_obstacle(Some(reason));
    }
    if !kernel.ask_for(InitFlags::FUSE_PASSTHROUGH) {
        return tracing::info!("this kernel has no FUSE passthrough");
    }
    kernel.set_max_stack_depth(STACK_DEPTH);
}

/// Tries on a mount that answers, with its device, whether files can be passed through.
pub fn probe(node: &Node, device: &Arc<Device>) {
    if chosen(node).is_some() {
        return;
    }
    let obstacle = try_it(node, device).err();
    if let Some(reason) = obstacle {
        tracing::info!(%reason, "files are not passed through");
    }
    if obstacle.is_none() {
        node.paths.telling.start(node.config.tracker, &node.config.cache);
        leave_times_alone(node);
    }
    node.paths.set_obstacle(obstacle);
}

/// Where the kernel tells of mappings nobody looks at the times that show them otherwise.
fn leave_times_alone(node: &Node) {
    if node.paths.telling.state().is_err() {
        return;
    }
    match node.cache.leave_times_alone() {
        Ok(()) => node.paths.set_access_times(false),
        Err(e) => tracing::debug!(error = %e, "reads past the daemon keep access times"),
    }
}

fn try_it(node: &Node, device: &Arc<Device>) -> Result<(), Reason> {
    let file = node.cache.nameless().map_err(|_| Reason::CacheFs)?;
    drop(device.open_backing(&file).map_err(|e| obstacle_of(&e))?);
    node.paths.set_fine_times(cache::has_fine_times(&file).map_err(|_| Reason::CacheFs)?);
    let times = cache::has_access_times(&file).unwrap_or(false);
    node.paths.set_access_times(times);
    // A lease that is broken while it is held sends this signal, which would end the process.
    // SAFETY: no handler is installed, the signal is only ignored.
    unsafe { libc::signal(libc::SIGIO, libc::SIG_IGN) };
    let read_only = cache::reopened_for_reading(&file).map_err(|_| Reason::CacheFs)?;
    // The file itself is open for writing, and that must show.
    match cache::has_no_writers(&read_only) {
        Ok(false) => Ok(()),
        _ => Err(Reason::CacheFs),
    }
}

/// Data of a handle beside passed-through ones travels through the daemon.
fn flags(path: IoPath) -> FopenFlags {
    match path {
        IoPath::Read | IoPath::Write => FopenFlags::empty(),
        IoPath::Daemon(_) | IoPath::DaemonBeside(_) => open_flags(),
    }
}

/// The end of an open.
pub fn answer_open(opened: Result<Opening, Errno>, reply: ReplyOpen) {
    match opened {
        Ok(Opening { fh, path, id }) => {
            reply.opened(FileHandle(fh), flags(path), id.as_deref());
        }
        Err(e) => reply.error(errno(e)),
    }
}

/// The end of a create.
pub fn answer_create(done: Result<(Result<(Attr, Opening), Errno>, ReplyCreate), Errno>) {
    let Ok((created, reply)) = done else { return };
    match created {
        Ok((a, Opening { fh, path, id })) => {
            reply.created(TTL, &attr(&a), FileHandle(fh), flags(path), id.as_deref());
        }
        Err(e) => reply.error(errno(e)),
    }
}
