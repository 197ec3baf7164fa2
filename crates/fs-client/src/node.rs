//! One node of the job: everything the operations of its mount share.

use crate::awaited::AwaitedNames;
use crate::cache::CacheDir;
use crate::config::{Durability, MountConfig};
use crate::counted::CountedOpens;
use crate::daemon::Daemon;
use crate::dirty::DirtyList;
use crate::file::CachedFile;
use crate::gone::Gone;
use crate::handles::Handles;
use crate::interrupt::Interrupts;
use crate::kernel_pages::KernelPages;
use crate::known::KnownNames;
use crate::leases::LeaseCounts;
use crate::metrics::Metrics;
use crate::name_notes::InJournal;
use crate::ops::coupling;
use crate::ops::room::Room;
use crate::ops::seat::Seats;
use crate::passing::Paths;
use crate::quiet::QuietFiles;
use crate::references::References;
use crate::replica::Replicas;
use crate::rules::Rules;
use crate::unforgotten::Unforgotten;
use crate::virtual_files::{self, VirtualFile};
use crate::watchdog::Watchdog;
use ebb_backend::Backend;
use ebb_consistency::Model;
use ebb_flusher::{Activity, Engine};
use ebb_handover::{Heirloom, Placed};
use ebb_locks::{Mutex, RwLock};
use ebb_meta_client::MetaClient;
use ebb_node_journal::Journal;
use ebb_transport::PeerChannel;
use ebb_types::{Errno, Ino, NodeId};
use std::collections::HashMap;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Release;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;
use tokio::sync::watch;

/// An operation that still held a file when the kernel forgot it has ended by then.
const FORGET_AGAIN: Duration = Duration::from_millis(100);

/// How many times longer than others a request may take that waits for the backing.
const BACKING_PATIENCE: u32 = 4;

/// Files are spread over so many maps, so that threads seldom meet.
const SHARDS: usize = 16;

/// The daemon's state. Lock order: a shard of `files` before a file's own locks; nothing here is
/// held across an RPC.
pub struct Node {
    /// What it was told at start.
    pub config: MountConfig,
    /// Its number in the job.
    pub me: NodeId,
    /// The service, for names and ownership.
    pub meta: MetaClient,
    /// Other nodes, for their bytes.
    pub peers: Arc<dyn PeerChannel>,
    /// The backing, for unowned bytes.
    pub backing: Arc<dyn Backend>,
    /// Cache files.
    pub cache: CacheDir,
    /// Which model applies where.
    pub rules: Rules,
    /// Open handles.
    pub handles: Handles,
    /// Which way opens go, and what keeps them from passing the daemon.
    pub paths: Paths,
    /// Requests that a signal can end.
    pub interrupts: Interrupts,
    /// Foreground operations in flight.
    pub activity: Arc<Activity>,
    /// Counters.
    pub metrics: Metrics,
    /// Counters of what was not asked.
    pub leases: LeaseCounts,
    /// What the kernel keeps of files' bytes.
    pub(crate) kernel_pages: KernelPages,
    /// Names and attributes that need not be asked for.
    pub known: KnownNames,
    /// What is no more and still known to the kernel.
    pub gone: Gone,
    /// Names that somebody waits for.
    pub(crate) awaited: AwaitedNames,
    /// Opens of coupled files.
    pub(crate) counted: CountedOpens,
    /// What is forgotten when the service has it on stable storage.
    pub(crate) unforgotten: Unforgotten,
    /// Where waiting work runs.
    pub runtime: tokio::runtime::Handle,
    /// Addresses of other nodes.
    pub addresses: Mutex<HashMap<NodeId, String>>,
    /// Brings bytes to the backing; set once the node runs.
    pub flusher: OnceLock<Arc<Engine>>,
    /// What a daemon that takes the cache over must know; set before anything is mounted.
    pub journal: OnceLock<Arc<Journal>>,
    /// Why no bytes go over RDMA.
    pub tcp_because: OnceLock<String>,
    /// What outlives this daemon, when it has a supervisor; set before anything is mounted.
    pub heir: OnceLock<Arc<Heirloom>>,
    /// Where unanswered appends of the daemon before this one went, by request.
    pub placed: OnceLock<HashMap<u64, Placed>>,
    /// What is stuck.
    pub watchdog: Watchdog,
    /// Files that are written without telling.
    pub(crate) quiet_files: QuietFiles,
    /// Files that sit here, and elsewhere.
    pub(crate) seats: Seats,
    /// What a daemon before this one left is published.
    pub(crate) begun: watch::Sender<bool>,
    /// The whole daemon; set once it runs.
    pub daemon: OnceLock<Weak<Daemon>>,
    /// What is in the buffer, and which of it goes first.
    pub room: Room,
    /// Copies with a partner, and those of others.
    pub replicas: Replicas,
    /// What signs handles; set before anything is mounted.
    pub(crate) references: OnceLock<References>,
    /// This node is out of the job; its mount answers errors only.
    pub(crate) is_out: AtomicBool,
    /// The mount was taken away; what other mount namespaces still ask is answered with errors.
    pub(crate) is_ending: AtomicBool,
    /// Who waits for the end of the mount hears of it.
    pub(crate) mount_moments: OnceLock<std::sync::mpsc::Sender<crate::fuse::Moment>>,
    /// Calls of the backing, of which there may be only so many.
    pub(crate) backing_calls: Arc<tokio::sync::Semaphore>,
    /// Files that may have bytes which are not on the backing.
    dirty: DirtyList,
    capacity: OnceLock<u64>,
    this: Weak<Node>,
    files: [RwLock<Shard>; SHARDS],
}

