//! Draining the cache of a dead daemon without a mount: a node without FUSE joins a service that
//! the caller started, puts together what the journal knows, and drains like any other node.
//!
//! This is the way while the journal of the service is there: files are taken over as by a new mount.
//! Without it, [`joint`] goes another way. What is on the backing and is not what the journal knew
//! is a conflict, and left alone unless told otherwise.
//!
//! Crash consistency: the journal loses a file only after everything of it is on the backing;
//! cache files are only added to. So a recovery that was interrupted is simply run again.

pub mod joint;
pub(crate) mod places;

use crate::cache::CacheDir;
use crate::carrier;
use crate::config::MountConfig;
use crate::control::{Outcome, Remaining};
use crate::daemon::{self, RunError, local};
use crate::drain::{Drain, Progress};
use crate::flush_source::NodeSource;
use crate::leftover::{Leftover, label};
use crate::node::{Node, Parts};
use crate::restore;
use crate::rules::Rules;
use ebb_backend::{Backend, BackendError, PosixDir};
use ebb_flusher::{Activity, Engine, Options};
use ebb_meta_client::{ConnectOptions, MetaClient};
use ebb_node_journal::{Home, Image, Journal, Note, Record};
use ebb_transport::PeerTransport;
use ebb_types::{Errno, Ino, NodeId};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

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
        .max_blocking_threads(crate::aside::THREADS)
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
            listens: true,
            ..ConnectOptions::new(&job.meta, config.node.clone())
        }))
        .map_err(RunError::Meta)?;
    daemon::check_same_backing(config, welcome.backing_dev_ino)?;
    let activity = Activity::new();
    let node = Node::new(Parts {
        config: config.clone(),
        me: NodeId(welcome.node_id),
        meta,
        peers: carrier::tcp(config).channel(None),
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
    if !job.left.is_of_job(welcome.job) {
        return Err(RunError::Config("the metadata service is of another job".to_owned()));
    }
    let recovery = Recovery { job, node, posix };
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

/// A file of the image: it is in the node now, or why it is not.
enum Placed {
    Here,
    Left(String),
}

struct Recovery<'a> {
    job: &'a Job,
    node: Arc<Node>,
    posix: Arc<PosixDir>,
}

impl Recovery<'_> {
    async fn all(&self, engine: Arc<Engine>) -> Result<Outcome, RunError> {
        let fail = |what: &'static str| move |e: Errno| local(what)(e.into());
        let found = self.job.left.found().cloned().unwrap_or_default();
        // The journal itself is kept up to date with what is done, and small.
        let notes = Journal::start(&self.node.config.cache, found.image.clone())
            .map_err(|e| RunError::Config(e.to_string()))?;
        let mut placed: BTreeMap<Ino, Placed> = BTreeMap::new();
        let told = async {
            let to = self.node.meta.listener();
            self.node.reassert_noted(&found).await?;
            self.node.meta.reasserted(to, None, None).await
        };
        told.await.map_err(fail("cannot tell the service what was known"))?;
        // Before anything is touched: what is on the backing and is not what was known.
        for (ino, note) in found.image.unflushed() {
            if let Some(why) = self.conflict(note).await.filter(|_| !self.job.force) {
                placed.insert(ino, Placed::Left(why));
            }
        }
        let restored = restore::take_over(&self.node, &found, true, None)
            .await
            .map_err(fail("cannot put the files together"))?;
        for (ino, _) in found.image.unflushed() {
            placed.entry(ino).or_insert(Placed::Here);
        }
        let lost = restored.lost;
        self.node.begun.send_replace(true);
        self.hold_back(&placed);
        notes_flushing(&notes, &found.image, &placed);
        let drain = Drain {
            node: Arc::clone(&self.node),
            flusher: Arc::clone(&engine),
            progress: Arc::clone(&self.job.progress),
            patience: self.node.deadline(),
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
        for (ino, _) in image.unflushed() {
            let Some(Placed::Here) = placed.get(&ino) else { continue };
            let left = self.node.file(ino).map_or(0, |f| f.state.read().view.unflushed_bytes());
            if left == 0 {
                notes.push(&Record::Gone(ino));
                done.push(ino);
            }
        }
        notes.sync()?;
        done.into_iter().try_for_each(|ino| self.node.cache.remove(ino).map_err(Errno::from))
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
            // A part file keeps its number when it gets its name.
            (Some(there), _) if home.is_some_and(|h| h.is_part() && h.ino == there.ino) => None,
            (None, Some(home)) if home.is_part() => None,
            // In the service's journal it may still have a name; made anew it would be empty.
            (None, Some(_)) if header.under.is_some() => None,
            (None, Some(_)) => Some("the file on the backing is gone".to_owned()),
            (Some(there), None) if home.is_some_and(|h| h.ino == there.ino) => None,
            (Some(_), None) => Some("something else has this name on the backing now".to_owned()),
            (Some(there), Some(home)) => conflict_with(home, &there),
        }
    }
}

/// Files in place are going to change by our own doing: a run that is interrupted must not take
/// that for a conflict.
fn notes_flushing(notes: &Journal, image: &Image, placed: &BTreeMap<Ino, Placed>) {
    for (ino, note) in image.unflushed() {
        let mut header = note.header.clone();
        let in_place = header.home.as_mut().filter(|h| !h.is_part());
        if let (Some(Placed::Here), Some(home)) = (placed.get(&ino), in_place) {
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
