//! What goes along with an answer for the node's journal: how the names and inodes that the request
//! named are now. Everything is told as of one moment, under one lock, so that facts of the same
//! moment never contradict each other.

use crate::core::Core;
use crate::lineage::Lineage;
use crate::ops::OpResult;
use crate::state::State;
use ebb_namespace::{Absence, Horizon, Inode};
use ebb_types::facts::{Facts, Moment};
use ebb_types::{Errno, Ino, Name, NodeId};
use ebb_wire::pb;
use ebb_wire::pb::request::Op;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// How often it is looked what has reached the backing: a look may cost a look at each inode.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The number of the first node.
const FIRST_NODE: NodeId = NodeId(1);
/// The number of the second node: when more are given, or it is, there are others.
pub(crate) const SECOND_NODE: NodeId = NodeId(2);

/// What has reached the backing, looked at now and then.
#[derive(Debug)]
pub struct Settling {
    horizon: Horizon,
    looked: Option<Instant>,
}

impl Settling {
    /// Of a service that begins on this state.
    pub fn new(state: &State) -> Settling {
        let mut horizon = Horizon::default();
        // Nodes that were there before may have.
        if state.next_node() > FIRST_NODE || state.is_being_rebuilt() {
            horizon.note_any_moved(moment(&state.lineage));
        }
        Settling { horizon, looked: None }
    }

    /// Looks what has reached the backing, now or when it is time.
    fn look(&mut self, state: &State, now: Moment, at_once: bool) {
        if at_once || self.looked.is_none_or(|t| t.elapsed() >= LOOK_EVERY) {
            self.horizon.look(&state.ns, now);
            self.looked = Some(Instant::now());
        }
    }
}

/// What an answer tells facts of.
#[derive(Clone, Debug, Default)]
pub struct Subject {
    names: Vec<(Ino, Name)>,
    inos: BTreeSet<Ino>,
    xattr: Option<(Ino, Box<[u8]>)>,
    /// Nothing was changed: that it is not there is told, too, where that is known.
    asked: bool,
    /// Where this is.
    place: Option<Ino>,
    /// Something has just got to the backing.
    look: bool,
    /// What has another place now.
    moved: bool,
    /// Whoever may have written this without a word has just said all: when it is of zeros alone, nobody
    /// has said that yet.
    silent: Option<Ino>,
}

impl Subject {
    /// What is not there is told only where that is known for certain: what an answer says with an errno
    /// may be of something that nobody has looked at.
    fn keep_proven(&mut self, state: &State, errno: Errno) {
        let absent = |(parent, name): &(Ino, Name)| {
            errno == Errno::ENOENT && state.ns.look(*parent, name) == Ok(Absence::Absent)
        };
        self.names.retain(absent);
        self.inos.retain(|ino| errno == Errno::ESTALE && state.is_deleted(*ino));
        self.xattr = self.xattr.take().filter(|_| errno == Errno::ENODATA);
    }
}

impl Core {
    /// What will have to be told of a request; asked before it is done, because it may take names away.
    #[must_use]
    pub fn subject(&self, op: &Op) -> Option<Subject> {
        let mut subject = Subject::default();
        if let Some(about) = ebb_wire::changed_by(op) {
            subject.names = about.names;
            subject.inos.extend(about.inos);
            subject.xattr = about.xattrs.into_iter().next();
            subject.moved = matches!(op, Op::Rename(_));
            if matches!(op, Op::Unlink(_) | Op::Rename(_)) {
                let state = self.state();
                for (parent, name) in &subject.names {
                    let dentry = state.ns.dentry(*parent, name).ok().flatten();
                    subject.inos.extend(dentry.map(|d| d.ino));
                }
            }
            return Some(subject);
        }
        match op {
            Op::Lookup(l) if l.tell => {
                let name = Name::new(&l.name).ok();
                subject.names.extend(name.map(|name| (Ino(l.parent), name)));
            }
            Op::GetAttr(g) if g.tell => drop(subject.inos.insert(Ino(g.ino))),
            Op::GetXattr(x) if x.tell => {
                subject.xattr = Some((Ino(x.ino), x.name.as_slice().into()));
            }
            Op::Describe(d) => subject.place = Some(Ino(d.ino)),
            Op::Materialize(_) | Op::SyncMeta(_) => subject.look = true,
            Op::Heartbeat(_) => {}
            Op::Release(r) => subject.silent = Some(Ino(r.ino)),
            Op::Attach(a) if a.settles => subject.silent = Some(Ino(a.ino)),
            Op::Published(p) if !p.seated => subject.silent = Some(Ino(p.ino)),
            _ => return None,
        }
        subject.asked = matches!(op, Op::Lookup(_) | Op::GetAttr(_) | Op::GetXattr(_));
        Some(subject)
    }

