//! What the kernel holds of a daemon and the daemon must know again: open files with the owners
//! of their locks, and where the last appends went. Slots of four words; the first one is written
//! last, so a slot is whole or not there.

use super::area::{APPENDS, APPENDS_AT, APPENDS_KEPT, Area, SLOTS, SLOTS_AT, SLOTS_USED};
use ebb_locks::Mutex;
use ebb_types::{Access, ByteRange, Ino};
use std::collections::HashMap;
use std::sync::Arc;

const FREE: u64 = 0;
/// Handle, inode, the request that opened it; how it was opened is in the upper bits of the kind.
const OPEN: u64 = 1;
/// Handle, owner of record locks.
const RECORD_OWNER: u64 = 2;
/// Handle, owner of a flock.
const FLOCK_OWNER: u64 = 3;
/// Handle whose locks were given up.
const BROKEN: u64 = 5;
/// An append: inode, offset, and the request; its length is in the upper bits of the kind.
const APPEND: u64 = 4;

/// The part of the first word that says what a slot is.
const KIND: u64 = 0xff;

/// How a file was opened, above the kind. Nothing there: whoever wrote it did not tell.
fn access_to_bits(access: Option<Access>) -> u64 {
    let bits = match access {
        None => 0,
        Some(Access::Read) => 1,
        Some(Access::Write) => 2,
        Some(Access::ReadWrite) => 3,
    };
    bits << 8
}

fn access_of_bits(word: u64) -> Option<Access> {
    match word >> 8 {
        1 => Some(Access::Read),
        2 => Some(Access::Write),
        3 => Some(Access::ReadWrite),
        _ => None,
    }
}

/// An open file of a dead daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Opened {
    /// The kernel's number of it.
    pub fh: u64,
    /// The file.
    pub ino: Ino,
    /// The request that opened it.
    pub request: u64,
    /// How.
    pub access: Option<Access>,
    /// Who locked records through it.
    pub record_owners: Vec<u64>,
    /// Who holds it as a whole; 0: nobody.
    pub flock_owner: u64,
    /// Its locks were given up: what comes through it fails.
    pub broken: bool,
}

/// Where an append went that may be unanswered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// The request.
    pub request: u64,
    /// The file.
    pub ino: Ino,
    /// Its bytes.
    pub range: ByteRange,
}

impl Placed {
    /// In place of a range: the append went to the node at which the file sits, and whether it was
    /// done there is not known. No append ends here, because no file is that long.
    pub fn sent_on() -> ByteRange {
        ByteRange::at(i64::MAX as u64 - 1, 1)
    }

    /// See [`Placed::sent_on`].
    pub fn is_sent_on(&self) -> bool {
        self.range == Placed::sent_on()
    }
}

/// The slots of a running daemon.
pub struct Table {
    area: Arc<Area>,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    free: Vec<usize>,
    /// Slots ever used.
    used: usize,
    of: HashMap<u64, Vec<usize>>,
}

impl Table {
    /// Goes on with the slots that are there.
    pub fn new(area: Arc<Area>) -> Table {
        let used = (area.get(SLOTS_USED) as usize).min(SLOTS);
        let mut inner = Inner { used, ..Inner::default() };
        for slot in 0..used {
            match area.get(SLOTS_AT + 4 * slot) & KIND {
                OPEN | RECORD_OWNER | FLOCK_OWNER | BROKEN => {
                    let fh = area.get(SLOTS_AT + 4 * slot + 1);
                    inner.of.entry(fh).or_default().push(slot);
                }
                _ => inner.free.push(slot),
            }
        }
        Table { area, inner: Mutex::new(inner) }
    }

    /// A file is open. False when there is no room: then it does not outlive the daemon.
    pub fn opened(&self, fh: u64, ino: Ino, request: u64, access: Option<Access>) -> bool {
        self.put(OPEN | access_to_bits(access), fh, ino.0, request)
    }

