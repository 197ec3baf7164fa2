//! Draining: every byte of this node to the backing, verified, and everything else that a file
//! system is made of. Tells the truth about what did not get there.

use crate::control::{Event, Outcome, Remaining};
use crate::medium::LostBytes;
use crate::node::Node;
use crate::parting::Unheard;
use crate::replica::Waiting;
use ebb_flusher::{DrainReport, DrainScope, Engine};
use ebb_types::units::Size;
use ebb_types::{Errno, Ino};
use ebb_wire::pb;
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::{Duration, Instant};

/// Without a limit of the user's a drain may take so long; the largest buffers need hours.
const PATIENCE: Duration = Duration::from_secs(24 * 3600);

/// Things asked of the service at once.
const MATERIALIZE_STEP: u32 = 256;

/// Names are asked for even when the bytes took all the time; that is quick when nothing hangs.
const LEAST_FOR_NAMES: Duration = Duration::from_secs(1);

/// Where a drain tells how far it is.
pub type Progress = Arc<dyn Fn(Event) + Send + Sync>;

/// Rounds that a drain makes for files that got dirty again while it lasted.
const ROUNDS_MORE: u32 = 3;

/// How often it is looked whether the service is there, and after what time it is told that it is not.
const LOOK_EVERY: Duration = Duration::from_millis(250);
const TOLD_AFTER: Duration = Duration::from_secs(2);

/// What a drain knows of the service while it lasts.
#[derive(Default)]
struct Service {
    /// For so long that nobody need wait any more.
    is_silent: Arc<AtomicBool>,
    /// The flusher has work of this drain, and looks itself whether that is so.
    is_flushing: AtomicBool,
}

/// One drain.
pub struct Drain {
    /// The node.
    pub node: Arc<Node>,
    /// Its flusher.
    pub flusher: Arc<Engine>,
    /// Who wants to know how far it is.
    pub progress: Progress,
    /// For how long it waits for a service that does not answer.
    pub patience: Duration,
}

impl Drain {
    /// Drains `paths` (everything, when there are none). A service that does not answer for too
    /// long ends it.
    pub async fn run(&self, paths: &[PathBuf], limit: Option<Duration>) -> Outcome {
        if let Some(why) = self.node.meta.refusal() {
            return self.without_service(why);
        }
        let service = Service::default();
        tokio::select! {
            outcome = self.steps(&service, paths, limit) => outcome,
            () = self.watch(&service) => self.unreachable(),
        }
    }

