//! A journal that is kept of a service elsewhere, for one that may take its place. It is of no boot of this machine, so
//! that whoever reads it asks the nodes what its end may lack.
//!
//! Consistency: there is either nothing, or a whole snapshot and what was appended after it: a new one is
//! written beside the old one, which goes on meanwhile, and takes its name when all of it is on stable storage.

use super::format::{Boot, fresh};
use super::{JournalError, StateDir, install, written_whole};
use crate::backing::Backing;
use crate::state::{self, State};
use ebb_journal::{Directory, Stored};
use ebb_namespace::BackingPath;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// What a service that begins on a copy will be told.
#[derive(Clone, Debug)]
pub struct Fits {
    /// The backing directory.
    pub backing: PathBuf,
    /// The job's model and rules, if they are named.
    pub consistency: Option<String>,
}

impl Fits {
    /// Why it cannot begin on this state.
    fn misfit(&self, state: &State) -> Option<String> {
        let backing = self.backing.display();
        let root = Backing::open(&self.backing).and_then(|b| Ok(b.stat(&BackingPath::ROOT)?));
        match root {
            Err(e) => Some(format!("backing {backing}: {e}")),
            Ok(root) if !state.is_of_backing(&root) => {
                Some(format!("it is of another backing than {backing}"))
            }
            Ok(_) => {
                let other = state.other_consistency(self.consistency.as_ref())?;
                Some(format!("the job's consistency is '{other}'"))
            }
        }
    }
}

/// Kept of another service.
pub struct Copy {
    dir: StateDir,
    fits: Option<Fits>,
    storage: Directory,
    /// It has a snapshot.
    now: Option<Kept>,
    coming: Option<Coming>,
    /// What is there is of another time, unless it is of this job.
    job: u64,
}

struct Kept {
    file: Arc<dyn Stored>,
    len: u64,
    dirty: bool,
}

#[derive(Default)]
struct Coming {
    job: u64,
    snapshot: Vec<u8>,
    since: Vec<u8>,
}

impl Copy {
    /// In a state directory that this process has to itself from now on.
    pub fn take(path: &std::path::Path, fits: Option<Fits>) -> Result<Copy, JournalError> {
        let dir = StateDir::take(path)?;
        let storage = Directory::new(&dir.path);
        Ok(Copy { dir, fits, storage, now: None, coming: None, job: 0 })
    }

    /// What was kept of a service that is followed no longer stays, and nothing is added to it.
    pub fn begin(&mut self) {
        self.now = None;
        self.coming = None;
    }

    /// A snapshot begins, of the moment after all records so far.
    pub fn snapshot_begins(&mut self, job: u64) {
        self.coming = Some(Coming { job, ..Coming::default() });
    }

    /// A piece of it.
    pub fn snapshot(&mut self, piece: &[u8]) -> Result<(), JournalError> {
        let coming = self.coming.as_mut().ok_or(io::ErrorKind::InvalidData);
        coming.map_err(|e| failed(self.dir.journal(), e.into()))?.snapshot.extend_from_slice(piece);
        Ok(())
    }

    /// That was all of it: it takes the place of the one before, if it can be read.
    pub fn snapshot_ends(&mut self) -> Result<(), JournalError> {
        let coming = self.coming.take().ok_or(io::ErrorKind::InvalidData);
        let Coming { job, snapshot, since } =
            coming.map_err(|e| failed(self.dir.journal(), e.into()))?;
        let mut bytes = fresh(job, Boot(0), &snapshot);
        drop(snapshot);
        bytes.extend_from_slice(&since);
        let what = |what| JournalError::Header { path: self.dir.journal(), what };
        if job == 0 {
            return Err(what("it is of no job".to_owned()));
        }
        let state = state::replay(&super::judge(&bytes)?.bodies).map_err(what)?;
        if let Some(misfit) = self.fits.as_ref().and_then(|fits| fits.misfit(&state)) {
            return Err(what(misfit));
        }
        drop(state);
        if std::mem::replace(&mut self.job, job) != job
            && let Some(aside) = self.dir.set_aside()?
        {
            tracing::warn!(journal = %aside.display(), "the journal that was here is kept there");
        }
        let file = written_whole(&self.storage, &bytes).and_then(|file| {
            install(&self.storage)?;
            Ok(file)
        });
        let file = file.map_err(|e| failed(self.dir.journal(), e))?;
        self.now = Some(Kept { file, len: bytes.len() as u64, dirty: false });
        Ok(())
    }

