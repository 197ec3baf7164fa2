//! Everything that the service knows and must not forget, and the one way to change it: entries,
//! which are applied and journalled together. Replay applies the same entries.

mod answers;
mod couplings;
mod entry;
mod holders;

pub use answers::Answers;
pub use couplings::Couplings;
pub use entry::{
    Entry, FileOp, NodeRecord, Orphaned, Outcome, Pair, decode, encode, encode_snapshot,
};

use crate::begun::Begun;
use crate::halves::Halves;
use crate::lineage::Lineage;
use crate::rebuild::Rebuild;
use ebb_consistency::FileState;
use ebb_namespace::locks::LockTable;
use ebb_namespace::{Found, Home, Namespace, Record};
use ebb_types::facts::Moment;
use ebb_types::{Errno, FileKind, Ino, NodeId, Version, lives};
use holders::Holders;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// Numbers of nodes, and of their copies, that are not given out after the end of a journal was lost:
/// more than can have been given out in that time.
const NODES_SKIPPED: u32 = 1 << 12;
const EPOCHS_SKIPPED: u64 = 1 << 20;

/// The state.
#[derive(Clone, Debug)]
pub struct State {
    /// Names and inodes.
    pub ns: Namespace,
    /// The bytes of every regular file.
    pub files: HashMap<Ino, Arc<FileState>>,
    /// Which of them concern which node.
    holders: Holders,
    /// The nodes of the job.
    pub nodes: BTreeMap<NodeId, NodeRecord>,
    /// Their numbers, by name.
    numbers: HashMap<String, NodeId>,
    /// All locks.
    pub locks: LockTable,
    /// What all nodes agreed on.
    pub consistency: Option<String>,
    /// Models that directories ask for.
    pub models: HashMap<Ino, String>,
    /// Files that programs hand on to others.
    pub couplings: Couplings,
    /// Recent answers of operations that must not be done twice.
    pub answered: BTreeMap<NodeId, Answers>,
    /// The change of the backing that is being carried out.
    pub begun: Option<Box<Begun>>,
    next_node: u32,
    lives: u32,
    /// Where copies of a node's unflushed bytes are.
    pub pairs: BTreeMap<NodeId, Pair>,
    /// Copies whose owner is lost, by epoch.
    pub orphaned: BTreeMap<u64, Orphaned>,
    /// The next epoch of copies.
    pub next_epoch: u64,
    /// The files that some node may write without telling.
    pub quiet: BTreeSet<Ino>,
    /// The services that were on this state, and what they can have told.
    pub lineage: Lineage,
    /// Nodes that were given up for their silence and do not know it.
    pub given_up: BTreeSet<NodeId>,
    /// The newest version of any file that was forgotten: what is found again begins after it.
    pub forgotten: Version,
    /// No version below it is given out: a service that lost the end of its journal may have.
    floor: Version,
    /// The nodes that have not told yet what that one may have forgotten.
    pub owing: BTreeSet<NodeId>,
    /// The last moment of it that is here, and from where on the service after it gives out inode numbers;
    /// until names have been told again.
    pub leapt_at: Option<(Moment, Ino)>,
    /// Who is writing which file over.
    pub halves: Halves,
    /// The nodes that this state is rebuilt from.
    pub rebuild: Option<Rebuild>,
    /// The job, when the nodes said which it is.
    pub job: Option<u64>,
    /// What was deleted before the state was rebuilt, as far as nodes have heard of it: more than its
    /// numbers say.
    pub deleted: BTreeSet<Ino>,
}

/// The journal says something that cannot be.
pub type Misfit = String;

impl State {
    /// A state that knows only the root of the backing.
    pub fn new(ns: Namespace) -> State {
        State {
            ns,
            files: HashMap::new(),
            holders: Holders::default(),
            nodes: BTreeMap::new(),
            numbers: HashMap::new(),
            locks: LockTable::new(),
            consistency: None,
            models: HashMap::new(),
            couplings: Couplings::default(),
            answered: BTreeMap::new(),
            begun: None,
            next_node: 1,
            lives: 0,
            pairs: BTreeMap::new(),
            orphaned: BTreeMap::new(),
            next_epoch: 1,
            quiet: BTreeSet::new(),
            lineage: Lineage::default(),
            given_up: BTreeSet::new(),
            forgotten: Version::ZERO,
            floor: Version::ZERO,
            owing: BTreeSet::new(),
            leapt_at: None,
            halves: Halves::default(),
            rebuild: None,
            job: None,
            deleted: BTreeSet::new(),
        }
    }

