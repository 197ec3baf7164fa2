//! Inodes that are no more and that the kernel still knows: somebody has a descriptor of one, or works
//! in it. A local file system answers for them; here the service knows nothing of them any more,
//! so this node answers with what it knew last, until the kernel lets go.
//!
//! Of what this node removed the service tells the last attributes. Of what another node removed
//! only directories are answered for.

use crate::node::{Fate, Node};
use ebb_locks::Mutex;
use ebb_meta_client::{SetAttr, SetTime};
use ebb_types::{Attr, Errno, FileKind, Ino, Time};
use std::collections::HashMap;

/// A leaf: no other lock is taken under it.
#[derive(Debug, Default)]
pub struct Gone(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    gone: HashMap<Ino, Attr>,
    /// Directories that the kernel knows, as it was told of them last.
    dirs: HashMap<Ino, Attr>,
}

impl Gone {
    /// The kernel is told of an inode.
    pub fn saw(&self, attr: &Attr) {
        if attr.kind == FileKind::Directory {
            self.0.lock().dirs.insert(attr.ino, *attr);
        }
    }

    /// It is no more. These are the attributes that it had.
    pub fn removed(&self, attr: &Attr) {
        let now = Time::now();
        let size = if attr.kind == FileKind::Directory { 0 } else { attr.size };
        self.0.lock().gone.insert(attr.ino, Attr { nlink: 0, ctime: now, size, ..*attr });
    }

    /// The kernel has let go.
    pub fn forget(&self, ino: Ino) {
        let mut table = self.0.lock();
        table.gone.remove(&ino);
        table.dirs.remove(&ino);
    }

    fn get(&self, ino: Ino) -> Option<Attr> {
        self.0.lock().gone.get(&ino).copied()
    }

    fn dir(&self, ino: Ino) -> Option<Attr> {
        self.0.lock().dirs.get(&ino).copied()
    }

    fn set(&self, ino: Ino, args: &SetAttr) -> Option<Attr> {
        let now = Time::now();
        let time = |t: SetTime| match t {
            SetTime::Now => now,
            SetTime::To(t) => t,
        };
        let mut table = self.0.lock();
        let attr = table.gone.get_mut(&ino)?;
        attr.perm = args.mode.map_or(attr.perm, |m| m & 0o7777);
        attr.uid = args.uid.unwrap_or(attr.uid);
        attr.gid = args.gid.unwrap_or(attr.gid);
        attr.atime = args.atime.map_or(attr.atime, time);
        attr.mtime = args.mtime.map_or(attr.mtime, time);
        attr.ctime = now;
        if args.kill_priv && attr.kind != FileKind::Directory {
            attr.perm &= 0o1777;
        }
        Some(*attr)
    }
}

impl Node {
    /// What is known of an inode of which the service has answered `error`, when it is no more.
    pub(crate) async fn gone(&self, ino: Ino, error: Errno) -> Option<Attr> {
        if error != Errno::ESTALE {
            return None;
        }
        if let Some(attr) = self.gone.get(ino) {
            return Some(attr);
        }
        let dir = self.gone.dir(ino)?;
        if self.fate(ino).await != Ok(Fate::Deleted) {
            return None;
        }
        self.gone.removed(&dir);
        self.gone.get(ino)
    }

    /// The same, and changes it.
    pub(crate) async fn change_gone(
        &self,
        ino: Ino,
        args: &SetAttr,
        e: Errno,
    ) -> Result<Attr, Errno> {
        let there = self.gone(ino, e).await.filter(|_| args.size.is_none());
        there.and_then(|_| self.gone.set(ino, args)).ok_or(e)
    }

    /// There is no name in a directory that is no more, and none can be made.
    pub(crate) async fn in_dirs<T>(
        &self,
        dirs: &[Ino],
        done: Result<T, Errno>,
    ) -> Result<T, Errno> {
        if let Err(e) = done {
            for dir in dirs {
                if self.gone(*dir, e).await.is_some() {
                    return Err(Errno::ENOENT);
                }
            }
        }
        done
    }
}