    /// Somebody locked records of a file, or the whole of it.
    pub fn locked(&self, fh: u64, owner: u64, flock: bool) -> bool {
        self.put_once(if flock { FLOCK_OWNER } else { RECORD_OWNER }, fh, owner)
    }

    /// The locks of a handle were given up.
    pub fn broken(&self, fh: u64) -> bool {
        self.put_once(BROKEN, fh, 0)
    }

    fn put_once(&self, kind: u64, fh: u64, owner: u64) -> bool {
        let known = |slot: &usize| {
            let at = SLOTS_AT + 4 * slot;
            (self.area.get(at), self.area.get(at + 2)) == (kind, owner)
        };
        if self.inner.lock().of.get(&fh).is_some_and(|slots| slots.iter().any(known)) {
            return true;
        }
        self.put(kind, fh, owner, 0)
    }

    /// An owner has no locks of this file any more that were taken through this handle.
    pub fn unlocked(&self, fh: u64, owner: u64, flock: bool) {
        let kind = if flock { FLOCK_OWNER } else { RECORD_OWNER };
        let mut inner = self.inner.lock();
        let Some(slots) = inner.of.get_mut(&fh) else { return };
        let theirs = |slot: &mut usize| {
            let at = SLOTS_AT + 4 * *slot;
            (self.area.get(at), self.area.get(at + 2)) == (kind, owner)
        };
        let gone: Vec<usize> = slots.extract_if(.., theirs).collect();
        for slot in gone {
            self.area.set(SLOTS_AT + 4 * slot, FREE);
            inner.free.push(slot);
        }
    }

    /// A handle is gone, with all that belongs to it.
    pub fn closed(&self, fh: u64) {
        let mut inner = self.inner.lock();
        // What belongs to it goes first.
        for slot in inner.of.remove(&fh).unwrap_or_default().into_iter().rev() {
            self.area.set(SLOTS_AT + 4 * slot, FREE);
            inner.free.push(slot);
        }
    }

    fn put(&self, kind: u64, fh: u64, second: u64, third: u64) -> bool {
        let mut inner = self.inner.lock();
        let slot = match inner.free.pop() {
            Some(slot) => slot,
            None if inner.used < SLOTS => {
                inner.used += 1;
                self.area.set(SLOTS_USED, inner.used as u64);
                inner.used - 1
            }
            None => return false,
        };
        inner.of.entry(fh).or_default().push(slot);
        let at = SLOTS_AT + 4 * slot;
        self.area.set(at + 1, fh);
        self.area.set(at + 2, second);
        self.area.set(at + 3, third);
        self.area.set(at, kind);
        true
    }

    /// An append of a request is going to be stored at `range`. Called before the bytes are, under
    /// the lock that gives it its place.
    pub fn append(&self, request: u64, ino: Ino, range: ByteRange) {
        // The lock keeps the order in the ring.
        let _order = self.inner.lock();
        let count = self.area.get(APPENDS);
        let at = APPENDS_AT + 4 * (count as usize % APPENDS_KEPT);
        self.area.set(at, FREE);
        self.area.set(at + 1, ino.0);
        self.area.set(at + 2, range.start());
        self.area.set(at + 3, request);
        self.area.set(at, APPEND | (range.len() << 8));
        self.area.set(APPENDS, count + 1);
    }
}

/// The open files of a dead daemon, by handle.
pub(crate) fn opened(area: &Area) -> Vec<Opened> {
    let used = (area.get(SLOTS_USED) as usize).min(SLOTS);
    let slots = || (0..used).map(|slot| SLOTS_AT + 4 * slot);
    let mut found: HashMap<u64, Opened> = HashMap::new();
    for at in slots().filter(|at| area.get(*at) & KIND == OPEN) {
        let (fh, ino, request) = (area.get(at + 1), Ino(area.get(at + 2)), area.get(at + 3));
        let (record_owners, flock_owner, broken) = (Vec::new(), 0, false);
        let access = access_of_bits(area.get(at));
        let opened = Opened { fh, ino, request, access, record_owners, flock_owner, broken };
        found.insert(fh, opened);
    }
    for at in slots() {
        let owner = area.get(at + 2);
        match (area.get(at), found.get_mut(&area.get(at + 1))) {
            (RECORD_OWNER, Some(file)) => file.record_owners.push(owner),
            (FLOCK_OWNER, Some(file)) => file.flock_owner = owner,
            (BROKEN, Some(file)) => file.broken = true,
            _ => {}
        }
    }
    let mut all: Vec<Opened> = found.into_values().collect();
    all.sort_unstable_by_key(|o| o.fh);
    all
}

