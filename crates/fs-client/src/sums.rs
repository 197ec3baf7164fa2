//! Checksums of the blocks of one cache file: of what was written into it, so that it shows when the
//! disk gives something else back.
//!
//! A sum is of a whole block of the file as it is, what it does not have up to its end as zeros.
//! Whoever changes the file without telling what it becomes forgets the sums there
//! ([`Sums::forget`]); of a block without a sum nothing is known, and nothing is found wrong.
//!
//! * Consistency: the file changes, and its sums, under the lock of the file's state.
//! * A write of part of a block reads the rest of it. What does not have its sum then is damaged, and
//!   gets no new one: that would make it good.

use crate::cache::read_padded;
use ebb_types::ByteRange;
use std::collections::BTreeMap;
use std::fs::File;

/// Bytes of a block.
pub(crate) const BLOCK: u64 = 4096;

/// Blocks of a chunk.
const PER_CHUNK: u64 = 64;

/// The table. A sum takes four bytes for 4 KiB.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sums {
    /// By the number of the first block, in chunks; 0: not known.
    chunks: BTreeMap<u64, Box<[u32; PER_CHUNK as usize]>>,
}

/// The sums of blocks into which something is about to be written.
#[derive(Debug)]
pub struct Prepared {
    at: ByteRange,
    sums: Vec<u32>,
    /// Bytes beside the written ones that are not what they were.
    pub damaged: Vec<ByteRange>,
}

impl Prepared {
    /// How many bytes are to be written.
    pub fn len(&self) -> usize {
        self.at.len() as usize
    }
}

/// The sum of a block; never 0.
fn sum_of(block: &[u8]) -> u32 {
    crc32c::crc32c(block).max(1)
}

fn block(number: u64) -> ByteRange {
    ByteRange::at(number * BLOCK, BLOCK)
}

/// The blocks that `range` meets.
fn blocks(range: ByteRange) -> std::ops::Range<u64> {
    if range.is_empty() {
        return 0..0;
    }
    range.start() / BLOCK..(range.end() - 1) / BLOCK + 1
}

impl Sums {
    /// No sums at all.
    pub fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    fn get(&self, number: u64) -> Option<u32> {
        let chunk = self.chunks.get(&(number / PER_CHUNK))?;
        Some(chunk[(number % PER_CHUNK) as usize]).filter(|sum| *sum != 0)
    }

    fn set(&mut self, number: u64, sum: u32) {
        let at = (number % PER_CHUNK) as usize;
        if sum != 0 {
            let new = || Box::new([0; PER_CHUNK as usize]);
            self.chunks.entry(number / PER_CHUNK).or_insert_with(new)[at] = sum;
        } else if let Some(chunk) = self.chunks.get_mut(&(number / PER_CHUNK)) {
            chunk[at] = 0;
        }
    }

    /// Nothing is known any more of the blocks that `range` meets.
    pub fn forget(&mut self, range: ByteRange) {
        let blocks = blocks(range);
        let chunks = blocks.start / PER_CHUNK..blocks.end.div_ceil(PER_CHUNK);
        let met: Vec<u64> = self.chunks.range(chunks).map(|(number, _)| *number).collect();
        for chunk in met {
            let first = (chunk * PER_CHUNK).max(blocks.start);
            let end = ((chunk + 1) * PER_CHUNK).min(blocks.end);
            (first..end).for_each(|number| self.set(number, 0));
            if self.chunks.get(&chunk).is_some_and(|c| c.iter().all(|sum| *sum == 0)) {
                self.chunks.remove(&chunk);
            }
        }
    }

    /// What the sums are when `data` is at `offset` of the file; before it is written there.
    pub fn prepare(&self, file: &File, data: &[u8], offset: u64) -> Prepared {
        let at = ByteRange::at(offset, data.len() as u64);
        let mut prepared = Prepared { at, sums: Vec::new(), damaged: Vec::new() };
        for number in blocks(at) {
            let whole = block(number);
            let part = whole.intersect(at);
            let from = (part.start() - at.start()) as usize;
            let new = &data[from..from + part.len() as usize];
            let sum = match part == whole {
                true => sum_of(new),
                false => self.patched(file, number, part, new, &mut prepared.damaged),
            };
            prepared.sums.push(sum);
        }
        prepared
    }

