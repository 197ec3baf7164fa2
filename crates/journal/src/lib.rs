//! What the service's journal and a node's journal have in common: how records are framed, what
//! storage they ask for, and a storage that loses its power ([`power`]) to try them on. Knows
//! nothing of what a record means or when it must be written. `docs/journal.md` is the format.

mod exclusive;
pub mod power;
mod storage;

pub use exclusive::take_lock;
pub use storage::{Directory, Storage, Stored};

/// Length and checksum before each body.
pub const FRAME_BYTES: usize = 8;

/// Length of a mark with its frame.
pub const MARK_BYTES: usize = FRAME_BYTES + 8;

/// What the checksum of a mark begins with, so that no record is taken for one.
const MARK_SALT: &[u8] = b"synced up to here";

/// What the checksum of a part begins with, so that no part is taken for a record.
const PART_SALT: &[u8] = b"to be continued";

/// A body that no reader would believe: nothing was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a journal record of {len} bytes, more than {max}")]
pub struct TooLong {
    /// Its length.
    pub len: usize,
    /// The largest one.
    pub max: usize,
}

/// Appends a record: length (u32 LE), CRC32C of length and body (u32 LE), body.
pub fn put(out: &mut Vec<u8>, body: &[u8], body_max: usize) -> Result<(), TooLong> {
    if body.len() > body_max {
        return Err(TooLong { len: body.len(), max: body_max });
    }
    put_salted(out, body, 0);
    Ok(())
}

/// The same of a body of any length: what does not fit into one record comes in parts before it.
pub fn put_long(out: &mut Vec<u8>, body: &[u8], body_max: usize) {
    let last = body.len().saturating_sub(1) / body_max * body_max;
    let (parts, rest) = body.split_at(last);
    for part in parts.chunks(body_max) {
        put_salted(out, part, crc32c::crc32c(PART_SALT));
    }
    put_salted(out, rest, 0);
}

fn put_salted(out: &mut Vec<u8>, body: &[u8], salt: u32) {
    let len = (body.len() as u32).to_le_bytes();
    out.extend_from_slice(&len);
    out.extend_from_slice(&checksum(salt, &len, body).to_le_bytes());
    out.extend_from_slice(body);
}

/// Appends the mark that everything before offset `upto` of the file is on stable storage.
pub fn put_mark(out: &mut Vec<u8>, upto: u64) {
    let (len, body) = (8u32.to_le_bytes(), upto.to_le_bytes());
    out.extend_from_slice(&len);
    out.extend_from_slice(&checksum(crc32c::crc32c(MARK_SALT), &len, &body).to_le_bytes());
    out.extend_from_slice(&body);
}

fn checksum(salt: u32, len: &[u8], body: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c_append(salt, len), body)
}

/// CRC32C of what a header says of itself.
#[must_use]
pub fn crc(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes)
}

/// A little-endian number somewhere in a file.
#[must_use]
pub fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

/// The same, of eight bytes.
#[must_use]
pub fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at.checked_add(8)?)?.try_into().ok()?))
}

fn framed(bytes: &[u8], at: usize, body_max: usize, salt: u32) -> Option<(&[u8], usize)> {
    let len = u32_at(bytes, at)? as usize;
    let crc = u32_at(bytes, at + 4)?;
    if len == 0 || len > body_max {
        return None;
    }
    let end = at + FRAME_BYTES + len;
    let body = bytes.get(at + FRAME_BYTES..end)?;
    (checksum(salt, &bytes[at..at + 4], body) == crc).then_some((body, end))
}

/// The body of a record at `at`, if one that checks is there, and where the next one begins.
#[must_use]
pub fn body_at(bytes: &[u8], at: usize, body_max: usize) -> Option<(&[u8], usize)> {
    framed(bytes, at, body_max, 0)
}

/// The same of a part: the body that it begins, or goes on with, ends with the next record.
#[must_use]
pub fn part_at(bytes: &[u8], at: usize, body_max: usize) -> Option<(&[u8], usize)> {
    framed(bytes, at, body_max, crc32c::crc32c(PART_SALT))
}

/// Up to where a mark at `at` says that the file is on stable storage, if one is there.
#[must_use]
pub fn mark_at(bytes: &[u8], at: usize) -> Option<u64> {
    u64_at(framed(bytes, at, 8, crc32c::crc32c(MARK_SALT))?.0, 0)
}

/// Which boot of this machine this is; empty when the kernel does not tell.
#[must_use]
pub fn boot_id() -> String {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    text.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn records_and_marks_come_back_and_are_not_mixed_up(
            bodies in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..40), 1..10),
            upto: u64,
        ) {
            let mut bytes = Vec::new();
            for body in &bodies {
                put(&mut bytes, body, 1 << 10).expect("short");
                put_mark(&mut bytes, upto);
            }
            let mut at = 0;
            for body in &bodies {
                prop_assert_eq!(mark_at(&bytes, at), None);
                let (found, next) = body_at(&bytes, at, 1 << 10).expect("a record");
                prop_assert_eq!(found, &body[..]);
                prop_assert_eq!(mark_at(&bytes, next), Some(upto));
                prop_assert_eq!(body_at(&bytes, next, 1 << 10), None);
                at = next + MARK_BYTES;
            }
            prop_assert_eq!(at, bytes.len());
        }

        #[test]
        fn long_bodies_come_back_from_their_parts(
            body in prop::collection::vec(any::<u8>(), 1..100), max in 1usize..40,
        ) {
            let mut bytes = Vec::new();
            put_long(&mut bytes, &body, max);
            let (mut at, mut found) = (0, Vec::new());
            while let Some((part, next)) = part_at(&bytes, at, max) {
                prop_assert_eq!(body_at(&bytes, at, max), None);
                found.extend_from_slice(part);
                at = next;
            }
            let (rest, end) = body_at(&bytes, at, max).expect("the last one");
            found.extend_from_slice(rest);
            prop_assert_eq!((found, end), (body, bytes.len()));
        }

        #[test]
        fn whatever_is_there_is_read_without_harm(bytes: Vec<u8>, at in 0usize..5000) {
            for at in [at, usize::MAX - 3] {
                let _ = (body_at(&bytes, at.min(usize::MAX - 8), 16), mark_at(&bytes, at.min(usize::MAX - 8)));
            }
        }
    }

    #[test]
    fn the_bounds_of_a_body_are_kept() {
        let mut bytes = Vec::new();
        put(&mut bytes, &[1; 100], 100).expect("it fits");
        assert_eq!(put(&mut bytes, &[1; 100], 99), Err(TooLong { len: 100, max: 99 }));
        assert_eq!(bytes.len(), 108, "what is too long is not written");
        assert!(body_at(&bytes, 0, 100).is_some() && body_at(&bytes, 0, 99).is_none());
        assert!(body_at(&bytes[..107], 0, 100).is_none(), "not whole");
        let mut empty = Vec::new();
        put(&mut empty, &[], 100).expect("it fits");
        assert!(body_at(&empty, 0, 100).is_none(), "zeros must not look like records");
    }
}
