//! A file of three nodes whose service forgets the end of what happened, against the same service
//! without that: after every node has told what it knows, both say the same of every byte.

use super::*;
use crate::ownership::FileState;
use crate::view::FileView;
use proptest::prelude::*;
use std::collections::HashSet;

const BYTES: u64 = 16;
const NODES: u32 = 3;
const FLOOR: Version = Version(1 << 34);

#[derive(Clone, Debug)]
enum Op {
    /// As a program does that opens, writes and closes.
    Write(u32, u64, u64),
    Look(u32),
    Flush(u32, u64, u64),
    GiveBack(u32, u64, u64, bool),
    Cut(u32, u64),
}

fn op() -> impl Strategy<Value = Op> {
    let node = || 1..=NODES;
    let span = || (0..BYTES, 1..6u64).prop_map(|(a, l)| (a, (a + l).min(BYTES)));
    prop_oneof![
        6 => (node(), span()).prop_map(|(n, (a, b))| Op::Write(n, a, b)),
        3 => node().prop_map(Op::Look),
        3 => (node(), span()).prop_map(|(n, (a, b))| Op::Flush(n, a, b)),
        2 => (node(), span(), any::<bool>()).prop_map(|(n, (a, b), d)| Op::GiveBack(n, a, b, d)),
        1 => (node(), 0..=BYTES).prop_map(|(n, len)| Op::Cut(n, len)),
    ]
}

struct World {
    service: FileState,
    views: Vec<FileView>,
    /// What was copied there and not cut off since.
    on_backing: [bool; BYTES as usize],
}

impl World {
    fn new(base: u64) -> World {
        let views = (1..=NODES).map(|n| FileView::new(NodeId(n))).collect();
        let on_backing = std::array::from_fn(|at| (at as u64) < base);
        World { service: FileState::new(base), views, on_backing }
    }

    fn look(&mut self, node: u32) {
        let view = &mut self.views[node as usize - 1];
        let answer = self.service.query(ByteRange::ALL, view.known_version());
        view.apply(&answer);
    }

    fn run(&mut self, op: &Op) {
        if let Op::Write(node, ..) | Op::Cut(node, _) | Op::Look(node) = op {
            self.look(*node);
        }
        let World { service, views, on_backing } = self;
        match *op {
            Op::Look(_) => {}
            Op::Write(node, a, b) => {
                let view = &mut views[node as usize - 1];
                view.write(ByteRange::new(a, b));
                let taken = view.take_unattached(ByteRange::ALL);
                let version = service.attach(NodeId(node), &taken);
                view.attached(&taken, version, service.size());
            }
            Op::Flush(node, a, b) => {
                let view = &mut views[node as usize - 1];
                let asked = view.unflushed(ByteRange::new(a, b));
                let asked: Vec<ByteRange> = asked.into_iter().map(|(r, _)| r).collect();
                let granted = service.grantable(NodeId(node), &asked);
                service.mark_flushed(NodeId(node), &granted);
                for grant in &granted {
                    (grant.range.start()..grant.range.end())
                        .for_each(|at| on_backing[at as usize] = true);
                }
                view.flushed(&granted.iter().map(|g| (g.range, g.version)).collect::<Vec<_>>());
            }
            Op::GiveBack(node, a, b, drop) => {
                let view = &mut views[node as usize - 1];
                let range = ByteRange::new(a, b);
                let flushed = view.detachable(range);
                let answer = service.detach(NodeId(node), &flushed).expect("flushed ones");
                view.detached(&flushed, answer);
                if drop {
                    view.drop_clean(range);
                }
            }
            Op::Cut(node, len) => {
                service.truncate(len);
                on_backing[len as usize..].fill(false);
                let answer = service.query(ByteRange::ALL, Version::ZERO);
                views[node as usize - 1].truncated(len, &answer);
            }
        }
    }
}

/// Everything that a node knows, in parts of `most` claims.
fn tell(service: &mut FileState, view: &FileView, node: u32, most: usize) {
    let Some(from) = service.leapt_from() else { return };
    if view.newest_known() <= from && !view.may_own() {
        return;
    }
    let mut at = 0;
    while at < ByteRange::ALL.end() {
        let part = view.assertion(ByteRange::from(at), from, most, true);
        assert!(part.covers.end() > at, "it goes on");
        at = part.covers.end();
        let stored = postcard::to_allocvec(&part).expect("encoded");
        let part = postcard::from_bytes(&stored).expect("decoded");
        service.reassert(NodeId(node), &part);
    }
}

