//! A half-open range of bytes of one file.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Bytes `start..end` of a file. May be empty; never inverted.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ByteRange {
    start: u64,
    end: u64,
}

impl ByteRange {
    /// Every byte a file can have.
    pub const ALL: ByteRange = ByteRange { start: 0, end: u64::MAX };

    /// The range `start..end`; an inverted pair becomes empty at `start`.
    #[must_use]
    pub fn new(start: u64, end: u64) -> ByteRange {
        ByteRange { start, end: end.max(start) }
    }

    /// `len` bytes from `start`; stops at the largest offset instead of wrapping.
    #[must_use]
    pub fn at(start: u64, len: u64) -> ByteRange {
        ByteRange { start, end: start.saturating_add(len) }
    }

    /// Everything from `start` on.
    #[must_use]
    pub fn from(start: u64) -> ByteRange {
        ByteRange { start, end: u64::MAX }
    }

    /// First byte.
    #[must_use]
    pub fn start(self) -> u64 {
        self.start
    }

    /// One past the last byte.
    #[must_use]
    pub fn end(self) -> u64 {
        self.end
    }

    /// Number of bytes.
    #[must_use]
    pub fn len(self) -> u64 {
        self.end - self.start
    }

    /// True when there is no byte in it.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.start == self.end
    }

    /// The bytes in both; empty when they do not meet.
    #[must_use]
    pub fn intersect(self, other: ByteRange) -> ByteRange {
        ByteRange::new(self.start.max(other.start), self.end.min(other.end))
    }

    /// True when some byte is in both.
    #[must_use]
    pub fn overlaps(self, other: ByteRange) -> bool {
        !self.intersect(other).is_empty()
    }

    /// True when every byte of `other` is in this one.
    #[must_use]
    pub fn contains(self, other: ByteRange) -> bool {
        other.is_empty() || (self.start <= other.start && other.end <= self.end)
    }

    /// True when `offset` is in it.
    #[must_use]
    pub fn contains_offset(self, offset: u64) -> bool {
        self.start <= offset && offset < self.end
    }

    /// The same bytes as a std range.
    #[must_use]
    pub fn to_std(self) -> std::ops::Range<u64> {
        self.start..self.end
    }
}

impl From<std::ops::Range<u64>> for ByteRange {
    fn from(r: std::ops::Range<u64>) -> ByteRange {
        ByteRange::new(r.start, r.end)
    }
}

impl fmt::Debug for ByteRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}..{})", self.start, self.end)
    }
}

impl fmt::Display for ByteRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.start, self.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_do_not_wrap() {
        assert_eq!(ByteRange::at(u64::MAX - 1, 10).len(), 1);
        assert!(ByteRange::new(5, 3).is_empty());
        assert_eq!(ByteRange::new(0, 10).intersect(ByteRange::new(8, 20)), ByteRange::new(8, 10));
        assert!(!ByteRange::new(0, 10).overlaps(ByteRange::new(10, 20)));
        assert!(ByteRange::new(0, 10).contains(ByteRange::new(10, 10)));
    }
}
