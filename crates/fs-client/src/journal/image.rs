//! What the cache of a node holds that the backing does not: records of what happened, and the
//! image that they add up to. Pure; how records get to disk is in [`crate::journal`].
//!
//! The image of a file is kept only while something of it is not on the backing.

use ebb_namespace::Book;
use ebb_types::{ByteRange, Extents, Facts, Ino, Lives, Subjects, Time, Version};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// The daemon that wrote the records behind this one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Life {
    /// Its node's name.
    pub node: String,
    /// Its configuration, as JSON.
    pub config: String,
    /// Which boot of the machine: of another one, only what was synced can be trusted.
    pub boot: String,
    /// The job, as the service counts it; 0: unknown.
    pub job: u64,
    /// `st_ino` of the backing directory.
    pub backing_ino: u64,
    /// When it began.
    pub began: Time,
}

/// Size and mtime of a backing file when it was looked at last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    /// Its size.
    pub size: u64,
    /// Its mtime.
    pub mtime: Time,
}

/// A file on the backing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Home {
    /// Relative to the backing; may be a part file.
    pub path: Vec<u8>,
    /// `st_ino` there.
    pub ino: u64,
    /// In which state; `None`: not looked at.
    pub seen: Option<Seen>,
    /// This node is writing to it, so it may be newer than `seen`.
    pub changing: bool,
}

impl Home {
    /// True for a file that has not got its own name yet.
    #[must_use]
    pub fn is_part(&self) -> bool {
        let last = self.path.rsplit(|b| *b == b'/').next().unwrap_or_default();
        last.starts_with(ebb_types::name::PART_PREFIX)
    }
}

/// What is known of a file besides its bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// One of its paths in the mount, when last heard of; empty: unknown.
    pub path: Vec<u8>,
    /// Permission bits.
    pub perm: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Last access, if it was set.
    pub atime: Time,
    /// Last change of the content.
    pub mtime: Time,
    /// Size, as this node saw it.
    pub size: u64,
    /// Where its bytes are on the backing, if anywhere.
    pub home: Option<Home>,
    /// Another file that has its name on the backing until it is published: it was renamed over.
    pub under: Option<Home>,
    /// Other nodes had bytes of it when last heard of.
    pub shared: bool,
}

/// How bytes are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kept {
    /// Written, not published.
    Written,
    /// Written; an attach was sent and no answer is known.
    Attaching,
    /// Published at this version, not flushed.
    Owned(Version),
    /// Published before, and perhaps written again past the daemon, as of this version; an attach
    /// was sent and no answer is known. Flushed or not: that may have been without the new bytes.
    Again(Version),
}

/// Bytes in the cache file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Stored", into = "Stored")]
pub struct Held {
    /// How they are held.
    pub kept: Kept,
    /// They were synced to the device at least once since they are held.
    pub durable: bool,
    /// They are parts of blocks that were written past the daemon: which of their zeros were
    /// written is not known. When others have them as well, theirs count.
    pub guessed: bool,
    /// The disk lost them: they are nowhere any more.
    pub damaged: bool,
}

/// [`Held`] in a journal: formats 1 and 2 had a bool in place of the bits.
#[derive(Clone, Copy, Serialize, Deserialize)]
struct Stored {
    kept: Kept,
    bits: u8,
}

const DURABLE: u8 = 1;
const GUESSED: u8 = 2;
const DAMAGED: u8 = 4;

impl From<Held> for Stored {
    fn from(held: Held) -> Stored {
        let bit = |set: bool, bit: u8| if set { bit } else { 0 };
        let bits = bit(held.durable, DURABLE) | bit(held.guessed, GUESSED);
        Stored { kept: held.kept, bits: bits | bit(held.damaged, DAMAGED) }
    }
}

impl TryFrom<Stored> for Held {
    type Error = &'static str;

    fn try_from(stored: Stored) -> Result<Held, &'static str> {
        let is = |bit| stored.bits & bit != 0;
        match stored.bits {
            0..=7 => Ok(Held {
                kept: stored.kept,
                durable: is(DURABLE),
                guessed: is(GUESSED),
                damaged: is(DAMAGED),
            }),
            _ => Err("unknown bits"),
        }
    }
}

impl Held {
    /// Bytes known to be written, and not synced yet.
    #[must_use]
    pub fn new(kept: Kept) -> Held {
        Held { kept, durable: false, guessed: false, damaged: false }
    }

    fn is_published(&self) -> bool {
        matches!(self.kept, Kept::Owned(_) | Kept::Again(_))
    }
}

