//! The service's side: who holds a lease of which inode, who owes one back, and until when that matters.

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

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct OfFile {
    held: Vec<(StreamId, LeaseSeq)>,
    owed: Vec<(StreamId, LeaseSeq)>,
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
    pub fn heard(&mut self, id: StreamId, now: u64) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        let lapsed = now > stream.until();
        stream.heard = stream.heard.max(now);
        let first = std::mem::take(&mut stream.silent);
        let (node, life) = (stream.node, stream.life);
        if lapsed {
            // The node, too, has stopped trusting what it had.
            self.clear(id);
        }
        if first {
            let before = |s: &Stream| s.life.is_none() || s.life == life;
            let its = self.streams_of(node).filter(|(other, _)| *other < id);
            let older = its.filter(|(_, s)| before(s)).map(|(id, _)| id);
            older.collect::<Vec<_>>().into_iter().for_each(|id| self.forget(id));
        }
    }

    /// No frame will come on a stream any more. What it holds ends with its time.
    pub fn left(&mut self, id: StreamId) {
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.open = false;
        }
    }

    /// A stream holds nothing any more, for certain: its node said goodbye.
    pub fn forget(&mut self, id: StreamId) {
        self.clear(id);
        let Some(stream) = self.streams.remove(&id) else { return };
        self.unknown -= usize::from(stream.life.is_none());
        if let Some(its) = self.of_nodes.get_mut(&stream.node) {
            its.remove(&id);
            if its.is_empty() {
                self.of_nodes.remove(&stream.node);
            }
        }
    }

    fn streams_of(&self, node: NodeId) -> impl Iterator<Item = (StreamId, &Stream)> {
        let its = self.of_nodes.get(&node).into_iter().flatten();
        its.filter_map(|id| Some((*id, self.streams.get(id)?)))
    }

    /// Every other life of this node is over, for certain: nobody trusts what they held.
    pub fn succeeded(&mut self, party: Party) {
        let dead = |s: &Stream| s.life != Some(party.life);
        let ids = self.streams_of(party.node).filter(|(_, s)| dead(s)).map(|(id, _)| id);
        ids.collect::<Vec<_>>().into_iter().for_each(|id| self.forget(id));
    }

    /// Takes what has run out off the books. Answers do not depend on it.
    pub fn sweep(&mut self, now: u64) {
        self.contended.retain(|_, until| now < *until);
        let over = |s: &Stream| now > s.until();
        let over = self.streams.iter().filter(|(_, s)| over(s)).map(|(id, s)| (*id, s.open));
        for (id, open) in over.collect::<Vec<_>>() {
            if open { self.clear(id) } else { self.forget(id) }
        }
    }

    fn clear(&mut self, id: StreamId) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        let held = std::mem::take(&mut stream.held);
        let owed = std::mem::take(&mut stream.owed);
        self.owed -= owed.len();
        let inos = held.into_values().chain(owed.into_iter().map(|(ino, _)| ino));
        for ino in inos.collect::<BTreeSet<Ino>>() {
            self.take_off(ino, |(s, _)| *s == id);
        }
    }

    fn take_off(&mut self, ino: Ino, which: impl Fn(&(StreamId, LeaseSeq)) -> bool) {
        if let Some(file) = self.files.get_mut(&ino) {
            file.held.retain(|e| !which(e));
            file.owed.retain(|e| !which(e));
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
        let held = &mut self.files.entry(ino).or_default().held;
        match held.iter_mut().find(|(s, _)| *s == id) {
            Some((_, old)) => {
                stream.held.remove(old);
                *old = seq;
            }
            None => held.push((id, seq)),
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
        let holds = || self.files.get(&ino).is_some_and(|f| f.held.iter().any(|(s, _)| *s == id));
        if contended && !holds() { None } else { self.grant(id, ino) }
    }

    /// An inode changes, asked for on stream `by`: every holder must be told, but not that stream
    /// when it knows of it otherwise. (Another stream of the same node does not know: what was asked on the first one may be
    /// done when nobody waits for the answer any more.) Nothing is acknowledged before
    /// [`Leases::owed`] says that nobody owes.
    pub fn change(&mut self, ino: Ino, by: Option<StreamId>, knows: bool, now: u64) -> Vec<Recall> {
        let spared = by.filter(|_| knows);
        let held = self.files.get(&ino).map_or(&[][..], |f| &f.held);
        let held: Vec<(StreamId, LeaseSeq)> =
            held.iter().filter(|(s, _)| Some(*s) != spared).copied().collect();
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
        let trusting = |s: &Stream| s.node == node && now <= s.until();
        let streams = self.streams.iter().filter(|(_, s)| trusting(s) && !owes(s, ino));
        let ids: Vec<StreamId> = streams.map(|(id, _)| *id).collect();
        let mut recalls = Vec::new();
        for id in ids {
            let held = self.files.get(&ino).map_or(&[][..], |f| &f.held);
            let held = held.iter().find(|(s, _)| *s == id).map(|(_, seq)| *seq);
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
        file.held.retain(|e| *e != (id, held));
        let stream = self.streams.get_mut(&id).expect("a holder has a stream");
        stream.held.remove(&held);
        Recall { stream: id, node: stream.node, ino, seq }
    }

    fn owe(&mut self, id: StreamId, ino: Ino) -> LeaseSeq {
        self.last.0 += 1;
        let seq = self.last;
        self.files.entry(ino).or_default().owed.push((id, seq));
        self.streams.get_mut(&id).expect("a holder has a stream").owed.insert((ino, seq));
        self.owed += 1;
        seq
    }

    /// The node holds no lease of the file that was granted before `seq`: after a recall of that
    /// number, or because it forgot the file.
    pub fn returned(&mut self, id: StreamId, ino: Ino, seq: LeaseSeq) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        let (first, last) = ((ino, LeaseSeq(0)), (ino, seq));
        let owed: Vec<_> = stream.owed.range(first..=last).copied().collect();
        for entry in &owed {
            stream.owed.remove(entry);
        }
        self.owed -= owed.len();
        let held = self.files.get(&ino).map_or(&[][..], |f| &f.held);
        for (_, held) in held.iter().filter(|(s, held)| *s == id && *held <= seq) {
            stream.held.remove(held);
        }
        self.take_off(ino, |(s, at)| *s == id && *at <= seq);
    }

    /// Until when somebody may still trust what a file was before the recalls up to `upto`; `None`
    /// when nobody does. Whoever waits looks again then: a holder that was heard meanwhile still
    /// owes.
    #[must_use]
    pub fn owed(&self, ino: Ino, upto: LeaseSeq, now: u64) -> Option<u64> {
        self.owed_to(ino, upto, None, now)
    }

    /// The same without what the stream `to` owes, which it returns only after the answer that waits.
    #[must_use]
    pub fn owed_to(&self, ino: Ino, upto: LeaseSeq, to: Option<StreamId>, now: u64) -> Option<u64> {
        if self.owed == 0 {
            return None;
        }
        let owed = self.files.get(&ino).map_or(&[][..], |f| &f.owed);
        let until = |(id, _): &(StreamId, LeaseSeq)| self.streams.get(id).map(Stream::until);
        let owed = owed.iter().filter(|(id, seq)| *seq <= upto && Some(*id) != to);
        owed.filter_map(until).filter(|until| now <= *until).max()
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
