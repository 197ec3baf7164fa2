//! Which file is next, who is on it, and what a drain still waits for. Pure bookkeeping: no
//! threads, no clock, no I/O; the engine holds it behind its lock.
//!
//! A *pass* takes one file from its first dirty byte to its last, grant by grant, with a few
//! grants at a time. There is never more than one pass of a file. Passes belong to a *lane*:
//! background runs and drains have threads of their own, so that neither waits for the other's
//! hanging calls. A background pass of a file that a drain wants ends after its current grants.

use crate::activity::Epoch;
use crate::options::Options;
use crate::policy::Halt;
use crate::source::FlushError;
use ebb_types::Ino;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, VecDeque};
use std::time::{Duration, Instant};

/// Whose threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lane {
    Background,
    Drain,
}

/// A worker's next step: ask the source for a grant of this file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ask {
    pub(crate) ino: Ino,
    pub(crate) from: u64,
    /// One of several small files that are brought to the backing together.
    pub(crate) small: bool,
    /// Any operation after this epoch interrupts the work.
    pub(crate) interrupt: Option<Epoch>,
}

/// A file that is to be gone through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Listed {
    pub(crate) ino: Ino,
    /// What was dirty of it when it was listed.
    pub(crate) bytes: u64,
}

/// A file with no more dirty bytes than this is brought to the backing together with others: what
/// it costs beside its bytes is paid once for all of them.
pub(crate) const SMALL: u64 = 256 << 10;
/// So many of them at most, that have so many bytes at most.
const TOGETHER: usize = 16;
const TOGETHER_BYTES: u64 = 2 << 20;

/// A pass that came to its end.
#[derive(Clone, Debug)]
pub(crate) struct Ended {
    pub(crate) ino: Ino,
    /// None: nothing failed.
    pub(crate) error: Option<FlushError>,
    /// The whole file was gone through.
    pub(crate) complete: bool,
}

/// A failed grant may be bad luck of one place in the file; after so many the pass ends.
const FAILED_GRANTS_PER_PASS: u32 = 3;

/// Lost grants of one file after which a drain believes that the service will keep none.
const LOST_GRANTS: u32 = 50;

struct Pass {
    number: u64,
    lane: Lane,
    from: u64,
    /// A worker is asking for the next grant. One at a time: the next `from` depends on it.
    asking: bool,
    /// Grants being written.
    writing: usize,
    /// No more grants are asked for.
    over: bool,
    /// The source said that nothing dirty is left behind the last grant.
    exhausted: bool,
    /// A grant was given back unwritten, without an error.
    interrupted: bool,
    failed_grants: u32,
    error: Option<FlushError>,
}

impl Pass {
    /// The file was gone through to its end (though some grants may have failed).
    fn is_complete(&self) -> bool {
        self.exhausted && !self.interrupted
    }
}

/// A background run: a list of files and what ends it early.
pub(crate) struct Run {
    ready: VecDeque<Listed>,
    halt: Halt,
    epoch: Epoch,
    stopping: bool,
    /// Activity came back before the list was done.
    pub(crate) interrupted: bool,
}

/// Names one drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct DrainId(u64);

/// One drain and how far it is.
pub(crate) struct Drain {
    since: u64,
    everything: bool,
    pub(crate) pending: HashMap<Ino, Pending>,
    ready: VecDeque<Ino>,
    later: BinaryHeap<Reverse<(Instant, Ino)>>,
    pub(crate) given_up: Vec<(Ino, FlushError)>,
    pub(crate) files_done: u64,
    pub(crate) bytes: u64,
    pub(crate) verified_bytes: u64,
}

/// A file that a drain still waits for.
pub(crate) struct Pending {
    bytes: u64,
    attempts: u32,
    /// Grants that ended with the service's life or with a lease: no failure of anybody.
    lost_grants: u32,
    pub(crate) last_error: Option<FlushError>,
    /// It is in `ready` or `later`.
    queued: bool,
}

pub(crate) struct Queue {
    passes: HashMap<Ino, Pass>,
    run: Option<Run>,
    drains: BTreeMap<DrainId, Drain>,
    /// Counts passes and drains, so that it can be told which began first.
    clock: u64,
    options: Options,
}

impl Queue {
    pub(crate) fn new(options: &Options) -> Queue {
        Queue {
            passes: HashMap::new(),
            run: None,
            drains: BTreeMap::new(),
            clock: 0,
            options: options.clone(),
        }
    }

    // ---- background runs ----

