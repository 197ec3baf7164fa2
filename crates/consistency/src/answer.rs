//! What the service tells of the map of a file: all of it where that is little, and otherwise a part that says
//! which one it is. Part of [`FileState`].

use super::{FileState, Owned};
use ebb_types::{ByteRange, Version};

/// Up to so many entries, an answer speaks of the whole file, whatever was asked.
pub const WHOLE_ANSWER_ENTRIES: usize = 64;

/// Entries of one answer: of what has more, it speaks of the beginning only, and the rest must be asked
/// for. Some MiB as a message.
pub const ANSWER_ENTRIES_MAX: usize = 1 << 18;

/// Entries of the answer to an open: what a small file has, or a reader of the beginning of a large one needs
/// at first. Some KiB as a message.
pub const OPEN_ENTRIES: usize = 256;

/// Up to so many entries it is worth trying whether they merge to few enough.
const TRY_MERGING_ENTRIES: usize = 256;

/// What the service answers to a query.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MapAnswer {
    /// The file's newest version.
    pub version: Version,
    /// Published size.
    pub size: u64,
    /// When the unowned bytes last changed.
    pub base_version: Version,
    /// Unowned bytes below it are the backing's, those from it to the size are zeros.
    pub base_len: u64,
    /// The asker's known version is the newest: `ranges` is left out.
    pub unchanged: bool,
    /// The part of the file that `ranges` speaks of.
    pub covers: ByteRange,
    /// Owned bytes, sorted and disjoint, merged for readers.
    pub ranges: Vec<Owned>,
}

impl MapAnswer {
    /// What is left of `asked`: an answer about very many ranges ends before that.
    #[must_use]
    pub fn rest_of(&self, asked: ByteRange) -> Option<ByteRange> {
        let end = self.covers.end();
        (!self.unchanged && end < asked.end()).then(|| ByteRange::new(end, asked.end()))
    }
}

impl FileState {
    /// Who owns `range`. A file with few entries is answered whole, whatever was asked; of one with
    /// very many ([`ANSWER_ENTRIES_MAX`]) the beginning of the range; one whose version the asker
    /// knows is answered `unchanged`.
    #[must_use]
    pub fn query(&self, range: ByteRange, known: Version) -> MapAnswer {
        self.query_first(range, known, ANSWER_ENTRIES_MAX)
    }

    /// The answer to an open: the same of the beginning of the file, as far as [`OPEN_ENTRIES`] reach.
    #[must_use]
    pub fn query_at_open(&self, known: Version) -> MapAnswer {
        self.query_first(ByteRange::ALL, known, OPEN_ENTRIES)
    }

    fn query_first(&self, range: ByteRange, known: Version, most: usize) -> MapAnswer {
        let unchanged = known == self.version && known != Version::ZERO;
        let (covers, ranges) = match unchanged {
            true => (ByteRange::ALL, Vec::new()),
            false => self.answer(range, most),
        };
        MapAnswer {
            version: self.version,
            size: self.size,
            base_version: self.base_version,
            base_len: self.base_len,
            unchanged,
            covers,
            ranges,
        }
    }

    fn answer(&self, range: ByteRange, most: usize) -> (ByteRange, Vec<Owned>) {
        if range != ByteRange::ALL && self.tree.len() <= TRY_MERGING_ENTRIES {
            let whole = self.tree.answer(ByteRange::ALL);
            if whole.len() <= WHOLE_ANSWER_ENTRIES {
                return (ByteRange::ALL, whole);
            }
        }
        let (ranges, covers) = self.tree.first_of_answer(range, most);
        (covers, ranges)
    }
}
