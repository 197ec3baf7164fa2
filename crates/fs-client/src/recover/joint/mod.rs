//! Recovery without a service: any number of nodes of one job, each with its own cache, bring what
//! they have to the backing, at the same time or one after the other, and nothing but the backing
//! tells them of each other.
//!
//! # Consistency
//! A file that only one node had is written to a part file and gets its name when it is whole. For
//! each file that others may have had, all recoveries write to *one* file: the one that is on the
//! backing already (under its name, or the service's part file), or a new one. Each has made a
//! [`statement`] before it writes: which bytes it has, and of which version, as the service counted
//! them. [`merge`] says who may write what, and when; of each byte the newest version that any
//! cache has ends up in the file, in whatever order recoveries run, also after the file has got its
//! name. [`board`] is where statements are.
//!
//! The file gets its name when every byte of it is accounted for: written by somebody, on the backing
//! before, or known to be a hole because the service had told the only node that had the file that
//! it was the only one, or because every node that ever was in the job ([`ebb_types::lives`]) has said on the
//! board what it has. Until then every recovery of a node that has bytes of it ends with status 3
//! and says what is missing, also when its own bytes are all there.
//!
//! What a node has flushed, and nothing else of a file, and what the job has replaced or deleted since without
//! its hearing of it, it claims as lost: whoever has newer bytes writes them, and files of others do not wait
//! for it. That no part file of it is left anywhere on the backing is looked for first.
//!
//! What nodes know of names is put together in the same way: [`names`]. Where the service was in the daemon of one
//! of the caches, its state is there, and knows names of the last moment that no node's journal has: the
//! recovery of that cache speaks for it ([`take_in`]), and answers what others have heard ([`Job::state`]).
//!
//! # Crash consistency
//! Killed anywhere, a recovery is run again. Its claims are made anew, and of what it had written
//! nothing need be written again. The node's journal loses a file only when that is whole.
//!
//! # Retries
//! A file that lacks bytes is looked at again until nothing has changed for [`Job::patience`]: others
//! that were started together with this one are perhaps not done.

pub(crate) mod board;
mod claims;
mod elsewhere;
mod file;
pub(crate) mod leaving;
pub mod merge;
mod names;
pub mod statement;
mod tick;

use crate::cache::CacheDir;
use crate::control::{Event, Outcome, Remaining};
use crate::daemon::{RunError, local};
use crate::drain;
use crate::hash;
use crate::leftover::{Leftover, label};
use crate::recover::places::Places;
use board::{Board, Spoken};
use ebb_locks::Mutex;
use ebb_namespace::Book;
use ebb_node_journal::{Image, Journal, JournalError, Life, Note, Record};
use ebb_types::{Facts, Ino, Lives};
use file::{Progress, Site, Stay, Work};
use names::{Left, Names};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// While nothing changes it is looked less and less often, down to this.
const LOOK_AT_LEAST: Duration = Duration::from_secs(1);

/// What is to be recovered, and how.
pub struct Job<'a> {
    /// The cache of the dead daemon. The caller holds its lock.
    pub cache: &'a Path,
    /// What was mounted.
    pub backing: &'a Path,
    /// What the dead daemon left.
    pub left: &'a Leftover,
    /// Conflicts and missing bytes do not matter.
    pub force: bool,
    /// Give up after this time.
    pub timeout: Option<Duration>,
    /// How long nothing may change before it stops to wait for others.
    pub patience: Duration,
    /// Files at once.
    pub threads: usize,
    /// Who wants to know how far it is.
    pub progress: drain::Progress,
    /// The state of the service, where that is here.
    pub state: Option<&'a StateTells<'a>>,
}

/// What the state of a service that is no more says of what has been heard of names, and of these inodes.
pub type StateTells<'a> = dyn Fn(&Book, &BTreeSet<Ino>) -> Facts + Sync + 'a;

/// How a file ended.
enum End {
    Done(u64),
    Stays { bytes: u64, why: String },
    Late,
}

/// The number by which the recoveries of a job find each other.
fn job_label(life: Option<&Life>) -> String {
    match life {
        Some(life) if life.job != 0 => format!("{:016x}", life.job),
        // Nobody can tell which other nodes are of the same job.
        Some(life) => format!("0-{:016x}", hash::bytes(life.node.as_bytes())),
        None => "0".to_owned(),
    }
}