    /// Tells who waits that the service is not there, and when it is again. Ends when nobody need wait any
    /// more, but not before a flush that is under way.
    async fn watch(&self, service: &Service) {
        let (meta, patience) = (&self.node.meta, self.patience);
        let (mut since, mut told) = (Instant::now(), false);
        let address = meta.address();
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let text = if meta.is_connected() {
                since = Instant::now();
                service.is_silent.store(false, Release);
                let text = format!("the metadata service {address} answers again");
                std::mem::take(&mut told).then_some(text)
            } else {
                service.is_silent.store(since.elapsed() >= patience, Release);
                let first = since.elapsed() >= TOLD_AFTER && !std::mem::replace(&mut told, true);
                first.then(|| {
                    let seconds = patience.as_secs();
                    format!("the metadata service {address} does not answer; waiting for it, at most {seconds} s")
                })
            };
            if let Some(text) = text {
                (self.progress)(Event::Waiting { text });
            }
            if service.is_silent.load(Acquire) && !service.is_flushing.load(Acquire) {
                return;
            }
        }
    }

    async fn steps(
        &self,
        service: &Service,
        paths: &[PathBuf],
        limit: Option<Duration>,
    ) -> Outcome {
        let deadline = limit.map(|l| Instant::now() + l);
        let waiting = self.node.adopt_before_drain(limit).await;
        let files = match self.files_below(paths).await {
            Ok(files) => files,
            Err(outcome) => return outcome,
        };
        self.node.publish_all_unseen().await;
        let mut before = (0, 0);
        for round in 0.. {
            self.node.wait_for_writers().await;
            let report = match self.flush_all(service, files.clone(), deadline).await {
                Ok(report) => report,
                Err(e) => return Outcome::Failed { text: format!("drain: {e}") },
            };
            if service.is_silent.load(Acquire) {
                return self.unreachable();
            }
            let done = (before.0 + report.bytes, report.files.max(before.1));
            let is_flushed = report.remaining.is_empty() && !report.timed_out;
            // Names go after bytes: what is published by now needs nothing more.
            match self.materialize(deadline).await {
                Ok(named) if named.published && is_flushed && round < ROUNDS_MORE => before = done,
                Ok(mut named) => {
                    add_each_once(&mut named.left, unheard(&self.node).into_iter());
                    return outcome(done, &report, named, waiting, paths);
                }
                Err(Errno::ETIMEDOUT) => return self.unreachable(),
                Err(e) => return Outcome::Failed { text: format!("drain of names: {e}") },
            }
        }
        unreachable!("the last round returns")
    }

    fn unreachable(&self) -> Outcome {
        let dirty = self.node.dirty_files();
        let (address, config) = (self.node.meta.address(), &self.node.config);
        let bytes = Size(dirty.iter().map(|file| file.bytes).sum());
        let (files, point) = (dirty.len(), config.mountpoint.display());
        let (cache, backing) = (config.cache.display(), config.backing.display());
        Outcome::Unreachable {
            text: format!(
                "the metadata service {address} does not answer; {bytes} of {files} file(s) are in {cache} and not \
                 on the backing. Nothing is lost: try again when it is there. Where it has another address by \
                 now, `ebb umount --no-drain {point}` and then \
                 `ebb mount --meta ADDRESS --cache {cache} {backing} {point}` go on with it"
            ),
        }
    }

    /// Nobody speaks to the service: nothing can be brought anywhere, which is said at once.
    fn without_service(&self, why: String) -> Outcome {
        let remaining: Vec<Remaining> = self
            .node
            .dirty_files()
            .into_iter()
            .map(|f| {
                let path = self.node.file(f.ino).map_or_else(|| f.ino.to_string(), |f| f.label());
                Remaining { path, bytes: f.bytes, why: why.clone() }
            })
            .collect();
        match remaining.is_empty() {
            true => Outcome::Unreachable { text: why },
            false => Outcome::Incomplete { remaining },
        }
    }

    /// Once more when bytes were published meanwhile that nobody wrote after the drain began: the
    /// kernel tells late of the last close of a file that was written past the daemon.
    async fn flush_all(
        &self,
        service: &Service,
        files: Option<Vec<Ino>>,
        deadline: Option<Instant>,
    ) -> Result<DrainReport, Errno> {
        let mut report = self.flush(service, files.clone(), deadline).await?;
        for _ in 0..ROUNDS_MORE {
            let is_late = report.failures.is_empty() && !report.timed_out;
            if report.remaining.is_empty() || !is_late {
                break;
            }
            let (bytes, count) = (report.bytes, report.files);
            report = self.flush(service, files.clone(), deadline).await?;
            report.bytes += bytes;
            report.files = report.files.max(count);
        }
        Ok(report)
    }

    async fn flush(
        &self,
        service: &Service,
        files: Option<Vec<Ino>>,
        deadline: Option<Instant>,
    ) -> Result<DrainReport, Errno> {
        let flusher = Arc::clone(&self.flusher);
        let progress = Arc::clone(&self.progress);
        let scope = match files {
            Some(files) => DrainScope::Files(files.into_iter().collect()),
            None => DrainScope::All,
        };
        let deadline = deadline.unwrap_or_else(|| Instant::now() + PATIENCE);
        let is_silent = Arc::clone(&service.is_silent);
        let work = move || {
            flusher.drain_while(&scope, deadline, &mut |p| {
                progress(Event::Progress {
                    bytes_done: p.bytes_done,
                    bytes_total: p.bytes_total,
                    files_done: p.files_done,
                    files_total: p.files_total,
                    stage: "flushing".into(),
                });
                !is_silent.load(Acquire)
            })
        };
        service.is_flushing.store(true, Release);
        let report = tokio::task::spawn_blocking(work).await.map_err(|_| Errno::EIO);
        service.is_flushing.store(false, Release);
        report
    }

    /// Asks the service for directories, links, empty files, attributes… until nothing is left. The
    /// first pass may go on where that of an earlier drain was given up, so the second one is
    /// what counts; there is little left for it. At the end the service has all that on stable storage:
    /// what it forgets to be flushed is asked of this node again, which has forgotten it as well.
    async fn materialize(&self, deadline: Option<Instant>) -> Result<Named, Errno> {
        let mut named = self.pass(deadline).await?;
        if !named.late {
            named = self.pass(deadline).await?;
            self.node.meta.sync_meta().await?;
        }
        Ok(named)
    }

    async fn pass(&self, deadline: Option<Instant>) -> Result<Named, Errno> {
        let mut failures: Vec<Remaining> = Vec::new();
        let mut unfinished: Vec<Remaining> = Vec::new();
        let mut done = 0;
        loop {
            let meta = self.node.patient_meta();
            let asked = meta.materialize(MATERIALIZE_STEP);
            let Some(step) = before(deadline, asked).await else {
                failures.extend(unfinished);
                return Ok(Named { late: true, published: false, left: failures });
            };
            let step = step?;
            done += step.done;
            for failure in &step.failures {
                let path = String::from_utf8_lossy(&failure.path).into_owned();
                let why = format!("{}: {}", failure.operation, Errno(failure.errno));
                if !failures.iter().any(|f| f.path == path) {
                    failures.push(Remaining { path, bytes: 0, why });
                }
            }
            add_each_once(&mut failures, step.held_back.iter().map(held_back));
            (self.progress)(Event::Progress {
                bytes_done: 0,
                bytes_total: 0,
                files_done: done,
                files_total: done + step.remaining,
                stage: "namespace".into(),
            });
            let mine = step.unfinished.iter().filter(|u| u.node == self.node.me.0);
            let lost = self.node.lost();
            unfinished.extend(mine.map(|u| {
                let path = String::from_utf8_lossy(&u.path).into_owned();
                let is_lost = lost.iter().any(|lost| lost.path == path);
                let why = if is_lost { LOST } else { "not flushed" }.to_owned();
                Remaining { path, bytes: u.bytes, why }
            }));
            let is_done = step.remaining == 0;
            if is_done || deadline.is_some_and(|d| Instant::now() >= d) {
                let published = failures.is_empty() && !unfinished.is_empty();
                failures.extend(unfinished);
                return Ok(Named { late: !is_done, published, left: failures });
            }
        }
    }

    /// The files that are meant; `None`: all.
    async fn files_below(&self, paths: &[PathBuf]) -> Result<Option<Vec<Ino>>, Outcome> {
        if paths.is_empty() {
            return Ok(None);
        }
        let mut files = Vec::new();
        for path in paths {
            let found = self.node.files_under(path).await;
            let found =
                found.map_err(|e| Outcome::Failed { text: format!("{}: {e}", path.display()) })?;
            files.extend(found.into_iter().map(|f| f.ino));
        }
        Ok(Some(files))
    }
}

