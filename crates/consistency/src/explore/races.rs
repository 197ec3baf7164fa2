//! Is a program race-free under a model, in every run that sequential consistency allows?

use super::program::{FILE_MAX, Op, Program};
use crate::checker::{self, File, LockKind, OpId, Trace, check};
use crate::model::Model;
use ebb_types::ByteRange;
use std::collections::{BTreeMap, HashSet};

const FILE: File = File(0);

/// True when no run of the program has a storage race under `model`, and every run ends. Processes
/// of one node count as sharing a view when `shared` says so; else each stands for itself.
///
/// Without locks, what happens before what is the same in every run, so one run tells all; with
/// locks every order of the operations is looked at.
#[must_use]
pub fn is_race_free(program: &Program, model: &Model, shared: bool) -> bool {
    let mut runs = Runs { program, model, shared, seen: HashSet::new() };
    let start = Run { at: vec![0; program.processes.len()], order: Vec::new() };
    runs.all_fine(start)
}

#[derive(Clone)]
struct Run {
    at: Vec<usize>,
    /// Which process took each step.
    order: Vec<usize>,
}

struct Runs<'a> {
    program: &'a Program,
    model: &'a Model,
    shared: bool,
    /// Positions and order of lock holders: runs that agree in both have the same races from
    /// here on.
    seen: HashSet<(Vec<usize>, Vec<usize>)>,
}

impl Runs<'_> {
    fn all_fine(&mut self, run: Run) -> bool {
        let ready: Vec<usize> = (0..run.at.len()).filter(|p| self.can_go(&run, *p)).collect();
        if ready.is_empty() {
            let ended = |(p, at): (usize, &usize)| *at == self.program.processes[p].ops.len();
            return run.at.iter().enumerate().all(ended) && self.is_fine(&run);
        }
        let locks = self.program.has_locks();
        for p in ready {
            let mut next = run.clone();
            next.at[p] += 1;
            next.order.push(p);
            if locks && !self.seen.insert((next.at.clone(), self.holders(&next))) {
                continue;
            }
            if !self.all_fine(next) {
                return false;
            }
            if !locks {
                return true;
            }
        }
        true
    }

    fn ops_of(&self, run: &Run) -> Vec<(usize, Op)> {
        let mut at = vec![0; run.at.len()];
        let step = |p: &usize| {
            at[*p] += 1;
            (*p, self.program.processes[*p].ops[at[*p] - 1])
        };
        run.order.iter().map(step).collect()
    }

    fn holders(&self, run: &Run) -> Vec<usize> {
        self.ops_of(run).into_iter().filter(|(_, o)| *o == Op::Lock).map(|(p, _)| p).collect()
    }

    fn can_go(&self, run: &Run, p: usize) -> bool {
        let Some(op) = self.program.processes[p].ops.get(run.at[p]) else { return false };
        let done = self.ops_of(run);
        let count = |op: Op| done.iter().filter(|(_, o)| *o == op).count();
        match op {
            Op::Recv(m) => count(Op::Send(*m)) > 0,
            Op::Lock => count(Op::Lock) == count(Op::Unlock),
            _ => true,
        }
    }

    fn is_fine(&self, run: &Run) -> bool {
        let mut trace = Trace::new();
        let mut sent: BTreeMap<u8, OpId> = BTreeMap::new();
        if self.shared {
            for (i, p) in self.program.processes.iter().enumerate() {
                trace.place(checker::Process(i as u32), p.node as u32);
            }
        }
        let all = ByteRange::ALL;
        for (p, op) in self.ops_of(run) {
            let p = checker::Process(p as u32);
            match op {
                Op::Sync(event) => trace.sync(p, FILE, event),
                Op::Lock => trace.lock(p, FILE, all, LockKind::Exclusive),
                Op::Unlock => trace.unlock(p, FILE, all, LockKind::Exclusive),
                Op::Read(r) => trace.read(p, FILE, r),
                Op::Write(r) | Op::Zero(r) => trace.write(p, FILE, r),
                Op::Truncate(len) => trace.write(p, FILE, ByteRange::new(len, FILE_MAX + 1)),
                // Not a call of the program's: it orders nothing.
                Op::Restart => trace.mark(p),
                Op::Send(m) => *sent.entry(m).or_insert(trace.mark(p)),
                Op::Recv(m) => {
                    let received = trace.mark(p);
                    let edge = sent.get(&m).map(|s| trace.order(*s, received));
                    debug_assert!(matches!(edge, Some(Ok(()))), "received what was sent");
                    received
                }
            };
        }
        check(&trace, self.model).is_empty()
    }
}
