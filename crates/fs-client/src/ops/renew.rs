//! Files that begin anew: what the backing has under their name stays there until they are whole, and
//! nobody has them open (`ebb_namespace::Older`).

use crate::file::{CachedFile, State};
use crate::node::Node;
use ebb_meta_client::Base;
use ebb_node_journal::Home;
use ebb_types::{Errno, Ino};
use std::sync::Arc;

impl Node {
    /// Which objects of the backing a file has to do with, as the service says with each map.
    pub(crate) fn learn_base(&self, file: &CachedFile, state: &mut State, base: Base) {
        // Without a name it is nowhere but behind the descriptor.
        let named = !state.orphan && !state.path.is_empty();
        let other = |open: &(u64, _)| open.0 != base.object;
        if named && base.object != 0 && state.backing.as_ref().is_some_and(other) {
            self.close_aside(state.backing.take());
            self.let_go(file.ino);
        }
        if base.replaces == 0 || state.under.as_ref().is_some_and(|u| u.ino == base.replaces) {
            return;
        }
        if state.home.home().is_some_and(|home| home.ino == base.replaces) {
            let look = state.home.look();
            state.home.found(look, None);
        }
        let path = state.path.clone();
        state.under = Some(Home { path, ino: base.replaces, seen: None, changing: false });
        self.note_header(file, state);
    }

    /// Nobody has the file open here any more: if nobody has it elsewhere, and nothing of it is missing on
    /// the backing, it takes the place of the older one. What fails is the next drain's.
    pub(crate) async fn replace_when_closed(&self, file: &Arc<CachedFile>) {
        let older = {
            let state = file.state.read();
            let clean = state.view.unflushed_bytes() == 0 && !state.view.has_unattached();
            let waits = clean && !state.orphan && state.opens == 0;
            state.under.as_ref().filter(|_| waits).map(|u| u.ino)
        };
        let Some(older) = older else { return };
        match self.meta.materialize_one(file.ino, true).await {
            Ok(done) if done.done > 0 => self.note_replaced(file, older),
            Ok(_) => {}
            Err(e) => {
                tracing::debug!(ino = %file.ino, error = %e, "not published at the last close")
            }
        }
    }

    /// It has its name on the backing, in the place of an older one where there is one, whoever has it open:
    /// what fsync promises under `--durability backing`, also of a file without a byte.
    pub(crate) async fn name_now(&self, ino: Ino) -> Result<(), Errno> {
        let Some(file) = self.file(ino) else { return Ok(()) };
        let older = file.state.read().under.as_ref().map(|u| u.ino);
        let done = self.meta.materialize_one(ino, false).await?;
        match (done.failures.first(), older) {
            (Some(failure), _) => return Err(Errno(failure.errno)),
            (None, Some(older)) if done.done > 0 => self.note_replaced(&file, older),
            (None, _) => {}
        }
        Ok(())
    }
}
