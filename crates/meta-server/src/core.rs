//! The heart of the service: state, journal, backing, and the locks around them.
//!
//! Lock order: a claim of bytes ([`Core::claim`]) before the namespace turn ([`Core::turn`])
//! before the state before the leases; the others (`grants`, `checked`, `waiting`, `errors`,
//! `sessions`) are leaves
//! and may be taken under the state. Only the claim and the turn are held across I/O.

use crate::alive::SignsOfLife;
use crate::backing::Backing;
use crate::config::{Config, StartError};
use crate::copies::Copies;
use crate::coupling::Awaiting;
use crate::facts::Settling;
use crate::following::Standbys;
use crate::forgetting::Forgetting;
use crate::grants::{ClaimId, Grants, Right};
use crate::journal::{Journal, JournalError, Lsn, Read, StateDir};
use crate::leases::Desk;
use crate::lineage::{CLOCK_WAIT, Start, early_by, first_ino, until_the_next};
use crate::ops::OpError;
use crate::ops::copies::Appends;
use crate::publishing::{Locked, Publishing};
use crate::reassert::Waiting;
use crate::rebuild::Rebuild;
use crate::rounds::Rounds;
use crate::seats::Seats;
use crate::sessions::Sessions;
use crate::state::{self, Entry, State};
use crate::stats::Stats;
use crate::striping::Stripes;
use ebb_consistency::StreamId;
use ebb_coordinator::Tenure;
use ebb_locks::{Mutex, MutexGuard};
use ebb_namespace::locks::{Granted, Ticket};
use ebb_namespace::{Home, Inode, Namespace, Record};
use ebb_types::{ByteRange, Errno, FileKind, Ino, NodeId};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::{Notify, oneshot};

/// A file or directory is compared with the backing at most this often.
pub const FRESH: Duration = Duration::from_secs(1);

/// What of an inode was compared with the backing. A directory whose attributes are looked at all
/// the time must not make the absence of names in it look fresh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Checked {
    /// What `stat` tells.
    Attributes,
    /// Which names a directory has.
    Names,
}

/// Entries of `checked` above this are thrown away together.
const CHECKED_MAX: usize = 1 << 20;

/// How long a flush or truncate waits for others that write the same bytes.
pub const CLAIM_WAIT: Duration = Duration::from_secs(30);

/// Proof that the namespace turn is held.
pub type Turn<'a> = tokio::sync::MutexGuard<'a, ()>;

/// How a waiting lock request ends.
pub type LockResult = Result<(), Errno>;

/// What the lock of this stands for: a node is given up, or welcomed.
#[derive(Debug, Default)]
pub struct ComingAndGoing;