/// What the state of the service tells becomes this node's knowledge, for good: nobody need look into the
/// state again.
pub fn take_in(
    cache: &Path,
    left: &mut Leftover,
    state: &StateTells<'_>,
) -> Result<(), JournalError> {
    let Some(found) = left.found() else { return Ok(()) };
    let facts = state(&found.image.book, &held(&found.image));
    left.hear(&facts);
    let Some(found) = left.found() else { return Ok(()) };
    Journal::start(cache, found.image.clone()).map(drop)
}

/// The files of which there is something to say.
fn held(image: &Image) -> BTreeSet<Ino> {
    image.sayable().map(|(ino, _)| ino).collect()
}

/// Brings everything of a cache to the backing.
pub fn run(job: &Job<'_>) -> Result<Outcome, RunError> {
    let shown = job.backing.display();
    let failed = |e: std::io::Error| local(format!("cannot use the backing {shown}"))(e);
    let places = Places::open(job.backing).map_err(failed)?;
    let life = job.left.found().and_then(|f| f.image.life.as_ref());
    let board = Board::open(&places, &job_label(life)).map_err(failed)?;
    let cache = CacheDir::open(job.cache)
        .map_err(local(format!("cannot use the cache {}", job.cache.display())))?;
    let Some(found) = job.left.found() else { return Ok(Outcome::Ok { bytes: 0, files: 0 }) };
    let notes = Journal::start(job.cache, found.image.clone())
        .map_err(|e| RunError::Config(e.to_string()))?;
    let node = job.left.node().unwrap_or_default();
    let names = Names::gather(&board, node, &found.image, job.state, job.patience);
    let names = names.map_err(failed)?;
    // Of a journal that lost its end, or was read past a damage, nobody knows whether that is all.
    let whole = !found.rebooted && found.damaged_at.is_none();
    let lives = &found.image.lives;
    let only_one = whole && Lives::are_all(std::iter::once(lives));
    let everybody = only_one || board.has_everybody().map_err(failed)?;
    let image = corrected(&found.image, &names);
    let site = Site {
        places: &places,
        board: &board,
        cache: &cache,
        node,
        rebooted: found.rebooted,
        force: job.force,
        shared: names.is_shared(),
        told: names.told(),
        named: names.named(),
        shaped: names.shaped(),
        everybody: everybody.into(),
        zeros: Mutex::new(names.zeros()),
        numbers: elsewhere::numbers(&image),
        listing: Mutex::default(),
    };
    let image = elsewhere::located(&site, &image);
    let mut left = names.directories(&site).map_err(failed)?;
    let recovery = Recovery {
        job,
        site,
        lives: (whole && lives.has_others()).then(|| lives.clone()),
        notes,
        began: Instant::now(),
        changed: Mutex::new(Instant::now()),
        done: Mutex::default(),
        objects: Mutex::default(),
    };
    let mut ends = recovery.all(&image, &names);
    left.extend(recovery.rest(names, &image, &mut ends).map_err(failed)?);
    recovery.notes.sync().map_err(|e| local("the node journal")(e.into()))?;
    for (ino, end) in &ends {
        if matches!(end, End::Done(_)) {
            cache.remove(*ino).map_err(local("cache file"))?;
        }
    }
    board.leave(&places);
    let outcome = outcome(&image, &ends, left);
    if let (Outcome::Ok { .. }, Some(lives)) = (&outcome, recovery.lives)
        && let Err(e) = end(&board, node, lives, job.backing)
    {
        tracing::debug!(error = %e, "what recoveries have told each other stays");
    }
    Ok(outcome)
}

/// Nothing is in this cache any more; whoever is the last to say so of the job takes the board away.
fn end(board: &Board, node: &str, lives: Lives, backing: &Path) -> std::io::Result<()> {
    board.speak(node, &Spoken { lives, done: true, said: Vec::new() })?;
    if board.is_over()? { board.clear(backing) } else { Ok(()) }
}

