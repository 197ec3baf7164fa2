//! Copies that this node keeps for others: one sparse file per inode and set, at the offsets of the
//! real file, below `CACHE/copies`, and in memory which bytes of it are there.
//!
//! Crash consistency: none is needed. A daemon that starts throws away what its predecessor kept;
//! the owners notice, and copy again to whom the service then names.

use crate::cache;
use ebb_meta_client::Holding;
use ebb_transport::CopySet;
use ebb_types::{ByteRange, Errno, Ino};
use parking_lot::Mutex;
use rangemap::RangeSet;
use std::collections::{BTreeMap, HashMap};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The copies of one pair.
#[derive(Default)]
struct Set {
    files: HashMap<Ino, RangeSet<u64>>,
    /// Its owner is lost: nothing is added any more.
    closed: bool,
    /// Somebody adopts what is in it.
    adopting: bool,
    /// All of it was adopted.
    done: bool,
}

impl Set {
    fn bytes(&self) -> u64 {
        self.files.values().map(len).sum()
    }
}

fn len(ranges: &RangeSet<u64>) -> u64 {
    ranges.iter().map(|r| r.end - r.start).sum()
}

/// All copies that are kept here. Its lock is a leaf and not held while bytes are written.
pub struct Held {
    root: PathBuf,
    sets: Mutex<BTreeMap<CopySet, Set>>,
    bytes: AtomicU64,
}

impl Held {
    /// Below a cache directory; nothing is made before it is needed.
    pub fn new(cache: &Path) -> Held {
        Held { root: cache.join("copies"), sets: Mutex::default(), bytes: AtomicU64::new(0) }
    }

    /// Gives up everything, also what an earlier daemon has left.
    pub fn clear(&self) -> io::Result<()> {
        self.sets.lock().clear();
        self.bytes.store(0, Relaxed);
        match std::fs::remove_dir_all(&self.root) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }

    /// Bytes that are kept here.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// What is kept here, for the service.
    pub fn list(&self) -> Vec<Holding> {
        let sets = self.sets.lock();
        let holding = |(set, kept): (&CopySet, &Set)| Holding {
            owner: set.owner,
            epoch: set.epoch,
            done: kept.done,
        };
        sets.iter().map(holding).collect()
    }

    fn dir(&self, set: CopySet) -> PathBuf {
        self.root.join(format!("{}-{:x}", set.owner.0, set.epoch))
    }

    fn path(&self, set: CopySet, ino: Ino) -> PathBuf {
        self.dir(set).join(format!("{:016x}", ino.0))
    }

    /// A set begins; what the same node had here before is of no use, unless it is being adopted.
    pub fn begin(&self, set: CopySet) -> Result<(), Errno> {
        let older: Vec<CopySet> = {
            let sets = self.sets.lock();
            let of_owner = || sets.iter().filter(|(s, _)| s.owner == set.owner);
            if of_owner().any(|(s, _)| s.epoch >= set.epoch) {
                return Err(Errno::ESTALE);
            }
            of_owner().filter(|(_, kept)| !kept.closed).map(|(s, _)| *s).collect()
        };
        older.into_iter().for_each(|s| self.remove(s));
        DirBuilder::new().recursive(true).mode(0o700).create(self.dir(set))?;
        self.sets.lock().insert(set, Set::default());
        Ok(())
    }

    fn is_open(&self, set: CopySet) -> bool {
        self.sets.lock().get(&set).is_some_and(|kept| !kept.closed)
    }

    /// Keeps bytes, one range after the other.
    pub fn keep(
        &self,
        set: CopySet,
        ino: Ino,
        ranges: &[ByteRange],
        bytes: &[u8],
    ) -> Result<(), Errno> {
        if !self.is_open(set) {
            return Err(Errno::ESTALE);
        }
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(self.path(set, ino))?;
        let mut rest = bytes;
        for range in ranges {
            let (now, later) = rest.split_at_checked(range.len() as usize).ok_or(Errno::EPROTO)?;
            file.write_all_at(now, range.start())?;
            rest = later;
        }
        // Written before it counts; a set that was closed or given up meanwhile does not say yes.
        let mut sets = self.sets.lock();
        let kept = sets.get_mut(&set).filter(|kept| !kept.closed).ok_or(Errno::ESTALE)?;
        let here = kept.files.entry(ino).or_default();
        let before = len(here);
        let full = ranges.iter().filter(|r| !r.is_empty());
        full.for_each(|r| here.insert(r.to_std()));
        self.bytes.fetch_add(len(here) - before, Relaxed);
        Ok(())
    }

