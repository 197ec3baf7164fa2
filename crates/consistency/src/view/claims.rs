//! A file that is written past the daemon: what the cache file shows becomes bytes that this node
//! has written, as far as that can be told. The rules are in [`crate::claim`].

use super::known::Fact;
use super::local::{Class, Local};
use super::{Changes, Damaged, FileView, bytes};
use ebb_types::{ByteRange, Version, split_by};

impl FileView {
    /// The cache file holds data in `blocks` (whole blocks up to its size). What was absent of
    /// them is dirty now, and guessed. Returns those parts.
    pub fn found(&mut self, blocks: &[ByteRange]) -> Vec<ByteRange> {
        let new: Vec<ByteRange> = blocks.iter().flat_map(|b| self.local.gaps(*b)).collect();
        for range in new.iter().filter(|r| !r.is_empty()) {
            self.local.set(*range, Some(Local::Dirty));
            self.guessed.insert(range.to_std());
        }
        new
    }

    /// These dirty bytes are guessed ones: a daemon before this one found them.
    pub fn guess(&mut self, ranges: &[ByteRange]) {
        ranges.iter().filter(|r| !r.is_empty()).for_each(|r| self.guessed.insert(r.to_std()));
    }

    /// True when some written byte is only guessed to be.
    #[must_use]
    pub fn has_guessed(&self) -> bool {
        !self.guessed.is_empty()
    }

    /// Cuts `ranges` into those that are known to be written and those that are guessed.
    #[must_use]
    pub fn by_precision(&self, ranges: &[ByteRange]) -> (Vec<ByteRange>, Vec<ByteRange>) {
        let (mut exact, mut guessed) = (Vec::new(), Vec::new());
        let some = ranges.iter().filter(|r| !r.is_empty());
        if self.guessed.is_empty() {
            return (some.copied().collect(), guessed);
        }
        for range in some {
            let outer = range.to_std();
            exact.extend(self.guessed.gaps(&outer).map(|r| bytes(&r)));
            guessed.extend(self.guessed.overlapping(&outer).map(|r| bytes(r).intersect(*range)));
        }
        (exact, guessed)
    }

    /// Bytes that this node attached and, as far as it knows, still owns.
    #[must_use]
    pub fn owned(&self, within: ByteRange) -> Vec<ByteRange> {
        let mut owned = self.local.of_class(Class::Unflushed, within);
        owned.extend(self.local.of_class(Class::Flushed, within));
        owned.sort_unstable();
        owned
    }

    /// One past the last of all [`owned`](FileView::owned) bytes.
    #[must_use]
    pub fn owned_end(&self) -> u64 {
        self.local.end_of(Class::Unflushed).max(self.local.end_of(Class::Flushed))
    }

    /// Bytes that are not in the cache file, as far as is known.
    #[must_use]
    pub fn absent(&self, within: ByteRange) -> Vec<ByteRange> {
        self.local.gaps(within)
    }

    /// The same of many ranges; neighbours as one.
    #[must_use]
    pub fn absent_of(&self, ranges: &[ByteRange]) -> Vec<ByteRange> {
        self.local.gaps_in(ranges)
    }

    /// Bytes that are not in the cache file.
    #[must_use]
    pub fn vacant(&self, within: ByteRange) -> Vec<ByteRange> {
        self.local.gaps(within)
    }

    /// Bytes that others have too.
    #[must_use]
    pub fn clean(&self, within: ByteRange) -> Vec<ByteRange> {
        self.local.of_class(Class::Clean, within)
    }

    /// Bytes that are in the cache file, neighbours of one class as one.
    #[must_use]
    pub fn present(&self, within: ByteRange) -> Vec<ByteRange> {
        self.local.overlapping(within).map(|(range, _)| range).collect()
    }

    /// The first byte at or behind `offset` that is in the cache file.
    #[must_use]
    pub fn next_present(&self, offset: u64) -> Option<u64> {
        self.local.next_from(offset)
    }

    /// What is in the cache file of `range` is not what was put there. Owned bytes that nobody else has are
    /// lost from now on: reads of them say so. Returns these, and those that are flushed, which the
    /// caller has to give back; of dirty ones nothing changes, they have to be published first.
    pub fn damaged(&mut self, range: ByteRange) -> Damaged {
        let lost = self.local.of_class(Class::Unflushed, range);
        for range in &lost {
            let owned: Vec<_> = self.local.overlapping(*range).collect();
            for (bytes, state) in owned {
                if let Local::Owned { last, .. } = state {
                    let older: Vec<_> =
                        self.known.facts(bytes).filter(|(_, f)| f.version <= last).collect();
                    for (range, fact) in older {
                        let as_of = fact.as_of.max(last);
                        let mine = Fact { owner: self.me, version: last, as_of };
                        self.known.learn(range, mine);
                    }
                }
            }
            self.local.set(*range, None);
        }
        Damaged { lost, flushed: self.local.of_class(Class::Flushed, range) }
    }

    /// The service attached owned bytes anew at `version`.
    pub fn attached_again(&mut self, ranges: &[ByteRange], version: Version) -> Changes {
        let mut changes = Changes::default();
        for range in ranges {
            let owned = self.owned(*range);
            self.own(&owned, version, &mut changes);
        }
        self.extend_whole(ranges, version);
        changes
    }

    /// The service did not attach the guessed bytes of `contested`, because others have them. Of
    /// them `written` were written for certain and stay dirty; the rest was not. Returns the rest.
    pub fn refused(&mut self, contested: &[ByteRange], written: &[ByteRange]) -> Vec<ByteRange> {
        let mut dropped = Vec::new();
        for range in contested {
            for dirty in self.local.of_class(Class::Dirty, *range) {
                let (_, guessed) = self.by_precision(&[dirty]);
                dropped.extend(guessed);
            }
        }
        for range in &dropped {
            self.local.set(*range, None);
            self.guessed.remove(range.to_std());
        }
        // Both can be very many.
        let (rest, kept) = split_by(&dropped, written);
        self.local.set_all(&kept, Local::Dirty);
        rest
    }

    /// Whatever becomes of `range` now, it is no guess any more.
    pub(super) fn settle(&mut self, range: ByteRange) {
        if !range.is_empty() && !self.guessed.is_empty() {
            self.guessed.remove(range.to_std());
        }
    }
}
