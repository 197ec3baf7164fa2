//! The service's side: who holds a lease of which inode, who owes one back, and until when that matters.
//!
//! # What it costs
//!
//! All nodes of a job may hold a lease of one inode, owe it back, and wait for each other at the same time. So
//! what one of them does costs no more when there are more of them (but a logarithm): holders are found by
//! their stream, what is owed by its number. Whoever waits does so for one thing that is owed at a time
//! ([`Leases::blocking`]), and whatever ends something that was owed says which ([`Ended`]): those who
//! wait for it look again, and nobody else.

use super::LeaseSeq;
use ebb_types::{Incarnation, Ino, NodeId};
use std::collections::{BTreeMap, BTreeSet};

/// Leases of one stream. At more, the oldest is called back: a node that looked at many files does
/// not need the first ones any more.
const LEASES_MAX: usize = 1 << 16;

/// A lease that was called back because of a change is not granted lightly again before so many
/// parts of the lease time are over: where several nodes change and look in turn, asking is cheaper.
const PAUSE_PARTS: u64 = 8;

/// One stream between a node and the service. Numbers are never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamId(pub u64);

/// A node in one of its lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Party {
    /// The node.
    pub node: NodeId,
    /// Its life.
    pub life: Incarnation,
}

/// A holder is to be told to return what it was granted before `seq`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recall {
    /// On which stream.
    pub stream: StreamId,
    /// Of whom.
    pub node: NodeId,
    /// Which file.
    pub ino: Ino,
    /// The recall's number.
    pub seq: LeaseSeq,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Stream {
    /// `None` for what is left of before a restart, of which only the node is known. Such a
    /// stream counts as a holder of everything.
    life: Option<Incarnation>,
    node: NodeId,
    /// How long after a sign of life its leases are trusted.
    duration: u64,
    heard: u64,
    /// Nothing came on it since it was welcomed.
    silent: bool,
    /// Frames can still come.
    open: bool,
    /// Something was granted on it.
    granted: bool,
    held: BTreeMap<LeaseSeq, Ino>,
    owed: BTreeSet<(Ino, LeaseSeq)>,
}

impl Stream {
    fn new(node: NodeId, life: Option<Incarnation>, duration: u64, now: u64) -> Stream {
        let ((held, owed), open) = (Default::default(), life.is_some());
        Stream { life, node, duration, heard: now, silent: true, open, granted: false, held, owed }
    }

    /// The last moment at which the node may trust what it holds.
    fn until(&self) -> u64 {
        self.heard.saturating_add(self.duration)
    }
}

/// Numbers of recalls that are not owed any more, whatever ended that.
pub type Ended = Vec<LeaseSeq>;

/// Something owed that others wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocking {
    /// The number of its recall.
    pub seq: LeaseSeq,
    /// Its holder does not trust it after this, if it is not heard again.
    pub until: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct OfFile {
    held: BTreeMap<StreamId, LeaseSeq>,
    owed: BTreeMap<LeaseSeq, StreamId>,
}

fn owes(stream: &Stream, ino: Ino) -> bool {
    stream.owed.range((ino, LeaseSeq(0))..=(ino, LeaseSeq(u64::MAX))).next().is_some()
}

/// All leases of a service. Times are milliseconds of a clock that never stops.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Leases {
    duration: u64,
    last: LeaseSeq,
    next_stream: u64,
    streams: BTreeMap<StreamId, Stream>,
    /// The streams of each node that has any.
    of_nodes: BTreeMap<NodeId, BTreeSet<StreamId>>,
    files: BTreeMap<Ino, OfFile>,
    /// How many streams of before a restart there are.
    unknown: usize,
    owed: usize,
    /// Somebody takes leases lightly; only then it matters where they do not pay.
    light: bool,
    /// What is not granted lightly before these times.
    contended: BTreeMap<Ino, u64>,
}

impl Leases {
    /// Leases of `duration` (0: none are granted). `before` are the nodes that may hold leases of
    /// an earlier service.
    #[must_use]
    pub fn new(duration: u64, before: &[NodeId], now: u64) -> Leases {
        let unknown = if duration == 0 { &[] } else { before };
        let streams = unknown.iter().enumerate();
        let streams =
            streams.map(|(n, node)| (StreamId(n as u64), Stream::new(*node, None, duration, now)));
        let streams: BTreeMap<StreamId, Stream> = streams.collect();
        let mut of_nodes: BTreeMap<NodeId, BTreeSet<StreamId>> = BTreeMap::new();
        for (id, stream) in &streams {
            of_nodes.entry(stream.node).or_default().insert(*id);
        }
        Leases {
            duration,
            last: LeaseSeq(0),
            next_stream: unknown.len() as u64,
            streams,
            of_nodes,
            files: BTreeMap::new(),
            unknown: unknown.len(),
            owed: 0,
            light: false,
            contended: BTreeMap::new(),
        }
    }

