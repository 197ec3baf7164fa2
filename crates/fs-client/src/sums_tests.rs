//! Sums against what a file holds, whatever is done to it.

use super::*;
use crate::cache::{extend, punch};
use proptest::prelude::*;
use std::os::unix::fs::FileExt;

/// A file that some process may change, beside its sums.
struct Beside {
    file: File,
    sums: Sums,
}

impl Beside {
    fn new() -> Beside {
        Beside { file: tempfile::tempfile().expect("a file"), sums: Sums::default() }
    }

    fn write(&mut self, data: &[u8], offset: u64) -> Vec<ByteRange> {
        let prepared = self.sums.prepare(&self.file, data, offset);
        self.file.write_all_at(data, offset).expect("written");
        self.sums.written(&prepared, data.len());
        prepared.damaged
    }

    fn wrong(&self) -> Vec<ByteRange> {
        self.sums.wrong(&self.file, ByteRange::new(0, 64 * BLOCK))
    }
}

#[derive(Clone, Debug)]
enum Step {
    Write(u64, usize, u8),
    Short(u64, usize, u8),
    Punch(u64, u64),
    Cut(u64),
    /// The disk changes a byte.
    Flip(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let at = 0..40_000u64;
    let len = prop_oneof![1..200usize, Just(4096), 1..9000usize];
    let step = prop_oneof![
        6 => (at.clone(), len.clone(), 1..255u8).prop_map(|(a, l, b)| Step::Write(a, l, b)),
        3 => (0..10u64, 1..3usize, 1..255u8)
            .prop_map(|(a, l, b)| Step::Write(a * BLOCK, l * BLOCK as usize, b)),
        1 => (at.clone(), len, 1..255u8).prop_map(|(a, l, b)| Step::Short(a, l, b)),
        1 => (at.clone(), 1..9000u64).prop_map(|(a, l)| Step::Punch(a, l)),
        1 => at.clone().prop_map(Step::Cut),
        1 => at.prop_map(Step::Flip),
    ];
    proptest::collection::vec(step, 1..60)
}

proptest! {
    /// Beside a byte array: what the disk changed is found, as long as it was not written over, and
    /// nothing else is.
    #[test]
    fn what_the_disk_changed_is_found_and_nothing_else(steps in steps()) {
        let mut beside = Beside::new();
        // What the file should be, which blocks have a sum, and what was changed behind our back.
        let mut model = vec![0u8; 64 * BLOCK as usize];
        let mut summed = [false; 64];
        for step in steps {
            match step {
                Step::Write(at, len, byte) => {
                    let range = ByteRange::at(at, len as u64);
                    let is_bad = |n: u64, model: &[u8], summed: &[bool]| {
                        let mut now = [0; BLOCK as usize];
                        read_padded(&beside.file, &mut now, n * BLOCK).expect("read");
                        let from = (n * BLOCK) as usize;
                        summed[n as usize] && model[from..from + BLOCK as usize] != now
                    };
                    let partly = |n: &u64| !range.contains(block(*n));
                    let bad: Vec<u64> = blocks(range)
                        .filter(partly)
                        .filter(|n| is_bad(*n, &model, &summed))
                        .collect();
                    let told = beside.write(&vec![byte; len], at);
                    for n in &bad {
                        prop_assert!(told.iter().any(|r| block(*n).contains(*r)), "{n}: {told:?}");
                    }
                    prop_assert!(bad.is_empty() == told.is_empty(), "{bad:?} {told:?}");
                    model[at as usize..at as usize + len].fill(byte);
                    for n in blocks(range) {
                        summed[n as usize] = !bad.contains(&n);
                        if partly(&n) && !bad.contains(&n) || bad.contains(&n) {
                            // What was not known before is taken as it is.
                            let from = (n * BLOCK) as usize;
                            let block = &mut model[from..from + BLOCK as usize];
                            read_padded(&beside.file, block, n * BLOCK).expect("read");
                        }
                    }
                }
                Step::Short(at, len, byte) => {
                    let data = vec![byte; len];
                    let prepared = beside.sums.prepare(&beside.file, &data, at);
                    beside.file.write_all_at(&data[..len / 2], at).expect("written");
                    beside.sums.written(&prepared, len / 2);
                    blocks(ByteRange::at(at, len as u64)).for_each(|n| summed[n as usize] = false);
                }
                Step::Punch(at, len) => {
                    let range = ByteRange::at(at, len);
                    extend(&beside.file, range.end()).expect("longer");
                    punch(&beside.file, range).expect("punched");
                    beside.sums.forget(range);
                    blocks(range).for_each(|n| summed[n as usize] = false);
                }
                Step::Cut(len) => {
                    beside.file.set_len(len).expect("cut");
                    beside.sums.forget(ByteRange::from(len));
                    blocks(ByteRange::new(len, 64 * BLOCK)).for_each(|n| summed[n as usize] = false);
                }
                Step::Flip(at) => {
                    let mut byte = [0];
                    read_padded(&beside.file, &mut byte, at).expect("read");
                    beside.file.write_all_at(&[!byte[0]], at).expect("written");
                }
            }
            let mut expected = Vec::new();
            for n in (0..64u64).filter(|n| summed[*n as usize]) {
                let mut now = [0; BLOCK as usize];
                read_padded(&beside.file, &mut now, n * BLOCK).expect("read");
                let from = (n * BLOCK) as usize;
                if model[from..from + BLOCK as usize] != now {
                    expected.push(block(n));
                }
            }
            prop_assert_eq!(beside.wrong(), expected);
            let unknown = beside.sums.unknown(ByteRange::new(0, 64 * BLOCK));
            let known = |n: u64| !unknown.iter().any(|r| r.overlaps(block(n)));
            prop_assert!((0..64).all(|n| known(n) == summed[n as usize]));
        }
    }
}

#[test]
fn bytes_that_were_read_are_compared_block_by_block() {
    let mut beside = Beside::new();
    let data: Vec<u8> = (0..3 * BLOCK).map(|n| n as u8).collect();
    assert!(beside.write(&data, 0).is_empty());
    assert!(beside.sums.fit(&data, 0) && beside.sums.fit(&data[100..], 100));
    let mut other = data.clone();
    other[5000] ^= 1;
    assert!(!beside.sums.fit(&other, 0));
    assert!(beside.sums.fit(&other[4097..], 4097), "the second block is not there as a whole");
    beside.sums.forget(ByteRange::at(5000, 1));
    assert!(beside.sums.fit(&other, 0), "nothing is known of it any more");
}
