//! The sweep against the checker of small traces, which is the definition.

use super::*;
use crate::checker::{LockKind, OpId, Trace, check};
use crate::model::SyncEvent;
use crate::table::ModelTable;
use proptest::prelude::*;
use std::collections::BTreeMap;

#[derive(Clone, Debug)]
struct Random {
    process: u32,
    file: u32,
    kind: u8,
    start: u64,
    len: u64,
    site: u32,
    cause: Option<usize>,
}

fn random() -> impl Strategy<Value = Vec<Random>> {
    let cause = prop::option::weighted(0.4, 0..60usize);
    let op = (0..4u32, 1..3u32, 0..12u8, 0..4u64, 0..4u64, 0..2u32, cause).prop_map(
        |(process, file, kind, start, len, site, cause)| Random {
            process,
            file,
            kind,
            start,
            len,
            site,
            cause,
        },
    );
    prop::collection::vec(op, 1..60)
}

/// The same operations for both; of each step of a process, which operation it is.
fn both_of(ops: &[Random], nodes: u32) -> (Trace, Run, BTreeMap<(u32, u32), usize>) {
    use SyncEvent::{Close, Commit, Fsync, Open, Stat};
    let (mut trace, mut run) = (Trace::new(), Run::new(4));
    for process in 0..4 {
        if nodes > 0 && process != 3 {
            trace.place(Process(process), process % nodes);
            run.place(Process(process), process % nodes);
        }
    }
    let mut moments: Vec<crate::run::Moment> = Vec::new();
    let mut steps = BTreeMap::new();
    for (i, o) in ops.iter().enumerate() {
        let (p, f, r) = (Process(o.process), File(o.file), ByteRange::at(o.start, o.len));
        let site = Site(o.site);
        steps.insert((o.process, run.step(p)), i);
        let cause = o.cause.filter(|c| *c < i);
        if let Some(c) = cause {
            run.after(p, &moments[c]);
        }
        let id = match o.kind {
            0 | 1 => {
                run.access(p, f, r, Act::Read, site);
                trace.read(p, f, r)
            }
            2 | 3 => {
                run.access(p, f, r, Act::Write, site);
                trace.write(p, f, r)
            }
            4 => {
                run.access(p, f, r, Act::Append, site);
                if r.is_empty() { trace.mark(p) } else { trace.append(p, f, r) }
            }
            k @ (5 | 6) => {
                let kind = [LockKind::Shared, LockKind::Exclusive][k as usize - 5];
                run.lock(p, f, r, kind);
                trace.lock(p, f, r, kind)
            }
            k @ (7 | 8) => {
                let kind = [LockKind::Shared, LockKind::Exclusive][k as usize - 7];
                run.unlock(p, f, r, kind);
                trace.unlock(p, f, r, kind)
            }
            k => {
                let event = [Open, Close, Fsync][k as usize - 9];
                let event = if o.site == 1 && event == Fsync { Commit } else { event };
                let event = if o.len == 3 && event == Open { Stat } else { event };
                run.sync(p, f, event);
                trace.sync(p, f, event)
            }
        };
        if let Some(c) = cause {
            trace.order(OpId(c), id).unwrap();
        }
        moments.push(run.moment(p));
    }
    (trace, run, steps)
}

fn act_of(kind: u8) -> Act {
    match kind {
        0 | 1 => Act::Read,
        2 | 3 => Act::Write,
        _ => Act::Append,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_sweep_finds_what_the_checker_defines(ops in random(), nodes in 0..3u32) {
        let (trace, run, steps) = both_of(&ops, nodes);
        let sorted = Sorted::new(run);
        for name in ModelTable::builtin().names() {
            let model = ModelTable::builtin().get(name).unwrap();
            let races = check(&trace, &model);
            let mut wanted: BTreeMap<_, (u64, u64, u64, u64)> = BTreeMap::new();
            for r in &races {
                let place = |id: OpId| (act_of(ops[id.0].kind), ops[id.0].site);
                let (a, b) = (place(r.first), place(r.second));
                let key = (ops[r.first.0].file, a.min(b), a.max(b));
                let sum = wanted.entry(key).or_insert((0, 0, u64::MAX, 0));
                sum.0 += 1;
                sum.1 += u64::from(r.missing == Missing::Order);
                sum.2 = sum.2.min(r.range.start());
                sum.3 = sum.3.max(r.range.end());
            }
            let verdict = sorted.check(&model);
            prop_assert_eq!(verdict.races(), races.len() as u64);
            prop_assert!(verdict.conflicts >= verdict.races());
            let mut found = BTreeMap::new();
            for g in &verdict.groups {
                let e = &g.example;
                let place = |p: &Party| (p.act, p.site.0);
                let (a, b) = (place(&e.first), place(&e.second));
                let id = |p: &Party| OpId(steps[&(p.process.0, p.step)]);
                let same = |r: &&crate::checker::Race| {
                    (r.first, r.second) == (id(&e.first), id(&e.second))
                };
                let race = races.iter().find(same);
                let race = race.map(|r| (r.range, r.missing.clone()));
                prop_assert_eq!(race, Some((e.range, e.missing.clone())));
                let sums = (g.pairs, g.unordered, g.hull.start(), g.hull.end());
                found.insert((g.file.0, a.min(b), a.max(b)), sums);
            }
            prop_assert_eq!(found, wanted, "{}", name);
        }
    }
}

/// A quarter of a million pairs of each of two processes, without a word between them, and with one.
#[test]
fn pairs_are_counted_without_being_made() {
    let n = 500u64;
    let mut run = Run::new(2);
    for process in [0, 1] {
        for _ in 0..n {
            run.step(Process(process));
            run.access(Process(process), File(1), ByteRange::new(0, 10), Act::Write, Site(0));
        }
    }
    let posix = ModelTable::builtin().get("posix").unwrap();
    let verdict = Sorted::new(run).check(&posix);
    assert_eq!((verdict.conflicts, verdict.races(), verdict.groups.len()), (n * n, n * n, 1));
    assert_eq!(verdict.groups[0].unordered, n * n);

    let mut run = Run::new(2);
    for process in [0, 1] {
        for i in 0..n {
            run.step(Process(process));
            run.access(Process(process), File(1), ByteRange::new(0, 10), Act::Write, Site(0));
            if process == 0 && i == n / 2 {
                let moment = run.moment(Process(0));
                run.after(Process(1), &moment);
            }
        }
    }
    let verdict = Sorted::new(run).check(&posix);
    assert_eq!(verdict.races(), (n - n / 2 - 1) * n);
}
