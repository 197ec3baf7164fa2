//! Draining the cache of a dead daemon without a mount: a node without FUSE joins a service that
//! the caller started, puts together what the journal knows, and drains like any other node.
//!
//! Two ways lead to the same drain. Files that the service knows (it has the old one's journal)
//! are taken over as by a new mount. The others are made anew through the service, at the paths
//! where they were last heard of: a file that is not on the backing yet, or that had been
//! renamed over an older one, goes there whole by a part file and a rename; into one that was
//! there already the held bytes go in place. What is on the backing and is not what the journal
//! knew is a conflict, and left alone unless told otherwise.
//!
//! Crash consistency: the journal loses a file only after everything of it is on the backing;
//! cache files are only added to. So a recovery that was interrupted is simply run again.

use crate::cache::CacheDir;
use crate::config::MountConfig;
use crate::control::{Outcome, Remaining};
use crate::daemon::{self, RunError, local};
use crate::drain::{Drain, Progress};
use crate::file::CachedFile;
use crate::flush_source::NodeSource;
use crate::journal::{Home, Image, Journal, Note, Record};
use crate::leftover::{Leftover, label};
use crate::node::{Node, Parts};
use crate::restore;
use crate::rules::Rules;
use ebb_backend::{Access, Backend, BackendError, PosixDir};
use ebb_consistency::FileView;
use ebb_flusher::{Activity, Engine, Options};
use ebb_meta_client::{ConnectOptions, MakeRequest, MetaClient, QueryRequest, SetAttr, SetTime};
use ebb_transport::{PeerPool, PoolOptions};
use ebb_types::{Attr, ByteRange, Errno, FileKind, Ino, Name, NodeId, Version};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Directories that have to be made anew, and of which nothing but the name is known.
const DIRECTORY_PERM: u32 = 0o700;

/// How long threads of the flusher may take to end.
const FLUSHER_ENDS_WITHIN: Duration = Duration::from_secs(10);

/// What is to be recovered, and how.
pub struct Job {
    /// The configuration of the dead daemon, with the backing as it is to be used now.
    pub config: MountConfig,
    /// Address of the service.
    pub meta: String,
    /// What the dead daemon left.
    pub left: Leftover,
    /// Conflicts do not matter.
    pub force: bool,
    /// Give up after this time.
    pub timeout: Option<Duration>,
    /// Who wants to know how far it is.
    pub progress: Progress,
}

/// Drains a cache. The caller holds its lock.
pub fn run(job: &Job) -> Result<Outcome, RunError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(64)
        .enable_all()
        .build()
        .map_err(local("cannot start the runtime"))?;
    let result = run_on(&runtime, job);
    runtime.shutdown_timeout(Duration::from_secs(2));
    result
}

fn run_on(runtime: &tokio::runtime::Runtime, job: &Job) -> Result<Outcome, RunError> {
    let _in_runtime = runtime.enter();
    let config = &job.config;
    let cache = CacheDir::open(&config.cache)
        .map_err(local(format!("cannot use the cache {}", config.cache.display())))?;
    let posix = Arc::new(open_backing(config)?);
    let backing: Arc<dyn Backend> = Arc::clone(&posix) as Arc<dyn Backend>;
    let rules = Rules::new(config).map_err(|e| RunError::Config(e.to_string()))?;
    let (meta, welcome) = runtime
        .block_on(MetaClient::connect(ConnectOptions {
            incarnation: daemon::incarnation(),
            peer_address: "127.0.0.1:0".to_owned(),
            consistency: rules.describe(),
            request_timeout: config.request_timeout,
            ..ConnectOptions::new(&job.meta, config.node.clone())
        }))
        .map_err(RunError::Meta)?;
    daemon::check_same_backing(config, welcome.backing_dev_ino)?;
    let activity = Activity::new();
    let node = Node::new(Parts {
        config: config.clone(),
        me: NodeId(welcome.node_id),
        meta,
        peers: PeerPool::new(None, PoolOptions::default()),
        backing: Arc::clone(&backing),
        cache,
        rules,
        activity: Arc::clone(&activity),
        runtime: runtime.handle().clone(),
    });
    let options = Options { threads: config.flush_threads, ..Options::default() };
    let source = Arc::new(NodeSource(Arc::downgrade(&node)));
    let engine = Engine::start(options, daemon::policy(config), activity, backing, source)
        .map_err(local("cannot start the flusher"))?;
    let recovery = Recovery { job, node, posix, of_job: job.left.is_of_job(welcome.job) };
    let outcome = runtime.block_on(recovery.all(Arc::new(engine)))?;
    if matches!(outcome, Outcome::Ok { .. }) {
        runtime
            .block_on(recovery.node.meta.goodbye())
            .map_err(|e| local("metadata service")(e.into()))?;
    }
    Ok(outcome)
}

