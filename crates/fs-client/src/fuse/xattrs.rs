//! Extended attributes.

use super::answers::{empty, xattr};
use super::convert::ino;
use super::names::inode_to_change;
use super::{Adapter, checked};
use crate::metrics::Operation;
use ebb_fuse::{GetXattr, Head, ListXattr, RemoveXattr, ReplyEmpty, ReplyXattr, SetXattr};
use std::sync::Arc;

impl Adapter {
    pub(super) fn setxattr(&self, head: &Head, asked: &SetXattr<'_>, reply: ReplyEmpty) {
        let Some((inode, reply)) = checked(inode_to_change(asked.inode), reply) else { return };
        let node = Arc::clone(&self.node);
        let (name, value, flags) = (asked.name.to_vec(), asked.value.to_vec(), asked.flags);
        let work = async move { node.set_xattr(inode, name, value, flags).await };
        self.spawn_once(Operation::Xattr, head, work, empty(reply));
    }

    pub(super) fn getxattr(&self, asked: &GetXattr<'_>, reply: ReplyXattr) {
        let (node, inode, name) = (Arc::clone(&self.node), ino(asked.inode), asked.name.to_vec());
        let work = async move { node.get_xattr(inode, name).await };
        self.spawn(Operation::Xattr, work, xattr(reply, asked.size));
    }

    pub(super) fn listxattr(&self, asked: &ListXattr, reply: ReplyXattr) {
        let (node, inode) = (Arc::clone(&self.node), ino(asked.inode));
        let work = async move { node.list_xattr(inode).await };
        self.spawn(Operation::Xattr, work, xattr(reply, asked.size));
    }

    pub(super) fn removexattr(&self, head: &Head, asked: &RemoveXattr<'_>, reply: ReplyEmpty) {
        let Some((inode, reply)) = checked(inode_to_change(asked.inode), reply) else { return };
        let (node, name) = (Arc::clone(&self.node), asked.name.to_vec());
        let work = async move { node.remove_xattr(inode, name).await };
        self.spawn_once(Operation::Xattr, head, work, empty(reply));
    }
}
