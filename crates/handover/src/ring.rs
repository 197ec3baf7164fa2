//! Records of the node journal between the moment they are pushed and the moment the journal file
//! has them, where a daemon that is killed does not lose them: whatever an application was told
//! is known to the next daemon. A record that cannot be put here is written to the file at once.
//!
//! Replaying records that the file has as well changes nothing (`image_tests.rs` shows it).

use super::area::{Area, RING_AT, RING_HEAD, RING_TAIL, RING_WORDS, word};
use ebb_locks::Mutex;
use std::sync::Arc;

/// The ring of a running daemon.
pub struct Ring {
    area: Arc<Area>,
    missed: Mutex<Missed>,
}

/// Records that are not in the ring.
#[derive(Default)]
struct Missed {
    count: u64,
    /// Those behind would be out of order.
    shut: bool,
}

/// How far the ring was filled when records were taken to be written.
#[derive(Clone, Copy, Debug)]
pub struct Mark {
    tail: u64,
    missed: u64,
}

impl Ring {
    /// The ring of a journal that has everything.
    #[must_use]
    pub fn new(area: Arc<Area>) -> Ring {
        area.set(RING_HEAD, area.get(RING_TAIL));
        Ring { area, missed: Mutex::default() }
    }

    /// Puts framed records in; false when they must be written now. The caller has a lock that
    /// keeps the order.
    #[must_use]
    pub fn push(&self, bytes: &[u8]) -> bool {
        let mut missed = self.missed.lock();
        let (head, tail) = (self.area.get(RING_HEAD), self.area.get(RING_TAIL));
        let words = 1 + bytes.len().div_ceil(8) as u64;
        if missed.shut || tail - head + words > RING_WORDS as u64 {
            missed.count += 1;
            missed.shut = true;
            return false;
        }
        self.area.set(at(tail), bytes.len() as u64);
        for (i, chunk) in bytes.chunks(8).enumerate() {
            self.area.set(at(tail + 1 + i as u64), word(chunk));
        }
        self.area.set(RING_TAIL, tail + words);
        true
    }

    /// Everything pushed so far is about to be written.
    #[must_use]
    pub fn mark(&self) -> Mark {
        Mark { tail: self.area.get(RING_TAIL), missed: self.missed.lock().count }
    }

    /// It was.
    pub fn written(&self, mark: Mark) {
        let mut missed = self.missed.lock();
        if mark.tail > self.area.get(RING_HEAD) {
            self.area.set(RING_HEAD, mark.tail);
        }
        if missed.count == mark.missed {
            missed.shut = false;
        }
    }
}

fn at(position: u64) -> usize {
    RING_AT + (position % RING_WORDS as u64) as usize
}

/// The bytes that a dead daemon had pushed and perhaps not written; none when the memory makes no
/// sense.
pub(crate) fn left(area: &Area) -> Option<Vec<u8>> {
    let (mut head, tail) = (area.get(RING_HEAD), area.get(RING_TAIL));
    let mut out = Vec::new();
    while head != tail {
        let filled = tail.checked_sub(head).filter(|n| *n <= RING_WORDS as u64)?;
        let len = area.get(at(head)) as usize;
        let words = 1 + len.div_ceil(8) as u64;
        if len > RING_WORDS * 8 || words > filled {
            return None;
        }
        let end = out.len() + len;
        out.extend((1..words).flat_map(|i| area.get(at(head + i)).to_le_bytes()));
        out.truncate(end);
        head += words;
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn area() -> Arc<Area> {
        Arc::new(Area::open(&Area::create().unwrap()).unwrap())
    }

    #[test]
    fn the_ring_holds_what_is_not_written_in_order() {
        let area = area();
        let ring = Ring::new(Arc::clone(&area));
        let mut waiting: std::collections::VecDeque<Vec<u8>> = Default::default();
        let mut seed = 1_u64;
        for round in 0..200_000_u64 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let bytes: Vec<u8> = (0..seed >> 59).map(|i| (round + i) as u8).collect();
            assert!(ring.push(&bytes));
            waiting.push_back(bytes);
            if round % 30_000 == 29_999 {
                assert_eq!(
                    left(&area).unwrap(),
                    waiting.iter().flatten().copied().collect::<Vec<_>>()
                );
                let mark = ring.mark();
                assert!(ring.push(b"after the mark"));
                ring.written(mark);
                waiting = [b"after the mark".to_vec()].into();
            }
        }
        assert!(area.get(RING_TAIL) > RING_WORDS as u64, "it went round");
    }

    #[test]
    fn a_full_ring_refuses_until_all_is_written() {
        let area = area();
        let ring = Ring::new(Arc::clone(&area));
        let big = vec![7; RING_WORDS * 4];
        assert!(ring.push(&big));
        assert!(!ring.push(&big));
        assert!(!ring.push(b"small"), "it would be out of order");
        let early = ring.mark();
        assert!(!ring.push(b"missed since"));
        ring.written(early);
        assert!(!ring.push(b"still"));
        ring.written(ring.mark());
        assert!(ring.push(b"small"));
        assert_eq!(left(&area).unwrap(), b"small");
    }

    #[test]
    fn nonsense_is_not_believed() {
        let area = area();
        area.set(RING_TAIL, 10);
        area.set(RING_AT, 5000);
        assert_eq!(left(&area), None);
        area.set(RING_HEAD, 11);
        assert_eq!(left(&area), None);
    }
}
