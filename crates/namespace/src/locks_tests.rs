//! The lock table against a table of single bytes that checks every answer by brute force.

use super::*;
use proptest::prelude::*;

const BYTES: u64 = 12;
const FILE: Ino = Ino(5);
const OTHER: Ino = Ino(6);

#[derive(Clone, Debug)]
enum Act {
    Set { file: bool, lock: (u8, u8, u8, bool), wait: bool },
    Unlock { file: bool, owner: u8, range: (u8, u8) },
    Cancel(usize),
    ReleaseOwner { file: bool, owner: u8 },
    ReleaseNode(u8),
}

fn act() -> impl Strategy<Value = Act> {
    let range = (0u8..12, 1u8..6);
    prop_oneof![
        6 => (any::<bool>(), 0u8..5, range.clone(), any::<bool>(), any::<bool>()).prop_map(
            |(file, o, (s, n), w, wait)| Act::Set { file, lock: (o, s, n, w), wait }
        ),
        3 => (any::<bool>(), 0u8..5, range)
            .prop_map(|(file, owner, range)| Act::Unlock { file, owner, range }),
        1 => any::<prop::sample::Index>().prop_map(|i| Act::Cancel(i.index(64))),
        1 => (any::<bool>(), 0u8..5).prop_map(|(file, owner)| Act::ReleaseOwner { file, owner }),
        1 => (0u8..2).prop_map(Act::ReleaseNode),
    ]
}

fn owner(o: u8) -> Owner {
    Owner { node: NodeId(u32::from(o % 2)), id: u64::from(o) }
}

fn ino(file: bool) -> Ino {
    if file { FILE } else { OTHER }
}

/// Bytes and waiting requests, the obvious way.
#[derive(Default)]
struct Reference {
    bytes: BTreeMap<(Ino, u64, Owner), Kind>,
    waiting: Vec<(Ticket, Ino, Lock)>,
}

impl Reference {
    fn blockers(&self, ino: Ino, wanted: &Lock) -> BTreeSet<Owner> {
        let hit = |((i, b, o), k): (&(Ino, u64, Owner), &Kind)| {
            (*i == ino
                && wanted.range.contains_offset(*b)
                && *o != wanted.owner
                && (*k == Kind::Write || wanted.kind == Kind::Write))
                .then_some(*o)
        };
        self.bytes.iter().filter_map(hit).collect()
    }

    fn take(&mut self, ino: Ino, lock: &Lock) {
        assert!(self.blockers(ino, lock).is_empty(), "granted against another's lock: {lock:?}");
        for b in lock.range.to_std().take_while(|b| *b < 64) {
            self.bytes.insert((ino, b, lock.owner), lock.kind);
        }
    }

    fn give(&mut self, ino: Ino, owner: Owner, range: ByteRange) {
        self.bytes.retain(|(i, b, o), _| !(*i == ino && *o == owner && range.contains_offset(*b)));
    }

    fn granted(&mut self, granted: &[Granted]) {
        for g in granted {
            let at = self.waiting.iter().position(|(t, ..)| *t == g.ticket);
            let (_, ino, lock) = self.waiting.remove(at.expect("only who waits is granted"));
            assert_eq!((ino, lock), (g.ino, g.lock));
            self.take(ino, &lock);
        }
    }

    fn holds_any(&self, owner: Owner) -> bool {
        self.bytes.keys().any(|(_, _, o)| *o == owner)
    }

    fn would_deadlock(&self, ino: Ino, wanted: &Lock) -> bool {
        let mut reached = self.blockers(ino, wanted);
        loop {
            let more: BTreeSet<Owner> = self
                .waiting
                .iter()
                .filter(|(_, _, l)| reached.contains(&l.owner))
                .flat_map(|(_, i, l)| self.blockers(*i, l))
                .collect();
            let before = reached.len();
            reached.extend(more);
            if reached.len() == before {
                return reached.contains(&wanted.owner);
            }
        }
    }

    /// Nobody waits who could have the lock; nobody got past an earlier one without right.
    fn check_waiting(&self) {
        for (at, (_, ino, lock)) in self.waiting.iter().enumerate() {
            let free = self.blockers(*ino, lock).is_empty();
            let behind = self.waiting[..at].iter().any(|(_, i, l)| i == ino && l.conflicts(lock));
            let queued = behind && !self.holds_any(lock.owner);
            assert!(!free || queued, "{lock:?} waits for nothing");
        }
    }

    fn check_held(&self, table: &LockTable) {
        let mut bytes = BTreeMap::new();
        for (ino, _, lock) in table.held() {
            for b in lock.range.to_std() {
                let twice = bytes.insert((ino, b, lock.owner), lock.kind);
                assert_eq!(twice, None, "an owner holds a byte once");
            }
        }
        assert_eq!(bytes, self.bytes);
    }
}

