//! Files that lose their last name while they are open here. What of them is only on the backing
//! is gone there with the name; who has it open keeps it by a descriptor, which must outlive the
//! daemon, too.

use crate::file::CachedFile;
use crate::node::Node;
use ebb_backend::BackingFile;
use ebb_handover::Heirloom;
use ebb_meta_client::{Backing, Wish};
use ebb_types::{Ino, Name};
use std::sync::Arc;

impl Node {
    /// A name is about to be taken away, by an unlink or by a rename over it. With a supervisor
    /// only: a daemon that nobody follows takes its descriptors along.
    pub(crate) async fn keep_open_file(&self, parent: Ino, name: &Name) {
        if self.heir.get().is_none() || self.handles.open_files() == 0 {
            return;
        }
        let Ok(attr) = self.lookup(parent, name).await else { return };
        if let Some(file) = self.file(attr.ino) {
            self.keep_backing_of(&file).await;
        }
    }

    async fn keep_backing_of(&self, file: &Arc<CachedFile>) {
        // Whoever releases the last handle waits for this.
        let _turn = file.turn.lock().await;
        if !self.is_to_be_kept(file) {
            return;
        }
        let known = file.state.read().view.known_version();
        let Ok(opened) = self.meta.open(file.ino, false, false, known, Wish::No).await else {
            return;
        };
        let Some(at) = opened.backing else { return };
        let Ok(Some((ino, backing, _))) = self.open_backing(file, &at).await else { return };
        self.keep(file, &*backing);
        let replaced = file.state.write().backing.replace((ino, backing));
        self.close_aside(replaced);
    }

    /// Bytes of an open file go to the backing, from where alone they may be known afterwards. When
    /// the file loses its name there, a descriptor leads to them still; while it had no place
    /// there, nobody could have one.
    pub(crate) async fn keep_flushed(&self, file: &CachedFile, at: &Backing) {
        if !self.is_to_be_kept(file) {
            return;
        }
        // One that is not there any more is not flushed, either.
        let Ok(Some((ino, backing, _))) = self.open_backing(file, at).await else { return };
        self.keep(file, &*backing);
        let mut state = file.state.write();
        // The last handle may have gone meanwhile.
        if state.opens > 0 {
            let replaced = state.backing.replace((ino, backing));
            self.close_aside(replaced);
        } else {
            drop(state);
            self.let_go(file.ino);
            self.close_aside(Some((ino, backing)));
        }
    }

    fn is_to_be_kept(&self, file: &CachedFile) -> bool {
        let state = file.state.read();
        let lacks = |heir: &Arc<Heirloom>| !heir.is_kept(file.ino);
        state.opens > 0 && (state.backing.is_none() || self.heir.get().is_some_and(lacks))
    }

    fn keep(&self, file: &CachedFile, backing: &dyn BackingFile) {
        let Some(heir) = self.heir.get() else { return };
        let kept = backing.descriptor().map(|fd| heir.keep(file.ino, fd));
        if let Some(Err(e)) = kept {
            tracing::warn!(ino = %file.ino, error = %e, "an open file would not outlive this daemon");
        }
    }

    /// The descriptor that a daemon before this one had kept.
    pub(crate) fn kept_backing(&self, file: &CachedFile) {
        let kept = self.heir.get().and_then(|heir| heir.kept(file.ino));
        let Some(backing) = kept.and_then(|fd| self.backing.adopt(fd)) else { return };
        let mut state = file.state.write();
        if state.path.is_empty() || state.backing.is_none() {
            state.backing = Some((0, backing));
        }
    }

    /// Nobody has the file open any more.
    pub(crate) fn let_go(&self, ino: Ino) {
        if let Some(heir) = self.heir.get()
            && heir.is_kept(ino)
        {
            heir.forget(ino);
        }
    }
}
