//! Which nodes have begun to write a file over, so that what is there of it may be half of a file while
//! they have it open: they made it empty, or what they had written went to their partners. (Of other
//! nodes it is enough that bytes of it are theirs.) No file is listed that does not replace an older one on
//! the backing.

use ebb_types::{Ino, NodeId};
use std::collections::{BTreeMap, BTreeSet};

/// The nodes, by file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Halves(BTreeMap<Ino, BTreeSet<NodeId>>);

impl Halves {
    /// The node is writing the file over; or it is not any more.
    pub fn set(&mut self, ino: Ino, node: NodeId, writes: bool) {
        if writes {
            self.0.entry(ino).or_default().insert(node);
            return;
        }
        if let Some(nodes) = self.0.get_mut(&ino) {
            nodes.remove(&node);
            if nodes.is_empty() {
                self.0.remove(&ino);
            }
        }
    }

    /// The file replaces nothing any more, or is gone.
    pub fn forget(&mut self, ino: Ino) {
        self.0.remove(&ino);
    }

    /// True when this node is writing it over.
    pub fn has(&self, ino: Ino, node: NodeId) -> bool {
        self.0.get(&ino).is_some_and(|nodes| nodes.contains(&node))
    }

    /// All of them.
    pub fn all(&self) -> impl Iterator<Item = (Ino, NodeId)> + '_ {
        self.0.iter().flat_map(|(ino, nodes)| nodes.iter().map(|node| (*ino, *node)))
    }
}
