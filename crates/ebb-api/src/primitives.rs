//! The primitives of BaseFS, for any open file of a mount.
//!
//! | primitive | here |
//! |---|---|
//! | open, close, write, seek, tell | the system's own: bytes that were written are seen on this node, and published when the model of the file says so (under `session`: with a close) |
//! | attach, attach_file | [`Extended::attach`] |
//! | query, query_file | [`Extended::query`] |
//! | read of an owner | [`Extended::read_owner`] |
//! | flush, flush_file | [`Extended::flush`] |
//! | detach, detach_file | [`Extended::detach`] |
//! | stat | [`Extended::ebb_stat`] |

use crate::HANDLE;
use crate::call::{ask, error, malformed};
use crate::lists::{ReadPiece, WritePiece, read_list, write_list};
use ebb_api_format::{BUFFER_MAX, Owners, Request, Span, Which, handle_name};
use std::ffi::{CString, OsString};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

pub use ebb_api_format::Stat;

/// The owner of bytes that nobody has attached: they are the backing's.
pub const NOBODY: u32 = 0;

/// A range and who attached it last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// The bytes.
    pub range: Range<u64>,
    /// The number of a node.
    pub node: u32,
}

fn span(range: &Range<u64>) -> io::Result<Span> {
    let len = range.end.checked_sub(range.start).ok_or_else(|| error(libc::EINVAL))?;
    Span::new(range.start, len).map_err(|_| error(libc::EINVAL))
}

fn which(range: Option<&Range<u64>>) -> io::Result<Which> {
    range.map_or(Ok(Which::File), |range| span(range).map(Which::Range))
}

/// Asks for nothing. Who may not even ask for that is told so by a daemon that understood it.
pub(crate) fn probe(fd: BorrowedFd<'_>) -> io::Result<()> {
    match ask(fd, &Request::Fetch { pieces: Vec::new(), ask: None }, 0) {
        Err(e) if e.raw_os_error() != Some(libc::EBADF) => Err(e),
        _ => Ok(()),
    }
}

/// What files of a mount of Ebb can do more than others. `None` in place of a range stands for the whole file,
/// as `attach_file` and the like.
///
/// Every call fails with ENOTTY on a file that is not on such a mount, and with EBADF where the file was not
/// opened for what it does: publishing and giving up bytes is writing.
pub trait Extended: AsFd {
    /// True when the file is on a mount of Ebb whose daemon understands these calls.
    fn is_ebb(&self) -> bool {
        probe(self.as_fd()).is_ok()
    }

    /// Publishes what was written on this node. Bytes that are published already are not sent again; of the
    /// whole file it is no error when there is nothing.
    ///
    /// # Errors
    /// ENODATA: some of the range was never written here; nothing is done then.
    fn attach(&self, range: Option<Range<u64>>) -> io::Result<()> {
        ask(self.as_fd(), &Request::Attach(which(range.as_ref())?), 0).map(drop)
    }

    /// Who attached which bytes last, in order; what is missing is nobody's. Reads on this node that follow
    /// see at least what this has seen.
    ///
    /// # Errors
    /// When the metadata service cannot be asked.
    fn query(&self, range: Option<Range<u64>>) -> io::Result<Vec<Owner>> {
        let mut found: Vec<Owner> = Vec::new();
        let mut asked = which(range.as_ref())?;
        let end = range.map_or(ebb_api_format::OFFSET_MAX, |range| range.end);
        loop {
            let answer = ask(self.as_fd(), &Request::Query(asked), BUFFER_MAX)?;
            let page = Owners::decode(&answer).map_err(malformed)?;
            for owned in page.owned {
                let range = owned.span.offset..owned.span.end();
                match found.last_mut() {
                    Some(o) if o.node == owned.owner && o.range.end == range.start => {
                        o.range.end = range.end;
                    }
                    _ => found.push(Owner { range, node: owned.owner }),
                }
            }
            let Some(next) = page.next else { return Ok(found) };
            // A daemon that does not get on would be asked for ever.
            if matches!(asked, Which::Range(s) if s.offset >= next) || next >= end {
                return Err(error(libc::EPROTO));
            }
            asked = Which::Range(span(&(next..end))?);
        }
    }

