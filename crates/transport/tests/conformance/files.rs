//! A source of real files whose every way to go wrong can be switched on.

use super::works::Desk;
use ebb_locks::Mutex;
use ebb_transport::{ByteSource, CopySet, Lent, SeatWork, SourceError, Subject};
use ebb_types::{ByteRange, Errno, Ino};
use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

/// Waits until `holds`, two seconds at most.
pub async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..400 {
        if holds() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("never: {what}");
}

/// How files are lent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lending {
    /// With a hold: may be sent from the page cache.
    Held,
    /// Without.
    Copied,
}

#[derive(Clone)]
struct Kept {
    file: Arc<File>,
    /// What the source believes; the file may be shorter.
    size: u64,
    cut_when_lent: Option<u64>,
    disowned: bool,
    fails: Option<Errno>,
}

pub struct Files {
    dir: tempfile::TempDir,
    lending: Lending,
    kept: Mutex<HashMap<Ino, Kept>>,
    holds: Arc<AtomicUsize>,
    /// What peers want done here.
    pub desk: Desk,
}

struct CountedHold(Arc<AtomicUsize>);

impl Drop for CountedHold {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

impl Files {
    pub fn new(lending: Lending) -> Files {
        Files {
            dir: tempfile::tempdir().unwrap(),
            lending,
            kept: Mutex::default(),
            holds: Arc::default(),
            desk: Desk::default(),
        }
    }

    /// A file of random bytes, which are returned.
    pub fn fill(&self, ino: Ino, size: u64, seed: u64) -> Vec<u8> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        // No two blocks alike, but cheap: the offset of every word, mixed with the seed.
        let salt = rng.next_u64() | 1;
        let mut content = vec![0; size as usize];
        for (i, word) in content.chunks_mut(8).enumerate() {
            let mixed = (i as u64 + 1).wrapping_mul(salt).to_be_bytes();
            word.copy_from_slice(&mixed[..word.len()]);
        }
        self.put(ino, &content, seed);
        content
    }

    /// Makes a file with this content.
    pub fn put(&self, ino: Ino, content: &[u8], seed: u64) {
        let size = content.len() as u64;
        let path = self.dir.path().join(format!("{}-{size}-{seed}", ino.0));
        let mut options = File::options();
        let mut file =
            options.read(true).write(true).create(true).truncate(true).open(path).unwrap();
        file.write_all(content).unwrap();
        self.keep(ino, file, size);
    }

    /// Takes its pages out of memory, so that reading them waits for the disk.
    pub fn forget_pages(&self, ino: Ino) {
        let file = self.kept.lock()[&ino].file.clone();
        file.sync_all().unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    }

    /// Reading it fails.
    pub fn lend_a_directory(&self, ino: Ino) {
        self.keep(ino, File::open(self.dir.path()).unwrap(), u64::MAX);
    }

    /// The next time it is lent, the file is cut before the bytes are read.
    pub fn cut_when_lent(&self, ino: Ino, to: u64) {
        self.change(ino, |kept| kept.cut_when_lent = Some(to));
    }

    /// Whether the bytes are found gone after they were sent.
    pub fn disown(&self, ino: Ino, disowned: bool) {
        self.change(ino, |kept| kept.disowned = disowned);
    }

    pub fn fail(&self, ino: Ino, errno: Option<Errno>) {
        self.change(ino, |kept| kept.fails = errno);
    }

    /// Holds that are out.
    pub fn holds(&self) -> usize {
        self.holds.load(SeqCst)
    }

    /// The last confirmation may still be under way.
    pub async fn expect_all_holds_dropped(&self) {
        eventually("all holds are dropped", || self.holds() == 0).await;
    }

    fn keep(&self, ino: Ino, file: File, size: u64) {
        let file = Arc::new(file);
        let kept = Kept { file, size, cut_when_lent: None, disowned: false, fails: None };
        self.kept.lock().insert(ino, kept);
    }

    fn change(&self, ino: Ino, change: impl FnOnce(&mut Kept)) {
        change(self.kept.lock().get_mut(&ino).unwrap());
    }
}

impl ByteSource for Files {
    fn open_read(&self, subject: Subject, ranges: &[ByteRange]) -> Result<Lent, SourceError> {
        let ino = subject.ino;
        let mut all = self.kept.lock();
        let kept = all.get_mut(&ino).ok_or(SourceError::NotHere)?;
        if let Some(errno) = kept.fails {
            return Err(SourceError::Errno(errno));
        }
        if ranges.iter().any(|r| r.end() > kept.size) {
            return Err(SourceError::NotHere);
        }
        if let Some(to) = kept.cut_when_lent.take() {
            kept.file.set_len(to).unwrap();
        }
        Ok(match self.lending {
            Lending::Copied => Lent::copied(kept.file.clone()),
            Lending::Held => {
                self.holds.fetch_add(1, SeqCst);
                Lent::held(kept.file.clone(), Box::new(CountedHold(self.holds.clone())))
            }
        })
    }

    fn still_here(&self, subject: Subject, _ranges: &[ByteRange]) -> bool {
        self.kept.lock().get(&subject.ino).is_some_and(|kept| !kept.disowned)
    }

    fn begin_copies(&self, set: CopySet) -> Result<(), Errno> {
        self.desk.begin(set)
    }

    fn keep_copies(
        &self,
        set: CopySet,
        ino: Ino,
        ranges: &[ByteRange],
        bytes: &[u8],
    ) -> Result<(), Errno> {
        self.desk.keep(set, ino, ranges, bytes)
    }

    fn drop_copies(&self, set: CopySet, ino: Ino, ranges: &[ByteRange]) -> Result<(), Errno> {
        self.desk.drop(set, ino, ranges)
    }

    fn at_seat(
        &self,
        ino: Ino,
        work: SeatWork,
        ranges: &[ByteRange],
        bytes: &[u8],
    ) -> Result<(), Errno> {
        self.desk.at_seat(ino, work, ranges, bytes)
    }
}
