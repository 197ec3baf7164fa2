//! Who waits for coupled files, and what becomes of files that all have read. Which opens count, and
//! where a file stands, is in [`ebb_coupling`] and in the state.

use crate::core::Core;
use crate::ops::{keeps_bytes, terms_from};
use crate::state::{Entry, State};
use ebb_coupling::{Coupled, PARTIES_MAX, State as Stand, Step, User};
use ebb_locks::Mutex;
use ebb_namespace::Record;
use ebb_namespace::locks::Ticket;
use ebb_types::{Errno, Ino, Name, NodeId, Time};
use ebb_wire::pb;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Requests that wait, by what they wait for. A leaf.
#[derive(Debug, Default)]
pub struct Awaiting {
    inner: Mutex<Inner>,
    /// How many: nobody looks when nobody waits.
    count: AtomicUsize,
}

#[derive(Debug, Default)]
struct Inner {
    files: HashMap<Ino, Vec<(NodeId, Ticket)>>,
    count: usize,
    names: HashMap<(Ino, Name), Vec<(NodeId, Ticket)>>,
}

impl Inner {
    /// Takes out those of whom this is true.
    fn take(&mut self, gone: impl Fn(&(NodeId, Ticket)) -> bool) -> Vec<Ticket> {
        let mut out = Vec::new();
        let mut sort = |list: &mut Vec<(NodeId, Ticket)>| {
            list.retain(|waiter| {
                let goes = gone(waiter);
                out.extend(goes.then_some(waiter.1));
                !goes
            });
            !list.is_empty()
        };
        self.files.retain(|_, list| sort(list));
        self.names.retain(|_, list| sort(list));
        self.count -= out.len();
        out
    }
}

/// What a file, or the lack of one, means to who waits.
pub(crate) fn verdict(state: &State, ino: Ino) -> Option<Result<(), Errno>> {
    if state.ns.get(ino).is_none() {
        return Some(Err(Errno::ENOENT));
    }
    match state.couplings.file(ino).map(Coupled::state) {
        Some(Stand::Awaited) => None,
        Some(Stand::Lost(_)) => Some(Err(Errno::EIO)),
        Some(Stand::Ready | Stand::Consumed) | None => Some(Ok(())),
    }
}

impl Awaiting {
    /// How many requests wait.
    pub fn len(&self) -> usize {
        self.count.load(Relaxed)
    }

    pub(crate) fn for_file(&self, ino: Ino, node: NodeId, ticket: Ticket) {
        self.change(|inner| {
            inner.count += 1;
            inner.files.entry(ino).or_default().push((node, ticket));
        });
    }

    pub(crate) fn for_name(&self, name: (Ino, Name), node: NodeId, ticket: Ticket) {
        self.change(|inner| {
            inner.count += 1;
            inner.names.entry(name).or_default().push((node, ticket));
        });
    }

    /// True when it waited here.
    pub(crate) fn cancel(&self, ticket: Ticket) -> bool {
        self.len() > 0 && !self.change(|inner| inner.take(|(_, t)| *t == ticket)).is_empty()
    }

    fn end_node(&self, node: NodeId) -> Vec<Ticket> {
        if self.len() == 0 {
            return Vec::new();
        }
        self.change(|inner| inner.take(|(n, _)| *n == node))
    }

    fn change<T>(&self, change: impl FnOnce(&mut Inner) -> T) -> T {
        let mut inner = self.inner.lock();
        let done = change(&mut inner);
        self.count.store(inner.count, Relaxed);
        done
    }

    /// Those for whom the wait for this file is over.
    fn over(&self, state: &State, ino: Ino) -> Vec<(Ticket, Result<(), Errno>)> {
        let Some(verdict) = verdict(state, ino) else { return Vec::new() };
        let over = self.change(|inner| {
            let over = inner.files.remove(&ino).unwrap_or_default();
            inner.count -= over.len();
            over
        });
        over.into_iter().map(|(_, ticket)| (ticket, verdict)).collect()
    }

    /// A name is there: who waited for it waits for the file.
    fn named(&self, name: &(Ino, Name), ino: Ino) {
        self.change(|inner| {
            if let Some(list) = inner.names.remove(name) {
                inner.files.entry(ino).or_default().extend(list);
            }
        });
    }
}

/// After these entries were applied: wakes those who waited for it.
pub(crate) fn look_who_awaits(core: &Core, state: &State, entries: &[Entry]) {
    if core.awaiting.len() == 0 {
        return;
    }
    let mut over = Vec::new();
    for entry in entries {
        match entry {
            Entry::CoupledStep(ino, _)
            | Entry::Coupled(ino, _)
            | Entry::Ns(Record::Free { ino }) => {
                over.extend(core.awaiting.over(state, *ino));
            }
            Entry::Ns(Record::Dentry { parent, name, ino, .. }) => {
                core.awaiting.named(&(*parent, name.clone()), *ino);
                over.extend(core.awaiting.over(state, *ino));
            }
            _ => {}
        }
    }
    over.into_iter().for_each(|(ticket, result)| core.end_waiting(&[ticket], result));
}