/// Files of this node, by number.
type Shard = HashMap<Ino, Arc<CachedFile>>;

/// What became of a file of which the service has said that it is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It is proven that nothing and nobody has it any more.
    Deleted,
    /// It has no name; somebody may have it open.
    Nameless,
    /// It has a name, or nothing is known of it: what is here may be all that there is.
    Kept,
}

/// The parts a node is made of.
pub struct Parts {
    /// What it was told at start.
    pub config: MountConfig,
    /// Its number in the job.
    pub me: NodeId,
    /// The service.
    pub meta: MetaClient,
    /// Other nodes.
    pub peers: Arc<dyn PeerChannel>,
    /// The backing.
    pub backing: Arc<dyn Backend>,
    /// Cache files.
    pub cache: CacheDir,
    /// Which model applies where.
    pub rules: Rules,
    /// Foreground operations in flight.
    pub activity: Arc<Activity>,
    /// Where waiting work runs.
    pub runtime: tokio::runtime::Handle,
}

impl Node {
    /// Puts a node together.
    #[must_use]
    pub fn new(parts: Parts) -> Arc<Node> {
        let node = Arc::new_cyclic(|this: &Weak<Node>| Node {
            room: Room::new(parts.config.evict),
            replicas: Replicas::new(parts.config.replicas, &parts.config.cache),
            config: parts.config,
            me: parts.me,
            meta: parts.meta,
            peers: parts.peers,
            backing: parts.backing,
            cache: parts.cache,
            rules: parts.rules,
            handles: Handles::default(),
            paths: Paths::default(),
            interrupts: Interrupts::default(),
            activity: parts.activity,
            metrics: Metrics::default(),
            leases: LeaseCounts::default(),
            known: KnownNames::default(),
            kernel_pages: KernelPages::default(),
            gone: Gone::default(),
            unforgotten: Unforgotten::default(),
            runtime: parts.runtime,
            addresses: Mutex::new(HashMap::new()),
            flusher: OnceLock::new(),
            journal: OnceLock::new(),
            tcp_because: OnceLock::new(),
            heir: OnceLock::new(),
            placed: OnceLock::new(),
            watchdog: Watchdog::default(),
            quiet_files: QuietFiles::default(),
            references: OnceLock::new(),
            seats: Seats::default(),
            begun: watch::Sender::new(false),
            awaited: AwaitedNames::default(),
            counted: CountedOpens::default(),
            is_out: AtomicBool::new(false),
            is_ending: AtomicBool::new(false),
            mount_moments: OnceLock::new(),
            daemon: OnceLock::new(),
            capacity: OnceLock::new(),
            dirty: DirtyList::default(),
            backing_calls: Arc::new(tokio::sync::Semaphore::new(crate::aside::BACKING_CALLS)),
            this: this.clone(),
            files: std::array::from_fn(|_| RwLock::new(HashMap::new())),
        });
        let this = Arc::downgrade(&node);
        node.meta.on_recall(Box::new(move |ino, seq| {
            this.upgrade().is_none_or(|node| node.recalled(ino, seq))
        }));
        let this = Arc::downgrade(&node);
        node.meta.on_given_up(Box::new(move || {
            if let Some(node) = this.upgrade() {
                node.given_up();
            }
        }));
        let this = Arc::downgrade(&node);
        node.meta.on_deleted(Box::new(move |ino| {
            if let Some(node) = this.upgrade() {
                coupling::consumed(&node, ino);
            }
        }));
        node.meta.keep_notes(Box::new(InJournal(Arc::downgrade(&node))));
        let this = Arc::downgrade(&node);
        node.meta.on_publish(Box::new(move |asked| {
            if let Some(node) = this.upgrade() {
                node.asked_to_publish(asked);
            }
        }));
        node
    }