/// The last appends of a dead daemon, oldest first.
pub(crate) fn placed(area: &Area) -> Vec<Placed> {
    let count = area.get(APPENDS);
    let kept = count.min(APPENDS_KEPT as u64);
    let one = |nth: u64| {
        let at = APPENDS_AT + 4 * (nth as usize % APPENDS_KEPT);
        let (kind, start) = (area.get(at), area.get(at + 2));
        let end = start.checked_add(kind >> 8).filter(|end| *end <= i64::MAX as u64)?;
        (kind & 0xff == APPEND).then(|| Placed {
            request: area.get(at + 3),
            ino: Ino(area.get(at + 1)),
            range: ByteRange::new(start, end),
        })
    };
    // One that was under way may be behind the count.
    (count - kept..=count).filter_map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn area() -> Arc<Area> {
        Arc::new(Area::open(&Area::create().unwrap()).unwrap())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn the_next_daemon_finds_exactly_what_is_open(
            steps in prop::collection::vec((0_u8..6, 1_u64..12, 1_u64..5), 1..120),
        ) {
            let area = area();
            let mut table = Table::new(Arc::clone(&area));
            let mut model: BTreeMap<u64, Opened> = BTreeMap::new();
            for (step, fh, n) in steps {
                match step {
                    0 if !model.contains_key(&fh) => {
                        let access = [None, Some(Access::Read), Some(Access::Write), Some(Access::ReadWrite)];
                        let access = access[n as usize % 4];
                        prop_assert!(table.opened(fh, Ino(n), 2 * n, access));
                        let (record_owners, flock_owner, broken) = (Vec::new(), 0, false);
                        let (ino, request) = (Ino(n), 2 * n);
                        let o = Opened { fh, ino, request, access, record_owners, flock_owner, broken };
                        model.insert(fh, o);
                    }
                    1 => if let Some(o) = model.get_mut(&fh) {
                        prop_assert!(table.locked(fh, n, false));
                        if !o.record_owners.contains(&n) { o.record_owners.push(n); }
                    },
                    3 => {
                        table.unlocked(fh, n, false);
                        if let Some(o) = model.get_mut(&fh) {
                            o.record_owners.retain(|owner| *owner != n);
                        }
                    }
                    4 => if let Some(o) = model.get_mut(&fh) {
                        prop_assert!(table.broken(fh));
                        o.broken = true;
                    },
                    2 => {
                        table.closed(fh);
                        model.remove(&fh);
                    }
                    // Killed, and begun again.
                    _ => table = Table::new(Arc::clone(&area)),
                }
                let mut found = opened(&area);
                found.iter_mut().for_each(|o| o.record_owners.sort_unstable());
                let mut wanted: Vec<Opened> = model.values().cloned().collect();
                wanted.iter_mut().for_each(|o| o.record_owners.sort_unstable());
                prop_assert_eq!(found, wanted);
            }
        }
    }

    #[test]
    fn the_last_appends_are_known_in_order() {
        let area = area();
        let table = Table::new(Arc::clone(&area));
        assert_eq!(placed(&area), vec![]);
        let append = |i: u64| {
            let range = ByteRange::at(i * 10, 10);
            table.append(i, Ino(3), range);
            Placed { request: i, ino: Ino(3), range }
        };
        let all: Vec<Placed> = (0..APPENDS_KEPT as u64 + 5).map(append).collect();
        let found = placed(&area);
        assert_eq!(&found[..found.len() - 1], &all[5..]);
    }
}
