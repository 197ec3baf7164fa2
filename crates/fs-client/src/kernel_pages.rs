//! What the kernel keeps of files' bytes beside the daemon: read(2) asks the daemon each time, splice,
//! sendfile, `copy_file_range` and mappings go by pages that were read once. They are dropped when
//! another node's bytes must be seen:
//!
//! | when | which |
//! |---|---|
//! | the lease under which they were read is called back | before it is returned, and so before the change is acknowledged to anybody |
//! | it is given up, or its time is over | at once; what the time is over for within [`crate::quiet`]'s next look |
//! | they were read without one, under a model that looks at each read | as soon as they are read |
//! | an fsync has looked, and the file has changed since they were read | before it is answered |
//! | a lock is granted | before it is answered |
//!
//! (Opens drop them in the kernel.) What this node asks about a file meanwhile does not wait for its own
//! pages: of a change that is not acknowledged yet read(2) here can show more than they do. Waiting for the
//! kernel is bounded, for whoever changes the file may be waiting for this. Pages that are just being read
//! are dropped when they are read.
//!
//! To drop a page that holds stores of a mapping the kernel first writes it, by a request to this daemon, and
//! waits for the answer such that nothing can end it: a daemon that is killed in that moment would not go. So
//! pages of a file that somebody here has open for reading and writing, and may have mapped, are left
//! alone but for locks, until that handle is gone.
//!
//! Past the daemon the kernel has no pages of its own: they are the cache file's.

use crate::file::CachedFile;
use crate::node::Node;
use ebb_consistency::{LeaseSeq, SyncEvent};
use ebb_locks::Mutex;
use ebb_types::{Ino, Version};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// What is not dropped in this time is dropped after it.
const WAIT: Duration = Duration::from_millis(100);

/// The way to the kernel.
pub trait Kernel: Send + Sync {
    /// Drops the pages of a file. May wait for requests that are under way.
    fn drop_pages(&self, ino: Ino);
}

/// Pages of a file.
#[derive(Debug)]
struct Kept {
    /// As of which version of the file the oldest of them were read.
    oldest: Version,
    /// How many requests for some of them are under way.
    readers: usize,
    /// They are to be dropped as soon as there are none.
    drop: bool,
}

/// Which files the kernel may have pages of. A leaf.
#[derive(Default)]
pub struct KernelPages {
    kernel: OnceLock<Arc<dyn Kernel>>,
    kept: Mutex<HashMap<Ino, Kept>>,
    /// The kernel may have pages that a daemon before this one has read.
    inherited: AtomicBool,
}

impl KernelPages {
    /// From now on the kernel can be told. `goes_on`: it knows files by a daemon before this one.
    pub fn connect(&self, kernel: Arc<dyn Kernel>, goes_on: bool) {
        self.inherited.store(goes_on, Release);
        // There is one mount for one node.
        let _ = self.kernel.set(kernel);
    }

    /// The kernel has let go of the inode.
    pub(crate) fn forget(&self, ino: Ino) {
        self.kept.lock().remove(&ino);
    }

    fn begin(&self, ino: Ino, version: Version) {
        let mut kept = self.kept.lock();
        let new = || Kept { oldest: version, readers: 0, drop: false };
        let kept = kept.entry(ino).or_insert_with(new);
        kept.oldest = version.min(kept.oldest);
        kept.readers += 1;
    }

    /// True when pages of the file are to be dropped now.
    fn end(&self, ino: Ino) -> bool {
        let mut all = self.kept.lock();
        let Some(kept) = all.get_mut(&ino) else { return false };
        kept.readers = kept.readers.saturating_sub(1);
        kept.readers == 0 && kept.drop
    }

    fn has(&self, ino: Ino) -> bool {
        self.inherited.load(Acquire) || self.kept.lock().contains_key(&ino)
    }

    /// True when there may be pages of an older version.
    fn has_older(&self, ino: Ino, version: Version) -> bool {
        self.inherited.load(Acquire)
            || self.kept.lock().get(&ino).is_some_and(|k| k.oldest < version)
    }

    fn files(&self) -> Vec<Ino> {
        self.kept.lock().keys().copied().collect()
    }

    /// Blocking. Whoever reads from here on is noted again. False when there is no kernel to tell, or pages
    /// are just being read.
    fn drop_now(&self, ino: Ino) -> bool {
        let Some(kernel) = self.kernel.get() else { return false };
        {
            let mut all = self.kept.lock();
            if let Some(kept) = all.get_mut(&ino).filter(|kept| kept.readers > 0) {
                kept.drop = true;
                return false;
            }
            all.remove(&ino);
        }
        kernel.drop_pages(ino);
        true
    }
}

/// The kernel is reading pages of a file until this is dropped.
pub(crate) struct PageRead {
    node: Arc<Node>,
    file: Arc<CachedFile>,
}

impl PageRead {
    /// `None` past the daemon.
    pub fn begin(node: &Arc<Node>, file: &Arc<CachedFile>) -> Option<PageRead> {
        let version = {
            let state = file.state.read();
            state.passing.is_none().then(|| state.view.seen_version())?
        };
        node.kernel_pages.begin(file.ino, version);
        Some(PageRead { node: Arc::clone(node), file: Arc::clone(file) })
    }
}

