//! The records of a node's journal: what happened to the files of its cache, and how bytes are held. What
//! they add up to is in [`super::image`].

use ebb_types::{ByteRange, Facts, Ino, Lives, Subjects, Time, Version};
use serde::{Deserialize, Serialize};

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
        self.last().starts_with(ebb_types::name::PART_PREFIX)
    }

    /// The last name of its path.
    #[must_use]
    pub fn last(&self) -> &[u8] {
        self.path.rsplit(|b| *b == b'/').next().unwrap_or_default()
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

    pub(crate) fn is_published(&self) -> bool {
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