fn open_backing(config: &MountConfig) -> Result<PosixDir, RunError> {
    PosixDir::open_root(&config.backing).map_err(|e| RunError::Local {
        what: format!("cannot use the backing {}", config.backing.display()),
        cause: e.errno().into(),
    })
}

/// A file of the image: where it is in the node now, or why it is nowhere.
enum Placed {
    As(Ino),
    Left(String),
}

struct Recovery<'a> {
    job: &'a Job,
    node: Arc<Node>,
    posix: Arc<PosixDir>,
    /// The service knows the numbers of the journal.
    of_job: bool,
}

impl Recovery<'_> {
    async fn all(&self, engine: Arc<Engine>) -> Result<Outcome, RunError> {
        let fail = |what: &'static str| move |e: Errno| local(what)(e.into());
        let found = self.job.left.found().cloned().unwrap_or_default();
        // The journal itself is kept up to date with what is done, and small.
        let notes = Journal::start(&self.node.config.cache, found.image.clone())
            .map_err(|e| RunError::Config(e.to_string()))?;
        let mut placed: BTreeMap<Ino, Placed> = BTreeMap::new();
        // Before anything is touched: what is on the backing and is not what was known.
        for (ino, note) in found.image.unflushed() {
            if let Some(why) = self.conflict(note).await.filter(|_| !self.job.force) {
                placed.insert(ino, Placed::Left(why));
            }
        }
        let mut lost = Vec::new();
        if self.of_job {
            let restored = restore::take_over(&self.node, &found, true)
                .await
                .map_err(fail("cannot put the files together"))?;
            for (ino, _) in found.image.unflushed() {
                placed.entry(ino).or_insert(Placed::As(ino));
            }
            lost = restored.lost;
        } else {
            for (ino, note) in found.image.unflushed() {
                if !placed.contains_key(&ino) {
                    let made = self.make_anew(ino, note, found.rebooted).await;
                    let made = made.map_or_else(Placed::Left, Placed::As);
                    placed.insert(ino, made);
                }
            }
        }
        self.hold_back(&placed);
        notes_flushing(&notes, &found.image, &placed);
        let drain = Drain {
            node: Arc::clone(&self.node),
            flusher: Arc::clone(&engine),
            progress: Arc::clone(&self.job.progress),
        };
        let drained = drain.run(&[], self.job.timeout).await;
        self.note_done(&notes, &found.image, &placed).map_err(fail("the node journal"))?;
        let stop = tokio::task::spawn_blocking(move || engine.shutdown(FLUSHER_ENDS_WITHIN));
        let _ = stop.await;
        Ok(self.outcome(drained, &found.image, &placed, lost))
    }

    /// Files that are not to be drained are taken off the node's list.
    fn hold_back(&self, placed: &BTreeMap<Ino, Placed>) {
        for (ino, placed) in placed {
            if let (Placed::Left(_), Some(file)) = (placed, self.node.file(*ino)) {
                file.state.write().orphan = true;
                self.node.unlist(&file);
            }
        }
    }

    /// What is drained is the journal's no more; its cache files go when that is certain.
    fn note_done(
        &self,
        notes: &Journal,
        image: &Image,
        placed: &BTreeMap<Ino, Placed>,
    ) -> Result<(), Errno> {
        let mut done = Vec::new();
        for (ino, note) in image.unflushed() {
            let Some(Placed::As(now)) = placed.get(&ino) else { continue };
            let left = self.node.file(*now).map_or(0, |f| f.state.read().view.unflushed_bytes());
            if left == 0 {
                notes.push(&Record::Gone(ino));
                done.push((ino, *now, note));
            }
        }
        notes.sync()?;
        for (ino, now, note) in done {
            self.node.cache.remove(ino)?;
            if now != ino {
                self.node.cache.remove(now)?;
                self.remove_old_part(note);
            }
        }
        Ok(())
    }

    /// A file that was made anew has a part file of its own; the old one is of no use.
    fn remove_old_part(&self, note: &Note) {
        if let Some(part) = note.header.home.as_ref().filter(|h| h.is_part())
            && let Err(e) = self.posix.remove_part(&part.path, part.ino)
        {
            tracing::debug!(error = %e, "no old part file");
        }
    }

    fn outcome(
        &self,
        drained: Outcome,
        image: &Image,
        placed: &BTreeMap<Ino, Placed>,
        lost: Vec<(String, u64)>,
    ) -> Outcome {
        let mut ours = Vec::new();
        for (ino, note) in image.unflushed() {
            if let Some(Placed::Left(why)) = placed.get(&ino) {
                let path = label(ino, note);
                ours.push(Remaining { path, bytes: note.len(), why: why.clone() });
            }
        }
        // Without the service nobody knows what the others had; what is here is on the backing.
        let shared = image.unflushed().filter(|(_, n)| n.header.shared && !self.of_job);
        for (ino, note) in shared.filter(|(i, _)| matches!(placed.get(i), Some(Placed::As(_)))) {
            let why = "other nodes had bytes of it: recover their caches, too, with --force";
            ours.push(Remaining { path: label(ino, note), bytes: 0, why: why.to_owned() });
        }
        for (path, bytes) in lost {
            let why = "lost: these bytes are not on this device any more".to_owned();
            ours.push(Remaining { path, bytes, why });
        }
        let join = |mut theirs: Vec<Remaining>| {
            theirs.retain(|r| !ours.iter().any(|o| o.path == r.path));
            theirs.extend(ours.iter().cloned());
            theirs
        };
        match drained {
            Outcome::Ok { bytes, files } if ours.is_empty() => Outcome::Ok { bytes, files },
            Outcome::Ok { .. } => Outcome::Incomplete { remaining: join(Vec::new()) },
            Outcome::Incomplete { remaining } => Outcome::Incomplete { remaining: join(remaining) },
            Outcome::TimedOut { remaining } => Outcome::TimedOut { remaining: join(remaining) },
            other => other,
        }
    }

    // ---- what is on the backing --------------------------------------------------------------

    /// Why the backing is not as the journal knew it, if it is not.
    async fn conflict(&self, note: &Note) -> Option<String> {
        let header = &note.header;
        if header.path.is_empty() {
            return Some("deleted, as far as is known".to_owned());
        }
        let there = match self.posix.identity(&header.path) {
            Ok(identity) => Some(identity),
            Err(BackendError::Io { errno: Errno::ENOENT | Errno::ENOTDIR, .. }) => None,
            Err(e) => return Some(e.to_string()),
        };
        let home = header.home.as_ref();
        let expected = match home {
            Some(home) if !home.is_part() => Some(home),
            _ => header.under.as_ref(),
        };
        match (there, expected) {
            (None, None) => None,
            (None, Some(home)) if home.is_part() => None,
            // In the service's journal it may still have a name; made anew it would be empty.
            (None, Some(_)) if header.under.is_some() => None,
            (None, Some(_)) => Some("the file on the backing is gone".to_owned()),
            (Some(there), None) if home.is_some_and(|h| h.ino == there.ino) => None,
            (Some(_), None) => Some("something else has this name on the backing now".to_owned()),
            (Some(there), Some(home)) => conflict_with(home, &there),
        }
    }

    // ---- a service that does not know the files ----------------------------------------------

    /// Makes a file at its path through the service, with what the cache holds of it.
    async fn make_anew(&self, old: Ino, note: &Note, rebooted: bool) -> Result<Ino, String> {
        let said = |what: &str, e: Errno| format!("{what}: {e}");
        let mut note = note.clone();
        let len = self.node.cache.len(old).map_err(|e| e.to_string())?;
        let had = note.len();
        note.trim(len);
        let safe: Vec<_> = note.held().filter(|(_, h)| h.durable || !rebooted).collect();
        note.set_held(safe);
        if note.len() < had {
            let gone = had - note.len();
            return Err(format!("{gone} bytes of it were lost with the power or the cache file"));
        }
        let path = &note.header.path;
        let mut parts = Vec::new();
        for part in path.split(|b| *b == b'/') {
            parts.push(Name::new(part).map_err(|e| said("its path", e))?);
        }
        let (name, dirs) = parts.split_last().ok_or("it has no path")?;
        let parent = self.directories(dirs, &note).await.map_err(|e| said("directory", e))?;
        let (attr, whole) = self.file_at(parent, name, &note).await?;
        let held = self.take_bytes(old, attr.ino, &note, whole).map_err(|e| e.to_string())?;
        let query = QueryRequest { ino: attr.ino, range: ByteRange::ALL, known: Version::ZERO };
        let answer = self.node.meta.query(query).await.map_err(|e| said("query", e))?;
        let file = CachedFile::new(attr.ino, self.node.me, Arc::clone(self.node.rules.job()));
        {
            let mut state = file.state.write();
            state.view = FileView::restored(self.node.me, &answer.map, &[], &held);
            state.path.clone_from(path);
            state.mtime = Some(note.header.mtime);
        }
        self.node.adopt(Arc::new(file));
        let size = note.header.size.max(attr.size);
        self.attributes(attr.ino, &note, size).await.map_err(|e| said("attributes", e))?;
        Ok(attr.ino)
    }

    async fn directories(&self, dirs: &[Name], note: &Note) -> Result<Ino, Errno> {
        let mut at = Ino::ROOT;
        for name in dirs {
            let attr = match self.node.meta.lookup(at, name).await {
                Ok(attr) => attr,
                Err(Errno::ENOENT) => {
                    self.make(at, name, FileKind::Directory, DIRECTORY_PERM, note).await?
                }
                Err(e) => return Err(e),
            };
            if attr.kind != FileKind::Directory {
                return Err(Errno::ENOTDIR);
            }
            at = attr.ino;
        }
        Ok(at)
    }

    async fn make(
        &self,
        parent: Ino,
        name: &Name,
        kind: FileKind,
        perm: u32,
        note: &Note,
    ) -> Result<Attr, Errno> {
        let request = MakeRequest {
            parent,
            name: name.clone(),
            kind,
            perm,
            uid: note.header.uid,
            gid: note.header.gid,
            rdev: 0,
            target: Vec::new(),
            open: false,
        };
        match self.node.meta.make(&request).await? {
            ebb_meta_client::Made::Made(attr) => Ok(attr),
            ebb_meta_client::Made::Opened(_) => Err(Errno::EPROTO),
        }
    }

    /// The file that the bytes go into, and whether it is made whole: one that was not on the
    /// backing, or only under another one's name.
    async fn file_at(&self, parent: Ino, name: &Name, note: &Note) -> Result<(Attr, bool), String> {
        let said = |what: &str, e: Errno| format!("{what}: {e}");
        let in_place = note.header.home.as_ref().is_some_and(|h| !h.is_part());
        let perm = note.header.perm;
        let there = match self.node.meta.lookup(parent, name).await {
            Ok(attr) => Some(attr),
            Err(Errno::ENOENT) => None,
            Err(e) => return Err(said("lookup", e)),
        };
        match there {
            Some(attr) if attr.kind != FileKind::Regular => {
                Err("something that is not a file has this name on the backing".to_owned())
            }
            Some(attr) if in_place || !covers(note, ByteRange::new(0, note.header.size)) => {
                Ok((attr, false))
            }
            None => {
                let made = self.make(parent, name, FileKind::Regular, perm, note).await;
                made.map(|attr| (attr, !in_place)).map_err(|e| said("create", e))
            }
            Some(_) => {
                // It replaces the older one when it is whole, and not before.
                let text = [name.as_bytes(), b".ebb-recovered"].concat();
                let aside = Name::new(&text).map_err(|e| said("temporary name", e))?;
                let made = self.make(parent, &aside, FileKind::Regular, perm, note).await;
                let attr = made.map_err(|e| said("create", e))?;
                let moved = self.node.meta.rename((parent, &aside), (parent, name), 0).await;
                moved.map(|()| (attr, true)).map_err(|e| said("rename", e))
            }
        }
    }

    /// The cache file under the new number, with what the old part file has on top: a file that
    /// is made whole needs every byte.
    fn take_bytes(
        &self,
        old: Ino,
        new: Ino,
        note: &Note,
        whole: bool,
    ) -> Result<Vec<ByteRange>, String> {
        let shown = |e: std::io::Error| e.to_string();
        self.node.cache.link(old, new).map_err(shown)?;
        let mut held: Vec<ByteRange> = note.held().map(|(r, _)| r).collect();
        let part = note.header.home.as_ref().filter(|h| whole && h.is_part());
        if let Some(part) = part {
            let cache = self.node.cache.file(new).map_err(shown)?;
            held = self.add_part(part, note, &cache)?;
        }
        Ok(held)
    }

    fn add_part(
        &self,
        part: &Home,
        note: &Note,
        cache: &std::fs::File,
    ) -> Result<Vec<ByteRange>, String> {
        use std::os::unix::fs::FileExt;
        let file =
            self.posix.open(&part.path, part.ino, Access::Read).map_err(|e| e.to_string())?;
        let len = file.identity().map_err(|e| e.to_string())?.size.min(note.header.size);
        let mut buf = vec![0; 1 << 20];
        let mut at = 0;
        for (range, _) in note.held().chain([(ByteRange::at(len, 0), note_end())]) {
            while at < range.start().min(len) {
                let n = (range.start().min(len) - at).min(buf.len() as u64) as usize;
                let got = file.read_full_at(&mut buf[..n], at).map_err(|e| e.to_string())?;
                buf[got..n].fill(0);
                cache.write_all_at(&buf[..n], at).map_err(|e| e.to_string())?;
                at += n as u64;
            }
            at = at.max(range.end());
        }
        let end = note.held().map(|(r, _)| r.end()).max().unwrap_or(0).max(len);
        if cache.metadata().map_err(|e| e.to_string())?.len() < end {
            cache.set_len(end).map_err(|e| e.to_string())?;
        }
        Ok(vec![ByteRange::new(0, end)])
    }

    /// Size first: it moves the times.
    async fn attributes(&self, ino: Ino, note: &Note, size: u64) -> Result<(), Errno> {
        let had = self.node.meta.getattr(ino).await?;
        let grow = (size > had.size).then_some(size);
        if grow.is_some() {
            let args = SetAttr { size: grow, ..SetAttr::default() };
            let done = self.node.meta.setattr(ino, &args).await?;
            if let (Some(file), Some(map)) = (self.node.file(ino), done.map) {
                file.state.write().view.apply(&map.map);
            }
        }
        let header = &note.header;
        let args = SetAttr {
            mode: Some(header.perm),
            uid: (had.uid != header.uid).then_some(header.uid),
            gid: (had.gid != header.gid).then_some(header.gid),
            atime: Some(SetTime::To(header.atime)),
            mtime: Some(SetTime::To(header.mtime)),
            ..SetAttr::default()
        };
        match self.node.meta.setattr(ino, &args).await {
            // A user cannot give files away; the bytes matter more.
            Err(Errno::EPERM) => {
                let args = SetAttr { uid: None, gid: None, ..args };
                self.node.meta.setattr(ino, &args).await.map(drop)
            }
            other => other.map(drop),
        }
    }
}

