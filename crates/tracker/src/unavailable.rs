//! Why there is no tracker, in words for whoever reads the status of a mount.

use std::io;
use std::path::PathBuf;

/// Why writes of a file system cannot be tracked.
#[derive(Debug, thiserror::Error)]
pub enum Unavailable {
    /// Neither ext4 nor XFS.
    #[error("{} is on a file system (type {magic:#x}) whose writes cannot be tracked; ext4 and XFS can", dir.display())]
    FileSystem {
        /// The directory that was asked about.
        dir: PathBuf,
        /// What statfs says.
        magic: u64,
    },
    /// The kernel was built without type information.
    #[error("the kernel has no type information ({}: {source})", path.display())]
    NoBtf {
        /// What could not be read.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The type information cannot be read.
    #[error("the kernel's type information cannot be understood: {0}")]
    Btf(#[from] crate::btf::BtfError),
    /// A tracepoint or a field is missing, or not what it is elsewhere.
    #[error("this kernel does not have {0}")]
    Kernel(String),
    /// Capabilities are missing.
    #[error("not permitted ({step}): CAP_BPF and CAP_PERFMON, or root, are needed")]
    Privilege {
        /// What was refused.
        step: &'static str,
    },
    /// The kernel refused for another reason.
    #[error("{step}: {source}{log}")]
    Refused {
        /// What was refused.
        step: &'static str,
        /// The error.
        source: io::Error,
        /// The end of what the kernel says about the program; begins on a new line or is empty.
        log: String,
    },
    /// The trial writes were not seen as they should be.
    #[error("a trial in {} failed: {what}", dir.display())]
    Trial {
        /// Where.
        dir: PathBuf,
        /// What was seen and what not.
        what: String,
    },
    /// A file or directory of the trial.
    #[error("{}: {source}", path.display())]
    Io {
        /// Which one.
        path: PathBuf,
        /// What happened.
        source: io::Error,
    },
}

impl Unavailable {
    pub(crate) fn refused(step: &'static str, source: io::Error, log: String) -> Unavailable {
        match source.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) if log.is_empty() => Unavailable::Privilege { step },
            _ => Unavailable::Refused { step, source, log },
        }
    }
}
