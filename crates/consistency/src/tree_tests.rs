//! The tree's rules on small, readable examples; random ones are in the tests of `ownership`.

use super::*;
use proptest::prelude::*;

fn owned(start: u64, end: u64, node: u32, version: u64, flushed: bool) -> Owned {
    Owned {
        range: ByteRange::new(start, end),
        node: NodeId(node),
        version: Version(version),
        flushed,
    }
}

fn tree(list: &[Owned]) -> OwnershipTree {
    let mut tree = OwnershipTree::new();
    list.iter().for_each(|o| tree.insert(*o));
    tree
}

#[test]
fn an_insert_splits_deletes_and_merges() {
    let t = tree(&[owned(0, 100, 1, 1, false), owned(40, 60, 2, 2, false)]);
    let expected =
        [owned(0, 40, 1, 1, false), owned(40, 60, 2, 2, false), owned(60, 100, 1, 1, false)];
    assert_eq!(t.iter().collect::<Vec<_>>(), expected);

    let mut t = t;
    t.insert(owned(30, 70, 3, 3, false));
    assert_eq!(t.len(), 3);
    t.insert(owned(0, 100, 1, 4, false));
    assert_eq!(t.iter().collect::<Vec<_>>(), [owned(0, 100, 1, 4, false)]);
    assert_eq!(t.unflushed().get(&NodeId(1)), Some(&100));
    assert_eq!(t.unflushed().len(), 1);
}

#[test]
fn equal_versions_merge_anywhere_others_within_a_span_once_flushed() {
    let far = 3 * MERGE_SPAN;
    let t = tree(&[owned(0, far, 1, 1, false), owned(far, far + 1, 1, 1, false)]);
    assert_eq!(t.len(), 1);

    let mut t = tree(&[owned(0, 10, 1, 1, false), owned(10, 20, 1, 2, false)]);
    assert_eq!(t.len(), 2, "unflushed versions are exact");
    assert_eq!(t.answer(ByteRange::ALL), [owned(0, 20, 1, 2, false)], "readers see one");
    t.mark_flushed(ByteRange::ALL, NodeId(1), Version(2));
    assert_eq!(t.iter().collect::<Vec<_>>(), [owned(0, 20, 1, 2, true)]);

    let edge = MERGE_SPAN;
    let t = tree(&[owned(edge - 5, edge, 1, 1, true), owned(edge, edge + 5, 1, 2, true)]);
    assert_eq!(t.len(), 2, "never across the edge of a span");
    assert_eq!(t.answer(ByteRange::ALL).len(), 2);
}

#[test]
fn nothing_merges_across_owners_or_across_flushed() {
    let t =
        tree(&[owned(0, 10, 1, 1, true), owned(10, 20, 2, 1, true), owned(20, 30, 2, 1, false)]);
    assert_eq!(t.len(), 3);
    assert_eq!(t.answer(ByteRange::ALL).len(), 3);
}

#[test]
fn compaction_leaves_busy_bytes_alone() {
    let pieces: Vec<Owned> = (0..10).map(|i| owned(i * 10, i * 10 + 10, 1, i + 1, false)).collect();
    let mut t = tree(&pieces);
    t.compact(&[ByteRange::new(35, 36)]);
    let expected =
        [owned(0, 30, 1, 3, false), owned(30, 40, 1, 4, false), owned(40, 100, 1, 10, false)];
    assert_eq!(t.iter().collect::<Vec<_>>(), expected);
    assert_eq!(t.unflushed().get(&NodeId(1)), Some(&100));
}

proptest! {
    /// Many ranges in one pass are the same as one after the other.
    #[test]
    fn ranges_as_a_whole_are_ranges_in_turn(
        before in prop::collection::vec((0..60u64, 1..20u64, 1..4u32, any::<bool>()), 0..20),
        cuts in prop::collection::vec(0..80u64, 0..48),
        later in prop::collection::vec(0..80u64, 0..48),
    ) {
        let mut whole = OwnershipTree::new();
        for (i, (start, len, node, flushed)) in before.into_iter().enumerate() {
            whole.insert(owned(start, start + len, node, i as u64 / 2 + 1, flushed));
        }
        let mut in_turn = whole.clone();
        // The second time at the same version: what is written and what is claimed come so.
        for mut cuts in [cuts, later] {
            cuts.sort_unstable();
            let pairs = cuts.chunks_exact(2);
            let ranges: Vec<ByteRange> = pairs.map(|p| ByteRange::new(p[0], p[1])).collect();
            whole.insert_all(NodeId(1), &ranges, Version(99));
            for r in ranges.iter().filter(|r| !r.is_empty()) {
                in_turn.insert(owned(r.start(), r.end(), 1, 99, false));
            }
            prop_assert_eq!(&whole, &in_turn);
        }
    }
}