    /// Starts a run; there must be none.
    pub(crate) fn start_run(&mut self, files: Vec<Listed>, halt: Halt, epoch: Epoch) {
        debug_assert!(self.run.is_none(), "one run at a time");
        self.run =
            Some(Run { ready: files.into(), halt, epoch, stopping: false, interrupted: false });
    }

    pub(crate) fn run_halt(&self) -> Option<Halt> {
        self.run.as_ref().map(|run| run.halt)
    }

    /// No new grants for the run; what is being written goes on.
    pub(crate) fn stop_run(&mut self) {
        if let Some(run) = &mut self.run {
            run.stopping = true;
        }
    }

    /// Stops the run when `now` shows activity that it must give way to; true when that is new.
    pub(crate) fn give_way(&mut self, now: Epoch) -> bool {
        match &mut self.run {
            Some(run) if !run.stopping && run.halt == Halt::OnActivity && run.epoch != now => {
                (run.stopping, run.interrupted) = (true, true);
                true
            }
            _ => false,
        }
    }

    /// Takes the run away when nothing of it is left.
    pub(crate) fn finish_run(&mut self) -> Option<Run> {
        let run = self.run.as_ref()?;
        let listed = !run.stopping && !run.ready.is_empty();
        let busy = self.passes.values().any(|p| p.lane == Lane::Background);
        if listed || busy { None } else { self.run.take() }
    }

    // ---- drains ----

    /// Registers a drain of these files.
    pub(crate) fn begin_drain(&mut self, files: &[Listed], everything: bool) -> DrainId {
        self.clock += 1;
        let drain = Drain {
            since: self.clock,
            everything,
            pending: files.iter().map(|f| (f.ino, Pending::new(f.bytes))).collect(),
            ready: files.iter().map(|f| f.ino).collect(),
            later: BinaryHeap::new(),
            given_up: Vec::new(),
            files_done: 0,
            bytes: 0,
            verified_bytes: 0,
        };
        let id = DrainId(self.clock);
        self.drains.insert(id, drain);
        id
    }

    pub(crate) fn drain(&self, id: DrainId) -> Option<&Drain> {
        self.drains.get(&id)
    }

    /// Takes the drain away; passes that nobody else wants end after their current grants.
    pub(crate) fn end_drain(&mut self, id: DrainId) -> Option<Drain> {
        self.drains.remove(&id)
    }

    /// A drain of everything is going on.
    pub(crate) fn draining_everything(&self) -> bool {
        self.drains.values().any(|d| d.everything)
    }

    /// Files that drains wait for.
    pub(crate) fn drain_backlog(&self) -> usize {
        self.drains.values().map(|d| d.pending.len()).sum()
    }