impl Drop for PageRead {
    fn drop(&mut self) {
        let (node, file) = (&self.node, &self.file);
        let drops = node.kernel_pages.end(file.ino);
        // Without a lease nobody would tell when they are old.
        let untold = || {
            let state = file.state.read();
            state.model.on(SyncEvent::Read).query.is_some() && !node.map_is_leased(&state)
        };
        if drops || !file.may_be_mapped() && untold() {
            node.drop_pages_soon(file.ino);
        }
    }
}

impl Node {
    /// Drops the kernel's pages of a file.
    pub(crate) async fn drop_pages(&self, ino: Ino) {
        let Some(node) = self.me_arc() else { return };
        // Goes on when nobody waits any more.
        let dropping = tokio::task::spawn_blocking(move || node.drop_pages_now(ino));
        if tokio::time::timeout(WAIT, dropping).await.is_err() {
            tracing::debug!(%ino, "the kernel is still busy with pages of a file");
        }
    }

    /// Blocking.
    fn drop_pages_now(&self, ino: Ino) {
        if self.kernel_pages.drop_now(ino) {
            self.metrics.pages_dropped.fetch_add(1, Relaxed);
        }
    }

    fn drop_pages_soon(&self, ino: Ino) {
        let Some(node) = self.me_arc() else { return };
        self.runtime.spawn_blocking(move || node.drop_pages_now(ino));
    }

    /// A sync event has looked at a file: pages of before go, when it has changed.
    pub(crate) async fn drop_older_pages(&self, file: &CachedFile, event: SyncEvent) {
        let older = {
            let state = file.state.read();
            state.model.on(event).query.is_some()
                && state.passing.is_none()
                && !file.may_be_mapped()
                && self.kernel_pages.has_older(file.ino, state.view.seen_version())
        };
        if older {
            self.drop_pages(file.ino).await;
        }
    }

    /// A lock was granted: what was written under it elsewhere must be seen.
    pub(crate) async fn locked_anew(&self, file: &CachedFile) {
        if self.kernel_pages.has(file.ino) {
            self.drop_pages(file.ino).await;
        }
    }

    /// True when a lease that is called back can only be returned once pages are dropped.
    pub(crate) fn has_pages(&self, ino: Ino) -> bool {
        self.kernel_pages.has(ino) && !self.file(ino).is_some_and(|file| file.may_be_mapped())
    }

    /// Returns a lease that was called back on this connection when pages are dropped.
    pub(crate) fn return_without_pages(&self, connection: u64, ino: Ino, seq: LeaseSeq) {
        let Some(node) = self.me_arc() else { return };
        self.runtime.spawn(async move {
            node.drop_pages(ino).await;
            node.meta.return_recalled(connection, ino, seq);
        });
    }

    /// A lease was given up; or a handle is gone by which the file may have been mapped, for which pages were
    /// left alone.
    pub(crate) fn nobody_tells_of(&self, ino: Ino) {
        if self.has_pages(ino) {
            self.drop_pages_soon(ino);
        }
    }

    /// No lease holds any more: nobody was told of what others change.
    pub(crate) fn drop_all_pages_without_trust(&self) {
        if self.meta.trust().is_none() {
            let files = self.kernel_pages.files().into_iter();
            files.filter(|ino| self.has_pages(*ino)).for_each(|ino| self.drop_pages_soon(ino));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Dropped(Mutex<Vec<Ino>>);

    impl Kernel for Dropped {
        fn drop_pages(&self, ino: Ino) {
            self.0.lock().push(ino);
        }
    }

    fn read(pages: &KernelPages, version: u64) -> bool {
        pages.begin(Ino(1), Version(version));
        pages.end(Ino(1))
    }

    #[test]
    fn pages_are_older_when_any_of_them_is() {
        let pages = KernelPages::default();
        assert!(!pages.has(Ino(1)) && !pages.has_older(Ino(1), Version(9)));
        assert!(!read(&pages, 5) && !read(&pages, 7));
        assert!(pages.has(Ino(1)) && !pages.has(Ino(2)));
        assert!(!pages.has_older(Ino(1), Version(5)) && pages.has_older(Ino(1), Version(6)));
        pages.forget(Ino(1));
        assert!(!pages.has(Ino(1)) && !pages.end(Ino(1)));
    }

    #[test]
    fn what_is_being_read_is_dropped_after_it_and_what_is_inherited_may_be_there() {
        let (pages, kernel) = (KernelPages::default(), Arc::new(Dropped::default()));
        read(&pages, 5);
        assert!(!pages.drop_now(Ino(1)) && pages.has(Ino(1)), "nobody to tell");
        pages.connect(Arc::clone(&kernel) as Arc<dyn Kernel>, true);
        pages.begin(Ino(1), Version(5));
        pages.begin(Ino(1), Version(5));
        assert!(!pages.drop_now(Ino(1)), "two are reading");
        assert!(!pages.end(Ino(1)) && kernel.0.lock().is_empty());
        assert!(pages.end(Ino(1)) && pages.drop_now(Ino(1)));
        assert!(pages.has_older(Ino(3), Version::ZERO));
        assert!(pages.drop_now(Ino(3)));
        assert_eq!(kernel.0.lock().clone(), vec![Ino(1), Ino(3)]);
    }
}