/// Something that happened. New kinds go to the end, and raise the format version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Record {
    Life(Box<Life>),
    /// Comes before anything else about a file, and again when something in it changes.
    File(Ino, Box<Header>),
    /// Written and not attached, as of this version and time.
    Written(Ino, Vec<ByteRange>, Version, Time),
    /// An attach is about to be sent.
    Attaching(Ino, Vec<ByteRange>, Version, Time),
    /// It succeeded; with the published size.
    Attached(Ino, Vec<ByteRange>, Version, u64),
    /// An append is about to be sent: where it goes is not known.
    Appending(Ino),
    /// Bytes were stored where the service had attached them; with the published size.
    Appended(Ino, ByteRange, Version, u64, Time),
    /// The backing has what was attached up to these versions.
    Flushed(Ino, Vec<(ByteRange, Version)>),
    /// Published bytes that others took.
    Lost(Ino, Vec<ByteRange>),
    /// The file was cut or extended by this node.
    Cut(Ino, u64, Version),
    /// The cache file was synced; these bytes are safe from a power loss.
    Durable(Ino, Vec<ByteRange>),
    /// Nothing of this file is of any use any more: it was deleted, or everything is drained.
    Gone(Ino),
    /// Everything before this offset of the journal was on stable storage.
    Synced(u64),
    /// Part of a snapshot: bytes as they are held, and the newest version known.
    Extents(Ino, Vec<(ByteRange, Held)>, Version, bool),
    /// It has lost its last name and is open here: its bytes matter to those who have it open,
    /// and to nobody when they are gone.
    Nameless(Ino),
    /// Like `Written` or `Attaching`, of bytes that are guessed to be written.
    Guessed(Ino, Vec<ByteRange>, Kept, Version, Time),
    /// Published bytes that were perhaps written again, as of this version: an attach is about to
    /// be sent.
    Again(Ino, Vec<ByteRange>, Version),
    /// Claimed bytes that turned out to be others'.
    Refused(Ino, Vec<ByteRange>),
    /// Bytes may be written here from now on, as of this version, without a record of them; empty:
    /// not any more.
    Window(Ino, ByteRange, Version),
    /// The file sits here under that number, as of this version: all of its cache file is right; 0:
    /// not any more.
    Seat(Ino, u64, Version),
    /// The service said that no other node has the file, or ever had; or that this is not so.
    Alone(Ino, bool),
    /// Part of a snapshot: lengths to which this node cut the file, and at which versions.
    Cuts(Ino, Vec<(u64, Version)>),
    /// Part of a snapshot: bytes that this node has flushed to where the file is on the backing.
    Home(Ino, Vec<(ByteRange, Version)>),
    /// The disk lost these bytes, which are held.
    Damaged(Ino, Vec<ByteRange>),
    /// What the service said of names and inodes that this node changed.
    Names(Box<Facts>),
    /// What this node cut may be in other nodes' caches still, as bytes of theirs.
    Overrides(Ino),
    /// The lives of nodes that this cache answers for, and how many there were.
    Lives(Lives),
    /// A request is going to be sent, known by that number, that may change these names.
    Asked(u64, Box<Subjects>),
    /// It was answered.
    Answered(u64),
}

/// Largest offset of a file.
const OFFSET_MAX: u64 = i64::MAX as u64;

fn sound(range: ByteRange) -> bool {
    // A range that was read need not have gone through its constructors.
    range.start() <= range.end() && range.end() <= OFFSET_MAX
}