    /// Gives up copies of a set; with no ranges it only says whether the set is kept here.
    pub fn drop_ranges(&self, set: CopySet, ino: Ino, ranges: &[ByteRange]) -> Result<(), Errno> {
        if !self.is_open(set) {
            return Err(Errno::ESTALE);
        }
        self.forget(set, ino, ranges)
    }

    /// The same, of a closed set too: they were adopted.
    pub fn forget(&self, set: CopySet, ino: Ino, ranges: &[ByteRange]) -> Result<(), Errno> {
        if ranges.is_empty() {
            return Ok(());
        }
        let file = match OpenOptions::new().write(true).open(self.path(set, ino)) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(e.into()),
        };
        // Nothing is added meanwhile: the owner waits for the answer.
        let empty = {
            let mut sets = self.sets.lock();
            let Some(kept) = sets.get_mut(&set) else { return Ok(()) };
            let Some(here) = kept.files.get_mut(&ino) else { return Ok(()) };
            let before = len(here);
            let full = ranges.iter().filter(|r| !r.is_empty());
            full.for_each(|r| here.remove(r.to_std()));
            self.bytes.fetch_sub(before - len(here), Relaxed);
            let empty = here.is_empty();
            if empty {
                kept.files.remove(&ino);
            }
            empty
        };
        if empty {
            let _ = std::fs::remove_file(self.path(set, ino));
            return Ok(());
        }
        ranges.iter().try_for_each(|r| cache::punch(&file, *r)).map_err(Errno::from)
    }

    /// The file with these copies, when every byte is here.
    pub fn open(&self, set: CopySet, ino: Ino, ranges: &[ByteRange]) -> Option<Arc<File>> {
        if !self.has(set, ino, ranges) {
            return None;
        }
        File::open(self.path(set, ino)).ok().map(Arc::new)
    }

    /// True when every byte is here.
    pub fn has(&self, set: CopySet, ino: Ino, ranges: &[ByteRange]) -> bool {
        let sets = self.sets.lock();
        let here = sets.get(&set).and_then(|kept| kept.files.get(&ino));
        let full = |r: &ByteRange| r.is_empty() || here.is_some_and(|h| covers(h, *r));
        ranges.iter().all(full)
    }

    /// The set of an epoch.
    pub fn set_of(&self, epoch: u64) -> Option<CopySet> {
        self.sets.lock().keys().find(|s| s.epoch == epoch).copied()
    }

    /// Its owner is lost: nothing is added to the set any more.
    pub fn close(&self, set: CopySet) {
        if let Some(kept) = self.sets.lock().get_mut(&set) {
            kept.closed = true;
        }
    }

    /// The same; true for the first one who wants to adopt what is in it.
    pub fn begin_adoption(&self, set: CopySet) -> bool {
        self.close(set);
        let mut sets = self.sets.lock();
        sets.get_mut(&set).is_some_and(|kept| !std::mem::replace(&mut kept.adopting, true))
    }

    /// Everything of it was adopted.
    pub fn finish(&self, set: CopySet) {
        if let Some(kept) = self.sets.lock().get_mut(&set) {
            kept.done = true;
        }
    }

    /// What is kept in a set.
    pub fn files(&self, set: CopySet) -> Vec<(Ino, Vec<ByteRange>)> {
        let sets = self.sets.lock();
        let Some(kept) = sets.get(&set) else { return Vec::new() };
        let ranges = |here: &RangeSet<u64>| here.iter().map(bytes).collect();
        kept.files.iter().map(|(ino, here)| (*ino, ranges(here))).collect()
    }

    /// The set is of no use any more.
    pub fn remove(&self, set: CopySet) {
        let Some(kept) = self.sets.lock().remove(&set) else { return };
        self.bytes.fetch_sub(kept.bytes(), Relaxed);
        if let Err(e) = std::fs::remove_dir_all(self.dir(set)) {
            tracing::warn!(owner = %set.owner, error = %e, "cannot remove copies");
        }
    }
}

