//! A node's view on small, readable examples; random runs are in `view_tests`.

use super::*;
use crate::ownership::{FileState, Owned};

const ME: NodeId = NodeId(1);
const A: NodeId = NodeId(2);

fn all(a: u64, b: u64) -> Vec<ByteRange> {
    vec![ByteRange::new(a, b)]
}

#[test]
fn a_lone_writer_knows_the_whole_map_after_its_own_attaches() {
    let mut service = FileState::new(0);
    let mut view = FileView::new(ME);
    view.apply(&service.query(ByteRange::ALL, view.known_version()));
    for i in 0..5 {
        view.write(ByteRange::at(i * 10, 10));
        let taken = view.take_unattached(ByteRange::ALL);
        let version = service.attach(ME, &taken);
        view.attached(&taken, version, service.size());
    }
    assert!(service.query(ByteRange::ALL, view.known_version()).unchanged);
    service.attach(A, &all(0, 5));
    view.write(ByteRange::at(90, 10));
    let taken = view.take_unattached(ByteRange::ALL);
    let version = service.attach(ME, &taken);
    view.attached(&taken, version, service.size());
    let answer = service.query(ByteRange::ALL, view.known_version());
    assert!(!answer.unchanged);
    assert_eq!(view.apply(&answer).overtaken, all(0, 5));
}

/// After a detach a node does not know the whole map by its own attaches any more. It has heard of them
/// all the same: what it flushed itself has not overtaken what it writes next.
#[test]
fn own_flushes_are_nobody_elses_changes() {
    let mut service = FileState::new(0);
    let mut view = FileView::new(ME);
    view.apply(&service.query(ByteRange::ALL, view.known_version()));
    for round in 0..3 {
        view.write(ByteRange::new(0, 10));
        assert!(service.changed_after(view.heard_version()).is_empty(), "round {round}");
        let taken = view.take_unattached(ByteRange::ALL);
        let version = service.attach(ME, &taken);
        view.attached(&taken, version, service.size());
        let granted = service.grantable(ME, &all(0, 10));
        service.mark_flushed(ME, &granted);
        let done: Vec<_> = granted.iter().map(|o| (o.range, o.version)).collect();
        view.flushed(&done);
        let answer = service.detach(ME, &all(0, 10)).expect("it is flushed");
        view.detached(&all(0, 10), answer);
        view.drop_clean(ByteRange::ALL);
    }
    assert!(!service.changed_after(view.known_version()).is_empty());
    let heard = view.heard_version();
    service.attach(A, &all(0, 5));
    let theirs = service.grantable(A, &all(0, 5));
    service.mark_flushed(A, &theirs);
    service.detach(A, &all(0, 5)).expect("it is flushed");
    assert_eq!(service.changed_after(heard), all(0, 5), "somebody else's is");
}

/// What others have flushed behind the bytes that are given back is not zeros, also when the answer that
/// shows it to be nobody's is older than the one to the detach, and comes after it.
#[test]
fn giving_back_does_not_say_where_the_backing_ends() {
    let mut service = FileState::new(0);
    let mut view = FileView::new(ME);
    let flush = |service: &mut FileState, node| {
        service.mark_flushed(node, &service.grantable(node, &[ByteRange::ALL]));
    };
    view.apply(&service.query(ByteRange::ALL, Version::ZERO));
    view.write(ByteRange::new(0, 10));
    let taken = view.take_unattached(ByteRange::ALL);
    let version = service.attach(ME, &taken);
    view.attached(&taken, version, service.size());
    flush(&mut service, ME);
    view.flushed(&[(ByteRange::new(0, 10), version)]);
    service.attach(A, &all(20, 30));
    flush(&mut service, A);
    service.detach(A, &[ByteRange::ALL]).expect("it is flushed");
    let older = service.query(ByteRange::ALL, Version::ZERO);
    let answer = service.detach(ME, &all(0, 10)).expect("it is flushed");
    view.detached(&all(0, 10), answer);
    view.apply(&older);
    let plan = view.plan_read(ByteRange::new(20, 30));
    let sources: Vec<_> = plan.iter().map(|p| (p.range, p.source)).collect();
    assert_eq!(sources, [(ByteRange::new(20, 30), Source::Backing)]);
    // What was cut off comes back by nothing that was flushed before.
    service.truncate(5);
    service.truncate(30);
    let answer = service.detach(ME, &all(0, 10)).expect("nothing is its own");
    view.detached(&all(0, 10), answer);
    let plan = view.plan_read(ByteRange::new(20, 30));
    assert_eq!(plan.iter().map(|p| p.source).collect::<Vec<_>>(), [Source::Zero]);
}

