//! Which nodes have which inodes open, found from either side: a node that leaves costs what it had open.

use ebb_types::{Ino, NodeId};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// The same pairs twice; what has none is left out.
#[derive(Clone, Debug, Default)]
pub(crate) struct Opens {
    by: HashMap<Ino, BTreeSet<NodeId>>,
    of: BTreeMap<NodeId, BTreeSet<Ino>>,
}

impl Opens {
    pub(crate) fn open(&mut self, node: NodeId, ino: Ino) {
        self.by.entry(ino).or_default().insert(node);
        self.of.entry(node).or_default().insert(ino);
    }

    pub(crate) fn close(&mut self, node: NodeId, ino: Ino) {
        if let Some(nodes) = self.by.get_mut(&ino) {
            nodes.remove(&node);
            if nodes.is_empty() {
                self.by.remove(&ino);
            }
        }
        self.forget(node, ino);
    }

    fn forget(&mut self, node: NodeId, ino: Ino) {
        if let Some(inos) = self.of.get_mut(&node) {
            inos.remove(&ino);
            if inos.is_empty() {
                self.of.remove(&node);
            }
        }
    }

    /// The inode is no more.
    pub(crate) fn free(&mut self, ino: Ino) {
        for node in self.by.remove(&ino).unwrap_or_default() {
            self.forget(node, ino);
        }
    }

    /// Who has it open; `None`: nobody.
    pub(crate) fn by(&self, ino: Ino) -> Option<&BTreeSet<NodeId>> {
        self.by.get(&ino)
    }

    /// What a node has open, in order.
    pub(crate) fn of(&self, node: NodeId) -> impl Iterator<Item = Ino> + '_ {
        self.of.get(&node).into_iter().flatten().copied()
    }

    /// All of it, in order.
    pub(crate) fn all(&self) -> BTreeSet<(Ino, NodeId)> {
        self.by.iter().flat_map(|(ino, nodes)| nodes.iter().map(|node| (*ino, *node))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn both_sides_are_the_same_pairs(
            acts in prop::collection::vec((0..6u8, 0..4u32, 0..4u64), 0..60),
        ) {
            let (mut opens, mut plain) = (Opens::default(), BTreeSet::new());
            for (act, node, ino) in acts {
                let (node, ino) = (NodeId(node), Ino(ino));
                match act {
                    0 => {
                        opens.free(ino);
                        plain.retain(|(other, _)| *other != ino);
                    }
                    1 | 2 => {
                        opens.close(node, ino);
                        plain.remove(&(ino, node));
                    }
                    _ => {
                        opens.open(node, ino);
                        plain.insert((ino, node));
                    }
                }
                prop_assert_eq!(&opens.all(), &plain);
                for node in (0..4).map(NodeId) {
                    let its = plain.iter().filter(|(_, n)| *n == node).map(|(ino, _)| *ino);
                    prop_assert_eq!(opens.of(node).collect::<Vec<_>>(), its.collect::<Vec<_>>());
                }
                for ino in (0..4).map(Ino) {
                    let by = plain.iter().filter(|(i, _)| *i == ino).map(|(_, node)| *node);
                    let by: BTreeSet<NodeId> = by.collect();
                    prop_assert_eq!(opens.by(ino).cloned().unwrap_or_default(), by);
                }
                prop_assert!(opens.of.values().all(|inos| !inos.is_empty()));
            }
        }
    }
}
