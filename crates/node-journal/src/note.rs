//! What is known of one file whose bytes are not all on the backing, and what records make of it.

use super::record::{Header, Held, Home, Kept, Record};
use ebb_types::{ByteRange, Extents, Time, Version};

/// One file of the image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// What is known besides its bytes.
    pub header: Header,
    /// Newest version of the file that this node has heard of.
    pub known: Version,
    /// An append was sent of which no end is known.
    pub appending: bool,
    /// It has no name: see [`Record::Nameless`].
    pub nameless: bool,
    /// What is in the cache file here may have been written although it is not held.
    pub window: Option<ByteRange>,
    /// The file sits here under this number: all of the cache file is right. 0: it does not.
    pub seat: u64,
    /// No other node has the file, or ever had it, as the service said last.
    pub alone: bool,
    /// Lengths to which this node cut it, and at which versions: what is older and behind is void.
    pub cuts: Vec<(u64, Version)>,
    /// Other nodes must hear of the cuts, also when nothing is held here: see [`Record::Overrides`].
    pub overrides: bool,
    held: Extents<Held>,
    flushed: Extents<Version>,
}

/// Another cut; those to a greater length were before it, and it says more.
pub fn remember_cut(cuts: &mut Vec<(u64, Version)>, len: u64, version: Version) {
    cuts.retain(|(older, _)| *older < len);
    cuts.push((len, version));
    if cuts.len() > CUTS_MAX {
        cuts.remove(0);
    }
}

/// So many cuts of a file are remembered, and so many ranges that were flushed.
const CUTS_MAX: usize = 1024;
const FLUSHED_MAX: usize = 1 << 20;

impl Note {
    /// A file of which nothing is held.
    #[must_use]
    pub fn new(header: Header) -> Note {
        Note {
            header,
            known: Version::ZERO,
            appending: false,
            nameless: false,
            window: None,
            seat: 0,
            alone: false,
            cuts: Vec::new(),
            overrides: false,
            held: Extents::new(),
            flushed: Extents::new(),
        }
    }