/// Everything that operations work on.
pub struct Core {
    state: Mutex<State>,
    turn: tokio::sync::Mutex<()>,
    /// Where changes become lasting.
    pub journal: Journal,
    /// The backing directory.
    pub backing: Arc<Backing>,
    grants: Mutex<Grants>,
    grants_changed: Notify,
    /// With which lease the right to write quietly went to whom. A leaf as well.
    pub quiet_grants: Mutex<HashMap<Ino, (StreamId, u64)>>,
    /// What nodes at which files sit were asked.
    pub seats: Seats,
    /// What nodes were asked because others lock what they may have written.
    pub publishing: Publishing,
    /// A node that is there has so long to publish for a lock.
    pub publishes_within: Duration,
    /// The last appends of nodes whose partners have copies.
    pub appends: Mutex<Appends>,
    /// When an inode was last compared with the backing.
    checked: Mutex<HashMap<(Ino, Checked), Instant>>,
    waiting: Mutex<HashMap<Ticket, oneshot::Sender<LockResult>>>,
    tickets: AtomicU64,
    /// Which request of which node waits with which ticket.
    pub waits: Mutex<HashMap<(NodeId, u64), Ticket>>,
    /// Who waits for coupled files.
    pub awaiting: Awaiting,
    /// The nodes that are there now.
    pub sessions: Sessions,
    /// That one of them gave the sign of life that it was asked for.
    pub signs: SignsOfLife,
    /// What they need not ask again.
    pub desk: Desk,
    /// Changes that are carried out together.
    pub rounds: Rounds,
    /// What may be on the backing without a note of it, because the service before this one died.
    /// A leaf as well.
    in_doubt: Mutex<HashSet<Ino>>,
    /// Why the backing did not take extended attributes the last time. A leaf as well.
    pub refused: Mutex<HashMap<Ino, Errno>>,
    /// Who has copies of unowned bytes. A leaf as well.
    pub copies: Mutex<Copies>,
    /// How new files are spread, when there is a choice.
    pub stripes: Option<Stripes>,
    /// Which directories were used when, to forget what is in the others. A leaf as well.
    pub forgetting: Forgetting,
    /// What nodes need not remember of names.
    pub(crate) settling: Mutex<Settling>,
    /// What is counted.
    pub stats: Stats,
    /// Lease of a node.
    pub lease: Duration,
    /// Until when this service may answer.
    pub tenure: Tenure,
    /// Who would take its place.
    pub standbys: Standbys,
    /// Told apart from the service that was here before.
    pub instance: u64,
    /// Held while a node is given up, and while one is welcomed: neither sees half of the other.
    pub coming_and_going: Mutex<ComingAndGoing>,
    /// Whether requests wait for what nodes tell again.
    pub words: Waiting,
    /// The job: as old as the journal, not as this process; 0 as long as a state that is rebuilt does not
    /// know it.
    job: AtomicU64,
    /// So many records of this job are older than the journal's first one.
    records_before: u64,
}

impl Core {
    /// Opens backing and journal and brings the state back.
    pub fn open(config: &Config) -> Result<Core, StartError> {
        let backing = Backing::open(&config.backing)
            .map_err(|source| StartError::Backing { path: config.backing.clone(), source })?
            .within(config.tenure.clone());
        let dir = StateDir::take(&config.state_dir)?;
        let (job, mut state, rebooted) = restore(&dir, config, &backing)?;
        let wanted = config.consistency.clone();
        if let Some(had) = state.other_consistency(wanted.as_ref()) {
            let (had, wanted) = (had.clone(), wanted.unwrap_or_default());
            return Err(StartError::Consistency { had, wanted });
        }
        state.consistency = state.consistency.take().or(wanted);
        name_parts(&mut state)?;
        let instance = random();
        let last = crate::facts::moment(&state.lineage);
        begin(&mut state, instance)?;
        if rebooted || (config.rebuild.is_some() && state.is_being_rebuilt()) {
            crate::reassert::leap(&mut state, last);
        }
        let records_before = state.lineage.journalled();
        let before: Vec<NodeId> = state.nodes.keys().copied().collect();
        // Files have part files first, which are looked for at once.
        let doubtful = |ino: &Ino| state.ns.get(*ino).is_some_and(|i| i.kind != FileKind::Regular);
        let in_doubt = Mutex::new(state.ns.pending_after(None).filter(doubtful).collect());
        let journal = Journal::start(dir, job, &state::encode_snapshot(state.snapshot()))?;
        let forgetting = Forgetting::new(config.inodes_max, &state.ns);
        let settling = Mutex::new(Settling::new(&state));
        let core = Core {
            words: Waiting::begin(&state, config.lease),
            sessions: Sessions::new(&state),
            desk: Desk::new(config.trust.min(config.lease / 2), &before),
            state: Mutex::new(state),
            turn: tokio::sync::Mutex::new(()),
            journal,
            stripes: Stripes::on(&backing, config.jobs_hint),
            backing: Arc::new(backing),
            rounds: Rounds::default(),
            in_doubt,
            refused: Mutex::default(),
            copies: Mutex::default(),
            grants: Mutex::default(),
            grants_changed: Notify::new(),
            quiet_grants: Mutex::default(),
            seats: Seats::default(),
            publishing: Publishing::default(),
            signs: SignsOfLife::default(),
            publishes_within: config.publishes_within,
            appends: Mutex::default(),
            checked: Mutex::default(),
            waiting: Mutex::default(),
            tickets: AtomicU64::new(1),
            waits: Mutex::default(),
            awaiting: Awaiting::default(),
            forgetting,
            settling,
            stats: Stats::default(),
            lease: config.lease,
            tenure: config.tenure.clone(),
            standbys: Standbys::default(),
            instance,
            coming_and_going: Mutex::default(),
            job: job.into(),
            records_before,
        };
        core.finish_begun();
        core.find_published();
        Ok(core)
    }

