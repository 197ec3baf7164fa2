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
//! also wait for a read that waits for other nodes; so this waits for it only so long. Nor can a
//! thread that waits there be killed before somebody answers, and when the daemon is dead
//! that is the next one. So such threads have nothing that the next one needs: descriptors of
//! their own, of which they keep only the device.

use crate::file::CachedFile;
use crate::node::Node;
use ebb_consistency::SyncEvent;
use ebb_locks::Mutex;
use ebb_types::Ino;
use fuser::{INodeNo, Notifier};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock, mpsc};
use std::time::Duration;
use tokio::sync::oneshot;

/// How long anybody waits for the kernel to let go.
const LET_GO_WAIT: Duration = Duration::from_millis(100);

/// Longer than any file; the byte there is not the first of a page, so that the page does not count
/// as read.
const FAR: u64 = (1 << 50) + 1;

/// Threads that speak to the kernel: one that waits must not keep all others.
const THREADS: usize = 4;

type Speak = Box<dyn FnOnce(&Notifier) + Send>;

/// What is to be said, and who waits for it.
type Word = (Speak, oneshot::Sender<()>);

/// The way to the kernel; there once it is mounted.
#[derive(Default)]
pub struct Kernel(OnceLock<mpsc::Sender<Word>>);

impl Kernel {
    /// From now on the kernel can be told, through this device.
    pub fn connect(&self, kernel: impl Fn() -> Notifier, device: BorrowedFd<'_>) -> io::Result<()> {
        let (tell, words) = mpsc::channel::<Word>();
        let (said, done) = mpsc::channel();
        let words = Arc::new(Mutex::new(words));
        let device = device.as_raw_fd();
        let thread = || std::thread::Builder::new().name("ebb-kernel".into());
        for _ in 0..THREADS {
            let (kernel, words, said) = (kernel(), Arc::clone(&words), said.clone());
            thread().spawn(move || {
                keep_only(device);
                loop {
                    let Ok((speak, waiting)) = words.lock().recv() else { return };
                    speak(&kernel);
                    let _ = said.send(waiting);
                }
            })?;
        }
        // Waking the runtime takes a descriptor, which these threads do not have.
        thread().spawn(move || {
            for waiting in done {
                // Nobody waits any more when it took too long.
                let _ = oneshot::Sender::send(waiting, ());
            }
        })?;
        // There is one mount for one node.
        let _ = self.0.set(tell);
        Ok(())
    }

    async fn tell(&self, ino: Ino, speak: impl FnOnce(&Notifier) + Send + 'static) {
        let Some(words) = self.0.get() else { return };
        let (done, told) = oneshot::channel();
        let sent = words.send((Box::new(speak), done)).is_ok();
        if !sent || tokio::time::timeout(LET_GO_WAIT, told).await.is_err() {
            tracing::debug!(%ino, "the kernel is still busy with pages of a file");
        }
    }
}

/// From now on this thread has descriptors of its own, and of these only one. (Where that is
/// forbidden, as in some containers, it goes on with all.)
fn keep_only(device: RawFd) {
    // SAFETY: no memory is involved; no other thread's descriptors are closed, because they are not
    // shared any more. What this thread does needs no other one.
    unsafe {
        if libc::unshare(libc::CLONE_FILES) == 0 {
            let device = device.cast_unsigned();
            if device > 0 {
                libc::close_range(0, device - 1, 0);
            }
            libc::close_range(device + 1, libc::c_uint::MAX, 0);
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

    /// The kernel is about to be given a page of a file.
    pub(crate) fn gives_page(&self, file: &CachedFile) {
        file.paged.store(true, Relaxed);
    }

    /// It was given the page.
    pub(crate) fn gave_page(&self, file: &Arc<CachedFile>) {
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
