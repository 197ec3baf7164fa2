//! Where the kernel last saw each directory, so that it lets go of a place from which another
//! node has moved it.
//!
//! The kernel has one entry of a directory and moves it to where a look-up finds the directory.
//! It cannot do that while a rename between two directories is looking up its last names: then
//! rename(2) fails with ESTALE, however often the kernel asks again. An entry that is gone is
//! not in the way, so the old one is taken away before the look-up is answered.

use crate::kernel_pages::Kernel;
use ebb_fuse::{INodeNo, Notifier};
use ebb_locks::Mutex;
use ebb_types::{Ino, Name};
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// How long a look-up waits for the kernel to let go. The rename that waits for the look-up may
/// hold the lock that this needs; when it then fails and is tried again by the kernel, this has
/// had its turn. Long for a machine that is busy: whoever is answered too early fails.
const LET_GO_WAIT: Duration = Duration::from_secs(1);

type Place = (Ino, Name);

/// Known to the adapter and to the mount, which has the way to the kernel.
#[derive(Default)]
pub struct Places {
    table: Mutex<Table>,
    kernel: OnceLock<Notifier>,
}

#[derive(Default)]
struct Table {
    of: HashMap<Ino, Place>,
    at: HashMap<Place, Ino>,
}

impl Table {
    /// Notes the place of `ino`; the one that it had.
    fn put(&mut self, ino: Ino, place: Place) -> Option<Place> {
        let old = self.take(ino);
        if let Some(other) = self.at.insert(place.clone(), ino) {
            self.of.remove(&other);
        }
        self.of.insert(ino, place);
        old
    }

    fn take(&mut self, ino: Ino) -> Option<Place> {
        let old = self.of.remove(&ino)?;
        self.at.remove(&old);
        Some(old)
    }

    /// The kernel carried a rename out.
    fn renamed(&mut self, from: Place, to: Place, exchange: bool) {
        let moved = self.at.get(&from).copied();
        let other = self.at.get(&to).copied();
        for ino in [moved, other].into_iter().flatten() {
            self.take(ino);
        }
        if let Some(ino) = other.filter(|_| exchange) {
            self.put(ino, from);
        }
        if let Some(ino) = moved {
            self.put(ino, to);
        }
    }
}

impl Kernel for Places {
    fn drop_pages(&self, ino: Ino) {
        if let Some(kernel) = self.kernel.get() {
            // ENOENT: the kernel does not know the inode.
            let _ = kernel.inval_inode(INodeNo(ino.0), 0, 0);
        }
    }
}

impl Places {
    /// From now on the kernel can be told.
    pub fn connect(&self, kernel: Notifier) {
        // There is one mount for one adapter.
        let _ = self.kernel.set(kernel);
    }

    /// The kernel is about to learn that directory `ino` is there.
    pub fn note(&self, ino: Ino, parent: Ino, name: &Name) {
        self.table.lock().put(ino, (parent, name.clone()));
    }

    /// True when the kernel knows the directory there.
    pub fn is_at(&self, ino: Ino, parent: Ino, name: &Name) -> bool {
        self.table.lock().of.get(&ino).is_some_and(|(dir, at)| *dir == parent && at == name)
    }

    /// The same, and the kernel first forgets where it was.
    pub async fn found(self: &Arc<Places>, ino: Ino, parent: Ino, name: &Name) {
        let old = self.table.lock().put(ino, (parent, name.clone()));
        // Within one directory the kernel moves its entry in any case.
        let Some((dir, old_name)) = old.filter(|(dir, _)| *dir != parent) else { return };
        let places = Arc::clone(self);
        let tell = tokio::task::spawn_blocking(move || {
            if let Some(kernel) = places.kernel.get() {
                // ENOENT: the kernel has let go by itself.
                let _ = kernel.inval_entry(INodeNo(dir.0), old_name.as_bytes());
            }
        });
        if tokio::time::timeout(LET_GO_WAIT, tell).await.is_err() {
            tracing::debug!(%ino, "the kernel is still busy with the old place of a directory");
        }
    }

    /// A rename through this mount has been done.
    pub fn renamed(&self, from: (Ino, &Name), to: (Ino, &Name), exchange: bool) {
        let place = |(parent, name): (Ino, &Name)| (parent, name.clone());
        self.table.lock().renamed(place(from), place(to), exchange);
    }

    /// The kernel has forgotten the inode.
    pub fn forget(&self, ino: Ino) {
        self.table.lock().take(ino);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(parent: u64, name: &str) -> Place {
        (Ino(parent), Name::new(name.as_bytes()).unwrap())
    }

    #[test]
    fn a_directory_has_one_place_and_a_place_one_directory() {
        let mut t = Table::default();
        assert_eq!(t.put(Ino(5), place(1, "a")), None);
        assert_eq!(t.put(Ino(5), place(2, "b")), Some(place(1, "a")));
        t.put(Ino(6), place(2, "b"));
        assert_eq!(t.put(Ino(5), place(3, "c")), None, "its place was taken by another");
        assert_eq!((t.of.len(), t.at.len()), (2, 2));
        assert_eq!(t.take(Ino(6)), Some(place(2, "b")));
        assert_eq!((t.of.len(), t.at.len()), (1, 1));
    }

    #[test]
    fn renames_carry_directories_along() {
        let mut t = Table::default();
        t.put(Ino(5), place(1, "a"));
        t.put(Ino(6), place(2, "b"));
        t.renamed(place(1, "a"), place(2, "b"), true);
        assert_eq!(t.at[&place(2, "b")], Ino(5));
        assert_eq!(t.at[&place(1, "a")], Ino(6));
        t.renamed(place(1, "a"), place(2, "b"), false);
        assert_eq!(t.at, HashMap::from([(place(2, "b"), Ino(6))]));
        assert_eq!(t.of, HashMap::from([(Ino(6), place(2, "b"))]));
        t.renamed(place(1, "file"), place(2, "b"), false);
        assert!(t.at.is_empty() && t.of.is_empty());
    }
}
