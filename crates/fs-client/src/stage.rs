//! Staging: the bytes of files come into the buffer before somebody reads them. What is here
//! already is not fetched again; bytes that another node wrote, or staged, come from that node, so
//! that nodes which stage the same files read each byte from the backing once. They stay clean:
//! under pressure they are given up like all others.

use crate::control::{Event, Outcome};
use crate::drain::Progress;
use crate::node::Node;
use crate::passing::Inside;
use crate::tree::Found;
use ebb_consistency::{Piece, Source};
use ebb_types::units::Size;
use ebb_types::{ByteRange, Errno, NodeId};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// Bytes fetched by one step; also what a progress report counts in.
const STEP_BYTES: u64 = 4 << 20;

/// Files that are staged at the same time.
const FILES_AT_ONCE: usize = 8;

/// Steps of one file at the same time: a single large file must not be slower than many.
const STEPS_AT_ONCE: usize = 4;

/// How long to wait for a node that said that it reads something. One that has given it up
/// again, or has died, costs this once for each step.
const COPY_WAIT: Duration = Duration::from_secs(3);
const COPY_PAUSE_MIN: Duration = Duration::from_millis(2);
const COPY_PAUSE_MAX: Duration = Duration::from_millis(50);

/// Failures that are told by name.
const FAILURES_MAX: usize = 1000;

/// Between two reports of progress.
const REPORT_EVERY: Duration = Duration::from_millis(100);

/// One request to stage.
pub struct Stage {
    /// The node.
    pub node: Arc<Node>,
    /// Who wants to know how far it is.
    pub progress: Progress,
}

/// How far it is.
#[derive(Default)]
struct Done {
    bytes: AtomicU64,
    files: AtomicU64,
}

/// A file or path that could not be staged.
type Failure = (PathBuf, Errno);

impl Stage {
    /// Stages everything at and below `paths`. What was staged in passing stays when something
    /// else fails; every failure is named.
    pub async fn run(&self, paths: &[PathBuf], limit: Option<Duration>) -> Outcome {
        let (mut files, mut failures) = (Vec::new(), Vec::new());
        for path in paths {
            match self.node.files_under(path).await {
                Ok(found) => files.extend(found),
                Err(e) => failures.push((path.clone(), e)),
            }
        }
        // A file may be named twice, by its path and by a directory above it.
        files.sort_by(|a, b| a.path.cmp(&b.path));
        files.dedup_by_key(|f| f.ino);
        if let Some(text) = self.too_much(&files) {
            return Outcome::Failed { text };
        }
        let done = Arc::new(Done::default());
        let deadline = limit.map(|l| Instant::now() + l);
        let in_time = self.all(files, &done, &mut failures, deadline).await;
        if !failures.is_empty() {
            return Outcome::Failed { text: text_of(&failures) };
        }
        if !in_time {
            return Outcome::TimedOut { remaining: Vec::new() };
        }
        Outcome::Ok { bytes: done.bytes.load(Relaxed), files: done.files.load(Relaxed) }
    }

    /// What does not fit would push out what was staged before it.
    fn too_much(&self, files: &[Found]) -> Option<String> {
        let wanted = files.iter().map(|f| f.size).fold(0, u64::saturating_add);
        let (dirty, _) = self.node.local_bytes();
        let room = self.node.room_for_clean(dirty);
        (wanted > room).then(|| {
            format!(
                "{} do not fit into the buffer, which has room for {} (name fewer files, or mount \
                 with a larger --cache-size)",
                Size(wanted),
                Size(room)
            )
        })
    }

    /// False when time ran out.
    async fn all(
        &self,
        files: Vec<Found>,
        done: &Arc<Done>,
        failures: &mut Vec<Failure>,
        deadline: Option<Instant>,
    ) -> bool {
        let total = (files.iter().map(|f| f.size).sum(), files.len() as u64);
        let (mut todo, mut tasks) = (files.into_iter(), JoinSet::new());
        let mut tick = tokio::time::interval(REPORT_EVERY);
        loop {
            while tasks.len() < FILES_AT_ONCE
                && let Some(file) = todo.next()
            {
                let (node, done) = (Arc::clone(&self.node), Arc::clone(done));
                tasks.spawn(async move {
                    let staged = stage_file(&node, &file, &done).await;
                    staged.map_err(|e| (file.path, e))
                });
            }
            tokio::select! {
                ended = tasks.join_next() => match ended {
                    None => break,
                    Some(Ok(Err(failure))) => failures.push(failure),
                    Some(_) => {}
                },
                _ = tick.tick() => self.report(done, total),
            }
            if deadline.is_some_and(|d| Instant::now() >= d) {
                return false;
            }
        }
        self.report(done, total);
        true
    }

    fn report(&self, done: &Done, (bytes_total, files_total): (u64, u64)) {
        (self.progress)(Event::Progress {
            bytes_done: done.bytes.load(Relaxed),
            bytes_total,
            files_done: done.files.load(Relaxed),
            files_total,
            stage: "staging".into(),
        });
    }
}