    /// The state, for a short look or a change; never held across anything that waits.
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// The job; 0: the nodes have not said yet.
    #[must_use]
    pub fn job(&self) -> u64 {
        self.job.load(Ordering::Relaxed)
    }

    /// A node has said which job this is the service of.
    pub fn is_of_job(&self, state: &mut State, job: u64) {
        self.job.store(job, Ordering::Relaxed);
        self.commit(state, &[Entry::Job(job)]);
    }

    /// Applies entries that belong together and queues them for the journal.
    pub fn commit(&self, state: &mut State, entries: &[Entry]) {
        if entries.is_empty() {
            return;
        }
        self.call_back(state, entries);
        let consumed = crate::coupling::holders_of_consumed(state, entries);
        for entry in entries {
            if let Err(what) = state.apply(entry) {
                // A rule of this program is wrong. What is in memory is not to be trusted, so
                // nothing is answered from it any more; the journal has what was true.
                debug_assert!(false, "an entry made from the state fits it: {what}");
                tracing::error!(
                    what,
                    ?entry,
                    "the state is inconsistent; the service stops answering"
                );
                self.journal.fail();
                return;
            }
            if let Entry::Ns(Record::Free { ino } | Record::Forget { ino }) = entry {
                self.copies.lock().forget(*ino);
                self.refused.lock().remove(ino);
                self.quiet_grants.lock().remove(ino);
                let mut checked = self.checked.lock();
                checked.remove(&(*ino, Checked::Attributes));
                checked.remove(&(*ino, Checked::Names));
            }
        }
        self.journal.append(&state::encode(entries));
        state.lineage.note_record();
        crate::coupling::look_who_awaits(self, state, entries);
        consumed.into_iter().for_each(|(node, ino)| crate::coupling::tell_deleted(self, node, ino));
    }

    /// So many records of this job are on stable storage.
    #[must_use]
    pub fn durable(&self) -> u64 {
        self.records_before + self.journal.synced_so_far()
    }

    /// The same for records of the namespace. They may have been planned a while ago; opens,
    /// releases and attaches do not wait for the turn, so what they changed since is respected.
    pub fn commit_ns(&self, state: &mut State, records: Vec<Record>) {
        self.commit_ns_with(state, records, Vec::new());
    }

    /// The same, with further entries in the same journal record: all of it survives, or nothing.
    pub fn commit_ns_with(&self, state: &mut State, records: Vec<Record>, with: Vec<Entry>) {
        let homeless: Vec<Ino> = records
            .iter()
            .filter_map(|r| match r {
                Record::Home { ino, home: Home::None } => Some(*ino),
                _ => None,
            })
            .collect();
        let mut entries: Vec<Entry> =
            as_of_now(state, records).into_iter().map(Entry::Ns).collect();
        self.drop_locks(state, &entries);
        entries.extend(with);
        self.commit(state, &entries);
        let closed = |ino: &Ino| {
            state.ns.get(*ino).is_some_and(|i| i.links.is_empty()) && !state.ns.is_open(*ino)
        };
        let freed = homeless.iter().filter(|i| closed(i));
        let freed: Vec<Entry> = freed.map(|ino| Entry::Ns(Record::Free { ino: *ino })).collect();
        self.drop_locks(state, &freed);
        self.commit(state, &freed);
    }