    /// For work that outlives the call.
    pub(crate) fn me_weak(&self) -> Weak<Node> {
        self.this.clone()
    }

    pub(crate) fn me_arc(&self) -> Option<Arc<Node>> {
        self.this.upgrade()
    }

    /// Notes that a file has (or gets) bytes that are not on the backing.
    pub(crate) fn list_dirty(&self, file: &Arc<CachedFile>) {
        self.dirty.put(file, || self.file(file.ino).is_some_and(|f| Arc::ptr_eq(&f, file)));
    }

    pub(crate) fn listed_dirty(&self) -> Vec<Arc<CachedFile>> {
        self.dirty.all()
    }

    /// Takes a file off the list. Whoever writes next puts it on again.
    pub(crate) fn unlist(&self, file: &CachedFile) {
        self.dirty.take(file);
    }

    pub(crate) fn unlist_if_clean(&self, file: &Arc<CachedFile>) {
        // What is written past the daemon does not put it on the list.
        if file.is_tracked() {
            return;
        }
        self.unlist(file);
        // Written, or opened past the daemon, between the look and the note: on the list again.
        let is_back = {
            let state = file.state.read();
            let tracked = state.passing.as_ref().is_some_and(|p| p.track.is_some());
            tracked || state.view.unflushed_bytes() > 0 && !state.orphan
        };
        if is_back {
            self.list_dirty(file);
        }
    }

    /// Opens a file of `.ebb`: its content is made now.
    pub async fn open_virtual(&self, ino: Ino, flags: i32) -> Result<u64, Errno> {
        if flags & libc::O_ACCMODE != libc::O_RDONLY {
            return Err(Errno::EACCES);
        }
        let json = |v: serde_json::Result<Vec<u8>>| v.map_err(|_| Errno::EIO);
        let content = match virtual_files::file(ino)? {
            VirtualFile::Status => {
                let daemon = self.daemon.get().and_then(Weak::upgrade).ok_or(Errno::EAGAIN)?;
                json(serde_json::to_vec_pretty(&daemon.status().await))?
            }
            VirtualFile::Metrics => {
                let daemon = self.daemon.get().and_then(Weak::upgrade).ok_or(Errno::EAGAIN)?;
                daemon.prometheus().await.into_bytes()
            }
            VirtualFile::Config => json(serde_json::to_vec_pretty(&self.config))?,
        };
        Ok(self.handles.insert_content(content))
    }

    /// Every counter, as a table for people.
    #[must_use]
    pub fn metrics_table(&self) -> String {
        self.metrics.table() + &self.paths.table()
    }

