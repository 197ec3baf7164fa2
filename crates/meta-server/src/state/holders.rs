//! Which files concern which node: it owns bytes of them, or may write to them without telling. So that a
//! node that leaves costs what it had, whatever the job has.
//!
//! Every file that concerns a node is here, and perhaps others: what another node took, or cut, is found
//! out when the node itself does something to the file, or leaves. Nothing of this is stored.

use ebb_types::{Ino, NodeId};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Files by node, and nodes by file.
#[derive(Clone, Debug, Default)]
pub struct Holders {
    files: BTreeMap<NodeId, BTreeSet<Ino>>,
    /// Sorted. The same pairs.
    nodes: HashMap<Ino, Vec<NodeId>>,
}

impl Holders {
    /// The file concerns this node, or does not any more.
    pub fn set(&mut self, ino: Ino, node: NodeId, concerned: bool) {
        match concerned {
            true => self.add(ino, node),
            false => self.remove(ino, node),
        }
    }

    fn add(&mut self, ino: Ino, node: NodeId) {
        if self.files.entry(node).or_default().insert(ino) {
            let nodes = self.nodes.entry(ino).or_default();
            nodes.insert(nodes.partition_point(|other| *other < node), node);
        }
    }

    fn remove(&mut self, ino: Ino, node: NodeId) {
        self.remove_file(ino, node);
        if let Some(nodes) = self.nodes.get_mut(&ino) {
            nodes.retain(|other| *other != node);
            if nodes.is_empty() {
                self.nodes.remove(&ino);
            }
        }
    }

    fn remove_file(&mut self, ino: Ino, node: NodeId) {
        if let Some(files) = self.files.get_mut(&node) {
            files.remove(&ino);
            if files.is_empty() {
                self.files.remove(&node);
            }
        }
    }

    /// The file is no more.
    pub fn forget(&mut self, ino: Ino) {
        for node in self.nodes.remove(&ino).unwrap_or_default() {
            self.remove_file(ino, node);
        }
    }

    /// The files that may concern this node, in order.
    pub fn files_of(&self, node: NodeId) -> impl Iterator<Item = Ino> + '_ {
        self.files.get(&node).into_iter().flatten().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::{Entry, FileOp, NodeRecord, State};
    use ebb_consistency::{FileState, Seat};
    use ebb_namespace::{Home, Namespace, NewInode, Record};
    use ebb_types::{ByteRange, FileKind, Incarnation, Time, Version};
    use proptest::prelude::*;

    const NODES: u32 = 4;
    const FILES: u64 = 4;

    fn new_file(ino: Ino) -> Entry {
        let time = Time { sec: 1, nsec: 0 };
        Entry::Ns(Record::Inode(Box::new(NewInode {
            ino,
            kind: FileKind::Regular,
            perm: 0o600,
            uid: 0,
            gid: 0,
            rdev: 0,
            atime: time,
            mtime: time,
            ctime: time,
            target: None,
            xattrs: Vec::new(),
            home: Home::None,
            seen: None,
            due: false,
            size: 0,
        })))
    }

    fn node(id: u32) -> Entry {
        let (id, incarnation) = (NodeId(id), Incarnation(1));
        let (name, peer_address) = (format!("node{}", id.0), String::new());
        Entry::Node(NodeRecord { id, name, incarnation, peer_address })
    }

    fn state() -> State {
        let mut state = State::new(Namespace::empty());
        let files = (2..2 + FILES).map(|ino| new_file(Ino(ino)));
        for entry in (1..=NODES).map(node).chain(files) {
            state.apply(&entry).unwrap();
        }
        state
    }

    /// What a full scan finds.
    fn scanned(state: &State, node: NodeId) -> BTreeSet<Ino> {
        let its = state.files.iter().filter(|(_, f)| f.concerns(node));
        its.map(|(ino, _)| *ino).collect()
    }

    fn op() -> impl Strategy<Value = FileOp> {
        let node = || (1..=NODES).prop_map(NodeId);
        let ranges = || {
            let range = (0..8u64, 0..6u64).prop_map(|(at, len)| ByteRange::at(at, len));
            prop::collection::vec(range, 1..3)
        };
        prop_oneof![
            6 => (node(), ranges()).prop_map(|(n, r)| FileOp::Attach(n, r)),
            2 => (node(), ranges(), ranges()).prop_map(|(n, r, c)| FileOp::Claim(n, r, c)),
            1 => (node(), 1..5u64).prop_map(|(n, len)| FileOp::Append(n, len)),
            2 => (node(), node(), ranges()).prop_map(|(a, b, r)| FileOp::Adopt(a, b, r)),
            1 => node().prop_map(FileOp::Lost),
            2 => (0..8u64).prop_map(FileOp::Truncate),
            2 => (node(), prop::option::of(4..20u64)).prop_map(|(n, end)| FileOp::Quiet(n, end)),
            2 => Just(FileOp::Lapse),
            1 => node().prop_map(FileOp::Lose),
            1 => node().prop_map(FileOp::TakeBack),
            2 => node().prop_map(|node| FileOp::Seat(Seat { node, id: 1, asked: true })),
            1 => node().prop_map(|node| FileOp::NoSeat(node, 1)),
        ]
    }

