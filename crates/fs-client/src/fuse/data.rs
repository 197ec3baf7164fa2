//! Bytes of files. What is local is read and written here, in the event loop.

use super::answers::{data, empty, offset, written};
use super::convert::{errno, ino};
use super::{Adapter, caller, checked};
use crate::file::CachedFile;
use crate::kernel_pages::PageRead;
use crate::metrics::Operation;
use crate::ops::data::Written;
use crate::virtual_files;
use ebb_consistency::SyncEvent;
use ebb_fuse::{
    CopyFileRange, Fallocate, Fsync, Head, Lseek, Read, ReplyData, ReplyEmpty, ReplyLseek,
    ReplyWrite, Write, WriteFlags,
};
use ebb_meta_client::on_behalf_of_now;
use ebb_types::Errno;
use std::cell::RefCell;
use std::sync::Arc;
use std::time::Instant;

thread_local! {
    /// Local reads of an event loop go through this one buffer.
    static READ_BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// The bytes of a file of `.ebb` that a read asks for.
fn part(content: &[u8], offset: u64, size: u32) -> &[u8] {
    let start = (offset as usize).min(content.len());
    &content[start..(start + size as usize).min(content.len())]
}

impl Adapter {
    pub(super) fn read(&self, head: &Head, asked: &Read, reply: ReplyData) {
        if let Some(content) = self.node.handles.content(asked.handle.0) {
            return reply.data(part(&content, asked.offset, asked.size));
        }
        if virtual_files::is_virtual(ino(asked.inode)) {
            return self.read_anew(asked, reply);
        }
        let handle = self.handle_with_locks(asked.handle, asked.owner.map(|o| o.0));
        let Some((handle, reply)) = checked(handle, reply) else { return };
        let (offset, size) = (asked.offset, asked.size as usize);
        let start = Instant::now();
        // A program's read(2) names its owner; what fills pages has none.
        let fills = asked.owner.is_none();
        let filling = if fills { PageRead::begin(&self.node, &handle.file) } else { None };
        let active = (self.node.activity.enter(), self.node.watchdog.in_loop());
        let answered = READ_BUFFER.with_borrow_mut(|buffer| {
            buffer.resize(buffer.len().max(size), 0);
            self.node.read_local(&handle, offset, &mut buffer[..size])
        });
        drop(active);
        match answered {
            Ok(Some(n)) => {
                self.node.metrics.finished(Operation::Read, start);
                READ_BUFFER.with_borrow(|buffer| reply.data(&buffer[..n]));
                return drop(filling);
            }
            Ok(None) => {}
            Err(e) => return reply.error(errno(e)),
        }
        let node = Arc::clone(&self.node);
        let work = async move {
            let _filling = filling;
            node.read(&handle, offset, size).await
        };
        self.spawn_waiting(Operation::Read, head, work, data(reply));
    }

    /// A file of `.ebb` that a daemon before this one opened.
    fn read_anew(&self, asked: &Read, reply: ReplyData) {
        let (node, inode, fh) = (Arc::clone(&self.node), ino(asked.inode), asked.handle.0);
        let (offset, size) = (asked.offset, asked.size);
        let work = async move {
            let made = node.open_virtual(inode, libc::O_RDONLY).await?;
            let content = node.handles.content(made).ok_or(Errno::EIO)?;
            node.handles.rename_content(made, fh);
            Ok(content)
        };
        self.spawn(Operation::Read, work, move |r| match r {
            Ok(content) => reply.data(part(&content, offset, size)),
            Err(e) => reply.error(errno(e)),
        });
    }

    /// Where an append that comes again was put by a daemon before this one. EIO: it sent it to the
    /// node at which the file sits, and died before it was told what came of it.
    fn placed(&self, file: &CachedFile, request: u64) -> Result<Option<u64>, Errno> {
        let Some(placed) = self.node.placed.get().and_then(|all| all.get(&request)) else {
            return Ok(None);
        };
        if placed.is_sent_on() {
            tracing::error!(
                file = file.label(),
                "an append was under way to another node when the daemon ended: it may have been made, \
                 and is told as failed"
            );
            return Err(Errno::EIO);
        }
        Ok(Some(placed.range.start()))
    }

    pub(super) fn write(&self, head: &Head, asked: &Write<'_>, reply: ReplyWrite) {
        let owner = asked.owner.map(|o| o.0);
        let handle = self.handle_with_locks(asked.handle, owner);
        let Some((handle, reply)) = checked(handle, reply) else { return };
        let start = Instant::now();
        let active = (self.node.activity.enter(), self.node.watchdog.in_loop());
        // Pages of a mapping carry their own offset whatever the open flags say.
        let mapped = asked.write_flags.contains(WriteFlags::FUSE_WRITE_CACHE);
        let append = asked.flags.0 & libc::O_APPEND != 0 && !mapped;
        let caller = caller(head);
        let again = append && caller.again;
        let placed = if again { self.placed(&handle.file, caller.number) } else { Ok(None) };
        let Some((placed, reply)) = checked(placed, reply) else { return };
        let (offset, append) = placed.map_or((asked.offset, append), |at| (at, false));
        let kill_priv = asked.write_flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID);
        let write = || self.node.write_local(&handle, offset, append, kill_priv, asked.data);
        let done = if append { on_behalf_of_now(caller, write) } else { write() };
        drop(active);
        match done {
            // Whoever calls write(2) goes on with the rest, and is told then. Of pages that it writes
            // back the kernel takes any answer for all of them.
            Ok(begun) if mapped && !begun.is_all_of(asked.data) => {
                let (node, data) = (Arc::clone(&self.node), asked.data.to_vec());
                let work = async move {
                    let n = node.finish_pages(&handle, offset, &data, begun).await?;
                    node.locks_hold(&handle, owner).map(|()| n)
                };
                self.spawn_once(Operation::Write, head, work, written(reply));
            }
            Ok(Written::Done(n)) => {
                // The node can have been silent in between.
                let hold = self.node.locks_hold(&handle, owner);
                let Some(((), reply)) = checked(hold, reply) else { return };
                self.node.metrics.finished(Operation::Write, start);
                reply.written(n);
            }
            Ok(Written::Then(rest)) => {
                let node = Arc::clone(&self.node);
                let work = async move {
                    let n = node.finish_write(&handle, rest).await?;
                    node.locks_hold(&handle, owner).map(|()| n)
                };
                self.spawn_once(Operation::Write, head, work, written(reply));
            }
            Err(e) => reply.error(errno(e)),
        }
    }

    pub(super) fn fsync(&self, asked: &Fsync, reply: ReplyEmpty) {
        let handle = self.handle_with_locks(asked.handle, None);
        let Some((handle, reply)) = checked(handle, reply) else { return };
        let node = Arc::clone(&self.node);
        let work = async move {
            node.fsync(&handle).await?;
            node.drop_older_pages(&handle.file, SyncEvent::Fsync).await;
            Ok(())
        };
        self.spawn(Operation::Fsync, work, empty(reply));
    }

    pub(super) fn fallocate(&self, asked: &Fallocate, reply: ReplyEmpty) {
        let handle = self.handle_with_locks(asked.handle, None);
        let Some((handle, reply)) = checked(handle, reply) else { return };
        let node = Arc::clone(&self.node);
        let Fallocate { offset, length, mode, .. } = *asked;
        let work = async move { node.fallocate(&handle, offset, length, mode).await };
        self.spawn(Operation::Fallocate, work, empty(reply));
    }

    pub(super) fn lseek(&self, asked: &Lseek, reply: ReplyLseek) {
        let Some((handle, reply)) = checked(self.handle(asked.handle), reply) else { return };
        let node = Arc::clone(&self.node);
        let (from, whence) = (asked.offset, asked.whence);
        let work = async move { node.seek(&handle, from, whence).await };
        self.spawn(Operation::Seek, work, offset(reply));
    }

    pub(super) fn copy_file_range(&self, asked: &CopyFileRange, reply: ReplyWrite) {
        let handles = self
            .handle_with_locks(asked.from, None)
            .and_then(|from| Ok((from, self.handle_with_locks(asked.to, None)?)));
        let Some(((from, to), reply)) = checked(handles, reply) else { return };
        let node = Arc::clone(&self.node);
        let CopyFileRange { from_offset, to_offset, length, .. } = *asked;
        let work = async move { node.copy_range(&from, from_offset, &to, to_offset, length).await };
        self.spawn(Operation::Copy, work, written(reply));
    }
}
