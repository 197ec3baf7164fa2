//! The books of the service against plain lists, and what waiting for many holders costs.

use super::*;
use ebb_types::{Incarnation, Ino, NodeId};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const DURATION: u64 = 50;

/// What the books must agree with: every lease and every debt in a list.
#[derive(Default)]
struct Plain {
    now: u64,
    until: BTreeMap<StreamId, u64>,
    held: Vec<(StreamId, Ino, LeaseSeq)>,
    owed: Vec<(StreamId, Ino, LeaseSeq)>,
}

impl Plain {
    fn called_back(&mut self, recalls: &[Recall]) {
        for recall in recalls {
            self.held.retain(|(id, ino, _)| (*id, *ino) != (recall.stream, recall.ino));
            self.owed.push((recall.stream, recall.ino, recall.seq));
        }
    }

    /// Takes off what goes; the numbers of what was owed.
    fn take_off(
        &mut self,
        goes: impl Fn(&(StreamId, Ino, LeaseSeq)) -> bool,
    ) -> BTreeSet<LeaseSeq> {
        self.held.retain(|entry| !goes(entry));
        let gone = self.owed.iter().filter(|entry| goes(entry)).map(|entry| entry.2).collect();
        self.owed.retain(|entry| !goes(entry));
        gone
    }

    fn blocking(&self, ino: Ino, upto: LeaseSeq, to: Option<StreamId>) -> Option<Blocking> {
        let counts = |(id, of, seq): &&(StreamId, Ino, LeaseSeq)| {
            *of == ino && *seq <= upto && Some(*id) != to && self.until[id] >= self.now
        };
        let last = self.owed.iter().filter(counts).max_by_key(|(_, _, seq)| *seq)?;
        Some(Blocking { seq: last.2, until: self.until[&last.0] })
    }
}

#[derive(Clone, Debug)]
enum Act {
    Grant(usize, u64),
    Change(usize, u64, bool),
    Return(usize, u64, u64),
    Heard(usize),
    Forget(usize),
    Sweep,
    Time(u64),
}

fn act() -> impl Strategy<Value = Act> {
    let (stream, ino) = (|| 0..4usize, || 1..3u64);
    prop_oneof![
        8 => (stream(), ino()).prop_map(|(s, i)| Act::Grant(s, i)),
        5 => (stream(), ino(), any::<bool>()).prop_map(|(s, i, knows)| Act::Change(s, i, knows)),
        5 => (stream(), ino(), 0..60u64).prop_map(|(s, i, seq)| Act::Return(s, i, seq)),
        3 => stream().prop_map(Act::Heard),
        1 => stream().prop_map(Act::Forget),
        1 => Just(Act::Sweep),
        2 => (0..30u64).prop_map(Act::Time),
    ]
}

fn joined(leases: &mut Leases, plain: &mut Plain, node: usize) -> StreamId {
    let party = Party { node: NodeId(node as u32 + 1), life: Incarnation(1) };
    let (id, _) = leases.join(party, DURATION, plain.now);
    plain.until.insert(id, plain.now + DURATION);
    id
}

