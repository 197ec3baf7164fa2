//! What this node need not ask of names and attributes: [`ebb_consistency::Known`], where it meets the
//! service and the mount. Nothing of it is told to the kernel for longer than one answer.
//!
//! Whatever this node changes by a request goes through [`Node::changing`], from before it is sent
//! until what the answer tells is taken in.

use crate::node::Node;
use crate::ops::coupling::Looked;
use ebb_consistency::{Asked, Change, Grant, Known, LeaseSeq, Model, Outcome, Told};
use ebb_locks::Mutex;
use ebb_meta_client::{Wish, now_ms};
use ebb_types::{Attr, Errno, FileKind, Ino, Name};
use std::sync::atomic::Ordering::Relaxed;

/// What others can change on the backing is good for so long; the service compares it as often.
const FRESH_MS: u64 = 1000;

/// Names of a directory that are worth one question, to know which are not there.
const LISTED_MAX: u32 = 2048;

/// The table of a node. A leaf: no other lock is taken under it.
#[derive(Debug, Default)]
pub struct KnownNames {
    table: Mutex<Known>,
}

impl KnownNames {
    /// How many names and inodes are in it.
    pub fn len(&self) -> usize {
        self.table.lock().len()
    }

    /// Recalled, or given up.
    pub(crate) fn recall(&self, ino: Ino, seq: LeaseSeq) {
        self.table.lock().recall(ino, seq);
    }

    /// This node returns its lease up to this number.
    pub(crate) fn give_up(&self, ino: Ino, seq: LeaseSeq) {
        self.table.lock().give_up(ino, seq);
    }

    /// The kernel knows the inode no more, or it is gone.
    pub(crate) fn drop_inode(&self, ino: Ino) {
        self.table.lock().drop_inode(ino);
    }

    /// Takes in what an answer told.
    pub(crate) fn learn(&self, asked: Option<Asked>, told: impl IntoIterator<Item = Told>) {
        let Some(asked) = asked else { return };
        let mut table = self.table.lock();
        told.into_iter().for_each(|told| table.learn(asked, told));
    }

    /// The same for attributes that came with a lease.
    pub(crate) fn learn_attr(&self, asked: Option<Asked>, attr: Attr, lease: Option<Grant>) {
        let told = |grant| Told { ino: attr.ino, grant, attr: Some(attr), found: None };
        self.learn(asked, lease.map(told));
    }

    /// A directory that this node has just made has no names.
    pub(crate) fn made(&self, asked: Option<Asked>, dir: Ino, lease: Option<Grant>) {
        if let (Some(asked), Some(grant)) = (asked, lease) {
            self.table.lock().made(asked, dir, grant);
        }
    }

    fn name(&self, dir: Ino, name: &Name, epoch: u64) -> Option<Option<Ino>> {
        self.table.lock().name(dir, name, Some(epoch), now_ms(), FRESH_MS)
    }

    fn attr(&self, ino: Ino, epoch: u64) -> Option<Attr> {
        self.table.lock().attr(ino, Some(epoch), now_ms(), FRESH_MS)
    }

    fn missed(&self, dir: Ino, asked: Asked) -> bool {
        self.table.lock().missed(dir, Some(asked.epoch()))
    }

    pub(crate) fn believed(&self, dir: Ino, name: &Name) -> Option<Ino> {
        self.table.lock().believed(dir, name)
    }
}

/// An own change on its way. Dropped without having heard of its end, nobody knows what became of it.
pub(crate) struct Changing<'a> {
    node: &'a Node,
    change: Change,
    asked: Option<Asked>,
    outcome: Outcome,
}

impl Changing<'_> {
    /// What lease to ask for.
    pub(crate) fn wish(&self) -> Wish {
        if self.asked.is_some() { self.node.job_wish() } else { Wish::No }
    }

    /// The same for a file of this model.
    pub(crate) fn wish_for(&self, model: &Model) -> Wish {
        if self.asked.is_some() { wish_for(model) } else { Wish::No }
    }

    /// When it was sent.
    pub(crate) fn asked(&self) -> Option<Asked> {
        self.asked
    }

    /// It was answered, or given up.
    pub(crate) fn heard<T>(&mut self, answer: &Result<T, Errno>) {
        // These can come without any answer of the service.
        let none = |e: &Errno| {
            matches!(*e, Errno::ETIMEDOUT | Errno::EIO | Errno::ENOTCONN | Errno::EINTR)
        };
        if !answer.as_ref().err().is_some_and(none) {
            self.outcome = Outcome::Answered(Vec::new());
        }
    }

    /// The answer told this.
    pub(crate) fn told(&mut self, told: impl IntoIterator<Item = Told>) {
        self.outcome = Outcome::Answered(told.into_iter().collect());
    }

    /// From now on it can be told from here what is true now.
    pub(crate) fn end(self) {}
}

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        let outcome = std::mem::replace(&mut self.outcome, Outcome::Unknown);
        self.node.known.table.lock().end(&self.change, self.asked, outcome);
    }
}

fn wish_for(model: &Model) -> Wish {
    if model.wants_leases() { Wish::Full } else { Wish::Light }
}

