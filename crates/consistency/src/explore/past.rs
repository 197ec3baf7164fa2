//! Writers past the daemon: the kernel puts bytes into a node's cache file and nobody is told. The
//! node looks for them at its sync events, as `fs-client/src/passing/track.rs` does, and claims
//! what it finds by the rules of [`crate::claim`]; or it is told of the bytes ([`Telling`]), and looks
//! only when some of that was lost. All of a node's opens are of this kind, of a file that was empty. Blocks have two bytes here, and programs write zeros as well.

use super::actors::Flusher;
use super::fault::Fault;
use super::parts::Part;
use super::restart::Left;
use super::world::{Bytes, FILE, Hand, LEN, READ_TRIES, Setup, World, Wrong, indexes};
use crate::claim::Claim;
use crate::view::{Changes, FileView, Piece, Source};
use ebb_types::{ByteRange, Version};

pub(super) const BLOCK: usize = 2;

/// The flusher's turn, beside those of the processes.
const FLUSHER: usize = usize::MAX;

/// Which nodes the kernel tells what was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Telling {
    /// None: all of them look.
    #[default]
    Nobody,
    /// Every other one.
    Some,
    /// All.
    All,
    /// All, but each loses something at its first look, and at every other one after that.
    Losing,
}

impl Telling {
    fn tells(self, n: usize) -> bool {
        match self {
            Telling::Nobody => false,
            Telling::Some => n.is_multiple_of(2),
            Telling::All | Telling::Losing => true,
        }
    }
}

/// What a node remembers of its cache file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Past {
    /// Bytes of blocks that hold data.
    pub(super) data: [bool; LEN],
    pub(super) len: usize,
    /// The file's times show a change since the last look.
    pub(super) changed: bool,
    /// Own bytes may have been written again since they were attached.
    pub(super) due: bool,
    /// What was put there of others' bytes.
    pub(super) twin: Option<Bytes>,
    /// Zeros of own blocks that others have.
    pub(super) refused: [bool; LEN],
    /// The published size that the cache file agrees with.
    pub(super) size: u64,
    /// Whose sync event it is.
    pub(super) turn: Option<usize>,
    /// Bytes that the kernel tells of at the next look.
    pub(super) told: [bool; LEN],
    /// Something was lost at the last look.
    pub(super) was_lost: bool,
    /// What the journal says of a daemon that died.
    pub(super) left: Option<Left>,
}

/// What one attach takes along.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Sending {
    taken: Vec<ByteRange>,
    exact: Vec<ByteRange>,
    guessed: Vec<ByteRange>,
    known: Version,
    again: Vec<ByteRange>,
}

/// What the service made of it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Claimed {
    sent: Sending,
    version: Version,
    size: u64,
    contested: Vec<ByteRange>,
}

pub(super) fn byte(i: usize) -> ByteRange {
    ByteRange::at(i as u64, 1)
}

/// The bytes that `is` holds for, as ranges.
pub(super) fn runs(is: impl Fn(usize) -> bool) -> Vec<ByteRange> {
    let mut out: Vec<ByteRange> = Vec::new();
    for i in (0..LEN).filter(|i| is(*i)) {
        match out.last_mut() {
            Some(last) if last.end() == i as u64 => {
                *last = ByteRange::new(last.start(), i as u64 + 1);
            }
            _ => out.push(byte(i)),
        }
    }
    out
}

pub(super) fn has(list: &[ByteRange], i: usize) -> bool {
    list.iter().any(|r| r.overlaps(byte(i)))
}

fn is_remote(view: &FileView, i: usize) -> bool {
    let remote = |p: &Piece| matches!(p.source, Source::Peer { .. } | Source::Backing);
    view.plan_read(byte(i)).iter().any(remote)
}

/// The parts of a sync operation: publish what was written, ask, bring what is shown.
pub(super) fn sync(asks: bool, out: &mut Vec<Part>) {
    out.extend([Part::Turn, Part::Collect, Part::Claim, Part::Claimed]);
    if asks {
        out.extend([Part::Ask(FILE), Part::Learn, Part::Bring, Part::Keep]);
    }
    out.push(Part::EndTurn);
}

/// The parts of a truncate.
pub(super) fn cut(len: u64, out: &mut Vec<Part>) {
    out.extend([Part::Turn, Part::Collect, Part::Claim, Part::Claimed]);
    out.extend([Part::Cut(len), Part::HaveCut(len), Part::Bring, Part::Keep, Part::EndTurn]);
}