    /// All bytes held, in order.
    pub fn held(&self) -> impl Iterator<Item = (ByteRange, Held)> + '_ {
        self.held.iter()
    }

    /// Bytes that this node has flushed, and that a recovery without the service needs to know of:
    /// of files that are not whole on the backing, or that others have bytes of.
    pub fn flushed(&self) -> impl Iterator<Item = (ByteRange, Version)> + '_ {
        self.flushed.iter()
    }

    /// Bytes held within `range`, clipped to it.
    #[must_use]
    pub fn held_in(&self, range: ByteRange) -> Vec<(ByteRange, Held)> {
        self.held.overlapping(range).collect()
    }

    /// The parts of `ranges` that are not noted as written since they were last published.
    #[must_use]
    pub fn not_written(&self, ranges: &[ByteRange]) -> Vec<ByteRange> {
        let mut missing = Vec::new();
        for range in ranges.iter().filter(|r| !r.is_empty()) {
            missing.extend(self.held.gaps(*range));
            let owned = self.held_in(*range).into_iter().filter(|(_, h)| h.is_published());
            missing.extend(owned.map(|p| p.0));
        }
        missing.sort_unstable();
        missing
    }

    /// The parts of `range` that are not held.
    #[must_use]
    pub fn not_held(&self, range: ByteRange) -> Vec<ByteRange> {
        self.held.gaps(range).collect()
    }

    /// How many bytes are held.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.held().map(|(r, _)| r.len()).sum()
    }

    /// Nothing is held, and nothing else need be known.
    pub(crate) fn is_of_no_use(&self) -> bool {
        !self.has_bytes() && !self.overrides && !self.appending && !self.is_untold()
    }

    /// Bytes of it are held, or were flushed and are remembered, or what is left of them in a part file
    /// are zeros.
    #[must_use]
    pub fn has_bytes(&self) -> bool {
        !self.is_empty() || !self.flushed.is_empty() || self.waits_in_part()
    }

    fn in_part(&self) -> bool {
        self.header.home.as_ref().is_some_and(Home::is_part)
    }

    /// It was flushed into a part file, and cut: also with nothing but zeros left it waits for its name.
    fn waits_in_part(&self) -> bool {
        self.in_part() && !self.cuts.is_empty()
    }

    /// Bytes of this file are where only this node knows them to be.
    #[must_use]
    pub fn is_unpublished(&self) -> bool {
        let waits = self.in_part() && !self.flushed.is_empty() || self.waits_in_part();
        !self.nameless && (!self.is_empty() || waits)
    }

    /// Nothing is held, and what was flushed waits for its name.
    #[must_use]
    pub fn waits(&self) -> bool {
        self.is_empty() && self.is_unpublished()
    }

    /// The backing has what was attached up to this version.
    pub fn flush(&mut self, range: ByteRange, upto: Version) {
        let done = |h: &Held| matches!(h.kept, Kept::Owned(v) if v <= upto);
        let known: Vec<_> = self.held_in(range).into_iter().filter(|(_, h)| done(h)).collect();
        let home = self.header.home.as_ref();
        let matters = home.is_some_and(|h| h.is_part() || !self.alone || self.overrides);
        for (range, held) in known {
            if let Kept::Owned(version) = held.kept
                && matters
                && self.flushed.len() < FLUSHED_MAX
            {
                self.flushed.insert(range, version);
            }
        }
        self.change(&[range], |h| if done(&h) { None } else { Some(h) });
    }

    /// The service said how long the file was at this version: another node may have cut it before.
    fn hear_size(&mut self, version: Version, size: u64) {
        self.header.size = match version >= self.known {
            true => size.max(self.held.end()),
            false => self.header.size.max(size),
        };
        self.known = self.known.max(version);
    }

    /// Under its own name the file is whole; where others have bytes of it, it matters which of those
    /// there are this node's.
    pub(crate) fn whole(&mut self) {
        let known = self.alone && !self.overrides;
        if known && self.header.home.as_ref().is_some_and(|h| !h.is_part()) {
            self.flushed = Extents::new();
        }
    }

    /// What `alone` makes of it. What is remembered beside others is so for ever: they may still have older
    /// bytes of it.
    pub(crate) fn would_be_alone(&self, alone: bool) -> bool {
        alone && (self.alone || self.flushed.is_empty())
    }

    fn cut(&mut self, len: u64, version: Version) {
        self.flushed.remove(ByteRange::new(len, u64::MAX));
        remember_cut(&mut self.cuts, len, version);
    }

    /// True when nothing is.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Forgets what cannot be in a cache file of this length; how many bytes that was.
    pub fn trim(&mut self, len: u64) -> u64 {
        let had = self.len();
        self.change(&[ByteRange::new(len, u64::MAX)], |_| None);
        had - self.len()
    }

    /// Something may have been written without a record of it.
    #[must_use]
    pub fn is_untold(&self) -> bool {
        self.window.is_some() || self.seat != 0
    }

    /// What a cache file of this length has where nothing was noted was written: in the window; of
    /// a file that sits here all of it, and nothing else.
    pub fn fill_untold(&mut self, len: u64) {
        let all = ByteRange::new(0, len);
        if self.seat != 0 {
            self.set_held((!all.is_empty()).then(|| (all, Held::new(Kept::Written))));
            self.header.size = len;
        } else if let Some(window) = self.window {
            self.put_missing(window.intersect(all));
        }
    }

    fn put_missing(&mut self, range: ByteRange) {
        for gap in self.not_held(range) {
            self.held.insert(gap, Held::new(Kept::Written));
        }
        self.header.size = self.header.size.max(range.end());
    }

    /// Replaces what is held.
    pub fn set_held(&mut self, held: impl IntoIterator<Item = (ByteRange, Held)>) {
        self.held = held.into_iter().collect();
    }

    fn put(&mut self, ranges: &[ByteRange], kept: Kept, guessed: bool) {
        let held = |durable| Some(Held { kept, durable, guessed, damaged: false });
        let before = self.held.within(ranges).into_iter();
        let durable: Vec<_> =
            before.filter(|(_, h)| h.durable).map(|(part, _)| (part, held(true))).collect();
        self.held.assign(&ranges.iter().map(|r| (*r, held(false))).collect::<Vec<_>>());
        self.held.assign(&durable);
    }

    /// Bytes were written, or an attach of them is about to be sent.
    fn put_new(&mut self, ranges: &[ByteRange], held: (Kept, bool), known: Version, at: Time) {
        self.put(ranges, held.0, held.1);
        self.known = self.known.max(known);
        self.header.mtime = at;
        let end = ranges.iter().map(|r| r.end()).max().unwrap_or(0);
        self.header.size = self.header.size.max(end);
    }

    /// Published bytes, also those that are not held since they were flushed.
    fn put_again(&mut self, range: ByteRange, version: Version) {
        let kept = Kept::Again(version);
        let gaps: Vec<_> = self.held.gaps(range).collect();
        gaps.into_iter().for_each(|gap| self.held.insert(gap, Held::new(kept)));
        self.change(&[range], |h| Some(if h.is_published() { Held { kept, ..h } } else { h }));
    }

    /// What is held of `ranges` becomes something else.
    fn change(&mut self, ranges: &[ByteRange], f: impl Fn(Held) -> Option<Held>) {
        let held = self.held.within(ranges).into_iter();
        let changed = held.map(|(part, held)| (part, held, f(held)));
        let changes: Vec<_> = changed
            .filter(|(_, held, new)| *new != Some(*held))
            .map(|(part, _, new)| (part, new))
            .collect();
        self.held.assign(&changes);
    }
}

