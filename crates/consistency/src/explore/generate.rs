//! Programs, systematically: every small one of a kind, in a fixed order.
//!
//! * [`handoffs`]: every short sequence of reads and writes of up to three processes, with the
//!   shortest chain that the model asks for put between conflicting ones. Race-free by
//!   construction, and as weakly synchronised as it may be.
//! * [`raw`]: every pair of short sequences of calls, whatever they mean; most race.
//! * [`locked`]: every pair of critical sections.

use super::program::{Op, Process, Program};
use crate::model::{Model, SyncEvent};
use ebb_types::ByteRange;

/// Of the two bytes that generated programs touch, the first is on the backing at the start.
const BASE: u64 = 1;

/// The ranges that generated programs use: each byte, and both.
#[must_use]
pub fn ranges() -> [ByteRange; 3] {
    [ByteRange::new(0, 1), ByteRange::new(1, 2), ByteRange::new(0, 2)]
}

/// What a generated process does with bytes.
fn accesses(truncate: bool) -> Vec<Op> {
    let reads = ranges().map(Op::Read);
    let writes = ranges().map(Op::Write);
    let cut = truncate.then_some(Op::Truncate(1));
    writes.into_iter().chain(reads).chain(cut).collect()
}

fn touched(op: Op) -> (ByteRange, bool) {
    match op {
        Op::Read(r) => (r, false),
        Op::Write(r) | Op::Zero(r) => (r, true),
        Op::Truncate(len) => (ByteRange::from(len), true),
        _ => (ByteRange::new(0, 0), false),
    }
}

fn conflict(a: Op, b: Op) -> bool {
    let ((ra, wa), (rb, wb)) = (touched(a), touched(b));
    (wa || wb) && ra.overlaps(rb)
}

/// Every sequence of `k` accesses of up to three processes in which some two of different
/// processes conflict, synchronised as weakly as `model` allows. Processes are named in the order
/// in which they come.
pub fn handoffs(model: &Model, k: usize, truncate: bool) -> Vec<Program> {
    let accesses = accesses(truncate);
    let choices = accesses.len() * 3;
    let mut out = Vec::new();
    for number in 0..choices.pow(k as u32) {
        let mut rest = number;
        let mut next = || {
            let c = rest % choices;
            rest /= choices;
            (c / accesses.len(), accesses[c % accesses.len()])
        };
        let sequence: Vec<(usize, Op)> = (0..k).map(|_| next()).collect();
        if in_order(&sequence) && ends_in_conflict(&sequence) {
            out.push(synchronised(&sequence, model, number));
        }
    }
    out
}

/// Processes come as 0, 1, 2.
fn in_order(sequence: &[(usize, Op)]) -> bool {
    let mut next = 0;
    sequence.iter().all(|(p, _)| {
        let fine = *p <= next;
        next = next.max(p + 1);
        fine
    })
}

/// The last access conflicts with one of another process; else a shorter sequence says as much.
fn ends_in_conflict(sequence: &[(usize, Op)]) -> bool {
    let Some(((q, y), before)) = sequence.split_last() else { return false };
    before.iter().any(|(p, x)| p != q && conflict(*x, *y))
}

/// Puts the model's chain between accesses that conflict. `salt` chooses among its events.
fn synchronised(sequence: &[(usize, Op)], model: &Model, salt: usize) -> Program {
    let msc = model.msc();
    let plain = |e: &&SyncEvent| !matches!(e, SyncEvent::Lock | SyncEvent::Unlock);
    let pick = |set: &Option<Vec<SyncEvent>>, salt: usize| {
        let set: Vec<SyncEvent> = set.iter().flatten().filter(plain).copied().collect();
        (!set.is_empty()).then(|| Op::Sync(set[salt % set.len()]))
    };
    let mut ops: [Vec<Op>; 3] = Default::default();
    // Accesses of each process that each other one is not yet ordered after.
    let mut open: [[Vec<Op>; 3]; 3] = Default::default();
    let mut messages = 0;
    for (q, y) in sequence.iter().copied() {
        let mut observe = false;
        for p in (0..3).filter(|p| *p != q) {
            if !open[p][q].iter().any(|x| conflict(*x, y)) {
                continue;
            }
            let wrote = open[p][q].iter().any(|x| touched(*x).1);
            ops[p].extend(pick(&msc.publish, salt + messages as usize).filter(|_| wrote));
            ops[p].push(Op::Send(messages));
            ops[q].push(Op::Recv(messages));
            messages += 1;
            observe |= wrote;
            open[p][q].clear();
        }
        ops[q].extend(pick(&msc.observe, salt / 2).filter(|_| observe));
        ops[q].push(y);
        (0..3).filter(|r| *r != q).for_each(|r| open[q][r].push(y));
    }
    Program::of(BASE, ops.into_iter().filter(|o| !o.is_empty()).collect())
}

