//! The papers' examples, and the checker against its definition spelled out naively.

use super::*;
use crate::table::ModelTable;
use proptest::prelude::*;
use std::sync::Arc;

const F: File = File(1);
const P: Process = Process(0);
const Q: Process = Process(1);

fn model(name: &str) -> Arc<Model> {
    ModelTable::builtin().get(name).unwrap()
}

fn all() -> ByteRange {
    ByteRange::new(0, 10)
}

/// P writes and does `publish`, sends a message; Q receives it, does `observe` and reads.
fn handoff(publish: &[SyncEvent], observe: &[SyncEvent], message: bool) -> Trace {
    let mut t = Trace::new();
    t.write(P, F, all());
    for event in publish {
        t.sync(P, F, *event);
    }
    let sent = t.mark(P);
    let received = t.mark(Q);
    if message {
        t.order(sent, received).unwrap();
    }
    for event in observe {
        t.sync(Q, F, *event);
    }
    t.read(Q, F, ByteRange::new(9, 20));
    t
}

#[test]
fn each_model_wants_its_own_chain() {
    use SyncEvent::*;
    // (publish, observe, models under which it does not race)
    let cases: [(&[SyncEvent], &[SyncEvent], &[&str]); 8] = [
        (&[], &[], &["posix"]),
        (&[Fsync], &[], &["posix", "commit", "romio"]),
        (&[Close], &[], &["posix", "commit", "romio"]),
        (&[Close], &[Open], &["posix", "commit", "session", "mpiio", "romio"]),
        (&[Fsync], &[Fsync], &["posix", "commit", "mpiio", "romio"]),
        (&[Fsync], &[Open], &["posix", "commit", "mpiio", "romio"]),
        (&[], &[Open], &["posix"]),
        (&[Close], &[Stat], &["posix", "commit", "romio"]),
    ];
    for (publish, observe, fine) in cases {
        for name in ModelTable::builtin().names() {
            let races = check(&handoff(publish, observe, true), &model(name));
            assert_eq!(races.is_empty(), fine.contains(&name), "{publish:?} {observe:?} {name}");
            let alone = check(&handoff(publish, observe, false), &model(name));
            assert_eq!(alone.len(), 1);
            assert_eq!(
                (alone[0].missing.clone(), alone[0].range),
                (Missing::Order, ByteRange::new(9, 10))
            );
        }
    }
}

#[test]
fn a_race_says_what_is_missing() {
    use SyncEvent::*;
    let session = model("session");
    let text =
        |p: &[SyncEvent], o: &[SyncEvent]| check(&handoff(p, o, true), &session)[0].to_string();
    assert!(text(&[], &[Open]).contains("no close or unlock or commit after"));
    assert!(text(&[Close], &[]).contains("no open or lock before"));

    // Q opened before the message came.
    let mut t = Trace::new();
    t.sync(Q, F, Open);
    t.write(P, F, all());
    t.sync(P, F, Close);
    let (sent, received) = (t.mark(P), t.mark(Q));
    t.order(sent, received).unwrap();
    t.read(Q, F, all());
    assert_eq!(check(&t, &session)[0].missing, Missing::Chain);
}

#[test]
fn locks_order_and_synchronise() {
    for name in ModelTable::builtin().names() {
        let mut t = Trace::new();
        for process in [P, Q, Process(2)] {
            t.lock(process, F, all(), LockKind::Exclusive);
            t.read(process, F, all());
            t.write(process, F, all());
            t.unlock(process, F, all(), LockKind::Exclusive);
        }
        assert_eq!(check(&t, &model(name)), [], "{name}");
    }
    let mut t = Trace::new();
    t.lock(P, F, all(), LockKind::Shared);
    t.write(P, F, all());
    t.unlock(P, F, all(), LockKind::Shared);
    t.lock(Q, F, all(), LockKind::Shared);
    t.read(Q, F, all());
    assert_eq!(check(&t, &model("posix")).len(), 1, "shared locks order nothing");
}

#[test]
fn processes_of_one_node_share_its_view() {
    let mut t = handoff(&[], &[], true);
    assert_eq!(check(&t, &model("session")).len(), 1);
    t.place(P, 7);
    t.place(Q, 7);
    assert_eq!(check(&t, &model("session")), []);
    t.place(Q, 8);
    assert_eq!(check(&t, &model("session")).len(), 1);
}