fn step(table: &mut LockTable, r: &mut Reference, act: &Act, ticket: Ticket) {
    match act {
        Act::Set { file, lock: (o, start, len, write), wait } => {
            let kind = if *write { Kind::Write } else { Kind::Read };
            let range = ByteRange::new(u64::from(*start), u64::from(start + len).min(BYTES));
            if range.is_empty() {
                return;
            }
            let lock = Lock { owner: owner(*o), pid: 1, range, kind };
            let (i, blocked) = (ino(*file), !r.blockers(ino(*file), &lock).is_empty());
            assert_eq!(table.conflict(i, Space::Posix, &lock).is_some(), blocked);
            let deadlock = blocked && *wait && r.would_deadlock(i, &lock);
            match table.set(i, Space::Posix, lock, wait.then_some(ticket)) {
                Outcome::Granted(others) => {
                    r.take(i, &lock);
                    r.granted(&others);
                }
                Outcome::Conflict(held) => {
                    assert!(blocked && !wait && r.blockers(i, &lock).contains(&held.owner));
                }
                Outcome::Waiting => {
                    assert!(*wait && !deadlock);
                    r.waiting.push((ticket, i, lock));
                }
                Outcome::Deadlock => assert!(deadlock),
            }
        }
        Act::Unlock { file, owner: o, range: (start, len) } => {
            let range = ByteRange::at(u64::from(*start), u64::from(*len));
            r.give(ino(*file), owner(*o), range);
            let granted = table.unlock(ino(*file), Space::Posix, owner(*o), range);
            r.granted(&granted);
        }
        Act::Cancel(i) if r.waiting.is_empty() => {
            assert_eq!(table.cancel(Ticket(1_000_000 + *i as u64)), None);
        }
        Act::Cancel(i) => {
            let (t, ..) = r.waiting.remove(i % r.waiting.len());
            let granted = table.cancel(t).expect("it waited");
            r.granted(&granted);
        }
        Act::ReleaseOwner { file, owner: o } => {
            let (gone, granted) = table.release_owner(ino(*file), Space::Posix, owner(*o));
            let mine = |(_, i, l): &(Ticket, Ino, Lock)| *i == ino(*file) && l.owner == owner(*o);
            assert_eq!(gone.len(), r.waiting.iter().filter(|w| mine(w)).count());
            r.waiting.retain(|w| !mine(w));
            r.give(ino(*file), owner(*o), ByteRange::ALL);
            r.granted(&granted);
        }
        Act::ReleaseNode(n) => {
            let node = NodeId(u32::from(*n));
            let (gone, granted) = table.release_node(node);
            let mine = |l: &Lock| l.owner.node == node;
            assert_eq!(gone.len(), r.waiting.iter().filter(|w| mine(&w.2)).count());
            r.waiting.retain(|w| !mine(&w.2));
            r.bytes.retain(|(_, _, o), _| o.node != node);
            r.granted(&granted);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    #[test]
    fn every_answer_is_what_single_bytes_say(acts in prop::collection::vec(act(), 1..60)) {
        let (mut table, mut r) = (LockTable::new(), Reference::default());
        for (i, act) in acts.iter().enumerate() {
            step(&mut table, &mut r, act, Ticket(i as u64));
            r.check_held(&table);
            r.check_waiting();
        }
        // What is held is all that has to be kept.
        let mut again = LockTable::new();
        for (ino, space, lock) in table.held() {
            again.force(ino, space, lock);
        }
        prop_assert_eq!(again.held().collect::<Vec<_>>(), table.held().collect::<Vec<_>>());
    }
}

fn lock(o: u8, start: u64, end: u64, kind: Kind) -> Lock {
    Lock { owner: owner(o), pid: 7, range: ByteRange::new(start, end), kind }
}

#[test]
fn flock_and_fcntl_do_not_see_each_other() {
    let mut t = LockTable::new();
    let all = lock(1, 0, u64::MAX, Kind::Write);
    assert_eq!(t.set(FILE, Space::Posix, all, None), Outcome::Granted(vec![]));
    let other = lock(2, 0, u64::MAX, Kind::Write);
    assert_eq!(t.set(FILE, Space::Flock, other, None), Outcome::Granted(vec![]));
    assert_eq!(t.set(FILE, Space::Posix, other, None), Outcome::Conflict(all));
}

#[test]
fn readers_do_not_starve_a_writer() {
    let mut t = LockTable::new();
    t.set(FILE, Space::Posix, lock(1, 0, 9, Kind::Read), None);
    let writer = lock(2, 0, 9, Kind::Write);
    assert_eq!(t.set(FILE, Space::Posix, writer, Some(Ticket(1))), Outcome::Waiting);
    let late = lock(3, 0, 9, Kind::Read);
    assert_eq!(t.set(FILE, Space::Posix, late, Some(Ticket(2))), Outcome::Waiting);
    let first = t.unlock(FILE, Space::Posix, owner(1), ByteRange::ALL);
    assert_eq!(first.iter().map(|g| g.ticket).collect::<Vec<_>>(), [Ticket(1)]);
    let second = t.unlock(FILE, Space::Posix, owner(2), ByteRange::ALL);
    assert_eq!(second.iter().map(|g| g.ticket).collect::<Vec<_>>(), [Ticket(2)]);
}

#[test]
fn a_circle_of_waiting_is_refused() {
    let mut t = LockTable::new();
    t.set(FILE, Space::Posix, lock(1, 0, 4, Kind::Write), None);
    t.set(OTHER, Space::Posix, lock(2, 0, 4, Kind::Write), None);
    let one = lock(1, 0, 4, Kind::Write);
    assert_eq!(t.set(OTHER, Space::Posix, one, Some(Ticket(1))), Outcome::Waiting);
    let two = lock(2, 0, 4, Kind::Write);
    assert_eq!(t.set(FILE, Space::Posix, two, Some(Ticket(2))), Outcome::Deadlock);
    assert_eq!(t.drop_file(OTHER), [Ticket(1)]);
    assert!(t.holds_any(owner(1).node));
}
