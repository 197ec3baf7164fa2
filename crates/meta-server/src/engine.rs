//! How operations meet the backing: learning names, comparing what is known, carrying out plans.
//! Which name means what is decided by the namespace; nothing here knows the wire.
//!
//! Look-ups are optimistic: the backing is asked without any lock, and the answer is taken in
//! only when no name changed meanwhile (the directory's generation), else it is asked again, at
//! last while holding the turn. A call that timed out may still take effect later; the next
//! comparison finds it, as it finds what others did.

use crate::backing::{Listing, Look};
use crate::begun::Begun;
use crate::core::{Checked, Core, Turn};
use crate::effects::{Lack, What};
use crate::state::{Entry, State};
use ebb_namespace::{Absence, BackingPath, Home, Inode, Link, Plan, Record, Step};
use ebb_types::{Errno, FileKind, Ino, Name, Time};
use std::pin::Pin;

/// Optimistic attempts before the turn is taken for the look itself.
const OPTIMISTIC: usize = 3;

/// A boxed future, for the one recursion (towards the root).
type Boxed<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A directory of the backing, and when it was there.
struct Place {
    path: BackingPath,
    generation: (u64, u64),
    asked: u64,
}

impl Core {
    /// Makes sure that it is known, and freshly so, what `name` in `parent` is.
    pub async fn learn(&self, parent: Ino, name: &Name) -> Result<(), Errno> {
        if self.is_known(parent, name)? { Ok(()) } else { self.look_again(parent, name).await }
    }

    /// True when the name needs no look at the backing.
    pub fn is_known(&self, parent: Ino, name: &Name) -> Result<bool, Errno> {
        let state = self.state();
        Ok(match state.ns.look(parent, name)? {
            Absence::Unknown => false,
            Absence::Present(d) => {
                let inode = state.ns.inode(d.ino)?;
                let fresh = || self.is_fresh(d.ino, Checked::Attributes);
                !self.is_in_doubt(inode) && (!self.comparable(&state, inode) || fresh())
            }
            Absence::Absent => {
                name.is_reserved()
                    || state.ns.get(parent).is_some_and(|p| p.home != Home::Own)
                    || self.is_fresh(parent, Checked::Names)
            }
        })
    }

    /// True when others could have changed it on the backing and that would matter.
    fn comparable(&self, state: &State, inode: &Inode) -> bool {
        inode.home == Home::Own
            && !inode.due
            && !inode.owed
            && !state.is_dirty(inode.ino)
            && !state.quiet.contains(&inode.ino)
            && !self.is_busy(inode.ino)
    }

    /// True when an inode is on the backing as far as we know, and others could change it there.
    pub fn is_comparable(&self, ino: Ino) -> bool {
        let state = self.state();
        state.ns.get(ino).is_some_and(|inode| self.comparable(&state, inode))
    }

    /// True when what is known of an inode is good enough.
    pub fn needs_no_compare(&self, ino: Ino) -> Result<bool, Errno> {
        let state = self.state();
        let inode = state.ns.inode(ino)?;
        Ok(!self.comparable(&state, inode) || self.is_fresh(ino, Checked::Attributes))
    }

