//! The error that an application sees. Chosen once, where an operation fails; carried unchanged.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A Linux errno, never 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Errno(pub i32);

macro_rules! errnos {
    ($($n:ident)*) => {
        #[allow(missing_docs)]
        impl Errno { $(pub const $n: Errno = Errno(libc::$n);)* }
        impl Errno {
            /// Its symbolic name, for logs and status.
            #[must_use]
            pub fn name(self) -> &'static str {
                $(if self.0 == libc::$n { return stringify!($n); })*
                "E?"
            }
        }
    };
}
errnos!(EPERM ENOENT EINTR EIO ENXIO E2BIG EBADF EAGAIN ENOMEM EACCES EEXIST EXDEV ENODEV ENOTDIR
    EISDIR EINVAL EFBIG ENOSPC EROFS EMLINK ERANGE EDEADLK ENAMETOOLONG ENOLCK ENOSYS ENOTEMPTY
    ELOOP ENODATA EPROTO EOVERFLOW EOPNOTSUPP ESTALE EDQUOT ETIMEDOUT EHOSTUNREACH ENOTCONN
    EBUSY ECANCELED ETXTBSY EMFILE ENFILE ECONNREFUSED EREMCHG ENOTTY ENOKEY EUSERS);

impl Errno {
    /// True for what a file system answers that has nothing left: blocks, inodes or quota.
    #[must_use]
    pub fn is_full(self) -> bool {
        matches!(self, Errno::ENOSPC | Errno::EDQUOT)
    }
}

impl From<std::io::Error> for Errno {
    fn from(e: std::io::Error) -> Errno {
        Errno::from(&e)
    }
}

impl From<&std::io::Error> for Errno {
    fn from(e: &std::io::Error) -> Errno {
        Errno(match e.raw_os_error() {
            Some(n) if n > 0 => n,
            _ if e.kind() == std::io::ErrorKind::TimedOut => libc::ETIMEDOUT,
            _ => libc::EIO,
        })
    }
}

impl From<Errno> for std::io::Error {
    fn from(e: Errno) -> std::io::Error {
        std::io::Error::from_raw_os_error(e.0)
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}({})", self.name(), self.0)
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", std::io::Error::from_raw_os_error(self.0))
    }
}

impl std::error::Error for Errno {}
