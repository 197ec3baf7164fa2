//! The twin of a cache file that is written past the daemon: what was put there of others' bytes,
//! at the same offsets. What differs from it was written here.

use crate::cache;
use crate::heir::Heirloom;
use ebb_types::Ino;
use std::fs::File;
use std::io;
use std::ops::Deref;
use std::sync::Arc;

/// Where twins are kept for the daemon after this one.
#[derive(Clone, Default)]
pub struct Keeper(Option<(Arc<Heirloom>, Ino)>);

impl Keeper {
    /// Of an inode; `None`: no daemon comes after this one.
    #[must_use]
    pub fn new(ino: Ino, heir: Option<&Arc<Heirloom>>) -> Keeper {
        let heir = heir.filter(|h| h.is_handed_over());
        Keeper(heir.map(|heir| (Arc::clone(heir), ino)))
    }

    /// The cache file agrees with this size that others know.
    pub fn sized(&self, size: u64) {
        if let Some((heir, ino)) = &self.0 {
            heir.table.sized(*ino, size);
        }
    }

    /// A new twin.
    pub fn make(&self, beside: &File) -> io::Result<Twin> {
        let file = cache::nameless_beside(beside)?;
        if let Some((heir, ino)) = &self.0 {
            heir.keep_moving()?;
            heir.keep_twin(*ino, file.try_clone()?.into())?;
        }
        Ok(Twin { file, keeper: self.clone() })
    }

    /// The one of the daemon before this one.
    #[must_use]
    pub fn kept(&self) -> Option<Twin> {
        let (heir, ino) = self.0.as_ref()?;
        Some(Twin { file: File::from(heir.kept_twin(*ino)?), keeper: self.clone() })
    }
}

/// A twin.
pub struct Twin {
    file: File,
    keeper: Keeper,
}

impl Twin {
    /// Does `work`, which puts `bytes` there and into the cache file. If this daemon dies meanwhile,
    /// the next one knows.
    pub fn moving<T>(
        &self,
        at: u64,
        bytes: &[u8],
        work: impl FnOnce(&File) -> io::Result<T>,
    ) -> io::Result<T> {
        let keeper = self.keeper.0.as_ref();
        let _noted = keeper.map(|(heir, ino)| heir.moving.note(*ino, at, bytes)).transpose()?;
        work(&self.file)
    }
}

impl Deref for Twin {
    type Target = File;

    fn deref(&self) -> &File {
        &self.file
    }
}

impl Drop for Twin {
    fn drop(&mut self) {
        if let Some((heir, ino)) = &self.keeper.0 {
            heir.forget_twin(*ino);
        }
    }
}
