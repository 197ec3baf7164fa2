//! The node journal: what of this node's cache is not on the backing, so that a daemon that takes
//! the cache over, or `ebb recover`, knows it again. Records are in
//! [`record`], what they add up to in [`image`], the bytes on disk in [`format`]; this is the file that is appended to.
//!
//! # Consistency
//! A record is *pushed* under the lock of the file state that it tells of, so the order of
//! records is the order of changes; pushing never waits for the disk. It is *written* (write(2)
//! returned: it survives the daemon) by whoever must be sure of it, for everybody: a sync event
//! writes before it sends an attach and before it answers the application. Nothing else writes,
//! but a look every second that notes unpublished bytes. It is *synced* (it survives the machine)
//! by fsync under `--durability local`, after the cache file was synced; never otherwise.
//!
//! # Retries
//! What could not be written (the disk is full) stays queued and is written by the next who
//! writes; the caller fails. After a sync that failed nobody knows what the disk has: fsync fails
//! until the next compaction, at most a second later, has made a new file.
//!
//! # Crash consistency
//! Appends make a prefix; a compacted journal replaces the old one by rename after it was synced.
//!
//! Lock order: `sync_turn` (held across fdatasync: a queue of those who want one) before `out`
//! before `queue`; a file's state before `queue`.

pub mod format;
pub mod image;
mod note;
mod record;

pub use format::{Found, JournalError, boot_id, path_in, read, records};
pub use image::Image;
pub use note::{Note, remember_cut};
pub use record::{Header, Held, Home, Kept, Life, Record, Seen};

use ebb_handover::{Mark, Ring};
use ebb_journal::{Directory, Storage, Stored};
use ebb_locks::Mutex;
use ebb_types::facts::Moment;
use ebb_types::{ByteRange, Errno, Facts, Ino, Subjects, Version};
use format::NAME;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// So much room is kept for the journal beyond its end: when the disk is full, what makes room
/// must still be noted.
const RESERVED_BYTES: u64 = 256 << 10;

/// A journal smaller than this is not worth compacting.
const COMPACT_BYTES: u64 = 1 << 20;

/// What is known of a file when it is first noted.
pub struct Introduction {
    /// Its name and attributes.
    pub header: Header,
    /// No other node has it.
    pub alone: bool,
    /// Where this node cut it.
    pub cuts: Vec<(u64, Version)>,
}

struct Queue {
    image: Image,
    /// Pushed and not written.
    bytes: Vec<u8>,
    /// Where that is, too, so that it survives this daemon.
    ring: Option<Ring>,
    /// Everything pushed so far, in bytes of all the journal's files.
    pushed: u64,
    /// The number of the last request about names.
    asked: u64,
    /// Requests about names that nobody waits for any more, and that may have been done.
    unanswered: BTreeSet<u64>,
}

impl Queue {
    fn new(image: Image) -> Queue {
        // Whoever has sent those is no more.
        let unanswered: BTreeSet<u64> = image.asked.keys().copied().collect();
        let asked = unanswered.last().copied().unwrap_or(0);
        Queue { image, bytes: Vec::new(), ring: None, pushed: 0, asked, unanswered }
    }
}

struct Out {
    file: Arc<dyn Stored>,
    /// Its length, as far as it is whole records.
    len: u64,
    /// `Queue::pushed` of an offset in this file is the offset and this.
    base: i128,
    snapshot_len: u64,
    broken: bool,
}

/// The journal of a running daemon.
pub struct Journal {
    storage: Arc<dyn Storage>,
    queue: Mutex<Queue>,
    out: Mutex<Out>,
    /// Up to where it is synced, as `Queue::pushed` counts.
    sync_turn: Mutex<u64>,
    /// The last write failed.
    is_full: AtomicBool,
}

impl Journal {
    /// Begins a journal with what is known, in the place of an older one.
    pub fn start(cache: &Path, image: Image) -> Result<Journal, JournalError> {
        let failed = |source| JournalError::Io { path: path_in(cache), source };
        Journal::start_on(Arc::new(Directory::new(cache)), image).map_err(failed)
    }

    fn start_on(storage: Arc<dyn Storage>, image: Image) -> io::Result<Journal> {
        let (file, len) = replace(&*storage, &image)?;
        let out = Out { file, len, base: -i128::from(len), snapshot_len: len, broken: false };
        Ok(Journal {
            storage,
            queue: Mutex::new(Queue::new(image)),
            out: Mutex::new(out),
            sync_turn: Mutex::new(0),
            is_full: AtomicBool::new(false),
        })
    }

