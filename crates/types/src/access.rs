//! What an open file is for.

/// What an open wants to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// O_RDONLY.
    Read,
    /// O_WRONLY.
    Write,
    /// O_RDWR: may also map the file writably.
    ReadWrite,
}

impl Access {
    /// It may change the file.
    #[must_use]
    pub fn writes(self) -> bool {
        self != Access::Read
    }
}