/// The parts of a daemon's end and its successor's beginning.
pub(super) fn restart(out: &mut Vec<Part>) {
    out.extend([Part::Turn, Part::Die, Part::Revive, Part::EndTurn]);
}

impl World {
    /// True when that part can be taken as far as turns go.
    pub(super) fn has_turn(&self, n: usize) -> bool {
        self.nodes[n].past.turn.is_none()
    }

    /// True when a flush has something to look for.
    pub(super) fn shows_past(&self, n: usize) -> bool {
        self.nodes[n].past.changed
    }

    pub(super) fn past_part(
        &mut self,
        setup: &Setup<'_>,
        p: usize,
        part: Part,
        hand: Hand,
    ) -> Result<Hand, Wrong> {
        let n = setup.node(p);
        Ok(match (part, hand) {
            (Part::Past(r, value), _) => {
                self.write_past(setup, n, r, value);
                Hand::Nothing
            }
            (Part::Peek(r), _) => {
                self.judge(p, r, self.nodes[n].cache[indexes(r)].to_vec())?;
                Hand::Nothing
            }
            (Part::Turn, _) => {
                self.nodes[n].past.turn = Some(p);
                Hand::Nothing
            }
            (Part::EndTurn, _) => {
                self.nodes[n].past.turn = None;
                Hand::Nothing
            }
            (Part::Collect, _) => {
                self.look(setup, n);
                Hand::Sending(self.take(n))
            }
            (Part::Claim, Hand::Sending(sent)) => Hand::Claimed(self.claim(setup, n, sent)),
            (Part::Claimed, Hand::Claimed(claimed)) => match self.claimed(n, &claimed) {
                true => Hand::Nothing,
                false => {
                    // Another round for what is known by name now.
                    self.procs[p].part -= 2;
                    Hand::Sending(self.take(n))
                }
            },
            (Part::Bring, hand) => {
                let tries = if let Hand::Brought(_, tries) = hand { tries } else { 0 };
                Hand::Brought(self.missing(setup, n), tries)
            }
            (Part::Keep, Hand::Brought(pieces, tries)) => {
                if self.keep(setup, n, pieces) || setup.fault == Some(Fault::NotBrought) {
                    return Ok(Hand::Nothing);
                }
                if tries >= READ_TRIES {
                    return Err(Wrong::Unreadable { process: p, op: self.procs[p].op });
                }
                self.procs[p].part -= 2;
                Hand::Brought(Vec::new(), tries + 1)
            }
            (Part::Die, _) => {
                self.die(setup, n);
                Hand::Nothing
            }
            (Part::Revive, _) => {
                self.revive(setup, p, n);
                Hand::Nothing
            }
            (part, hand) => unreachable!("{part:?} with {hand:?}: the parts are in order"),
        })
    }

    fn write_past(&mut self, setup: &Setup<'_>, n: usize, r: ByteRange, value: u8) {
        let node = &mut self.nodes[n];
        if setup.telling.tells(n) {
            node.past.told[indexes(r)].fill(true);
        }
        node.cache[indexes(r)].fill(value);
        self.memory[indexes(r)].fill(value);
        node.past.touch(indexes(r));
    }

    /// Finds what was written since the last look.
    pub(super) fn look(&mut self, setup: &Setup<'_>, n: usize) {
        let node = &mut self.nodes[n];
        let (past, view, cache) = (&mut node.past, &mut node.view, &node.cache);
        if !past.changed || setup.fault == Some(Fault::NotLookedFor) {
            return;
        }
        let len = past.len;
        if setup.telling.tells(n) {
            let told = std::mem::take(&mut past.told);
            past.was_lost = setup.telling == Telling::Losing && !past.was_lost;
            let lost = past.was_lost;
            let known = runs(|i| told[i] && i < len && !(lost && i % 2 == 0));
            known.iter().for_each(|r| view.write(*r));
            if !lost || setup.fault == Some(Fault::LossNotTold) {
                past.changed = false;
                return;
            }
        }
        let then = |i: usize| past.twin.map_or(0, |twin| twin[i]);
        let clean = view.clean(FILE);
        let mut changed = match past.twin {
            Some(_) => runs(|i| i < len && has(&clean, i) && cache[i] != then(i)),
            None => Vec::new(),
        };
        let blocks = |i: usize| i < len && past.data[i];
        let absent = view.absent(FILE);
        changed.extend(runs(|i| blocks(i) && past.refused[i] && has(&absent, i) && cache[i] != 0));
        let remote = |i: usize| blocks(i) && !past.refused[i] && is_remote(view, i);
        changed.extend(runs(|i| remote(i) && cache[i] != then(i)));
        let others = runs(|i| blocks(i) && !past.refused[i] && !is_remote(view, i));
        view.found(&others);
        changed.iter().for_each(|r| view.write(*r));
        past.changed = false;
        past.due = true;
    }

