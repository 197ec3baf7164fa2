//! A node's side of quiet writes: what of one file it may write without telling, and what it has
//! written so. The service's side is in [`crate::ownership`].

use super::LeaseSeq;
use super::counted::Counted;
use crate::view::FileView;
use ebb_types::{ByteRange, Version};
use rangemap::RangeSet;

/// How far behind the end of what was written a node first asks to write quietly, and at most; each
/// time it asks for so many times as much as the time before.
const WINDOW_MIN: u64 = 4 << 20;
const WINDOW_MAX: u64 = 64 << 20;
const WINDOW_GROWTH: u64 = 4;

/// More ranges than this are told before anything else is written quietly: telling takes one message.
const UNTOLD_MAX: usize = 1 << 16;

/// The right to write quietly, as it came with an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Held {
    /// The lease that it ends with.
    pub seq: LeaseSeq,
    /// The epoch in which it was asked for.
    pub epoch: u64,
    /// The file's version in that answer.
    pub version: Version,
    /// Where nobody has written, from the published size on.
    pub window: ByteRange,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Right {
    /// The service does not count on this node.
    #[default]
    None,
    Held(Held),
    /// It may do so, and this node writes nothing quietly: it has to tell what there is.
    Owed,
}

/// Quiet writes to one file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct QuietWrites {
    right: Right,
    /// Written quietly and not told.
    untold: RangeSet<u64>,
    /// Their writes have failed, because they could not be told. Nobody waits for these.
    failed: RangeSet<u64>,
    /// Some of what was written quietly is on its way.
    telling: bool,
    /// The version of the answer that allowed these.
    since: Version,
    /// Perhaps flushed, without an answer that says so: what is written there must be told at once,
    /// so that it counts as unflushed.
    flushing: Counted,
    window: u64,
}

/// What is told.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Untold {
    /// These bytes were written quietly, or the writing of them has failed.
    pub ranges: Vec<ByteRange>,
    /// The latter.
    pub failed: Vec<ByteRange>,
    /// After the answer with this version.
    pub since: Version,
}

impl QuietWrites {
    /// True when `range` may be written without telling. `epoch` is [`super::Trust::epoch`] of now.
    #[must_use]
    pub fn allows(&self, range: ByteRange, view: &FileView, epoch: Option<u64>) -> bool {
        let Right::Held(held) = self.right else { return false };
        if epoch != Some(held.epoch) || range.end() > held.window.end() || range.is_empty() {
            return false;
        }
        if self.untold.len() >= UNTOLD_MAX {
            return false;
        }
        // What was attached here may be another node's by the time of the grant.
        let knows_owners = view.known_version() >= held.version;
        let below = range.intersect(ByteRange::new(0, held.window.start()));
        let own = |part: std::ops::Range<u64>| {
            let part = ByteRange::new(part.start, part.end);
            view.unflushed(part).iter().map(|(r, _)| r.len()).sum::<u64>() == part.len()
        };
        self.flushing.idle(range) == [range]
            && (below.is_empty() || knows_owners && self.untold.gaps(&below.to_std()).all(own))
    }

    /// True when own bytes could be written without telling, if it were known which these are.
    #[must_use]
    pub fn wants_map(&self, view: &FileView) -> bool {
        matches!(self.right, Right::Held(held) if view.known_version() < held.version)
    }

    /// True while something may be written without telling.
    #[must_use]
    pub fn is_held(&self, epoch: Option<u64>) -> bool {
        matches!(self.right, Right::Held(held) if epoch == Some(held.epoch))
    }

    /// True when the service may count on this node, or bytes are not told.
    #[must_use]
    pub fn is_some(&self) -> bool {
        self.right != Right::None || !self.untold.is_empty() || !self.failed.is_empty()
    }

    /// True when what was written must be told before anything else is done with the file.
    #[must_use]
    pub fn must_tell(&self, epoch: Option<u64>) -> bool {
        self.is_some() && !self.is_held(epoch)
    }

    /// True when a lease that is called back may not be returned yet. (A right with which nothing was
    /// written ends with it, also one that is still on its way here: it will not be taken. Such a
    /// lease must be returned at once, for the answer that brings the right may wait for it.)
    #[must_use]
    pub fn has_untold(&self) -> bool {
        self.telling || !self.untold.is_empty()
    }

    /// `range` was written without telling.
    pub fn wrote(&mut self, range: ByteRange) {
        self.untold.insert(range.to_std());
        self.failed.remove(range.to_std());
    }