    /// The same when what `before` speaks of is written by then, and not noted. Of a block that both are in
    /// nothing is known afterwards.
    pub fn prepare_after(
        &self,
        before: Option<&Prepared>,
        file: &File,
        data: &[u8],
        offset: u64,
    ) -> Prepared {
        match before {
            Some(before) if blocks(before.at).end > offset / BLOCK => {
                let at = ByteRange::at(offset, data.len() as u64);
                Prepared { at, sums: vec![0; blocks(at).count()], damaged: Vec::new() }
            }
            _ => self.prepare(file, data, offset),
        }
    }

    /// The sum of a block in which `part` becomes `new`; 0 when the rest of it is damaged.
    fn patched(
        &self,
        file: &File,
        number: u64,
        part: ByteRange,
        new: &[u8],
        damaged: &mut Vec<ByteRange>,
    ) -> u32 {
        let (whole, known) = (block(number), self.get(number));
        let mut bytes = [0; BLOCK as usize];
        let read = read_padded(file, &mut bytes, whole.start());
        if read.is_err() && known.is_none() {
            return 0;
        }
        if read.is_err() || known.is_some_and(|sum| sum != sum_of(&bytes)) {
            let rest = [
                ByteRange::new(whole.start(), part.start()),
                ByteRange::new(part.end(), whole.end()),
            ];
            damaged.extend(rest.into_iter().filter(|r| !r.is_empty()));
            return 0;
        }
        let from = (part.start() - whole.start()) as usize;
        bytes[from..from + new.len()].copy_from_slice(new);
        sum_of(&bytes)
    }

    /// So many bytes of what was prepared were written.
    pub fn written(&mut self, prepared: &Prepared, bytes: usize) {
        if bytes as u64 != prepared.at.len() {
            return self.forget(prepared.at);
        }
        for (number, sum) in blocks(prepared.at).zip(&prepared.sums) {
            self.set(number, *sum);
        }
    }

    /// True when no whole block of `bytes`, read at `offset`, has another sum. Those that are there in
    /// part are not looked at.
    pub fn fit(&self, bytes: &[u8], offset: u64) -> bool {
        let range = ByteRange::at(offset, bytes.len() as u64);
        let whole = blocks(range).filter(|number| range.contains(block(*number)));
        whole.into_iter().all(|number| {
            let from = (number * BLOCK - offset) as usize;
            let found = || sum_of(&bytes[from..from + BLOCK as usize]);
            self.get(number).is_none_or(|sum| sum == found())
        })
    }

    /// The blocks that meet `range` and are not what was written, or cannot be read.
    pub fn wrong(&self, file: &File, range: ByteRange) -> Vec<ByteRange> {
        let mut bytes = [0; BLOCK as usize];
        let mut is_wrong = |number: u64| {
            self.get(number).is_some_and(|sum| {
                let read = read_padded(file, &mut bytes, number * BLOCK);
                read.is_err() || sum != sum_of(&bytes)
            })
        };
        blocks(range).filter(|number| is_wrong(*number)).map(block).collect()
    }

    /// The parts of `range` of which no sum is known.
    pub fn unknown(&self, range: ByteRange) -> Vec<ByteRange> {
        let mut out: Vec<ByteRange> = Vec::new();
        for number in blocks(range).filter(|number| self.get(*number).is_none()) {
            let part = block(number).intersect(range);
            match out.last_mut() {
                Some(last) if last.end() == part.start() => {
                    *last = ByteRange::new(last.start(), part.end());
                }
                _ => out.push(part),
            }
        }
        out
    }
}

#[cfg(test)]
#[path = "sums_tests.rs"]
mod tests;
