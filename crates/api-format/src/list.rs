//! Lists of pieces. A list of any length is cut into requests, each of which stands for itself:
//!
//! | call | requests |
//! |---|---|
//! | write | as many as the pieces and their bytes need; the last one asks that what was written is published as the model says |
//! | read | one that asks what the model says and fetches what is elsewhere (one message to each owner), then as many as the answers need |
//!
//! In a request a piece is how far it begins behind the end of the one before (signed) and how long it
//! is, so that regular patterns take three or four bytes a piece.

use crate::bytes::{Reader, put_number, put_signed};
use crate::{Malformed, OFFSET_MAX, Span};

/// Most pieces of one request: each has two bytes at least.
pub const PIECES_MAX: usize = crate::BODY_MAX / 2;

/// How many bytes the number of pieces takes at most.
const COUNT_BYTES: usize = 3;

/// A list that is being put together for one request.
#[derive(Clone, Debug, Default)]
pub struct Builder {
    count: u64,
    end: u64,
    bytes: Vec<u8>,
}

impl Builder {
    /// One more piece.
    pub fn push(&mut self, span: Span) {
        put_signed(&mut self.bytes, span.offset as i64 - self.end as i64);
        put_number(&mut self.bytes, span.len);
        self.end = span.end();
        self.count += 1;
    }

    /// No more bytes than the encoded list has.
    #[must_use]
    pub fn len(&self) -> usize {
        COUNT_BYTES + self.bytes.len()
    }

    /// True when there is nothing in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Most bytes that one more piece takes.
    pub const PIECE_BYTES: usize = 20;

    pub(crate) fn put(&self, into: &mut Vec<u8>) {
        put_number(into, self.count);
        into.extend_from_slice(&self.bytes);
    }
}

/// The list of these pieces.
#[must_use]
pub fn of(pieces: &[Span]) -> Builder {
    let mut list = Builder::default();
    pieces.iter().for_each(|piece| list.push(*piece));
    list
}

pub(crate) fn take(from: &mut Reader<'_>) -> Result<Vec<Span>, Malformed> {
    let count = from.number()?;
    // Before any memory is taken for them.
    if count > (from.0.len() / 2) as u64 {
        return Err(Malformed);
    }
    let mut pieces = Vec::with_capacity(count as usize);
    let mut end = 0_u64;
    for _ in 0..count {
        let offset = end.checked_add_signed(from.signed()?).ok_or(Malformed)?;
        let piece = Span::new(offset, from.number()?)?;
        end = piece.end();
        pieces.push(piece);
    }
    Ok(pieces)
}

/// The bytes of all pieces together.
pub(crate) fn total(pieces: &[Span]) -> Result<u64, Malformed> {
    let sum = pieces.iter().try_fold(0_u64, |sum, p| sum.checked_add(p.len));
    sum.filter(|sum| *sum <= OFFSET_MAX).ok_or(Malformed)
}
