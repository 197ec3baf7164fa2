//! The bytes of the node journal: written by [`encode`], judged by [`read`]. No policy of when.
//!
//! # Format
//!
//! `CACHE/journal`: `EBBNODE1`, format version (u32 LE), CRC32C of these 12 bytes (u32 LE); then
//! records: length of the body (u32 LE), CRC32C of length and body (u32 LE), body (postcard of
//! one [`Record`]). The first record is the [`Record::Life`] of the daemon that writes.
//!
//! # What a reader believes
//!
//! The file is replaced by rename after it was synced, so a header or a first record that does
//! not check is damage. A record that does not check ends what is believed:
//! * nothing valid behind it: a torn tail, which is cut off. What was cut off was never
//!   acknowledged to be synced, and the prefix is a state that this cache was in;
//! * something valid behind it, and the machine was not booted since: damage, because what one
//!   process wrote another one reads as it was written. An error that names file and offset;
//! * something valid behind it, and the machine was booted since: the disk may have kept a later
//!   block and not an earlier one, of what was not synced. It is damage when a valid record
//!   behind says that the bad one had been synced ([`Record::Synced`]), a torn tail otherwise.

use super::image::Image;
use super::record::Record;
pub use ebb_journal::boot_id;
use ebb_journal::{Directory, Storage, u32_at};
use std::io;
use std::path::{Path, PathBuf};

/// Its name in the cache.
pub(crate) const NAME: &str = "journal";

const MAGIC: &[u8; 8] = b"EBBNODE1";
/// Format 1 had no files without names, 2 no bytes that were written past the daemon, 3 no windows
/// of quiet writes, 4 no seats, 5 nothing of who else has a file, 6 no damaged bytes, 7 no names, 8 no
/// cuts of other nodes' bytes, and nothing of files that are zeros, 9 no lives of nodes, 10 nothing of requests without an answer.
const FORMAT: u32 = 11;
pub(crate) const HEADER_BYTES: usize = 16;

/// Largest body of a record.
pub(crate) const BODY_BYTES_MAX: usize = 4 << 20;

/// Why a journal cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The system refused something.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Not a journal, or of another version.
    #[error("{}: {what}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// A record in the middle is damaged; those behind it cannot be trusted.
    #[error("{}: damaged at byte {offset}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Where the record begins.
        offset: u64,
    },
}

/// What a journal says.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// What the cache holds.
    pub image: Image,
    /// A tail was torn, and cut off.
    pub torn: bool,
    /// The machine was booted since: only what was synced is trusted.
    pub rebooted: bool,
    /// Where the damage begins that was looked past (only when told to).
    pub damaged_at: Option<u64>,
}

pub(crate) fn header() -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    out.extend_from_slice(&FORMAT.to_le_bytes());
    out.extend_from_slice(&crc32c::crc32c(&out).to_le_bytes());
    out
}

/// Appends a record.
pub(crate) fn encode(out: &mut Vec<u8>, record: &Record) {
    let body = postcard::to_stdvec(record).expect("records have no types that postcard refuses");
    if ebb_journal::put(out, &body, BODY_BYTES_MAX).is_err() {
        halves(record).iter().for_each(|r| encode(out, r));
    }
}

/// Two records that say the same; only lists of ranges get so long.
fn halves(record: &Record) -> Vec<Record> {
    let make =
        |build: &dyn Fn(usize, usize) -> Record, n: usize| vec![build(0, n / 2), build(n / 2, n)];
    match record {
        Record::Written(i, r, v, t) => {
            make(&|a, b| Record::Written(*i, r[a..b].to_vec(), *v, *t), r.len())
        }
        Record::Attaching(i, r, v, t) => {
            make(&|a, b| Record::Attaching(*i, r[a..b].to_vec(), *v, *t), r.len())
        }
        Record::Attached(i, r, v, s) => {
            make(&|a, b| Record::Attached(*i, r[a..b].to_vec(), *v, *s), r.len())
        }
        Record::Flushed(i, r) => make(&|a, b| Record::Flushed(*i, r[a..b].to_vec()), r.len()),
        Record::Lost(i, r) => make(&|a, b| Record::Lost(*i, r[a..b].to_vec()), r.len()),
        Record::Refused(i, r) => make(&|a, b| Record::Refused(*i, r[a..b].to_vec()), r.len()),
        Record::Again(i, r, v) => make(&|a, b| Record::Again(*i, r[a..b].to_vec(), *v), r.len()),
        Record::Guessed(i, r, k, v, t) => {
            make(&|a, b| Record::Guessed(*i, r[a..b].to_vec(), *k, *v, *t), r.len())
        }
        Record::Durable(i, r) => make(&|a, b| Record::Durable(*i, r[a..b].to_vec()), r.len()),
        Record::Extents(i, r, v, p) => {
            make(&|a, b| Record::Extents(*i, r[a..b].to_vec(), *v, *p), r.len())
        }
        Record::Damaged(i, r) => make(&|a, b| Record::Damaged(*i, r[a..b].to_vec()), r.len()),
        Record::Home(i, r) => make(&|a, b| Record::Home(*i, r[a..b].to_vec()), r.len()),
        // A path has at most a few thousand bytes, a configuration some tens of thousands.
        _ => {
            debug_assert!(false, "only lists of ranges get so long");
            tracing::error!(ino = ?record.ino(), "a record is too long for the node journal");
            Vec::new()
        }
    }
}

