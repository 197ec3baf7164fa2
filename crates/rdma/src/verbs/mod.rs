//! Verbs and the connection manager as types that own what they stand for. All that is unsafe is
//! here.
//!
//! * [`calls`]: the libraries, loaded when they are needed.
//! * [`device`]: a device's domain, memory, queues.
//! * [`cm`]: ids of the connection manager, queue pairs, and what happens to them.

mod calls;
pub(crate) mod cm;
pub(crate) mod device;

pub(crate) use cm::{Events, Happened, Id, Post, QueuePair, Tag};
pub(crate) use device::{
    Arena, Block, Completion, Completions, Domain, Failure, Landing, Receives, Work,
};

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Reading events never waits: whoever waits for the descriptor does.
fn set_nonblocking(of: &impl AsFd) -> io::Result<()> {
    let descriptor = of.as_fd().as_raw_fd();
    // SAFETY: changes flags of a descriptor that is borrowed.
    let flags = unsafe { libc::fcntl(descriptor, libc::F_GETFL) };
    // SAFETY: as above.
    if flags < 0 || unsafe { libc::fcntl(descriptor, libc::F_SETFL, flags | libc::O_NONBLOCK) } < 0
    {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// What has a descriptor that is its own for as long as it lives.
pub(crate) trait Watchable: AsFd + AsRawFd {}

impl Watchable for Events {}
impl Watchable for Completions {}

/// Has the runtime tell when there are events.
pub(crate) fn watch<T: Watchable>(what: &Arc<T>) -> io::Result<AsyncFd<Arc<T>>> {
    // SAFETY: the descriptor stays open, and the same one, for as long as the runtime has its owner.
    unsafe { AsyncFd::register_with_interest(Arc::clone(what), Interest::READABLE) }
        .map_err(Into::into)
}
