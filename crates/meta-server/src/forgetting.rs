//! Memory for names: above `--inodes-max` inodes, those that are exactly as the backing has them
//! are forgotten, and found again when somebody comes by (`ebb_namespace::forget` has the rules).
//!
//! Directories are what is counted as used: by every request that names one or something in it, and
//! when one is listed. What is in the directories that were used longest ago goes first; a
//! directory goes when nothing below it is known any more.
//!
//! Forgetting is done with the turn, a few at a time, so no plan is under way that refers to what
//! goes. Operations that look several times without the turn are safe because a directory that was
//! used in this or the last [`TICK`] is left alone. A tick is a look of the sweeper, not a time: a
//! service that was stopped has not looked. Should a request take longer it finds ESTALE, as
//! for a number that nobody can find, and the kernel looks the names up again.

use crate::core::Core;
use crate::state::Entry;
use ebb_locks::Mutex;
use ebb_namespace::{Namespace, Record};
use ebb_types::{Errno, Ino};
use ebb_wire::pb::request::Op;
use std::collections::HashMap;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// How often it is looked whether there are too many.
const TICK: Duration = Duration::from_millis(250);

/// Names that are looked at with the state locked once.
const BATCH: usize = 512;

/// When little was found, the next sweep waits this many times as long as the last one took.
const REST: u32 = 20;

/// Deeper than this no path leads.
const DEPTH_MAX: usize = 4096;

/// Which directories were used when.
#[derive(Debug)]
pub struct Forgetting {
    max: usize,
    tick: AtomicU64,
    used: Mutex<HashMap<Ino, u64>>,
    forgotten: AtomicU64,
}

impl Forgetting {
    /// For a state that was just brought back.
    pub fn new(max: usize, ns: &Namespace) -> Forgetting {
        let dirs = ns.inodes().filter(|i| i.is_dir()).map(|i| (i.ino, 0));
        Forgetting {
            max,
            tick: AtomicU64::new(2),
            used: Mutex::new(dirs.collect()),
            forgotten: AtomicU64::new(0),
        }
    }

    /// How many inodes there may be before some are forgotten.
    pub fn most(&self) -> usize {
        self.max
    }

    /// How many were forgotten so far.
    pub fn count(&self) -> u64 {
        self.forgotten.load(Relaxed)
    }

    /// What is in this directory is of use now.
    pub fn used(&self, dir: Ino) {
        self.used.lock().insert(dir, self.tick.load(Relaxed));
    }

    /// The directories that were not used for a while, the one that was used longest ago first.
    fn in_order(&self) -> Vec<Ino> {
        let now = self.tick.load(Relaxed);
        let used = self.used.lock();
        let old = used.iter().filter(|(_, tick)| **tick + 1 < now);
        let mut dirs: Vec<(u64, Ino)> = old.map(|(ino, tick)| (*tick, *ino)).collect();
        dirs.sort_unstable();
        dirs.into_iter().map(|(_, ino)| ino).collect()
    }

    /// True when the directory was not used for a while, or is none.
    fn is_old(&self, dir: Ino) -> bool {
        let now = self.tick.load(Relaxed);
        self.used.lock().get(&dir).is_none_or(|tick| tick + 1 < now)
    }
}

/// The inodes that a request names.
fn named(op: &Op) -> [u64; 4] {
    let one = |ino| [ino, 0, 0, 0];
    match op {
        Op::Lookup(l) => one(l.parent),
        Op::GetAttr(g) => one(g.ino),
        Op::SetAttr(s) => one(s.ino),
        Op::Make(m) => one(m.parent),
        Op::Unlink(u) => [u.parent, u.ino, 0, 0],
        Op::Rename(r) => [r.parent, r.new_parent, r.ino, r.new_ino],
        Op::Link(l) => [l.ino, l.new_parent, 0, 0],
        Op::ReadDir(r) => one(r.ino),
        Op::ReadLink(r) => one(r.ino),
        Op::GetXattr(x) => one(x.ino),
        Op::SetXattr(x) => one(x.ino),
        Op::ListXattr(x) => one(x.ino),
        Op::RemoveXattr(x) => one(x.ino),
        Op::Access(a) => one(a.ino),
        Op::Describe(d) => one(d.ino),
        // What is forgotten is known to be there.
        Op::Exists(_) => one(0),
        // It speaks of what was.
        Op::Reassert(_) => one(0),
        Op::Open(o) => one(o.ino),
        Op::Release(r) => one(r.ino),
        Op::Query(q) => one(q.ino),
        Op::Attach(a) => one(a.ino),
        Op::Append(a) => one(a.ino),
        Op::Detach(d) => one(d.ino),
        Op::Share(s) => one(s.ino),
        Op::Adopt(a) => one(a.ino),
        Op::FlushBegin(f) => one(f.ino),
        Op::FlushEnd(f) => one(f.ino),
        Op::SetLock(l) => one(l.ino),
        Op::GetLock(l) => one(l.ino),
        Op::ReleaseLocks(l) => one(l.ino),
        Op::Published(p) => one(p.ino),
        Op::Hello(_) | Op::Prove(_) | Op::Heartbeat(_) | Op::Goodbye(_) | Op::NodeInfo(_) => one(0),
        Op::StatFs(_) | Op::Materialize(_) | Op::SyncMeta(_) | Op::Pair(_) | Op::Copies(_) => {
            one(0)
        }
        // It speaks of a lease, not of the inode.
        Op::Cancel(_) | Op::Returned(_) => one(0),
        // What is coupled is not forgotten.
        Op::Await(_) | Op::Leave(_) | Op::Join(_) => one(0),
    }
}

