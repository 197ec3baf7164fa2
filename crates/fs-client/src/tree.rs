//! The files at and below a path of the mount, as `ebb drain` and `ebb stage-in` mean them.

use crate::handles::DirHandle;
use crate::node::Node;
use ebb_types::{Attr, Errno, FileKind, Ino, Name};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

/// A regular file.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    /// Which.
    pub ino: Ino,
    /// Its size.
    pub size: u64,
    /// Where, relative to the mount's root.
    pub path: PathBuf,
}

impl Node {
    /// The regular files at and below `path`, which is relative to the mount's root. Symbolic
    /// links are not followed.
    pub(crate) async fn files_under(&self, path: &Path) -> Result<Vec<Found>, Errno> {
        let mut attr = self.getattr(Ino::ROOT).await?;
        let mut at = PathBuf::new();
        for part in path.components() {
            let Component::Normal(name) = part else { continue };
            attr = self.lookup(attr.ino, &Name::new(name.as_bytes())?).await?;
            at.push(name);
        }
        self.files_below(attr, at).await
    }

    async fn files_below(&self, top: Attr, path: PathBuf) -> Result<Vec<Found>, Errno> {
        let (mut found, mut todo) = (Vec::new(), vec![(top, path)]);
        while let Some((attr, path)) = todo.pop() {
            match attr.kind {
                FileKind::Regular => found.push(Found { ino: attr.ino, size: attr.size, path }),
                FileKind::Directory => {
                    let items = self.list(&DirHandle::new(attr.ino), 0).await?;
                    let below = items.iter().skip(2).map(|item| {
                        (item.attr, path.join(std::ffi::OsStr::from_bytes(&item.name)))
                    });
                    todo.extend(below);
                }
                _ => {}
            }
        }
        Ok(found)
    }
}