    /// From now on what is pushed survives this daemon before it is written.
    pub fn mirror(&self, ring: Ring) {
        self.queue.lock().ring = Some(ring);
    }

    /// Notes what happened. Never waits for the disk, unless there is a ring and it is full.
    pub fn push(&self, record: &Record) {
        let kept = self.queue.lock().push(record);
        self.write_unless(kept);
    }

    /// What did not fit into the ring.
    fn write_unless(&self, kept: bool) {
        // What cannot be written now stays queued, as without a ring.
        if !kept && let Err(e) = self.write() {
            tracing::warn!(error = %e, "the node journal cannot be written");
        }
    }

    /// The same for something that may need the file to be introduced first.
    pub fn push_about(&self, ino: Ino, header: impl FnOnce() -> Introduction, record: &Record) {
        let mut queue = self.queue.lock();
        if queue.image.file(ino).is_none() {
            let file = header();
            // When this one is not kept, the next is not either.
            let _ = queue.push(&Record::File(ino, Box::new(file.header)));
            if file.alone {
                let _ = queue.push(&Record::Alone(ino, true));
            }
            if !file.cuts.is_empty() {
                let _ = queue.push(&Record::Cuts(ino, file.cuts));
            }
        }
        let kept = queue.push(record);
        drop(queue);
        self.write_unless(kept);
    }

    /// This node cuts what may be in other nodes' caches. Where there never were others nothing is noted.
    pub fn push_overrides(&self, ino: Ino, header: impl FnOnce() -> Introduction) {
        let noted = self.overrides(ino);
        let shared = self.queue.lock().image.book.is_shared();
        if shared && !noted {
            self.push_about(ino, header, &Record::Overrides(ino));
        }
    }

    /// The same for something that matters only when the file is known already.
    pub fn push_if_known(&self, ino: Ino, record: &Record) -> bool {
        let mut queue = self.queue.lock();
        let known = queue.image.file(ino).is_some();
        let kept = !known || queue.push(record);
        drop(queue);
        self.write_unless(kept);
        known
    }

    /// The same for what is noted of a file besides its bytes: made of what was, and kept when it differs.
    pub fn renew_header(&self, ino: Ino, renew: impl FnOnce(&Header) -> Header) -> bool {
        let mut queue = self.queue.lock();
        let Some(note) = queue.image.file(ino) else { return false };
        let new = renew(&note.header);
        let kept = new == note.header || queue.push(&Record::File(ino, Box::new(new)));
        drop(queue);
        self.write_unless(kept);
        true
    }

    /// True when something may be written to the file without a record of it.
    #[must_use]
    pub fn is_untold(&self, ino: Ino) -> bool {
        self.queue.lock().image.file(ino).is_some_and(Note::is_untold)
    }

    /// True when bytes of the file are noted that the backing has not.
    #[must_use]
    pub fn holds(&self, ino: Ino) -> bool {
        self.queue.lock().image.file(ino).is_some_and(|note| !note.is_empty())
    }

    /// True when bytes in these ranges are noted that were synced, and that the backing has not.
    #[must_use]
    pub fn has_durable(&self, ino: Ino, mut ranges: impl Iterator<Item = ByteRange>) -> bool {
        let queue = self.queue.lock();
        let Some(note) = queue.image.file(ino) else { return false };
        ranges.any(|range| note.held_in(range).iter().any(|(_, held)| held.durable))
    }

    /// Bytes in these ranges that are noted as published and on the backing nowhere, with their versions.
    #[must_use]
    pub fn owned_in(&self, ino: Ino, ranges: &[ByteRange]) -> Vec<(ByteRange, Version)> {
        let queue = self.queue.lock();
        let Some(note) = queue.image.file(ino) else { return Vec::new() };
        let held = ranges.iter().flat_map(|range| note.held_in(*range));
        let owned = held.filter_map(|(range, held)| match held.kept {
            Kept::Owned(version) => Some((range, version)),
            _ => None,
        });
        owned.collect()
    }

    /// True when it is noted that no other node has the file.
    #[must_use]
    pub fn is_alone(&self, ino: Ino) -> bool {
        self.queue.lock().image.file(ino).is_some_and(|note| note.alone)
    }

    /// Notes whether others have the file, where that changes what is noted.
    pub fn push_alone(&self, ino: Ino, alone: bool) {
        let mut queue = self.queue.lock();
        let note = queue.image.file(ino);
        let news = note.is_some_and(|note| note.would_be_alone(alone) != note.alone);
        let kept = !news || queue.push(&Record::Alone(ino, alone));
        drop(queue);
        self.write_unless(kept);
    }