#[test]
fn own_bytes_that_are_not_here_are_never_zeros() {
    let mut service = FileState::new(0);
    service.attach(ME, &all(0, 10));
    let mut view = FileView::new(ME);
    view.apply(&service.query(ByteRange::ALL, Version::ZERO));
    let plan = view.plan_read(ByteRange::ALL);
    assert_eq!(plan.len(), 1);
    assert!(matches!(plan[0].source, Source::Peer { node: ME, .. }));
    assert!(view.fetched(ByteRange::new(0, 10), Version(100)).is_empty());
    assert!(!view.is_complete());
}

#[test]
fn unknown_bytes_are_told_by_their_version() {
    let mut service = FileState::new(0);
    for i in 0..200 {
        service.attach(if i % 2 == 0 { A } else { ME }, &all(i * 10, i * 10 + 10));
    }
    let mut view = FileView::new(ME);
    let answer = service.query(ByteRange::new(100, 110), Version::ZERO);
    assert_eq!(answer.covers, ByteRange::new(100, 110));
    view.apply(&answer);
    let plan = view.plan_read(ByteRange::new(90, 110));
    assert_eq!(plan[0].as_of, Version::ZERO);
    assert_eq!(plan[1].as_of, service.version());
    assert_eq!(view.known_version(), Version::ZERO);
}

#[test]
fn two_attaches_of_the_same_bytes_must_both_be_answered() {
    let mut service = FileState::new(0);
    let mut view = FileView::new(ME);
    let r = ByteRange::new(0, 4);
    view.write(r);
    let first = view.take_unattached(ByteRange::ALL);
    let v1 = service.attach(ME, &first);
    view.write(r);
    let second = view.take_unattached(ByteRange::ALL);
    view.attached(&first, v1, 4);
    assert!(view.has_unattached(), "the second is still under way");
    let v2 = service.attach(ME, &second);
    view.attached(&second, v2, 4);
    assert_eq!(view.unflushed(ByteRange::ALL), [(r, v2)]);
}

#[test]
fn a_fast_path_needs_every_byte_or_a_true_hole() {
    let mut service = FileState::new(4);
    service.attach(A, &all(8, 10));
    service.truncate(20);
    let mut view = FileView::new(ME);
    assert!(view.is_blank() && view.is_complete());
    view.apply(&service.query(ByteRange::ALL, Version::ZERO));
    assert!(!view.is_blank() && !view.is_complete());
    for piece in view.plan_read(ByteRange::ALL) {
        if piece.source != Source::Zero {
            assert_eq!(view.fetched(piece.range, piece.as_of), [piece.range]);
        }
    }
    assert!(view.is_complete(), "4..8 and 10..20 are holes for everybody");
    assert_eq!((view.seek_data(5), view.seek_hole(0)), (Some(8), Some(4)));
}

/// Small appends cost one extent each until they are flushed, then one per span.
#[test]
fn flushed_extents_merge_and_so_do_others_on_request() {
    let mut service = FileState::new(0);
    let mut view = FileView::new(ME);
    let append = |view: &mut FileView, service: &mut FileState| {
        view.write(ByteRange::at(service.size(), 100));
        let taken = view.take_unattached(ByteRange::ALL);
        let version = service.attach(ME, &taken);
        view.attached(&taken, version, service.size());
    };
    (0..50).for_each(|_| append(&mut view, &mut service));
    assert_eq!(view.local.len(), 50);
    let grant = service.grantable(ME, &all(0, 5000));
    let list: Vec<_> = grant.iter().map(|g| (g.range, g.version)).collect();
    (0..50).for_each(|_| append(&mut view, &mut service));
    service.mark_flushed(ME, &grant);
    view.flushed(&list);
    assert_eq!((view.local.len(), view.clean_bytes()), (51, 5000));
    view.compact(&[]);
    assert_eq!((view.local.len(), view.unflushed_bytes()), (2, 5000));
}