fn note_end() -> crate::journal::Held {
    crate::journal::Held { kept: crate::journal::Kept::Written, durable: false }
}

fn covers(note: &Note, range: ByteRange) -> bool {
    let part = note.header.home.as_ref().is_some_and(Home::is_part);
    part || note.held_in(range).iter().map(|(r, _)| r.len()).sum::<u64>() == range.len()
}

/// Files in place are going to change by our own doing: a run that is interrupted must not take
/// that for a conflict.
fn notes_flushing(notes: &Journal, image: &Image, placed: &BTreeMap<Ino, Placed>) {
    for (ino, note) in image.unflushed() {
        let mut header = note.header.clone();
        let in_place = header.home.as_mut().filter(|h| !h.is_part());
        if let (Some(Placed::As(_)), Some(home)) = (placed.get(&ino), in_place) {
            home.changing = true;
            notes.push(&Record::File(ino, Box::new(header)));
        }
    }
    if let Err(e) = notes.sync() {
        tracing::warn!(error = %e, "the node journal cannot be written");
    }
}

fn conflict_with(home: &Home, there: &ebb_backend::Identity) -> Option<String> {
    if home.ino != there.ino {
        return Some("another file has this name on the backing now".to_owned());
    }
    let seen = home.seen.filter(|_| !home.changing)?;
    let newer = there.mtime > seen.mtime || there.size != seen.size;
    newer.then(|| "the file on the backing was changed since".to_owned())
}
