//! Attributes of inodes, what links point at, and how full the file system is.

use super::answers::{attributes, data};
use super::convert::{self, attr, errno, ino};
use super::names::inode_to_change;
use super::{Adapter, TTL, checked};
use crate::awaited;
use crate::metrics::Operation;
use crate::virtual_files;
use ebb_fuse::{
    GetAttr, Head, Inode, ReplyAttr, ReplyData, ReplyStatfs, SetAttr as Asked, Statistics,
};
use ebb_meta_client::SetAttr;
use std::sync::Arc;
use std::time::Instant;

impl Adapter {
    pub(super) fn getattr(&self, head: &Head, asked: &GetAttr, reply: ReplyAttr) {
        let inode = ino(asked.inode);
        if let Some(found) = virtual_files::getattr(inode) {
            return reply.attr(TTL, &attr(&found));
        }
        if awaited::is_awaited(inode) {
            return reply.attr(TTL, &attr(&awaited::attr(inode)));
        }
        let start = Instant::now();
        if let Some(found) = self.node.leased_attr(inode) {
            self.node.metrics.finished(Operation::GetAttr, start);
            return reply.attr(TTL, &attr(&found));
        }
        let node = Arc::clone(&self.node);
        let work = async move { node.getattr(inode).await };
        self.spawn_waiting(Operation::GetAttr, head, work, attributes(reply));
    }

    pub(super) fn setattr(&self, head: &Head, asked: &Asked, reply: ReplyAttr) {
        let args = SetAttr {
            mode: asked.mode,
            uid: asked.uid,
            gid: asked.gid,
            size: asked.size,
            atime: asked.atime.map(convert::time),
            mtime: asked.mtime.map(convert::time),
            // Whoever has CAP_FSETID keeps them when the size changes.
            kill_priv: asked.size.is_some() && head.uid != 0,
            only_grow: false,
        };
        let Some((inode, reply)) = checked(inode_to_change(asked.inode), reply) else { return };
        let node = Arc::clone(&self.node);
        let work = async move { node.setattr(inode, args).await };
        self.spawn(Operation::SetAttr, work, attributes(reply));
    }

    pub(super) fn readlink(&self, asked: &Inode, reply: ReplyData) {
        let (node, inode) = (Arc::clone(&self.node), ino(asked.inode));
        let work = async move { node.readlink(inode).await };
        self.spawn(Operation::ReadLink, work, data(reply));
    }

    pub(super) fn statfs(&self, reply: ReplyStatfs) {
        let node = Arc::clone(&self.node);
        let work = async move { node.statfs().await };
        self.spawn(Operation::StatFs, work, move |r| match r {
            Ok(s) => reply.statfs(&Statistics {
                blocks: s.blocks,
                bfree: s.bfree,
                bavail: s.bavail,
                files: s.files,
                ffree: s.ffree,
                bsize: s.bsize,
                namelen: s.namelen,
                frsize: s.frsize,
            }),
            Err(e) => reply.error(errno(e)),
        });
    }
}
