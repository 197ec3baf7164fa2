//! What may be in files after the daemon under a writer was killed: for every byte the value that
//! a sync event acknowledged last, or one that was written after it. Nothing else: no older
//! value, no zeros in between.

use std::collections::BTreeMap;

/// One file as its writer knows it.
#[derive(Clone, Debug, Default)]
pub struct Expected {
    /// Per byte: the acknowledged value first, then what was written since.
    bytes: Vec<Vec<u8>>,
    /// The acknowledged size.
    size_least: u64,
    /// A truncate that was tried and not answered.
    cut: Option<u64>,
}

impl Expected {
    /// A write is going to be tried.
    pub fn write(&mut self, offset: u64, data: &[u8]) {
        let end = offset as usize + data.len();
        if self.bytes.len() < end {
            self.bytes.resize(end, vec![0]);
        }
        for (at, value) in data.iter().enumerate() {
            let candidates = &mut self.bytes[offset as usize + at];
            if !candidates.contains(value) {
                candidates.push(*value);
            } else if candidates.last() != Some(value) {
                candidates.retain(|v| v != value);
                candidates.push(*value);
            }
        }
    }

    /// A sync event of these bytes succeeded.
    pub fn acknowledge(&mut self, offset: u64, len: u64) {
        let end = (offset + len).min(self.bytes.len() as u64);
        for candidates in &mut self.bytes[offset as usize..end as usize] {
            candidates.drain(..candidates.len() - 1);
        }
        self.size_least = self.size_least.max(end);
    }

    /// A sync event of the file succeeded.
    pub fn acknowledge_all(&mut self) {
        self.acknowledge(0, self.bytes.len() as u64);
    }

    /// A truncate is going to be tried.
    pub fn cut(&mut self, len: u64) {
        for candidates in self.bytes.iter_mut().skip(len as usize) {
            candidates.push(0);
        }
        self.size_least = self.size_least.min(len);
        self.cut = Some(len);
    }

    /// A truncate that was not answered. It may still take effect when the backing is looked at
    /// the next time, so a program that goes on has to repeat it.
    #[must_use]
    pub fn unanswered_cut(&self) -> Option<u64> {
        self.cut
    }

    /// It succeeded.
    pub fn acknowledge_cut(&mut self, len: u64) {
        self.bytes.resize(len as usize, vec![0]);
        self.size_least = len;
        self.cut = None;
    }

    /// The size as the writer sees it.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// The acknowledged size.
    #[must_use]
    pub fn size_least(&self) -> u64 {
        self.size_least
    }

    /// What a byte may be, the acknowledged value first; nothing beyond the end.
    #[must_use]
    pub fn may_be(&self, at: u64) -> &[u8] {
        self.bytes.get(at as usize).map_or(&[], Vec::as_slice)
    }

    /// The first byte that is none of what it may be; `but` are not looked at (they are sorted).
    #[must_use]
    pub fn first_wrong(&self, got: &[u8], but: &[u64]) -> Option<u64> {
        let wrong = |(at, value): &(u64, &u8)| {
            !self.may_be(*at).contains(value) && but.binary_search(at).is_err()
        };
        (0..).zip(got).find(wrong).map(|(at, _)| at)
    }

    /// What the writer itself must read.
    #[must_use]
    pub fn latest(&self) -> Vec<u8> {
        self.bytes.iter().map(|candidates| *candidates.last().expect("never empty")).collect()
    }

    /// True when nothing was ever written.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// What was read is one of the things that may be there; from here on it is the truth.
    pub fn settle(&mut self, what: &str, got: &[u8]) {
        let (least, most) = (self.size_least, self.len());
        let size = got.len() as u64;
        assert!(least <= size && size <= most, "{what}: {size} bytes, not {least} to {most}");
        for (at, (value, candidates)) in got.iter().zip(&self.bytes).enumerate() {
            assert!(
                candidates.contains(value),
                "{what}: byte {at} is {value}, and not one of {candidates:?}"
            );
        }
        self.bytes = got.iter().map(|v| vec![*v]).collect();
        self.size_least = size;
    }
}

/// Files by name.
pub type Files = BTreeMap<String, Expected>;

#[cfg(test)]
mod tests {
    use super::*;

    fn fails(expected: &Expected, got: &[u8]) -> bool {
        let mut expected = expected.clone();
        let got = got.to_vec();
        std::panic::catch_unwind(move || expected.settle("test", &got)).is_err()
    }

    #[test]
    fn stale_lost_and_foreign_bytes_are_found() {
        let mut e = Expected::default();
        e.write(0, &[1, 1, 1]);
        assert!(!fails(&e, &[]) && !fails(&e, &[1, 0, 1]) && fails(&e, &[2, 1, 1]));
        e.acknowledge_all();
        assert!(fails(&e, &[1, 1]) && fails(&e, &[1, 0, 1]) && !fails(&e, &[1, 1, 1]));
        e.write(1, &[2, 2, 2]);
        assert!(!fails(&e, &[1, 2, 1]) && !fails(&e, &[1, 1, 1, 2]) && fails(&e, &[2, 1, 1]));
        e.acknowledge(1, 3);
        assert!(fails(&e, &[1, 1, 2, 2]) && !fails(&e, &[1, 2, 2, 2]));
        e.cut(1);
        assert!(!fails(&e, &[1, 2, 2, 2]) && !fails(&e, &[1]) && fails(&e, &[]));
        e.acknowledge_cut(1);
        assert!(fails(&e, &[1, 2]) && !fails(&e, &[1]));
    }
}