impl Record {
    /// False for what no daemon writes, whatever its checksum says.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        match self {
            Record::Written(_, r, ..)
            | Record::Attaching(_, r, ..)
            | Record::Attached(_, r, ..)
            | Record::Lost(_, r)
            | Record::Again(_, r, _)
            | Record::Refused(_, r)
            | Record::Damaged(_, r)
            | Record::Durable(_, r) => r.iter().all(|r| sound(*r)),
            Record::Guessed(_, r, kept, ..) => {
                matches!(kept, Kept::Written | Kept::Attaching) && r.iter().all(|r| sound(*r))
            }
            Record::Flushed(_, r) | Record::Home(_, r) => r.iter().all(|(r, _)| sound(*r)),
            Record::Cuts(_, cuts) => cuts.iter().all(|(len, _)| *len <= OFFSET_MAX),
            Record::Extents(_, r, ..) => r.iter().all(|(r, _)| sound(*r)),
            Record::Appended(_, r, ..) | Record::Window(_, r, _) => sound(*r),
            Record::File(_, header) => header.size <= OFFSET_MAX,
            Record::Cut(_, len, _) => *len <= OFFSET_MAX,
            Record::Life(_) | Record::Appending(_) | Record::Gone(_) | Record::Synced(_) => true,
            Record::Lives(_) => true,
            Record::Nameless(_) | Record::Seat(..) | Record::Alone(..) | Record::Overrides(_) => {
                true
            }
            Record::Names(facts) => facts.is_sound(),
            Record::Asked(_, about) => about.is_sound(),
            Record::Answered(_) => true,
        }
    }

    /// The file it is about.
    #[must_use]
    pub fn ino(&self) -> Option<Ino> {
        match self {
            Record::Life(_) | Record::Synced(_) | Record::Names(_) | Record::Lives(_) => None,
            Record::Asked(..) | Record::Answered(_) => None,
            Record::File(ino, _)
            | Record::Written(ino, ..)
            | Record::Attaching(ino, ..)
            | Record::Attached(ino, ..)
            | Record::Appending(ino)
            | Record::Appended(ino, ..)
            | Record::Flushed(ino, _)
            | Record::Lost(ino, _)
            | Record::Cut(ino, ..)
            | Record::Durable(ino, _)
            | Record::Gone(ino)
            | Record::Nameless(ino)
            | Record::Extents(ino, ..)
            | Record::Guessed(ino, ..)
            | Record::Again(ino, ..)
            | Record::Window(ino, ..)
            | Record::Seat(ino, ..)
            | Record::Alone(ino, _)
            | Record::Cuts(ino, _)
            | Record::Home(ino, _)
            | Record::Damaged(ino, _)
            | Record::Overrides(ino)
            | Record::Refused(ino, _) => Some(*ino),
        }
    }
}

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
pub(crate) fn remember_cut(cuts: &mut Vec<(u64, Version)>, len: u64, version: Version) {
    cuts.retain(|(older, _)| *older < len);
    cuts.push((len, version));
    if cuts.len() > CUTS_MAX {
        cuts.remove(0);
    }
}