    /// The number that the next new node gets.
    pub fn next_node(&self) -> NodeId {
        NodeId(self.next_node)
    }

    /// True for what was there and was deleted, for certain.
    pub fn is_deleted(&self, ino: Ino) -> bool {
        let is_there = self.ns.get(ino).is_some() || self.ns.place(ino).is_some();
        let was_deleted = self.ns.is_used_up(ino)
            || self.deleted.contains(&ino)
            || self.lineage.has_made(ino, self.ns.next_ino());
        !is_there && was_deleted
    }

    /// How many daemons have joined so far, those not counted that go on for a dead one. A state that lacks
    /// something of what was before does not know.
    pub fn lives(&self) -> u32 {
        let lacks = self.rebuild.is_some() || self.floor != Version::ZERO;
        if lacks { lives::UNKNOWN } else { self.lives }
    }

    /// The node of that name.
    pub fn node_named(&self, name: &str) -> Option<&NodeRecord> {
        self.nodes.get(self.numbers.get(name)?)
    }

    fn put_node(&mut self, node: &NodeRecord) -> Option<NodeRecord> {
        let old = self.nodes.insert(node.id, node.clone());
        // Under another name it is lost, and the name is free.
        if let Some(old) = old.as_ref().filter(|old| old.name != node.name) {
            self.numbers.remove(&old.name);
        }
        self.numbers.insert(node.name.clone(), node.id);
        old
    }

    /// True when this is of the job whose backing directory looks so.
    pub fn is_of_backing(&self, root: &Found) -> bool {
        let had = self.ns.get(Ino::ROOT).and_then(|r| r.seen).map(|seen| seen.key.ino);
        had == Some(root.seen.key.ino)
    }

    /// The job's model and rules, when they are others than those.
    pub fn other_consistency(&self, wanted: Option<&String>) -> Option<&String> {
        self.consistency.as_ref().filter(|had| wanted.is_some_and(|wanted| wanted != *had))
    }

    /// The bytes of a regular file, or the errno of what is not one.
    pub fn file(&self, ino: Ino) -> Result<&FileState, Errno> {
        let inode = self.ns.inode(ino)?;
        match inode.kind {
            FileKind::Regular => self.files.get(&ino).map(|file| &**file).ok_or(Errno::EIO),
            FileKind::Directory => Err(Errno::EISDIR),
            _ => Err(Errno::EINVAL),
        }
    }

    /// Attributes with the size.
    pub fn attr(&self, ino: Ino) -> Result<ebb_types::Attr, Errno> {
        let mut attr = self.ns.attr(ino)?;
        if let Some(file) = self.files.get(&ino) {
            attr.size = file.size();
        }
        Ok(attr)
    }

    /// True when some node's cache has bytes of it that the backing lacks.
    pub fn is_dirty(&self, ino: Ino) -> bool {
        self.files.get(&ino).is_some_and(|f| !f.is_clean())
    }

    /// True when bytes of it are this node's, flushed or not.
    pub fn has_written(&self, ino: Ino, node: NodeId) -> bool {
        self.files.get(&ino).is_some_and(|f| f.is_owned_by(node))
    }