    /// Nobody can be granted a lock of a file that is gone.
    fn drop_locks(&self, state: &mut State, entries: &[Entry]) {
        for entry in entries {
            if let Entry::Ns(Record::Free { ino }) = entry {
                let gone = state.locks.drop_file(*ino);
                self.end_waiting(&gone, Err(Errno::ESTALE));
            }
        }
    }

    /// Waits for the turn to change names.
    pub async fn turn(&self) -> Turn<'_> {
        self.turn.lock().await
    }

    /// The turn, when nobody has it.
    pub fn try_turn(&self) -> Option<Turn<'_>> {
        self.turn.try_lock().ok()
    }

    /// Waits until everything that was true when asked is in the journal.
    pub async fn settled(&self) -> Result<Lsn, Errno> {
        let lsn = self.journal.tail();
        if !self.journal.is_written(lsn) {
            self.journal.written(lsn).await?;
        }
        Ok(lsn)
    }

    /// The same for an answer: why there cannot be one.
    pub async fn noted(&self) -> Result<(), OpError> {
        let why = |errno| match errno {
            Errno::ENOSPC => "the metadata service has no room for its journal",
            _ => "the journal of the metadata service cannot be written",
        };
        self.settled().await.map(drop).map_err(|errno| OpError::new(errno, why(errno)))
    }

    /// Replaces the journal by a snapshot when that pays (or when told to). Blocks; others wait only while
    /// the state is copied, and not for its encoding and writing.
    pub fn compact(&self, always: bool) {
        if !always && !self.journal.wants_compaction() {
            return;
        }
        let copied = {
            let state = self.state.lock();
            if !self.journal.begin_compaction() {
                return;
            }
            state.copy()
        };
        self.journal.finish_compaction(&state::encode_snapshot(copied.entries()));
    }

    // ---- freshness ---------------------------------------------------------------------------

    /// True for what was on its way to the backing when this service began, and has not got there
    /// as far as is noted: the one before it may have died in between.
    pub fn is_in_doubt(&self, inode: &Inode) -> bool {
        inode.home == Home::None && self.in_doubt.lock().contains(&inode.ino)
    }

    /// The backing was asked for it.
    pub fn note_certain(&self, ino: Ino) {
        self.in_doubt.lock().remove(&ino);
    }

    /// True when this was compared with the backing a moment ago.
    pub fn is_fresh(&self, ino: Ino, what: Checked) -> bool {
        self.checked.lock().get(&(ino, what)).is_some_and(|t| t.elapsed() < FRESH)
    }

    /// Notes that this was compared with the backing now.
    pub fn note_checked(&self, ino: Ino, what: Checked) {
        let mut checked = self.checked.lock();
        if checked.len() >= CHECKED_MAX {
            checked.clear();
        }
        checked.insert((ino, what), Instant::now());
    }

    /// As if a while had passed.
    #[cfg(test)]
    pub fn forget_checked(&self) {
        self.checked.lock().clear();
    }

    // ---- claims of bytes ---------------------------------------------------------------------

    /// Claims bytes of a file for writing them to the backing, waiting for others at most
    /// [`CLAIM_WAIT`].
    pub async fn claim(
        &self,
        ino: Ino,
        node: NodeId,
        ranges: &[ByteRange],
    ) -> Result<ClaimId, Errno> {
        let work = async {
            loop {
                let changed = self.grants_changed.notified();
                if let Some(id) = self.try_claim(ino, node, ranges) {
                    return id;
                }
                changed.await;
            }
        };
        tokio::time::timeout(CLAIM_WAIT, work).await.map_err(|_| Errno::ETIMEDOUT)
    }

    /// The same without waiting.
    pub fn try_claim(&self, ino: Ino, node: NodeId, ranges: &[ByteRange]) -> Option<ClaimId> {
        self.grants.lock().claim(ino, node, ranges)
    }

    /// What a claim was narrowed to.
    pub fn narrow_claim(&self, ino: Ino, id: ClaimId, granted: Right) {
        self.grants.lock().narrow(ino, id, granted);
        self.grants_changed.notify_waiters();
    }

    /// Ends a claim.
    pub fn end_claim(&self, ino: Ino, id: ClaimId, node: NodeId) -> Option<Right> {
        let granted = self.grants.lock().end(ino, id, node);
        self.grants_changed.notify_waiters();
        granted
    }

    /// Ends all claims of a node.
    pub fn end_claims_of(&self, node: NodeId) {
        if self.grants.lock().end_node(node) {
            self.grants_changed.notify_waiters();
        }
    }

    /// True when somebody may be writing to the file.
    pub fn is_busy(&self, ino: Ino) -> bool {
        self.grants.lock().is_busy(ino)
    }

    /// True when somebody may be cutting or extending the file.
    pub fn is_being_cut(&self, ino: Ino) -> bool {
        self.grants.lock().is_held_by(ino, NodeId::NOBODY)
    }

    // ---- waiting for locks -------------------------------------------------------------------

    /// A ticket for a lock request that may have to wait. Call it before asking the table.
    pub fn new_ticket(&self) -> (Ticket, oneshot::Receiver<LockResult>) {
        let ticket = Ticket(self.tickets.fetch_add(1, Ordering::Relaxed));
        let (tell, told) = oneshot::channel();
        self.waiting.lock().insert(ticket, tell);
        (ticket, told)
    }

    /// True for a request that was not answered yet.
    pub(crate) fn still_waits(&self, ticket: Ticket) -> bool {
        self.waiting.lock().contains_key(&ticket)
    }

    /// These requests wait no longer.
    pub fn end_waiting(&self, tickets: &[Ticket], result: LockResult) {
        let mut waiting = self.waiting.lock();
        for ticket in tickets {
            if let Some(tell) = waiting.remove(ticket) {
                // Nobody listens when the request itself was given up.
                let _ = tell.send(result);
            }
        }
    }

    /// Journals locks that others got and tells them.
    pub fn granted(&self, state: &mut State, granted: &[Granted]) {
        let entries: Vec<Entry> =
            granted.iter().map(|g| Entry::Lock(g.ino, g.space, g.lock)).collect();
        self.commit(state, &entries);
        for Granted { ticket, ino, space, lock } in granted.iter().copied() {
            let locked = Locked { ino, space, owner: lock.owner, range: lock.range };
            self.publishing.granted(&locked, Some(ticket));
        }
        let tickets: Vec<Ticket> = granted.iter().map(|g| g.ticket).collect();
        self.end_waiting(&tickets, Ok(()));
    }
}