    /// The facts to an answer.
    #[must_use]
    pub fn facts(&self, subject: Option<Subject>, result: &OpResult) -> Option<pb::Facts> {
        let mut subject = subject?;
        let state = self.state();
        match result {
            // Forgotten again in between.
            Ok(_) if subject.asked => {
                let known = |(parent, name): &(Ino, Name)| {
                    !matches!(state.ns.look(*parent, name), Ok(Absence::Unknown) | Err(_))
                };
                subject.names.retain(known);
                subject.inos.retain(|ino| state.ns.get(*ino).is_some());
            }
            // Forgotten again in between, too: that it is gone is believed for good.
            Ok(_) => {
                subject.inos.retain(|ino| state.ns.get(*ino).is_some() || state.is_deleted(*ino));
            }
            Err(e) if subject.asked => subject.keep_proven(&state, e.errno),
            Err(_) => return None,
        }
        if let Some(ino) = subject.silent {
            state.files.get(&ino).filter(|f| f.size() > 0 && f.is_zeros())?;
            if !state.ns.is_local(ino) {
                return None;
            }
            subject.inos.insert(ino);
        }
        let at = moment(&state.lineage);
        let size =
            |ino: &Ino| state.files.get(ino).map_or((0, false), |f| (f.size(), f.is_zeros()));
        let mut facts = match subject.place {
            Some(ino) => state.ns.chain(at, ino, size(&ino)),
            None => Facts::default(),
        };
        let mut settling = self.settling.lock();
        // What nodes are going to tell must not be forgotten there before they do.
        let lacks_any = self.words.lacks_any();
        if !lacks_any {
            settling.look(&state, at, subject.look);
        }
        if subject.moved {
            let is_dir = |ino: &&Ino| state.ns.get(**ino).is_some_and(Inode::is_dir);
            let moved = subject.inos.iter().filter(is_dir);
            moved.for_each(|dir| settling.horizon.note_moved(*dir, at));
        }
        facts.settled = if lacks_any { 0 } else { settling.horizon.settled() };
        facts.shared = state.next_node() > SECOND_NODE;
        facts.lives = state.lives();
        facts.nodes = u32::try_from(state.nodes.len()).unwrap_or(u32::MAX);
        for (parent, name) in &subject.names {
            let fact = state.ns.name_fact(at, *parent, name);
            subject.inos.extend(fact.bound.map(|b| b.ino));
            facts.names.push(fact);
        }
        // What begins anew is to replace what the backing has under its name, and keeps what users have put
        // beside the bytes of that.
        for ino in &subject.inos {
            let Some(renewed) = state.ns.get(*ino).filter(|_| state.ns.replaces(*ino) != 0) else {
                continue;
            };
            for link in &renewed.links {
                if !subject.names.iter().any(|(p, n)| *p == link.parent && *n == link.name) {
                    facts.names.push(state.ns.name_fact(at, link.parent, &link.name));
                }
            }
            let told =
                |name: &[u8]| subject.xattr.as_ref().is_some_and(|x| x.0 == *ino && *x.1 == *name);
            let rest = renewed.xattrs.keys().filter(|name| !told(name));
            facts.xattrs.extend(rest.map(|name| state.ns.xattr_fact(at, *ino, name)));
        }
        let inodes = subject.inos.iter().map(|ino| state.ns.inode_fact(at, *ino, size(ino)));
        facts.inodes.extend(inodes);
        if subject.place.is_none() {
            let places = settling.horizon.places(&state.ns, at, &facts.names);
            facts.names.extend(places.names);
            facts.inodes.extend(places.inodes);
        }
        let xattr = subject.xattr.as_ref();
        facts.xattrs.extend(xattr.map(|(ino, name)| state.ns.xattr_fact(at, *ino, name)));
        Some(ebb_wire::facts_to_pb(at, &facts))
    }
}

/// Bits of a moment that count the records of one start; those above say which start it is.
pub(crate) const RECORD_BITS: u32 = 34;

/// Now, counted in journal records since this service began. Starts are told apart by when they were,
/// as in the numbers of inodes: also one on a state that a power loss has set back counts on.
pub(crate) fn moment(lineage: &Lineage) -> Moment {
    let records = lineage.journalled();
    match lineage.starts().next_back() {
        Some(start) => {
            let since = records.saturating_sub(start.at).min((1 << RECORD_BITS) - 1);
            (start.block() << RECORD_BITS) | since
        }
        None => records,
    }
}
