//! What may be in files after the daemon under a writer was killed: for every byte the value that
//! a sync event acknowledged last, or one that was written after it. Nothing else: no older
//! value, no zeros in between.

use std::collections::BTreeMap;

/// One file as its writer knows it.
#[derive(Clone, Debug, Default)]
pub struct Expected {
    /// The acknowledged values; zeros where nothing was.
    acknowledged: Vec<u8>,
    /// What was written since, in this order. A cut writes zeros.
    since: Vec<Write>,
    /// The acknowledged size.
    size_least: u64,
    /// A truncate that was tried and not answered.
    cut: Option<u64>,
}

#[derive(Clone, Debug)]
struct Write {
    offset: u64,
    data: Vec<u8>,
}

impl Write {
    fn end(&self) -> u64 {
        self.offset + self.data.len() as u64
    }

    fn at(&self, at: u64) -> Option<u8> {
        at.checked_sub(self.offset).and_then(|at| self.data.get(at as usize)).copied()
    }

    /// What of it lies from `start` to `end`; perhaps nothing.
    fn between(&self, start: u64, end: u64) -> Write {
        let (start, end) = (start.max(self.offset), end.min(self.end()));
        let data = match start < end {
            true => {
                self.data[(start - self.offset) as usize..(end - self.offset) as usize].to_vec()
            }
            false => Vec::new(),
        };
        Write { offset: start, data }
    }

    fn apply(&self, to: &mut [u8]) {
        to[self.offset as usize..self.end() as usize].copy_from_slice(&self.data);
    }
}

impl Expected {
    /// A write is going to be tried.
    pub fn write(&mut self, offset: u64, data: &[u8]) {
        let write = Write { offset, data: data.to_vec() };
        let len = self.acknowledged.len().max(write.end() as usize);
        self.acknowledged.resize(len, 0);
        self.since.push(write);
    }

    /// A sync event of these bytes succeeded.
    pub fn acknowledge(&mut self, offset: u64, len: u64) {
        let end = (offset + len).min(self.len());
        let mut rest = Vec::new();
        for write in std::mem::take(&mut self.since) {
            let synced = write.between(offset, end);
            if synced.data.is_empty() {
                rest.push(write);
                continue;
            }
            synced.apply(&mut self.acknowledged);
            let around = [write.between(0, offset), write.between(end, u64::MAX)];
            rest.extend(around.into_iter().filter(|write| !write.data.is_empty()));
        }
        self.since = rest;
        self.size_least = self.size_least.max(end);
    }

    /// A sync event of the file succeeded.
    pub fn acknowledge_all(&mut self) {
        self.acknowledge(0, self.len());
    }

    /// A truncate is going to be tried.
    pub fn cut(&mut self, len: u64) {
        let gone = self.len().saturating_sub(len);
        if gone > 0 {
            self.since.push(Write { offset: len, data: vec![0; gone as usize] });
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
        self.acknowledged.resize(len as usize, 0);
        let kept = self.since.iter().map(|write| write.between(0, len));
        self.since = kept.filter(|write| !write.data.is_empty()).collect();
        self.size_least = len;
        self.cut = None;
    }

    /// The size as the writer sees it.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.acknowledged.len() as u64
    }

    /// The acknowledged size.
    #[must_use]
    pub fn size_least(&self) -> u64 {
        self.size_least
    }

    /// What a byte may be, the acknowledged value first, then what was written since (also when it
    /// is the same); nothing beyond the end.
    #[must_use]
    pub fn may_be(&self, at: u64) -> Vec<u8> {
        let acknowledged = self.acknowledged.get(at as usize).copied();
        acknowledged.into_iter().chain(self.since.iter().filter_map(|write| write.at(at))).collect()
    }

    /// The first byte that is none of what it may be; `but` are not looked at (they are sorted).
    #[must_use]
    pub fn first_wrong(&self, got: &[u8], but: &[u64]) -> Option<u64> {
        let wrong = |(at, value): &(u64, &u8)| {
            self.acknowledged.get(*at as usize) != Some(*value)
                && !self.may_be(*at).contains(value)
                && but.binary_search(at).is_err()
        };
        (0..).zip(got).find(wrong).map(|(at, _)| at)
    }

    /// What the writer itself must read.
    #[must_use]
    pub fn latest(&self) -> Vec<u8> {
        let mut bytes = self.acknowledged.clone();
        self.since.iter().for_each(|write| write.apply(&mut bytes));
        bytes
    }

    /// True when nothing was ever written.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.acknowledged.is_empty()
    }

    /// What was read is one of the things that may be there; from here on it is the truth.
    pub fn settle(&mut self, what: &str, got: &[u8]) {
        let (least, most) = (self.size_least, self.len());
        let size = got.len() as u64;
        assert!(least <= size && size <= most, "{what}: {size} bytes, not {least} to {most}");
        if let Some(at) = self.first_wrong(got, &[]) {
            let (value, may_be) = (got[at as usize], self.may_be(at));
            panic!("{what}: byte {at} is {value}, and not one of {may_be:?}");
        }
        self.acknowledged = got.to_vec();
        self.since.clear();
        self.size_least = size;
    }
}

/// Files by name.
pub type Files = BTreeMap<String, Expected>;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Each byte's values in a list of its own.
    #[derive(Default)]
    struct Plain(Vec<Vec<u8>>);

    impl Plain {
        fn acknowledge(&mut self, from: usize, to: usize) {
            let to = to.min(self.0.len());
            self.0[from.min(to)..to].iter_mut().for_each(|all| *all = vec![all[all.len() - 1]]);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn bytes_are_as_in_lists_of_their_own(
            ops in prop::collection::vec((0..5u8, 0..20usize, 0..20usize, any::<u8>()), 1..40)
        ) {
            let (mut expected, mut plain) = (Expected::default(), Plain::default());
            for (op, from, len, value) in ops {
                let end = from + len;
                match op {
                    0 | 1 => {
                        expected.write(from as u64, &vec![value; len]);
                        let longest = plain.0.len().max(end);
                        plain.0.resize(longest, vec![0]);
                        plain.0[from..end].iter_mut().for_each(|all| all.push(value));
                    }
                    2 => {
                        expected.acknowledge(from as u64, len as u64);
                        plain.acknowledge(from, end);
                    }
                    3 => {
                        expected.cut(from as u64);
                        plain.0.iter_mut().skip(from).for_each(|all| all.push(0));
                    }
                    _ => {
                        expected.acknowledge_cut(from as u64);
                        plain.0.resize(from, vec![0]);
                    }
                }
                let all: Vec<Vec<u8>> = (0..expected.len()).map(|at| expected.may_be(at)).collect();
                prop_assert_eq!(&all, &plain.0);
                let latest: Vec<u8> = plain.0.iter().map(|all| all[all.len() - 1]).collect();
                prop_assert_eq!(expected.latest(), latest);
            }
        }
    }

    #[test]
    fn a_byte_that_was_written_again_is_vouched_for_by_nobody() {
        let mut e = Expected::default();
        e.write(0, &[1, 1]);
        e.acknowledge_all();
        e.write(1, &[1]);
        assert_eq!((e.may_be(0), e.may_be(1)), (vec![1], vec![1, 1]));
    }

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