/// Does it to both; what both say is not owed any more.
fn done(
    leases: &mut Leases,
    plain: &mut Plain,
    ids: &mut [StreamId; 4],
    act: Act,
) -> (BTreeSet<LeaseSeq>, BTreeSet<LeaseSeq>) {
    let now = plain.now;
    let (ended, expected) = match act {
        Act::Grant(s, ino) => {
            let (seq, _) = leases.grant(ids[s], Ino(ino)).expect("an open stream");
            plain.held.retain(|(id, of, _)| (*id, *of) != (ids[s], Ino(ino)));
            plain.held.push((ids[s], Ino(ino), seq));
            return Default::default();
        }
        Act::Change(s, ino, knows) => {
            let recalls = leases.change(Ino(ino), Some(ids[s]), knows, now);
            let holds = |(id, of, _): &&(StreamId, Ino, LeaseSeq)| {
                *of == Ino(ino) && !(knows && *id == ids[s])
            };
            let holders: BTreeSet<StreamId> =
                plain.held.iter().filter(holds).map(|h| h.0).collect();
            assert_eq!(recalls.iter().map(|r| r.stream).collect::<BTreeSet<_>>(), holders);
            assert_eq!(recalls.len(), holders.len());
            plain.called_back(&recalls);
            return Default::default();
        }
        Act::Return(s, ino, seq) => {
            let upto = LeaseSeq(seq);
            let ended = leases.returned(ids[s], Ino(ino), upto);
            let goes = |(id, of, at): &(StreamId, Ino, LeaseSeq)| {
                (*id, *of) == (ids[s], Ino(ino)) && *at <= upto
            };
            (ended, plain.take_off(goes))
        }
        Act::Heard(s) => {
            let ended = leases.heard(ids[s], now);
            let lapsed = now > plain.until[&ids[s]];
            plain.until.insert(ids[s], now + DURATION);
            (ended, plain.take_off(|(id, ..)| lapsed && *id == ids[s]))
        }
        Act::Forget(s) => {
            let gone = ids[s];
            let ended = leases.forget(gone);
            ids[s] = joined(leases, plain, s);
            (ended, plain.take_off(|(id, ..)| *id == gone))
        }
        Act::Sweep => {
            let until = plain.until.clone();
            (leases.sweep(now), plain.take_off(|(id, ..)| now > until[id]))
        }
        Act::Time(passes) => {
            plain.now += passes;
            return Default::default();
        }
    };
    assert_eq!(ended.iter().collect::<BTreeSet<_>>().len(), ended.len(), "each once: {ended:?}");
    (ended.into_iter().collect(), expected)
}

proptest! {
    #[test]
    fn who_owes_what_is_as_in_plain_lists(acts in prop::collection::vec(act(), 1..80)) {
        let (mut leases, mut plain) = (Leases::new(DURATION, &[], 0), Plain::default());
        let mut ids = [0, 1, 2, 3].map(|node| joined(&mut leases, &mut plain, node));
        for act in acts {
            let (ended, expected) = done(&mut leases, &mut plain, &mut ids, act);
            prop_assert_eq!(ended, expected);
            prop_assert_eq!(leases.counts(), (plain.held.len(), plain.owed.len()));
            for ino in [Ino(1), Ino(2)] {
                for upto in (0..leases.last().0 + 2).map(LeaseSeq) {
                    for to in ids.iter().copied().map(Some).chain([None]) {
                        let expected = plain.blocking(ino, upto, to);
                        prop_assert_eq!(leases.blocking(ino, upto, to, plain.now), expected);
                    }
                }
            }
        }
    }
}

/// All hold a lease of one inode, it is called back, and all wait for all; how often they look in all, when
/// the leases are returned in this order.
fn looks(holders: usize, order: impl Fn(usize) -> usize) -> usize {
    let (mut leases, mut plain) = (Leases::new(DURATION, &[], 0), Plain::default());
    let ids: Vec<StreamId> = (0..holders).map(|n| joined(&mut leases, &mut plain, n)).collect();
    let ino = Ino(1);
    for id in &ids {
        leases.grant(*id, ino);
    }
    let recalls = leases.change(ino, None, false, 0);
    let (mut looks, mut waiting) = (0, BTreeMap::<LeaseSeq, Vec<usize>>::new());
    let mut awake: Vec<usize> = (0..holders).collect();
    for i in (0..holders).map(order) {
        for waiter in awake.drain(..) {
            looks += 1;
            let blocking = leases.blocking(ino, leases.last(), None, 0).expect("not all returned");
            waiting.entry(blocking.seq).or_default().push(waiter);
        }
        for ended in leases.returned(recalls[i].stream, ino, recalls[i].seq) {
            awake.extend(waiting.remove(&ended).unwrap_or_default());
        }
    }
    assert_eq!(awake.len(), holders, "all go on when the last one is returned");
    assert!(!leases.owed(ino, leases.last(), 0));
    looks
}

#[test]
fn who_waits_for_many_holders_is_not_woken_by_each() {
    for holders in [10, 100, 1000] {
        assert_eq!(looks(holders, |i| i), holders, "in order: once each");
        // As far apart as can be: 7 has no factor in common with them.
        let mixed = looks(holders, |i| i * 7 % holders);
        assert!(mixed < holders * 12, "{mixed} looks of {holders}");
    }
}