#[test]
fn other_files_and_other_bytes_do_not_matter() {
    let mut t = Trace::new();
    t.write(P, F, all());
    t.write(Q, File(2), all());
    t.write(Q, F, ByteRange::new(10, 20));
    t.read(Q, F, ByteRange::new(5, 5));
    t.sync(P, File(2), SyncEvent::Close);
    assert_eq!(check(&t, &model("session")), []);
    assert!(t.order(OpId(3), OpId(1)).is_err() && t.order(OpId(1), OpId(9)).is_err());
}

#[derive(Clone, Debug)]
struct Random {
    process: u32,
    file: u32,
    kind: u8,
    start: u64,
    causes: Vec<usize>,
}

fn random() -> impl Strategy<Value = Vec<Random>> {
    let op = (0..3u32, 1..3u32, 0..9u8, 0..4u64, prop::collection::vec(0..40usize, 0..2));
    let op = op.prop_map(|(process, file, kind, start, causes)| Random {
        process,
        file,
        kind,
        start,
        causes,
    });
    prop::collection::vec(op, 1..40)
}

fn trace_of(ops: &[Random]) -> Trace {
    use SyncEvent::*;
    let mut t = Trace::new();
    for (i, o) in ops.iter().enumerate() {
        let (p, f, r) = (Process(o.process), File(o.file), ByteRange::at(o.start, 2));
        let id = match o.kind {
            0 | 1 => t.read(p, f, r),
            2 | 3 => t.write(p, f, r),
            k => t.sync(p, f, [Open, Close, Fsync, Commit, Stat][k as usize - 4]),
        };
        for c in o.causes.iter().filter(|c| **c < i) {
            t.order(OpId(*c), id).unwrap();
        }
    }
    t
}

/// The definition, word by word: every chain is tried.
fn naive(t: &Trace, model: &Model) -> Vec<(OpId, OpId)> {
    let n = t.len();
    let mut hb = vec![vec![false; n]; n];
    for b in 0..n {
        for a in 0..b {
            let direct = t.ops[a].process == t.ops[b].process || t.causes[b].contains(&OpId(a));
            hb[a][b] |= direct;
            if direct {
                for row in hb.iter_mut() {
                    row[b] |= row[a];
                }
            }
        }
    }
    let po = |a: usize, b: usize| a < b && t.ops[a].process == t.ops[b].process;
    let is = |i: usize, set: &Option<Vec<SyncEvent>>, file: File| match (&t.ops[i].what, set) {
        (What::Sync(e), Some(set)) => set.contains(e) && t.ops[i].file == file,
        _ => false,
    };
    let msc = model.msc();
    let synced = |x: usize, y: usize| {
        if matches!(t.ops[x].what, What::Read(_)) {
            return hb[x][y];
        }
        let file = t.ops[x].file;
        let first: Vec<usize> = match msc.publish {
            None => vec![x],
            _ => (0..n).filter(|s| po(x, *s) && is(*s, &msc.publish, file)).collect(),
        };
        let second: Vec<usize> = match msc.observe {
            None => vec![y],
            _ => (0..n).filter(|s| po(*s, y) && is(*s, &msc.observe, file)).collect(),
        };
        first.iter().any(|a| second.iter().any(|b| hb[*a][*b]))
    };
    let range = |i: usize| match t.ops[i].what {
        What::Read(r) => Some((r, false)),
        What::Write(r) => Some((r, true)),
        _ => None,
    };
    let mut races = Vec::new();
    for x in 0..n {
        for y in x + 1..n {
            let (Some((a, w1)), Some((b, w2))) = (range(x), range(y)) else { continue };
            let conflict = a.overlaps(b) && (w1 || w2) && t.ops[x].file == t.ops[y].file;
            if conflict && t.ops[x].process != t.ops[y].process && !synced(x, y) && !synced(y, x) {
                races.push((OpId(x), OpId(y)));
            }
        }
    }
    races
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_checker_is_its_definition(ops in random()) {
        let trace = trace_of(&ops);
        for name in ModelTable::builtin().names() {
            let races: Vec<_> =
                check(&trace, &model(name)).into_iter().map(|r| (r.first, r.second)).collect();
            prop_assert_eq!(races, naive(&trace, &model(name)), "{}", name);
        }
    }
}
