//! What a node is told of names that it changed, so that its journal can bring them back: see
//! [`crate::Book`] for how what several nodes were told becomes one tree again.

use crate::inode::{Home, Inode, Under};
use crate::tree::Namespace;
use ebb_types::facts::{Bound, Facts, InodeFact, Moment, NameFact, Shape, XattrFact};
use ebb_types::{Ino, Name};

/// Deeper trees are no trees.
pub(crate) const DEPTH_MAX: usize = 4096;

impl Namespace {
    /// What a name means now that was just changed: where nothing is known of it, that was taking it away.
    #[must_use]
    pub fn name_fact(&self, at: Moment, parent: Ino, name: &Name) -> NameFact {
        // A directory that is gone has no names.
        let dentry = self.dentry(parent, name).ok().flatten();
        let bound = dentry.map(|d| Bound {
            ino: d.ino,
            placed: d.under == Under::This,
            replaces: self.covered(parent, name).map_or(0, |key| key.ino),
        });
        NameFact { at, parent, name: name.clone(), bound }
    }

    /// How an inode is now, with the size that the driver keeps, and whether that is of zeros alone.
    #[must_use]
    pub fn inode_fact(&self, at: Moment, ino: Ino, (size, zeros): (u64, bool)) -> InodeFact {
        let named = |i: &&Inode| ino == Ino::ROOT || !i.links.is_empty();
        let shape = self.get(ino).filter(named).map(|i| Shape {
            kind: i.kind,
            perm: i.perm,
            uid: i.uid,
            gid: i.gid,
            rdev: i.rdev,
            atime: i.atime,
            mtime: i.mtime,
            target: i.target.clone(),
            size,
            zeros,
            placed: i.seen.filter(|_| i.home == Home::Own).map_or(0, |s| s.key.ino),
        });
        InodeFact { at, ino, shape }
    }

    /// An extended attribute, as far as the backing does not have it.
    #[must_use]
    pub fn xattr_fact(&self, at: Moment, ino: Ino, name: &[u8]) -> XattrFact {
        let value = self.get(ino).and_then(|i| i.xattrs.get(name).cloned());
        XattrFact { at, ino, name: name.into(), value }
    }

    /// Where something is: its own name, those of the directories above it, and what they are; `size` as for
    /// [`Namespace::inode_fact`].
    #[must_use]
    pub fn chain(&self, at: Moment, ino: Ino, size: (u64, bool)) -> Facts {
        let mut facts = Facts::default();
        let (mut ino, mut size) = (ino, size);
        for _ in 0..DEPTH_MAX {
            let Some(link) = self.get(ino).and_then(|i| i.links.first()) else { break };
            facts.names.push(self.name_fact(at, link.parent, &link.name));
            facts.inodes.push(self.inode_fact(at, ino, size));
            // All others are directories.
            (ino, size) = (link.parent, (0, false));
        }
        facts
    }

    /// True for what a node may have to bring back: it has a name, and the backing has it not.
    #[must_use]
    pub fn is_local(&self, ino: Ino) -> bool {
        self.get(ino).is_some_and(|i| i.home != Home::Own && !i.links.is_empty())
    }
}