    /// True when it is noted that other nodes must hear of its cuts.
    #[must_use]
    pub fn overrides(&self, ino: Ino) -> bool {
        self.queue.lock().image.file(ino).is_some_and(|note| note.overrides)
    }

    /// True when something of the file is noted.
    #[must_use]
    pub fn knows(&self, ino: Ino) -> bool {
        self.queue.lock().image.file(ino).is_some()
    }

    /// True when it is noted that others have bytes of the file.
    #[must_use]
    pub fn is_shared(&self, ino: Ino) -> bool {
        self.queue.lock().image.file(ino).is_some_and(|note| note.header.shared)
    }

    /// The parts of `ranges` that are not noted as written.
    #[must_use]
    pub fn not_written(&self, ino: Ino, ranges: &[ByteRange]) -> Vec<ByteRange> {
        let queue = self.queue.lock();
        queue.image.file(ino).map_or_else(|| ranges.to_vec(), |note| note.not_written(ranges))
    }

    /// Noted files that may be at, or below, a thing of this name.
    #[must_use]
    pub fn named(&self, name: &[u8]) -> Vec<Ino> {
        self.queue.lock().image.named(name)
    }

    /// Notes what the service said of names.
    pub fn hear(&self, facts: Facts) {
        let mut queue = self.queue.lock();
        let mut kept = true;
        if queue.image.lives.is_news(facts.lives) {
            let mut lives = queue.image.lives.clone();
            lives.hear(facts.lives);
            kept = queue.push(&Record::Lives(lives));
        }
        let book = &queue.image.book;
        let settles = facts.settled > book.settled() && !book.is_empty();
        let same = facts.shared == book.is_shared() && facts.nodes as usize == book.nodes();
        if !facts.is_empty() || settles || !same {
            kept = queue.push(&Record::Names(Box::new(facts))) && kept;
        }
        drop(queue);
        self.write_unless(kept);
    }

    /// A request that may change these names is going to be sent: written before that. Its number.
    pub fn ask(&self, about: Subjects) -> u64 {
        let mut queue = self.queue.lock();
        queue.asked += 1;
        let number = queue.asked;
        let kept = queue.push(&Record::Asked(number, Box::new(about))) && queue.ring.is_some();
        drop(queue);
        // On a full disk all that waits would be tried again with each: the look every second does that.
        if !kept && !self.is_full.load(Relaxed) {
            let _ = self.write();
        }
        number
    }

    /// It was answered, and what was told with the answer was heard.
    pub fn answered(&self, number: u64) {
        let mut queue = self.queue.lock();
        queue.unanswered.remove(&number);
        // When it is not kept, it is asked for once more.
        let _ = queue.push(&Record::Answered(number));
    }

    /// Nobody waits for its answer any more.
    pub fn unanswered(&self, number: u64) {
        self.queue.lock().unanswered.insert(number);
    }

    /// Names of which the service must be asked how they are, because a request about them was not answered:
    /// by its number, and with the inodes that were under them when last heard of.
    #[must_use]
    pub fn doubts(&self) -> Vec<(u64, Subjects)> {
        let queue = self.queue.lock();
        let asked = queue.unanswered.iter().filter_map(|n| Some((*n, queue.image.asked.get(n)?)));
        let with_inodes = asked.map(|(number, about)| {
            let mut about = about.clone();
            let book = &queue.image.book;
            let bound = about.names.iter().filter_map(|(parent, name)| book.bound(*parent, name));
            about.inos.extend(bound.collect::<Vec<Ino>>());
            (number, about)
        });
        with_inodes.collect()
    }

    /// What was heard of names after a moment, by moment.
    pub fn heard_after(&self, after: Moment) -> BTreeMap<Moment, Facts> {
        self.queue.lock().image.book.facts_after(after)
    }

    /// Up to where everything is on the backing, as far as was heard.
    #[must_use]
    pub fn settled(&self) -> Moment {
        self.queue.lock().image.book.settled()
    }

    /// How much is noted of names.
    #[must_use]
    pub fn facts(&self) -> usize {
        self.queue.lock().image.book.len()
    }

    /// Directories that names are in and of which the service must be asked where they are.
    #[must_use]
    pub fn unplaced(&self, most: usize) -> Vec<Ino> {
        self.queue.lock().image.book.unplaced(most)
    }

    /// The service does not know either.
    pub fn give_up(&self, dir: Ino) {
        self.queue.lock().image.book.give_up(dir);
    }

    /// What is noted now.
    #[must_use]
    pub fn image(&self) -> Image {
        self.queue.lock().image.clone()
    }