/// Changes a file; true when the record takes bytes away.
pub(crate) fn apply_to(note: &mut Note, record: &Record) -> bool {
    match record {
        Record::Written(_, ranges, known, at) => {
            note.put_new(ranges, (Kept::Written, false), *known, *at);
        }
        Record::Attaching(_, ranges, known, at) => {
            note.put_new(ranges, (Kept::Attaching, false), *known, *at);
        }
        Record::Guessed(_, ranges, kept, known, at) => {
            note.put_new(ranges, (*kept, true), *known, *at);
        }
        Record::Again(_, ranges, version) => {
            let some = ranges.iter().filter(|r| !r.is_empty());
            some.for_each(|r| note.put_again(*r, *version));
        }
        Record::Refused(_, ranges) => {
            note.change(ranges, |_| None);
            return true;
        }
        Record::Attached(_, ranges, version, size) => {
            note.hear_size(*version, *size);
            note.change(ranges, |h| match h.kept {
                Kept::Attaching => Some(Held { kept: Kept::Owned(*version), ..h }),
                Kept::Owned(v) | Kept::Again(v) => {
                    Some(Held { kept: Kept::Owned(v.max(*version)), ..h })
                }
                Kept::Written => Some(h),
            });
        }
        Record::Window(_, window, known) => {
            note.window = Some(*window).filter(|w| !w.is_empty());
            note.known = note.known.max(*known);
            return note.window.is_none();
        }
        Record::Seat(_, seat, known) => {
            note.seat = *seat;
            note.known = note.known.max(*known);
            return note.seat == 0;
        }
        Record::Appending(_) => note.appending = true,
        Record::Nameless(_) => note.nameless = true,
        Record::Overrides(_) => note.overrides = true,
        Record::Appended(_, range, version, size, at) => {
            note.appending = false;
            note.put(&[*range], Kept::Owned(*version), false);
            note.known = note.known.max(*version);
            note.header.size = note.header.size.max(*size);
            note.header.mtime = *at;
        }
        Record::Flushed(_, ranges) => {
            ranges.iter().for_each(|(range, upto)| note.flush(*range, *upto));
            return true;
        }
        Record::Lost(_, ranges) => {
            note.change(ranges, |h| (!h.is_published()).then_some(h));
            return true;
        }
        Record::Cut(_, len, version) => {
            note.change(&[ByteRange::new(*len, u64::MAX)], |_| None);
            note.known = note.known.max(*version);
            note.header.size = *len;
            note.cut(*len, *version);
            return true;
        }
        Record::Durable(_, ranges) => {
            note.change(ranges, |h| Some(Held { durable: true, ..h }));
        }
        Record::Damaged(_, ranges) => {
            note.change(ranges, |h| Some(Held { durable: false, damaged: true, ..h }));
        }
        Record::Extents(_, extents, known, appending) => {
            note.known = note.known.max(*known);
            note.appending = *appending;
            let held: Vec<_> = extents.iter().map(|(range, held)| (*range, Some(*held))).collect();
            note.held.assign(&held);
        }
        Record::Alone(_, alone) => note.alone = note.would_be_alone(*alone),
        Record::Cuts(_, cuts) => note.cuts.clone_from(cuts),
        Record::Home(_, ranges) => {
            ranges.iter().for_each(|(range, version)| note.flushed.insert(*range, *version));
        }
        Record::Life(_) | Record::File(..) | Record::Gone(_) => {}
        Record::Synced(_) | Record::Names(_) | Record::Lives(_) => {}
        Record::Asked(..) | Record::Answered(_) => {}
    }
    false
}
