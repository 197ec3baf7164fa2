//! A large file, written in blocks: for every page which operations may have written it last. One
//! number for a page in the place of one for each byte, so that files of many grants can be judged.

use crate::content;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// What is written together, at least.
pub(super) const BLOCK_BYTES: u64 = 64 << 10;
/// What is told apart. (A write whose daemon was killed may end anywhere, also in a page.)
const PAGE_BYTES: u64 = 4 << 10;
const PAGES: u64 = BLOCK_BYTES / PAGE_BYTES;

/// Stands for a page in which such a write ended.
const TORN: u64 = u64::MAX;

/// The file as its writer knows it. Operation 0 has written nothing: zeros, or the end before it.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    who: u64,
    /// Per page: the acknowledged operation first, then those since.
    written: Vec<Vec<u64>>,
    /// What torn pages are.
    torn: BTreeMap<u64, Vec<u8>>,
    /// So long is the file at least, and at most.
    least: u64,
    most: u64,
    pub open: Option<File>,
    pub is_published: bool,
    pub in_doubt: bool,
}

/// Pages of blocks.
fn pages(first: u64, count: u64) -> std::ops::Range<usize> {
    (first * PAGES) as usize..((first + count) * PAGES) as usize
}

impl Blocks {
    pub fn new(who: u64) -> Blocks {
        Blocks { who: who + 100, ..Blocks::default() }
    }

    pub fn is_empty(&self) -> bool {
        self.written.is_empty()
    }

    /// A write of `count` blocks is going to be tried.
    pub fn begin(&mut self, first: u64, count: u64, operation: u64) {
        let pages = pages(first, count);
        if self.written.len() < pages.end {
            self.written.resize(pages.end, vec![0]);
        }
        self.most = self.most.max(pages.end as u64 * PAGE_BYTES);
        self.written[pages].iter_mut().for_each(|all| all.push(operation));
        (self.is_published, self.in_doubt) = (false, true);
    }

    pub fn carry_out(&self, first: u64, count: u64, operation: u64) -> io::Result<()> {
        let file = self.open.as_ref().expect("it was opened");
        let (offset, len) = (first * BLOCK_BYTES, count * BLOCK_BYTES);
        // From the beginning of a page on: else the kernel makes requests that end within pages, and a daemon
        // that is killed between two of them leaves a torn page.
        let mut bytes = vec![0; (len + PAGE_BYTES) as usize];
        let begin = bytes.as_ptr().align_offset(PAGE_BYTES as usize);
        let bytes = &mut bytes[begin..begin + len as usize];
        bytes.copy_from_slice(&content::bytes(self.who, operation, offset, len));
        file.write_all_at(bytes, offset)
    }

    /// These blocks were published as they were written.
    pub fn acknowledge(&mut self, first: u64, count: u64) {
        self.acknowledge_pages(pages(first, count));
    }

    /// A sync event of the file succeeded.
    pub fn acknowledge_all(&mut self) {
        if !self.in_doubt {
            self.acknowledge_pages(0..self.written.len());
        }
    }

    fn acknowledge_pages(&mut self, pages: std::ops::Range<usize>) {
        self.least = self.least.max(pages.end as u64 * PAGE_BYTES);
        self.written[pages].iter_mut().for_each(|all| drop(all.drain(..all.len() - 1)));
    }

    /// Compares the file at `path` with the books; what is found is the truth from here on.
    ///
    /// # Panics
    /// When a page is none of what it may be, or the file is too short or too long.
    pub fn settle(&mut self, what: &str, path: &Path) {
        let file = match File::open(path) {
            Ok(file) => file,
            Err(e) if self.least == 0 && e.kind() == io::ErrorKind::NotFound => {
                self.most = 0;
                return self.written.clear();
            }
            Err(e) => panic!("{what}: {e}"),
        };
        let len = file.metadata().unwrap_or_else(|e| panic!("{what}: {e}")).len();
        let (least, most) = (self.least, self.most);
        assert!((least..=most).contains(&len), "{what}: {len} bytes, not {least} to {most}");
        self.written.truncate(len.div_ceil(PAGE_BYTES) as usize);
        let mut got = vec![0; BLOCK_BYTES as usize];
        for offset in (0..len).step_by(BLOCK_BYTES as usize) {
            let got = &mut got[..BLOCK_BYTES.min(len - offset) as usize];
            let read = file.read_exact_at(got, offset);
            read.unwrap_or_else(|e| panic!("{what}: {} bytes at {offset}: {e}", got.len()));
            self.settle_block(what, offset, got);
        }
        (self.least, self.most, self.in_doubt) = (len, len, false);
    }

