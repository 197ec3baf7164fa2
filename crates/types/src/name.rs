//! One component of a path: checked once, then trusted.

use crate::errno::Errno;
use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;

/// Names that begin so are Ebb's own on the backing (files that are not whole yet); they are
/// not shown in the mount and cannot be made through it.
pub const PART_PREFIX: &[u8] = b".ebb-part-";

/// Where the recoveries of a job tell each other what they have, on the backing.
#[must_use]
pub fn board_of(job: u64) -> String {
    format!("{}recovery-{job:016x}", String::from_utf8_lossy(PART_PREFIX))
}

/// A file name: 1 to 255 bytes, no `/`, no NUL, not `.` or `..`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Name(Box<[u8]>);

impl Name {
    /// Longest name in bytes.
    pub const MAX: usize = 255;

    /// Checks `bytes` and takes them as a name.
    pub fn new(bytes: &[u8]) -> Result<Name, Errno> {
        match bytes {
            b"" => Err(Errno::ENOENT),
            b"." | b".." => Err(Errno::EINVAL),
            b if b.len() > Name::MAX => Err(Errno::ENAMETOOLONG),
            b if b.iter().any(|c| *c == b'/' || *c == 0) => Err(Errno::EINVAL),
            b => Ok(Name(b.into())),
        }
    }

    /// Its bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// For paths.
    #[must_use]
    pub fn as_os_str(&self) -> &OsStr {
        OsStr::from_bytes(&self.0)
    }

    /// True for names that Ebb keeps for itself on the backing.
    #[must_use]
    pub fn is_reserved(&self) -> bool {
        self.0.starts_with(PART_PREFIX)
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", String::from_utf8_lossy(&self.0))
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", String::from_utf8_lossy(&self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_names_are_refused() {
        for bad in [&b""[..], b".", b"..", b"a/b", b"a\0b", &[b'x'; 256]] {
            assert!(Name::new(bad).is_err(), "{bad:?}");
        }
        assert!(Name::new(&[b'x'; 255]).is_ok());
        assert!(Name::new(b"...").is_ok());
        assert!(Name::new(b".ebb-part-1").is_ok_and(|n| n.is_reserved()));
    }
}
