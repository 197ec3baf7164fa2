//! Appends whose outcome was not heard (yet): the answer was an error, or none came in time, and the
//! service may have made room at the end of the file all the same. The program was told that
//! nothing was written; the room is this node's, and nobody has bytes for it. It is filled with
//! zeros, as after a daemon that died between the answer and its bytes.

use super::data::zeros_instead;
use super::sync::is_gone;
use crate::file::{CachedFile, State};
use crate::node::Node;
use ebb_consistency::Source;
use ebb_types::{ByteRange, Errno, NodeId, Time, Version};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Between two attempts to hear of it.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// What the service gave this node after `since`, and is not here. What the disk lost stays lost.
fn given(state: &State, me: NodeId, since: Version) -> Vec<(ByteRange, Version)> {
    let pieces = state.view.plan_read(ByteRange::ALL);
    let new = pieces.into_iter().filter_map(|piece| match piece.source {
        Source::Peer { node, version } if node == me && version > since => {
            Some((piece.range, version))
        }
        _ => None,
    });
    let damaged = |range: &ByteRange| state.damaged.iter().any(|d| !d.intersect(*range).is_empty());
    new.filter(|(range, _)| !damaged(range)).collect()
}

impl Node {
    /// An append has failed; `since`: the newest version that was heard of when it was asked for.
    /// Looked into at once, and until the service has said what the file is. The caller has the
    /// turn, and lets go of it.
    pub(crate) fn append_unheard(&self, file: &Arc<CachedFile>, since: Version) {
        file.state.write().append_unheard = Some(since);
        let (node, file) = (self.me_weak(), Arc::clone(file));
        self.runtime.spawn(async move {
            let mut pause = PAUSE_MIN;
            loop {
                let Some(node) = node.upgrade() else { return };
                let settled = {
                    let _turn = file.turn.lock().await;
                    node.settle_append(&file).await
                };
                let Err(error) = settled else { return };
                tracing::debug!(ino = %file.ino, %error, "what came of an append is not known yet");
                drop(node);
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(PAUSE_MAX);
            }
        });
    }

    /// Hears what came of an append that failed, if one did. The caller has the turn: nothing else
    /// is being appended.
    pub(crate) async fn settle_append(&self, file: &Arc<CachedFile>) -> Result<(), Errno> {
        let Some(since) = file.state.read().append_unheard else { return Ok(()) };
        match self.query_anew(file, ByteRange::ALL).await {
            Ok(()) => {}
            Err(e) if is_gone(e) => {
                file.state.write().append_unheard = None;
                return Ok(());
            }
            Err(e) => return Err(e),
        }
        let cache = file.cache_to_write(&self.cache)?;
        let filled = {
            let mut state = file.state.write();
            let given = given(&state, self.me, since);
            for (range, version) in &given {
                zeros_instead(&cache, *range)?;
                state.sums.forget(*range);
                state.view.write(*range);
                let size = state.view.published_size();
                let changes = state.view.appended(*range, *version, size);
                self.note_here(file, &state, (*range, *version), size, Time::now());
                self.note_changes(file, &changes);
            }
            state.append_unheard = None;
            given
        };
        if !filled.is_empty() {
            let path = file.label();
            tracing::warn!(
                path,
                ?filled,
                "an append failed after its place was taken: zeros there"
            );
            self.metrics.appends_undone.fetch_add(1, Relaxed);
            self.list_dirty(file);
            let ranges: Vec<_> = filled.into_iter().map(|(range, _)| range).collect();
            self.copy(file, &ranges).await?;
        }
        self.write_notes()
    }
}
