//! The bytes of the service's journal: what a file begins with, and what is believed of one that
//! is found. `docs/journal.md` is the whole format. No policy of when anything is written.

use super::JournalError;
use ebb_journal::{
    FRAME_BYTES, MARK_BYTES, body_at, mark_at, part_at, put_long, put_mark, u32_at, u64_at,
};
use std::path::Path;

const MAGIC: &[u8; 8] = b"EBBJRNL1";
/// Format 1 had neither boot nor marks, 1 and 2 no bodies in parts, all before this one fewer kinds of
/// records.
const FORMAT: u32 = 7;
/// The first one that has bodies in parts.
const IN_PARTS: u32 = 3;
const HEADER_BYTES_1: usize = 24;

/// Length of a header.
pub const HEADER_BYTES: usize = 32;

/// Largest body of a record; a longer one is written in parts.
pub const BODY_BYTES_MAX: usize = 16 << 20;

/// The same of formats 1 and 2, whose writers did not keep it below the other.
const OLD_BODY_BYTES_MAX: usize = u32::MAX as usize;

/// Appends a body as a record, or in parts.
pub fn frame(out: &mut Vec<u8>, body: &[u8]) {
    put_long(out, body, BODY_BYTES_MAX);
}

/// Which boot of the machine wrote a file; 0 is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Boot(pub u64);

impl Boot {
    /// This one.
    pub fn now() -> Boot {
        let digits = ebb_journal::boot_id().replace('-', "");
        let short = digits.get(..16).and_then(|d| u64::from_str_radix(d, 16).ok());
        Boot(short.unwrap_or(0))
    }

    /// True when what one process wrote is what another one reads now.
    fn is_still(self, now: Boot) -> bool {
        self == now && self.0 != 0
    }
}

/// A whole new file: header, snapshot, and the mark that all of it is on stable storage, which
/// is true before the file gets its name.
pub fn fresh(job: u64, boot: Boot, snapshot: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER_BYTES + snapshot.len() + MARK_BYTES);
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&FORMAT.to_le_bytes());
    out.extend_from_slice(&job.to_le_bytes());
    out.extend_from_slice(&boot.0.to_le_bytes());
    out.extend_from_slice(&crc32c::crc32c(&out).to_le_bytes());
    out.extend_from_slice(snapshot);
    let upto = (out.len() + MARK_BYTES) as u64;
    put_mark(&mut out, upto);
    out
}

/// What a journal says.
#[derive(Debug)]
pub struct Read {
    /// Its job.
    pub job: u64,
    /// The bodies of its records, oldest first.
    pub bodies: Vec<Vec<u8>>,
    /// The machine was booted since, or it is another one: the end may be missing.
    pub rebooted: bool,
}

struct Header {
    job: u64,
    /// None of a format that does not say.
    boot: Option<Boot>,
    len: usize,
    body_max: usize,
}

fn header(path: &Path, bytes: &[u8]) -> Result<Header, JournalError> {
    let wrong = |what: String| JournalError::Header { path: path.to_owned(), what };
    if bytes.len() < HEADER_BYTES_1 || &bytes[..8] != MAGIC {
        return Err(wrong("not a journal of Ebb".to_owned()));
    }
    let format = u32_at(bytes, 8);
    let (boot, len) = match format {
        Some(1) => (None, HEADER_BYTES_1),
        Some(2..=FORMAT) => (u64_at(bytes, 20).map(Boot), HEADER_BYTES),
        other => {
            return Err(wrong(format!("format {other:?}, this program knows 1 to {FORMAT}")));
        }
    };
    let job = u64_at(bytes, 12);
    let body_max = if format >= Some(IN_PARTS) { BODY_BYTES_MAX } else { OLD_BODY_BYTES_MAX };
    let Some(sum) = u32_at(bytes, len - 4) else { return Err(wrong("cut header".to_owned())) };
    if sum != crc32c::crc32c(&bytes[..len - 4]) {
        return Err(wrong("damaged header".to_owned()));
    }
    Ok(Header { job: job.unwrap_or(0), boot, len, body_max })
}

/// What a file says. What does not check ends it, and is an error unless it can be what a crash leaves behind.
pub fn parse(path: &Path, bytes: &[u8], now: Boot) -> Result<Read, JournalError> {
    let header = header(path, bytes)?;
    let rebooted = header.boot.is_none_or(|b| !b.is_still(now));
    let mut records = Vec::new();
    let mut parts = Vec::new();
    let mut at = header.len;
    while at < bytes.len() {
        if let Some((body, next)) = body_at(bytes, at, header.body_max) {
            let mut whole = std::mem::take(&mut parts);
            whole.extend_from_slice(body);
            records.push(whole);
            at = next;
        } else if let Some((part, next)) = part_at(bytes, at, BODY_BYTES_MAX) {
            parts.extend_from_slice(part);
            at = next;
        } else if mark_at(bytes, at).is_some() {
            at += MARK_BYTES;
        } else {
            // Nobody kept marks before a boot was noted.
            let rebooted = rebooted && header.boot.is_some();
            if let Some(next) = damage_behind(bytes, at, rebooted) {
                let what = format!("bad record, but byte {next} shows that it was a good one");
                let (path, offset) = (path.to_owned(), at as u64);
                return Err(JournalError::Damaged { path, offset, what });
            }
            tracing::warn!(at, cut = bytes.len() - at, "torn tail of the journal cut off");
            break;
        }
    }
    // Parts whose end did not get there are a torn tail as well.
    Ok(Read { job: header.job, bodies: records, rebooted })
}

/// What shows that the bad record at `bad` is more than a torn tail. As long as the machine was
/// not booted that is anything valid behind it, because a process writes in order. A disk that
/// lost its power may have kept later sectors and not earlier ones, of what was not synced: then
/// it is only a mark that says that the record had been synced.
fn damage_behind(bytes: &[u8], bad: usize, rebooted: bool) -> Option<usize> {
    let tail = bytes.len().saturating_sub(FRAME_BYTES);
    (bad + 1..tail).find(|at| match mark_at(bytes, *at) {
        Some(upto) => !rebooted || upto > bad as u64,
        None => !rebooted && is_record(bytes, *at),
    })
}

fn is_record(bytes: &[u8], at: usize) -> bool {
    body_at(bytes, at, BODY_BYTES_MAX).or_else(|| part_at(bytes, at, BODY_BYTES_MAX)).is_some()
}