/// Before these entries are applied: the nodes that may have bytes of coupled files that go.
pub(crate) fn holders_of_consumed(state: &State, entries: &[Entry]) -> Vec<(NodeId, Ino)> {
    let mut out = Vec::new();
    for entry in entries {
        let Entry::Ns(Record::Free { ino }) = entry else { continue };
        let Some(file) = state.couplings.file(*ino) else { continue };
        out.extend(file.parties().map(|node| (node, *ino)));
    }
    out
}

/// A file is no more, of which that node has bytes. One that does not hear of it asks in its own time.
pub(crate) fn tell_deleted(core: &Core, node: NodeId, ino: Ino) {
    let Some((_, stream)) = core.sessions.stream_of(node) else { return };
    let what = Some(pb::notice::What::Deleted(pb::Deleted { ino: ino.0 }));
    core.sessions.notify(node, stream, pb::Notice { what });
}

/// Whoever writes or reads coupled files at that node is dead, or cannot be told from who is.
pub(crate) fn end_couplings_of(core: &Core, node: NodeId) {
    end_awaiting_of(core, node);
    let mut state = core.state();
    let gone = |(ino, user)| Entry::CoupledStep(ino, Step::Leaves(user, false));
    let entries: Vec<Entry> = state.couplings.users_at(node).into_iter().map(gone).collect();
    core.commit(&mut state, &entries);
}

/// What that node waited for is not waited for any more.
pub(crate) fn end_awaiting_of(core: &Core, node: NodeId) {
    core.end_waiting(&core.awaiting.end_node(node), Err(Errno::EINTR));
}

/// A node tells who has coupled files open there, and who was through with one lately. This service may have
/// forgotten some of it. Whoever it knows of and the node does not is gone.
pub(crate) fn hear_coupled(
    core: &Core,
    state: &mut State,
    node: NodeId,
    told: &[pb::CoupledHandle],
) {
    let user = |told: &pb::CoupledHandle| User { node, handle: told.handle };
    // Of a file that is just being made the node does not know the number.
    let known: HashSet<(Ino, User)> = told.iter().map(|t| (Ino(t.ino), user(t))).collect();
    let is_known = |(ino, user)| known.contains(&(ino, user)) || known.contains(&(Ino(0), user));
    let step = |told: &pb::CoupledHandle, step| Entry::CoupledStep(Ino(told.ino), step);
    let mut entries = Vec::new();
    for told in told.iter().filter(|told| told.handle != 0) {
        let is_coupled = state.couplings.file(Ino(told.ino)).is_some();
        if is_coupled && (1..=PARTIES_MAX).contains(&told.of) {
            if told.write && !told.left {
                entries.push(step(told, Step::Produces(user(told))));
            }
            entries.push(step(told, Step::Joins(user(told), told.of)));
        }
        if told.left {
            let how = match told.withdrawn {
                true => Step::Withdraws(user(told)),
                false => Step::Leaves(user(told), told.through),
            };
            entries.extend(is_coupled.then(|| step(told, how)));
        } else if told.write && is_coupled {
            entries.push(step(told, Step::Produces(user(told))));
        } else if told.write && told.coupled && state.file(Ino(told.ino)).is_ok() {
            // Its directory is forgotten as well. Nobody must take it for a whole file.
            let lost = Some(Box::new(Coupled::unknown(node)));
            entries.push(Entry::Coupled(Ino(told.ino), lost));
        }
    }
    let left = state.couplings.users_at(node).into_iter().filter(|user| !is_known(*user));
    entries.extend(left.map(|(ino, user)| Entry::CoupledStep(ino, Step::Leaves(user, false))));
    core.commit(state, &entries);
}

/// True when there are names to be removed.
pub(crate) fn has_consumed(core: &Core) -> bool {
    !core.state().couplings.to_go().is_empty()
}

/// Removes the names of files that all have read, as far as they are in directories that couple. What has
/// names elsewhere is a plain file then.
pub(crate) async fn remove_consumed(core: &Core) {
    let to_go = core.state().couplings.to_go();
    for ino in to_go {
        let links: Vec<(Ino, Name)> = {
            let state = core.state();
            let links = state.ns.get(ino).map(|inode| inode.links.iter());
            links.into_iter().flatten().map(|l| (l.parent, l.name.clone())).collect()
        };
        for (parent, name) in links {
            // It may have been written anew, or renamed, since.
            let plan = |state: &State| match state.ns.dentry(parent, &name)? {
                Some(d) if d.ino == ino && state.couplings.is_to_go(ino) => {
                    if terms_from(state, parent).is_none() {
                        return Err(Errno::ENOENT);
                    }
                    keeps_bytes(state, parent, &name)?;
                    state.ns.plan_remove(parent, &name, false, Time::now())
                }
                _ => Err(Errno::ENOENT),
            };
            match core.change(&[(parent, &name)], plan, |_| Vec::new()).await {
                Ok(_) | Err(Errno::ENOENT) => {}
                Err(e) => tracing::debug!(%ino, error = %e, "a consumed file stays for now"),
            }
        }
        let mut state = core.state();
        let is_elsewhere = state.ns.get(ino).is_some_and(|inode| {
            let coupled = |parent| terms_from(&state, parent).is_some();
            !inode.links.is_empty() && !inode.links.iter().any(|link| coupled(link.parent))
        });
        if is_elsewhere && state.couplings.is_to_go(ino) {
            core.commit(&mut state, &[Entry::Coupled(ino, None)]);
        }
    }
}
