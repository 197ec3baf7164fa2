//! After a power loss: what the end of the journal said is lost, and the nodes know it.
//!
//! A journal that another boot wrote may lack its end: what was not on stable storage, at most the last
//! second. The service that reads it gives out no number that may have been given out then ([`leap`]),
//! and asks every node of the job to tell what it knows of files from that time ([`Op::Reassert`]; what
//! becomes of it is in [`ebb_consistency::Assertion`]), what it has heard of names ([`Book`]), and what is
//! locked on it. Names come first, so that files are known when their bytes are told.
//!
//! Consistency: until every node has told, requests wait, but for those that telling needs
//! ([`Core::awaits_words`]); so nobody is answered from a state that is about to be mended. Who has not
//! told within a lease is waited for no longer: what it tells of bytes when it comes is taken all the
//! same, where nobody has changed anything since; of names it is too late.
//! Retries: to tell again what was told changes nothing. A service that dies meanwhile goes on asking
//! those who have not told ([`State::owing`]).
//! Completion: a lease after the service began (ten seconds, of a longer one), at the latest.
//!
//! A service without its journal begins with nothing and is rebuilt from the nodes in the same way
//! (`rebuild.rs`); then so many must have told as the user has said, however long that takes.

use crate::core::{Core, Turn};
use crate::lineage::Start;
use crate::quiet::tells_first;
use crate::rebuild::{Located, Rebuild};
use crate::state::{Entry, FileOp, State};
use ebb_consistency::FileState;
use ebb_locks::Mutex;
use ebb_namespace::locks::{Kind, Lock, Outcome, Owner, Space};
use ebb_namespace::{Book, Forgotten, Home, Inode, OnBacking, Record, Whereabouts};
use ebb_types::facts::{Facts, Moment};
use ebb_types::{ByteRange, Errno, FileKind, Ino, NodeId, Version};
use ebb_wire::pb;
use ebb_wire::pb::request::Op;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::sync::{Notify, OnceCell};
use tokio::time::Instant;

/// Below these bits of a version stands how many there were since a leap; above, which start leapt.
const VERSION_BITS: u32 = 34;

/// Requests of nodes have deadlines of some ten seconds: however long the lease is, they wait no longer.
const WAIT_MAX: Duration = Duration::from_secs(10);

/// A rebuilt service waits for its nodes: somebody has said for how many.
const NEVER: Duration = Duration::from_secs(365 * 24 * 3600);

/// Meanwhile it is looked so often whether one of them is gone.
const LOOK: Duration = Duration::from_secs(1);

/// Whether requests wait for what nodes tell.
#[derive(Debug)]
pub struct Waiting {
    on: AtomicBool,
    until: Instant,
    changed: Notify,
    /// Of which moment the last is that this state has of the services before, and from where on this one
    /// gives out inode numbers.
    lost_after: Option<(Moment, Ino)>,
    /// What was heard of names, and whose nodes have told all of it.
    named: Mutex<(Book, BTreeSet<NodeId>)>,
    /// That is so again.
    settled: OnceCell<()>,
    /// What nodes say is locked: they are compared with each other when all have told.
    told: Mutex<Vec<(NodeId, Vec<Holding>)>>,
    /// What of it is not theirs any more.
    lost: Mutex<Vec<(NodeId, Holding)>>,
    /// Up to where everything is on the backing, as nodes have heard.
    settled_before: AtomicU64,
    /// Where nodes say that files are on the backing.
    pub(crate) located: Mutex<BTreeMap<Ino, Located>>,
}

/// What an owner on a node has locked.
#[derive(Clone, Debug)]
pub struct Holding {
    /// Of which file.
    pub ino: Ino,
    /// By which call.
    pub space: Space,
    /// The owner's number there.
    pub owner: u64,
    /// These, and no others.
    pub certain: bool,
    /// The ranges.
    pub locks: Vec<(ByteRange, Kind, u32)>,
}

/// Somebody has heard of a service that began later, as far as the clock says.
fn is_behind() -> Errno {
    tracing::error!(
        "a node has heard of a service that began later than this one: the clock of this machine is \
         behind; set it, and start the service with --rebuild again"
    );
    Errno::ESTALE
}

