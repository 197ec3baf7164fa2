//! Copies that this node keeps for others: one sparse file per inode and set, at the offsets of the
//! real file, below `CACHE/copies`; in memory, and in the log of the set, which bytes of it are there.
//!
//! Crash consistency: bytes are written before the log says that they are here, and the log says
//! that they are not before they go, so a daemon that starts on the cache knows what its
//! predecessor acknowledged ([`Held::load`]). Such a set takes nothing more: its owner, when it
//! lives, begins another one. After a boot of the machine nothing is believed ([`log`]).
//!
//! Lock order: the log of a set, then the sets (a leaf, never held while something is written).

use crate::cache;
use crate::replica::log::{self, Files, Log, Record};
use ebb_locks::Mutex;
use ebb_meta_client::Holding;
use ebb_transport::CopySet;
use ebb_types::{ByteRange, Errno, Ino};
use rangemap::RangeSet;
use std::collections::BTreeMap;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The copies of one pair.
struct Set {
    files: Files,
    log: Arc<Mutex<Log>>,
    /// Its owner is lost, or an earlier daemon began it: nothing is added any more.
    closed: bool,
    /// Somebody adopts what is in it.
    adopting: bool,
    /// All of it was adopted.
    done: bool,
}

impl Set {
    fn new(files: Files, log: Log, closed: bool) -> Set {
        Set { files, log: Arc::new(Mutex::new(log)), closed, adopting: false, done: false }
    }

    fn bytes(&self) -> u64 {
        self.files.values().map(|kept| len(&kept.here)).sum()
    }
}

fn len(ranges: &RangeSet<u64>) -> u64 {
    ranges.iter().map(|r| r.end - r.start).sum()
}

/// All copies that are kept here.
pub struct Held {
    root: PathBuf,
    sets: Mutex<BTreeMap<CopySet, Set>>,
    bytes: AtomicU64,
    /// Inode numbers mean something only within a job.
    job: AtomicU64,
}

fn root_of(cache: &Path) -> PathBuf {
    cache.join("copies")
}

/// The directories of sets below a root.
fn sets_below(root: &Path) -> io::Result<Vec<PathBuf>> {
    match std::fs::read_dir(root) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(e),
        Ok(found) => found.map(|entry| Ok(entry?.path())).collect(),
    }
}

/// True when an earlier daemon of this boot has left copies in a cache.
pub fn are_left_in(cache: &Path) -> bool {
    let left = |dir: &PathBuf| {
        log::read(dir, None).is_ok_and(|found| found.is_some_and(|(_, files, _)| !files.is_empty()))
    };
    sets_below(&root_of(cache)).is_ok_and(|dirs| dirs.iter().any(left))
}

impl Held {
    /// Below a cache directory; nothing is made before it is needed.
    pub fn new(cache: &Path) -> Held {
        Held {
            root: root_of(cache),
            sets: Mutex::default(),
            bytes: AtomicU64::new(0),
            job: AtomicU64::new(0),
        }
    }

    /// Takes over what an earlier daemon kept in this job; everything else goes. To be called before
    /// anything is kept.
    pub fn load(&self, job: u64) -> io::Result<()> {
        self.job.store(job, Relaxed);
        for dir in sets_below(&self.root)? {
            match self.load_set(&dir, job) {
                Ok(Some((set, kept))) => {
                    tracing::info!(owner = %set.owner, bytes = kept.bytes(), "copies are here again");
                    self.bytes.fetch_add(kept.bytes(), Relaxed);
                    self.sets.lock().insert(set, kept);
                    continue;
                }
                Ok(None) => tracing::info!(dir = %dir.display(), "copies of no use"),
                Err(e) => tracing::warn!(dir = %dir.display(), error = %e, "copies without a log"),
            }
            log::remove(&dir);
            std::fs::remove_dir_all(&dir)?;
        }
        Ok(())
    }

