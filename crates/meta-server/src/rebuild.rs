//! A service without its journal: what there is is found again, from what nodes say.
//!
//! Names, modes and bytes of what the backing does not have come back as after a power loss
//! (`reassert.rs`), only that all of them are forgotten and not those of a second. What the backing has is
//! found there; but nodes and the kernels above them know it by numbers that this service would not
//! give it. So directories that names are in, as the nodes have heard of them, and files of which they say where
//! they are, get the numbers that they had, where the object is still the same one. Part files
//! had names that nobody can foretell: they get new ones.

use crate::backing::Backing;
use crate::core::Core;
use ebb_namespace::{BackingPath, Book, Home};
use ebb_types::{Errno, FileKind, Ino, Name};
use rustix::fs::{AtFlags, RenameFlags};
use std::collections::BTreeSet;
use std::os::fd::AsFd;

/// Of so many files nodes may say where they are.
const LOCATED_MAX: usize = 1 << 22;

/// Where a node says that a file is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Located {
    /// From the root of the backing; or its part file was there.
    pub paths: Vec<Vec<Name>>,
    /// `st_ino` of the object.
    pub object: u64,
}

impl Core {
    /// A node says where files are. It comes too late when others have gone on.
    pub fn hear_where(&self, ino: Ino, located: Located) {
        if self.state().is_being_rebuilt() {
            let mut known = self.words.located.lock();
            if known.len() < LOCATED_MAX {
                known.insert(ino, located);
            }
        }
    }

    /// Directories that names are in, and the files that nodes have.
    pub(crate) async fn find_what_there_is(&self, told: &Book) {
        let mut tried = BTreeSet::new();
        loop {
            let mut dirs = self.state().ns.directories_in(told);
            dirs.retain(|dir| tried.insert(dir.clone()));
            if dirs.is_empty() {
                break;
            }
            for (parent, name, ino) in dirs {
                self.find_object(parent, &name, ino, None).await;
            }
        }
        let located = std::mem::take(&mut *self.words.located.lock());
        for (ino, at) in located {
            for path in &at.paths {
                let Some((name, dirs)) = path.split_last() else { continue };
                match name.is_reserved() {
                    true => self.take_part(ino, dirs, name, at.object).await,
                    false => self.find_file(ino, dirs, name, at.object).await,
                }
            }
        }
    }

    /// What is there is this inode, if it is that object and nothing else says otherwise.
    async fn find_object(&self, parent: Ino, name: &Name, ino: Ino, object: Option<u64>) {
        if ebb_namespace::is_found(ino) {
            // Its number follows from the object.
            if let Err(e) = self.look_again(parent, name).await {
                tracing::debug!(%parent, %name, error = %e, "not looked at");
            }
            return;
        }
        let _turn = self.turn().await;
        let Some(path) = self.state().ns.path(parent).map(|dir| dir.join(name)) else { return };
        let Ok(found) = self.backing.run(move |b| b.stat(&path)).await else { return };
        let same = match object {
            Some(object) => found.kind == FileKind::Regular && found.seen.key.ino == object,
            None => found.kind == FileKind::Directory,
        };
        if same {
            let mut state = self.state();
            let records = state.ns.plan_known(parent, name, ino, &found);
            self.commit_ns(&mut state, records);
        }
    }

    /// The directory of that path, looked for on the backing.
    async fn find_dir(&self, dirs: &[Name]) -> Option<Ino> {
        let mut at = Ino::ROOT;
        for name in dirs {
            let known =
                |core: &Core| core.state().ns.dentry(at, name).ok().flatten().map(|d| d.ino);
            let next = match known(self) {
                Some(next) => Some(next),
                None => {
                    self.look_again(at, name).await.ok()?;
                    known(self)
                }
            };
            at = next?;
        }
        let state = self.state();
        state.ns.get(at).filter(|dir| dir.is_dir() && dir.home == Home::Own).map(|dir| dir.ino)
    }

    async fn find_file(&self, ino: Ino, dirs: &[Name], name: &Name, object: u64) {
        if self.state().ns.get(ino).is_none()
            && let Some(dir) = self.find_dir(dirs).await
        {
            self.find_object(dir, name, ino, Some(object)).await;
        }
    }

    /// The part file of an inode gets the name that this service looks for.
    async fn take_part(&self, ino: Ino, dirs: &[Name], name: &Name, object: u64) {
        if ebb_namespace::part_of(name) != Some(ino) {
            return;
        }
        let Some(dir) = self.find_dir(dirs).await else { return };
        let (from, to) = {
            let state = self.state();
            let Some(dir) = state.ns.path(dir) else { return };
            (dir.join(name), dir.join(&state.ns.part_name(ino)))
        };
        let shown = from.to_bytes();
        if let Err(e) = self.backing.run(move |b| b.take_part(&from, &to, object)).await {
            let path = String::from_utf8_lossy(&shown).into_owned();
            // It may have got its name.
            tracing::debug!(path, error = %e, "no part file of this object is there");
        }
    }
}

impl Backing {
    /// Gives a part file another name, if it is that object and nobody else's.
    fn take_part(&self, from: &BackingPath, to: &BackingPath, object: u64) -> Result<(), Errno> {
        let (Some((dir, from)), Some((_, to))) = (from.split(), to.split()) else {
            return Err(Errno::EINVAL);
        };
        let dir = self.dir(dir)?;
        let there = rustix::fs::statat(dir.as_fd(), from.as_os_str(), AtFlags::SYMLINK_NOFOLLOW)
            .map_err(crate::backing::errno)?;
        let regular = rustix::fs::FileType::from_raw_mode(there.st_mode).is_file();
        if !regular || there.st_nlink != 1 || there.st_ino != object {
            return Err(Errno::ESTALE);
        }
        let (from, to) = (from.as_os_str(), to.as_os_str());
        rustix::fs::renameat_with(dir.as_fd(), from, dir.as_fd(), to, RenameFlags::NOREPLACE)
            .map_err(crate::backing::errno)
    }
}
