//! What programs that publish and look up themselves ask of a view: which bytes are this node's own,
//! and whether bytes are somebody's as far as is known.

use super::FileView;
use super::local::{Class, Local};
use ebb_types::{ByteRange, NodeId, Version, split_by};
use rangemap::RangeSet;

impl FileView {
    /// Bytes that were written here and are this node's: not attached yet, or attached and not taken by
    /// others since. Sorted.
    #[must_use]
    pub fn written(&self, within: ByteRange) -> Vec<ByteRange> {
        self.of_classes(&[Class::Dirty, Class::Attaching, Class::Unflushed, Class::Flushed], within)
    }

    /// Bytes that this node attached, and nobody has taken or written again here since. Sorted.
    #[must_use]
    pub fn attached_here(&self, within: ByteRange) -> Vec<ByteRange> {
        self.of_classes(&[Class::Unflushed, Class::Flushed], within)
    }

    /// How much of the file the backing has, as far as is known.
    #[must_use]
    pub fn base_len(&self) -> u64 {
        self.known.base_len.value
    }

    fn of_classes(&self, classes: &[Class], within: ByteRange) -> Vec<ByteRange> {
        let mut all: Vec<_> =
            classes.iter().flat_map(|class| self.local.of_class(*class, within)).collect();
        all.sort_unstable();
        all
    }

    /// True when all of `range` is `owner`'s as far as is known, or nobody's where that is `owner`. What was
    /// written here is this node's. False also where nothing is known.
    #[must_use]
    pub fn belongs_to(&self, owner: NodeId, range: ByteRange) -> bool {
        let told = |part: ByteRange| {
            self.known.facts(part).all(|(_, f)| f.owner == owner && f.as_of != Version::ZERO)
        };
        let mut at = range.start();
        for (bytes, state) in self.local.overlapping(range) {
            let fits = match state {
                Local::Clean => told(bytes),
                _ => owner == self.me,
            };
            if !fits || !told(ByteRange::new(at, bytes.start())) {
                return false;
            }
            at = bytes.end();
        }
        told(ByteRange::new(at, range.end()))
    }
}

/// The bytes of a file that programs of this node attached and did not detach, whoever has taken them
/// since: an owner that was overtaken may still detach, which does nothing then.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AttachedBook(RangeSet<u64>);

impl AttachedBook {
    /// They were attached.
    pub fn attached(&mut self, ranges: &[ByteRange]) {
        ranges.iter().filter(|r| !r.is_empty()).for_each(|r| self.0.insert(r.to_std()));
    }

    /// They were detached.
    pub fn detached(&mut self, range: ByteRange) {
        if !range.is_empty() {
            self.0.remove(range.to_std());
        }
    }

    /// True when all of `range` is in the book or in `own`, which is sorted.
    #[must_use]
    pub fn covers(&self, range: ByteRange, own: &[ByteRange]) -> bool {
        let gaps = split_by(&[range], own).0;
        gaps.into_iter()
            .filter(|g| !g.is_empty())
            .all(|g| self.0.gaps(&g.to_std()).next().is_none())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FileState;
    use proptest::prelude::*;

    const END: u64 = 24;
    const ME: NodeId = NodeId(1);

    fn range() -> impl Strategy<Value = ByteRange> {
        (0..END, 1..END).prop_map(|(at, len)| ByteRange::new(at, (at + len).min(END)))
    }

    proptest! {
        /// Beside one cell for each byte.
        #[test]
        fn the_book_is_a_set_of_bytes(
            steps in prop::collection::vec((any::<bool>(), range()), 0..20), asked in range(),
            own in prop::collection::btree_set(0..END, 0..12),
        ) {
            let (mut book, mut cells) = (AttachedBook::default(), [false; END as usize]);
            for (attached, range) in steps {
                if attached { book.attached(&[range]) } else { book.detached(range) }
                cells[range.start() as usize..range.end() as usize].fill(attached);
            }
            let single: Vec<_> = own.iter().map(|at| ByteRange::at(*at, 1)).collect();
            let is = |at: u64| cells[at as usize] || own.contains(&at);
            let all = (asked.start()..asked.end()).all(is);
            prop_assert_eq!(book.covers(asked, &single), all);
        }

        /// Two nodes write, attach and look; the reference has one cell for each byte: who attached it
        /// last, and what this node has done since.
        #[test]
        fn what_is_whose(
            steps in prop::collection::vec((0_u8..4, range()), 0..24), asked in range(),
        ) {
            let mut service = FileState::new(0);
            let mut view = FileView::new(ME);
            view.apply(&service.query(ByteRange::ALL, Version::ZERO));
            let mut owner = [NodeId::NOBODY; END as usize];
            let mut dirty = [false; END as usize];
            for (step, range) in steps {
                let cells = range.start() as usize..range.end() as usize;
                match step {
                    0 => {
                        view.write(range);
                        dirty[cells].fill(true);
                    }
                    1 => {
                        let taken = view.take_unattached(range);
                        if !taken.is_empty() {
                            let version = service.attach(ME, &taken);
                            view.attached(&taken, version, service.size());
                        }
                        for at in cells.filter(|at| dirty[*at]).collect::<Vec<_>>() {
                            (dirty[at], owner[at]) = (false, ME);
                        }
                    }
                    2 => {
                        service.attach(NodeId(2), &[range]);
                        owner[cells].fill(NodeId(2));
                    }
                    _ => drop(view.apply(&service.query(ByteRange::ALL, view.known_version()))),
                }
            }
            view.apply(&service.query(ByteRange::ALL, Version::ZERO));
            let cells = || (asked.start()..asked.end()).map(|at| at as usize);
            let bytes = |ranges: &[ByteRange]| ranges.iter().map(|r| r.len()).sum::<u64>();
            let mine = cells().filter(|at| owner[*at] == ME && !dirty[*at]).count() as u64;
            prop_assert_eq!(bytes(&view.attached_here(asked)), mine);
            let written = cells().filter(|at| owner[*at] == ME || dirty[*at]).count() as u64;
            prop_assert_eq!(bytes(&view.written(asked)), written);
            for who in [NodeId::NOBODY, ME, NodeId(2)] {
                let is = |at: usize| if dirty[at] { who == ME } else { owner[at] == who };
                prop_assert_eq!(view.belongs_to(who, asked), cells().all(is), "{}", who);
            }
        }
    }
}
