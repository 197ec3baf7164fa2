//! Leases in the explorer: grants with answers, recalls that travel by themselves, and a clock of
//! three times: a start, a time at which no node trusts any more, and one at which the service
//! waits for nobody any more.

use super::fault::Fault;
use super::world::{Setup, World};
use crate::lease::{FileLease, Grant, LeaseSeq, Leases, Party, StreamId, Trust};
use ebb_types::{Incarnation, Ino, NodeId};

/// The one file.
const INO: Ino = Ino(1);
/// The lease time.
const LEASE: u64 = 10;
/// The times.
const TIMES: [u64; 3] = [0, 9, 11];

/// Everybody's part in the leases of a run.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Lending {
    desk: Leases,
    ends: Vec<End>,
    ticks: usize,
}

/// A node's.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct End {
    stream: StreamId,
    trust: Trust,
    lease: FileLease,
    /// Recalls on their way.
    mail: Vec<LeaseSeq>,
}

fn party(id: NodeId) -> Party {
    Party { node: id, life: Incarnation(1) }
}

impl Lending {
    /// Nodes that have said a word each, and hold nothing.
    pub(super) fn new(nodes: usize) -> Lending {
        let mut desk = Leases::new(LEASE, &[], 0);
        let ends = (0..nodes).map(|i| {
            let stream = desk.join(party(NodeId(i as u32 + 1)), LEASE, 0).0;
            desk.heard(stream, 0);
            let mut trust = Trust::default();
            trust.begin(LEASE);
            trust.answered(0, 0);
            End { stream, trust, lease: FileLease::default(), mail: Vec::new() }
        });
        let ends = ends.collect();
        Lending { desk, ends, ticks: 0 }
    }

    fn now(&self) -> u64 {
        TIMES[self.ticks]
    }

    /// What has been called back until now.
    pub(super) fn upto(&self) -> LeaseSeq {
        self.desk.last()
    }

    pub(super) fn may_tick(&self) -> bool {
        self.ticks + 1 < TIMES.len()
    }

    pub(super) fn tick(&mut self) {
        self.ticks += 1;
    }

    pub(super) fn has_mail(&self, n: usize) -> bool {
        !self.ends[n].mail.is_empty()
    }
}

impl World {
    /// True when node `n` need not ask.
    pub(super) fn is_leased(&self, setup: &Setup<'_>, n: usize) -> bool {
        let (lending, known) = (&self.lending, self.nodes[n].view.known_version());
        let end = &lending.ends[n];
        let now = if setup.fault == Some(Fault::TrustForEver) { 0 } else { lending.now() };
        setup.leases && end.lease.covers_map(end.trust.epoch(now), known)
    }

    /// A grant for node `n`, at the service.
    pub(super) fn grant(&mut self, setup: &Setup<'_>, n: usize) -> Option<Grant> {
        if !setup.leases {
            return None;
        }
        let version = self.service.version();
        let (seq, _) = self.lending.desk.grant(self.lending.ends[n].stream, INO)?;
        Some(Grant { seq, version, compared: false })
    }

    /// A grant has come to node `n`, after its answer was learned.
    pub(super) fn take_grant(&mut self, setup: &Setup<'_>, n: usize, grant: Option<Grant>) {
        // A service with the fault takes the number only now.
        let late = setup.fault == Some(Fault::GrantAfterLook);
        let grant = if late && grant.is_some() { self.grant(setup, n) } else { grant };
        let end = &mut self.lending.ends[n];
        let now = TIMES[self.lending.ticks];
        if let (Some(mut grant), Some(epoch)) = (grant, end.trust.epoch(now)) {
            if late {
                grant.version = self.nodes[n].view.known_version();
            }
            end.lease.granted(grant, epoch);
        }
    }

    /// The file was changed by node `n`: the others are told.
    pub(super) fn call_back(&mut self, setup: &Setup<'_>, n: usize) {
        if !setup.leases {
            return;
        }
        let (by, now) = (Some(self.lending.ends[n].stream), self.lending.now());
        for recall in self.lending.desk.change(INO, by, true, now) {
            let to = recall.node.0 as usize - 1;
            self.lending.ends[to].mail.push(recall.seq);
        }
    }

    /// True while somebody may trust what was before: who waits for it waits on.
    pub(super) fn is_owed(&self, setup: &Setup<'_>, upto: LeaseSeq) -> bool {
        let owed = self.lending.desk.owed(INO, upto, self.lending.now()).is_some();
        owed && setup.fault != Some(Fault::AckBeforeRecall)
    }

    /// Node `n` hears of a recall, and returns what it had.
    pub(super) fn open_mail(&mut self, setup: &Setup<'_>, n: usize) {
        let end = &mut self.lending.ends[n];
        let seq = end.mail.remove(0);
        if setup.fault == Some(Fault::ForgetRecalls) {
            end.lease.give_up();
        } else {
            end.lease.recall(seq);
        }
        self.lending.desk.returned(end.stream, INO, seq);
    }
}