    /// Returns when everything pushed so far is written.
    pub fn write(&self) -> Result<(), Errno> {
        let mut out = self.out.lock();
        self.write_with(&mut out).map_err(Errno::from)
    }

    fn write_with(&self, out: &mut Out) -> io::Result<()> {
        let (bytes, mark) = self.queue.lock().take();
        if bytes.is_empty() {
            return Ok(());
        }
        let written = out.file.write_at(&bytes, out.len);
        self.is_full.store(written.is_err(), Relaxed);
        match written {
            Ok(()) => {
                out.len += bytes.len() as u64;
                self.queue.lock().written(mark);
                Ok(())
            }
            Err(e) => {
                // The next write starts over at the same place.
                self.queue.lock().bytes.splice(0..0, bytes);
                Err(e)
            }
        }
    }

    /// Returns when everything pushed so far is on stable storage. Blocks.
    pub fn sync(&self) -> Result<(), Errno> {
        let wanted = self.queue.lock().pushed;
        let mut synced = self.sync_turn.lock();
        if *synced >= wanted {
            return Ok(());
        }
        let (file, len, upto) = {
            let mut out = self.out.lock();
            self.write_with(&mut out)?;
            if out.broken {
                return Err(Errno::EIO);
            }
            (Arc::clone(&out.file), out.len, i128::from(out.len) + out.base)
        };
        if let Err(e) = file.sync() {
            self.out.lock().broken = true;
            return Err(Errno::from(e));
        }
        *synced = u64::try_from(upto).unwrap_or(0).max(*synced);
        // An offset means nothing in a file that took the place of this one meanwhile.
        let out = self.out.lock();
        if Arc::ptr_eq(&out.file, &file) {
            // The lock of the file is held: what does not fit into the ring is written later.
            let _ = self.queue.lock().push(&Record::Synced(len));
        }
        Ok(())
    }

    /// Makes the file small again when that pays, or anew when it is broken. Blocks.
    pub fn tend(&self) -> Result<(), Errno> {
        let mut out = self.out.lock();
        self.write_with(&mut out)?;
        let large = out.len > COMPACT_BYTES.max(out.snapshot_len.saturating_mul(4));
        if !large && !out.broken {
            out.file.reserve(out.len, RESERVED_BYTES);
            return Ok(());
        }
        // What is queued is in the image already.
        let (image, (bytes, mark), pushed) = {
            let mut queue = self.queue.lock();
            (queue.image.clone(), queue.take(), queue.pushed)
        };
        let (file, len) = match replace(&*self.storage, &image) {
            Ok(new) => new,
            Err(e) => {
                self.queue.lock().bytes.splice(0..0, bytes);
                return Err(Errno::from(e));
            }
        };
        *out = Out {
            file,
            len,
            base: i128::from(pushed) - i128::from(len),
            snapshot_len: len,
            broken: false,
        };
        self.queue.lock().written(mark);
        Ok(())
    }
}

impl Queue {
    /// False when it must be written before anybody relies on it.
    fn push(&mut self, record: &Record) -> bool {
        self.image.apply(record);
        let before = self.bytes.len();
        format::encode(&mut self.bytes, record);
        self.pushed += (self.bytes.len() - before) as u64;
        self.ring.as_ref().is_none_or(|ring| ring.push(&self.bytes[before..]))
    }

    /// What is not written, and how far the ring has it.
    fn take(&mut self) -> (Vec<u8>, Option<Mark>) {
        (std::mem::take(&mut self.bytes), self.ring.as_ref().map(Ring::mark))
    }

    fn written(&self, mark: Option<Mark>) {
        if let (Some(ring), Some(mark)) = (&self.ring, mark) {
            ring.written(mark);
        }
    }
}

/// Writes a whole journal beside the old one and puts it in its place.
fn replace(storage: &dyn Storage, image: &Image) -> io::Result<(Arc<dyn Stored>, u64)> {
    let mut bytes = format::header();
    image.snapshot().iter().for_each(|r| format::encode(&mut bytes, r));
    let synced = Record::Synced(bytes.len() as u64);
    format::encode(&mut bytes, &synced);
    let file = storage.create("journal.new")?;
    file.write_at(&bytes, 0)?;
    file.reserve(bytes.len() as u64, RESERVED_BYTES);
    file.sync()?;
    storage.rename("journal.new", NAME)?;
    storage.sync_names()?;
    Ok((file, bytes.len() as u64))
}

#[cfg(test)]
#[path = "journal_tests.rs"]
mod tests;

#[cfg(test)]
mod power_tests;
