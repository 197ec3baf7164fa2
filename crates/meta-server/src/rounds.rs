//! Rounds: changes of different inodes that several requests want at the same time are carried out
//! in one turn. What they do on the backing goes on side by side, and a directory that gets names
//! of many files is synced once. Without that, files of a few kilobytes would come to the backing
//! one sync after the other.
//!
//! Whoever gets the turn first leads: it takes what has been asked for by then, of each inode one
//! change, and tells the others how theirs ended. All are planned before any is carried out, so
//! only changes that do not depend on each other belong here: giving a file its place, and
//! publishing. (Two that need the same new directory both make it; the second finds it made.)

use crate::backing::{Backing, DEADLINE};
use crate::core::{Core, Turn};
use crate::effects::Lack;
use crate::late;
use crate::state::State;
use ebb_locks::Mutex;
use ebb_namespace::{BackingPath, Effect, Known, Plan, Record, Restat, Step};
use ebb_types::{Errno, Ino};
use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, OnceLock};
use tokio::sync::oneshot;
use tokio::time::Instant;

/// Most changes of one round.
const MOST: usize = 64;
/// So many threads wait for the backing for them: enough for one that is far away, few enough that
/// waking them costs little beside a near one.
const THREADS: usize = 16;

/// What a change does, decided under the turn; `None` for nothing now.
type Planner = Box<dyn FnOnce(&State) -> Result<Option<Plan>, Errno> + Send>;

/// True when the change was carried out.
type Ended = Result<bool, Errno>;

struct Change {
    ino: Ino,
    plan: Planner,
    tell: oneshot::Sender<Ended>,
}

/// The changes that nobody has begun.
#[derive(Default)]
pub struct Rounds(Mutex<Vec<Change>>);

impl Rounds {
    /// The next ones, of each inode the first.
    fn take(&self) -> Vec<Change> {
        let mut waiting = self.0.lock();
        let mut inos = BTreeSet::new();
        let (taken, left) = mem::take(&mut *waiting)
            .into_iter()
            // Whoever gave up no longer holds what the change relies on.
            .filter(|c| !c.tell.is_closed())
            .partition(|c| inos.len() < MOST && inos.insert(c.ino));
        *waiting = left;
        taken
    }
}

/// A change that is being carried out.
struct Going {
    steps: std::vec::IntoIter<Step>,
    tell: oneshot::Sender<Ended>,
}

/// One step of one of them; its effects are being carried out.
struct Doing {
    going: Going,
    sync: BTreeSet<BackingPath>,
    restat: Vec<Restat>,
    records: Vec<Record>,
    /// Of objects that lack something.
    owed: Vec<Record>,
}

impl Core {
    /// Plans and carries out a change of an inode, with what others want at the same time.
    pub async fn in_round(
        &self,
        ino: Ino,
        plan: impl FnOnce(&State) -> Result<Option<Plan>, Errno> + Send + 'static,
    ) -> Ended {
        let (tell, mut told) = oneshot::channel();
        self.rounds.0.lock().push(Change { ino, plan: Box::new(plan), tell });
        let turn = self.turn().await;
        loop {
            match told.try_recv() {
                Ok(ended) => return ended,
                Err(oneshot::error::TryRecvError::Empty) => {}
                // The one that led was ended in the middle.
                Err(oneshot::error::TryRecvError::Closed) => return Err(Errno::EIO),
            }
            self.carry_out(&turn, self.rounds.take()).await;
        }
    }

    async fn carry_out(&self, turn: &Turn<'_>, round: Vec<Change>) {
        let mut going = Vec::new();
        {
            let state = self.state();
            for change in round {
                match (change.plan)(&state) {
                    Ok(Some(plan)) => going.push((plan, change.tell)),
                    Ok(None) => end(change.tell, Ok(false)),
                    Err(errno) => end(change.tell, Err(errno)),
                }
            }
        }
        if going.len() == 1
            && let Some((plan, tell)) = going.pop()
        {
            end(tell, self.execute(turn, plan, Vec::new()).await.map(|()| true));
        }
        let mut going: Vec<Going> =
            going.into_iter().map(|(p, tell)| Going { steps: p.steps.into_iter(), tell }).collect();
        while !going.is_empty() {
            going = self.step(going).await;
        }
    }

