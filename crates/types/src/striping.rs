//! How the bytes of a file are spread over storage targets. Words only; what they mean to a file
//! system is `ebb-backend`'s.

use serde::{Deserialize, Serialize};

/// A file's stripes: `size` bytes on one target, the next `size` bytes on the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Striping {
    /// Targets that the file is spread over.
    pub count: u16,
    /// Bytes in one stripe.
    pub size: u32,
}