/// An answer that was on its way while our bytes were attached around it cannot be judged.
#[test]
fn an_answer_older_than_merged_parts_is_doubtful() {
    let mut service = FileState::new(0);
    let mut view = FileView::new(ME);
    let attach = |view: &mut FileView, service: &mut FileState, r: ByteRange| {
        view.write(r);
        let taken = view.take_unattached(ByteRange::ALL);
        let version = service.attach(ME, &taken);
        view.attached(&taken, version, service.size());
    };
    attach(&mut view, &mut service, ByteRange::new(0, 4));
    service.attach(A, &all(0, 4));
    let old = service.query(ByteRange::ALL, Version::ZERO);
    attach(&mut view, &mut service, ByteRange::new(4, 8));
    view.compact(&[]);
    let changes = view.apply(&old);
    assert_eq!(changes.doubtful, all(0, 8));
    assert!(changes.overtaken.is_empty() && view.local(ByteRange::new(0, 8)));
    let changes = view.apply(&service.query(ByteRange::ALL, view.known_version()));
    assert_eq!((changes.overtaken, changes.doubtful), (all(0, 4), vec![]));
}

/// What a remote answer says out of order is left out, not trusted.
#[test]
fn answers_out_of_order_do_no_harm() {
    let mut view = FileView::new(ME);
    let owned =
        |a, b| Owned { range: ByteRange::new(a, b), node: A, version: Version(2), flushed: false };
    let answer = MapAnswer {
        version: Version(2),
        size: 30,
        base_version: Version(1),
        base_len: 0,
        unchanged: false,
        covers: ByteRange::new(0, 30),
        ranges: vec![owned(10, 20), owned(5, 15), owned(40, 50), owned(20, 20)],
    };
    view.apply(&answer);
    let plan = view.plan_read(ByteRange::ALL);
    let owned: Vec<_> = plan.iter().filter(|p| p.source != Source::Zero).map(|p| p.range).collect();
    assert_eq!(owned, all(10, 20));
}

/// A view that was restored behaves as the one that was lost: it flushes what it owns, attaches
/// what was dirty, and says of a byte that is gone that it is gone.
#[test]
fn a_restored_view_goes_on_where_the_old_one_stopped() {
    let mut service = FileState::new(0);
    let v1 = service.attach(ME, &[ByteRange::new(0, 8)]);
    let v2 = service.attach(NodeId(2), &[ByteRange::new(8, 10)]);
    let answer = service.query(ByteRange::ALL, Version::ZERO);
    let owned = [(ByteRange::new(0, 6), v1)];
    let dirty = [ByteRange::new(2, 4), ByteRange::new(12, 14)];
    let mut view = FileView::restored(ME, &answer, &owned, &dirty);
    assert_eq!((view.size(), view.published_size()), (14, 10));
    assert_eq!(view.unattached(ByteRange::ALL), dirty);
    assert_eq!(view.unflushed_bytes(), 8);
    let sources: Vec<_> =
        view.plan_read(ByteRange::ALL).iter().map(|p| (p.range, p.source)).collect();
    let wanted = vec![
        (ByteRange::new(0, 6), Source::Local),
        (ByteRange::new(6, 8), Source::Peer { node: ME, version: v1 }),
        (ByteRange::new(8, 10), Source::Peer { node: NodeId(2), version: v2 }),
        (ByteRange::new(10, 12), Source::Zero),
        (ByteRange::new(12, 14), Source::Local),
    ];
    assert_eq!(sources, wanted);
    let taken = view.take_unattached(ByteRange::ALL);
    let v3 = service.attach(ME, &taken);
    view.attached(&taken, v3, service.size());
    let granted = service.grantable(ME, &[ByteRange::new(0, 6), ByteRange::new(12, 14)]);
    service.mark_flushed(ME, &granted);
    let granted: Vec<_> = granted.iter().map(|o| (o.range, o.version)).collect();
    view.flushed(&granted);
    assert_eq!(view.unflushed_bytes(), 0);
    // Another node takes bytes: the restored ones go like any others.
    service.attach(NodeId(2), &[ByteRange::new(0, 1)]);
    let changes = view.apply(&service.query(ByteRange::ALL, Version::ZERO));
    assert_eq!(changes.overtaken, [ByteRange::new(0, 1)]);
}