    fn take(&mut self, n: usize) -> Sending {
        let node = &mut self.nodes[n];
        let taken = node.view.take_unattached(FILE);
        let (exact, guessed) = node.view.by_precision(&taken);
        let due = std::mem::take(&mut node.past.due);
        let again = if due { node.view.owned(FILE) } else { Vec::new() };
        let known = node.view.known_version();
        Sending { taken, exact, guessed, known, again }
    }

    /// The service judges the claims and attaches what it grants.
    fn claim(&mut self, setup: &Setup<'_>, n: usize, sent: Sending) -> Claimed {
        let id = self.nodes[n].id;
        let (mut ranges, mut claimed, mut contested) = (sent.exact.clone(), Vec::new(), Vec::new());
        let claims = [
            (&sent.guessed, Claim::Guessed { known: sent.known }, Fault::GuessesTakeAll),
            (&sent.again, Claim::Again, Fault::AgainTakesAll),
        ];
        for (list, claim, fault) in claims {
            for range in list {
                let (granted, refused) = self.service.judge_claim(id, *range, claim);
                claimed.extend(granted);
                match setup.fault == Some(fault) {
                    true => ranges.extend(refused),
                    false => contested.extend(refused),
                }
            }
        }
        self.service.claim(id, &ranges, &claimed);
        let (version, size) = (self.service.version(), self.service.size());
        Claimed { sent, version, size, contested }
    }

    /// The node takes the answer in; false when there is another round to make.
    fn claimed(&mut self, n: usize, claimed: &Claimed) -> bool {
        let Claimed { sent, version, size, contested } = claimed;
        let node = &mut self.nodes[n];
        let split = |list: &[ByteRange]| {
            let inside = runs(|i| has(list, i) && has(contested, i));
            (runs(|i| has(list, i) && !has(contested, i)), inside)
        };
        let (ranges, refused) = split(&sent.taken);
        let (again, _) = split(&sent.again);
        node.view.attach_failed(&refused);
        node.view.attached(&ranges, *version, *size);
        node.view.attached_again(&again, *version);
        node.past.size = node.past.size.max(*size);
        let (_, guessed) = node.view.by_precision(contested);
        if guessed.is_empty() {
            return true;
        }
        let written = runs(|i| has(&guessed, i) && node.cache[i] != 0);
        let zeros = node.view.refused(&guessed, &written);
        zeros.iter().flat_map(|r| indexes(*r)).for_each(|i| node.past.refused[i] = true);
        false
    }

    /// An answer took bytes: what is zeros now becomes so, the rest stays until it is brought.
    pub(super) fn replace_lost(&mut self, n: usize, changes: &Changes) {
        let node = &mut self.nodes[n];
        let (past, view) = (&mut node.past, &node.view);
        for (list, were_own) in [(&changes.overtaken, true), (&changes.stale, false)] {
            for piece in list.iter().flat_map(|r| view.plan_read(*r)) {
                let at = indexes(piece.range);
                match piece.source {
                    Source::Local => {}
                    Source::Zero => {
                        node.cache[at.clone()].fill(0);
                        past.clear(at);
                    }
                    _ if were_own => {
                        let twin = past.twin.get_or_insert_default();
                        twin[at.clone()].copy_from_slice(&node.cache[at]);
                    }
                    _ => {}
                }
            }
        }
        let before = std::mem::replace(&mut past.size, view.published_size());
        if view.published_size() < before {
            let end = view.size().min(LEN as u64) as usize;
            node.cache[end..].fill(0);
            past.clear(end..LEN);
            past.len = end;
        }
        past.len = past.len.max(view.size() as usize);
    }

