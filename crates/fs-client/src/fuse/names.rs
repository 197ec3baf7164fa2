//! Names: looked up, made, removed, renamed.

use super::answers::{empty, entry};
use super::convert::{attr, ino};
use super::{Adapter, TTL, checked};
use crate::metrics::Operation;
use crate::ops::coupling::{self, Looked};
use crate::ops::names::MakeArgs;
use crate::virtual_files;
use ebb_fuse::{Head, INodeNo, Link, MkDir, MkNod, Named, Rename, ReplyEmpty, ReplyEntry, SymLink};
use ebb_types::{Attr, Errno, FileKind, Ino, Name};
use std::sync::Arc;
use std::time::Instant;

/// A name that is to be made, changed or removed.
pub(super) fn name_to_change(parent: INodeNo, name: &[u8]) -> Result<Name, Errno> {
    virtual_files::may_change(ino(parent), name)?;
    Name::new(name)
}

/// An inode that is to be changed: none of `.ebb`.
pub(super) fn inode_to_change(inode: INodeNo) -> Result<Ino, Errno> {
    let inode = ino(inode);
    if virtual_files::is_virtual(inode) { Err(Errno::EPERM) } else { Ok(inode) }
}

impl Adapter {
    pub(super) fn lookup(&self, head: &Head, asked: &Named<'_>, reply: ReplyEntry) {
        let parent = ino(asked.parent);
        if let Some(found) = virtual_files::lookup(parent, asked.name) {
            return reply.entry(TTL, &attr(&found));
        }
        if virtual_files::is_virtual(parent) {
            return self.lookup_handle(asked.name, reply);
        }
        let Some((name, reply)) = checked(Name::new(asked.name), reply) else { return };
        let start = Instant::now();
        let known = self.node.known_name(parent, &name);
        // What is another place of a directory must be told to the kernel first.
        let stays =
            |a: &Attr| a.kind != FileKind::Directory || self.places.is_at(a.ino, parent, &name);
        if let Some(known) = known.filter(|k| k.as_ref().map_or(true, stays)) {
            self.node.metrics.finished(Operation::Lookup, start);
            return entry(reply)(known);
        }
        let (node, places) = (Arc::clone(&self.node), Arc::clone(&self.places));
        let thread = head.pid;
        let work = async move {
            let found = match node.look(parent, &name).await? {
                Looked::There(found) => found,
                Looked::Missing => return Err(Errno::ENOENT),
                Looked::Awaited(wait) => {
                    return coupling::await_name(&node, parent, name, wait, thread).await;
                }
            };
            if found.kind == FileKind::Directory {
                node.gone.saw(&found);
                places.found(found.ino, parent, &name).await;
            }
            Ok(found)
        };
        self.spawn(Operation::Lookup, work, entry(reply));
    }

    /// The file of a handle, which has a name in `.ebb` for who asks for it.
    fn lookup_handle(&self, name: &[u8], reply: ReplyEntry) {
        let ino = self.node.referred(name);
        let Some((ino, reply)) = checked(ino, reply) else { return };
        let node = Arc::clone(&self.node);
        let work = async move {
            match node.getattr(ino).await {
                Ok(found) if found.kind == FileKind::Regular => Ok(found),
                Ok(_) => Err(Errno::ESTALE),
                Err(Errno::ENOENT) => Err(Errno::ESTALE),
                Err(e) => Err(e),
            }
        };
        self.spawn(Operation::Lookup, work, entry(reply));
    }

    pub(super) fn mknod(&self, head: &Head, asked: &MkNod<'_>, reply: ReplyEntry) {
        // The kernel has applied the umask (FUSE_DONT_MASK is not asked for).
        let args = MakeArgs {
            mode: asked.mode,
            uid: head.uid,
            gid: head.gid,
            rdev: asked.rdev,
            target: Vec::new(),
        };
        self.make(head, asked.parent, asked.name, args, reply);
    }

    pub(super) fn symlink(&self, head: &Head, asked: &SymLink<'_>, reply: ReplyEntry) {
        let args = MakeArgs {
            mode: libc::S_IFLNK | 0o777,
            uid: head.uid,
            gid: head.gid,
            rdev: 0,
            target: asked.target.to_vec(),
        };
        self.make(head, asked.parent, asked.name, args, reply);
    }

    fn make(&self, head: &Head, parent: INodeNo, name: &[u8], args: MakeArgs, reply: ReplyEntry) {
        let Some((name, reply)) = checked(name_to_change(parent, name), reply) else { return };
        let (node, parent) = (Arc::clone(&self.node), ino(parent));
        let work = async move { node.make(parent, &name, args).await };
        self.spawn_once(Operation::Make, head, work, entry(reply));
    }

    pub(super) fn mkdir(&self, head: &Head, asked: &MkDir<'_>, reply: ReplyEntry) {
        let name = name_to_change(asked.parent, asked.name);
        let Some((name, reply)) = checked(name, reply) else { return };
        let mode = (asked.mode & 0o7777) | libc::S_IFDIR;
        let args = MakeArgs { mode, uid: head.uid, gid: head.gid, rdev: 0, target: Vec::new() };
        let (node, places) = (Arc::clone(&self.node), Arc::clone(&self.places));
        let parent = ino(asked.parent);
        let work = async move {
            let made = node.make(parent, &name, args).await?;
            node.gone.saw(&made);
            places.note(made.ino, parent, &name);
            Ok(made)
        };
        self.spawn_once(Operation::Make, head, work, entry(reply));
    }

    pub(super) fn remove(&self, head: &Head, asked: &Named<'_>, dir: bool, reply: ReplyEmpty) {
        let name = name_to_change(asked.parent, asked.name);
        let Some((name, reply)) = checked(name, reply) else { return };
        let (node, parent) = (Arc::clone(&self.node), ino(asked.parent));
        let work = async move { node.unlink(parent, &name, dir).await };
        self.spawn_once(Operation::Unlink, head, work, empty(reply));
    }

    pub(super) fn rename(&self, head: &Head, asked: &Rename<'_>, reply: ReplyEmpty) {
        let names = name_to_change(asked.parent, asked.name)
            .and_then(|name| Ok((name, name_to_change(asked.new_parent, asked.new_name)?)));
        let Some(((name, new_name), reply)) = checked(names, reply) else { return };
        let (node, places) = (Arc::clone(&self.node), Arc::clone(&self.places));
        let (parent, new_parent) = (ino(asked.parent), ino(asked.new_parent));
        let flags = asked.flags.bits();
        let work = async move {
            node.rename(parent, &name, new_parent, &new_name, flags).await?;
            let exchange = flags & libc::RENAME_EXCHANGE != 0;
            places.renamed((parent, &name), (new_parent, &new_name), exchange);
            Ok(())
        };
        self.spawn_once(Operation::Rename, head, work, empty(reply));
    }

    pub(super) fn link(&self, head: &Head, asked: &Link<'_>, reply: ReplyEntry) {
        let checks = name_to_change(asked.new_parent, asked.new_name)
            .and_then(|name| Ok((name, inode_to_change(asked.inode)?)));
        let Some(((name, inode), reply)) = checked(checks, reply) else { return };
        let (node, new_parent) = (Arc::clone(&self.node), ino(asked.new_parent));
        let work = async move { node.link(inode, new_parent, &name).await };
        self.spawn_once(Operation::Link, head, work, entry(reply));
    }
}
