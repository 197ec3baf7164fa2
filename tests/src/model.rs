//! How a correct program publishes and looks up under each model: the "what your program must
//! do" column of docs/semantics.md.

use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io;
use std::path::Path;

/// The models that every mount knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Model {
    Posix,
    Commit,
    Session,
    Mpiio,
    Romio,
}

impl Model {
    /// All of them.
    pub const ALL: [Model; 5] =
        [Model::Posix, Model::Commit, Model::Session, Model::Mpiio, Model::Romio];

    /// As the command line calls it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Model::Posix => "posix",
            Model::Commit => "commit",
            Model::Session => "session",
            Model::Mpiio => "mpiio",
            Model::Romio => "romio",
        }
    }

    /// What a writer does so that others may see its bytes, and no more than that.
    pub fn publish(self, file: File) -> io::Result<Option<File>> {
        match self {
            Model::Posix => Ok(Some(file)),
            Model::Commit | Model::Mpiio | Model::Romio => file.sync_all().map(|()| Some(file)),
            Model::Session => close(file).map(|()| None),
        }
    }

    /// What a reader that may have the file open does before it reads.
    pub fn look_up(self, open: Option<File>, path: &Path) -> io::Result<File> {
        match (self, open) {
            (Model::Posix | Model::Commit | Model::Romio, Some(file)) => Ok(file),
            (Model::Mpiio, Some(file)) => file.sync_all().map(|()| file),
            (_, open) => {
                drop(open);
                File::options().read(true).write(true).open(path)
            }
        }
    }
}

/// Closes and tells the error, which dropping would hide.
pub fn close(file: File) -> io::Result<()> {
    use std::os::fd::IntoRawFd;
    let fd = file.into_raw_fd();
    // SAFETY: the descriptor was just taken out of its owner.
    match unsafe { libc::close(fd) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
