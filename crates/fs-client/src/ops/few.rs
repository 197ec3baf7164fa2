//! Memory for files: above `--files-max` files that this node knows, those that are closed and whose
//! bytes are all on the backing are forgotten with their cached bytes, the ones that were closed
//! longest ago first. What is opened again is fetched again, as what eviction gave up.

use crate::evict::Chunk;
use crate::file::CachedFile;
use crate::node::Node;
use ebb_types::{ByteRange, Ino};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How often it is looked whether there are too many.
const TICK: Duration = Duration::from_millis(250);

/// When little was found, the next look waits this many times as long as the last one took.
const REST: u32 = 20;

/// Files that go at the same time: each may cost a request.
const AT_ONCE: usize = 16;

/// A file that was closed less than this ago is left alone: many are opened again at once.
const YOUNG_MS: u64 = 250;

/// Runs as long as the node lives.
pub async fn keep_few(node: Weak<Node>) {
    loop {
        tokio::time::sleep(TICK).await;
        let Some(node) = node.upgrade() else { return };
        let began = Instant::now();
        if let Some(false) = node.forget_closed().await {
            drop(node);
            tokio::time::sleep(began.elapsed() * REST).await;
        }
    }
}

/// When a file was closed last, if it is one that can go.
fn may_go(file: &CachedFile) -> Option<u64> {
    let state = file.state.read();
    let closed = state.opens == 0 && !state.registered && state.passing.is_none();
    // Locks that are still to be given back are in its book.
    let closed = closed && !file.is_guarded();
    let clean = state.view.unflushed_bytes() == 0 && state.mtime.is_none() && !state.orphan;
    (closed && clean).then(|| file.closed_at.load(Relaxed))
}

impl Node {
    /// Forgets closed files until there are fewer than the bound again by an eighth of it. `None`: there
    /// are not too many; false: that was hardly possible.
    async fn forget_closed(self: &Arc<Self>) -> Option<bool> {
        let max = self.config.files_max;
        let have = self.files_known();
        if have <= max {
            return None;
        }
        let wanted = have - (max - max / 8);
        let young = crate::file::now_ms().saturating_sub(YOUNG_MS);
        let mut files: Vec<(u64, Ino)> = Vec::new();
        for file in self.all_files() {
            files.extend(may_go(&file).filter(|at| *at < young).map(|at| (at, file.ino)));
        }
        files.sort_unstable();
        files.truncate(wanted);
        let mut tasks = tokio::task::JoinSet::new();
        for (_, ino) in files {
            if tasks.len() >= AT_ONCE {
                tasks.join_next().await;
            }
            let node = Arc::clone(self);
            tasks.spawn(async move { node.forget_one(ino).await });
        }
        while tasks.join_next().await.is_some() {}
        let went = have.saturating_sub(self.files_known());
        Some(went >= wanted / 4)
    }

    /// Gives its bytes up, and then the file.
    async fn forget_one(&self, ino: Ino) {
        let chunks: Vec<Chunk> = {
            let Some(file) = self.file(ino).filter(|f| may_go(f).is_some()) else { return };
            let (clean, size) = {
                let state = file.state.read();
                (state.view.clean_bytes(), state.view.size())
            };
            let all = if clean > 0 { ByteRange::new(0, size) } else { ByteRange::new(0, 0) };
            let chunks: Vec<Chunk> = Chunk::of(ino, all).collect();
            self.remember(&chunks);
            chunks
        };
        self.give_up_of_file(ino, &chunks).await;
    }
}