    /// The next step of each: what it does on the backing, then the directories, then what is
    /// true. Those that failed or came to their end are told so.
    async fn step(&self, going: Vec<Going>) -> Vec<Going> {
        let mut doing = Vec::with_capacity(going.len());
        let mut effects = Vec::with_capacity(going.len());
        for mut going in going {
            match going.steps.next() {
                Some(step) => {
                    let (step, to_do) = begin(going, step);
                    doing.push(step);
                    effects.push(to_do);
                }
                None => end(going.tell, Ok(true)),
            }
        }
        let work = match self.side_by_side(effects).await {
            Ok(work) => work,
            Err(errno) => {
                doing.into_iter().for_each(|step| end(step.going.tell, Err(errno)));
                return Vec::new();
            }
        };
        let mut done = Vec::with_capacity(doing.len());
        for (i, step) in doing.into_iter().enumerate() {
            match work.outcome(i) {
                Ok(lacks) => {
                    let mut step: Doing = step;
                    step.owed = self.lacking(&lacks);
                    done.push((i, step));
                }
                Err(errno) => end(step.going.tell, Err(errno)),
            }
        }
        let done = self.keep_synced(&work, done).await;
        let restat: BTreeSet<BackingPath> =
            done.iter().flat_map(|d| &d.restat).map(|r| r.path.clone()).collect();
        let seen = self.look_at(restat).await;
        let mut state = self.state();
        let mut left = Vec::with_capacity(done.len());
        for Doing { going, restat, mut records, owed, .. } in done {
            match &seen {
                Err(errno) => end(going.tell, Err(*errno)),
                Ok(seen) => {
                    let now = restat.iter().filter_map(|r| Some((r.ino, *seen.get(&r.path)?)));
                    records.extend(now.flat_map(|(ino, now)| now.records(ino)));
                    records.extend(owed);
                    self.commit_ns(&mut state, records);
                    left.push(going);
                }
            }
        }
        left
    }

    /// Carries out lists of effects. What was not begun in time is never begun.
    async fn side_by_side(&self, effects: Vec<Vec<Effect>>) -> Result<Arc<Work>, Errno> {
        let lists: Vec<&[Effect]> = effects.iter().map(Vec::as_slice).collect();
        let (going, waiting): (Vec<_>, Vec<_>) =
            self.backing.under_way.begin(&lists).await?.into_iter().unzip();
        let known = {
            let state = self.state();
            effects.iter().map(|e| state.ns.known_objects(e)).collect()
        };
        // One for all: a backing that hangs must not hold the turn once for each of them.
        let by = Instant::now() + DEADLINE;
        let work = Arc::new(Work {
            outcomes: effects.iter().map(|_| OnceLock::new()).collect(),
            effects,
            known,
            going: going.into_iter().map(|g| Mutex::new(Some(g))).collect(),
            next: AtomicUsize::new(0),
            over: AtomicBool::new(false),
        });
        let thread = |_| {
            let work = Arc::clone(&work);
            self.backing.start(move |b| {
                work.go_on(b);
                Ok(())
            })
        };
        let mut threads: Vec<_> = (0..work.effects.len().min(THREADS)).map(thread).collect();
        for thread in &mut threads {
            // How it went is told by the outcomes.
            let _ = self.backing.finish(thread, by).await;
        }
        work.over.store(true, Relaxed);
        drop(waiting);
        work.forget_not_begun();
        Ok(work)
    }