    fn load_set(&self, dir: &Path, job: u64) -> io::Result<Option<(CopySet, Set)>> {
        let Some((set, files, log)) = log::read(dir, Some(job))? else { return Ok(None) };
        let is_whole = |ino: &Ino| {
            let end = files.get(ino).and_then(|kept| kept.here.last()).map_or(0, |r| r.end);
            std::fs::metadata(self.path(set, *ino)).is_ok_and(|m| m.len() >= end)
        };
        if self.dir(set) != dir || files.is_empty() || !files.keys().all(is_whole) {
            return Ok(None);
        }
        Ok(Some((set, Set::new(files, log, true))))
    }

    /// Gives up everything, also what an earlier daemon has left.
    pub fn clear(&self) -> io::Result<()> {
        self.sets.lock().clear();
        self.bytes.store(0, Relaxed);
        for dir in sets_below(&self.root)? {
            log::remove(&dir);
        }
        match std::fs::remove_dir_all(&self.root) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }

    /// Bytes that are kept here.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// Bytes of one set.
    pub fn bytes_in(&self, set: CopySet) -> u64 {
        self.sets.lock().get(&set).map_or(0, Set::bytes)
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
        let log = Log::begin(self.dir(set), set, self.job.load(Relaxed))?;
        self.sets.lock().insert(set, Set::new(Files::new(), log, false));
        Ok(())
    }

    fn is_open(&self, set: CopySet) -> bool {
        self.sets.lock().get(&set).is_some_and(|kept| !kept.closed)
    }

    /// Makes a record true, in the log first; whether the set has anything of the file then.
    fn note(&self, set: CopySet, ino: Ino, record: &Record) -> Result<bool, Errno> {
        let log = self.sets.lock().get(&set).map(|kept| Arc::clone(&kept.log));
        let log = log.ok_or(Errno::ESTALE)?;
        let mut log = log.lock();
        log.append(record)?;
        let (is_left, long) = {
            let mut sets = self.sets.lock();
            let adds = matches!(record, Record::Kept(..));
            // A set that was closed or given up meanwhile does not say yes.
            let kept = sets.get_mut(&set).filter(|kept| !(adds && kept.closed));
            let kept = kept.ok_or(Errno::ESTALE)?;
            let (came, went) = log::apply(&mut kept.files, record);
            self.bytes.fetch_add(came, Relaxed);
            self.bytes.fetch_sub(went, Relaxed);
            let long = log.is_long().then(|| kept.files.clone());
            (kept.files.contains_key(&ino), long)
        };
        if let Some(files) = long
            && let Err(e) = log.compact(&files)
        {
            tracing::warn!(owner = %set.owner, error = %e, "the log of copies stays long");
        }
        Ok(is_left)
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
        // Written before it counts.
        self.note(set, ino, &Record::Kept(ino, ranges.to_vec())).map(drop)
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
        let is_known = |kept: &Set| kept.files.contains_key(&ino);
        if ranges.is_empty() || !self.sets.lock().get(&set).is_some_and(is_known) {
            return Ok(());
        }
        let file = OpenOptions::new().write(true).open(self.path(set, ino))?;
        // Nothing is added meanwhile: the owner waits for the answer.
        if self.note(set, ino, &Record::Dropped(ino, ranges.to_vec()))? {
            return ranges.iter().try_for_each(|r| cache::punch(&file, *r)).map_err(Errno::from);
        }
        let _ = std::fs::remove_file(self.path(set, ino));
        Ok(())
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
        let kept = sets.get(&set).and_then(|kept| kept.files.get(&ino));
        let full = |r: &ByteRange| r.is_empty() || kept.is_some_and(|k| covers(&k.here, *r));
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

    /// The service is going to be asked for these bytes of a file, and for no others of it. None: it
    /// said no.
    pub fn note_adopting(&self, set: CopySet, ino: Ino, ranges: &[ByteRange]) -> Result<(), Errno> {
        self.note(set, ino, &Record::Adopting(ino, ranges.to_vec())).map(drop)
    }

    /// Of which bytes of a file the service was asked, without a word that they are stored.
    pub fn adopting(&self, ino: Ino) -> Vec<(CopySet, Vec<ByteRange>)> {
        let sets = self.sets.lock();
        let of_file = |(set, kept): (&CopySet, &Set)| {
            let asked: Vec<ByteRange> = kept.files.get(&ino)?.adopting.iter().map(bytes).collect();
            (!asked.is_empty()).then_some((*set, asked))
        };
        sets.iter().filter_map(of_file).collect()
    }

    /// All files of which that can be said.
    pub fn files_adopting(&self) -> Vec<Ino> {
        let sets = self.sets.lock();
        let files = sets.values().flat_map(|kept| kept.files.iter());
        files.filter(|(_, kept)| !kept.adopting.is_empty()).map(|(ino, _)| *ino).collect()
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
        kept.files.iter().map(|(ino, k)| (*ino, k.here.iter().map(bytes).collect())).collect()
    }

    /// The set is of no use any more.
    pub fn remove(&self, set: CopySet) {
        let Some(kept) = self.sets.lock().remove(&set) else { return };
        self.bytes.fetch_sub(kept.bytes(), Relaxed);
        // Nobody writes the log anew meanwhile.
        let _log = kept.log.lock();
        log::remove(&self.dir(set));
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
        Restart,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            4 => (range(), any::<u8>()).prop_map(|(r, v)| Step::Keep(r, v)),
            2 => range().prop_map(Step::Drop),
            1 => Just(Step::Begin),
            1 => Just(Step::Restart),
        ];
        prop::collection::vec(step, 1..30)
    }

