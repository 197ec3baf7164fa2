//! Takes a request apart, front to back. Whatever its lengths claim, nothing beyond its end is
//! looked at.

use std::ffi::CStr;
use zerocopy::FromBytes;

/// Why bytes are no request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// They end too early, or not where they say.
    #[error("it is shorter than it says")]
    Short,
    /// A name has no end.
    #[error("a name has no end")]
    Name,
    /// An offset is beyond what a file can have.
    #[error("an offset is negative")]
    Offset,
}

impl Malformed {
    /// What a request is answered with that cannot be understood.
    #[must_use]
    pub fn errno(self) -> fuser::Errno {
        match self {
            Malformed::Short | Malformed::Name => fuser::Errno::EIO,
            Malformed::Offset => fuser::Errno::EINVAL,
        }
    }
}

/// What is left of a request.
pub(crate) struct Body<'a>(pub &'a [u8]);

impl<'a> Body<'a> {
    /// The next structure.
    pub fn take<T: FromBytes>(&mut self) -> Result<T, Malformed> {
        let (taken, rest) = T::read_from_prefix(self.0).map_err(|_| Malformed::Short)?;
        self.0 = rest;
        Ok(taken)
    }

    /// So many bytes.
    pub fn bytes(&mut self, len: u32) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.0.split_at_checked(len as usize).ok_or(Malformed::Short)?;
        self.0 = rest;
        Ok(taken)
    }

    /// The bytes before a zero.
    pub fn name(&mut self) -> Result<&'a [u8], Malformed> {
        let name = CStr::from_bytes_until_nul(self.0).map_err(|_| Malformed::Name)?.to_bytes();
        self.0 = &self.0[name.len() + 1..];
        Ok(name)
    }
}

/// An offset as the kernel has them: signed, and never negative.
pub(crate) fn offset(raw: u64) -> Result<u64, Malformed> {
    i64::try_from(raw).map(|_| raw).map_err(|_| Malformed::Offset)
}