/// Records that were planned before the last opens, releases and attaches, corrected by them.
fn as_of_now(state: &State, records: Vec<Record>) -> Vec<Record> {
    let mut made = BTreeSet::new();
    let mut closed = BTreeSet::new();
    let mut freed = BTreeSet::new();
    let mut out = Vec::with_capacity(records.len());
    for record in records {
        match record {
            Record::Inode(ref new) => {
                made.insert(new.ino);
                freed.remove(&new.ino);
            }
            Record::Close { ino, .. } => {
                closed.insert(ino);
            }
            // Somebody opened it since: it lives on without a name.
            Record::Free { ino } if state.ns.is_open(ino) && !closed.contains(&ino) => {
                out.push(Record::Home { ino, home: Home::None });
                out.push(Record::Seen { ino, seen: None });
                continue;
            }
            Record::Free { ino } => {
                freed.insert(ino);
            }
            // Somebody wrote to it since: it is not settled.
            Record::Due { ino, due: false } if state.is_dirty(ino) => {
                out.push(Record::Due { ino, due: true });
                continue;
            }
            // It was closed, nameless, since, or this very change frees it (and looked at it as at what was hidden
            // under a name).
            Record::Attr { ino, .. }
            | Record::Xattr { ino, .. }
            | Record::XattrsMoved { ino }
            | Record::Home { ino, .. }
            | Record::Seen { ino, .. }
            | Record::Due { ino, .. }
            | Record::Base { ino, .. }
                if freed.contains(&ino)
                    || (state.ns.get(ino).is_none() && !made.contains(&ino)) =>
            {
                continue;
            }
            _ => {}
        }
        out.push(record);
    }
    out
}