/// A range of the sets as ours.
pub(super) fn bytes(range: &std::ops::Range<u64>) -> ByteRange {
    ByteRange::new(range.start, range.end)
}

/// True when every byte of a range that is not empty is in the set.
pub(super) fn covers(set: &RangeSet<u64>, range: ByteRange) -> bool {
    set.gaps(&range.to_std()).next().is_none()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_types::NodeId;
    use proptest::prelude::*;

    const LEN: u64 = 64;

    fn set(epoch: u64) -> CopySet {
        CopySet { owner: NodeId(7), epoch }
    }

    fn range() -> impl Strategy<Value = ByteRange> {
        (0..LEN, 0..LEN).prop_map(|(a, b)| ByteRange::new(a.min(b), a.max(b)))
    }

    #[derive(Clone, Debug)]
    enum Step {
        Keep(ByteRange, u8),
        Drop(ByteRange),
        Begin,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            4 => (range(), any::<u8>()).prop_map(|(r, v)| Step::Keep(r, v)),
            2 => range().prop_map(Step::Drop),
            1 => Just(Step::Begin),
        ];
        prop::collection::vec(step, 1..30)
    }

    proptest! {
        #[test]
        fn what_is_kept_is_what_was_kept_last(steps in steps()) {
            let dir = tempfile::tempdir().expect("tempdir");
            let held = Held::new(dir.path());
            let mut epoch = 1;
            let mut model: [Option<u8>; LEN as usize] = [None; LEN as usize];
            held.begin(set(epoch)).expect("begin");
            for step in steps {
                match step {
                    Step::Keep(range, value) => {
                        let bytes = vec![value; range.len() as usize];
                        held.keep(set(epoch), Ino(9), &[range], &bytes).expect("keep");
                        range.to_std().for_each(|at| model[at as usize] = Some(value));
                    }
                    Step::Drop(range) => {
                        held.drop_ranges(set(epoch), Ino(9), &[range]).expect("drop");
                        range.to_std().for_each(|at| model[at as usize] = None);
                    }
                    Step::Begin => {
                        epoch += 1;
                        held.begin(set(epoch)).expect("begin");
                        model = [None; LEN as usize];
                        prop_assert_eq!(
                            held.keep(set(epoch - 1), Ino(9), &[], &[]), Err(Errno::ESTALE)
                        );
                    }
                }
                prop_assert_eq!(held.bytes(), model.iter().flatten().count() as u64);
                for (at, value) in model.iter().enumerate() {
                    let byte = [ByteRange::at(at as u64, 1)];
                    let file = held.open(set(epoch), Ino(9), &byte);
                    prop_assert_eq!(file.is_some(), value.is_some());
                    if let (Some(file), Some(value)) = (file, value) {
                        let mut got = [0];
                        file.read_exact_at(&mut got, at as u64).expect("read");
                        prop_assert_eq!(got[0], *value);
                    }
                }
            }
        }
    }

    #[test]
    fn a_closed_set_takes_nothing_and_stays_until_it_is_removed() {
        let dir = tempfile::tempdir().expect("tempdir");
        let held = Held::new(dir.path());
        held.begin(set(3)).expect("begin");
        assert_eq!(held.begin(set(3)), Err(Errno::ESTALE), "an epoch begins once");
        assert_eq!(held.begin(set(2)), Err(Errno::ESTALE), "an old one does not come back");
        let all = [ByteRange::new(0, 4)];
        held.keep(set(3), Ino(1), &all, b"abcd").expect("keep");
        held.close(set(3));
        assert!(held.begin_adoption(set(3)) && !held.begin_adoption(set(3)));
        assert_eq!(held.keep(set(3), Ino(1), &all, b"wxyz"), Err(Errno::ESTALE));
        assert_eq!(held.drop_ranges(set(3), Ino(1), &all), Err(Errno::ESTALE));
        held.begin(set(4)).expect("the same node, back again");
        assert_eq!(held.files(set(3)), [(Ino(1), all.to_vec())]);
        held.remove(set(3));
        assert_eq!((held.bytes(), held.files(set(3)).len()), (0, 0));
        held.clear().expect("clear");
        assert!(!dir.path().join("copies").exists());
    }
}