impl Node {
    /// A question is about to be sent that can bring a lease; none: nothing may be trusted now.
    pub(crate) fn asking(&self) -> Option<Asked> {
        let epoch = self.trust_to_come()?;
        Some(self.known.table.lock().ask(epoch, now_ms()))
    }

    /// Under which trust something can be granted; none until all that a daemon before this one left is
    /// told: what the service calls back is returned only then, and whoever was granted something is
    /// answered only when it has returned what concerns the answer.
    fn trust_to_come(&self) -> Option<u64> {
        self.meta.trust().filter(|_| self.has_begun())
    }

    fn job_wish(&self) -> Wish {
        wish_for(self.rules.job())
    }

    /// What lease a question is to bring.
    pub(crate) fn wish(&self, asked: Option<Asked>, ino: Option<Ino>) -> Wish {
        if asked.is_none() {
            return Wish::No;
        }
        let file = ino.and_then(|ino| self.file(ino));
        file.map_or_else(|| self.job_wish(), |f| wish_for(&f.state.read().model))
    }

    /// This node is about to change these names and inodes.
    pub(crate) fn changing(&self, names: &[(Ino, &Name)], inos: &[Ino]) -> Changing<'_> {
        let epoch = self.trust_to_come();
        let names = names.iter().map(|(dir, name)| (*dir, (*name).clone())).collect();
        let change = Change { names, inos: inos.to_vec() };
        let mut table = self.known.table.lock();
        let asked = epoch.map(|epoch| table.ask(epoch, now_ms()));
        table.begin(&change);
        drop(table);
        Changing { node: self, change, asked, outcome: Outcome::Unknown }
    }

    /// The attributes of an inode, if they need no question.
    pub(crate) fn leased_attr(&self, ino: Ino) -> Option<Attr> {
        let epoch = self.meta.trust()?;
        let attr = match self.file(ino) {
            // Under the state, so that an own publication is in one of the two.
            Some(file) => {
                let state = file.state.read();
                let attr = self.known.attr(ino, epoch)?;
                self.seen_with(&file, &state, u64::MAX, attr)
            }
            None => self.known.attr(ino, epoch)?,
        };
        self.leases.answered.fetch_add(1, Relaxed);
        Some(attr)
    }

    /// What a name means, if that needs no question.
    pub fn known_name(&self, dir: Ino, name: &Name) -> Option<Result<Attr, Errno>> {
        let epoch = self.meta.trust()?;
        match self.known.name(dir, name, epoch)? {
            Some(ino) => self.leased_attr(ino).map(Ok),
            None => {
                self.leases.answered.fetch_add(1, Relaxed);
                Some(Err(Errno::ENOENT))
            }
        }
    }

    /// Asks the service for a name.
    pub(crate) async fn ask_name(&self, dir: Ino, name: &Name) -> Result<Looked, Errno> {
        let asked = self.asking();
        let wish = self.wish(asked, None);
        let looked = self.meta.look_up(dir, name, wish).await?;
        self.known.learn(asked, looked.told);
        if let (None, Some(asked)) = (looked.attr, asked)
            && self.known.missed(dir, asked)
            && let Some(node) = self.me_arc()
        {
            self.runtime.spawn(async move { node.learn_names(dir).await });
        }
        Ok(match (looked.attr, looked.awaits) {
            (Some(attr), _) => Looked::There(attr),
            (None, Some(wait)) => Looked::Awaited(wait),
            (None, None) => Looked::Missing,
        })
    }

    /// Learns all names of a directory, unless there are many: then it is known of others that they
    /// are not there.
    async fn learn_names(&self, dir: Ino) {
        let asked = self.asking();
        let page = self.meta.readdir_leased(dir, None, LISTED_MAX, self.wish(asked, None)).await;
        let Ok(page) = page else { return };
        if let (Some(asked), Some(lease), true) = (asked, page.lease, page.end) {
            let all = page.entries.into_iter().map(|e| (e.name, e.attr.ino)).collect();
            self.listed(asked, dir, lease, all);
        }
    }

    /// A listing has begun: its first page came with this lease.
    pub(crate) fn listing_begins(&self, asked: Asked, dir: Ino, first: Grant) {
        self.known.table.lock().listing_begins(asked, dir, first);
    }

    /// A listing is whole.
    pub(crate) fn listed(&self, asked: Asked, dir: Ino, first: Grant, all: Vec<(Name, Ino)>) {
        let mut table = self.known.table.lock();
        table.listing_begins(asked, dir, first);
        table.listed(asked, dir, first, all);
    }

    /// The attributes of an inode from the service, with a lease of them when that is of use.
    pub(crate) async fn ask_attr(&self, ino: Ino) -> Result<Attr, Errno> {
        let asked = self.asking();
        let (attr, lease) = self.meta.getattr_leased(ino, self.wish(asked, Some(ino))).await?;
        self.known.learn_attr(asked, attr, lease);
        if attr.kind == FileKind::Regular
            && let Some(file) = self.file(ino)
        {
            self.take_grant(&mut file.state.write(), asked, lease);
        }
        Ok(attr)
    }
}