    /// Asks the backing for a name, whatever is known.
    pub async fn look_again(&self, parent: Ino, name: &Name) -> Result<(), Errno> {
        for attempt in 0.. {
            let turn = if attempt < OPTIMISTIC { None } else { Some(self.turn().await) };
            let Some(Place { path, generation, asked }) = self.place(parent)? else {
                return Ok(());
            };
            let wanted = name.clone();
            let look = self.backing.run(move |b| b.look(&path, &wanted)).await;
            let _turn = match turn {
                Some(turn) => turn,
                None => self.turn().await,
            };
            let look = match look {
                Ok(look) => look,
                Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP | Errno::ESTALE) => {
                    drop(_turn);
                    return self.dir_is_gone(parent).await;
                }
                Err(e) => return Err(e),
            };
            if self.state().ns.generation(parent) == generation {
                return self.take_look(parent, name, &look, asked);
            }
        }
        Err(Errno::EAGAIN)
    }

    /// Files that got names on the backing just before the service stopped, without a note of it.
    /// What opens a part file would look for it in vain; and a further name that is taken away as
    /// if it were only here would stay on the backing, and be found there again.
    pub(super) fn find_published(&self) {
        let parts = self.names_in_doubt(|i| {
            let part = || self.state().ns.home_path(i.ino);
            is_part(i) && part().is_some_and(|p| self.backing.stat(&p).err() == Some(Errno::ENOENT))
        });
        parts.iter().for_each(|(_, link)| self.find(link));
        for (ino, link) in &parts {
            if self.state().ns.get(*ino).is_some_and(is_part) {
                tracing::error!(%ino, name = %link.name, "a part file is gone");
            }
        }
        let further = self.names_in_doubt(|i| i.kind == FileKind::Regular && i.home == Home::Own);
        further.iter().for_each(|(_, link)| self.find(link));
    }

    /// Names of such inodes that the backing does not have, as far as is noted.
    fn names_in_doubt(&self, which: impl Fn(&Inode) -> bool) -> Vec<(Ino, Link)> {
        let pending: Vec<Inode> = {
            let state = self.state();
            state.ns.pending_after(None).filter_map(|ino| state.ns.get(ino).cloned()).collect()
        };
        let mut out = Vec::new();
        for inode in pending.iter().filter(|i| which(i)) {
            let state = self.state();
            let noted = |l: &&Link| state.ns.is_on_backing(l);
            let links = inode.links.iter().filter(|l| !noted(l));
            out.extend(links.map(|l| (inode.ino, l.clone())));
        }
        out
    }

    fn find(&self, link: &Link) {
        let look = self.place(link.parent).and_then(|place| {
            let Some(Place { path, asked, .. }) = place else { return Err(Errno::ENOENT) };
            let look = self.backing.look(&path, &link.name)?;
            self.take_look(link.parent, &link.name, &look, asked)
        });
        // It is looked at again when somebody asks for it.
        if let Err(error) = look {
            tracing::debug!(?error, name = %link.name, "not found on the backing");
        }
    }

    /// Where a directory is on the backing, and when that was so; `None` when it is not there.
    fn place(&self, dir: Ino) -> Result<Option<Place>, Errno> {
        let state = self.state();
        let inode = state.ns.inode(dir)?;
        match inode.kind {
            FileKind::Directory if inode.home != Home::Own => Ok(None),
            FileKind::Directory => {
                let path = state.ns.path(dir).ok_or(Errno::ENOENT)?;
                let (generation, asked) = (state.ns.generation(dir), state.ns.now_seen());
                Ok(Some(Place { path, generation, asked }))
            }
            _ => Err(Errno::ENOTDIR),
        }
    }

    fn take_look(&self, parent: Ino, name: &Name, look: &Look, asked: u64) -> Result<(), Errno> {
        let mut guard = self.state();
        let state = &mut *guard;
        if state.ns.inode(parent)?.seen.map(|s| s.key) != Some(look.stamp.key) {
            // Another directory is there now; whoever asks for it will find that out.
            return Err(Errno::ESTALE);
        }
        let dirty = |ino| state.is_dirty(ino) || state.quiet.contains(&ino) || self.is_busy(ino);
        let found = look.found.as_ref();
        let plan = state.ns.plan_found(parent, name, found, &dirty, asked, Time::now())?;
        let ino = plan.ino;
        self.apply_found(state, plan);
        self.forgetting.used(parent);
        if look.found.is_none() {
            if look.settled {
                state.ns.note_absent(parent, name, look.stamp);
            }
            self.note_checked(parent, Checked::Names);
        }
        if let Some(ino) = ino {
            self.note_checked(ino, Checked::Attributes);
            self.note_certain(ino);
        }
        Ok(())
    }

    /// The way to a directory does not lead there any more: find out how far it does.
    fn dir_is_gone(&self, dir: Ino) -> Boxed<'_, Result<(), Errno>> {
        Box::pin(async move {
            if dir == Ino::ROOT {
                return Err(Errno::EIO);
            }
            let link = {
                let state = self.state();
                state.ns.inode(dir)?.links.first().cloned().ok_or(Errno::ENOENT)?
            };
            self.look_again(link.parent, &link.name).await?;
            match self.state().ns.get(dir) {
                Some(_) => Ok(()),
                None => Err(Errno::ENOENT),
            }
        })
    }

    /// Compares an inode with the backing when that was not done a moment ago (or `now`).
    pub async fn compare(&self, ino: Ino, now: bool) -> Result<(), Errno> {
        let link = {
            let state = self.state();
            let inode = state.ns.inode(ino)?;
            if !self.comparable(&state, inode) || (!now && self.is_fresh(ino, Checked::Attributes))
            {
                return Ok(());
            }
            inode.links.first().cloned()
        };
        match link {
            Some(link) => self.look_again(link.parent, &link.name).await,
            None if ino == Ino::ROOT => self.compare_root().await,
            None => Ok(()),
        }
    }

    async fn compare_root(&self) -> Result<(), Errno> {
        let asked = self.state().ns.now_seen();
        let found = self.backing.run(|b| b.stat(&BackingPath::ROOT)).await?;
        let _turn = self.turn().await;
        let mut state = self.state();
        let plan = state.ns.plan_root_found(&found, asked, Time::now())?;
        self.apply_found(&mut state, plan);
        self.note_checked(Ino::ROOT, Checked::Attributes);
        Ok(())
    }

    /// Makes sure that all names of a directory are known and that nobody changed them.
    pub async fn learn_all(&self, dir: Ino) -> Result<(), Errno> {
        for attempt in 0.. {
            let turn = if attempt < OPTIMISTIC { None } else { Some(self.turn().await) };
            let Some(Place { path, generation, asked }) = self.place(dir)? else {
                return Ok(());
            };
            let stamped = path.clone();
            let (stamp, settled) = match self.backing.run(move |b| b.stamp(&stamped)).await {
                Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP) => {
                    drop(turn);
                    return self.dir_is_gone(dir).await;
                }
                other => other?,
            };
            {
                let mut state = self.state();
                if settled && state.ns.check_stamp(dir, stamp) && state.ns.is_complete(dir) {
                    self.note_checked(dir, Checked::Names);
                    return Ok(());
                }
            }
            let listing = self.backing.run(move |b| b.list(&path)).await?;
            let _turn = match turn {
                Some(turn) => turn,
                None => self.turn().await,
            };
            if self.state().ns.generation(dir) == generation {
                return self.take_listing(dir, &listing, asked);
            }
        }
        Err(Errno::EAGAIN)
    }

    fn take_listing(&self, dir: Ino, listing: &Listing, asked: u64) -> Result<(), Errno> {
        let mut guard = self.state();
        let state = &mut *guard;
        if state.ns.inode(dir)?.seen.map(|s| s.key) != Some(listing.stamp.key) {
            return Err(Errno::ESTALE);
        }
        let dirty = |ino| state.is_dirty(ino) || state.quiet.contains(&ino) || self.is_busy(ino);
        let plan = state.ns.plan_listed(dir, &listing.entries, &dirty, asked, Time::now())?;
        self.apply_found(state, plan);
        self.forgetting.used(dir);
        state.ns.note_taken_in(dir);
        if listing.settled {
            state.ns.note_listed(dir, listing.stamp);
        } else {
            state.ns.forget_absence(dir);
        }
        self.note_checked(dir, Checked::Names);
        Ok(())
    }

    // ---- plans -------------------------------------------------------------------------------

    /// Applies what was found on the backing.
    fn apply_found(&self, state: &mut State, plan: Plan) {
        crate::leases::finding(|| self.apply_local(state, plan));
    }

    /// Applies a plan that does nothing on the backing.
    pub fn apply_local(&self, state: &mut State, plan: Plan) {
        self.apply_local_with(state, plan, Vec::new());
    }

    /// The same; `with` goes into the journal record of the last step.
    pub fn apply_local_with(&self, state: &mut State, plan: Plan, with: Vec<Entry>) {
        let mut steps = plan.steps;
        let last = steps.pop().map(|s| s.records).unwrap_or_default();
        for step in steps {
            self.commit_ns(state, step.records);
        }
        self.commit_ns_with(state, last, with);
    }

    /// Carries a plan out, step by step. `with` goes into the journal with the last step.
    pub async fn execute(
        &self,
        _turn: &Turn<'_>,
        plan: Plan,
        with: Vec<Entry>,
    ) -> Result<(), Errno> {
        let mut with = Some(with);
        let commit = |records: Vec<Record>, with: Option<Vec<Entry>>| {
            let mut state = self.state();
            let mut with = with.unwrap_or_default();
            // A file without a name may have been closed since this was planned.
            with.retain(|e| !matches!(e, Entry::File(ino, _) if !state.files.contains_key(ino)));
            self.commit_ns_with(&mut state, records, with);
        };
        let mut steps = plan.steps.into_iter().peekable();
        if steps.peek().is_none() {
            commit(Vec::new(), with.take());
        }
        while let Some(step) = steps.next() {
            let mut with = if steps.peek().is_none() { with.take() } else { None };
            let begun = self.note_begun(&step, with.as_deref()).await?;
            let mut records = step.records.clone();
            match self.on_backing(step).await {
                Ok(seen) => records.extend(seen),
                Err(e) => {
                    if begun {
                        self.commit(&mut self.state(), &[Entry::Ended]);
                    }
                    return Err(e);
                }
            }
            if begun {
                with.get_or_insert_default().push(Entry::Ended);
            }
            commit(records, with);
        }
        Ok(())
    }

    /// Notes the step of a change that leads to its answer, before it touches the backing: on stable
    /// storage, as a power cut must not leave a backing that is ahead of the journal. True when it does.
    async fn note_begun(&self, step: &Step, with: Option<&[Entry]>) -> Result<bool, Errno> {
        let answered = with.unwrap_or_default().iter().find_map(|e| match e {
            Entry::Answered(node, id, outcome) => Some((*node, *id, *outcome)),
            _ => None,
        });
        let Some(answered) = answered.filter(|_| !step.effects.is_empty()) else {
            return Ok(false);
        };
        let entry = Entry::Begun(Box::new(Begun { step: step.clone(), answered }));
        self.commit(&mut self.state(), &[entry]);
        self.journal.synced(self.journal.tail()).await?;
        Ok(true)
    }

    /// The effects of a step, and what the objects look like afterwards.
    async fn on_backing(&self, step: Step) -> Result<Vec<Record>, Errno> {
        if step.effects.is_empty() && step.restat.is_empty() {
            return Ok(Vec::new());
        }
        let known = self.state().ns.known_objects(&step.effects);
        let begun = self.backing.under_way.begin(&[&step.effects]).await?.pop();
        let Some((going, _waiting)) = begun else { return Err(Errno::EIO) };
        let work = move |b: &crate::backing::Backing| {
            let lacks = b.effects(&step.effects, &known, || going.is_wanted())?;
            let seen = b.look_at(&step.restat);
            #[cfg(test)]
            b.death.may_come()?;
            Ok((seen, lacks))
        };
        let done = self.backing.run(work).await;
        #[cfg(test)]
        self.backing.death.stop_here(&done).await;
        let (mut records, lacks) = done?;
        records.extend(self.lacking(&lacks));
        Ok(records)
    }

    /// What to note of objects that are not on the backing as they should be.
    pub fn lacking(&self, lacks: &[Lack]) -> Vec<Record> {
        let state = self.state();
        let mut records = Vec::new();
        for Lack { path, what, errno } in lacks {
            let Some(ino) = state.ns.at_path(path) else { continue };
            records.push(Record::Owed { ino, owed: true });
            if let What::Xattr(name, value) = what {
                self.refused.lock().insert(ino, *errno);
                let (name, value) = (name.clone(), Some(value.clone()));
                records.push(Record::Xattr { ino, name, value });
            }
        }
        records
    }

    /// A change of names: makes sure that the names are known, plans, carries out. When the
    /// backing turns out to be different from what was known, it is looked at and tried once more.
    pub async fn change(
        &self,
        names: &[(Ino, &Name)],
        plan: impl Fn(&State) -> Result<Plan, Errno> + Send,
        with: impl Fn(&Plan) -> Vec<Entry> + Send,
    ) -> Result<Option<Ino>, Errno> {
        for (parent, name) in names {
            self.learn(*parent, name).await?;
        }
        let first = self.change_once(names, &plan, &with).await;
        match first {
            Err((e, true)) if is_surprise(e) => {
                for (parent, name) in names {
                    self.look_again(*parent, name).await?;
                }
                self.change_once(names, &plan, &with).await.map_err(|(e, _)| e)
            }
            other => other.map_err(|(e, _)| e),
        }
    }

    /// One attempt; an error says whether it came from the backing.
    async fn change_once(
        &self,
        names: &[(Ino, &Name)],
        plan: &(impl Fn(&State) -> Result<Plan, Errno> + Send),
        with: &(impl Fn(&Plan) -> Vec<Entry> + Send),
    ) -> Result<Option<Ino>, (Errno, bool)> {
        let turn = self.turn().await;
        for (parent, name) in names {
            // It may have become unknown since it was learned; then the look happens here.
            let unknown = matches!(self.state().ns.look(*parent, name), Ok(Absence::Unknown));
            if unknown {
                self.look_in_turn(&turn, *parent, name).await.map_err(|e| (e, false))?;
            }
        }
        let planned = plan(&self.state()).map_err(|e| (e, false))?;
        let entries = with(&planned);
        let ino = planned.ino;
        self.execute(&turn, planned, entries).await.map_err(|e| (e, true))?;
        Ok(ino)
    }

    async fn look_in_turn(&self, _turn: &Turn<'_>, parent: Ino, name: &Name) -> Result<(), Errno> {
        let Some(Place { path, asked, .. }) = self.place(parent)? else { return Ok(()) };
        let wanted = name.clone();
        let look = self.backing.run(move |b| b.look(&path, &wanted)).await?;
        self.take_look(parent, name, &look, asked)
    }
}

fn is_part(inode: &Inode) -> bool {
    matches!(inode.home, Home::Part { .. })
}

/// Errors that mean that the backing is not what was known.
fn is_surprise(e: Errno) -> bool {
    matches!(
        e,
        Errno::ENOENT
            | Errno::EEXIST
            | Errno::ENOTDIR
            | Errno::EISDIR
            | Errno::ELOOP
            | Errno::ESTALE
    )
}
