//! Directories: opened, listed, closed.

use super::answers::empty;
use super::convert::{attr, errno, ino, kind};
use super::{Adapter, Places, TTL, checked};
use crate::handles::DirHandle;
use crate::metrics::Operation;
use crate::node::Node;
use crate::ops::dirs::behind;
use ebb_fuse::{
    FileHandle, FopenFlags, Head, INodeNo, Listing, ListingPlus, Open, ReadDir, Release,
    ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyOpen,
};
use ebb_types::{Attr, Errno, FileKind, Ino, Name};
use std::sync::Arc;

/// A listing with attributes is a look-up of every name but the dots.
fn note_listed(node: &Node, places: &Places, parent: Ino, name: &[u8], attr: &Attr) {
    if let (FileKind::Directory, Ok(name)) = (attr.kind, Name::new(name)) {
        node.gone.saw(attr);
        places.note(attr.ino, parent, &name);
    }
}

impl Adapter {
    pub(super) fn opendir(&self, asked: &Open, reply: ReplyOpen) {
        let handle = self.node.handles.insert_dir(DirHandle::new(ino(asked.inode)));
        reply.opened(FileHandle(handle), FopenFlags::empty(), None);
    }

    fn directory(&self, asked: &ReadDir) -> Result<Arc<DirHandle>, Errno> {
        self.node.handles.dir_or_again(asked.handle.0, ino(asked.inode)).ok_or(Errno::EBADF)
    }

    pub(super) fn readdir(&self, head: &Head, asked: &ReadDir, reply: ReplyDirectory) {
        let Some((dir, reply)) = checked(self.directory(asked), reply) else { return };
        let (node, offset, size) = (Arc::clone(&self.node), asked.offset, asked.size);
        let work = async move { node.list(&dir, offset).await };
        self.spawn_waiting(Operation::ReadDir, head, work, move |r| match r {
            Ok(items) => {
                let mut listing = Listing::new(size);
                for item in behind(&items, offset) {
                    let inode = INodeNo(item.attr.ino.0);
                    if !listing.add(inode, item.position, kind(item.attr.kind), &item.name) {
                        break;
                    }
                }
                reply.listed(&listing);
            }
            Err(e) => reply.error(errno(e)),
        });
    }

    pub(super) fn readdirplus(&self, head: &Head, asked: &ReadDir, reply: ReplyDirectoryPlus) {
        let Some((dir, reply)) = checked(self.directory(asked), reply) else { return };
        let (node, places) = (Arc::clone(&self.node), Arc::clone(&self.places));
        let (parent, offset, size) = (ino(asked.inode), asked.offset, asked.size);
        let lister = Arc::clone(&node);
        let work = async move { lister.list(&dir, offset).await };
        self.spawn_waiting(Operation::ReadDir, head, work, move |r| match r {
            Ok(items) => {
                let mut listing = ListingPlus::new(size);
                for item in behind(&items, offset) {
                    note_listed(&node, &places, parent, &item.name, &item.attr);
                    if !listing.add(item.position, &item.name, TTL, &attr(&item.attr)) {
                        break;
                    }
                }
                reply.listed(&listing);
            }
            Err(e) => reply.error(errno(e)),
        });
    }

    pub(super) fn releasedir(&self, asked: &Release, reply: ReplyEmpty) {
        self.node.handles.remove_dir(asked.handle.0);
        reply.ok();
    }

    pub(super) fn fsyncdir(&self, reply: ReplyEmpty) {
        let node = Arc::clone(&self.node);
        self.spawn(Operation::Fsync, async move { node.sync_names().await }, empty(reply));
    }
}