/// The files of a cache under the names and with the modes that they have by now.
fn corrected(image: &Image, names: &Names<'_>) -> Image {
    let mut new = image.clone();
    for (ino, note) in image.files().filter(|(_, note)| !note.nameless) {
        new.insert(ino, names.corrected(ino, note));
    }
    new
}

struct Recovery<'a> {
    job: &'a Job<'a>,
    site: Site<'a>,
    /// The lives of nodes for which it answers; `None`: for none.
    lives: Option<Lives>,
    notes: Journal,
    began: Instant,
    /// When something was brought last, by whomever.
    changed: Mutex<Instant>,
    done: Mutex<(u64, u64)>,
    /// Which objects the files are that are under their names.
    objects: Mutex<BTreeMap<Ino, u64>>,
}

/// A file that is not finished.
enum Open<'a> {
    /// It could not be begun, for that reason; when others have done their part it perhaps can.
    Not(&'a Note, Stay),
    Begun(Box<Work>, &'a Note, Result<Progress, Stay>),
    /// There was nothing to do but to say what was cut.
    Said,
}

impl Recovery<'_> {
    fn all(&self, image: &Image, names: &Names<'_>) -> BTreeMap<Ino, End> {
        let is_gone = |(ino, note): &(Ino, &Note)| {
            names.is_gone(*ino) || names.was_removed(*ino) && self.site.is_nowhere(note)
        };
        let (gone, files): (Vec<_>, Vec<(Ino, &Note)>) = image.sayable().partition(is_gone);
        let total: u64 = files.iter().map(|(_, n)| n.len()).sum();
        let queue = Mutex::new(files.iter());
        let ends = Mutex::new(BTreeMap::new());
        let open = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for _ in 0..self.job.threads.clamp(1, files.len().max(1)) {
                scope.spawn(|| {
                    loop {
                        let next = queue.lock().next().copied();
                        let Some((ino, note)) = next else { return };
                        let state = if self.is_late() { None } else { Some(self.begin(ino, note)) };
                        match state {
                            None => drop(ends.lock().insert(ino, End::Late)),
                            Some(state) => open.lock().push((ino, state)),
                        }
                        self.tell(total, files.len() as u64);
                    }
                });
            }
        });
        let mut ends = ends.into_inner();
        for (ino, _) in gone {
            tracing::info!(%ino, "deleted by the job");
            self.notes.push(&Record::Gone(ino));
            ends.insert(ino, End::Done(0));
        }
        self.wait_for_others(open.into_inner(), &mut ends);
        ends
    }

    /// Says that this node has said all, when it has; true when by now all have, for the first time. What
    /// fails here leaves gaps to be gaps.
    fn have_all_spoken(
        &self,
        open: &[(Ino, Open<'_>)],
        ends: &BTreeMap<Ino, End>,
        said: &mut bool,
    ) -> bool {
        if *said && self.site.everybody.load(Ordering::Acquire) {
            return false;
        }
        // Of what it does not bring it has said what it has, unless that cannot be read.
        let is_silent = |state: &Open<'_>| matches!(state, Open::Not(_, Stay::Io(_)));
        let silent = open.iter().any(|(_, state)| is_silent(state));
        let late = ends.values().any(|end| matches!(end, End::Late));
        let looked = match &self.lives {
            Some(lives) if !*said && !silent && !late => {
                let spoken = Spoken { lives: lives.clone(), done: false, said: Vec::new() };
                self.site.board.speak(self.site.node, &spoken).map(|()| *said = true)
            }
            _ => Ok(()),
        };
        match looked.and_then(|()| self.site.board.has_everybody()) {
            Ok(everybody) => everybody && !self.site.everybody.swap(true, Ordering::AcqRel),
            Err(e) => {
                tracing::debug!(error = %e, "who has spoken is not known");
                false
            }
        }
    }

    fn begin<'a>(&self, ino: Ino, note: &'a Note) -> Open<'a> {
        let begun = match note.has_bytes() {
            true => Work::begin(&self.site, ino, note).map(Some),
            false => Work::begin_of_cuts(&self.site, ino, note),
        };
        let mut work = match begun {
            Ok(Some(work)) => work,
            Ok(None) => return Open::Said,
            Err(stay) => return Open::Not(note, stay),
        };
        let noted = self.note_place(ino, note, &work);
        let progress = noted.map_err(Stay::from).and_then(|()| work.step(&self.site));
        let mut done = self.done.lock();
        *done = (done.0 + note.len(), done.1 + 1);
        Open::Begun(Box::new(work), note, progress)
    }

    /// Of a file that this node had alone nothing but its journal tells where it goes, so that a later
    /// run knows it again. (What was flushed before is read from where the journal says.)
    fn note_place(&self, ino: Ino, note: &Note, work: &Work) -> std::io::Result<()> {
        let old = note.header.home.as_ref().map(|h| h.ino);
        let place = work.home();
        if !note.alone || note.flushed().next().is_some() && old != Some(place.ino) {
            return Ok(());
        }
        let mut header = note.header.clone();
        header.home = Some(place);
        self.notes.push(&Record::File(ino, Box::new(header)));
        self.notes.write().map_err(std::io::Error::from)
    }

    /// Looks at what lacks bytes until nothing changes any more.
    fn wait_for_others<'a>(&self, mut open: Vec<(Ino, Open<'a>)>, ends: &mut BTreeMap<Ino, End>) {
        let mut changed = Instant::now();
        let mut said = false;
        loop {
            *self.changed.lock() = changed;
            if self.have_all_spoken(&open, ends, &mut said) {
                open = self.all_again(open, &mut changed);
            }
            let mut rest = Vec::new();
            for (ino, state) in open {
                match state {
                    Open::Begun(work, note, Ok(Progress::Done)) => {
                        work.tidy(&self.site, note);
                        self.objects.lock().insert(ino, work.home().ino);
                        self.notes.push(&Record::Gone(ino));
                        ends.insert(ino, End::Done(note.len()));
                        changed = Instant::now();
                    }
                    Open::Said => {
                        self.notes.push(&Record::Gone(ino));
                        ends.insert(ino, End::Done(0));
                    }
                    other => rest.push((ino, other)),
                }
            }
            let worth_it = rest.iter().any(|(_, state)| may_change(state));
            if !worth_it || self.is_late() || changed.elapsed() >= self.job.patience {
                return rest.into_iter().for_each(|(ino, state)| {
                    ends.insert(ino, stays(&state));
                });
            }
            std::thread::sleep(LOOK_INTERVAL);
            open = self.all_again(rest, &mut changed);
        }
    }

    fn all_again<'a>(
        &self,
        open: Vec<(Ino, Open<'a>)>,
        changed: &mut Instant,
    ) -> Vec<(Ino, Open<'a>)> {
        open.into_iter().map(|(ino, state)| (ino, self.again(ino, state, changed))).collect()
    }

    fn again<'a>(&self, ino: Ino, state: Open<'a>, changed: &mut Instant) -> Open<'a> {
        match state {
            Open::Begun(mut work, note, progress) if !matches!(progress, Err(Stay::Io(_))) => {
                let before = work.seen;
                let progress = work.step(&self.site);
                if work.seen != before {
                    *changed = Instant::now();
                }
                Open::Begun(work, note, progress)
            }
            Open::Not(note, Stay::Conflict(_)) if !note.alone => self.begin(ino, note),
            Open::Not(note, Stay::Over) if matches!(self.site.board.place(ino), Ok(Some(_))) => {
                self.begin(ino, note)
            }
            other => other,
        }
    }

    /// Names, after the files. When all of them are there, nothing of them need be known any more.
    fn rest(
        &self,
        mut names: Names<'_>,
        image: &Image,
        ends: &mut BTreeMap<Ino, End>,
    ) -> std::io::Result<Vec<Left>> {
        if image.book.is_empty() {
            return Ok(Vec::new());
        }
        let (mut before, mut changed) = (None, *self.changed.lock());
        // A look asks the backing about each name that is left.
        let mut pause = LOOK_INTERVAL;
        let left = loop {
            let said = self.site.board.all_said()?;
            names.listen(self.site.board, self.site.node)?;
            self.drop_gone(&names, ends);
            *self.site.zeros.lock() = names.zeros();
            let _ = names.directories(&self.site)?;
            let whole = self.objects.lock().clone();
            let left = names.rest(&self.site, &whole);
            // Who has said something meanwhile may have found what was made by older words.
            if self.site.board.all_said()? != said {
                continue;
            }
            // What is left others may be bringing.
            let now: Vec<_> = left.iter().map(|l| l.path.clone()).collect();
            if before.replace(now.clone()).is_some_and(|before| before != now) {
                (changed, pause) = (Instant::now(), LOOK_INTERVAL);
            }
            if left.is_empty() || self.is_late() || changed.elapsed() >= self.job.patience {
                break left;
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(LOOK_AT_LEAST);
        };
        if left.is_empty() && ends.values().all(|end| matches!(end, End::Done(_))) {
            self.notes.push(&Record::Names(Box::new(names.done())));
            if !names.is_shared() {
                self.site.board.unsay_names(self.site.node);
            }
        }
        Ok(left)
    }

    /// That a file was deleted may be said when this recovery had begun to bring it.
    fn drop_gone(&self, names: &Names<'_>, ends: &mut BTreeMap<Ino, End>) {
        for (ino, end) in ends.iter_mut() {
            if matches!(end, End::Stays { .. }) && names.is_gone(*ino) {
                tracing::info!(%ino, "deleted by the job");
                self.notes.push(&Record::Gone(*ino));
                *end = End::Done(0);
            }
        }
    }

    fn is_late(&self) -> bool {
        self.job.timeout.is_some_and(|limit| self.began.elapsed() > limit)
    }

    fn tell(&self, bytes_total: u64, files_total: u64) {
        let (bytes_done, files_done) = *self.done.lock();
        let stage = "flushing".into();
        (self.job.progress)(Event::Progress {
            bytes_done,
            bytes_total,
            files_done,
            files_total,
            stage,
        });
    }
}