impl Waiting {
    /// After which moment something that was said of names may be lost.
    pub fn names_after(&self) -> Moment {
        self.lost_after.map_or(Moment::MAX, |(after, _)| after)
    }

    /// True until what nodes tell is in the state.
    pub fn lacks_any(&self) -> bool {
        self.on.load(Relaxed)
    }

    /// For a service that begins on this state.
    pub fn begin(state: &State, lease: Duration) -> Waiting {
        let lost_after = state.leapt_at;
        let on = state.lacks_words();
        let until = match state.is_being_rebuilt() {
            true => NEVER,
            false => lease.min(WAIT_MAX),
        };
        if let Some(rebuild) = state.rebuild.as_ref().filter(|rebuild| !rebuild.done) {
            tracing::warn!(
                ?rebuild,
                "the state is rebuilt from what nodes know: nothing is answered until all have told"
            );
        } else if on {
            tracing::warn!(
                nodes = state.owing.len(),
                "the machine was booted since the journal was written, or it is a standby's copy, and its end may be \
                 missing: the nodes are asked what they know"
            );
        }
        Waiting {
            on: on.into(),
            until: Instant::now() + until,
            changed: Notify::new(),
            lost_after,
            named: Mutex::default(),
            settled: OnceCell::new(),
            told: Mutex::default(),
            lost: Mutex::default(),
            settled_before: AtomicU64::new(0),
            located: Mutex::default(),
        }
    }
}

/// The end of this state, on which a service has just begun, may be lost: what it may have given out is not
/// given out again. `last`: the moment where it ends.
pub fn leap(state: &mut State, last: Moment) {
    let Some(start) = state.lineage.starts().next_back().copied() else { return };
    state.leap(Version(start.block() << VERSION_BITS), (last, start.first));
}

/// The first moment of the service that gives out inode numbers from here on.
fn first_moment(first: Ino) -> Moment {
    Start { instance: 0, at: 0, used: first, first }.block() << crate::facts::RECORD_BITS
}

impl Core {
    /// True when this must wait until the nodes have told what they know.
    pub fn awaits_words(&self, op: &Op) -> bool {
        let needed = |op: &Op| {
            matches!(
                op,
                Op::Reassert(_)
                    | Op::Heartbeat(_)
                    | Op::Returned(_)
                    | Op::NodeInfo(_)
                    | Op::Cancel(_)
                    | Op::Hello(_)
                    | Op::Prove(_)
            ) || tells_first(op)
        };
        self.words.on.load(Relaxed) && !needed(op)
    }

    /// True when this, for which nothing else waits, must wait until it is known again which files there are.
    pub fn awaits_names(&self, op: &Op) -> bool {
        let names_may_lack = self.words.lost_after.is_some() && !self.words.settled.initialized();
        self.words.on.load(Relaxed) && tells_first(op) && names_may_lack
    }

    /// Somebody has told everything, or has left: who waits looks again.
    pub fn look_who_owes_words(&self) {
        self.words.changed.notify_waiters();
    }

    /// Until every node has told, or a lease is over.
    pub async fn words_are_heard(&self) {
        if !self.words.on.load(Relaxed) {
            return;
        }
        self.wait_while(|state| {
            state.rebuild.as_ref().is_some_and(Rebuild::lacks_nodes)
                || state.owing.iter().any(|node| self.is_waited_for(state, *node))
        })
        .await;
        self.names_are_heard().await;
        if self.state().is_being_rebuilt() {
            self.leave_out_who_is_gone();
        }
        if self.words.on.swap(false, Relaxed) {
            match self.state().owing.len() {
                0 => tracing::info!("every node has told what it knows"),
                nodes => {
                    tracing::warn!(nodes, "nodes have not told what they know; it goes on without");
                }
            }
            self.settle_locks();
        }
    }

