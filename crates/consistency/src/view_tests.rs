//! A node's view against an array, with the real service state on the other side, other nodes
//! that write, flush and truncate, and messages that arrive in any order.
//!
//! The array remembers for every byte what value it had at every version. The view is right when
//! * it never loses a byte that was written here and not taken by others, and never keeps one
//!   for its own that it was told is not;
//! * what it has of published bytes, and where it would fetch the others, is at least as new as
//!   the newest answer that spoke of them.

use super::*;
use crate::ownership::{FileState, Owned};
use proptest::prelude::*;
use std::collections::BTreeMap;

const BYTES: usize = 16;
const ME: NodeId = NodeId(1);
/// One value per write; zeros are 0.
type Value = u32;

#[derive(Clone, Debug)]
enum Op {
    Write(u64, u64),
    Append(u64),
    Take(u64, u64),
    Other(u32, u64, u64),
    OtherFlush(u32, bool),
    Truncate(u64, bool),
    Ask(u64, u64, bool),
    /// An open is answered with a part of the map.
    Open(u64, u64),
    /// What a read needs is asked for and heard.
    Settle(u64, u64),
    /// Delivers (or, false, fails) the n-th message under way.
    Deliver(usize, bool),
    Plan(u64, u64),
    Fill(usize),
    FlushBegin(u64, u64),
    FlushEnd(bool),
    Detach(u64, u64),
    DropClean(u64, u64),
    Compact,
}

fn op() -> impl Strategy<Value = Op> {
    let n = BYTES as u64;
    let span = || (0..n, 1..6u64).prop_map(move |(a, l)| (a, (a + l).min(n)));
    let other = || 2..4u32;
    prop_oneof![
        6 => span().prop_map(|(a, b)| Op::Write(a, b)),
        1 => (1..3u64).prop_map(Op::Append),
        6 => span().prop_map(|(a, b)| Op::Take(a, b)),
        4 => (other(), span()).prop_map(|(o, (a, b))| Op::Other(o, a, b)),
        2 => (other(), any::<bool>()).prop_map(|(o, d)| Op::OtherFlush(o, d)),
        1 => (0..n, any::<bool>()).prop_map(|(l, mine)| Op::Truncate(l, mine)),
        5 => (span(), prop::bool::weighted(0.4)).prop_map(|((a, b), all)| Op::Ask(a, b, all)),
        3 => span().prop_map(|(a, b)| Op::Open(a, b)),
        3 => span().prop_map(|(a, b)| Op::Settle(a, b)),
        14 => (0..4usize, prop::bool::weighted(0.9)).prop_map(|(i, ok)| Op::Deliver(i, ok)),
        4 => span().prop_map(|(a, b)| Op::Plan(a, b)),
        4 => (0..3usize).prop_map(Op::Fill),
        3 => span().prop_map(|(a, b)| Op::FlushBegin(a, b)),
        3 => prop::bool::weighted(0.9).prop_map(Op::FlushEnd),
        3 => span().prop_map(|(a, b)| Op::Detach(a, b)),
        1 => span().prop_map(|(a, b)| Op::DropClean(a, b)),
        1 => Just(Op::Compact),
    ]
}

enum Message {
    Attached { ranges: Vec<ByteRange>, version: Version, size: u64 },
    Map(MapAnswer),
    Opened(MapAnswer),
    Detached { ranges: Vec<ByteRange>, answer: Detached },
}

#[derive(Clone, Copy, Debug, Default)]
struct Byte {
    /// What the cache file has there.
    value: Value,
    /// Written and not taken since.
    dirty: bool,
    /// Taken for an attach and not written since.
    sent: bool,
    /// Attaches under way.
    flying: u32,
    /// Newest attach reply while some were under way.
    newest: Version,
    /// Attached at that exact version, and nothing since.
    owned: Option<Version>,
    /// The newest version that an answer about this byte spoke for.
    told: Version,
}