    /// The files of which this node owns bytes, or that it may write without telling, in order: found
    /// without a look at any others (but for some that it had).
    pub fn files_of(&self, node: NodeId) -> impl Iterator<Item = (Ino, &FileState)> + '_ {
        let its = self.holders.files_of(node);
        let there = its.filter_map(|ino| Some((ino, &**self.files.get(&ino)?)));
        there.filter(move |(_, file)| file.concerns(node))
    }

    /// True when the file replaces an older one on the backing and this node, should it be gone, may have
    /// died in the middle of writing it.
    pub fn may_be_half(&self, ino: Ino, node: NodeId) -> bool {
        self.ns.replaces(ino) != 0
            && self.ns.is_open_by(ino, node)
            && (self.halves.has(ino, node) || self.has_written(ino, node))
    }

    /// The nodes that are writing it over, or were when they died.
    pub fn writes_over(&self, ino: Ino) -> impl Iterator<Item = NodeId> + '_ {
        self.ns.open_by(ino).filter(move |node| self.may_be_half(ino, *node))
    }

    /// Makes an entry true.
    pub fn apply(&mut self, entry: &Entry) -> Result<(), Misfit> {
        match entry {
            Entry::Consistency(text) => self.consistency = Some(text.clone()),
            Entry::Ns(record) => self.apply_ns(record)?,
            Entry::File(ino, op) => self.apply_file(*ino, op)?,
            Entry::Node(node) => {
                self.next_node = self.next_node.max(node.id.0.saturating_add(1));
                let old = self.put_node(node);
                if old.as_ref().is_none_or(|o| o.incarnation != node.incarnation) {
                    self.lives = self.lives.saturating_add(1);
                }
                if old.is_some_and(|o| o.incarnation != node.incarnation) {
                    self.answered.remove(&node.id);
                    self.given_up.remove(&node.id);
                }
            }
            Entry::Heir(node) => drop(self.put_node(node)),
            Entry::NodeLeft(node) => {
                if let Some(left) = self.nodes.remove(node) {
                    self.numbers.remove(&left.name);
                }
                self.owes_nothing(*node);
                self.given_up.remove(node);
                self.answered.remove(node);
                self.pairs.remove(node);
                self.orphaned.retain(|_, o| o.owner != *node && o.partner != *node);
                self.bytes_left_by(*node);
            }
            Entry::NextNode(next) => {
                self.next_node = self.next_node.max(*next);
                // A snapshot begins; older ones do not say how many lives there were.
                self.lives = lives::UNKNOWN;
            }
            Entry::Lives(lives) => self.lives = *lives,
            Entry::Lock(ino, space, lock) => self.locks.force(*ino, *space, *lock),
            Entry::Unlock(ino, space, owner, range) => {
                self.locks.force_unlock(*ino, *space, *owner, *range);
            }
            // The live table has let its waiting requests go before; replay has none.
            Entry::UnlockNode(node) => drop(self.locks.release_node(*node)),
            Entry::Model(ino, Some(model)) => drop(self.models.insert(*ino, model.clone())),
            Entry::Model(ino, None) => drop(self.models.remove(ino)),
            Entry::Couples(ino, terms) => self.couplings.set(*ino, *terms),
            Entry::Coupled(ino, file) => self.couplings.put(*ino, file.as_deref().cloned()),
            Entry::CoupledStep(ino, step) => self.couplings.step(*ino, *step),
            Entry::Answered(node, id, outcome) => {
                self.answered.entry(*node).or_default().insert(*id, *outcome);
            }
            Entry::Begun(begun) => self.begun = Some(begun.clone()),
            Entry::Ended => self.begun = None,
            Entry::Paired(node, Some(pair)) => {
                self.next_epoch = self.next_epoch.max(pair.epoch.saturating_add(1));
                self.pairs.insert(*node, *pair);
            }
            Entry::Paired(node, None) => drop(self.pairs.remove(node)),
            Entry::Orphaned(epoch, Some(orphaned)) => {
                self.orphaned.insert(*epoch, *orphaned);
            }
            Entry::Orphaned(epoch, None) => drop(self.orphaned.remove(epoch)),
            Entry::Forgotten(upto) => self.forgotten = self.forgotten.max(*upto),
            Entry::Reasserted(node) => {
                self.rebuild.iter_mut().for_each(|rebuild| rebuild.hear(*node));
                self.owes_nothing(*node);
            }
            Entry::LeftOut(node) => self.owes_nothing(*node),
            Entry::Named => self.leapt_at = None,
            Entry::Rebuilding(rebuild) => {
                self.next_epoch = self.next_epoch.max(rebuild.epochs);
                self.next_node = self.next_node.max(rebuild.first_new.0);
                self.rebuild = Some((**rebuild).clone());
            }
            Entry::Job(job) => self.job = Some(*job),
            Entry::Deleted(inos) => self.deleted.extend(inos),
            Entry::Owes(node) => drop(self.owing.insert(*node)),
            Entry::WritesOver(ino, node, writes) => self.halves.set(*ino, *node, *writes),
            Entry::Leapt(floor, owing, leapt_at) => {
                (self.floor, self.leapt_at) = (*floor, *leapt_at);
                self.owing = owing.iter().copied().collect();
            }
            Entry::NextEpoch(next) => self.next_epoch = self.next_epoch.max(*next),
            Entry::Started(start) => {
                self.apply_ns(&Record::NextIno(start.first))?;
                self.ns.begins_with(start.first);
                self.lineage.begin(*start);
            }
            Entry::Journalled(records) => self.lineage.restore(*records),
            Entry::GivenUp(node, true) => drop(self.given_up.insert(*node)),
            Entry::GivenUp(node, false) => drop(self.given_up.remove(node)),
        }
        Ok(())
    }

    fn bytes_left_by(&mut self, node: NodeId) {
        for ino in self.holders.files_of(node).collect::<Vec<_>>() {
            let Some(file) = self.files.get_mut(&ino).map(Arc::make_mut) else { continue };
            file.node_gone(node);
            if file.untold_writer().is_none() {
                self.quiet.remove(&ino);
            }
            // What only its cache had stays its own.
            self.holders.set(ino, node, file.concerns(node));
        }
    }

    fn apply_ns(&mut self, record: &Record) -> Result<(), Misfit> {
        self.ns.apply(record).map_err(|e| e.to_string())?;
        match record {
            Record::Inode(new) if new.kind == FileKind::Regular => {
                let known_before = ebb_namespace::is_found(new.ino);
                let last = if known_before { self.forgotten } else { Version::ZERO };
                let mut file = FileState::found(new.size, last);
                let rebuilt = self.is_being_rebuilt() && new.home == Home::Own;
                if (known_before || rebuilt) && self.floor != Version::ZERO {
                    file.leap(self.floor);
                    if !self.lacks_words() {
                        file.end_leap();
                    }
                }
                self.files.insert(new.ino, Arc::new(file));
            }
            Record::Forget { ino } => {
                self.halves.forget(*ino);
                self.couplings.forget(*ino);
                self.holders.forget(*ino);
                if let Some(file) = self.files.remove(ino) {
                    self.forgotten = self.forgotten.max(file.version());
                }
            }
            Record::Base { ino, len } => drop(self.need(*ino)?.base_changed(*len)),
            Record::Close { node, ino } => self.halves.set(*ino, *node, false),
            Record::Home { ino, home: Home::Own } => self.halves.forget(*ino),
            Record::Free { ino } => {
                self.files.remove(ino);
                self.holders.forget(*ino);
                self.halves.forget(*ino);
                self.quiet.remove(ino);
                self.models.remove(ino);
                self.couplings.forget(*ino);
                self.locks.drop_file(*ino);
            }
            _ => {}
        }
        Ok(())
    }

    fn need(&mut self, ino: Ino) -> Result<&mut FileState, Misfit> {
        let file = self.files.get_mut(&ino).map(Arc::make_mut);
        file.ok_or_else(|| format!("{ino} is not a regular file"))
    }

    fn apply_file(&mut self, ino: Ino, op: &FileOp) -> Result<(), Misfit> {
        let file = self.need(ino)?;
        match op {
            FileOp::State(state) => *file = (**state).clone(),
            FileOp::Changes(changes) => file.restore_changes(changes),
            FileOp::Guesses(guesses) => file.restore_guesses(guesses),
            FileOp::Attach(node, ranges) => drop(file.attach(*node, ranges)),
            FileOp::Claim(node, ranges, claimed) => drop(file.claim(*node, ranges, claimed)),
            FileOp::Append(node, len) => {
                file.append(*node, *len).ok_or("an append beyond the largest offset")?;
            }
            FileOp::Detach(node, ranges) => {
                file.detach(*node, ranges).map_err(|e| e.to_string())?;
            }
            FileOp::DetachAnew(node, ranges) => {
                file.detach_anew(*node, ranges).map_err(|e| e.to_string())?;
            }
            FileOp::Adopt(from, to, ranges) => drop(file.adopt(*from, *to, ranges)),
            FileOp::Lost(node) => drop(file.node_gone(*node)),
            FileOp::Truncate(len) => drop(file.truncate(*len)),
            FileOp::Grow(len) => drop(file.grow(*len)),
            FileOp::Flushed(node, owned) => drop(file.mark_flushed(*node, owned)),
            FileOp::Quiet(node, Some(end)) => file.lend_quiet(*node, *end),
            FileOp::Quiet(node, None) => file.end_quiet(*node),
            FileOp::Lapse => drop(file.lapse()),
            FileOp::Lose(node) => file.lose_quiet(*node),
            FileOp::TakeBack(node) => drop(file.take_back(*node)),
            FileOp::QuietState(stored) => file.restore_quiet(stored),
            FileOp::UndoAppend(node, range) => drop(file.undo_append(*node, *range)),
            FileOp::Seat(seat) => file.take_seat(*seat),
            FileOp::NoSeat(node, id) => file.leave_seat(*node, *id),
            FileOp::Reassert(node, assertion) => file.reassert(*node, assertion),
            FileOp::Leap(leap) => file.restore_leap((**leap).clone()),
        }
        let is_quiet = file.untold_writer().is_some();
        let named: Vec<(NodeId, bool)> =
            op.names(file).into_iter().map(|node| (node, file.concerns(node))).collect();
        match is_quiet {
            true => self.quiet.insert(ino),
            false => self.quiet.remove(&ino),
        };
        named.into_iter().for_each(|(node, is)| self.holders.set(ino, node, is));
        Ok(())
    }

    /// The end of the journal may be lost: nothing that it may have given out is given out again, and
    /// the nodes are to tell what they know.
    pub fn leap(&mut self, floor: Version, (after, first): (Moment, Ino)) {
        self.floor = self.floor.max(floor);
        self.leapt_at = Some((after, first));
        self.files.values_mut().for_each(|file| Arc::make_mut(file).leap(floor));
        self.next_node = self.next_node.saturating_add(NODES_SKIPPED);
        self.next_epoch = self.next_epoch.saturating_add(EPOCHS_SKIPPED);
        self.owing.extend(self.nodes.keys());
        self.end_leap();
    }

    /// No version below it is given out.
    pub fn floor(&self) -> Version {
        self.floor
    }

    /// True until what this state is rebuilt from is in it.
    pub fn is_being_rebuilt(&self) -> bool {
        self.rebuild.as_ref().is_some_and(|rebuild| !rebuild.done)
    }

    /// True while nodes have not told what this state lacks.
    pub fn lacks_words(&self) -> bool {
        !self.owing.is_empty() || self.rebuild.as_ref().is_some_and(Rebuild::lacks_nodes)
    }

    /// The node has told everything, or will not.
    fn owes_nothing(&mut self, node: NodeId) {
        if self.owing.remove(&node) {
            self.end_leap();
        }
    }

    fn end_leap(&mut self) {
        if self.lacks_words() {
            return;
        }
        self.leapt_at = None;
        if let Some(rebuild) = self.rebuild.as_mut().filter(|rebuild| !rebuild.done) {
            rebuild.done = true;
            for (ino, file) in &mut self.files {
                let object = self.ns.get(*ino).filter(|i| i.home != Home::None);
                Arc::make_mut(file)
                    .believe_the_backing(object.and_then(|i| i.seen).map(|seen| seen.size));
            }
            // Nodes may know anything of what is found from now on.
            self.forgotten = self.forgotten.max(self.floor);
        }
        self.files.values_mut().for_each(|file| Arc::make_mut(file).end_leap());
    }

    /// True when nothing is lost by forgetting this inode: the backing has it exactly so.
    pub fn is_forgettable(&self, ino: Ino) -> bool {
        let Some(seen) = self.ns.get(ino).and_then(|i| i.seen) else { return false };
        let bytes = |f: &Arc<FileState>| f.is_as_found() && f.size() == seen.size;
        self.ns.is_forgettable(ino)
            && self.files.get(&ino).is_none_or(bytes)
            && !self.models.contains_key(&ino)
            && self.couplings.may_forget(ino)
            && !self.locks.has_file(ino)
    }

    /// The node that may write a file without telling, quietly or because the file sits there.
    pub fn untold_writer(&self, ino: Ino) -> Option<NodeId> {
        if self.quiet.is_empty() {
            return None;
        }
        self.files.get(&ino)?.untold_writer()
    }

    /// The node that may write a file quietly.
    pub fn quiet_node(&self, ino: Ino) -> Option<NodeId> {
        if self.quiet.is_empty() {
            return None;
        }
        self.files.get(&ino)?.quiet().map(|q| q.node)
    }

    /// The whole state as entries: applied to an empty state they give an equal one.
    pub fn snapshot(&self) -> impl Iterator<Item = Entry> + use<> {
        self.copy().entries()
    }

    /// The same without what takes its time: files are shared with the state until it changes them.
    pub fn copy(&self) -> Copied {
        let files = self.files.iter().map(|(ino, file)| (*ino, Arc::clone(file))).collect();
        Copied { before: self.before_files(), files, after: self.after_files() }
    }

    fn before_files(&self) -> Vec<Entry> {
        let mut out = vec![Entry::NextNode(self.next_node)];
        out.extend(self.consistency.iter().cloned().map(Entry::Consistency));
        // A journal of a job without copies is as it was before there were any.
        out.extend((self.next_epoch > 1).then_some(Entry::NextEpoch(self.next_epoch)));
        let forgotten =
            (self.forgotten > Version::ZERO).then_some(Entry::Forgotten(self.forgotten));
        out.extend(forgotten);
        let owing = || self.owing.iter().copied().collect();
        let leapt = self.floor > Version::ZERO;
        let rebuild = self.rebuild.clone().map(Box::new);
        out.extend(rebuild.map(Entry::Rebuilding));
        out.extend(self.job.map(Entry::Job));
        let deleted = || Entry::Deleted(self.deleted.iter().copied().collect());
        out.extend((!self.deleted.is_empty()).then(deleted));
        out.extend(leapt.then(|| Entry::Leapt(self.floor, owing(), self.leapt_at)));
        out.extend(self.nodes.values().cloned().map(Entry::Node));
        out.push(Entry::Lives(self.lives));
        out.extend(self.given_up.iter().map(|node| Entry::GivenUp(*node, true)));
        out.extend(self.pairs.iter().map(|(node, pair)| Entry::Paired(*node, Some(*pair))));
        out.extend(self.orphaned.iter().map(|(epoch, o)| Entry::Orphaned(*epoch, Some(*o))));
        out.extend(self.ns.snapshot().into_iter().map(Entry::Ns));
        out
    }

    fn after_files(&self) -> Vec<Entry> {
        let mut out = Vec::new();
        out.extend(self.locks.held().map(|(ino, space, lock)| Entry::Lock(ino, space, lock)));
        let models: BTreeMap<_, _> = self.models.iter().collect();
        out.extend(models.into_iter().map(|(i, m)| Entry::Model(*i, Some(m.clone()))));
        out.extend(self.couplings.all());
        for (node, answered) in &self.answered {
            out.extend(answered.in_order().map(|(id, o)| Entry::Answered(*node, id, o)));
        }
        out.extend(self.halves.all().map(|(ino, node)| Entry::WritesOver(ino, node, true)));
        out.extend(self.begun.iter().cloned().map(Entry::Begun));
        out.extend(self.lineage.starts().map(|start| Entry::Started(*start)));
        out.push(Entry::Journalled(self.lineage.journalled()));
        out
    }
}