fn byte(service: &FileState, at: u64) -> Option<(NodeId, bool)> {
    service.owned_in(ByteRange::at(at, 1)).next().map(|o| (o.node, o.flushed))
}

fn same(told: &FileState, world: &World) -> Result<(), TestCaseError> {
    let whole = &world.service;
    prop_assert_eq!(told.size(), whole.size());
    for at in 0..BYTES {
        prop_assert_eq!(byte(told, at), byte(whole, at), "byte {}", at);
        let read_there = !world.on_backing[at as usize] || at < told.base_len();
        let unowned = at < whole.size() && byte(whole, at).is_none();
        prop_assert!(!unowned || read_there, "byte {} is on the backing", at);
    }
    prop_assert_eq!(told.unflushed_by_node(), whole.unflushed_by_node());
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20000))]

    #[test]
    fn what_every_node_tells_is_what_was(
        base in prop::sample::select(vec![0, 7, BYTES]),
        ops in prop::collection::vec(op(), 1..24),
        cut in any::<prop::sample::Index>(),
        order in Just((1..=NODES).chain(1..=NODES).collect::<Vec<_>>()).prop_shuffle(),
        most in 1..5usize,
        later in prop::collection::vec(op(), 0..6),
    ) {
        let mut world = World::new(base);
        let cut = cut.index(ops.len());
        ops[..cut].iter().for_each(|op| world.run(op));
        let mut left = world.service.clone();
        ops[cut..].iter().for_each(|op| world.run(op));
        left.leap(FLOOR);
        for node in &order {
            tell(&mut left, &world.views[*node as usize - 1], *node, most);
        }
        same(&left, &world)?;
        // What is given out from now on was given out by nobody.
        let newest = world.views.iter().map(FileView::newest_known).max().unwrap_or_default();
        left.end_leap();
        let mut world = World { service: left, ..world };
        for op in &later {
            let before = world.service.version();
            world.run(op);
            let after = world.service.version();
            prop_assert!(after == before || (after >= FLOOR && after > newest));
        }
        // Nobody takes old bytes for new ones, nor loses its own.
        for node in 1..=NODES {
            world.look(node);
            let view = &world.views[node as usize - 1];
            for owned in world.service.owned().filter(|o| o.node == NodeId(node)) {
                prop_assert!(view.local(owned.range), "bytes {} of node {}", owned.range, node);
            }
        }
    }

    /// Of the length of what the backing has, nodes say nothing that the service has not said of that
    /// version.
    #[test]
    fn what_is_told_of_the_backing_was_so(
        base in prop::sample::select(vec![0, 7, BYTES]),
        ops in prop::collection::vec(op(), 1..24),
    ) {
        let mut world = World::new(base);
        let mut was = HashSet::from([(0, Version::ZERO)]);
        for op in &ops {
            was.insert((world.service.base_len(), world.service.version()));
            world.run(op);
            was.insert((world.service.base_len(), world.service.version()));
            for (node, view) in (1..).zip(&world.views) {
                let told = view.assertion(ByteRange::ALL, Version::ZERO, 99, true).base_len;
                prop_assert!(was.contains(&told), "node {}: {:?} after {:?}", node, told, op);
            }
        }
    }

    /// What was written after the leap stays, whatever is told then.
    #[test]
    fn what_came_since_is_the_latest_word(
        ops in prop::collection::vec(op(), 1..16),
        cut in any::<prop::sample::Index>(),
        (a, len) in (0..BYTES, 1..6u64),
        cuts in any::<bool>(),
    ) {
        let mut world = World::new(BYTES);
        let cut = cut.index(ops.len());
        ops[..cut].iter().for_each(|op| world.run(op));
        let mut left = world.service.clone();
        ops[cut..].iter().for_each(|op| world.run(op));
        left.leap(FLOOR);
        let stranger = NodeId(9);
        let range = ByteRange::new(a, (a + len).min(BYTES));
        left.attach(stranger, &[range]);
        if cuts {
            left.truncate(range.end());
        }
        for node in 1..=NODES {
            tell(&mut left, &world.views[node as usize - 1], node, 64);
        }
        for at in range.start()..range.end() {
            prop_assert_eq!(byte(&left, at), Some((stranger, false)));
        }
        prop_assert!(!cuts || left.owned_in(ByteRange::from(range.end())).next().is_none());
    }
}