struct World {
    service: FileState,
    /// Per byte: (version, value, owner) from that version on.
    history: Vec<Vec<(Version, Value, NodeId)>>,
    caches: BTreeMap<NodeId, Vec<Value>>,
    backing: Vec<Value>,
    view: FileView,
    bytes: [Byte; BYTES],
    messages: Vec<Message>,
    fetches: Vec<(Piece, Vec<Value>)>,
    flush: Option<(Vec<Owned>, Vec<Value>)>,
    next_value: Value,
    /// The newest version that an open was answered with.
    opened: Version,
}

fn indexes(range: ByteRange) -> std::ops::Range<usize> {
    range.start() as usize..(range.end() as usize).min(BYTES)
}

impl World {
    fn new(base: u64) -> World {
        let service = FileState::new(base);
        let start = |i: usize| if (i as u64) < base { 1000 + i as Value } else { 0 };
        let backing: Vec<Value> = (0..BYTES).map(start).collect();
        let history =
            backing.iter().map(|v| vec![(service.version(), *v, NodeId::NOBODY)]).collect();
        let caches = (2..4).map(|n| (NodeId(n), vec![0; BYTES])).collect();
        World {
            service,
            history,
            caches,
            backing,
            view: FileView::new(ME),
            bytes: [Byte::default(); BYTES],
            messages: Vec::new(),
            fetches: Vec::new(),
            flush: None,
            next_value: 1,
            opened: Version::ZERO,
        }
    }

    fn value(&mut self) -> Value {
        self.next_value += 1;
        self.next_value
    }

    fn happened(&mut self, range: ByteRange, value: impl Fn(usize) -> Value, owner: NodeId) {
        let version = self.service.version();
        for i in indexes(range) {
            self.history[i].push((version, value(i), owner));
        }
    }

    fn newest_owner(&self, i: usize) -> (Version, Value, NodeId) {
        *self.history[i].last().unwrap()
    }

    /// True when the byte had that value at some version from `since` on.
    fn was(&self, i: usize, value: Value, since: Version) -> bool {
        let h = &self.history[i];
        h.iter().enumerate().any(|(n, (_, v, _))| {
            *v == value && h.get(n + 1).is_none_or(|(until, ..)| *until > since)
        })
    }

    // ---- this node -----------------------------------------------------------------------------

    fn write(&mut self, range: ByteRange) {
        self.view.write(range);
        let value = self.value();
        for i in indexes(range) {
            let byte = &mut self.bytes[i];
            (byte.value, byte.dirty, byte.sent, byte.owned) = (value, true, false, None);
        }
        self.view.write(range);
    }

    fn append(&mut self, len: u64) {
        let end = self.service.size() + len;
        if end > BYTES as u64 {
            return;
        }
        let (start, version) = self.service.append(ME, len).unwrap();
        let range = ByteRange::new(start, end);
        self.write(range);
        let value = self.bytes[start as usize].value;
        self.happened(range, |_| value, ME);
        let _ = self.view.appended(range, version, self.service.size());
        for i in indexes(range) {
            (self.bytes[i].dirty, self.bytes[i].owned) = (false, Some(version));
        }
    }

    fn take(&mut self, within: ByteRange) {
        let taken = self.view.take_unattached(within);
        let expected: Vec<usize> = indexes(within).filter(|i| self.bytes[*i].dirty).collect();
        let got: Vec<usize> = taken.iter().flat_map(|r| indexes(*r)).collect();
        assert_eq!(got, expected, "exactly the dirty bytes, once");
        for i in expected {
            (self.bytes[i].dirty, self.bytes[i].sent) = (false, true);
            self.bytes[i].flying += 1;
        }
        if taken.is_empty() {
            return;
        }
        let version = self.service.attach(ME, &taken);
        for r in &taken {
            let values = self.bytes;
            self.happened(*r, |i| values[i].value, ME);
        }
        let size = self.service.size();
        self.messages.push(Message::Attached { ranges: taken, version, size });
    }