/// What keeps a file from its name.
fn held_back(held: &pb::HeldBack) -> Remaining {
    let node = &held.node;
    let why = match held.missing {
        0 => format!(
            "flushed, but the older file stays under its name: node '{node}' was writing it over and is \
             gone; mount its cache again, or write the file anew"
        ),
        missing => format!(
            "flushed, but not under its name: node '{node}' is gone with {missing} bytes of it; mount its \
             cache again, or `ebb recover` it"
        ),
    };
    Remaining { path: String::from_utf8_lossy(&held.path).into_owned(), bytes: held.bytes, why }
}

/// Why bytes that the disk of the cache lost are not on the backing.
const LOST: &str = "lost: the disk of the cache failed";

/// What the disk of the cache has lost, and what nobody heard of.
pub(crate) fn lost(node: &Node) -> Vec<Remaining> {
    let told = |lost: LostBytes| Remaining { path: lost.path, bytes: lost.bytes, why: LOST.into() };
    let mut all: Vec<_> = node.lost().into_iter().map(told).collect();
    add_each_once(&mut all, unheard(node).into_iter());
    all
}

/// What programs wrote past their dead daemon when another one had taken the cache over.
fn unheard(node: &Node) -> Vec<Remaining> {
    let told = |(path, unheard): (String, Unheard)| {
        let why = unheard.why();
        Remaining { path, bytes: unheard.bytes, why }
    };
    node.unheard().into_iter().map(told).collect()
}

/// What came of the names.
struct Named {
    /// Time ran out.
    late: bool,
    /// Nothing failed, but this node has bytes that it published after they were flushed: a call
    /// that had begun before told the service late.
    published: bool,
    left: Vec<Remaining>,
}