/// The state of one moment.
pub struct Copied {
    before: Vec<Entry>,
    /// In any order.
    files: Vec<(Ino, Arc<FileState>)>,
    after: Vec<Entry>,
}

impl Copied {
    /// As entries, made one after the other.
    pub fn entries(mut self) -> impl Iterator<Item = Entry> {
        self.files.sort_unstable_by_key(|(ino, _)| *ino);
        let files = self.files.into_iter().flat_map(|(ino, file)| {
            let entry = move |op| Entry::File(ino, op);
            entries_of_file(file).into_iter().map(entry)
        });
        self.before.into_iter().chain(files).chain(self.after)
    }
}

fn entries_of_file(file: Arc<FileState>) -> Vec<FileOp> {
    let mut out = vec![FileOp::State(Arc::clone(&file))];
    out.extend(file.stored_changes().map(|changes| FileOp::Changes(Box::new(changes))));
    out.extend(file.stored_guesses().map(|guesses| FileOp::Guesses(Box::new(guesses))));
    out.extend(file.stored_quiet().map(|quiet| FileOp::QuietState(Box::new(quiet))));
    out.extend(file.seat().map(FileOp::Seat));
    out.extend(file.stored_leap().map(|leap| FileOp::Leap(Box::new(leap))));
    out
}

/// The state that the record bodies of a journal lead to.
pub fn replay(bodies: &[Vec<u8>]) -> Result<State, Misfit> {
    let mut state = State::new(Namespace::empty());
    for (at, body) in bodies.iter().enumerate() {
        let replayed = decode(body).and_then(|e| e.iter().try_for_each(|e| state.apply(e)));
        replayed.map_err(|what| format!("record {at}: {what}"))?;
        state.lineage.note_record();
    }
    Ok(state)
}