    fn deliver(&mut self, message: Message, ok: bool) {
        match message {
            Message::Attached { ranges, .. } if !ok => {
                // It was carried out, but the reply is lost.
                self.view.attach_failed(&ranges);
                for i in ranges.iter().flat_map(|r| indexes(*r)) {
                    let byte = &mut self.bytes[i];
                    byte.dirty |= std::mem::take(&mut byte.sent);
                    self.land(i, Version::ZERO);
                }
            }
            Message::Attached { ranges, version, size } => {
                let _ = self.view.attached(&ranges, version, size);
                for i in ranges.iter().flat_map(|r| indexes(*r)) {
                    self.land(i, version);
                }
            }
            Message::Opened(answer) => {
                self.view.require(answer.version);
                self.opened = self.opened.max(answer.version);
                self.deliver(Message::Map(answer), ok);
            }
            Message::Map(answer) => {
                let changes = self.view.apply(&answer);
                if answer.unchanged {
                    return;
                }
                self.note_changes(&changes);
                let doubtful = |i| changes.doubtful.iter().any(|r| r.contains_offset(i as u64));
                for i in indexes(answer.covers).filter(|i| !doubtful(*i)) {
                    let byte = &mut self.bytes[i];
                    byte.told = byte.told.max(answer.version);
                }
            }
            Message::Detached { ranges, answer } => self.view.detached(&ranges, answer),
        }
    }

    fn land(&mut self, i: usize, version: Version) {
        let byte = &mut self.bytes[i];
        byte.newest = byte.newest.max(version);
        byte.flying -= 1;
        if byte.flying == 0 {
            let newest = std::mem::take(&mut byte.newest);
            if std::mem::take(&mut byte.sent) {
                byte.owned = Some(newest);
            }
        }
    }

    fn note_changes(&mut self, changes: &Changes) {
        for r in changes.overtaken.iter().chain(&changes.stale) {
            assert!(!self.view.local(*r));
        }
        for i in changes.overtaken.iter().flat_map(|r| indexes(*r)) {
            let byte = self.bytes[i];
            assert!(byte.owned.is_some() && !byte.dirty, "only owned bytes are overtaken");
            let lost = self.history[i].iter().any(|(v, _, o)| Some(*v) > byte.owned && *o != ME);
            let given = self.newest_owner(i).2 == NodeId::NOBODY;
            assert!(lost || given, "byte {i} was nobody else's");
        }
    }

    fn source_value(&self, i: usize, piece: &Piece) -> Value {
        match piece.source {
            Source::Local => self.bytes[i].value,
            Source::Peer { node, .. } if node == ME => unreachable!("checked by the caller"),
            Source::Peer { node, .. } => self.caches[&node][i],
            Source::Backing => self.backing[i],
            Source::Zero => 0,
            Source::Unknown => unreachable!("checked by the caller"),
        }
    }

    /// What a plan gives without asking is what the newest open must see, or newer.
    fn check_seen(&self, piece: &Piece) {
        let asks = piece.source != Source::Local && piece.as_of == Version::ZERO;
        let gone = matches!(piece.source, Source::Peer { node, .. } if node == ME);
        for i in indexes(piece.range).filter(|_| !asks && !gone) {
            let written = matches!(self.class_of(i), Some(Class::Dirty | Class::Attaching));
            let value = self.source_value(i, piece);
            assert!(written || self.was(i, value, self.opened), "byte {i} is too old: {piece:?}");
        }
    }