    #[derive(Clone, Debug)]
    enum Act {
        Op(u64, FileOp),
        /// All that the node may flush of a file is flushed.
        Flush(u64, NodeId),
        /// And all that is flushed given up.
        Detach(u64, NodeId),
        Free(u64),
        Leave(NodeId),
        Reload,
    }

    fn act() -> impl Strategy<Value = Act> {
        let ino = || 2..2 + FILES;
        let node = || (1..=NODES).prop_map(NodeId);
        prop_oneof![
            20 => (ino(), op()).prop_map(|(ino, op)| Act::Op(ino, op)),
            6 => (ino(), node()).prop_map(|(ino, node)| Act::Flush(ino, node)),
            4 => (ino(), node()).prop_map(|(ino, node)| Act::Detach(ino, node)),
            1 => ino().prop_map(Act::Free),
            2 => node().prop_map(Act::Leave),
            1 => Just(Act::Reload),
        ]
    }

    fn entries(state: &State, act: Act) -> Vec<Entry> {
        match act {
            Act::Op(ino, op) => vec![Entry::File(Ino(ino), op)],
            Act::Flush(ino, node) => {
                let granted = state.files[&Ino(ino)].grantable(node, &[ByteRange::ALL]);
                vec![Entry::File(Ino(ino), FileOp::Flushed(node, granted))]
            }
            Act::Detach(ino, node) => {
                let flushed = state.files[&Ino(ino)].owned_by(node).filter(|o| o.flushed);
                let ranges = flushed.map(|o| o.range).collect();
                vec![Entry::File(Ino(ino), FileOp::Detach(node, ranges))]
            }
            Act::Free(ino) => {
                vec![Entry::Ns(Record::Free { ino: Ino(ino) }), new_file(Ino(ino))]
            }
            Act::Leave(node) => vec![Entry::NodeLeft(node)],
            Act::Reload => Vec::new(),
        }
    }

    proptest! {
        #[test]
        fn no_file_of_a_node_is_missed(acts in prop::collection::vec(act(), 1..60)) {
            let mut state = state();
            for act in acts {
                if let Act::Reload = act {
                    let mut again = State::new(Namespace::empty());
                    for entry in state.snapshot() {
                        again.apply(&entry).unwrap();
                    }
                    state = again;
                }
                let left = if let Act::Leave(node) = act { Some(node) } else { None };
                for entry in entries(&state, act) {
                    state.apply(&entry).unwrap();
                }
                for node in (1..=NODES).map(NodeId) {
                    let known: BTreeSet<Ino> = state.holders.files_of(node).collect();
                    let found = scanned(&state, node);
                    prop_assert!(known.is_superset(&found), "{}: {:?} {:?}", node, known, found);
                    prop_assert!(left != Some(node) || known == found, "looked at when it left");
                    for ino in &known {
                        prop_assert!(state.holders.nodes[ino].contains(&node));
                    }
                }
                let pairs: usize = state.holders.files.values().map(BTreeSet::len).sum();
                let same: usize = state.holders.nodes.values().map(Vec::len).sum();
                prop_assert_eq!(pairs, same);
            }
        }
    }

    /// A goodbye looks at the files of its node, however many there are.
    #[test]
    fn what_a_goodbye_looks_at_does_not_grow_with_the_job() {
        let (mut looked, mut pieces) = (Vec::new(), Vec::new());
        for files in [100, 1_000, 10_000] {
            let mut state = State::new(Namespace::empty());
            for ino in (2..2 + files).map(Ino) {
                state.apply(&new_file(ino)).unwrap();
                let others = FileOp::Attach(NodeId(1), vec![ByteRange::new(0, 10)]);
                state.apply(&Entry::File(ino, others)).unwrap();
            }
            // One file is written by all in turn.
            let shared = Ino(2);
            for writer in 1..files as u32 {
                let at = ByteRange::at(u64::from(writer) * 20, 10);
                let op = FileOp::Attach(NodeId(writer), vec![at]);
                state.apply(&Entry::File(shared, op)).unwrap();
            }
            let leaves = NodeId(7);
            looked.push(state.holders.files_of(leaves).count());
            let file: &FileState = &state.files[&shared];
            pieces.push(file.owned_by(leaves).count());
            assert_eq!(file.version(), Version(files + 1));
            state.apply(&Entry::NodeLeft(leaves)).unwrap();
        }
        assert_eq!((looked, pieces), (vec![1; 3], vec![1; 3]));
    }
}
