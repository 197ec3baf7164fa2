//! What `libebb` asks of the daemon of a mount, and what it is answered, as bytes. Both ends use this
//! crate; neither believes what it decodes before it was checked here.
//!
//! # The way: an ioctl(2) on the open file
//!
//! A call is an ioctl on the descriptor that the caller has open through the mount, so
//!
//! * the *kernel* proves which file is meant and that it was opened: a request may touch no file but
//!   that one, and whoever has no descriptor of it cannot ask. How it was opened the daemon knows.
//! * there is no path to find, nothing to connect to and nobody to let in: it works in containers,
//!   for other users (`--allow-other`), and after the daemon was replaced by its supervisor, which
//!   gets requests again that were not answered.
//! * the end of a daemon ends the call: the kernel answers ENOTCONN, at once.
//!
//! A Unix socket to which the descriptor is passed (SCM_RIGHTS) was the other way. The daemon would have to
//! close what it was sent, and a close of a file that is on a FUSE mount is a request to that mount: to
//! itself it would be one more close of a program (under session that publishes), and to a mount of
//! somebody else one that never returns.
//!
//! The kernel copies at most 16 KiB each way. So lists of pieces go in several requests ([`list`]); each
//! of them stands for itself, and the daemon keeps nothing in between.
//!
//! # A request
//!
//! The number of the ioctl is `_IOWR(0xEB, 1, n)`; n is the length of the buffer, for the request and for its
//! answer. In the buffer:
//!
//! ```text
//! version u8 = 1 | operation u8 | flags u16 | length u32 | that many bytes
//! ```
//!
//! Numbers are little-endian; in lists they are LEB128. The result of the ioctl is the length of the answer.
//! Errors are errnos of the call, whose meanings are in the table of `docs/libebb.md`.

mod answer;
mod bytes;
pub mod list;
mod request;
#[cfg(test)]
mod tests;

pub use answer::{Owned, Owners, PiecesRead, Stat, Stored, fits, read_overhead};
pub use request::{Request, WRITE_BYTES, Which, encode_write};

/// The letter of the ioctl.
const KIND: u32 = 0xEB;
const NUMBER: u32 = 1;
/// The kernel copies both ways.
const BOTH_WAYS: u32 = 3;

/// Longest buffer: what an ioctl's number can say, less what does not fill a word.
pub const BUFFER_MAX: usize = (1 << 14) - 8;

/// Length of what is before the body of a request.
pub const HEAD: usize = 8;

/// Largest body.
pub const BODY_MAX: usize = BUFFER_MAX - HEAD;

/// Largest offset that a file has.
pub const OFFSET_MAX: u64 = i64::MAX as u64;

/// Bytes that one request may ask to be fetched.
pub const FETCH_MAX: u64 = 8 << 20;

/// Length of a handle.
pub const HANDLE: usize = 64;

/// So begin the names by which handles are opened, in the directory `.ebb` of a mount.
pub const HANDLE_NAME: &[u8] = b"handle-";

/// The bytes are not what they should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a request of libebb, or not an answer to one")]
pub struct Malformed;

/// The number of the ioctl with a buffer of so many bytes.
#[must_use]
pub const fn command(buffer: usize) -> u32 {
    BOTH_WAYS << 30 | (buffer as u32 & 0x3fff) << 16 | KIND << 8 | NUMBER
}

/// The length of the buffer, if that is the number of such an ioctl.
#[must_use]
pub const fn buffer_of(command: u32) -> Option<usize> {
    let buffer = (command >> 16 & 0x3fff) as usize;
    if command == self::command(buffer) && buffer >= HEAD && buffer <= BUFFER_MAX {
        Some(buffer)
    } else {
        None
    }
}

/// Bytes of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Span {
    /// The first one.
    pub offset: u64,
    /// How many.
    pub len: u64,
}

impl Span {
    /// These bytes, if a file may have them.
    ///
    /// # Errors
    /// When they end beyond the largest offset.
    pub fn new(offset: u64, len: u64) -> Result<Span, Malformed> {
        let end = offset.checked_add(len).ok_or(Malformed)?;
        if end <= OFFSET_MAX { Ok(Span { offset, len }) } else { Err(Malformed) }
    }

    /// One past the last byte.
    #[must_use]
    pub fn end(self) -> u64 {
        self.offset + self.len
    }

    /// The smallest span that has all of these.
    #[must_use]
    pub fn around(spans: impl IntoIterator<Item = Span>) -> Span {
        let some = spans.into_iter().filter(|s| s.len > 0);
        let ends = some.fold(None, |ends: Option<(u64, u64)>, s| match ends {
            None => Some((s.offset, s.end())),
            Some((from, to)) => Some((from.min(s.offset), to.max(s.end()))),
        });
        let (from, to) = ends.unwrap_or((0, 0));
        Span { offset: from, len: to - from }
    }
}

/// The name of a handle in `.ebb`.
#[must_use]
pub fn handle_name(handle: &[u8; HANDLE]) -> Vec<u8> {
    let digits = handle.iter().flat_map(|b| [b >> 4, b & 15]);
    let digits = digits.map(|d| b"0123456789abcdef"[d as usize]);
    HANDLE_NAME.iter().copied().chain(digits).collect()
}

/// The handle of such a name. Only what [`handle_name`] gives is one.
#[must_use]
pub fn handle_of_name(name: &[u8]) -> Option<[u8; HANDLE]> {
    let digits = name.strip_prefix(HANDLE_NAME)?;
    let mut handle = [0; HANDLE];
    for (byte, pair) in handle.iter_mut().zip(digits.chunks(2)) {
        let digit = |at: usize| char::from(*pair.get(at)?).to_digit(16);
        *byte = (digit(0)? << 4 | digit(1)?) as u8;
    }
    (handle_name(&handle) == name).then_some(handle)
}