    /// The bytes at `offset` as `owner` has them, or the backing (`NOBODY`). How many there are: fewer than
    /// asked for at the end of the file.
    ///
    /// # Errors
    /// ESTALE: they are not all that owner's (any more).
    fn read_owner(&self, buffer: &mut [u8], offset: u64, owner: u32) -> io::Result<usize> {
        let mut done = 0;
        while done < buffer.len() {
            let rest = &mut buffer[done..];
            let len = rest.len().min(BUFFER_MAX);
            let from = offset.checked_add(done as u64).ok_or_else(|| error(libc::EINVAL))?;
            let span = Span::new(from, len as u64).map_err(|_| error(libc::EINVAL))?;
            let answer = ask(self.as_fd(), &Request::ReadFrom { span, owner }, len)?;
            let into = rest[..len].get_mut(..answer.len()).ok_or_else(|| error(libc::EPROTO))?;
            into.copy_from_slice(&answer);
            done += answer.len();
            if answer.len() < len {
                break;
            }
        }
        Ok(done)
    }

    /// Copies to the backing what was written on this node. It stays this node's.
    ///
    /// # Errors
    /// What the backing says.
    fn flush(&self, range: Option<Range<u64>>) -> io::Result<()> {
        ask(self.as_fd(), &Request::Flush(which(range.as_ref())?), 0).map(drop)
    }

    /// Gives up what was attached on this node: it is the backing's then, after it was flushed. Where another
    /// node has taken it over meanwhile nothing is done.
    ///
    /// # Errors
    /// ENODATA: some of the range was never attached here, or was written again since. EBUSY: it is written
    /// all the time, or the kernel reads it past the daemon.
    fn detach(&self, range: Option<Range<u64>>) -> io::Result<()> {
        ask(self.as_fd(), &Request::Detach(which(range.as_ref())?), 0).map(drop)
    }

    /// How long the file is by now, and what of it is only on this node.
    ///
    /// # Errors
    /// When the metadata service cannot be asked.
    fn ebb_stat(&self) -> io::Result<Stat> {
        let answer = ask(self.as_fd(), &Request::Stat, 256)?;
        Stat::decode(&answer).map_err(malformed)
    }

    /// Writes many pieces in a few requests; where they meet, a later one counts. What the model says of a
    /// write happens once, for all of them, before this returns. How many bytes are written: fewer than all
    /// when something stopped it after the first ones.
    ///
    /// # Errors
    /// When nothing was written. EINVAL: a piece lies where no file can be, or the file was opened to append.
    fn write_list(&self, pieces: &[WritePiece<'_>]) -> io::Result<usize> {
        write_list(self.as_fd(), pieces)
    }

    /// Reads many pieces in a few requests. How much there is of each goes into its `got`; returns the sum.
    ///
    /// # Errors
    /// When something cannot be read; what is in the buffers counts for nothing then.
    fn read_list(&self, pieces: &mut [ReadPiece<'_>]) -> io::Result<usize> {
        read_list(self.as_fd(), pieces)
    }

    /// Stands for the file on every node of the job ([`open_handle`]).
    ///
    /// # Errors
    /// ENOKEY: the job has no token to sign it with.
    fn handle(&self) -> io::Result<[u8; HANDLE]> {
        let answer = ask(self.as_fd(), &Request::Handle, HANDLE)?;
        answer.try_into().map_err(|_| error(libc::EPROTO))
    }
}

impl Extended for File {}

/// A path that stands for the file of a handle on this node, whose mount is at `mount`: for programs and libraries
/// that open files by path. It is in no listing, and nothing can be made or renamed there.
#[must_use]
pub fn handle_path(mount: &Path, handle: &[u8; HANDLE]) -> PathBuf {
    let name = handle_name(handle);
    PathBuf::from(OsString::from_vec([mount.as_os_str().as_bytes(), b"/.ebb/", &name].concat()))
}

/// Opens the file of a handle on this node, whose mount is at `mount`. No name is looked up. `flags` are those
/// of open(2), but O_CREAT.
///
/// # Errors
/// EACCES: nobody of this job made it, or the file may not be opened so. ESTALE: there is no such file any
/// more. ENOENT: that is no mount of Ebb.
pub fn open_handle(mount: &Path, handle: &[u8; HANDLE], flags: i32) -> io::Result<File> {
    if flags & (libc::O_CREAT | libc::O_TMPFILE) != 0 {
        return Err(error(libc::EINVAL));
    }
    let path = handle_path(mount, handle).into_os_string().into_vec();
    let path = CString::new(path).map_err(|_| error(libc::EINVAL))?;
    // SAFETY: the path ends with a zero.
    let fd = unsafe { libc::open(path.as_ptr(), flags | libc::O_CLOEXEC | libc::O_NOFOLLOW) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it was just opened, and nobody else has it.
    let file = unsafe { File::from_raw_fd(fd) };
    Ok(file)
}