/// Starts of a service are told apart by when they were; the clock that told when the last one was, perhaps
/// that of another machine, may be so much ahead.
const AHEAD: Duration = Duration::from_secs(3600);

/// Random bits for a job or an instance.
pub fn random() -> u64 {
    getrandom::u64().unwrap_or_else(|_| u64::from(std::process::id()) << 32 | 1)
}

/// From now on nobody can foretell the names of part files.
fn name_parts(state: &mut State) -> Result<(), StartError> {
    if state.ns.has_part_names() {
        return Ok(());
    }
    let mut secret = [0; 16];
    let failed = |e: getrandom::Error| StartError::Serve(format!("no random numbers: {e}"));
    getrandom::fill(&mut secret).map_err(failed)?;
    let names = Record::PartNames { secret, from: state.ns.next_ino() };
    state.apply(&Entry::Ns(names)).map_err(StartError::Serve)
}

/// A service begins on this state: from now on it is known by its instance.
fn begin(state: &mut State, instance: u64) -> Result<(), StartError> {
    let used = state.ns.next_ino();
    // Nothing but the clock tells a state that is rebuilt from the one that is lost.
    let is_rebuilt = state.is_being_rebuilt();
    let ahead = if is_rebuilt { AHEAD } else { Duration::ZERO };
    if !is_rebuilt {
        wait_for_the_clock(early_by(used, SystemTime::now(), AHEAD));
    }
    let now = SystemTime::now();
    let first = first_ino(used, now + ahead, random());
    let start = Start { instance, at: state.lineage.journalled(), used, first };
    state.apply(&Entry::Started(start)).map_err(StartError::Serve)?;
    if is_rebuilt {
        // Another one may follow it at once, and must not give out what this one did.
        wait_for_the_clock(until_the_next(now));
    }
    Ok(())
}

fn wait_for_the_clock(wait: Duration) {
    if wait > CLOCK_WAIT {
        tracing::warn!(
            ?wait,
            "the clock of this machine is behind that of the service before, or the service was started very often: should \
             its state be lost now, do not rebuild it before that time has passed"
        );
    }
    std::thread::sleep(wait.min(CLOCK_WAIT));
}

/// The job, its state, and whether the machine was booted since that was written.
fn restore(
    dir: &StateDir,
    config: &Config,
    backing: &Backing,
) -> Result<(u64, State, bool), StartError> {
    let root = backing
        .stat(&ebb_namespace::BackingPath::ROOT)
        .map_err(|e| StartError::Backing { path: config.backing.clone(), source: e.into() })?;
    if let Some(nodes) = config.rebuild {
        if let Some(aside) = dir.set_aside()? {
            tracing::warn!(journal = %aside.display(), "the journal that was here is kept there");
        }
        let mut state = State::new(Namespace::new(&root, Ino(Ino::ROOT.0 + 1)));
        let rebuilding = Entry::Rebuilding(Box::new(Rebuild::from_nodes(nodes)));
        state.apply(&rebuilding).map_err(StartError::Serve)?;
        return Ok((0, state, false));
    }
    let Some(Read { job, bodies, rebooted }) = dir.read()? else {
        let job = random();
        // The root has the first one; where others begin the start says.
        return Ok((job, State::new(Namespace::new(&root, Ino(Ino::ROOT.0 + 1))), false));
    };
    let path = config.state_dir.join("journal");
    let state = state::replay(&bodies)
        .map_err(|what| StartError::Journal(JournalError::Header { path, what }))?;
    if !state.is_of_backing(&root) {
        let (state_dir, backing) = (config.state_dir.clone(), config.backing.clone());
        return Err(StartError::OtherBacking { state_dir, backing });
    }
    Ok((state.job.unwrap_or(job), state, rebooted))
}