    /// The cap of the buffer.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        let of_file_system = || self.cache.space().map_or(u64::MAX, |(all, _)| all / 5 * 4);
        *self.capacity.get_or_init(|| self.config.cache_size.map_or_else(of_file_system, |s| s.0))
    }

    fn shard(&self, ino: Ino) -> &RwLock<Shard> {
        &self.files[(ino.0 as usize) % SHARDS]
    }

    /// The file, if this node holds anything of it.
    #[must_use]
    pub fn file(&self, ino: Ino) -> Option<Arc<CachedFile>> {
        self.shard(ino).read().get(&ino).cloned()
    }

    /// The file; taken in under `model` when new.
    pub fn file_or_new(&self, ino: Ino, model: &Arc<Model>) -> Arc<CachedFile> {
        if let Some(file) = self.file(ino) {
            return file;
        }
        let mut shard = self.shard(ino).write();
        let new = || Arc::new(CachedFile::new(ino, self.me, Arc::clone(model)));
        Arc::clone(shard.entry(ino).or_insert_with(new))
    }

    /// Takes in a file that was put together elsewhere.
    pub(crate) fn adopt(&self, file: Arc<CachedFile>) {
        self.shard(file.ino).write().insert(file.ino, Arc::clone(&file));
        self.list_dirty(&file);
    }

    /// Every file of which this node holds anything.
    #[must_use]
    pub fn all_files(&self) -> Vec<Arc<CachedFile>> {
        self.files.iter().flat_map(|s| s.read().values().cloned().collect::<Vec<_>>()).collect()
    }

    /// How many that are.
    #[must_use]
    pub fn files_known(&self) -> usize {
        self.files.iter().map(|s| s.read().len()).sum()
    }

    fn take_out(&self, shard: &mut Shard, ino: Ino) -> Option<Arc<CachedFile>> {
        let file = shard.get(&ino)?;
        self.leases.publications.forgotten(file.state.read().published);
        shard.remove(&ino)
    }

    /// The node does not have it any more.
    fn taken_out(&self, file: &CachedFile) {
        self.unlist(file);
        self.return_lease(file);
    }

    /// Gives a file up for good: it was unlinked and nobody has it open.
    pub fn discard(&self, ino: Ino) {
        self.known.drop_inode(ino);
        let mut shard = self.shard(ino).write();
        let unused = shard.get(&ino).is_some_and(|f| f.state.read().opens == 0);
        if unused {
            let file = self.take_out(&mut shard, ino);
            drop(shard);
            file.iter().for_each(|f| self.taken_out(f));
            let bytes = file.map_or(0, |f| {
                let state = f.state.read();
                state.view.unflushed_bytes() + state.view.clean_bytes()
            });
            self.room.forget_file(ino);
            self.forget_deleted(ino, bytes);
        }
    }

    /// The kernel holds no reference to the inode any more: what has no local bytes is dropped,
    /// and of what has some it is found out whether it was unlinked.
    pub fn forget(&self, ino: Ino) {
        self.known.drop_inode(ino);
        self.kernel_pages.forget(ino);
        let mut shard = self.shard(ino).write();
        let Some(file) = shard.get(&ino) else { return };
        // Whoever is about to open it holds it as well; then it stays.
        let (open, bytes) = {
            let state = file.state.read();
            let bytes = state.view.unflushed_bytes() + state.view.clean_bytes();
            (state.opens > 0 || state.registered, bytes)
        };
        if open {
            file.forgotten.store(true, Release);
            return;
        }
        if Arc::strong_count(file) > 2 {
            drop(shard);
            self.forget_later(ino);
            return;
        }
        if bytes == 0 && Arc::strong_count(file) == 1 {
            let file = self.take_out(&mut shard, ino);
            drop(shard);
            self.room.forget_file(ino);
            file.iter().for_each(|f| self.taken_out(f));
            let _ = self.cache.remove(ino);
            self.room.file_gone();
        } else if let Some(node) = self.me_arc() {
            drop(shard);
            self.runtime.spawn(async move { node.discard_if_unlinked(ino).await });
        }
    }

    /// An operation is just ending with it.
    fn forget_later(&self, ino: Ino) {
        let Some(node) = self.me_arc() else { return };
        self.runtime.spawn(async move {
            tokio::time::sleep(FORGET_AGAIN).await;
            node.forget(ino);
        });
    }

    pub(crate) async fn discard_if_unlinked(&self, ino: Ino) {
        if let Err(Errno::ENOENT | Errno::ESTALE) = self.meta.getattr(ino).await {
            self.discard_if_deleted(ino).await;
        }
    }

    /// The service does not know the file. Bytes that are nowhere else go only when it proves that it
    /// has deleted it.
    pub(crate) async fn discard_if_deleted(&self, ino: Ino) {
        let Some(file) = self.file(ino) else { return };
        if self.has_unflushed(&file) && self.fate(ino).await != Ok(Fate::Deleted) {
            tracing::warn!(%ino, "not known to the service, and not deleted: its bytes are kept");
            return;
        }
        self.unlist(&file);
        self.discard(ino);
    }

    fn has_unflushed(&self, file: &CachedFile) -> bool {
        let state = file.state.read();
        let tracked = state.passing.as_ref().is_some_and(|p| p.track.is_some());
        tracked || state.view.unflushed_bytes() > 0
    }

    /// What became of a file of which the service has said ENOENT or ESTALE.
    pub(crate) async fn fate(&self, ino: Ino) -> Result<Fate, Errno> {
        use ebb_wire::pb::existence::What;
        match self.meta.exists(ino).await? {
            What::Deleted => Ok(Fate::Deleted),
            What::There if self.meta.describe(ino).await?.path.is_empty() => Ok(Fate::Nameless),
            What::There | What::Unknown => Ok(Fate::Kept),
        }
    }

    /// The service, for requests that may have to wait for the backing: a slow one must not look
    /// like a dead service.
    pub(crate) fn patient_meta(&self) -> MetaClient {
        self.meta.within(self.deadline() * BACKING_PATIENCE)
    }

    /// How long one remote step may take.
    #[must_use]
    pub fn deadline(&self) -> Duration {
        self.config.request_timeout
    }

    /// What fsync promises here.
    #[must_use]
    pub fn durability(&self) -> Durability {
        self.config.durability
    }

    /// (dirty, clean) bytes of the whole node.
    #[must_use]
    pub fn local_bytes(&self) -> (u64, u64) {
        let mut sum = (0, 0);
        for file in self.all_files() {
            let state = file.state.read();
            sum.0 += state.view.unflushed_bytes() + self.unseen_bytes(&file, &state);
            sum.1 += state.view.clean_bytes();
        }
        sum
    }
}