/// The record at `at` and where the next one begins.
fn record_at(bytes: &[u8], at: usize) -> Option<(Record, usize)> {
    let (body, end) = ebb_journal::body_at(bytes, at, BODY_BYTES_MAX)?;
    let record: Record = postcard::from_bytes(body).ok()?;
    record.is_sound().then_some((record, end))
}

/// The records that framed bytes begin with, up to the first that is none.
pub fn records(bytes: &[u8]) -> Vec<Record> {
    let (mut out, mut at) = (Vec::new(), 0);
    while let Some((record, next)) = record_at(bytes, at) {
        out.push(record);
        at = next;
    }
    out
}

/// Where the journal of a cache is.
#[must_use]
pub fn path_in(cache: &Path) -> PathBuf {
    cache.join(NAME)
}

/// Reads the journal of a cache; `None` when there is none. `past_damage`: believe what comes
/// before a damaged record instead of refusing.
pub fn read(cache: &Path, past_damage: bool) -> Result<Option<Found>, JournalError> {
    let path = path_in(cache);
    match Directory::new(cache).read(NAME) {
        Ok(Some(bytes)) => judge(&path, &bytes, &boot_id(), past_damage).map(Some),
        Ok(None) => Ok(None),
        Err(source) => Err(JournalError::Io { path, source }),
    }
}

/// What the bytes of a journal say in this boot.
pub fn judge(
    path: &Path,
    bytes: &[u8],
    boot: &str,
    past_damage: bool,
) -> Result<Found, JournalError> {
    let wrong = |what: String| JournalError::Header { path: path.to_owned(), what };
    if bytes.len() < HEADER_BYTES || &bytes[..8] != MAGIC {
        return Err(wrong("not a node journal of Ebb".to_owned()));
    }
    if u32_at(bytes, 12) != Some(crc32c::crc32c(&bytes[..12])) {
        return Err(wrong("damaged header".to_owned()));
    }
    match u32_at(bytes, 8) {
        Some(1..=FORMAT) => {}
        other => return Err(wrong(format!("format {other:?}, this program knows {FORMAT}"))),
    }
    let mut found = Found::default();
    let mut at = HEADER_BYTES;
    while let Some((record, next)) = record_at(bytes, at) {
        found.image.apply(&record);
        at = next;
    }
    if found.image.life.is_none() {
        // It is part of what was synced before the file got its name.
        return Err(JournalError::Damaged { path: path.to_owned(), offset: at as u64 });
    }
    let last_boot = found.image.life.as_ref().map(|l| l.boot.as_str());
    // Without a boot id nothing shows that the page cache is still that of the dead daemon.
    found.rebooted = last_boot != Some(boot) || boot.is_empty();
    if at == bytes.len() {
        return Ok(found);
    }
    found.torn = true;
    if is_damage(bytes, at, found.rebooted) {
        if !past_damage {
            return Err(JournalError::Damaged { path: path.to_owned(), offset: at as u64 });
        }
        found.damaged_at = Some(at as u64);
    }
    Ok(found)
}

/// Is the bad record at `bad` more than a torn tail?
fn is_damage(bytes: &[u8], bad: usize, rebooted: bool) -> bool {
    let mut at = bad + 1;
    while at < bytes.len() {
        let Some((record, next)) = record_at(bytes, at) else {
            at += 1;
            continue;
        };
        let was_synced = matches!(record, Record::Synced(upto) if upto > bad as u64);
        if !rebooted || was_synced {
            return true;
        }
        at = next;
    }
    false
}

#[cfg(test)]
#[path = "format_tests.rs"]
mod tests;