impl Core {
    /// Notes that a request uses what it names. Those of them that are forgotten must be found
    /// ([`Core::find_again`]) before the request is done.
    pub fn note_use(&self, op: &Op) -> Vec<Ino> {
        let named = named(op);
        let mut gone = Vec::new();
        if named[0] == 0 {
            return gone;
        }
        let state = self.state();
        for ino in named.into_iter().filter(|ino| *ino != 0).map(Ino) {
            let Some(inode) = state.ns.get(ino) else {
                gone.extend(state.ns.place(ino).map(|_| ino));
                continue;
            };
            if inode.is_dir() {
                self.forgetting.used(ino);
            }
            inode.links.iter().for_each(|link| self.forgetting.used(link.parent));
        }
        gone
    }

    /// Finds a forgotten inode by the name that it had. ESTALE when it is not there any more.
    pub async fn find_again(&self, ino: Ino) -> Result<(), Errno> {
        let mut way = Vec::new();
        {
            let state = self.state();
            let mut at = ino;
            while state.ns.get(at).is_none() && way.len() < DEPTH_MAX {
                let Some(place) = state.ns.place(at) else { return Err(Errno::ESTALE) };
                way.push((at, place.clone()));
                at = place.parent;
            }
        }
        for (ino, link) in way.into_iter().rev() {
            self.forgetting.used(link.parent);
            let looked = self.look_again(link.parent, &link.name).await;
            let mut state = self.state();
            match looked {
                _ if state.ns.get(ino).is_some() => {}
                // The backing has another object there, or nothing.
                Ok(()) | Err(Errno::ENOENT | Errno::ESTALE | Errno::ENOTDIR) => {
                    state.ns.drop_place(ino);
                    return Err(Errno::ESTALE);
                }
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Keeps the number of inodes near the bound, for ever.
    pub async fn keep_small(&self) {
        loop {
            tokio::time::sleep(TICK).await;
            self.forgetting.tick.fetch_add(1, Relaxed);
            let began = Instant::now();
            if let Some(false) = self.forget_some().await {
                tokio::time::sleep(began.elapsed() * REST).await;
            }
        }
    }

    /// As if a while had passed.
    #[cfg(test)]
    pub fn grow_old(&self) {
        self.forgetting.tick.fetch_add(2, Relaxed);
    }

    /// Forgets until there are fewer than the bound again by an eighth of it. `None`: there are not too many;
    /// false: that was hardly possible.
    pub async fn forget_some(&self) -> Option<bool> {
        let max = self.forgetting.max;
        let have = self.state().ns.len();
        if have <= max {
            return None;
        }
        let wanted = have - (max - max / 8);
        let mut done = 0;
        for dir in self.forgetting.in_order() {
            let mut after = None;
            loop {
                let (went, next) = self.forget_in(dir, after.as_ref()).await;
                done += went;
                after = next;
                if after.is_none() || done >= wanted {
                    break;
                }
                tokio::task::yield_now().await;
            }
            if done >= wanted {
                break;
            }
        }
        tracing::debug!(have, done, wanted, "inodes forgotten");
        Some(done >= wanted / 4)
    }

    /// Forgets some of what is in a directory, and says after which name to go on.
    async fn forget_in(
        &self,
        dir: Ino,
        after: Option<&ebb_types::Name>,
    ) -> (usize, Option<ebb_types::Name>) {
        let _turn = self.turn().await;
        let mut state = self.state();
        if state.ns.get(dir).is_none() {
            self.forgetting.used.lock().remove(&dir);
            return (0, None);
        }
        // Somebody came while others were looked through.
        if !self.forgetting.is_old(dir) {
            return (0, None);
        }
        let (mut inos, next) = state.ns.forgettable_in(dir, after, BATCH);
        inos.retain(|ino| {
            state.is_forgettable(*ino) && !self.is_busy(*ino) && self.forgetting.is_old(*ino)
        });
        inos.sort_unstable();
        inos.dedup();
        let entries: Vec<Entry> =
            inos.iter().map(|ino| Entry::Ns(Record::Forget { ino: *ino })).collect();
        self.commit(&mut state, &entries);
        let mut used = self.forgetting.used.lock();
        inos.iter().for_each(|ino| {
            used.remove(ino);
        });
        self.forgetting.forgotten.fetch_add(inos.len() as u64, Relaxed);
        (inos.len(), next)
    }
}