    /// Until every node has told what it has heard of names, and that is so again.
    pub async fn names_are_heard(&self) {
        self.wait_while(|state| {
            let named = &self.words.named.lock().1;
            let lacks = |rebuild: &Rebuild| rebuild.lacks_beside(named);
            let waits = |node: &NodeId| !named.contains(node) && self.is_waited_for(state, *node);
            state.rebuild.as_ref().is_some_and(lacks) || state.owing.iter().any(waits)
        })
        .await;
        self.words.settled.get_or_init(|| self.bring_names_back()).await;
    }

    async fn wait_while(&self, waits: impl Fn(&State) -> bool) {
        while Instant::now() < self.words.until {
            let changed = self.words.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if !waits(&self.state()) {
                return;
            }
            // In either case it is looked again.
            let until = self.words.until.min(Instant::now() + LOOK);
            let _ = tokio::time::timeout_at(until, changed).await;
        }
    }

    /// What they know would be older than what the others do from now on.
    fn leave_out_who_is_gone(&self) {
        let mut state = self.state();
        let gone: Vec<Entry> = state.owing.iter().map(|node| Entry::LeftOut(*node)).collect();
        self.commit(&mut state, &gone);
    }

    /// Without a deadline nobody waits for a node that is gone.
    fn is_waited_for(&self, state: &State, node: NodeId) -> bool {
        state.rebuild.is_none() || !self.sessions.is_gone(node)
    }

    /// A state that is rebuilt must give out newer versions than all that nodes know. ESTALE: it would not.
    pub fn hear_versions(&self, known: impl Iterator<Item = (Ino, Version)>) -> Result<(), Errno> {
        let state = self.state();
        if !state.is_being_rebuilt() {
            return Ok(());
        }
        let own = |ino: Ino, version| state.files.get(&ino).is_some_and(|f| version <= f.version());
        match known.into_iter().any(|(ino, v)| v >= state.floor() && !own(ino, v)) {
            true => Err(is_behind()),
            false => Ok(()),
        }
    }

    /// What a node has heard of names. It comes too late when others have gone on. ESTALE: this service
    /// cannot tell it from what it says itself.
    pub fn hear_names(&self, at: Moment, facts: &Facts) -> Result<(), Errno> {
        let Some((after, first)) = self.words.lost_after else { return Ok(()) };
        if self.words.settled.initialized() {
            return Ok(());
        }
        let is_of_then = at < first_moment(first);
        if !is_of_then && self.state().is_being_rebuilt() {
            // It would be forgotten without a word.
            return Err(is_behind());
        }
        if is_of_then && at > after {
            self.words.settled_before.fetch_max(facts.settled, Relaxed);
            let facts = Facts { settled: 0, ..facts.clone() };
            self.words.named.lock().0.hear(&facts);
        }
        Ok(())
    }

    /// A node has told all of it.
    pub fn has_named(&self, node: NodeId) {
        self.words.named.lock().1.insert(node);
        self.words.changed.notify_waiters();
    }

