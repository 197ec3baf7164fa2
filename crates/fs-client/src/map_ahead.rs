//! How much of a file's map a read asks for: of a large file an open hears of the beginning only. More than what
//! is read, so that a reader who goes on need not ask for each call; and the more, the further it goes on.

use ebb_types::ByteRange;

/// What a first question speaks of, and the most that one does.
const FIRST_BYTES: u64 = 16 << 20;
const MOST_BYTES: u64 = 1 << 30;

/// The questions about one file so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MapAhead {
    /// The last one spoke of what lies before this,
    end: u64,
    /// and of so many bytes.
    bytes: u64,
}

impl MapAhead {
    /// What to ask about where `wanted` is not known. Readers that go forward, in steps or not, ask for twice
    /// as much each time.
    pub fn next(&mut self, wanted: ByteRange) -> ByteRange {
        let goes_on = self.bytes > 0 && wanted.start() >= self.end;
        self.bytes = if goes_on { (self.bytes * 2).min(MOST_BYTES) } else { FIRST_BYTES };
        self.end = wanted.end().max(wanted.start().saturating_add(self.bytes));
        ByteRange::new(wanted.start(), self.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn who_reads_a_file_from_its_beginning_asks_a_few_times() {
        let (mut ahead, mut at, mut asked) = (MapAhead::default(), 0, 0);
        while at < 1 << 40 {
            let window = ahead.next(ByteRange::at(at, 4096));
            assert_eq!(window.start(), at);
            (at, asked) = (window.end(), asked + 1);
        }
        assert!(asked < 7 + (1 << 40) / MOST_BYTES, "{asked}");
    }

    #[test]
    fn who_jumps_back_asks_for_little() {
        let mut ahead = MapAhead::default();
        let first = ahead.next(ByteRange::at(1 << 30, 100));
        assert_eq!(first, ByteRange::at(1 << 30, FIRST_BYTES));
        assert_eq!(ahead.next(ByteRange::at(0, 100)), ByteRange::at(0, FIRST_BYTES));
        assert_eq!(ahead.next(ByteRange::at(1 << 35, 100)).len(), 2 * FIRST_BYTES);
    }

    proptest! {
        #[test]
        fn what_is_wanted_is_asked_for(reads in prop::collection::vec((any::<u64>(), 1..1u64 << 40), 1..20)) {
            let mut ahead = MapAhead::default();
            for (at, len) in reads {
                let wanted = ByteRange::new(at, at.saturating_add(len));
                let window = ahead.next(wanted);
                prop_assert!(window.contains(wanted) && window.start() == wanted.start());
                prop_assert!(window.len() <= wanted.len().max(MOST_BYTES));
            }
        }
    }
}
