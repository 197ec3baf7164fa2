//! Going on with an inode that was passed through when a daemon died. Its cache file is as the kernel
//! and the dead daemon left it, and is written all the while. What the view does not know of is
//! found by the next look, against the twin, which must tell of every byte in the cache file that
//! was not written here. The twin of the dead daemon does, but for three things.

use super::track::{Track, data_blocks};
use super::twin::Keeper;
use super::{KernelId, Passing};
use crate::cache;
use crate::file::State;
use crate::heir::{Moved, Passed};
use crate::node::Node;
use ebb_consistency::claim::changed_runs;
use ebb_consistency::{FileView, Source};
use ebb_types::{ByteRange, Ino};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// What is known of such an inode.
#[derive(Debug, Default)]
pub struct Past<'a> {
    /// Bytes that were this node's as far as the dead daemon knew, and are others' now.
    pub overtaken: Vec<ByteRange>,
    /// Others' bytes that it was just putting there.
    pub moved: Option<&'a Moved>,
}

impl Passing {
    /// Takes over what the kernel goes on with. The view has what this node has today.
    pub fn inherited(
        node: &Node,
        ino: Ino,
        state: &State,
        passed: Passed,
        past: &Past<'_>,
    ) -> io::Result<Passing> {
        let view = &state.view;
        let cache = node.cache.file(ino)?;
        let held = view.unflushed_bytes() + view.clean_bytes();
        let id = KernelId::new(passed.id, &node.paths.device);
        let keeper = Keeper::new(ino, node.heir.get());
        let mut passing = Passing::new(id, passed.size, held, keeper.clone());
        if passed.tracked {
            let mut track = Track::inherited(&cache, node.paths.fine_times(), keeper)?;
            track.learn(&cache, view, past)?;
            passing.track = Some(track);
        } else {
            // Nobody writes here; what was brought here once may be zeros today.
            for piece in view.plan_read(ByteRange::new(0, view.size())) {
                if piece.source == Source::Zero {
                    cache::punch(&cache, piece.range)?;
                }
            }
        }
        // Others cut the file meanwhile, or made it longer.
        if view.published_size() < passed.size {
            passing.cut(&cache, view.size())?;
        }
        cache::extend(&cache, view.size())?;
        passing.agree(view.published_size());
        Ok(passing)
    }
}

impl Track {
    fn learn(&mut self, cache: &File, view: &FileView, past: &Past<'_>) -> io::Result<()> {
        if let Some(moved) = past.moved {
            self.arrived(cache, moved)?;
        }
        for range in &past.overtaken {
            self.remember(cache, *range)?;
        }
        self.cut_off(cache, view)
    }

    /// What is there of bytes that were being put there was put there.
    fn arrived(&mut self, cache: &File, moved: &Moved) -> io::Result<()> {
        let twin = self.twin(cache)?;
        let mut now = vec![0; moved.bytes.len()];
        cache::read_padded(cache, &mut now, moved.offset)?;
        let mut at = 0;
        let others = changed_runs(moved.offset, &now, &moved.bytes);
        let end = ByteRange::at(moved.offset + now.len() as u64, 0);
        for other in others.into_iter().chain([end]) {
            let until = (other.start() - moved.offset) as usize;
            twin.write_all_at(&now[at..until], moved.offset + at as u64)?;
            at = (other.end() - moved.offset) as usize;
        }
        Ok(())
    }

    /// What was put there and is nobody's any more, because others cut the file, is zeros.
    fn cut_off(&mut self, cache: &File, view: &FileView) -> io::Result<()> {
        let Some(twin) = self.twin_if_any() else { return Ok(()) };
        let len = twin.metadata()?.len();
        let mut gone = Vec::new();
        for block in data_blocks(twin, len)? {
            let mut at = block.start();
            for piece in view.plan_read(block) {
                if piece.source == Source::Zero {
                    gone.push(piece.range);
                }
                at = piece.range.end();
            }
            gone.push(ByteRange::new(at, block.end()));
        }
        for range in gone {
            self.vacate(cache, range)?;
        }
        Ok(())
    }

