//! What a daemon does after its mount is gone: the last drain, what is left, and goodbye. What is left
//! stays in the cache, and is told; only a node of which nothing is left leaves the job.

use crate::control::{Outcome, Remaining};
use crate::daemon::{Daemon, RunError};
use crate::drain::{self, Drain};
use crate::leftover::{self, label};
use crate::node::Node;
use crate::ops::sync::is_gone;
use crate::recover::joint::leaving;
use crate::recover::places::Places;
use crate::registry;
use std::sync::Arc;
use std::sync::atomic::Ordering::Acquire;
use std::time::Duration;
use tokio::runtime::Runtime;

/// How long the last drain may take.
const LAST_DRAIN: Duration = Duration::from_secs(300);

/// How long it waits for the last looks at files that were written past the daemon; they are made every half a
/// second when a mapping was there for long.
const LAST_LOOKS: Duration = Duration::from_secs(2);

/// How long the flusher's threads may take to end.
pub(crate) const FLUSHER_ENDS_WITHIN: Duration = Duration::from_secs(10);

/// What is still dirty, and goodbye.
pub(crate) fn finish(runtime: &Runtime, daemon: &Arc<Daemon>) -> Result<(), RunError> {
    let node = &daemon.node;
    if daemon.drain_at_end.load(Acquire) {
        let drain = Drain {
            node: Arc::clone(node),
            flusher: Arc::clone(&daemon.flusher),
            progress: Arc::new(|_| {}),
            // Nobody is there who could try again.
            patience: LAST_DRAIN,
        };
        runtime.block_on(node.wait_for_last_looks(LAST_LOOKS));
        let outcome = runtime.block_on(drain.run(&[], Some(LAST_DRAIN)));
        if !matches!(outcome, Outcome::Ok { .. }) {
            tracing::error!(?outcome, "not everything is on the backing");
        }
    }
    node.awaited.end();
    if !daemon.flusher.shutdown(FLUSHER_ENDS_WITHIN) {
        tracing::warn!("a flush thread still waits for the backing");
    }
    let mut left = dirty(node);
    let waiting = runtime.block_on(node.waiting_copies());
    if let (true, Some(reason)) = (left.is_empty() && waiting.bytes == 0, node.meta.refusal()) {
        // Names may be lost with the service, and the cache may tell of them.
        node.last_notes();
        return Err(RunError::Fenced(reason));
    }
    // It is nowhere; but that it was there must not be forgotten with the journal.
    left.extend(drain::lost(node));
    if left.is_empty() && waiting.bytes == 0 {
        // Else the cache stays in any case.
        left = runtime.block_on(node.held_back());
    }
    if left.is_empty() && waiting.bytes == 0 {
        left = runtime.block_on(say_what_others_need(node));
    }
    if left.is_empty() && waiting.bytes == 0 {
        runtime.block_on(crate::ops::coupling::all_left(node));
        runtime.block_on(node.tell_everything());
        if let Err(e) = runtime.block_on(node.meta.goodbye()) {
            tracing::warn!(error = %e, "the metadata service did not hear the goodbye");
        }
        return Ok(());
    }
    node.last_notes();
    Err(RunError::Undrained {
        bytes: left.iter().map(|file| file.bytes).sum::<u64>() + waiting.bytes,
        files: left.len() + waiting.sets,
        cache: node.config.cache.clone(),
        left,
    })
}

/// Says on the backing what recoveries of other caches would need of this node's journal, when the service
/// is lost later. What could not be said and nobody but the service would know.
async fn say_what_others_need(node: &Node) -> Vec<Remaining> {
    let Some(journal) = node.journal() else { return Vec::new() };
    let (backing, mut image) = (&node.config.backing, journal.image());
    // Others may have moved what waits for its name.
    for ino in image.sayable().filter(|(_, n)| n.waits()).map(|(ino, _)| ino).collect::<Vec<_>>() {
        let place = match node.meta.describe(ino).await {
            Ok(place) => place,
            Err(e) if is_gone(e) => continue,
            // It would be waited for with each.
            Err(_) => break,
        };
        if let Some(mut note) = image.file(ino).cloned() {
            note.header.path = place.path;
            image.insert(ino, note);
        }
    }
    let Err(e) = leaving::say(backing, &image) else { return Vec::new() };
    tracing::warn!(error = %e, "what recoveries would need of this node is not noted on the backing");
    // Where nothing can be made below the root, no recovery can be run without the service.
    if matches!(e.raw_os_error(), Some(libc::EACCES | libc::EPERM | libc::EROFS)) {
        return Vec::new();
    }
    let Ok(places) = Places::open(backing) else { return Vec::new() };
    let waiting = leaving::waiting(&places, &image).unwrap_or_default();
    let stays = waiting.into_iter().map(|(ino, note, _)| Remaining {
        path: label(ino, note),
        bytes: note.flushed().map(|(range, _)| range.len()).sum(),
        why: format!(
            "flushed, but other nodes' bytes of it are not, and that cannot be noted: {e}"
        ),
    });
    stays.collect()
}

fn dirty(node: &Node) -> Vec<Remaining> {
    let kept = |file: ebb_flusher::DirtyFile| {
        let path = node.file(file.ino).map_or_else(|| file.ino.to_string(), |f| f.label());
        Remaining { path, bytes: file.bytes, why: "kept in the cache".into() }
    };
    node.dirty_files().into_iter().map(kept).collect()
}

/// Gives back what only a living daemon has, and tells the waiting client.
pub(crate) fn leave(runtime: &Runtime, daemon: &Arc<Daemon>, result: &Result<(), RunError>) {
    let config = &daemon.node.config;
    daemon.peers.stop();
    if result.is_ok()
        && let Err(e) = daemon.node.replicas.held.clear()
    {
        tracing::warn!(error = %e, "cannot remove copies of other nodes' bytes");
    }
    let _ = registry::leave(&config.mountpoint);
    let _ = std::fs::remove_file(config.cache.join("control.sock"));
    if result.is_ok() {
        daemon.node.cache.forget_old();
        if let Err(e) = leftover::clear(&config.cache) {
            tracing::warn!(error = %e, "cannot clear the cache");
        }
    }
    let outcome = match result {
        Ok(()) => Outcome::Ok { bytes: 0, files: 0 },
        Err(RunError::Undrained { left, .. }) => Outcome::Incomplete { remaining: left.clone() },
        Err(e) => Outcome::Failed { text: e.to_string() },
    };
    // Kept also when the client that waits for it is not listening yet.
    daemon.ended.send_replace(Some(outcome));
    // The client that asked for the unmount hears of its end before the process goes.
    runtime.block_on(async {
        for _ in 0..100 {
            if Arc::strong_count(&daemon.busy) == 1 {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
}