    proptest! {
        #[test]
        fn what_is_kept_is_what_was_kept_last(steps in steps()) {
            let dir = tempfile::tempdir().expect("tempdir");
            let mut held = Held::new(dir.path());
            let (mut epoch, mut closed) = (1, false);
            let mut model: [Option<u8>; LEN as usize] = [None; LEN as usize];
            held.begin(set(epoch)).expect("begin");
            for step in steps {
                // What an earlier daemon kept stays as it is.
                let begins = matches!(step, Step::Begin | Step::Restart);
                if closed && !begins {
                    continue;
                }
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
                        if closed {
                            held.remove(set(epoch));
                        }
                        (epoch, closed) = (epoch + 1, false);
                        held.begin(set(epoch)).expect("begin");
                        model = [None; LEN as usize];
                        prop_assert_eq!(
                            held.keep(set(epoch - 1), Ino(9), &[], &[]), Err(Errno::ESTALE)
                        );
                    }
                    Step::Restart => {
                        held = Held::new(dir.path());
                        held.load(0).expect("load");
                        prop_assert_eq!(held.list().is_empty(), model.iter().all(Option::is_none));
                        prop_assert_eq!(are_left_in(dir.path()), !held.list().is_empty());
                        prop_assert_eq!(
                            held.keep(set(epoch), Ino(9), &[], &[]), Err(Errno::ESTALE)
                        );
                        closed = true;
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
    fn what_is_loaded_is_of_this_job_and_whole() {
        let all = [ByteRange::new(0, 4)];
        let kept_by = |held: &Held| {
            held.load(7).expect("load");
            held.begin(set(3)).expect("begin");
            held.keep(set(3), Ino(1), &all, b"abcd").expect("keep");
            held.note_adopting(set(3), Ino(1), &all).expect("note");
        };
        let loaded = |job: u64, harm: &dyn Fn(PathBuf)| {
            let dir = tempfile::tempdir().expect("tempdir");
            let held = Held::new(dir.path());
            kept_by(&held);
            harm(held.path(set(3), Ino(1)));
            let held = Held::new(dir.path());
            held.load(job).expect("load");
            (held.bytes(), held.adopting(Ino(1)), held.dir(set(3)).exists())
        };
        assert_eq!(loaded(7, &|_| {}), (4, vec![(set(3), all.to_vec())], true));
        assert_eq!(loaded(8, &|_| {}), (0, vec![], false), "of another job");
        let cut = |file: PathBuf| {
            let file = OpenOptions::new().write(true).open(file).expect("open");
            file.set_len(3).expect("cut");
        };
        assert_eq!(loaded(7, &cut), (0, vec![], false), "a byte is missing");
        let gone = |file: PathBuf| std::fs::remove_file(file).expect("remove");
        assert_eq!(loaded(7, &gone), (0, vec![], false), "a file is missing");
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
