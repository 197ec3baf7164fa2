//! Answers.

use crate::bytes::{Reader, put_number};
use crate::{BUFFER_MAX, Malformed, OFFSET_MAX, Span, list};

/// Longest name of a model.
const NAME_MAX: usize = 32;

/// What is said of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stat {
    /// Its length as this node sees it.
    pub size: u64,
    /// The number of this node.
    pub node: u32,
    /// Bytes that were written here and not published.
    pub unattached: u64,
    /// Bytes that were written here and are not on the backing.
    pub unflushed: u64,
    /// Which model it is under.
    pub model: String,
}

impl Stat {
    /// As bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for n in [self.size, u64::from(self.node), self.unattached, self.unflushed] {
            bytes.extend_from_slice(&n.to_le_bytes());
        }
        let name = &self.model.as_bytes()[..self.model.len().min(NAME_MAX)];
        bytes.extend_from_slice(name);
        bytes
    }

    /// What the bytes say.
    ///
    /// # Errors
    /// When that is no such answer, as below.
    pub fn decode(bytes: &[u8]) -> Result<Stat, Malformed> {
        let mut from = Reader(bytes);
        let (size, node) = (from.u64()?, from.u64()?);
        let (unattached, unflushed) = (from.u64()?, from.u64()?);
        if from.0.len() > NAME_MAX || size > OFFSET_MAX {
            return Err(Malformed);
        }
        let node = node.try_into().map_err(|_| Malformed)?;
        let model = std::str::from_utf8(from.0).map_err(|_| Malformed)?.to_owned();
        Ok(Stat { size, node, unattached, unflushed, model })
    }
}

/// Bytes and who attached them last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owned {
    /// The bytes.
    pub span: Span,
    /// The node.
    pub owner: u32,
}

/// What a query found: owned bytes in order, up to where the answer goes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Owners {
    /// They.
    pub owned: Vec<Owned>,
    /// Where the next question goes on; `None`: that is all.
    pub next: Option<u64>,
}

impl Owners {
    /// As many of `owned`, which are in order and do not meet, as `room` bytes have room for; `next` is where
    /// to go on when these are all.
    #[must_use]
    pub fn encode(owned: &[Owned], next: Option<u64>, room: usize) -> Vec<u8> {
        let (mut body, mut end, mut count) = (Vec::new(), 0, 0);
        for o in owned {
            let before = body.len();
            put_number(&mut body, o.span.offset - end);
            put_number(&mut body, o.span.len);
            put_number(&mut body, u64::from(o.owner));
            if body.len() + 16 > room.min(BUFFER_MAX) {
                body.truncate(before);
                break;
            }
            end = o.span.end();
            count += 1;
        }
        let next = owned.get(count).map(|o| o.span.offset).or(next);
        let mut bytes = next.unwrap_or(u64::MAX).to_le_bytes().to_vec();
        put_number(&mut bytes, count as u64);
        bytes.extend_from_slice(&body);
        bytes
    }

    /// What the bytes say: in order, disjoint, each with an owner.
    ///
    /// # Errors
    /// As above.
    pub fn decode(bytes: &[u8]) -> Result<Owners, Malformed> {
        let mut from = Reader(bytes);
        let next = Some(from.u64()?).filter(|next| *next != u64::MAX);
        let count = from.number()?;
        if count > (from.0.len() / 3) as u64 {
            return Err(Malformed);
        }
        let (mut owned, mut end) = (Vec::with_capacity(count as usize), 0_u64);
        for _ in 0..count {
            let offset = end.checked_add(from.number()?).ok_or(Malformed)?;
            let span = Span::new(offset, from.number()?)?;
            let owner = u32::try_from(from.number()?).map_err(|_| Malformed)?;
            if span.len == 0 || owner == 0 {
                return Err(Malformed);
            }
            end = span.end();
            owned.push(Owned { span, owner });
        }
        from.end()?;
        // Else whoever goes on there would ask for ever.
        if next.is_some_and(|next| next < end || next > OFFSET_MAX) {
            return Err(Malformed);
        }
        Ok(Owners { owned, next })
    }
}

/// What became of pieces to be stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stored {
    /// How many of their bytes are stored, from the first piece on.
    pub bytes: u32,
    /// Why not all; 0: all are.
    pub errno: u32,
    /// They must be published before the call ends: another request has to ask for it.
    pub publish: bool,
}

impl Stored {
    /// As bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = self.bytes.to_le_bytes().to_vec();
        bytes.extend_from_slice(&self.errno.to_le_bytes());
        bytes.push(self.publish.into());
        bytes
    }

    /// What the bytes say about a request with so many bytes.
    ///
    /// # Errors
    /// As above.
    pub fn decode(bytes: &[u8], asked: usize) -> Result<Stored, Malformed> {
        let mut from = Reader(bytes);
        let (bytes, errno, publish) = (from.u32()?, from.u32()?, from.byte()?);
        from.end()?;
        let all = bytes as usize == asked;
        if bytes as usize > asked || (errno == 0) != all || errno > 4095 || publish > 1 {
            return Err(Malformed);
        }
        Ok(Stored { bytes, errno, publish: publish == 1 })
    }
}

/// Bytes of an answer to a read besides the data, of so many pieces.
#[must_use]
pub const fn read_overhead(pieces: usize) -> usize {
    // No piece is longer than an answer, so its length has three bytes at most.
    3 * pieces
}

/// An answer to a read: how much of each piece there is, then all of that.
#[derive(Clone, Debug, Default)]
pub struct PiecesRead {
    lengths: Vec<u8>,
    data: Vec<u8>,
}

impl PiecesRead {
    /// What there is of the next piece: all, or less when the file ends there.
    pub fn push(&mut self, bytes: &[u8]) {
        put_number(&mut self.lengths, bytes.len() as u64);
        self.data.extend_from_slice(bytes);
    }

    /// As bytes.
    #[must_use]
    pub fn encode(mut self) -> Vec<u8> {
        self.lengths.append(&mut self.data);
        self.lengths
    }

    /// The parts of an answer that belong to these pieces.
    ///
    /// # Errors
    /// As above.
    pub fn decode<'a>(bytes: &'a [u8], pieces: &[Span]) -> Result<Vec<&'a [u8]>, Malformed> {
        let mut from = Reader(bytes);
        let mut lengths = Vec::with_capacity(pieces.len());
        for piece in pieces {
            let len = from.number()?;
            if len > piece.len {
                return Err(Malformed);
            }
            lengths.push(len as usize);
        }
        let parts = lengths.into_iter().map(|len| from.take(len)).collect::<Result<_, _>>()?;
        from.end()?;
        Ok(parts)
    }
}

/// True when an answer to a read of these pieces fits into so many bytes.
#[must_use]
pub fn fits(pieces: &[Span], room: usize) -> bool {
    list::total(pieces).is_ok_and(|t| t + read_overhead(pieces.len()) as u64 <= room as u64)
}
