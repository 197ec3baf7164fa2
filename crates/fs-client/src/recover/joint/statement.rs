//! What the recovery of one node says about one file: which bytes its cache has, of which version
//! each of them is, and what became of them so far. Bytes on the backing, so hostile until checked.

use ebb_node_journal::{Home, Note};
use ebb_types::{ByteRange, Extents, Time, Version};
use serde::{Deserialize, Serialize};

const MAGIC: &[u8; 8] = b"EBBRCVR1";
/// Largest statement that is read.
pub(super) const BYTES_MAX: u64 = 1 << 30;
/// Largest offset of a file.
const OFFSET_MAX: u64 = i64::MAX as u64;

/// Where bytes come from, weakest first among those of one version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Kind {
    /// Zeros in a block that was written past the daemon: perhaps nobody wrote them.
    Zeros,
    /// Published at this version.
    Published,
    /// Written by somebody who had heard of this version, and never published.
    Written,
}

/// How new bytes are. Of two claims of the same byte the greater key counts, and the greater name
/// of the node where these are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Key {
    /// The service gives each change of a file another one.
    pub version: Version,
    /// What that version says.
    pub kind: Kind,
}

/// What became of claimed bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Fate {
    /// They may be written to the shared file at any time.
    Pending,
    /// They are in the shared file, on stable storage.
    Written,
    /// Another node has newer ones; they are not written any more.
    Overtaken,
    /// They were lost with the power of the node, or flushed to a file that is gone.
    Lost,
}

/// Bytes that a node has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Claim {
    /// How new they are.
    pub key: Key,
    /// What became of them.
    pub fate: Fate,
}

/// Attributes that the file gets with its name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Shape {
    pub path: Vec<u8>,
    pub perm: u32,
    pub uid: u32,
    pub gid: u32,
    pub atime: Time,
    pub mtime: Time,
}

/// All that one node says of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Statement {
    /// Who says it.
    pub node: String,
    /// Name and attributes, as this node last heard of them.
    pub shape: Shape,
    /// The size, as this node last heard of it.
    pub size: u64,
    /// As of which version.
    pub known: Version,
    /// Lengths to which this node cut the file, and at which versions: older bytes behind are void.
    pub cuts: Vec<(u64, Version)>,
    /// The service said that nobody else had the file: what is not claimed was never written.
    pub alone: bool,
    /// The file that its name means on the backing until it is published.
    pub under: Option<Home>,
    /// The bytes.
    pub claims: Extents<Claim>,
}

/// The form on disk.
#[derive(Serialize, Deserialize)]
struct Stored {
    node: String,
    shape: Shape,
    size: u64,
    known: Version,
    cuts: Vec<(u64, Version)>,
    alone: bool,
    under: Option<Home>,
    claims: Vec<(ByteRange, Claim)>,
}

impl Statement {
    /// What a node knows of a file besides its bytes.
    #[must_use]
    pub fn of(node: &str, note: &Note) -> Statement {
        let header = &note.header;
        Statement {
            node: node.to_owned(),
            shape: Shape {
                path: header.path.clone(),
                perm: header.perm,
                uid: header.uid,
                gid: header.gid,
                atime: header.atime,
                mtime: header.mtime,
            },
            size: header.size,
            known: note.known,
            cuts: note.cuts.clone(),
            alone: note.alone,
            under: header.under.clone(),
            claims: Extents::new(),
        }
    }

    /// Its bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        encode(&Stored {
            node: self.node.clone(),
            shape: self.shape.clone(),
            size: self.size,
            known: self.known,
            cuts: self.cuts.clone(),
            alone: self.alone,
            under: self.under.clone(),
            claims: self.claims.iter().collect(),
        })
    }

    /// What these bytes say; `None` when they are no statement.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Statement> {
        let stored: Stored = decode(bytes)?;
        let sound = |r: &ByteRange| r.start() <= r.end() && r.end() <= OFFSET_MAX;
        let sized = stored.size <= OFFSET_MAX && stored.cuts.iter().all(|c| c.0 <= OFFSET_MAX);
        if !sized || !stored.claims.iter().all(|(r, _)| sound(r)) {
            return None;
        }
        Some(Statement {
            node: stored.node,
            shape: stored.shape,
            size: stored.size,
            known: stored.known,
            cuts: stored.cuts,
            alone: stored.alone,
            under: stored.under,
            claims: stored.claims.into_iter().collect(),
        })
    }

    /// What an earlier run of the same node wrote of the same bytes is written, also when they are nowhere
    /// else any more. What it gave up is to be judged anew, and bytes that were never published may be others
    /// by now.
    pub fn go_on_from(&mut self, before: &Statement) {
        let mut done = Vec::new();
        let written = |c: &Claim| c.fate == Fate::Written && c.key.kind != Kind::Written;
        for (range, old) in before.claims.iter().filter(|(_, c)| written(c)) {
            let same = self.claims.overlapping(range).filter(|(_, c)| c.key == old.key);
            done.extend(same.map(|(r, _)| (r, Some(old))));
        }
        self.claims.assign(&done);
    }

    /// Another fate for some claimed bytes.
    pub fn set(&mut self, ranges: &[ByteRange], fate: Fate) {
        let found = self.claims.within(ranges);
        let new: Vec<_> = found.iter().map(|(r, c)| (*r, Some(Claim { fate, ..*c }))).collect();
        self.claims.assign(&new);
    }

    /// Bytes with this fate.
    #[must_use]
    pub fn with(&self, fate: Fate) -> u64 {
        self.claims.iter().filter(|(_, c)| c.fate == fate).map(|(r, _)| r.len()).sum()
    }
}

/// Something small on the backing: magic, sum, content.
pub(super) fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    let body = postcard::to_stdvec(value).expect("no types that postcard refuses");
    let mut out = MAGIC.to_vec();
    out.extend_from_slice(&crc32c::crc32c(&body).to_le_bytes());
    out.extend_from_slice(&body);
    out
}

pub(super) fn decode<T: for<'a> Deserialize<'a>>(bytes: &[u8]) -> Option<T> {
    let (magic, rest) = bytes.split_at_checked(MAGIC.len())?;
    let (sum, body) = rest.split_at_checked(4)?;
    let good = magic == MAGIC && sum == crc32c::crc32c(body).to_le_bytes();
    if good { postcard::from_bytes(body).ok() } else { None }
}