    /// Syncs the directories of the steps. What was done in one where that failed is taken back;
    /// those whose directories are synced are left.
    async fn keep_synced(&self, work: &Arc<Work>, done: Vec<(usize, Doing)>) -> Vec<Doing> {
        let failed = self.sync_dirs(done.iter().map(|(_, d)| d)).await;
        let (mut left, mut lost) = (Vec::with_capacity(done.len()), Vec::new());
        for (i, step) in done {
            match step.sync.iter().find_map(|path| failed.get(path)) {
                None => left.push(step),
                Some(errno) => lost.push((i, *errno, step.going.tell)),
            }
        }
        // A directory that hangs is left alone: its sync may end yet.
        let undone: Vec<usize> =
            lost.iter().filter(|(_, e, _)| *e != Errno::ETIMEDOUT).map(|(i, ..)| *i).collect();
        if !undone.is_empty() {
            let work = Arc::clone(work);
            let take_back = move |b: &Backing| {
                undone.iter().for_each(|i| b.take_back(&work.effects[*i], &work.known[*i]));
                Ok(())
            };
            if let Err(errno) = self.backing.run(take_back).await {
                tracing::error!(?errno, "changes that failed are not taken back in time");
            }
        }
        for (_, errno, tell) in lost {
            end(tell, Err(errno));
        }
        left
    }

    /// Syncs each directory once; the ones where that failed.
    async fn sync_dirs(&self, done: impl Iterator<Item = &Doing>) -> BTreeMap<BackingPath, Errno> {
        let paths: BTreeSet<&BackingPath> = done.flat_map(|d| &d.sync).collect();
        let mut working = Vec::with_capacity(paths.len());
        let by = Instant::now() + DEADLINE;
        for path in paths {
            let effect = Effect::SyncDir { path: path.clone() };
            working.push((
                path.clone(),
                self.backing.start(move |b| b.effect(&effect, &Known::new())),
            ));
        }
        let mut failed = BTreeMap::new();
        for (path, mut work) in working {
            if let Err(errno) = self.backing.finish(&mut work, by).await {
                failed.insert(path, errno);
            }
        }
        failed
    }

    /// What is at these paths; what others took away in this moment is found missing when it is
    /// needed.
    async fn look_at(
        &self,
        paths: BTreeSet<BackingPath>,
    ) -> Result<BTreeMap<BackingPath, crate::acl::Now>, Errno> {
        let look = move |b: &Backing| {
            let seen = paths.into_iter().filter_map(|path| {
                let now = b.now_at(&path)?;
                Some((path, now))
            });
            Ok(seen.collect())
        };
        self.backing.run(look).await
    }
}

/// Lists of effects that several threads share out among themselves.
struct Work {
    effects: Vec<Vec<Effect>>,
    known: Vec<Known>,
    /// Taken by the thread that carries the list out.
    going: Vec<Mutex<Option<late::Going>>>,
    outcomes: Vec<OnceLock<Result<Vec<Lack>, Errno>>>,
    next: AtomicUsize,
    /// Nobody waits any more.
    over: AtomicBool,
}

impl Work {
    fn go_on(&self, backing: &Backing) {
        while !self.over.load(Relaxed) {
            let i = self.next.fetch_add(1, Relaxed);
            let (Some(effects), Some(told)) = (self.effects.get(i), self.outcomes.get(i)) else {
                return;
            };
            // Each is taken once.
            let Some(going) = self.going[i].lock().take() else { return };
            let wanted = || going.is_wanted();
            let _ = told.set(backing.effects(effects, &self.known[i], wanted));
        }
    }

    /// The lists that no thread has taken are not under way.
    fn forget_not_begun(&self) {
        self.going.iter().for_each(|g| drop(g.lock().take()));
    }

    /// How a list ended.
    fn outcome(&self, i: usize) -> Result<Vec<Lack>, Errno> {
        self.outcomes.get(i).and_then(|o| o.get()).cloned().unwrap_or(Err(Errno::ETIMEDOUT))
    }
}

/// A step without what it does on the backing, and that. Directories are synced for all together.
fn begin(going: Going, mut step: Step) -> (Doing, Vec<Effect>) {
    let mut sync = BTreeSet::new();
    while let Some(Effect::SyncDir { path }) = step.effects.last() {
        sync.insert(path.clone());
        step.effects.pop();
    }
    let (restat, records) = (step.restat, step.records);
    (Doing { going, sync, restat, records, owed: Vec::new() }, step.effects)
}

/// Nobody listens when the request was given up meanwhile; what is done is done.
fn end(tell: oneshot::Sender<Ended>, ended: Ended) {
    let _ = tell.send(ended);
}
