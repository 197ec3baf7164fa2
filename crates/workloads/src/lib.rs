//! The I/O patterns with which such systems are measured in the literature, run on directories and
//! timed. It knows files and threads, and nothing of what is mounted where: the same pattern runs
//! on mounts of several nodes and on a bare directory. Everything that is read is checked.
//!
//! * [`shared`]: N processes on one shared file (CN-W, SN-W, CC-R, CS-R)
//! * [`checkpoint`]: checkpoint and restart with a partner's copy (SCR, HACC-IO's nine arrays)
//! * [`samples`]: random reads of training samples
//! * [`single`]: one node's records of several sizes, and small files
//! * [`pairs`]: producers and consumers
//! * [`remote`]: first reads of another node's bytes, and a plain TCP copy beside them

pub mod buffer;
pub mod checkpoint;
pub mod content;
pub mod crew;
pub mod measure;
pub mod pairs;
pub mod paper;
pub mod remote;
pub mod report;
pub mod samples;
pub mod shared;
pub mod single;
pub mod svg;

pub use buffer::PageBuffer;
pub use crew::{Place, Publish};
pub use measure::{Measure, Spread, Unit};

/// What went wrong: I/O on a path, or bytes that are not what was written.
#[derive(Debug, thiserror::Error)]
pub enum WorkloadError {
    /// A call failed.
    #[error("{what}: {error}")]
    Io {
        /// Which call on which path.
        what: String,
        /// Why.
        error: std::io::Error,
    },
    /// A read gave bytes that nobody wrote there.
    #[error("{path}: wrong bytes at offset {offset}")]
    Wrong {
        /// The file.
        path: String,
        /// Where.
        offset: u64,
    },
    /// A process of the workload panicked.
    #[error("a process of the workload died")]
    Died,
}

/// Names the call when it fails.
pub(crate) trait Told<T> {
    fn told(self, what: impl FnOnce() -> String) -> Result<T, WorkloadError>;
}

impl<T> Told<T> for std::io::Result<T> {
    fn told(self, what: impl FnOnce() -> String) -> Result<T, WorkloadError> {
        self.map_err(|error| WorkloadError::Io { what: what(), error })
    }
}
