//! What a disk has and what it may still lose: pure, without devices.
//!
//! A sector that was written since the last flush may have, after a power cut, what it had at that
//! flush or any later content, independently of all others: more than most disks do, and no less.

use rand::Rng;
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;

/// What a disk writes as a whole or not at all.
pub const SECTOR_BYTES: usize = 512;

type Sector = [u8; SECTOR_BYTES];

/// Contents of one sector since the last flush, each with the number of its write; the first is
/// what the flush left.
type Versions = Vec<(u64, Sector)>;

/// The content of a disk, as long as it has power.
#[derive(Debug)]
pub struct Medium {
    content: Vec<u8>,
    /// Sectors that are not as at the last flush.
    unsynced: BTreeMap<usize, Versions>,
    writes: u64,
    /// Where [`Medium::reset`] goes back to: everything that is not zero.
    saved: BTreeMap<usize, Sector>,
}

/// How unsynced sectors fare in a power cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// All are lost.
    Nothing,
    /// All are kept.
    Everything,
    /// Each is as some write left it.
    Any,
    /// All writes up to one are kept, and none after it.
    Prefix,
}

/// What a power cut did, in sectors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Loss {
    /// They were written since the last flush.
    pub at_stake: usize,
    /// And some of that is lost.
    pub lost: usize,
}

impl Cut {
    /// One of them.
    pub fn random(dice: &mut ChaCha8Rng) -> Cut {
        match dice.random_range(0..8) {
            0 => Cut::Nothing,
            1 => Cut::Everything,
            2..6 => Cut::Any,
            _ => Cut::Prefix,
        }
    }
}

impl Medium {
    /// A disk full of zeros; whole sectors.
    #[must_use]
    pub fn new(bytes: usize) -> Medium {
        let bytes = bytes.next_multiple_of(SECTOR_BYTES);
        let (unsynced, saved) = (BTreeMap::new(), BTreeMap::new());
        Medium { content: vec![0; bytes], unsynced, writes: 0, saved }
    }

    /// Its size.
    #[must_use]
    pub fn len(&self) -> usize {
        self.content.len()
    }

    /// True for a disk without a sector.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.content.is_empty()
    }

    fn sector(&self, number: usize) -> Sector {
        let at = number * SECTOR_BYTES;
        self.content[at..at + SECTOR_BYTES].try_into().expect("a whole sector")
    }

    fn put(&mut self, number: usize, sector: &Sector) {
        let at = number * SECTOR_BYTES;
        self.content[at..at + SECTOR_BYTES].copy_from_slice(sector);
    }

    /// As far as the disk goes.
    #[must_use]
    pub fn read(&self, offset: usize, len: usize) -> &[u8] {
        let start = offset.min(self.len());
        &self.content[start..(start + len).min(self.len())]
    }

    /// False beyond its end: nothing is written then.
    pub fn write(&mut self, offset: usize, data: &[u8]) -> bool {
        let Some(end) = offset.checked_add(data.len()).filter(|end| *end <= self.len()) else {
            return false;
        };
        self.writes += 1;
        let sectors = offset / SECTOR_BYTES..end.div_ceil(SECTOR_BYTES);
        for number in sectors.clone() {
            let before = self.sector(number);
            self.unsynced.entry(number).or_insert_with(|| vec![(0, before)]);
        }
        self.content[offset..end].copy_from_slice(data);
        for number in sectors {
            let now = (self.writes, self.sector(number));
            self.unsynced.get_mut(&number).expect("it was just made").push(now);
        }
        true
    }

    /// Everything that was written is safe from now on.
    pub fn flush(&mut self) {
        self.unsynced.clear();
    }

    /// The power goes and comes back.
    pub fn cut(&mut self, cut: Cut, dice: &mut ChaCha8Rng) -> Loss {
        let unsynced = std::mem::take(&mut self.unsynced);
        let at_stake = unsynced.len();
        let first = unsynced.values().filter_map(|v| v.get(1)).map(|v| v.0).min().unwrap_or(0);
        let last = dice.random_range(first.saturating_sub(1)..=self.writes);
        let mut lost = 0;
        for (number, versions) in unsynced {
            let newest = versions.len() - 1;
            let kept = match cut {
                Cut::Nothing => 0,
                Cut::Everything => newest,
                Cut::Any => dice.random_range(0..versions.len()),
                Cut::Prefix => versions.partition_point(|(write, _)| *write <= last) - 1,
            };
            lost += usize::from(kept < newest);
            self.put(number, &versions[kept].1);
        }
        Loss { at_stake, lost }
    }

    /// [`Medium::reset`] comes back to this.
    pub fn save(&mut self) {
        let used = (0..self.len() / SECTOR_BYTES).map(|n| (n, self.sector(n)));
        self.saved = used.filter(|(_, sector)| sector.iter().any(|b| *b != 0)).collect();
    }

    /// As it was saved, and safe.
    pub fn reset(&mut self) {
        self.content = vec![0; self.len()];
        for (number, sector) in std::mem::take(&mut self.saved) {
            self.put(number, &sector);
            self.saved.insert(number, sector);
        }
        self.unsynced.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random;

    /// The content that a sector full of `value` begins with.
    fn sector(medium: &Medium, number: usize) -> u8 {
        let bytes = medium.read(number * SECTOR_BYTES, SECTOR_BYTES);
        assert!(bytes.iter().all(|b| *b == bytes[0]), "a sector is whole");
        bytes[0]
    }

    #[test]
    fn only_what_was_written_after_the_last_flush_is_lost_and_each_way_is_met() {
        let mut seen = std::collections::BTreeSet::new();
        for seed in 0..400 {
            let mut dice = random::generator(seed);
            let mut medium = Medium::new(4 * SECTOR_BYTES);
            assert!(medium.write(0, &[1; 2 * SECTOR_BYTES]));
            medium.flush();
            assert!(medium.write(SECTOR_BYTES, &[2; 2 * SECTOR_BYTES]));
            assert!(medium.write(SECTOR_BYTES, &[3; SECTOR_BYTES]));
            let cut = Cut::random(&mut dice);
            medium.cut(cut, &mut dice);
            let found = [0, 1, 2, 3].map(|n| sector(&medium, n));
            assert_eq!((found[0], found[3]), (1, 0), "synced, and never written");
            match cut {
                Cut::Nothing => assert_eq!(found, [1, 1, 0, 0]),
                Cut::Everything => assert_eq!(found, [1, 3, 2, 0]),
                Cut::Prefix => assert!([[1, 1, 0, 0], [1, 2, 2, 0], [1, 3, 2, 0]].contains(&found)),
                Cut::Any => assert!([1, 2, 3].contains(&found[1]) && [0, 2].contains(&found[2])),
            }
            seen.insert((cut as u8, found));
        }
        assert_eq!(seen.len(), 1 + 1 + 3 + 6, "{seen:?}");
    }

    #[test]
    fn a_disk_goes_back_to_what_was_saved_and_ends_where_it_ends() {
        let mut medium = Medium::new(3 * SECTOR_BYTES);
        assert!(medium.write(100, &[7; 50]) && !medium.write(3 * SECTOR_BYTES - 1, &[1; 2]));
        medium.save();
        assert!(medium.write(0, &[9; 1000]));
        medium.reset();
        assert_eq!(medium.read(99, 52)[..2], [0, 7]);
        assert_eq!(medium.read(150, 1000)[0], 0);
        assert_eq!(medium.cut(Cut::Nothing, &mut random::generator(1)), Loss::default(), "safe");
    }
}