fn outcome(
    done: (u64, u64),
    report: &DrainReport,
    named: Named,
    waiting: Waiting,
    paths: &[PathBuf],
) -> Outcome {
    let mut remaining = remaining_of(report);
    add_each_once(&mut remaining, meant(named.left, paths));
    remaining.extend(not_adopted(waiting));
    if report.timed_out || named.late {
        Outcome::TimedOut { remaining }
    } else if remaining.is_empty() {
        Outcome::Ok { bytes: done.0, files: done.1 }
    } else {
        Outcome::Incomplete { remaining }
    }
}

/// Bytes of lost nodes of which nobody else has copies any more.
fn not_adopted(waiting: Waiting) -> Option<Remaining> {
    (waiting.bytes > 0).then(|| Remaining {
        path: format!("(copies of {} other node(s))", waiting.sets),
        bytes: waiting.bytes,
        why: "their owner does not answer, and they could not be taken over".into(),
    })
}

/// What comes of `work`, if that comes before the deadline. A backing that hangs also holds up the
/// service; what is there by then must be told all the same.
async fn before<T>(deadline: Option<Instant>, work: impl Future<Output = T>) -> Option<T> {
    let Some(deadline) = deadline else { return Some(work.await) };
    let end = deadline.max(Instant::now() + LEAST_FOR_NAMES);
    tokio::time::timeout_at(end.into(), work).await.ok()
}

/// Each path once, with the first reason: of a drain the flusher's, who knows more than the service.
fn add_each_once(remaining: &mut Vec<Remaining>, more: impl Iterator<Item = Remaining>) {
    let known: HashSet<String> = remaining.iter().map(|r| r.path.clone()).collect();
    remaining.extend(more.filter(|r| !known.contains(&r.path)));
}

/// What is at or below `paths`: the service speaks of everything, the user asked for these.
fn meant(found: Vec<Remaining>, paths: &[PathBuf]) -> impl Iterator<Item = Remaining> {
    let is_below = |r: &Remaining| paths.iter().any(|p| Path::new(&r.path).starts_with(p));
    found.into_iter().filter(move |r| paths.is_empty() || is_below(r))
}

fn remaining_of(report: &DrainReport) -> Vec<Remaining> {
    let left = report.remaining.iter().map(|left| {
        let failure = report.failures.iter().find(|f| f.path == left.path);
        let why = failure.map_or_else(
            || "not flushed in time".to_string(),
            |f| format!("{}: {}", f.operation, f.text),
        );
        Remaining { path: left.path.clone(), bytes: left.bytes, why }
    });
    left.collect()
}

impl Node {
    /// What is flushed and has no name, because of a node that is gone: the cache is needed until that is
    /// decided. Of a service that does not answer nothing is known.
    pub(crate) async fn held_back(&self) -> Vec<Remaining> {
        let mut held = Vec::new();
        // The first pass may go on where an earlier one was given up.
        for _ in 0..2 {
            loop {
                match self.meta.materialize_closed().await {
                    Ok(step) => {
                        add_each_once(&mut held, step.held_back.iter().map(held_back));
                        if step.remaining == 0 {
                            break;
                        }
                    }
                    Err(e) => {
                        tracing::warn!(error = %e, "not asked what has no name");
                        return held;
                    }
                }
            }
        }
        held
    }

    /// Brings one file to the backing: what fsync promises under `--durability backing`.
    pub(crate) async fn drain_file(&self, ino: Ino) -> Result<(), Errno> {
        let flusher = self.flusher.get().cloned().ok_or(Errno::EIO)?;
        let deadline = Instant::now() + self.deadline();
        // A round flushes what was dirty when it began; what is left after it was written, or adopted
        // from a lost node, while it lasted. One more, for that is no proof that nothing else is.
        for _ in 0..2 {
            let (flusher, scope) = (Arc::clone(&flusher), DrainScope::Files([ino].into()));
            let work = move || flusher.drain(&scope, deadline, &mut |_| {});
            let report = tokio::task::spawn_blocking(work).await.map_err(|_| Errno::EIO)?;
            match report.failures.first() {
                Some(failure) => return Err(Errno(failure.errno)),
                None if report.timed_out => return Err(Errno::ETIMEDOUT),
                None if report.remaining.is_empty() => break,
                None => tracing::debug!(?report, "dirty again after it was drained"),
            }
        }
        self.name_now(ino).await?;
        // That it is flushed must not be forgotten there.
        self.meta.sync_meta().await
    }
}