    fn plan(&mut self, range: ByteRange) {
        let pieces = self.view.plan_read(range);
        let clipped = range.intersect(ByteRange::new(0, self.view.size()));
        let mut at = clipped.start();
        for piece in &pieces {
            assert_eq!(piece.range.start(), at, "sorted, disjoint, complete");
            assert!(!piece.range.is_empty());
            at = piece.range.end();
            let local = matches!(piece.source, Source::Local | Source::Unknown);
            assert_eq!(local, self.view.local(piece.range));
            self.check_seen(piece);
            assert!(local || indexes(piece.range).all(|i| piece.as_of <= self.told(i)));
        }
        assert_eq!(at, clipped.end());
        let remote = |p: &&Piece| match p.source {
            Source::Local | Source::Unknown => false,
            Source::Peer { node, .. } => node != ME && p.as_of != Version::ZERO,
            Source::Backing | Source::Zero => p.as_of != Version::ZERO,
        };
        for piece in pieces.iter().filter(remote) {
            let values: Vec<_> =
                indexes(piece.range).map(|i| self.source_value(i, piece)).collect();
            for (i, value) in indexes(piece.range).zip(&values) {
                assert!(self.was(i, *value, self.bytes[i].told), "byte {i}: {piece:?}");
            }
            self.fetches.push((*piece, values));
        }
    }

    /// The newest version for which a statement about a byte may be right: what was told, or our
    /// own attaches and what directly followed from them.
    fn told(&self, i: usize) -> Version {
        self.bytes[i].told.max(self.view.known_version()).max(self.service.version())
    }

    fn fill(&mut self, piece: &Piece, values: &[Value]) {
        let absent_before: Vec<bool> =
            (0..BYTES).map(|i| !self.view.local(ByteRange::at(i as u64, 1))).collect();
        let accepted = self.view.fetched(piece.range, piece.as_of);
        for i in accepted.iter().flat_map(|r| indexes(*r)) {
            assert!(absent_before[i] && piece.range.contains_offset(i as u64));
            self.bytes[i].value = values[i - piece.range.start() as usize];
        }
    }

    fn flush_begin(&mut self, within: ByteRange) {
        if self.flush.is_some() {
            return;
        }
        let ranges: Vec<_> = self.view.unflushed(within).into_iter().map(|(r, _)| r).collect();
        let granted = self.service.grantable(ME, &ranges);
        let values = self.bytes.iter().map(|b| b.value).collect();
        self.flush = Some((granted, values));
    }

    fn flush_end(&mut self, done: bool) {
        let Some((granted, values)) = self.flush.take() else { return };
        for i in granted.iter().flat_map(|g| indexes(g.range)) {
            self.backing[i] = values[i];
        }
        if done {
            self.service.mark_flushed(ME, &granted);
            let list: Vec<_> = granted.iter().map(|g| (g.range, g.version)).collect();
            self.view.flushed(&list);
        }
    }

    fn detach(&mut self, within: ByteRange) {
        let ranges = self.view.detachable(within);
        if let Ok(answer) = self.service.detach(ME, &ranges) {
            self.note_gifts();
            self.messages.push(Message::Detached { ranges, answer });
        }
    }

    /// Bytes that became the backing's keep their value.
    fn note_gifts(&mut self) {
        for i in 0..BYTES {
            let (_, value, owner) = self.newest_owner(i);
            let owned = self.service.owned_in(ByteRange::at(i as u64, 1)).next();
            if owner != NodeId::NOBODY && owned.is_none() {
                assert_eq!(self.backing[i], value, "byte {i} was flushed");
                self.history[i].push((self.service.version(), value, NodeId::NOBODY));
            }
        }
    }

    // ---- the others ----------------------------------------------------------------------------

    fn other_writes(&mut self, node: NodeId, range: ByteRange) {
        let value = self.value();
        self.service.attach(node, &[range]);
        self.happened(range, |_| value, node);
        let cache = self.caches.get_mut(&node).unwrap();
        cache[indexes(range)].fill(value);
    }