fn may_change(state: &Open<'_>) -> bool {
    match state {
        Open::Not(note, _) | Open::Begun(_, note, _) if !note.is_unpublished() => false,
        Open::Not(note, Stay::Conflict(_)) => !note.alone,
        // Also of a file that this node had heard to be its own: then others have said otherwise.
        Open::Begun(_, _, Ok(Progress::Missing(missing))) => {
            let others =
                !missing.holes.is_empty() || missing.silent || !missing.doubtful.is_empty();
            others || !missing.waiting.is_empty()
        }
        _ => false,
    }
}

fn stays(state: &Open<'_>) -> End {
    match state {
        // All of it is there already; others had to know.
        Open::Not(note, _) | Open::Begun(_, note, _) if !note.is_unpublished() => End::Done(0),
        Open::Not(_, Stay::Over) => End::Done(0),
        Open::Not(note, stay) | Open::Begun(_, note, Err(stay)) => {
            End::Stays { bytes: note.len(), why: stay.text() }
        }
        Open::Begun(_, _, Ok(Progress::Missing(missing))) => {
            End::Stays { bytes: missing.bytes(), why: missing.describe() }
        }
        Open::Begun(_, note, Ok(Progress::Done)) => End::Done(note.len()),
        Open::Said => End::Done(0),
    }
}