    /// Names and modes of what the backing does not have are as they were heard of last.
    async fn bring_names_back(&self) {
        let mut told = std::mem::take(&mut self.words.named.lock().0);
        let Some((after, first)) = self.words.lost_after else { return };
        let mut parts = BTreeMap::new();
        if self.state().is_being_rebuilt() {
            // Some have forgotten what others say, because it was not so any more.
            let settled = self.words.settled_before.load(Relaxed);
            told.hear(&Facts { settled, ..Facts::default() });
            parts = self.find_what_there_is(&told).await;
            let mut state = self.state();
            let known = |ino: &Ino| state.ns.get(*ino).is_some() || ebb_namespace::is_found(*ino);
            let deleted: Vec<Ino> = told.nameless().filter(|ino| !known(ino)).collect();
            if !deleted.is_empty() {
                self.commit(&mut state, &[Entry::Deleted(deleted)]);
            }
        }
        // What a name replaces must be known before it does.
        let forgotten = self.state().ns.forgotten_in(&told, after, first);
        for file in &forgotten {
            let known = self.state().ns.get(file.parent).is_some();
            if known && let Err(e) = self.look_again(file.parent, &file.name).await {
                tracing::warn!(parent = %file.parent, name = %file.name, error = %e, "not looked at");
            }
        }
        let _turn = self.turn().await;
        let mut there = self.what_is_there(&forgotten).await;
        there.parts.extend(parts);
        let mut state = self.state();
        let anew = state.ns.plan_begun_anew(&told, after, &there);
        let begun_anew: Vec<Ino> = anew.keys().copied().collect();
        let mut records: Vec<Record> = anew.into_values().flatten().collect();
        // What has begun anew may have got more names since.
        let mut trial = state.ns.clone();
        let mut misfit = records.iter().find_map(|record| trial.apply(record).err());
        let rest = trial.plan_reassert(&told, after, first, &there);
        misfit = misfit.or_else(|| rest.iter().find_map(|record| trial.apply(record).err()));
        records.extend(rest);
        if records.is_empty() {
            return self.commit(&mut state, &[Entry::Named]);
        }
        if let Some(e) = misfit {
            debug_assert!(false, "what is planned fits: {e}");
            tracing::error!(error = %e, "names that were told again do not fit, and stay forgotten");
            return self.commit(&mut state, &[Entry::Named]);
        }
        drop(trial);
        tracing::info!(records = records.len(), "names that were forgotten are there again");
        let floor = state.floor();
        let leap = |ino| {
            let mut file = FileState::new(0);
            file.leap(floor);
            file.stored_leap().map(|leap| Entry::File(ino, FileOp::Leap(Box::new(leap))))
        };
        let empty = |ino: &Ino| Entry::File(*ino, FileOp::State(Arc::new(FileState::new(0))));
        let emptied = begun_anew.iter().flat_map(|ino| [Some(empty(ino)), leap(*ino)]).flatten();
        let emptied: Vec<Entry> = emptied.collect();
        let files = records.iter().filter_map(|record| match record {
            Record::Inode(new) if new.kind == FileKind::Regular => leap(new.ino),
            _ => None,
        });
        let zeros = records.iter().filter_map(|record| match record {
            Record::Inode(new) => {
                let shape = told.shape(new.ino).filter(|s| s.is_zeros() && s.size > 0);
                shape.map(|s| Entry::File(new.ino, FileOp::Grow(s.size)))
            }
            _ => None,
        });
        let with: Vec<Entry> =
            emptied.into_iter().chain(files).chain(zeros).chain([Entry::Named]).collect();
        self.commit_ns_with(&mut state, records, with);
    }

    /// Finds where the bytes of a file are on the backing, of which nothing was there as far as this state
    /// says: in its part file, or under its name already. False: nowhere.
    pub async fn finds_home(&self, _turn: &Turn<'_>, ino: Ino) -> bool {
        let (part, name) = match self.state().ns.whereabouts(ino) {
            Whereabouts::Noted => return true,
            Whereabouts::Nowhere => return false,
            Whereabouts::Perhaps { part, name } => (part, name),
        };
        let part = self.backing.run(move |b| b.stat(&part)).await.ok().map(|found| found.seen);
        let found = self.backing.run(move |b| b.stat(&name)).await.ok();
        let mut state = self.state();
        let records = state.ns.plan_home(ino, part, found.as_ref());
        let somewhere = !records.is_empty();
        self.commit_ns(&mut state, records);
        somewhere
    }

    async fn what_is_there(&self, forgotten: &[Forgotten]) -> OnBacking {
        let mut there = OnBacking::default();
        for file in forgotten {
            let (path, part, known) = {
                let state = self.state();
                let on_backing = |i: &Inode| i.home == Home::Own;
                let Some(dir) = state.ns.get(file.parent).filter(|i| on_backing(i)) else {
                    continue;
                };
                let Some(dir) = state.ns.path(dir.ino) else { continue };
                let dentry = state.ns.dentry(file.parent, &file.name).ok().flatten();
                let known = dentry.and_then(|d| {
                    let inode = state.ns.get(d.ino)?;
                    Some((inode.kind, inode.seen?))
                });
                (dir.join(&file.name), dir.join(&state.ns.part_name(file.ino)), known)
            };
            let object = match known {
                Some(known) => Some(known),
                None => {
                    let found = self.backing.run(move |b| b.stat(&path)).await.ok();
                    found.map(|found| (found.kind, found.seen))
                }
            };
            let part = self.backing.run(move |b| b.stat(&part)).await.ok().map(|found| found.seen);
            there.note(file, object, part);
        }
        there
    }