#[test]
fn a_copy_is_lent_only_while_it_is_the_newest_that_is_known() {
    let mut service = FileState::new(100);
    let mut view = FileView::new(ME);
    let range = ByteRange::new(0, 50);
    view.apply(&service.query(ByteRange::ALL, Version::ZERO));
    let first = service.version();
    assert!(!view.has_copy(range, first), "not here");
    assert_eq!(view.fetched(range, first), [range]);
    assert!(view.has_copy(range, first));
    assert!(!view.has_copy(ByteRange::new(0, 51), first));
    assert!(!view.has_copy(range, first.next()), "who knows more may know of a change");
    view.write(ByteRange::new(10, 20));
    assert!(!view.has_copy(range, first) && view.has_copy(ByteRange::new(20, 50), first));

    service.attach(A, &all(40, 60));
    view.apply(&service.query(ByteRange::ALL, Version::ZERO));
    assert!(view.has_copy(ByteRange::new(20, 40), service.version()));
    assert!(!view.has_copy(ByteRange::new(20, 50), first), "another node's");
    service.mark_flushed(A, &service.grantable(A, &[ByteRange::ALL]));
    service.detach(A, &[ByteRange::ALL]).unwrap();
    view.apply(&service.query(ByteRange::ALL, Version::ZERO));
    assert!(
        !view.has_copy(ByteRange::new(40, 50), service.version()),
        "changed since it was copied"
    );
}

#[test]
fn what_is_written_is_sent_part_by_part() {
    let mut view = FileView::new(ME);
    (0..10).for_each(|i| view.write(ByteRange::at(i * 10, 5)));
    let (mut within, mut taken) = (ByteRange::ALL, Vec::new());
    let mut parts = 0;
    while !within.is_empty() {
        let part = view.part(within, 4);
        let some = view.take_unattached(part);
        assert!(some.len() <= 4);
        taken.extend(some);
        within = ByteRange::new(part.end(), within.end());
        parts += 1;
    }
    assert_eq!((parts, taken.len()), (3, 10));
    assert_eq!(view.part(ByteRange::ALL, 10), ByteRange::ALL);
}

/// Of a claimed block that others have, as many runs were written as there are bytes.
#[test]
fn many_runs_of_a_refused_claim_are_settled_at_once() {
    const LEN: u64 = 1 << 20;
    let mut view = FileView::new(ME);
    view.found(&all(0, LEN));
    let written: Vec<ByteRange> = (0..LEN).step_by(2).map(|at| ByteRange::at(at, 1)).collect();
    let began = std::time::Instant::now();
    let rest = view.refused(&all(0, LEN), &written);
    assert!(began.elapsed().as_secs() < 60, "it takes time by the number of runs, not its square");
    assert_eq!((rest.len(), rest[0]), (written.len(), ByteRange::at(1, 1)));
    assert_eq!(view.unattached(ByteRange::ALL), written);
}

#[test]
fn damaged_bytes_that_nobody_else_has_are_lost_until_they_are_written_again() {
    let mut service = FileState::new(0);
    let mut view = FileView::new(ME);
    let ask = |service: &FileState, view: &mut FileView| {
        view.apply(&service.query(ByteRange::ALL, view.known_version()))
    };
    ask(&service, &mut view);
    view.write(ByteRange::new(0, 30));
    let taken = view.take_unattached(ByteRange::ALL);
    let version = service.attach(ME, &taken);
    view.attached(&taken, version, service.size());
    view.flushed(&[(ByteRange::new(0, 10), version)]);
    view.write(ByteRange::new(4, 5));
    let taken = view.take_unattached(ByteRange::ALL);
    let newer = service.attach(ME, &taken);
    view.attached(&taken, newer, service.size());
    view.write(ByteRange::new(25, 30));
    let damaged = view.damaged(ByteRange::new(5, 30));
    assert_eq!((damaged.flushed, damaged.lost), (all(5, 10), all(10, 25)), "dirty ones stay");
    for _ in 0..2 {
        let plan = view.plan_read(ByteRange::new(0, 30));
        let sources: Vec<_> = plan.iter().map(|p| (p.range, p.source)).collect();
        assert_eq!(sources[0], (ByteRange::new(0, 10), Source::Local));
        assert!(matches!(sources[1], (r, Source::Peer { node: ME, .. }) if vec![r] == all(10, 25)));
        assert_eq!(sources[2], (ByteRange::new(25, 30), Source::Local));
        // The service says the same.
        ask(&service, &mut view);
    }
    view.write(ByteRange::new(10, 12));
    service.attach(A, &all(20, 25));
    ask(&service, &mut view);
    let plan = view.plan_read(ByteRange::new(10, 25));
    let sources: Vec<_> = plan.iter().map(|p| (p.range, p.source)).collect();
    assert_eq!(sources[0], (ByteRange::new(10, 12), Source::Local));
    assert!(matches!(sources[1], (r, Source::Peer { node: ME, .. }) if vec![r] == all(12, 20)));
    assert!(matches!(sources[2], (r, Source::Peer { node: A, .. }) if vec![r] == all(20, 25)));
}