/// Every pair of sequences of exactly `a` and `b` calls out of what `model` knows, where the first
/// process sends one message and the second one receives it.
pub fn raw(model: &Model, a: usize, b: usize) -> impl Iterator<Item = Program> {
    let acts = |e: &SyncEvent| {
        let actions = model.on(*e);
        let plain =
            !matches!(e, SyncEvent::Read | SyncEvent::Write | SyncEvent::Lock | SyncEvent::Unlock);
        plain && (actions.attach.is_some() || actions.query.is_some())
    };
    let syncs = SyncEvent::ALL.into_iter().filter(acts).map(Op::Sync);
    let all: Vec<Op> = accesses(false).into_iter().chain(syncs).collect();
    let first = sequences(&all, Op::Send(0), a);
    let second = sequences(&all, Op::Recv(0), b);
    let writes = |ops: &Vec<Op>| ops.iter().any(|o| matches!(o, Op::Write(_)));
    let reads = |ops: &Vec<Op>| matches!(ops.last(), Some(Op::Read(_)));
    let first: Vec<_> = first.into_iter().filter(writes).collect();
    let second: Vec<_> = second.into_iter().filter(reads).collect();
    first.into_iter().flat_map(move |p| {
        let second = second.clone();
        second.into_iter().map(move |q| Program::of(BASE, vec![p.clone(), q]))
    })
}

/// Every sequence of `n` operations of which exactly one is `once`.
fn sequences(all: &[Op], once: Op, n: usize) -> Vec<Vec<Op>> {
    let mut out = Vec::new();
    for place in 0..n {
        for number in 0..all.len().pow(n as u32 - 1) {
            let mut rest = number;
            let mut ops = Vec::with_capacity(n);
            for i in 0..n {
                if i == place {
                    ops.push(once);
                } else {
                    ops.push(all[rest % all.len()]);
                    rest /= all.len();
                }
            }
            out.push(ops);
        }
    }
    out
}

/// Two processes with one critical section of two accesses each, every one of them.
pub fn locked() -> Vec<Program> {
    let accesses = accesses(false);
    let mut sections = Vec::new();
    for x in &accesses {
        for y in &accesses {
            sections.push(vec![Op::Lock, *x, *y, Op::Unlock]);
        }
    }
    let mut out = Vec::new();
    for (i, a) in sections.iter().enumerate() {
        for b in &sections[i..] {
            out.push(Program::of(BASE, vec![a.clone(), b.clone()]));
        }
    }
    out
}

/// The same program on a file that is empty at first, with zeros instead of the writes that `which`
/// has a bit for.
#[must_use]
pub fn blank(program: &Program, which: usize) -> Program {
    let mut program = Program { base: 0, ..program.clone() };
    let mut seen = 0;
    for op in program.processes.iter_mut().flat_map(|p| &mut p.ops) {
        if let Op::Write(r) = *op {
            if which & (1 << seen) != 0 {
                *op = Op::Zero(r);
            }
            seen += 1;
        }
    }
    program
}

/// Two processes that write neighbouring bytes, publish and read their own, in any mixture: programs
/// in which blocks are shared and bytes are not.
#[must_use]
pub fn beside(model: &Model) -> Vec<Program> {
    let publish = SyncEvent::ALL.into_iter().find(|e| model.on(*e).attach.is_some());
    let publish = publish.map_or(Op::Sync(SyncEvent::Close), Op::Sync);
    let (low, high) = (ByteRange::new(0, 1), ByteRange::new(1, 2));
    let (lower, higher) = (ByteRange::new(2, 3), ByteRange::new(3, 4));
    let shapes = |a: ByteRange, b: ByteRange| {
        vec![
            vec![Op::Write(a), publish],
            vec![Op::Write(a), Op::Write(b), publish],
            vec![Op::Write(a), publish, Op::Write(a), publish, Op::Read(a)],
        ]
    };
    let mut out = Vec::new();
    for first in shapes(low, lower) {
        for second in shapes(high, higher) {
            out.push(Program::of(0, vec![first.clone(), second]));
        }
    }
    out
}

/// The same program with a daemon that dies and comes back after some operation: once for each place.
#[must_use]
pub fn interrupted(program: &Program) -> Vec<Program> {
    let mut out = Vec::new();
    for (p, process) in program.processes.iter().enumerate() {
        for at in 1..=process.ops.len() {
            let mut program = program.clone();
            let again = [Op::Restart, Op::Sync(SyncEvent::Open)];
            program.processes[p].ops.splice(at..at, again);
            out.push(program);
        }
    }
    out
}

/// The same program with its last process on the node of the first.
#[must_use]
pub fn crowded(program: &Program) -> Program {
    let mut program = program.clone();
    if let Some(Process { node, .. }) = program.processes.last_mut() {
        *node = 0;
    }
    program
}
