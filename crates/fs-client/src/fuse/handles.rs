//! Handles: opened, created, closed.

use super::answers::empty;
use super::convert::{errno, ino};
use super::names::name_to_change;
use super::{Adapter, caller, checked, passing};
use crate::awaited;
use crate::handles::OpenFile;
use crate::metrics::Operation;
use crate::ops::coupling::{self, NotOpened};
use crate::ops::names::MakeArgs;
use crate::passing::Opening;
use crate::virtual_files;
use ebb_fuse::{
    Create, FileHandle, Flush, FopenFlags, Head, Open, Release, ReplyCreate, ReplyEmpty, ReplyOpen,
};
use ebb_meta_client::on_behalf_of;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

impl Adapter {
    /// The handle that a daemon before this one gave to a request that comes again.
    fn given(&self, head: &Head) -> Option<(u64, Arc<OpenFile>)> {
        let caller = caller(head);
        if caller.again { self.node.handles.given(caller.number) } else { None }
    }

    pub(super) fn open(&self, head: &Head, asked: &Open, reply: ReplyOpen) {
        let (node, inode, flags) = (Arc::clone(&self.node), ino(asked.inode), asked.flags.0);
        if virtual_files::is_virtual(inode) {
            let work = async move { node.open_virtual(inode, flags).await };
            return self.spawn(Operation::Open, work, move |r| match r {
                Ok(fh) => reply.opened(FileHandle(fh), FopenFlags::FOPEN_DIRECT_IO, None),
                Err(e) => reply.error(errno(e)),
            });
        }
        let (uid, caller) = (head.uid, caller(head));
        if awaited::is_awaited(inode) {
            let waits =
                async move { reply.error(errno(coupling::open_awaited(&node, inode).await)) };
            self.node.runtime.spawn(on_behalf_of(caller, waits));
            return;
        }
        let given = self.given(head);
        let work = async move {
            let opened = match given {
                Some((fh, file)) => Ok(Opening { fh, path: file.path, id: None }),
                None => node.open_if_ready(inode, flags, uid, &reply).await,
            };
            Ok((opened, reply))
        };
        let node = Arc::clone(&self.node);
        self.spawn_once(Operation::Open, head, work, move |done| {
            let Ok((opened, reply)) = done else { return };
            let wait = match opened {
                Ok(opening) => return passing::answer_open(Ok(opening), reply),
                Err(NotOpened::Failed(e)) => return passing::answer_open(Err(e), reply),
                Err(NotOpened::Awaits(wait)) => wait,
            };
            // Who waits for another program does nothing, and nothing is stuck.
            let runtime = node.runtime.clone();
            runtime.spawn(on_behalf_of(caller, async move {
                let again = || node.open_if_ready(inode, flags, uid, &reply);
                let opened = coupling::when_ready(&node, inode, flags, wait, again).await;
                passing::answer_open(opened, reply);
            }));
        });
    }

    pub(super) fn create(&self, head: &Head, asked: &Create<'_>, reply: ReplyCreate) {
        let name = name_to_change(asked.parent, asked.name);
        let Some((name, reply)) = checked(name, reply) else { return };
        let args = MakeArgs {
            mode: (asked.mode & 0o7777) | libc::S_IFREG,
            uid: head.uid,
            gid: head.gid,
            rdev: 0,
            target: Vec::new(),
        };
        let (node, given) = (Arc::clone(&self.node), self.given(head));
        let (parent, flags) = (ino(asked.parent), asked.flags.0);
        let work = async move {
            let created = match given {
                Some((fh, open)) => {
                    let opening = Opening { fh, path: open.path, id: None };
                    node.getattr(open.file.ino).await.map(|a| (a, opening))
                }
                None => node.create(parent, &name, args, flags, &reply).await,
            };
            Ok((created, reply))
        };
        self.spawn_once(Operation::Create, head, work, passing::answer_create);
    }

    pub(super) fn flush(&self, head: &Head, asked: &Flush, reply: ReplyEmpty) {
        if self.node.handles.content(asked.handle.0).is_some() {
            return reply.ok();
        }
        let owner = asked.owner.0;
        let Some((handle, reply)) = checked(self.handle(asked.handle), reply) else { return };
        if handle.couple != 0 {
            // While it waits for this answer it is still there to be looked at.
            match awaited::is_killed(head.pid) {
                true => handle.killed.store(true, Relaxed),
                false => handle.closed_well.store(true, Relaxed),
            }
        }
        if self.node.nothing_to_do_at_close(&handle, owner) {
            return reply.ok();
        }
        let node = Arc::clone(&self.node);
        let work = async move { node.close(&handle, owner).await };
        self.spawn(Operation::Flush, work, empty(reply));
    }

    pub(super) fn release(&self, asked: &Release, reply: ReplyEmpty) {
        let fh = asked.handle.0;
        let Some(handle) = self.node.handles.remove_file(fh) else {
            self.node.handles.remove_content(fh);
            return reply.ok();
        };
        // Nobody waits for a release, so it is answered when it is done: an open that follows
        // an unlink then finds the last handle really gone.
        let node = Arc::clone(&self.node);
        let work = async move {
            node.release(&handle).await;
            node.handles.forget(fh);
            if handle.mappable.is_some() {
                let ino = handle.file.ino;
                drop(handle);
                node.nobody_tells_of(ino);
            }
            Ok(())
        };
        self.spawn(Operation::Release, work, empty(reply));
    }
}