    /// This node's own truncate was carried out.
    pub(super) fn resized(&mut self, n: usize, len: u64) {
        let node = &mut self.nodes[n];
        let end = indexes(ByteRange::new(0, len)).end;
        node.past.size = len;
        node.cache[end..].fill(0);
        node.past.clear(end..LEN);
        node.past.len = len as usize;
    }

    /// What is known to be elsewhere, with the bytes where they were found.
    fn missing(&mut self, setup: &Setup<'_>, n: usize) -> Vec<(Piece, Option<Vec<u8>>)> {
        let size = self.nodes[n].view.size();
        let plan = self.nodes[n].view.plan_read(ByteRange::new(0, size));
        let remote = |p: &Piece| matches!(p.source, Source::Peer { .. } | Source::Backing);
        let found: Vec<_> =
            plan.into_iter().filter(remote).map(|p| (p, self.bytes_of(n, &p))).collect();
        if found.iter().any(|(_, bytes)| bytes.is_none()) {
            self.learn_anew(setup, n);
        }
        found
    }

    /// Asks for everything, whatever is known.
    pub(super) fn learn_anew(&mut self, setup: &Setup<'_>, n: usize) {
        let answer = self.service.query(FILE, Version::ZERO);
        self.learn(setup, n, &answer);
    }

    /// Puts them into the cache file; true when nothing is missing any more.
    fn keep(&mut self, setup: &Setup<'_>, n: usize, found: Vec<(Piece, Option<Vec<u8>>)>) -> bool {
        let node = &mut self.nodes[n];
        if setup.fault == Some(Fault::NotBrought) {
            return false;
        }
        for (piece, bytes) in found.iter().filter_map(|(p, b)| Some((p, b.as_ref()?))) {
            let accepted = node.view.fetched(piece.range, piece.as_of);
            for i in accepted.iter().flat_map(|r| indexes(*r)) {
                let new = bytes[i - piece.range.start() as usize];
                let twin = node.past.twin.get_or_insert_default();
                if twin[i] != new {
                    node.cache[i] = new;
                    node.past.touch(i..i + 1);
                }
                if setup.fault != Some(Fault::NoTwin)
                    && let Some(twin) = &mut node.past.twin
                {
                    twin[i] = new;
                }
            }
        }
        let view = &node.view;
        (0..view.size().min(LEN as u64) as usize).all(|i| !is_remote(view, i))
    }

    /// All of a publication at once, as the flusher and the last close make it.
    pub(super) fn publish_past(&mut self, setup: &Setup<'_>, n: usize) {
        debug_assert!(self.has_turn(n), "sync events take turns");
        self.nodes[n].past.turn = Some(FLUSHER);
        self.look(setup, n);
        loop {
            let sent = self.take(n);
            let claimed = self.claim(setup, n, sent);
            if self.claimed(n, &claimed) {
                break;
            }
        }
        self.nodes[n].past.turn = None;
    }

    /// What a flush was not granted was taken by others: the node learns of it and fetches it.
    pub(super) fn bring_all(&mut self, setup: &Setup<'_>, n: usize) {
        for _ in 0..READ_TRIES {
            let found = self.missing(setup, n);
            if self.keep(setup, n, found) {
                return;
            }
        }
    }

    /// The last looks, when nobody has the file open any more.
    pub(super) fn publish_last(&mut self, setup: &Setup<'_>) {
        for n in 0..self.nodes.len() {
            if self.nodes[n].flusher == Flusher::Idle && setup.passes(n) {
                self.publish_past(setup, n);
            }
        }
    }
}

impl Past {
    /// Something was written there.
    pub(super) fn touch(&mut self, at: std::ops::Range<usize>) {
        let end = at.end.next_multiple_of(BLOCK).min(LEN);
        self.data[at.start / BLOCK * BLOCK..end].fill(true);
        self.len = self.len.max(at.end);
        self.changed = true;
    }

    /// Those bytes are zeros now. Blocks that are not wholly among them keep their data.
    fn clear(&mut self, at: std::ops::Range<usize>) {
        if at.is_empty() {
            return;
        }
        self.refused[at.clone()].fill(false);
        if let Some(twin) = &mut self.twin {
            twin[at.clone()].fill(0);
        }
        let inner = at.start.next_multiple_of(BLOCK)..at.end / BLOCK * BLOCK;
        if !inner.is_empty() {
            self.data[inner].fill(false);
        }
        self.changed = true;
    }
}
