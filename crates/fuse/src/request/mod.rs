//! What the kernel asks. [`Head`] is before every request, [`Request`] what is behind it, and [`Call`]
//! a request together with the answer that it waits for. The table below says which operation is
//! answered with what.
//!
//! Names are bytes without a zero in them; nothing else is promised of them here.

mod attributes;
mod data;
mod names;
mod session;
#[cfg(test)]
#[cfg(target_endian = "little")]
mod tests;

pub use crate::body::Malformed;
pub use attributes::*;
pub use data::*;
pub use names::*;
pub use session::*;

use crate::abi::{self, opcode};
use crate::body::Body;
use crate::reply::*;
use fuser::{INodeNo, RequestId};
use zerocopy::FromBytes;

/// What is before every request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// The kernel's number of the request.
    pub unique: RequestId,
    /// What is asked.
    pub opcode: u32,
    /// Of which inode; for names, of which directory.
    pub inode: INodeNo,
    /// Who asks.
    pub uid: u32,
    /// In which group.
    pub gid: u32,
    /// In which process.
    pub pid: u32,
}

impl Head {
    /// The head of a request, and what is behind it.
    ///
    /// # Errors
    /// When these are not all bytes of one request.
    pub fn decode(bytes: &[u8]) -> Result<(Head, &[u8]), Malformed> {
        let (raw, body) = abi::InHeader::read_from_prefix(bytes).map_err(|_| Malformed::Short)?;
        if raw.len as usize != bytes.len() {
            return Err(Malformed::Short);
        }
        let head = Head {
            unique: RequestId(raw.unique),
            opcode: raw.opcode,
            inode: INodeNo(raw.nodeid),
            uid: raw.uid,
            gid: raw.gid,
            pid: raw.pid,
        };
        Ok((head, body))
    }

    /// False for what nobody waits for.
    #[must_use]
    pub fn wants_answer(&self) -> bool {
        !matches!(self.opcode, opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT)
    }
}

/// Decodes what is behind the head of one operation.
trait Decode<'a>: Sized {
    fn decode(head: &Head, body: &mut Body<'a>) -> Result<Self, Malformed>;
}

macro_rules! requests {
    ($($($opcode:ident)|+ => $kind:ident($asked:ty) -> $reply:ident,)*) => {
        /// What is asked.
        #[derive(Clone, Debug, PartialEq)]
        #[allow(missing_docs)]
        pub enum Request<'a> {
            $($kind($asked),)*
            /// The kernel lets go of inodes.
            Forget(Forgets<'a>),
            /// Whoever waits for the answer to this request has got a signal.
            Interrupt(RequestId),
            /// The kernel's offer at the start of a session.
            Init(Init),
            /// The end of a session.
            Destroy,
            /// An operation that is not known here.
            Unknown,
        }

        /// A request and the answer that it waits for.
        #[derive(Debug)]
        #[allow(missing_docs)]
        pub enum Call<'a> {
            $($kind($asked, $reply),)*
        }

        impl<'a> Request<'a> {
            /// What is behind a head.
            ///
            /// # Errors
            /// When the body is not one of such a request.
            pub fn decode(head: &Head, body: &'a [u8]) -> Result<Request<'a>, Malformed> {
                let body = &mut Body(body);
                Ok(match head.opcode {
                    $($(opcode::$opcode)|+ => Request::$kind(Decode::decode(head, body)?),)*
                    opcode::FORGET | opcode::BATCH_FORGET => {
                        Request::Forget(Decode::decode(head, body)?)
                    }
                    opcode::INTERRUPT => {
                        Request::Interrupt(RequestId(body.take::<abi::InterruptIn>()?.unique))
                    }
                    opcode::INIT => Request::Init(Decode::decode(head, body)?),
                    opcode::DESTROY => Request::Destroy,
                    _ => Request::Unknown,
                })
            }

            /// Ties a request to its answer; gives that back when no file system is to be asked.
            ///
            /// # Errors
            /// For what is not an operation.
            pub fn with(self, answer: Answer) -> Result<Call<'a>, Answer> {
                match self {
                    $(Request::$kind(asked) => Ok(Call::$kind(asked, answer.into())),)*
                    _ => Err(answer),
                }
            }
        }

        impl Call<'_> {
            /// The operation fails.
            pub fn error(self, error: fuser::Errno) {
                match self {
                    $(Call::$kind(_, reply) => reply.error(error),)*
                }
            }
        }
    };
}

requests! {
    LOOKUP => Lookup(Named<'a>) -> ReplyEntry,
    GETATTR => GetAttr(GetAttr) -> ReplyAttr,
    SETATTR => SetAttr(SetAttr) -> ReplyAttr,
    READLINK => ReadLink(Inode) -> ReplyData,
    SYMLINK => SymLink(SymLink<'a>) -> ReplyEntry,
    MKNOD => MkNod(MkNod<'a>) -> ReplyEntry,
    MKDIR => MkDir(MkDir<'a>) -> ReplyEntry,
    UNLINK => Unlink(Named<'a>) -> ReplyEmpty,
    RMDIR => RmDir(Named<'a>) -> ReplyEmpty,
    RENAME | RENAME2 => Rename(Rename<'a>) -> ReplyEmpty,
    LINK => Link(Link<'a>) -> ReplyEntry,
    OPEN => Open(Open) -> ReplyOpen,
    CREATE => Create(Create<'a>) -> ReplyCreate,
    READ => Read(Read) -> ReplyData,
    WRITE => Write(Write<'a>) -> ReplyWrite,
    FLUSH => Flush(Flush) -> ReplyEmpty,
    RELEASE => Release(Release) -> ReplyEmpty,
    FSYNC => Fsync(Fsync) -> ReplyEmpty,
    FALLOCATE => Fallocate(Fallocate) -> ReplyEmpty,
    LSEEK => Lseek(Lseek) -> ReplyLseek,
    COPY_FILE_RANGE => CopyFileRange(CopyFileRange) -> ReplyWrite,
    IOCTL => Ioctl(Ioctl<'a>) -> ReplyIoctl,
    OPENDIR => OpenDir(Open) -> ReplyOpen,
    READDIR => ReadDir(ReadDir) -> ReplyDirectory,
    READDIRPLUS => ReadDirPlus(ReadDir) -> ReplyDirectoryPlus,
    RELEASEDIR => ReleaseDir(Release) -> ReplyEmpty,
    FSYNCDIR => FsyncDir(Fsync) -> ReplyEmpty,
    STATFS => StatFs(Inode) -> ReplyStatfs,
    ACCESS => Access(Access) -> ReplyEmpty,
    SETXATTR => SetXattr(SetXattr<'a>) -> ReplyEmpty,
    GETXATTR => GetXattr(GetXattr<'a>) -> ReplyXattr,
    LISTXATTR => ListXattr(ListXattr) -> ReplyXattr,
    REMOVEXATTR => RemoveXattr(RemoveXattr<'a>) -> ReplyEmpty,
    GETLK => GetLock(Lock) -> ReplyLock,
    SETLK | SETLKW => SetLock(Lock) -> ReplyEmpty,
}
