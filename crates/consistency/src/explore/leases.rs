//! Leases in the explorer: grants with answers, recalls that travel by themselves, and a clock of
//! three times: a start, a time at which no node trusts any more, and one at which the service
//! waits for nobody any more.

use super::fault::Fault;
use super::world::{Setup, World};
use crate::lease::{FileLease, Grant, LeaseSeq, Leases, Party, Recall, StreamId, Trust};
use ebb_types::{Incarnation, Ino, NodeId};

/// The one file.
const INO: Ino = Ino(1);
/// The lease time.
const LEASE: u64 = 10;
/// The times. With quiet writes there is one more, at which the right may be lent again after others
/// have asked.
const TIMES: [u64; 3] = [0, 9, 11];
const TIMES_QUIET: [u64; 4] = [0, 2, 9, 11];

/// Everybody's part in the leases of a run.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Lending {
    desk: Leases,
    ends: Vec<End>,
    times: &'static [u64],
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
    pub(super) fn new(nodes: usize, quiet: bool) -> Lending {
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
        let times = if quiet { &TIMES_QUIET[..] } else { &TIMES };
        Lending { desk, ends, times, ticks: 0 }
    }

    pub(super) fn now(&self) -> u64 {
        self.times[self.ticks]
    }

    /// What node `n` trusts at that time.
    pub(super) fn epoch_at(&self, n: usize, now: u64) -> Option<u64> {
        self.ends[n].trust.epoch(now)
    }

    /// A grant came to node `n`, which had asked for it in `epoch`. False when it was recalled before.
    pub(super) fn take_grant(&mut self, n: usize, grant: Grant, epoch: u64) -> bool {
        self.ends[n].lease.granted(grant, epoch)
    }

    /// The node may still trust what it was granted, as far as the service knows.
    pub(super) fn is_trusted(&self, node: NodeId) -> bool {
        self.desk.trusted_until(node, self.now()).is_some()
    }

    pub(super) fn lends_alone(&self, n: usize) -> bool {
        self.desk.lends_alone(self.ends[n].stream, INO, self.now())
    }

    /// The node must tell what it did without telling.
    pub(super) fn demand(&mut self, node: NodeId) {
        let recalls = self.desk.demand(INO, node, self.now());
        self.post(recalls);
    }

    fn post(&mut self, recalls: Vec<Recall>) {
        for recall in recalls {
            self.ends[recall.node.0 as usize - 1].mail.push(recall.seq);
        }
    }

    /// What has been called back until now.
    pub(super) fn upto(&self) -> LeaseSeq {
        self.desk.last()
    }

    pub(super) fn may_tick(&self) -> bool {
        self.ticks + 1 < self.times.len()
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
        let now = self.lending.now();
        let end = &mut self.lending.ends[n];
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
        let recalls = self.lending.desk.change(INO, by, true, now);
        self.lending.post(recalls);
    }

    /// True while somebody may trust what was before: who waits for it waits on.
    pub(super) fn is_owed(&self, setup: &Setup<'_>, upto: LeaseSeq) -> bool {
        self.is_owed_to(setup, upto, None)
    }

    /// The same without what node `but` owes.
    pub(super) fn is_owed_to(&self, setup: &Setup<'_>, upto: LeaseSeq, but: Option<usize>) -> bool {
        let (lending, now) = (&self.lending, self.lending.now());
        let but = but.map(|n| lending.ends[n].stream);
        let owed = lending.desk.blocking(INO, upto, but, now).is_some();
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
        if self.recall_quiet(setup, n, seq) {
            self.return_lease(n, seq);
        }
    }

    /// Node `n` holds nothing any more that was granted before `seq`.
    pub(super) fn return_lease(&mut self, n: usize, seq: LeaseSeq) {
        let stream = self.lending.ends[n].stream;
        self.lending.desk.returned(stream, INO, seq);
        self.returned_quiet(n, seq);
    }
}