    /// The longest lease time.
    #[must_use]
    pub fn duration(&self) -> u64 {
        self.duration
    }

    /// How many leases are held, and how many are owed back.
    #[must_use]
    pub fn counts(&self) -> (usize, usize) {
        (self.streams.values().map(|s| s.held.len()).sum(), self.owed)
    }

    /// How many leases are owed back.
    #[must_use]
    pub fn owing(&self) -> usize {
        self.owed
    }

    /// True when nobody holds anything, so that changes concern nobody.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.files.is_empty() && self.unknown == 0
    }

    // ---- streams -------------------------------------------------------------------------------

    /// A stream was welcomed, whose node wants leases of at most `duration`. Its number, and the
    /// lease time that the node is to be told.
    pub fn join(&mut self, party: Party, duration: u64, now: u64) -> (StreamId, u64) {
        let id = StreamId(self.next_stream);
        let duration = duration.min(self.duration);
        self.next_stream += 1;
        self.streams.insert(id, Stream::new(party.node, Some(party.life), duration, now));
        self.of_nodes.entry(party.node).or_default().insert(id);
        (id, duration)
    }

    /// A frame came on a stream. The first one says that this life of the node has dropped what
    /// it had from streams before it.
    pub fn heard(&mut self, id: StreamId, now: u64) -> Ended {
        let mut ended = Ended::new();
        let Some(stream) = self.streams.get_mut(&id) else { return ended };
        let lapsed = now > stream.until();
        stream.heard = stream.heard.max(now);
        let first = std::mem::take(&mut stream.silent);
        let (node, life) = (stream.node, stream.life);
        if lapsed {
            // The node, too, has stopped trusting what it had.
            ended = self.clear(id);
        }
        if first {
            let before = |s: &Stream| s.life.is_none() || s.life == life;
            let its = self.streams_of(node).filter(|(other, _)| *other < id);
            let older = its.filter(|(_, s)| before(s)).map(|(id, _)| id);
            ended.extend(self.forget_all(older.collect()));
        }
        ended
    }

    /// No frame will come on a stream any more. What it holds ends with its time.
    pub fn left(&mut self, id: StreamId) {
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.open = false;
        }
    }

    /// A stream holds nothing any more, for certain: its node said goodbye.
    pub fn forget(&mut self, id: StreamId) -> Ended {
        let ended = self.clear(id);
        let Some(stream) = self.streams.remove(&id) else { return ended };
        self.unknown -= usize::from(stream.life.is_none());
        if let Some(its) = self.of_nodes.get_mut(&stream.node) {
            its.remove(&id);
            if its.is_empty() {
                self.of_nodes.remove(&stream.node);
            }
        }
        ended
    }

    fn forget_all(&mut self, ids: Vec<StreamId>) -> Ended {
        ids.into_iter().flat_map(|id| self.forget(id)).collect()
    }

    fn streams_of(&self, node: NodeId) -> impl Iterator<Item = (StreamId, &Stream)> {
        let its = self.of_nodes.get(&node).into_iter().flatten();
        its.filter_map(|id| Some((*id, self.streams.get(id)?)))
    }

    /// Every other life of this node is over, for certain: nobody trusts what they held.
    pub fn succeeded(&mut self, party: Party) -> Ended {
        let dead = |s: &Stream| s.life != Some(party.life);
        let ids = self.streams_of(party.node).filter(|(_, s)| dead(s)).map(|(id, _)| id);
        self.forget_all(ids.collect())
    }

    /// Takes what has run out off the books. Answers do not depend on it.
    pub fn sweep(&mut self, now: u64) -> Ended {
        self.contended.retain(|_, until| now < *until);
        let over = |s: &Stream| now > s.until();
        let over = self.streams.iter().filter(|(_, s)| over(s)).map(|(id, s)| (*id, s.open));
        let mut ended = Ended::new();
        for (id, open) in over.collect::<Vec<_>>() {
            ended.extend(if open { self.clear(id) } else { self.forget(id) });
        }
        ended
    }

    fn clear(&mut self, id: StreamId) -> Ended {
        let Some(stream) = self.streams.get_mut(&id) else { return Ended::new() };
        let held = std::mem::take(&mut stream.held);
        let owed = std::mem::take(&mut stream.owed);
        self.owed -= owed.len();
        for ino in held.into_values() {
            self.take_off(ino, |file| {
                file.held.remove(&id);
            });
        }
        for (ino, seq) in &owed {
            self.take_off(*ino, |file| {
                file.owed.remove(seq);
            });
        }
        owed.into_iter().map(|(_, seq)| seq).collect()
    }

    fn take_off(&mut self, ino: Ino, what: impl FnOnce(&mut OfFile)) {
        if let Some(file) = self.files.get_mut(&ino) {
            what(file);
            if file.held.is_empty() && file.owed.is_empty() {
                self.files.remove(&ino);
            }
        }
    }

    // ---- leases --------------------------------------------------------------------------------

    /// Grants a lease of a file, in place of the one that the stream may have. To be called before
    /// the state is looked at that the answer tells. Also returns what must be called back for it.
    pub fn grant(&mut self, id: StreamId, ino: Ino) -> Option<(LeaseSeq, Option<Recall>)> {
        let stream = self.streams.get_mut(&id).filter(|s| s.open && s.duration > 0)?;
        stream.granted = true;
        self.last.0 += 1;
        let seq = self.last;
        if let Some(old) = self.files.entry(ino).or_default().held.insert(id, seq) {
            stream.held.remove(&old);
        }
        stream.held.insert(seq, ino);
        let oldest = (stream.held.len() > LEASES_MAX).then(|| stream.held.first_key_value());
        let oldest = oldest.flatten().map(|(seq, ino)| (*seq, *ino));
        Some((seq, oldest.map(|(old, ino)| self.call_back(id, ino, old))))
    }

    /// The same where it is only granted while it seems to pay: nobody else changed it a moment ago.
    /// Whoever has it keeps it.
    pub fn grant_lightly(
        &mut self,
        id: StreamId,
        ino: Ino,
        now: u64,
    ) -> Option<(LeaseSeq, Option<Recall>)> {
        self.light = true;
        let contended = self.contended.get(&ino).is_some_and(|until| now < *until);
        let holds = || self.files.get(&ino).is_some_and(|f| f.held.contains_key(&id));
        if contended && !holds() { None } else { self.grant(id, ino) }
    }

    /// An inode changes, asked for on stream `by`: every holder must be told, but not that stream
    /// when it knows of it otherwise. (Another stream of the same node does not know: what was asked on the first one may be
    /// done when nobody waits for the answer any more.) Nothing is acknowledged before
    /// [`Leases::owed`] says that nobody owes.
    pub fn change(&mut self, ino: Ino, by: Option<StreamId>, knows: bool, now: u64) -> Vec<Recall> {
        let spared = by.filter(|_| knows);
        let held = self.files.get(&ino).into_iter().flat_map(|f| &f.held);
        let held: Vec<(StreamId, LeaseSeq)> =
            held.filter(|(s, _)| Some(**s) != spared).map(|(s, seq)| (*s, *seq)).collect();
        if self.unknown > 0 {
            self.change_unknown(ino, spared);
        }
        // What is found on the backing, or flushed, is nobody's change of what others look at.
        if self.light && by.is_some_and(|by| held.iter().any(|(s, _)| *s != by)) {
            self.contended.insert(ino, now.saturating_add(self.duration / PAUSE_PARTS));
        }
        held.into_iter().map(|(stream, seq)| self.call_back(stream, ino, seq)).collect()
    }

    /// A node must tell all that it did to an inode without telling, whatever leases it holds: each
    /// stream on which it may still trust something owes, until it says that it has. Whether it
    /// was called back before does not matter; it is not called twice for nothing.
    pub fn demand(&mut self, ino: Ino, node: NodeId, now: u64) -> Vec<Recall> {
        self.contended.insert(ino, now.saturating_add(self.duration / PAUSE_PARTS));
        let its = self.streams_of(node).filter(|(_, s)| now <= s.until() && !owes(s, ino));
        let ids: Vec<StreamId> = its.map(|(id, _)| id).collect();
        let mut recalls = Vec::new();
        for id in ids {
            let held = self.files.get(&ino).and_then(|f| f.held.get(&id)).copied();
            let is_open = self.streams.get(&id).is_some_and(|s| s.open);
            match held {
                Some(held) => recalls.push(self.call_back(id, ino, held)),
                None if is_open => {
                    let seq = self.owe(id, ino);
                    recalls.push(Recall { stream: id, node, ino, seq });
                }
                None => drop(self.owe(id, ino)),
            }
        }
        recalls
    }

    /// Until when a node may trust what it was granted on some stream; `None`: it cannot any more.
    #[must_use]
    pub fn trusted_until(&self, node: NodeId, now: u64) -> Option<u64> {
        let its = self.streams_of(node).map(|(_, stream)| stream.until());
        its.filter(|until| now <= *until).max()
    }

    /// True when the stream can be lent an inode alone: leases are granted on it, nobody of before a
    /// restart is left, and nobody else asked for it a moment ago.
    #[must_use]
    pub fn lends_alone(&self, id: StreamId, ino: Ino, now: u64) -> bool {
        self.unknown == 0
            && self.streams.get(&id).is_some_and(|s| s.open && s.duration > 0)
            && self.contended.get(&ino).is_none_or(|until| now >= *until)
    }

    /// What is left of before a restart cannot be told, only waited for.
    fn change_unknown(&mut self, ino: Ino, by: Option<StreamId>) {
        let by = by.and_then(|id| self.streams.get(&id)).map(|s| s.node);
        let unknown = self.streams.iter().filter(|(_, s)| s.life.is_none());
        let others = unknown.filter(|(_, s)| by != Some(s.node));
        let others = others.filter(|(_, s)| !owes(s, ino));
        for id in others.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.owe(id, ino);
        }
    }

    fn call_back(&mut self, id: StreamId, ino: Ino, held: LeaseSeq) -> Recall {
        let seq = self.owe(id, ino);
        let file = self.files.entry(ino).or_default();
        if file.held.get(&id) == Some(&held) {
            file.held.remove(&id);
        }
        let stream = self.streams.get_mut(&id).expect("a holder has a stream");
        stream.held.remove(&held);
        Recall { stream: id, node: stream.node, ino, seq }
    }

    fn owe(&mut self, id: StreamId, ino: Ino) -> LeaseSeq {
        self.last.0 += 1;
        let seq = self.last;
        self.files.entry(ino).or_default().owed.insert(seq, id);
        self.streams.get_mut(&id).expect("a holder has a stream").owed.insert((ino, seq));
        self.owed += 1;
        seq
    }

    /// The node holds no lease of the file that was granted before `seq`: after a recall of that
    /// number, or because it forgot the file.
    pub fn returned(&mut self, id: StreamId, ino: Ino, seq: LeaseSeq) -> Ended {
        let Some(stream) = self.streams.get_mut(&id) else { return Ended::new() };
        let (first, last) = ((ino, LeaseSeq(0)), (ino, seq));
        let owed: Ended = stream.owed.range(first..=last).map(|(_, seq)| *seq).collect();
        for ended in &owed {
            stream.owed.remove(&(ino, *ended));
        }
        self.owed -= owed.len();
        let held = self.files.get(&ino).and_then(|f| f.held.get(&id)).copied();
        let held = held.filter(|held| *held <= seq);
        if let Some(held) = held {
            stream.held.remove(&held);
        }
        self.take_off(ino, |file| {
            if held.is_some() {
                file.held.remove(&id);
            }
            for ended in &owed {
                file.owed.remove(ended);
            }
        });
        owed
    }

    /// Something for which somebody may still trust what a file was before the recalls up to `upto`, the
    /// last there is of it; `None` when nobody does. Whoever waits looks again when it has ended, and
    /// when its time is over: a holder that was heard meanwhile still owes. What the stream `to` owes does not
    /// count, which it returns only after the answer that waits.
    ///
    /// The last, because they are mostly returned in the order in which they were called back.
    #[must_use]
    pub fn blocking(
        &self,
        ino: Ino,
        upto: LeaseSeq,
        to: Option<StreamId>,
        now: u64,
    ) -> Option<Blocking> {
        if self.owed == 0 {
            return None;
        }
        let owed = self.files.get(&ino)?.owed.range(..=upto).rev();
        let owed = owed.filter(|(_, id)| Some(**id) != to);
        let until = |id| self.streams.get(id).map(Stream::until).filter(|until| now <= *until);
        owed.filter_map(|(seq, id)| Some(Blocking { seq: *seq, until: until(id)? })).next()
    }

    /// True when somebody may still trust what a file was before the recalls up to `upto`.
    #[must_use]
    pub fn owed(&self, ino: Ino, upto: LeaseSeq, now: u64) -> bool {
        self.blocking(ino, upto, None, now).is_some()
    }

    /// True while nothing was granted on the stream: whatever is owed on it (what its node has to tell of
    /// the life before), its node believes nothing but what it is told. A daemon that takes over must ask
    /// before it can tell.
    #[must_use]
    pub fn believes_nothing(&self, id: StreamId) -> bool {
        self.streams.get(&id).is_some_and(|s| !s.granted)
    }

    /// Streams that owe what was called back at `before` or earlier. One that is heard and yet
    /// does not return it in time has something wrong with it, and only its end helps.
    #[must_use]
    pub fn stubborn(&self, before: LeaseSeq) -> Vec<(StreamId, NodeId)> {
        let late = |s: &Stream| s.owed.iter().any(|(_, seq)| *seq <= before);
        let found = self.streams.iter().filter(|(_, s)| s.open && late(s));
        found.map(|(id, s)| (*id, s.node)).collect()
    }

    /// The number of the last grant or recall.
    #[must_use]
    pub fn last(&self) -> LeaseSeq {
        self.last
    }
}
