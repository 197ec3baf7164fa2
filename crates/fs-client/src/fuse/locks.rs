//! Locks of fcntl(2) and flock(2).

use super::answers::empty;
use super::convert::{errno, ino};
use super::{Adapter, checked};
use crate::metrics::Operation;
use crate::ops::locks::LockRequest;
use ebb_fuse::{Head, Lock, ReplyEmpty, ReplyLock};
use std::sync::Arc;

fn request(asked: &Lock) -> LockRequest {
    LockRequest {
        ino: ino(asked.inode),
        owner: asked.owner.0,
        pid: asked.pid,
        start: asked.start,
        end: asked.end,
        typ: asked.kind,
        flock: asked.flock,
    }
}

impl Adapter {
    pub(super) fn getlk(&self, asked: &Lock, reply: ReplyLock) {
        let (node, lock) = (Arc::clone(&self.node), request(asked));
        self.spawn(Operation::Lock, async move { node.get_lock(lock).await }, move |r| match r {
            Ok(l) => reply.locked(l.start, l.end, l.typ, l.pid),
            Err(e) => reply.error(errno(e)),
        });
    }

    pub(super) fn setlk(&self, head: &Head, asked: &Lock, reply: ReplyEmpty) {
        let Some((handle, reply)) = checked(self.handle(asked.handle), reply) else { return };
        let (lock, kind, waits) = (request(asked), asked.kind, asked.waits);
        let (node, unique) = (Arc::clone(&self.node), head.unique.0);
        let work = async move {
            node.set_lock(&handle, lock, waits, unique).await?;
            // Past the daemon the kernel has no pages of its own.
            if kind != libc::F_UNLCK && handle.file.state.read().passing.is_none() {
                node.locked_anew(&handle.file).await;
            }
            Ok(())
        };
        self.spawn(Operation::Lock, work, empty(reply));
    }
}