    fn settle_block(&mut self, what: &str, offset: u64, got: &[u8]) {
        for (at, page) in
            (offset..).step_by(PAGE_BYTES as usize).zip(got.chunks(PAGE_BYTES as usize))
        {
            let may_be = &mut self.written[(at / PAGE_BYTES) as usize];
            let is_of = |operation: &&u64| match **operation {
                0 => page.iter().all(|b| *b == 0),
                TORN => self.torn.get(&at).is_some_and(|torn| torn.starts_with(page)),
                n => content::bytes(self.who, n, at, page.len() as u64) == page,
            };
            let found = may_be.iter().rev().find(is_of).copied();
            let found = found
                .or_else(|| (self.in_doubt && is_torn(self.who, at, page, may_be)).then_some(TORN));
            let mut found = found.unwrap_or_else(|| {
                let begin = &page[..page.len().min(16)];
                let newest = may_be.iter().copied().filter(|n| *n != TORN).max();
                let of = origin(self.who, page, at, newest.unwrap_or(0));
                panic!("{what}: the page at {at} is of none of {may_be:?}: {begin:?}..., {of}")
            });
            if (page.len() as u64) < PAGE_BYTES {
                // What is written behind it makes zeros of the rest.
                found = TORN;
            }
            if found == TORN && !self.torn.get(&at).is_some_and(|torn| torn.starts_with(page)) {
                let mut torn = page.to_vec();
                torn.resize(PAGE_BYTES as usize, 0);
                self.torn.insert(at, torn);
            }
            *may_be = vec![found];
        }
    }
}

/// A write that was not answered ended in this page: it begins with what is newest, and goes on with
/// what was there before.
fn is_torn(who: u64, at: u64, page: &[u8], may_be: &[u64]) -> bool {
    let Some((newest, before)) = may_be.split_last() else { return false };
    let of = |operation: u64| match operation {
        0 => vec![0; page.len()],
        n => content::bytes(who, n, at, page.len() as u64),
    };
    let new = of(*newest);
    let begin = page.iter().zip(&new).take_while(|(a, b)| a == b).count();
    let rest = |operation: &u64| *operation != TORN && of(*operation)[begin..] == page[begin..];
    begin > 0 && before.iter().any(rest)
}

/// What a page begins with, for who looks for what went wrong: so many bytes of that operation.
fn origin(who: u64, page: &[u8], at: u64, newest: u64) -> String {
    let alike = |operation: u64| {
        let bytes = content::bytes(who, operation, at, page.len() as u64);
        page.iter().zip(bytes).take_while(|(a, b)| **a == *b).count()
    };
    let best = (1..=newest).map(|n| (alike(n), n)).max().filter(|(alike, _)| *alike > 0);
    best.map_or("nothing of this file".into(), |(n, of)| format!("{n} bytes of operation {of}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    #[test]
    fn old_torn_and_lost_pages_are_found() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("big");
        let mut blocks = Blocks::new(1);
        let write = |blocks: &mut Blocks, first, count, operation| {
            let file = File::options().create(true).truncate(false).write(true).open(&path);
            blocks.open = Some(file.expect("open"));
            blocks.begin(first, count, operation);
            blocks.carry_out(first, count, operation).expect("write");
            blocks.in_doubt = false;
        };
        let fails = |blocks: &mut Blocks| {
            catch_unwind(AssertUnwindSafe(|| blocks.settle("test", &path))).is_err()
        };
        write(&mut blocks, 0, 3, 7);
        blocks.acknowledge_all();
        write(&mut blocks, 1, 1, 8);
        assert!(!fails(&mut blocks));
        write(&mut blocks, 1, 1, 9);
        // A page of the write before, and one of the acknowledged one: both may be there.
        let file = File::options().write(true).open(&path).expect("open");
        let at = BLOCK_BYTES + PAGE_BYTES;
        file.write_all_at(&content::bytes(101, 8, at, PAGE_BYTES), at).expect("write");
        assert!(!fails(&mut blocks));
        write(&mut blocks, 1, 1, 10);
        blocks.acknowledge_all();
        file.write_all_at(&content::bytes(101, 8, at, PAGE_BYTES), at).expect("write");
        assert!(fails(&mut blocks), "an older page than the acknowledged one");
        write(&mut blocks, 1, 1, 11);
        let rest = PAGE_BYTES / 2 + 80;
        let before = content::bytes(101, 10, at + rest, PAGE_BYTES - rest);
        file.write_all_at(&before, at + rest).expect("write");
        assert!(fails(&mut blocks), "a torn page of a write that was answered");
        blocks.in_doubt = true;
        assert!(!fails(&mut blocks), "a torn page of one that was not");
        assert!(!fails(&mut blocks), "which stays as it is");
        write(&mut blocks, 1, 1, 12);
        blocks.acknowledge_all();
        file.write_all_at(&[0], at).expect("write");
        assert!(fails(&mut blocks), "a zero in it");
        blocks.in_doubt = true;
        file.write_all_at(&content::bytes(101, 12, at, PAGE_BYTES), at).expect("write");
        write(&mut blocks, 3, 1, 13);
        // A request ends where its buffer does, in the middle of a page.
        file.set_len(3 * BLOCK_BYTES + 5_000).expect("truncate");
        blocks.in_doubt = true;
        assert!(!fails(&mut blocks), "a write that was not answered");
        assert!(!fails(&mut blocks), "which stays as long as it is");
        write(&mut blocks, 5, 1, 14);
        assert!(!fails(&mut blocks), "and has zeros behind it when it is made longer");
        file.set_len(2 * BLOCK_BYTES).expect("truncate");
        assert!(fails(&mut blocks), "it is too short");
    }
}
