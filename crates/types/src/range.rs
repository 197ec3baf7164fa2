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

/// Ranges in steps, in order, each of at most so many bytes (more than 0) and so many ranges.
#[must_use]
pub fn in_steps(ranges: &[ByteRange], bytes_max: u64, ranges_max: usize) -> Vec<Vec<ByteRange>> {
    let mut steps: Vec<Vec<ByteRange>> = Vec::new();
    let mut room = 0;
    for range in ranges {
        let mut at = range.start();
        while at < range.end() {
            if room == 0 || steps.last().is_none_or(|s| s.len() >= ranges_max) {
                steps.push(Vec::new());
                room = bytes_max;
            }
            let part = ByteRange::new(at, range.end().min(at.saturating_add(room)));
            room -= part.len();
            at = part.end();
            if let Some(step) = steps.last_mut() {
                step.push(part);
            }
        }
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_have_every_byte_once_in_order_and_keep_their_bounds() {
        let mut seed = 1u64;
        let mut dice = |below: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) % below
        };
        for _ in 0..500 {
            let mut at = 0;
            let mut ranges = Vec::new();
            for _ in 0..dice(20) {
                at += dice(5);
                ranges.push(ByteRange::at(at, dice(40)));
                at += 40;
            }
            let (bytes_max, ranges_max) = (1 + dice(30), 1 + dice(6) as usize);
            let steps = in_steps(&ranges, bytes_max, ranges_max);
            for step in &steps {
                assert!(!step.is_empty() && step.len() <= ranges_max);
                assert!(step.iter().all(|r| !r.is_empty()));
                assert!(step.iter().map(|r| r.len()).sum::<u64>() <= bytes_max);
            }
            let bytes = |ranges: &[ByteRange]| -> Vec<u64> {
                ranges.iter().flat_map(|r| r.to_std()).collect()
            };
            assert_eq!(bytes(&steps.concat()), bytes(&ranges));
        }
    }

    #[test]
    fn ranges_do_not_wrap() {
        assert_eq!(ByteRange::at(u64::MAX - 1, 10).len(), 1);
        assert!(ByteRange::new(5, 3).is_empty());
        assert_eq!(ByteRange::new(0, 10).intersect(ByteRange::new(8, 20)), ByteRange::new(8, 10));
        assert!(!ByteRange::new(0, 10).overlaps(ByteRange::new(10, 20)));
        assert!(ByteRange::new(0, 10).contains(ByteRange::new(10, 10)));
    }
}