    /// When the next failed file of a drain is due.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.drains.values().filter_map(|d| d.later.peek()).map(|due| due.0.0).min()
    }

    fn wanted(&self, ino: Ino) -> bool {
        self.drains.values().any(|d| d.pending.contains_key(&ino))
    }

    // ---- workers ----

    /// The next steps for a worker of `lane`: one, or several small files, with no more than
    /// `most_bytes` in all. It must answer each with [`Queue::granted`], [`Queue::nothing`] or
    /// [`Queue::refused`].
    pub(crate) fn take(&mut self, lane: Lane, most_bytes: u64, now: Instant) -> Vec<Ask> {
        if lane == Lane::Background && self.run.as_ref().is_none_or(|run| run.stopping) {
            return Vec::new();
        }
        // A file that was begun and that nobody is on comes first: files become whole one after
        // the other. Then further files; then further streams of the same files.
        if let Some(ino) = self.joinable(lane, 1) {
            return self.ask(ino, false).into_iter().collect();
        }
        let together = self.start_passes(lane, most_bytes, now);
        if !together.is_empty() {
            let several = together.len() > 1;
            return together.into_iter().filter_map(|ino| self.ask(ino, several)).collect();
        }
        let further = self.joinable(lane, self.streams(lane));
        further.and_then(|ino| self.ask(ino, false)).into_iter().collect()
    }

    fn ask(&mut self, ino: Ino, small: bool) -> Option<Ask> {
        let pass = self.passes.get_mut(&ino)?;
        pass.asking = true;
        let interrupt = match (&self.run, pass.lane) {
            (Some(run), Lane::Background) if run.halt == Halt::OnActivity => Some(run.epoch),
            _ => None,
        };
        Some(Ask { ino, from: pass.from, small, interrupt })
    }

    /// Begins the next file, and with a small one those that follow it. What was begun and does
    /// not fit is the next one's that asks.
    fn start_passes(&mut self, lane: Lane, most_bytes: u64, now: Instant) -> Vec<Ino> {
        // Every thread shall have something to do.
        let most_files = (self.backlog(lane) / self.options.threads.max(1)).clamp(1, TOGETHER);
        let most_bytes = most_bytes.min(TOGETHER_BYTES);
        let mut begun = Vec::new();
        let mut bytes = 0u64;
        while begun.len() < most_files
            && let Some(file) = self.start_pass(lane, now)
        {
            bytes = bytes.saturating_add(file.bytes);
            if !begun.is_empty() && (file.bytes > SMALL || bytes > most_bytes) {
                break;
            }
            begun.push(file.ino);
            if file.bytes > SMALL {
                break;
            }
        }
        begun
    }

    /// Files that nobody has begun, about.
    fn backlog(&self, lane: Lane) -> usize {
        match lane {
            Lane::Background => self.run.as_ref().map_or(0, |run| run.ready.len()),
            Lane::Drain => self.drains.values().map(|d| d.ready.len()).sum(),
        }
    }

    fn streams(&self, lane: Lane) -> usize {
        match lane {
            Lane::Background => self.options.streams_per_file,
            Lane::Drain => self.options.drain_streams_per_file,
        }
    }

    /// The oldest pass of `lane` with fewer than `streams` grants that wants another one.
    fn joinable(&self, lane: Lane, streams: usize) -> Option<Ino> {
        let open = self.passes.iter().filter(|(ino, p)| {
            p.lane == lane && !p.asking && p.writing < streams && !self.must_end(**ino, p)
        });
        open.min_by_key(|(_, p)| p.number).map(|(ino, _)| *ino)
    }

    fn must_end(&self, ino: Ino, pass: &Pass) -> bool {
        let stopped = || match pass.lane {
            Lane::Background => {
                self.run.as_ref().is_none_or(|run| run.stopping) || self.wanted(ino)
            }
            Lane::Drain => !self.wanted(ino),
        };
        pass.over || stopped()
    }

    fn start_pass(&mut self, lane: Lane, now: Instant) -> Option<Listed> {
        let file = match lane {
            Lane::Background => self.next_of_run()?,
            Lane::Drain => self.next_of_drains(now)?,
        };
        self.clock += 1;
        let pass = Pass {
            number: self.clock,
            lane,
            from: 0,
            asking: false,
            writing: 0,
            over: false,
            exhausted: false,
            interrupted: false,
            failed_grants: 0,
            error: None,
        };
        self.passes.insert(file.ino, pass);
        Some(file)
    }

    fn next_of_run(&mut self) -> Option<Listed> {
        loop {
            let file = self.run.as_mut()?.ready.pop_front()?;
            if !self.passes.contains_key(&file.ino) && !self.wanted(file.ino) {
                return Some(file);
            }
        }
    }

    fn next_of_drains(&mut self, now: Instant) -> Option<Listed> {
        let passes = &self.passes;
        self.drains.values_mut().find_map(|d| d.next(now, passes))
    }

    /// The worker got a grant and writes it; the file goes on at `next`, if at all.
    pub(crate) fn granted(&mut self, ino: Ino, next: Option<u64>) {
        if let Some(pass) = self.passes.get_mut(&ino) {
            pass.asking = false;
            pass.writing += 1;
            match next {
                Some(from) => pass.from = from,
                None => (pass.over, pass.exhausted) = (true, true),
            }
        }
    }

    /// There was nothing to grant.
    pub(crate) fn nothing(&mut self, ino: Ino, now: Instant) -> Option<Ended> {
        if let Some(pass) = self.passes.get_mut(&ino) {
            pass.asking = false;
            (pass.over, pass.exhausted) = (true, true);
        }
        self.settle(ino, now)
    }

    /// The grant was refused.
    pub(crate) fn refused(&mut self, ino: Ino, error: FlushError, now: Instant) -> Option<Ended> {
        if let Some(pass) = self.passes.get_mut(&ino) {
            pass.asking = false;
            pass.over = true;
            pass.error = Some(error);
        }
        self.settle(ino, now)
    }

    /// A grant was written.
    pub(crate) fn written(
        &mut self,
        ino: Ino,
        bytes: u64,
        verified: u64,
        now: Instant,
    ) -> Option<Ended> {
        if let Some(pass) = self.passes.get_mut(&ino) {
            pass.writing = pass.writing.saturating_sub(1);
        }
        for drain in self.drains.values_mut().filter(|d| d.pending.contains_key(&ino)) {
            drain.bytes = drain.bytes.saturating_add(bytes);
            drain.verified_bytes = drain.verified_bytes.saturating_add(verified);
        }
        self.settle(ino, now)
    }

    /// A grant failed and was given back.
    pub(crate) fn failed(&mut self, ino: Ino, error: FlushError, now: Instant) -> Option<Ended> {
        if let Some(pass) = self.passes.get_mut(&ino) {
            pass.writing = pass.writing.saturating_sub(1);
            pass.failed_grants += 1;
            pass.over |= error.ends_the_pass() || pass.failed_grants >= FAILED_GRANTS_PER_PASS;
            pass.error = Some(error);
        }
        self.settle(ino, now)
    }

    /// A grant was interrupted and given back.
    pub(crate) fn interrupted(&mut self, ino: Ino, now: Instant) -> Option<Ended> {
        if let Some(pass) = self.passes.get_mut(&ino) {
            pass.writing = pass.writing.saturating_sub(1);
            (pass.over, pass.interrupted) = (true, true);
        }
        self.settle(ino, now)
    }

    /// Ends the passes that nobody is on and that must not go on (after a run was stopped, a
    /// drain began or ended).
    pub(crate) fn settle_all(&mut self, now: Instant) -> Vec<Ended> {
        let inos: Vec<Ino> = self.passes.keys().copied().collect();
        inos.into_iter().filter_map(|ino| self.settle(ino, now)).collect()
    }

    fn settle(&mut self, ino: Ino, now: Instant) -> Option<Ended> {
        let pass = self.passes.get(&ino)?;
        if pass.asking || pass.writing > 0 || !self.must_end(ino, pass) {
            return None;
        }
        let pass = self.passes.remove(&ino)?;
        for drain in self.drains.values_mut() {
            drain.pass_ended(ino, &pass, now, &self.options);
        }
        let complete = pass.is_complete();
        Some(Ended { ino, error: pass.error, complete })
    }

    /// Somebody is at this file.
    pub(crate) fn is_at(&self, ino: Ino) -> bool {
        self.passes.contains_key(&ino)
    }

    /// Grants being written or asked for.
    pub(crate) fn in_flight(&self) -> usize {
        self.passes.values().map(|p| p.writing + usize::from(p.asking)).sum()
    }
}