    /// Framed records, or pieces of them, in order.
    pub fn records(&mut self, bytes: &[u8]) -> Result<(), JournalError> {
        if let Some(coming) = &mut self.coming {
            coming.since.extend_from_slice(bytes);
        }
        let Some(now) = self.now.as_mut().filter(|_| !bytes.is_empty()) else { return Ok(()) };
        let written = now.file.write_at(bytes, now.len);
        written.map_err(|e| failed(self.dir.journal(), e))?;
        now.len += bytes.len() as u64;
        now.dirty = true;
        Ok(())
    }

    /// Brings it to stable storage. False: there is nothing yet.
    pub fn sync(&mut self) -> Result<bool, JournalError> {
        let Some(now) = &mut self.now else { return Ok(false) };
        if std::mem::take(&mut now.dirty) {
            now.file.sync().map_err(|e| failed(self.dir.journal(), e))?;
        }
        Ok(true)
    }
}

fn failed(path: PathBuf, source: io::Error) -> JournalError {
    JournalError::Io { path, source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::{Journal, frame};
    use crate::state::Entry;
    use proptest::prelude::*;

    fn body(n: u32) -> Vec<u8> {
        state::encode(&[Entry::NextNode(n)])
    }

    fn framed(n: u32) -> Vec<u8> {
        let mut out = Vec::new();
        frame(&mut out, &body(n));
        out
    }

    #[derive(Clone, Debug)]
    enum Act {
        Append,
        Take,
        /// A record can come in pieces.
        TakeInPieces(usize),
        /// The connection was broken.
        Anew,
        Begin,
        Piece(usize),
        End,
        Sync,
    }

    fn act() -> impl Strategy<Value = Act> {
        prop_oneof![
            6 => Just(Act::Append),
            4 => Just(Act::Take),
            2 => (0_usize..40).prop_map(Act::TakeInPieces),
            1 => Just(Act::Anew),
            1 => Just(Act::Begin),
            3 => (1_usize..40).prop_map(Act::Piece),
            1 => Just(Act::End),
            1 => Just(Act::Sync),
        ]
    }

    /// The bodies of the journal that is there.
    fn kept(dir: &std::path::Path) -> Option<Vec<Vec<u8>>> {
        let bytes = std::fs::read(dir.join("journal")).ok()?;
        let read = super::super::judge(&bytes).expect("it can be read");
        assert!(read.rebooted && read.job == 7, "whoever reads it asks the nodes");
        Some(read.bodies)
    }

    proptest! {
        /// Whatever is sent when: what is there is a snapshot and everything after it that was sent.
        #[test]
        fn a_copy_is_a_snapshot_and_all_that_came_after_it(
            acts in proptest::collection::vec(act(), 1..80),
        ) {
            let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
            let dir = StateDir::take(here.path()).unwrap();
            let journal = Journal::start(dir, 7, &framed(1)).unwrap();
            let mut copy = Copy::take(there.path(), None).unwrap();
            let tap = journal.follow();
            // The last one that was appended, and sent; that of the snapshot that is coming, and of the one there is.
            let (mut last, mut sent) = (1, 1);
            let mut coming: Option<(u32, Vec<u8>)> = None;
            let mut there_is: Option<u32> = None;
            let mut stays = None;
            for act in acts {
                match act {
                    Act::Append => {
                        last += 1;
                        journal.append(&body(last));
                    }
                    Act::Take => {
                        let records = tap.take();
                        prop_assert!(!records.lost);
                        copy.records(&records.bytes).unwrap();
                        sent = last;
                    }
                    Act::TakeInPieces(at) => {
                        let records = tap.take();
                        let (one, two) = records.bytes.split_at(at.min(records.bytes.len()));
                        copy.records(one).unwrap();
                        copy.records(two).unwrap();
                        sent = last;
                    }
                    Act::Anew => {
                        copy.begin();
                        coming = None;
                        // What is there stays as it is.
                        if let Some(of) = there_is.take() {
                            stays = Some((of..=sent).map(body).collect::<Vec<_>>());
                        }
                        prop_assert!(!copy.sync().unwrap());
                    }
                    Act::Begin => {
                        copy.records(&tap.take().bytes).unwrap();
                        sent = last;
                        copy.snapshot_begins(7);
                        coming = Some((last, framed(last)));
                    }
                    Act::Piece(len) => if let Some((_, rest)) = &mut coming {
                        let piece: Vec<u8> = rest.drain(..len.min(rest.len())).collect();
                        copy.snapshot(&piece).unwrap();
                    },
                    Act::End => match coming.take() {
                        Some((of, rest)) => {
                            copy.snapshot(&rest).unwrap();
                            copy.snapshot_ends().unwrap();
                            there_is = Some(of);
                        }
                        None => prop_assert!(copy.snapshot_ends().is_err()),
                    },
                    Act::Sync => prop_assert_eq!(copy.sync().unwrap(), there_is.is_some()),
                }
                let want = there_is.map(|of| (of..=sent).map(body).collect::<Vec<_>>());
                prop_assert_eq!(kept(there.path()), want.or_else(|| stays.clone()));
            }
            journal.stop();
        }
    }

    /// What was there before is kept; what cannot be read does not take its place.
    #[test]
    fn nonsense_takes_nobodys_place() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("journal"), "of before").unwrap();
        let mut copy = Copy::take(dir.path(), None).unwrap();
        assert!(Copy::take(dir.path(), None).is_err(), "it is this one's");
        assert!(copy.snapshot(b"x").is_err(), "none has begun");
        copy.snapshot_begins(7);
        let mut wrong = Vec::new();
        frame(&mut wrong, b"no entries of a state");
        copy.snapshot(&wrong).unwrap();
        assert!(copy.snapshot_ends().is_err());
        assert_eq!(std::fs::read(dir.path().join("journal")).unwrap(), b"of before");
        assert!(!copy.sync().unwrap(), "there is nothing");
        copy.snapshot_begins(7);
        copy.snapshot(&framed(3)).unwrap();
        copy.snapshot_ends().unwrap();
        assert_eq!(kept(dir.path()), Some(vec![body(3)]));
        let aside = |e: &std::fs::DirEntry| e.file_name().to_string_lossy().contains("before");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().flatten().filter(aside).count(), 1);
        copy.begin();
        copy.records(&framed(4)).unwrap();
        assert_eq!(
            kept(dir.path()),
            Some(vec![body(3)]),
            "nothing is added to what is not followed"
        );
    }

    /// With one who keeps it, a record is on stable storage when he has it, or is not counted on any more.
    #[test]
    fn who_is_counted_on_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let journal = Journal::start(StateDir::take(dir.path()).unwrap(), 7, &framed(1)).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let keeper = journal.keepers().count_on(journal.tail());
            let other = journal.keepers().count_on(journal.tail());
            let lsn = journal.append(&body(2));
            journal.written(lsn).await.unwrap();
            let short = std::time::Duration::from_millis(300);
            assert!(tokio::time::timeout(short, journal.synced(lsn)).await.is_err());
            assert!(journal.synced_so_far() < lsn);
            keeper.has(lsn);
            assert!(tokio::time::timeout(short, journal.synced(lsn)).await.is_err(), "not all");
            drop(other);
            tokio::time::timeout(short * 10, journal.synced(lsn)).await.unwrap().unwrap();
            assert_eq!(journal.synced_so_far(), lsn);
            let next = journal.append(&body(3));
            journal.written(next).await.unwrap();
            assert!(tokio::time::timeout(short, journal.synced(next)).await.is_err());
            drop(keeper);
            journal.synced(next).await.unwrap();
        });
        journal.stop();
    }
}
