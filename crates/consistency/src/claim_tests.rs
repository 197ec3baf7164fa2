//! Writers of disjoint bytes of one empty file, attached in any order, give the union; and the
//! one case in which they would not.

use super::*;
use crate::ownership::FileState;
use crate::table::ModelTable;
use ebb_types::NodeId;
use proptest::prelude::*;

const SIZE: u64 = 3 * BLOCK + 100;

/// A node that wrote these bytes into an empty cache file, and its claims.
struct Writer {
    cache: Vec<u8>,
    claims: Claims,
}

impl Writer {
    fn new(writes: &[(u64, u8)], exact: bool) -> Writer {
        let mut cache = vec![0; SIZE as usize];
        let mut claims = Claims::new();
        for (at, value) in writes {
            cache[*at as usize] = *value;
            let byte = ByteRange::at(*at, 1);
            match exact {
                true => claims.add_exact(byte),
                false => claims.add_segment(byte, SIZE),
            }
        }
        Writer { cache, claims }
    }
}

/// Attaches in that order, merging what is contested, and reads the file from its owners.
fn attach_all(writers: &mut [Writer], order: &[usize]) -> Vec<u8> {
    let mut file = FileState::new(0);
    for me in order {
        let owned: Vec<_> = file.owned().collect();
        for other in owned {
            let from = other.node.0 as usize - 1;
            for range in writers[*me].claims.contested(&[other.range]) {
                let at = range.start() as usize..range.end() as usize;
                let theirs = writers[from].cache[at.clone()].to_vec();
                merge(&mut writers[*me].cache[at], &theirs);
            }
        }
        file.attach(NodeId(*me as u32 + 1), &writers[*me].claims.ranges());
    }
    let mut bytes = vec![0; SIZE as usize];
    for o in file.owned() {
        let at = o.range.start() as usize..o.range.end() as usize;
        bytes[at.clone()].copy_from_slice(&writers[o.node.0 as usize - 1].cache[at]);
    }
    bytes
}

fn writes() -> impl Strategy<Value = Vec<(u64, u8, usize)>> {
    // Few places, so that blocks are shared; zeros are written too.
    let at = (0..4u64, 0..60u64).prop_map(|(block, at)| (block * BLOCK + at).min(SIZE - 1));
    prop::collection::vec((at, 0..4u8, 0..3usize), 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn disjoint_writers_give_the_union(
        writes in writes(),
        exact in prop::collection::vec(any::<bool>(), 3),
        order in Just(vec![0usize, 1, 2]).prop_shuffle(),
    ) {
        // The first writer of a byte keeps it: no byte is written by two nodes.
        let mut writer_of = std::collections::BTreeMap::new();
        let mut expected = vec![0; SIZE as usize];
        let mut of = [vec![], vec![], vec![]];
        for (at, value, node) in writes {
            if *writer_of.entry(at).or_insert(node) == node {
                of[node].push((at, value));
                expected[at as usize] = value;
            }
        }
        let mut writers: Vec<_> =
            of.iter().zip(&exact).map(|(w, exact)| Writer::new(w, *exact)).collect();
        prop_assert_eq!(attach_all(&mut writers, &order), expected);
    }
}

/// What the module's head says of posix and commit: a zero written over another's byte, after a
/// message alone, is taken for "not written".
#[test]
fn a_zero_over_anothers_byte_is_lost_without_a_query_between() {
    let mut writers = [Writer::new(&[(7, 5)], false), Writer::new(&[(7, 0)], false)];
    assert_eq!(attach_all(&mut writers, &[0, 1])[7], 5, "sequential consistency gives 0");
    let table = ModelTable::builtin();
    let exact = |name: &str| shared_block_claims_are_exact(&table.get(name).unwrap());
    assert!(exact("session") && exact("mpiio") && !exact("commit") && !exact("posix"));
}

#[test]
fn claims_are_whole_blocks_up_to_the_size() {
    let mut claims = Claims::new();
    claims.add_exact(ByteRange::new(10, 20));
    claims.add_segment(ByteRange::new(4000, 4097), SIZE);
    claims.add_segment(ByteRange::new(3 * BLOCK, u64::MAX), SIZE);
    claims.add_segment(ByteRange::new(u64::MAX - 1, u64::MAX), SIZE);
    let list: Vec<_> = claims.iter().map(|c| (c.range, c.precision)).collect();
    let expected = [
        (ByteRange::new(0, 10), Precision::Block),
        (ByteRange::new(10, 20), Precision::Exact),
        (ByteRange::new(20, 2 * BLOCK), Precision::Block),
        (ByteRange::new(3 * BLOCK, SIZE), Precision::Block),
    ];
    assert_eq!(list, expected);
    assert_eq!(claims.ranges().len(), 2);
    let contested =
        claims.contested(&[ByteRange::new(5, 15), ByteRange::new(2 * BLOCK, 3 * BLOCK)]);
    assert_eq!(contested, [ByteRange::new(5, 10)]);
}