    /// `range` was written and is told as every write is.
    pub fn wrote_aloud(&mut self, range: ByteRange) {
        if !range.is_empty() {
            self.untold.remove(range.to_std());
            self.failed.remove(range.to_std());
        }
    }

    /// All that is not told is going to be told. Until that is answered nothing is written quietly.
    pub fn tell(&mut self) -> Untold {
        self.right = Right::Owed;
        let mut untold = std::mem::take(&mut self.untold);
        self.telling = !untold.is_empty();
        let failed = std::mem::take(&mut self.failed);
        untold.extend(failed.iter().cloned());
        let list =
            |set: RangeSet<u64>| set.iter().map(|r| ByteRange::new(r.start, r.end)).collect();
        Untold { ranges: list(untold), failed: list(failed), since: self.since }
    }

    /// It was answered. Unless more is said, the service may count on this node still.
    pub fn heard(&mut self) {
        self.telling = false;
    }

    /// Nothing more is written quietly.
    pub fn told(&mut self) {
        self.right = Right::None;
    }

    /// More may be written so.
    pub fn granted(&mut self, held: Held) {
        self.right = Right::Held(held);
        self.since = held.version;
        self.window = (self.window * WINDOW_GROWTH).clamp(WINDOW_MIN, WINDOW_MAX);
    }

    /// It could not be told.
    pub fn not_told(&mut self, untold: &Untold) {
        self.right = Right::Owed;
        self.telling = false;
        let some = untold.ranges.iter().filter(|r| !r.is_empty());
        some.for_each(|r| self.untold.insert(r.to_std()));
        for range in &untold.failed {
            self.untold.remove(range.to_std());
            self.failed.insert(range.to_std());
        }
    }

    /// The write of these bytes has failed, because they could not be told; `known` is the newest version
    /// that this node had heard of. From now on they are told as if they were written quietly: nothing
    /// of them replaces what others have written since.
    pub fn failed(&mut self, ranges: &[ByteRange], known: Version) {
        let first = self.untold.is_empty() && self.failed.is_empty();
        self.since = if first { known } else { self.since.min(known) };
        let some = ranges.iter().filter(|r| !r.is_empty());
        some.for_each(|r| self.failed.insert(r.to_std()));
    }

    /// The service wants the lease back that the right came with.
    pub fn recall(&mut self, seq: LeaseSeq) {
        if matches!(self.right, Right::Held(held) if held.seq < seq) {
            self.give_up();
            self.window = 0;
        }
    }

    /// Nothing is written quietly until what there is was told.
    pub fn give_up(&mut self) {
        if matches!(self.right, Right::Held(_)) {
            self.right = Right::Owed;
        }
    }

    /// Ends a right with which nothing was written that is not told; true when there was one.
    pub fn end_told(&mut self) -> bool {
        let ends = matches!(self.right, Right::Held(_)) && self.untold.is_empty();
        if ends {
            self.right = Right::None;
        }
        ends
    }

    /// The file is gone, with all that was written.
    pub fn forget(&mut self) {
        *self = QuietWrites::default();
    }

    /// How far to ask for, when the last byte written is before `end`.
    #[must_use]
    pub fn wish(&self, end: u64) -> u64 {
        end.saturating_add(self.window.max(WINDOW_MIN))
    }

    /// A daemon before this one could write quietly, and wrote these bytes.
    #[must_use]
    pub fn inherited(ranges: &[ByteRange], since: Version) -> QuietWrites {
        let untold = ranges.iter().filter(|r| !r.is_empty()).map(|r| r.to_std()).collect();
        QuietWrites { right: Right::Owed, untold, since, ..QuietWrites::default() }
    }

    /// The file was cut.
    pub fn cut(&mut self, len: u64) {
        self.untold.remove(len..u64::MAX);
        self.failed.remove(len..u64::MAX);
    }

    /// These bytes are going to be flushed.
    pub fn begin_flush(&mut self, ranges: &[ByteRange]) {
        let some = ranges.iter().filter(|r| !r.is_empty());
        some.for_each(|r| self.flushing.begin(*r));
    }

    /// What became of that is known.
    pub fn end_flush(&mut self, ranges: &[ByteRange]) {
        let some = ranges.iter().filter(|r| !r.is_empty());
        some.for_each(|r| self.flushing.end(*r));
    }
}