#[derive(Clone, Debug)]
enum Act {
    Insert(Owned),
    InsertAll(u32, Vec<ByteRange>, u64),
    Remove(ByteRange),
    MarkFlushed(ByteRange, u32, u64),
    Compact(ByteRange),
}

fn range() -> impl Strategy<Value = ByteRange> {
    // Around the end of a span as well, where flushed neighbours are not joined.
    let base = prop_oneof![Just(0), Just(MERGE_SPAN - 30)];
    (base, 0..60u64, 0..20u64).prop_map(|(base, at, len)| ByteRange::at(base + at, len))
}

fn act() -> impl Strategy<Value = Act> {
    let one = (range(), 1..4u32, 1..6u64, any::<bool>());
    let in_order = prop::collection::vec(0..80u64, 0..48).prop_map(|mut cuts| {
        cuts.sort_unstable();
        cuts.chunks_exact(2).map(|p| ByteRange::new(p[0], p[1])).collect::<Vec<_>>()
    });
    let any_order = prop::collection::vec(range(), 0..5);
    let ranges = prop_oneof![in_order, any_order];
    prop_oneof![
        4 => one.prop_map(|(r, n, v, f)| Act::Insert(owned(r.start(), r.end(), n, v, f))),
        3 => (1..4u32, ranges, 1..6u64).prop_map(|(n, r, v)| Act::InsertAll(n, r, v)),
        3 => range().prop_map(Act::Remove),
        2 => (range(), 1..4u32, 1..6u64).prop_map(|(r, n, v)| Act::MarkFlushed(r, n, v)),
        1 => range().prop_map(Act::Compact),
    ]
}

fn do_to(tree: &mut OwnershipTree, act: Act) {
    match act {
        Act::Insert(owned) => tree.insert(owned),
        Act::InsertAll(node, ranges, version) => {
            tree.insert_all(NodeId(node), &ranges, Version(version));
        }
        Act::Remove(range) => tree.remove(range),
        Act::MarkFlushed(range, node, upto) => {
            tree.mark_flushed(range, NodeId(node), Version(upto));
        }
        Act::Compact(busy) => tree.compact(&[busy]),
    }
}

proptest! {
    /// What is known beside the intervals is what a look at all of them says, after whatever was done.
    #[test]
    fn what_is_one_nodes_is_what_a_full_scan_finds(acts in prop::collection::vec(act(), 1..40)) {
        let mut tree = OwnershipTree::new();
        for act in acts {
            do_to(&mut tree, act);
            let all: Vec<Owned> = tree.iter().collect();
            for node in (1..5).map(NodeId) {
                let its: Vec<Owned> = all.iter().filter(|o| o.node == node).copied().collect();
                prop_assert_eq!(tree.of_node(node).collect::<Vec<_>>(), its.clone());
                prop_assert_eq!(tree.has_owner(node), !its.is_empty());
            }
            let owners: BTreeSet<NodeId> = all.iter().map(|o| o.node).collect();
            prop_assert_eq!(tree.owners().collect::<BTreeSet<_>>(), owners);
            let starts: usize = tree.starts.0.values().map(BTreeSet::len).sum();
            prop_assert_eq!(starts, all.len(), "none is known twice");
            prop_assert_eq!(&OwnershipTree::try_from(all).unwrap(), &tree);
        }
    }
}

#[test]
fn the_last_offset_is_in_reach() {
    let mut t = tree(&[owned(5, u64::MAX, 1, 1, false)]);
    t.remove(ByteRange::from(7));
    assert_eq!(t.iter().collect::<Vec<_>>(), [owned(5, 7, 1, 1, false)]);
    assert_eq!(t.overlapping(ByteRange::new(6, 6)).count(), 0);
}

#[test]
fn damaged_trees_are_refused() {
    for bad in [
        vec![owned(0, 0, 1, 1, false)],
        vec![owned(0, 10, 1, 1, false), owned(9, 12, 2, 1, false)],
        vec![owned(20, 30, 1, 1, false), owned(0, 10, 2, 1, false)],
        vec![owned(0, 10, 0, 1, false)],
    ] {
        assert!(OwnershipTree::try_from(bad).is_err());
    }
}

#[test]
fn an_answer_of_many_intervals_goes_on_where_it_ended() {
    let mut t = OwnershipTree::new();
    (0..10u64).for_each(|i| t.insert(owned(i * 10, i * 10 + 5, 1 + (i % 2) as u32, 1 + i, false)));
    let whole = t.answer(ByteRange::ALL);
    for most in [1, 3, 9, 10, 11] {
        let (mut got, mut at) = (Vec::new(), 0);
        while at < u64::MAX {
            let (some, covers) = t.first_of_answer(ByteRange::from(at), most);
            assert!(some.len() <= most && covers.start() == at && covers.end() > at);
            assert!(some.iter().all(|o| covers.contains(o.range)));
            got.extend(some);
            at = covers.end();
        }
        assert_eq!(got, whole, "{most} at a time");
    }
}