    /// Bytes as they were put there become zeros; what was written since stays.
    fn vacate(&mut self, cache: &File, range: ByteRange) -> io::Result<()> {
        let Some(twin) = self.twin_if_any().filter(|_| !range.is_empty()) else { return Ok(()) };
        let (mut now, mut then) = (vec![0; range.len() as usize], vec![0; range.len() as usize]);
        cache::read_padded(cache, &mut now, range.start())?;
        cache::read_padded(twin, &mut then, range.start())?;
        let mut at = range.start();
        let written = changed_runs(range.start(), &now, &then);
        for run in written.into_iter().chain([ByteRange::at(range.end(), 0)]) {
            cache::punch(cache, ByteRange::new(at, run.start()))?;
            at = run.end();
        }
        self.clear(range)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::passing::Stamp;
    use ebb_consistency::FileState;
    use ebb_types::{NodeId, Version};
    use proptest::prelude::*;

    const LEN: usize = 3 * 4096;

    /// What a daemon does with a file before it dies.
    #[derive(Clone, Debug)]
    enum Act {
        /// The kernel writes past it.
        Write(usize, Vec<u8>),
        /// Another node publishes bytes, which are brought here.
        Bring(usize, Vec<u8>),
    }

    fn act() -> impl Strategy<Value = Act> {
        let bytes = || prop::collection::vec(1_u8..255, 1..3000);
        let place = 0..LEN - 3000;
        prop_oneof![
            (place.clone(), bytes()).prop_map(|(at, b)| Act::Write(at, b)),
            (place, bytes()).prop_map(|(at, b)| Act::Bring(at, b)),
        ]
    }

    fn whole(file: &File) -> Vec<u8> {
        let mut bytes = vec![0; LEN];
        cache::read_padded(file, &mut bytes, 0).unwrap();
        bytes
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]
        /// Killed at any moment, also in the middle of bringing bytes here: what the next daemon
        /// finds written is exactly what was written here, as far as it differs from what was brought.
        #[test]
        fn the_next_daemon_finds_what_was_written_here(
            acts in prop::collection::vec(act(), 1..12),
            arrived in 0..3000_usize,
            both in any::<bool>(),
            cut in prop::option::of(0..LEN as u64),
        ) {
            let cache = tempfile::tempfile().unwrap();
            let mut track = Track::start(&cache, true, Keeper::default()).unwrap();
            let mut service = FileState::new(0);
            // What is there of others' bytes, and what was written over it.
            let (mut brought, mut written) = (vec![0; LEN], vec![false; LEN]);
            let mut moved = None;
            let last = acts.len() - 1;
            for (i, act) in acts.into_iter().enumerate() {
                match act {
                    Act::Write(at, bytes) => {
                        cache.write_all_at(&bytes, at as u64).unwrap();
                        written[at..at + bytes.len()].fill(true);
                    }
                    Act::Bring(at, bytes) => {
                        // Whoever follows the model does not write where others do.
                        let clash = written[at..at + bytes.len()].iter().any(|w| *w);
                        if clash { continue; }
                        service.attach(NodeId(2), &[ByteRange::at(at as u64, bytes.len() as u64)]);
                        if i < last {
                            track.merge(&cache, at as u64, &bytes).unwrap();
                            brought[at..at + bytes.len()].copy_from_slice(&bytes);
                        } else {
                            let some = &bytes[..arrived.min(bytes.len())];
                            cache.write_all_at(some, at as u64).unwrap();
                            if both {
                                track.twin(&cache).unwrap().write_all_at(some, at as u64).unwrap();
                            }
                            moved = Some(Moved { ino: Ino(1), offset: at as u64, bytes });
                        }
                    }
                }
            }
            if let Some(size) = cut {
                service.truncate(size);
            }
            // The next daemon.
            let mut view = FileView::new(NodeId(1));
            view.apply(&service.query(ByteRange::ALL, Version::ZERO));
            let past = Past { overtaken: Vec::new(), moved: moved.as_ref() };
            track.learn(&cache, &view, &past).unwrap();
            track.look(&cache, Stamp::of(&cache).unwrap(), &mut view).unwrap();
            let (now, unattached) = (whole(&cache), view.unattached(ByteRange::ALL));
            for at in 0..LEN {
                let byte = ByteRange::at(at as u64, 1);
                let is_new = unattached.iter().any(|r| r.overlaps(byte));
                prop_assert!(is_new || !written[at], "byte {} is not found", at);
                // Zeros beside what was written are claimed with their block.
                let others = !written[at] && now[at] != 0;
                prop_assert!(!others || !is_new, "byte {} was not written here", at);
            }
        }
    }
}