fn outcome(image: &Image, ends: &BTreeMap<Ino, End>, left: Vec<Left>) -> Outcome {
    let (mut moved, mut files, mut late) = (0, 0, false);
    let mut remaining = Vec::new();
    for (ino, note) in image.sayable() {
        let path = label(ino, note);
        match ends.get(&ino) {
            Some(End::Done(_)) if !note.has_bytes() => {}
            Some(End::Done(bytes)) => (moved, files) = (moved + bytes, files + 1),
            Some(End::Stays { bytes, why }) => {
                remaining.push(Remaining { path, bytes: *bytes, why: why.clone() });
            }
            Some(End::Late) | None => {
                late = true;
                let why = "not brought to the backing in time".to_owned();
                remaining.push(Remaining { path, bytes: note.len(), why });
            }
        }
    }
    remaining.extend(left.into_iter().map(|l| Remaining { path: l.path, bytes: 0, why: l.why }));
    match (late, remaining.is_empty()) {
        (true, _) => Outcome::TimedOut { remaining },
        (false, true) => Outcome::Ok { bytes: moved, files },
        (false, false) => Outcome::Incomplete { remaining },
    }
}

#[cfg(test)]
#[path = "merge_tests.rs"]
mod tests;

#[cfg(test)]
mod over_tests;