fn text_of(failures: &[Failure]) -> String {
    let mut lines: Vec<String> = failures
        .iter()
        .take(FAILURES_MAX)
        .map(|(path, e)| format!("  {}: {e}", path.display()))
        .collect();
    if failures.len() > FAILURES_MAX {
        lines.push(format!("  ... and {} more", failures.len() - FAILURES_MAX));
    }
    format!("not staged:\n{}", lines.join("\n"))
}

async fn stage_file(node: &Arc<Node>, file: &Found, done: &Arc<Done>) -> Result<(), Errno> {
    // As an open of the application would: under the models that look up then, what is staged
    // is what is published now.
    let fh = node.open(file.ino, libc::O_RDONLY, 0, &Inside).await?.fh;
    let staged = match node.handles.file(fh) {
        Some(handle) => fetch_all(node, &handle, done).await,
        None => Err(Errno::EBADF),
    };
    if let Some(handle) = node.handles.remove_file(fh) {
        node.release(&handle).await;
    }
    staged?;
    done.files.fetch_add(1, Relaxed);
    node.metrics.staged_files.fetch_add(1, Relaxed);
    Ok(())
}

async fn fetch_all(
    node: &Arc<Node>,
    handle: &Arc<crate::handles::OpenFile>,
    done: &Arc<Done>,
) -> Result<(), Errno> {
    let size = handle.file.state.read().view.size();
    let (mut at, mut tasks) = (0, JoinSet::new());
    while at < size || !tasks.is_empty() {
        if at < size && tasks.len() < STEPS_AT_ONCE {
            let range = ByteRange::new(at, size.min(at + STEP_BYTES));
            let (node, handle, done) = (Arc::clone(node), Arc::clone(handle), Arc::clone(done));
            at = range.end();
            tasks.spawn(async move {
                let fetched = node.bring_here(&handle.file, range).await;
                done.bytes.fetch_add(range.len(), Relaxed);
                fetched
            });
        } else if let Some(ended) = tasks.join_next().await {
            // A failed file is named once; its other steps end by themselves.
            ended.map_err(|_| Errno::EIO)??;
        }
    }
    Ok(())
}

impl Node {
    /// Bytes of which a part is not here are fetched and kept.
    async fn bring_here(
        &self,
        file: &Arc<crate::file::CachedFile>,
        range: ByteRange,
    ) -> Result<(), Errno> {
        let missing = |view: &ebb_consistency::FileView| -> u64 {
            let plan = view.plan_read(range).into_iter();
            let far = plan.filter(|p| {
                matches!(p.source, Source::Peer { .. } | Source::Backing)
                    || crate::ops::fetch::is_unknown(p)
            });
            far.map(|p| p.range.len()).sum()
        };
        let before = missing(&file.state.read().view);
        if before == 0 {
            return Ok(());
        }
        let unknown = crate::ops::fetch::unknown_of(&file.state.read().view.plan_read(range));
        if let Some(unknown) = unknown {
            self.look_up(file, unknown).await?;
        }
        self.share_reading(file, range).await?;
        self.gather(file, range).await?;
        let after = missing(&file.state.read().view);
        self.metrics.staged_bytes.fetch_add(before.saturating_sub(after), Relaxed);
        // Read, but there was no room to keep it.
        if after > 0 { Err(Errno::ENOSPC) } else { Ok(()) }
    }

    /// What other nodes have read from the backing, or are reading, comes from them. What is left
    /// is this node's to read.
    async fn share_reading(
        &self,
        file: &Arc<crate::file::CachedFile>,
        range: ByteRange,
    ) -> Result<(), Errno> {
        let plan = file.state.read().view.plan_read(range);
        let unowned = |p: &Piece| p.source == Source::Backing && !crate::ops::fetch::is_unknown(p);
        for piece in plan.into_iter().filter(unowned) {
            // A service that cannot say costs nothing but a second reading.
            let holders = self.meta.share(file.ino, piece.range, false).await.unwrap_or_default();
            for (part, holder) in holders.into_iter().filter(|(_, n)| *n != self.me) {
                let piece = Piece { range: part, ..piece };
                if !self.wait_for_copy(file, holder, piece).await? {
                    let _ = self.meta.share(file.ino, part, true).await;
                }
            }
        }
        Ok(())
    }

    /// The holder may still be reading it. False when it does not come to have it.
    async fn wait_for_copy(
        &self,
        file: &Arc<crate::file::CachedFile>,
        holder: NodeId,
        piece: Piece,
    ) -> Result<bool, Errno> {
        let (asked, mut pause) = (Instant::now(), COPY_PAUSE_MIN);
        while !self.fetch_copy(file, holder, piece).await? {
            if asked.elapsed() >= COPY_WAIT {
                return Ok(false);
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(COPY_PAUSE_MAX);
        }
        Ok(true)
    }
}