impl Pending {
    fn new(bytes: u64) -> Pending {
        Pending { bytes, attempts: 0, lost_grants: 0, last_error: None, queued: true }
    }

    /// How long it waits for the next attempt; `None`: there is none.
    fn failed(&mut self, error: &FlushError, options: &Options) -> Option<Duration> {
        self.last_error = Some(error.clone());
        let (count, most) = match error {
            FlushError::LostGrant { .. } => (&mut self.lost_grants, LOST_GRANTS),
            _ => (&mut self.attempts, options.drain_attempts),
        };
        *count += 1;
        (*count < most).then(|| options.short_backoff(*count))
    }
}

impl Drain {
    fn next(&mut self, now: Instant, passes: &HashMap<Ino, Pass>) -> Option<Listed> {
        while let Some(Reverse((due, ino))) = self.later.peek().copied() {
            if due > now {
                break;
            }
            self.later.pop();
            self.ready.push_back(ino);
        }
        while let Some(ino) = self.ready.pop_front() {
            let Some(file) = self.pending.get_mut(&ino) else { continue };
            file.queued = false;
            // Under a pass: it comes back here when that ends.
            if !passes.contains_key(&ino) {
                return Some(Listed { ino, bytes: file.bytes });
            }
        }
        None
    }

    fn pass_ended(&mut self, ino: Ino, pass: &Pass, now: Instant, options: &Options) {
        let Some(file) = self.pending.get_mut(&ino) else { return };
        // Only a pass that began after us has seen every byte that was dirty at our beginning.
        let ours = pass.number > self.since;
        match &pass.error {
            None if ours && pass.is_complete() => {
                self.pending.remove(&ino);
                self.files_done += 1;
            }
            Some(error) if ours => match file.failed(error, options) {
                None => {
                    self.pending.remove(&ino);
                    self.given_up.push((ino, error.clone()));
                }
                Some(pause) => {
                    file.queued = true;
                    self.later.push(Reverse((now + pause, ino)));
                }
            },
            _ if !file.queued => {
                file.queued = true;
                self.ready.push_front(ino);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
#[path = "queue_tests.rs"]
mod tests;