    fn other_flushes(&mut self, node: NodeId, detach: bool) {
        let granted = self.service.grantable(node, &[ByteRange::ALL]);
        let out = self.flush.iter().flat_map(|f| &f.0);
        if out.into_iter().any(|o| granted.iter().any(|g| g.range.overlaps(o.range))) {
            return;
        }
        for i in granted.iter().flat_map(|g| indexes(g.range)) {
            self.backing[i] = self.caches[&node][i];
        }
        self.service.mark_flushed(node, &granted);
        if detach && self.service.detach(node, &[ByteRange::ALL]).is_ok() {
            self.note_gifts();
        }
    }

    fn truncate(&mut self, len: u64, mine: bool) {
        if self.flush.is_some() {
            return;
        }
        let cut = ByteRange::new(len, BYTES as u64);
        if len < self.service.size() {
            self.service.truncate(len);
            self.happened(cut, |_| 0, NodeId::NOBODY);
            self.backing[indexes(cut)].fill(0);
        } else {
            self.service.truncate(len);
        }
        if mine {
            let answer = self.service.query(ByteRange::ALL, Version::ZERO);
            for i in indexes(cut) {
                let Byte { flying, newest, told, .. } = self.bytes[i];
                self.bytes[i] = Byte { flying, newest, told, ..Byte::default() };
            }
            let changes = self.view.truncated(len, &answer);
            self.note_changes(&changes);
            for i in 0..BYTES {
                self.bytes[i].told = answer.version;
            }
            assert!(changes.doubtful.is_empty(), "the newest answer is never doubtful");
            assert!(self.view.published_size() == len);
        }
    }

    fn ask(&mut self, range: ByteRange) {
        let answer = self.service.query(range, self.view.known_version());
        self.messages.push(Message::Map(answer));
    }

    /// An answer about a part only, as files with many entries give it.
    fn part(&self, range: ByteRange) -> MapAnswer {
        let mut answer = self.service.query(ByteRange::ALL, Version::ZERO);
        answer.covers = range;
        answer.ranges.retain(|o| o.range.overlaps(range));
        for o in &mut answer.ranges {
            o.range = o.range.intersect(range);
        }
        answer
    }

    /// Whoever has heard an answer that nothing was missing from need not ask again.
    fn settle(&mut self, range: ByteRange) {
        let answer = self.part(range);
        self.deliver(Message::Map(answer), true);
        for piece in self.view.plan_read(range) {
            let asks = piece.source != Source::Local && piece.as_of == Version::ZERO;
            assert!(!asks, "just heard, and not known: {piece:?}");
        }
        self.plan(range);
    }

    // ---- the judge -----------------------------------------------------------------------------

    fn check(&mut self) {
        let mut sums = [0u64; 3];
        for i in 0..BYTES {
            let (class, byte) = (self.class_of(i), self.bytes[i]);
            match class {
                Some(Class::Dirty) => assert!(byte.dirty, "byte {i}"),
                Some(Class::Attaching) => assert!(byte.sent && byte.flying > 0, "byte {i}"),
                _ => assert!(!byte.dirty && !byte.sent, "byte {i} was written here and is lost"),
            }
            match class {
                Some(Class::Unflushed | Class::Flushed) => {
                    assert!(byte.owned.is_some(), "byte {i} is not owned");
                    self.check_flushed(i, class == Some(Class::Flushed));
                }
                None | Some(Class::Clean) => self.check_not_lost(i),
                _ => {}
            }
            if matches!(class, Some(Class::Unflushed | Class::Flushed | Class::Clean)) {
                assert!(self.was(i, byte.value, byte.told), "byte {i} is older than was told");
            }
            match class {
                Some(Class::Dirty | Class::Attaching) => sums[0] += 1,
                Some(Class::Unflushed) => sums[1] += 1,
                Some(_) => sums[2] += 1,
                None => {}
            }
        }
        let view = &self.view;
        assert_eq!(view.unattached_bytes(), sums[0]);
        assert_eq!(view.has_unattached(), sums[0] > 0);
        assert_eq!(view.unflushed_bytes(), sums[0] + sums[1]);
        assert_eq!(view.clean_bytes(), sums[2]);
        self.check_seeks();
    }

