//! What the kernel keeps of a file beside this daemon: pages (for mappings, splice and sendfile) and the
//! size by which it goes there and in `copy_file_range`, without asking. It must let go of both when
//! others may have changed the file: when a lease is called back, before that is returned; and
//! where a model looks up, when that brought something new.
//!
//! A size cannot be taken away, and a new one is known only later. So the kernel is told of one that
//! no file has: whatever goes by it then asks, and what comes short of it tells the true one.
//! (The kernel takes an answer to a question that it asked before for nothing.) A store to
//! a mapping beyond the end does not make a file longer: [`Node::within_file`].
//!
//! Called with no lock and no turn: the kernel first writes back what was stored to mappings. It can
//! also wait for a read that waits for other nodes; so this waits for it only so long.

use crate::file::CachedFile;
use crate::node::Node;
use ebb_consistency::SyncEvent;
use ebb_types::Ino;
use fuser::{INodeNo, Notifier};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// How long anybody waits for the kernel to let go.
const LET_GO_WAIT: Duration = Duration::from_millis(100);

/// Longer than any file; the byte there is not the first of a page, so that the page does not count
/// as read.
const FAR: u64 = (1 << 50) + 1;

/// The way to the kernel; there once it is mounted.
#[derive(Default)]
pub struct Kernel(OnceLock<Arc<Notifier>>);

impl Kernel {
    /// From now on the kernel can be told.
    pub fn connect(&self, kernel: Notifier) {
        // There is one mount for one node.
        let _ = self.0.set(Arc::new(kernel));
    }

    async fn tell(&self, ino: Ino, tell: impl FnOnce(&Notifier) + Send + 'static) {
        let Some(kernel) = self.0.get().cloned() else { return };
        let told = tokio::task::spawn_blocking(move || tell(&kernel));
        if tokio::time::timeout(LET_GO_WAIT, told).await.is_err() {
            tracing::debug!(%ino, "the kernel is still busy with pages of a file");
        }
    }
}

/// Errors mean that the kernel does not know the inode.
fn drop_pages(kernel: &Notifier, ino: Ino, from: i64) {
    let _ = kernel.inval_inode(INodeNo(ino.0), from, 0);
}

impl Node {
    /// The kernel gives up pages and size of a file.
    pub(crate) async fn kernel_forgets(&self, file: &CachedFile) {
        let ino = file.ino;
        let (paged, appends) = (file.paged.load(Relaxed), file.appends.load(Relaxed));
        let tell = move |kernel: &Notifier| {
            if paged {
                drop_pages(kernel, ino, 0);
            }
            // Positions after appends follow from the size that the kernel knows.
            if !appends {
                let _ = kernel.store(INodeNo(ino.0), FAR, &[0]);
                // What came in between with the size of before goes as well.
                drop_pages(kernel, ino, if paged { 0 } else { FAR as i64 });
            }
        };
        self.kernel.tell(ino, tell).await;
    }

    /// What it kept while a dead daemon answered is called back by nobody.
    pub(crate) fn kernel_forgets_all(self: &Arc<Node>) {
        let node = Arc::clone(self);
        self.runtime.spawn(async move {
            for file in node.all_files() {
                if file.state.read().opens > 0 {
                    node.kernel_forgets(&file).await;
                }
            }
        });
    }

    /// Stores to mappings come to this daemon.
    pub(crate) async fn kernel_writes_back(&self, file: &CachedFile) {
        if file.paged.load(Relaxed) {
            let ino = file.ino;
            self.kernel.tell(ino, move |kernel| drop_pages(kernel, ino, 0)).await;
        }
    }

    /// The size of a file that the kernel was told before an open of it, as far as is known.
    pub(crate) fn size_shown(&self, ino: Ino) -> Option<u64> {
        let file = self.file(ino);
        let local = file.as_ref().and_then(|file| {
            let state = file.state.read();
            let asks = state.model.on(SyncEvent::Stat).query.is_some();
            (state.opens > 0 && !asks).then(|| state.view.size())
        });
        local.or_else(|| self.known.size(ino, self.meta.trust()?))
    }

    /// A file was opened.
    pub(crate) async fn kernel_opens(&self, file: &CachedFile, shown: Option<u64>) {
        let (size, first, asks) = {
            let state = file.state.read();
            (state.view.size(), state.opens <= 1, state.model.reads_ask())
        };
        let is_new = match shown {
            Some(shown) => shown != size,
            // Whoever asks seldom asks at the look-up before the open, too.
            None => asks && size > 0,
        };
        if is_new || !first {
            file.outdated.fetch_or(is_new, Relaxed);
            self.kernel_learns(file).await;
        } else {
            file.outdated.store(false, Relaxed);
        }
    }

    /// The same as [`Node::kernel_forgets`], when a look-up has brought something new.
    pub(crate) async fn kernel_learns(&self, file: &CachedFile) {
        if file.outdated.swap(false, Relaxed) {
            self.kernel_forgets(file).await;
        }
    }

    /// The kernel was given a page of a file.
    pub(crate) fn gave_page(&self, file: &Arc<CachedFile>) {
        file.paged.store(true, Relaxed);
        self.gave(file);
    }

    /// The kernel was given the size of a file.
    pub(crate) fn gave_size(&self, ino: Ino) {
        if let Some(file) = self.file(ino) {
            self.gave(&file);
        }
    }

    /// What nobody would call back the kernel does not keep for longer than a moment.
    fn gave(&self, file: &Arc<CachedFile>) {
        let unsure = {
            let state = file.state.read();
            let version = state.view.known_version();
            let asks = state.opens > 0 && state.model.reads_ask();
            asks && !state.lease.covers_map(self.meta.trust(), version) && state.seat().is_none()
        };
        if unsure && let Some(node) = self.me_arc() {
            let file = Arc::clone(file);
            self.runtime.spawn(async move { node.kernel_forgets(&file).await });
        }
    }

    /// How much of what comes from a mapping is in the file: pages end behind it.
    pub(crate) fn within_file(&self, file: &CachedFile, offset: u64, len: usize) -> usize {
        let left = file.state.read().view.size().saturating_sub(offset);
        usize::try_from(left).map_or(len, |left| left.min(len))
    }
}
