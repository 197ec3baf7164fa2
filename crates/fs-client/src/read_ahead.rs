//! Guesses what a reader will want next: those that read in order get ever more ahead of them, as
//! from a disk; random readers do not pay for it.

use ebb_types::ByteRange;

/// Reads in a row before a reader counts as sequential; and the size of a first read at the start of
/// a file that no header has.
const SEQUENTIAL_RUN: u32 = 2;
const SEQUENTIAL_BYTES: u64 = 128 << 10;

/// How far ahead of a sequential reader to fetch at most.
const WINDOW_MAX: u64 = 8 << 20;
/// In which pieces: whoever needs a byte waits for its piece.
pub const PIECE_BYTES: u64 = 1 << 20;

/// What is known of a handle's reading.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReadAhead {
    /// One past the last byte read.
    next: u64,
    /// Reads in a row that began where the one before ended.
    run: u32,
    /// How far has been asked for.
    asked: u64,
    /// How far ahead to ask: more each time.
    window: u64,
}

impl ReadAhead {
    /// Something was not here when it was read.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        self.asked > 0
    }

    /// What to fetch now that `range` is read.
    pub fn after(&mut self, range: ByteRange) -> Option<ByteRange> {
        self.run = if self.next == range.start() { self.run.saturating_add(1) } else { 0 };
        self.next = range.end();
        let streams =
            self.run >= SEQUENTIAL_RUN || (self.run > 0 && range.len() >= SEQUENTIAL_BYTES);
        if !streams || range.is_empty() {
            (self.asked, self.window) = (range.end(), 0);
            return None;
        }
        // Ask again only when half of what was asked for is used up.
        if self.asked.saturating_sub(range.end()) > self.window / 2 {
            return None;
        }
        let least = PIECE_BYTES.max(range.len().saturating_mul(4));
        self.window = self.window.saturating_mul(2).max(least).min(WINDOW_MAX);
        let from = self.asked.max(range.end());
        self.asked = range.end().saturating_add(self.window);
        (from < self.asked).then(|| ByteRange::new(from, self.asked))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// What is asked for by reads of `len` bytes at `offsets`.
    fn asked(len: u64, offsets: impl IntoIterator<Item = u64>) -> Vec<ByteRange> {
        let mut ahead = ReadAhead::default();
        offsets.into_iter().filter_map(|at| ahead.after(ByteRange::at(at, len))).collect()
    }

    #[test]
    fn a_stream_is_fetched_once_and_always_ahead() {
        for len in [1000, 8192, 128 << 10, MIB, 3 * MIB, 20 * MIB] {
            let mut ahead = ReadAhead::default();
            let mut to = 0;
            for n in 0..200 {
                let read = ByteRange::at(n * len, len);
                if let Some(next) = ahead.after(read) {
                    assert!(
                        next.start() == to.max(read.end()),
                        "{read} asks for {next} after {to}"
                    );
                    assert!(next.end() <= read.end() + WINDOW_MAX);
                    to = next.end();
                }
                assert!(n < u64::from(SEQUENTIAL_RUN) || to >= read.end() + PIECE_BYTES / 2);
            }
        }
    }

    #[test]
    fn who_reads_on_gets_more() {
        let asked = asked(8192, (0..MIB).step_by(8192));
        assert_eq!(asked[0].len(), PIECE_BYTES);
        assert!(asked.last().is_some_and(|last| last.end() >= 2 * MIB));
        let first = ByteRange::new(MIB, 5 * MIB);
        assert_eq!(self::asked(MIB, [0]), [first]);
    }

    #[test]
    fn headers_and_random_readers_cost_nothing() {
        assert!(asked(8, [0]).is_empty());
        assert!(asked(4096, [0, 1 << 20, 4096, 1 << 30, 8192]).is_empty());
        assert!(asked(MIB, [3 * MIB, MIB, 9 * MIB]).is_empty());
    }

    #[test]
    fn a_stream_that_jumps_begins_anew() {
        let mut ahead = ReadAhead::default();
        assert!(ahead.after(ByteRange::at(0, MIB)).is_some());
        assert!(ahead.after(ByteRange::at(64 * MIB, MIB)).is_none());
        let next = ahead.after(ByteRange::at(65 * MIB, MIB));
        assert_eq!(next, Some(ByteRange::new(66 * MIB, 70 * MIB)));
        assert_eq!(ahead.after(ByteRange::at(66 * MIB, 0)), None);
    }
}