    /// A byte that is no longer ours here was given back or taken.
    fn check_not_lost(&mut self, i: usize) {
        if let Some(version) = self.bytes[i].owned.take() {
            // What this node attached it knows, also when it has given it back.
            self.bytes[i].told = self.bytes[i].told.max(version);
            let since = self.history[i].iter().filter(|(v, ..)| *v > version);
            assert!(since.into_iter().any(|(_, _, o)| *o != ME), "byte {i} was ours");
        }
    }

    /// Node and service agree on what is flushed, of what is still this node's.
    fn check_flushed(&self, i: usize, flushed: bool) {
        let owned = self.service.owned_in(ByteRange::at(i as u64, 1)).next();
        if let Some(o) = owned.filter(|o| o.node == ME)
            && self.history[i].last().is_some_and(|(v, ..)| Some(*v) == self.bytes[i].owned)
        {
            assert_eq!(o.flushed, flushed, "byte {i}");
        }
    }

    fn class_of(&self, i: usize) -> Option<Class> {
        let byte = ByteRange::at(i as u64, 1);
        self.view.local.overlapping(byte).next().map(|(_, l)| l.class())
    }

    fn check_seeks(&self) {
        let view = &self.view;
        let size = view.size();
        let data = |i: u64| {
            view.local(ByteRange::at(i, 1))
                || view.plan_read(ByteRange::at(i, 1)).iter().any(|p| p.source != Source::Zero)
        };
        for i in 0..=BYTES as u64 {
            let expected = (i..size).find(|at| data(*at));
            assert_eq!(view.seek_data(i), expected, "data from {i}");
            let hole = (i..size).find(|at| !data(*at)).unwrap_or(size);
            assert_eq!(view.seek_hole(i), (i < size).then_some(hole), "hole from {i}");
        }
    }

    fn step(&mut self, op: &Op) {
        let r = ByteRange::new;
        match *op {
            Op::Write(a, b) => self.write(r(a, b)),
            Op::Append(len) => self.append(len),
            Op::Take(a, b) => self.take(r(a, b)),
            Op::Other(node, a, b) => self.other_writes(NodeId(node), r(a, b)),
            Op::OtherFlush(node, detach) => self.other_flushes(NodeId(node), detach),
            Op::Truncate(len, mine) => self.truncate(len, mine),
            Op::Ask(_, _, true) => self.ask(ByteRange::ALL),
            Op::Ask(a, b, false) => self.messages.push(Message::Map(self.part(r(a, b)))),
            Op::Open(a, b) => self.messages.push(Message::Opened(self.part(r(a, b)))),
            Op::Settle(a, b) => self.settle(r(a, b)),
            Op::Deliver(n, ok) if n < self.messages.len() => {
                let message = self.messages.remove(n);
                self.deliver(message, ok);
            }
            Op::Plan(a, b) => self.plan(r(a, b)),
            Op::Fill(n) if n < self.fetches.len() => {
                let (piece, values) = self.fetches.remove(n);
                self.fill(&piece, &values);
            }
            Op::FlushBegin(a, b) => self.flush_begin(r(a, b)),
            Op::FlushEnd(done) => self.flush_end(done),
            Op::Detach(a, b) => self.detach(r(a, b)),
            Op::DropClean(a, b) => {
                let _ = self.view.drop_clean(r(a, b));
            }
            Op::Compact => {
                let busy = self.flush.iter().flat_map(|f| &f.0).map(|o| o.range);
                let busy: Vec<_> = busy.collect();
                self.view.compact(&busy);
                self.service.compact(&busy);
            }
            Op::Deliver(..) | Op::Fill(_) => {}
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_view_is_never_older_than_what_it_was_told(
        base in 0..BYTES as u64,
        ops in prop::collection::vec(op(), 1..80),
    ) {
        let mut world = World::new(base);
        for op in &ops {
            world.step(op);
            world.check();
        }
    }
}