/// A node gives back what it has flushed, and has never seen what another one wrote behind that and gave
/// back before. Whatever is lost of it.
#[test]
fn who_gives_back_last_does_not_make_the_backing_shorter() {
    let (far, near) = (Op::Write(3, 9, 14), Op::Write(1, 5, 7));
    let then = [
        Op::Flush(3, 11, 14),
        Op::Flush(1, 4, 7),
        Op::GiveBack(3, 11, 14, false),
        Op::GiveBack(1, 5, 6, false),
    ];
    // It knows how long the file is, or that neither.
    let orders = [[far.clone(), near.clone()], [near, far]];
    for (ops, kept) in orders.iter().flat_map(|first| {
        let ops = [first.as_slice(), &then].concat();
        (0..=ops.len()).map(move |kept| (ops.clone(), kept))
    }) {
        let mut world = World::new(0);
        ops[..kept].iter().for_each(|op| world.run(op));
        let mut left = world.service.clone();
        ops[kept..].iter().for_each(|op| world.run(op));
        left.leap(FLOOR);
        for node in [1, 2, 3, 1, 2, 3] {
            tell(&mut left, &world.views[node as usize - 1], node, 1);
        }
        same(&left, &world).unwrap_or_else(|e| panic!("{kept} of {ops:?} are kept: {e}"));
        assert_eq!(left.base_len(), 14, "{kept} of {ops:?} are kept");
    }
}

/// What a node has flushed was cut off by another one before it is given back: the length of before does
/// not come back.
#[test]
fn who_gives_back_what_was_cut_does_not_make_the_backing_longer() {
    let mut world = World::new(0);
    let mut left = world.service.clone();
    for op in [
        Op::Write(1, 0, 14),
        Op::Flush(1, 0, 14),
        Op::Cut(2, 3),
        Op::Write(2, 12, 14),
        Op::GiveBack(1, 4, 14, false),
    ] {
        world.run(&op);
    }
    assert_eq!((world.service.base_len(), world.service.size()), (3, 14));
    left.leap(FLOOR);
    for node in [2, 1] {
        tell(&mut left, &world.views[node as usize - 1], node, 1);
    }
    same(&left, &world).expect("the same");
    assert_eq!(left.base_len(), 3);
}

#[test]
fn words_of_other_times_change_nothing() {
    let mut file = FileState::new(4);
    file.attach(NodeId(1), &[ByteRange::new(0, 4)]);
    let word = |version| Assertion {
        size: (100, Version(version)),
        base_len: (0, Version::ZERO),
        covers: ByteRange::ALL,
        claims: vec![(ByteRange::new(0, 9), Claimed::Own(Version(version), false))],
        complete: false,
    };
    let before = file.clone();
    file.reassert(NodeId(2), &word(7));
    assert_eq!(file, before, "nothing is missing");
    file.leap(FLOOR);
    let leapt = file.clone();
    file.reassert(NodeId(2), &word(FLOOR.0));
    assert_eq!(file, leapt, "no version of the time that was lost");
    // Beside words of now those of then count.
    let mut both = word(7);
    both.claims.push((ByteRange::new(20, 30), Claimed::Own(FLOOR.next(), false)));
    file.reassert(NodeId(2), &both);
    assert_eq!(file.size(), 100);
    assert_eq!(file.owned_in(ByteRange::from(9)).next(), None);
    // What a node has published since it told, or before that, is newer than what it had.
    let version = file.attach(NodeId(2), &[ByteRange::new(0, 5)]);
    file.reassert(NodeId(2), &word(7));
    assert_eq!(file.owned().next().map(|o| (o.version, o.range.end())), Some((version, 5)));
    assert_eq!(file.owned().next().map(|o| (o.node, o.range.end())), Some((NodeId(2), 5)));
}

/// Who makes a file at least so long does not cut what was longer; who cuts it does.
#[test]
fn sizes_from_after_the_leap() {
    let word = Assertion {
        size: (100, Version(7)),
        base_len: (80, Version(7)),
        covers: ByteRange::ALL,
        claims: Vec::new(),
        complete: false,
    };
    let told = |change: fn(&mut FileState)| {
        let mut file = FileState::new(4);
        file.leap(FLOOR);
        change(&mut file);
        file.reassert(NodeId(2), &word);
        (file.size(), file.base_len())
    };
    assert_eq!(told(|_| {}), (100, 80));
    assert_eq!(told(|f| _ = f.grow(50)), (100, 80));
    assert_eq!(told(|f| _ = f.grow(150)), (150, 80));
    assert_eq!(told(|f| _ = f.truncate(50)), (50, 50));
    assert_eq!(told(|f| _ = f.truncate(2)), (2, 2));
    assert_eq!(told(|f| _ = f.base_changed(60)), (60, 60));
    let regrown = |f: &mut FileState| {
        f.truncate(2);
        f.truncate(90);
    };
    assert_eq!(told(regrown), (90, 2), "zeros where it was cut");
}
