//! Which node fetches which unowned bytes, and so has a copy of them soon: nodes that stage the
//! same files share the reading. Hints only, in memory only: whoever asks a node for a copy names
//! the version that it must be good for, and reads the backing when there is none.

use ebb_types::{ByteRange, Ino, NodeId, Version};
use rangemap::RangeMap;
use std::collections::HashMap;

/// Entries above this are thrown away together.
const ENTRIES_MAX: usize = 1 << 18;

/// A part of a file, and who has it or fetches it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The bytes.
    pub range: ByteRange,
    /// The node.
    pub node: NodeId,
}

/// The holders of all files.
#[derive(Debug, Default)]
pub struct Copies {
    files: HashMap<Ino, Held>,
    entries: usize,
}

#[derive(Debug, Default)]
struct Held {
    /// Copies of bytes that changed since are of no use.
    base: Version,
    by: RangeMap<u64, NodeId>,
}

impl Copies {
    /// Who has `range`: what nobody has is `node`'s from now on. With `take` all of it is, because
    /// the others did not have it after all. `is_there` says which nodes can be asked.
    pub fn share(
        &mut self,
        (ino, base): (Ino, Version),
        range: ByteRange,
        node: NodeId,
        take: bool,
        is_there: impl Fn(NodeId) -> bool,
    ) -> Vec<Holder> {
        if range.is_empty() {
            return Vec::new();
        }
        if self.entries > ENTRIES_MAX {
            *self = Copies::default();
        }
        let held = self.files.entry(ino).or_default();
        let before = held.by.len();
        if held.base != base {
            *held = Held { base, by: RangeMap::new() };
        }
        let wanted = range.to_std();
        let others: Vec<_> = held
            .by
            .overlapping(&wanted)
            .filter(|(_, n)| !take && is_there(**n))
            .map(|(r, n)| (r.start.max(wanted.start)..r.end.min(wanted.end), *n))
            .collect();
        held.by.insert(wanted.clone(), node);
        others.into_iter().for_each(|(r, n)| held.by.insert(r, n));
        self.entries = self.entries - before + held.by.len();
        let clipped = |(r, n): (&std::ops::Range<u64>, &NodeId)| Holder {
            range: ByteRange::new(r.start.max(wanted.start), r.end.min(wanted.end)),
            node: *n,
        };
        held.by.overlapping(&wanted).map(clipped).collect()
    }

    /// The file is gone.
    pub fn forget(&mut self, ino: Ino) {
        if let Some(held) = self.files.remove(&ino) {
            self.entries -= held.by.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const UNITS: usize = 24;

    proptest! {
        /// Against an array with the holder of every byte.
        #[test]
        fn every_byte_has_one_holder_that_can_be_asked(
            steps in prop::collection::vec(
                (1..4u32, 0..UNITS, 0..9usize, prop::bool::weighted(0.2), 0..3u64, 0..4u32), 1..60,
            ),
        ) {
            let mut copies = Copies::default();
            let mut reference = [0u32; UNITS + 9];
            let mut base = 0;
            for (node, start, len, take, newer, gone) in steps {
                if newer == 0 {
                    base += 1;
                    reference = [0; UNITS + 9];
                }
                let range = ByteRange::new(start as u64, (start + len) as u64);
                let file = (Ino(7), Version(base));
                let said = copies.share(file, range, NodeId(node), take, |n| n.0 != gone);
                for holder in &mut reference[start..start + len] {
                    if take || *holder == 0 || *holder == gone {
                        *holder = node;
                    }
                }
                let mut at = range.start();
                for holder in &said {
                    prop_assert_eq!(holder.range.start(), at);
                    at = holder.range.end();
                    let units = &reference[holder.range.start() as usize..at as usize];
                    prop_assert!(units.iter().all(|n| *n == holder.node.0));
                }
                prop_assert_eq!(at, range.end());
                let kept: usize = copies.files.values().map(|h| h.by.len()).sum();
                prop_assert_eq!(copies.entries, kept);
            }
            copies.forget(Ino(7));
            prop_assert_eq!(copies.entries, 0);
        }
    }
}