/// So many cuts of a file are remembered, and so many ranges that were flushed.
const CUTS_MAX: usize = 16;
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
    fn is_of_no_use(&self) -> bool {
        !self.has_bytes() && !self.overrides && !self.appending && !self.is_untold()
    }

    /// Bytes of it are held, or were flushed and are remembered.
    #[must_use]
    pub fn has_bytes(&self) -> bool {
        !self.is_empty() || !self.flushed.is_empty()
    }

    /// Bytes of this file are where only this node knows them to be.
    #[must_use]
    pub fn is_unpublished(&self) -> bool {
        let in_part = self.header.home.as_ref().is_some_and(Home::is_part);
        !self.nameless && (!self.is_empty() || in_part && !self.flushed.is_empty())
    }

    /// Nothing is held, and what was flushed waits for its name.
    #[must_use]
    pub fn waits(&self) -> bool {
        self.is_empty() && self.is_unpublished()
    }

    /// The backing has what was attached up to this version.
    pub(crate) fn flush(&mut self, range: ByteRange, upto: Version) {
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
    fn whole(&mut self) {
        let known = self.alone && !self.overrides;
        if known && self.header.home.as_ref().is_some_and(|h| !h.is_part()) {
            self.flushed = Extents::new();
        }
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

/// All that a cache holds and the backing does not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Image {
    /// The daemon that wrote last.
    pub life: Option<Life>,
    /// The lives of nodes that this cache answers for.
    pub lives: Lives,
    files: BTreeMap<Ino, Note>,
    /// Which files have a component of that name in their path.
    names: HashMap<Vec<u8>, BTreeSet<Ino>>,
    /// What is known of names that the backing lacks.
    pub book: Book,
    /// Changes of names that were asked for, and of which it is not known what came of them.
    pub asked: BTreeMap<u64, Subjects>,
}

impl Image {
    /// The files, by inode number.
    pub fn files(&self) -> impl Iterator<Item = (Ino, &Note)> {
        self.files.iter().map(|(i, n)| (*i, n))
    }

    /// One file.
    #[must_use]
    pub fn file(&self, ino: Ino) -> Option<&Note> {
        self.files.get(&ino)
    }

    /// Files of which a recovery without the service has something to say: also of bytes that are
    /// under their name already, so that others do not write older ones over them; and of what was cut.
    pub fn sayable(&self) -> impl Iterator<Item = (Ino, &Note)> {
        self.files().filter(|(_, n)| !n.nameless && (n.has_bytes() || n.overrides))
    }

    /// Files of which bytes are not under their name on the backing.
    pub fn unpublished(&self) -> impl Iterator<Item = (Ino, &Note)> {
        self.files().filter(|(_, n)| n.is_unpublished())
    }

    /// Files of which bytes are held that belong on the backing.
    pub fn unflushed(&self) -> impl Iterator<Item = (Ino, &Note)> {
        self.files().filter(|(_, n)| !n.is_empty() && !n.nameless)
    }

    /// Files that may be at, or below, a thing of this name.
    #[must_use]
    pub fn named(&self, name: &[u8]) -> Vec<Ino> {
        self.names.get(name).map(|s| s.iter().copied().collect()).unwrap_or_default()
    }

    /// Puts a whole file in.
    pub fn insert(&mut self, ino: Ino, note: Note) {
        self.remove(ino);
        for part in components(&note.header.path) {
            self.names.entry(part.to_vec()).or_default().insert(ino);
        }
        self.files.insert(ino, note);
    }

    /// Forgets a file.
    pub fn remove(&mut self, ino: Ino) -> Option<Note> {
        let note = self.files.remove(&ino)?;
        for part in components(&note.header.path) {
            if let Some(set) = self.names.get_mut(part) {
                set.remove(&ino);
                if set.is_empty() {
                    self.names.remove(part);
                }
            }
        }
        Some(note)
    }

    /// Makes a record true. One about a file that was not introduced is about nothing.
    pub fn apply(&mut self, record: &Record) {
        match record {
            Record::Life(life) => self.life = Some((**life).clone()),
            Record::File(ino, header) => {
                let mut note = self.remove(*ino).unwrap_or_else(|| Note::new((**header).clone()));
                note.header = (**header).clone();
                note.nameless &= note.header.path.is_empty();
                note.whole();
                self.insert(*ino, note);
            }
            Record::Gone(ino) => drop(self.remove(*ino)),
            Record::Synced(_) => {}
            Record::Names(facts) => self.book.hear(facts),
            Record::Lives(lives) => self.lives = lives.clone(),
            Record::Asked(number, about) => drop(self.asked.insert(*number, (**about).clone())),
            Record::Answered(number) => drop(self.asked.remove(number)),
            about => {
                let Some(ino) = about.ino() else { return };
                let Some(note) = self.files.get_mut(&ino) else { return };
                let less = apply_to(note, about);
                if less && note.is_of_no_use() {
                    self.remove(ino);
                }
            }
        }
    }

    /// The records of which a replay gives this image.
    #[must_use]
    pub fn snapshot(&self) -> Vec<Record> {
        /// Extents to a record: keeps records far below the limit of a body.
        const STEP: usize = 8192;
        let mut out: Vec<Record> =
            self.life.iter().map(|l| Record::Life(Box::new(l.clone()))).collect();
        out.extend((!self.lives.is_empty()).then(|| Record::Lives(self.lives.clone())));
        for (ino, note) in self.files() {
            out.push(Record::File(ino, Box::new(note.header.clone())));
            let held: Vec<(ByteRange, Held)> = note.held().collect();
            // One even when nothing is held: the version and the append count too.
            let chunks = held.chunks(STEP).map(<[_]>::to_vec);
            let chunks = chunks.chain(held.is_empty().then(Vec::new));
            out.extend(chunks.map(|c| Record::Extents(ino, c, note.known, note.appending)));
            out.extend(note.nameless.then_some(Record::Nameless(ino)));
            out.extend(note.window.map(|w| Record::Window(ino, w, note.known)));
            out.extend((note.seat != 0).then_some(Record::Seat(ino, note.seat, note.known)));
            out.extend(note.alone.then_some(Record::Alone(ino, true)));
            out.extend((!note.cuts.is_empty()).then(|| Record::Cuts(ino, note.cuts.clone())));
            out.extend(note.overrides.then_some(Record::Overrides(ino)));
            let flushed: Vec<_> = note.flushed().collect();
            out.extend(flushed.chunks(STEP).map(|c| Record::Home(ino, c.to_vec())));
        }
        out.extend(self.book.facts().into_iter().map(|facts| Record::Names(Box::new(facts))));
        let asked = self.asked.iter();
        out.extend(asked.map(|(number, about)| Record::Asked(*number, Box::new(about.clone()))));
        out
    }
}

/// Changes a file; true when the record takes bytes away.
fn apply_to(note: &mut Note, record: &Record) -> bool {
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
        Record::Alone(_, alone) => note.alone = *alone,
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

fn components(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    path.split(|b| *b == b'/').filter(|p| !p.is_empty())
}

#[cfg(test)]
#[path = "image_tests.rs"]
mod tests;