    /// What is locked on a node that has told everything; `None`: it does not say.
    pub fn hear_locks(&self, node: NodeId, locks: Option<Vec<Holding>>) {
        self.words.told.lock().extend(locks.map(|locks| (node, locks)));
    }

    /// What was given back in the time that is lost is free, and what was locked is locked. First the
    /// former of all nodes: one may have locked what another had given back.
    fn settle_locks(&self) {
        let told = std::mem::take(&mut *self.words.told.lock());
        let mut state = self.state();
        let mut anew: Vec<(NodeId, Holding)> = Vec::new();
        for (node, holdings) in told {
            let mut held: BTreeMap<(Ino, Space, u64), Vec<(ByteRange, Kind)>> = BTreeMap::new();
            for (ino, space, lock) in state.locks.held().filter(|(.., l)| l.owner.node == node) {
                held.entry((ino, space, lock.owner.id)).or_default().push((lock.range, lock.kind));
            }
            for holding in holdings {
                let had = held.remove(&(holding.ino, holding.space, holding.owner));
                let mut has: Vec<_> =
                    holding.locks.iter().map(|(r, kind, _)| (*r, *kind)).collect();
                has.sort_unstable_by_key(|(range, _)| *range);
                let mut had = had.unwrap_or_default();
                had.sort_unstable_by_key(|(range, _)| *range);
                if holding.certain && had != has {
                    self.free(&mut state, holding.ino, holding.space, (node, holding.owner));
                    anew.push((node, holding));
                }
            }
            for (ino, space, owner) in held.into_keys() {
                self.free(&mut state, ino, space, (node, owner));
            }
        }
        for (node, holding) in anew {
            let lock = |(range, kind, pid): &(ByteRange, Kind, u32)| Lock {
                owner: Owner { node, id: holding.owner },
                pid: *pid,
                range: *range,
                kind: *kind,
            };
            let mut lost = state.ns.inode(holding.ino).is_err() && !holding.locks.is_empty();
            for lock in holding.locks.iter().map(lock).take_while(|_| !lost).collect::<Vec<_>>() {
                match state.locks.set(holding.ino, holding.space, lock, None) {
                    Outcome::Granted(others) => {
                        let entry = Entry::Lock(holding.ino, holding.space, lock);
                        self.commit(&mut state, &[entry]);
                        self.granted(&mut state, &others);
                    }
                    _ => lost = true,
                }
            }
            if lost {
                tracing::warn!(ino = %holding.ino, %node, "a lock that was forgotten is another's");
                self.free(&mut state, holding.ino, holding.space, (node, holding.owner));
                self.words.lost.lock().push((node, holding));
            }
        }
    }

    fn free(&self, state: &mut State, ino: Ino, space: Space, (node, id): (NodeId, u64)) {
        let owner = Owner { node, id };
        let (gone, granted) = state.locks.release_owner(ino, space, owner);
        self.commit(state, &[Entry::Unlock(ino, space, owner, ByteRange::ALL)]);
        self.end_waiting(&gone, Err(Errno::EINTR));
        self.granted(state, &granted);
    }

    /// The owners on a node whose locks are others' now.
    pub fn lost_locks_of(&self, node: NodeId) -> Vec<pb::LockOwner> {
        if !self.words.told.lock().is_empty() {
            // It came late.
            self.settle_locks();
        }
        let mut lost = self.words.lost.lock();
        let its = lost.extract_if(.., |(of, _)| *of == node);
        its.map(|(_, holding)| pb::LockOwner {
            ino: holding.ino.0,
            owner: holding.owner,
            flock: holding.space == Space::Flock,
            ..pb::LockOwner::default()
        })
        .collect()
    }
}
