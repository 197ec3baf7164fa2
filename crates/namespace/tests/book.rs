//! Whatever nodes do to names, what all their books say together is what the service knows and the
//! backing does not; and so is what is left of it after moments were settled.

#![allow(clippy::unwrap_used)]

use ebb_namespace::*;
use ebb_types::facts::Facts;
use ebb_types::{FileKind, Ino, Name, Time};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const NOW: Time = Time { sec: 100, nsec: 0 };
const NODES: usize = 3;

#[derive(Clone, Debug)]
enum Act {
    Make(u8, u8, u8),
    Link(u8, u8, u8),
    Rename(u8, u8, u8, u8),
    Remove(u8, u8),
    Chmod(u8, u32),
    /// It reaches the backing.
    Publish(u8),
    /// A node hears what is settled.
    Settle,
    /// A node writes its journal anew and reads it.
    Reopen,
}

fn act() -> impl Strategy<Value = (usize, Act)> {
    let b = any::<u8>;
    let act = prop_oneof![
        4 => (b(), b(), b()).prop_map(|(a, b, c)| Act::Make(a, b, c)),
        1 => (b(), b(), b()).prop_map(|(a, b, c)| Act::Link(a, b, c)),
        3 => (b(), b(), b(), b()).prop_map(|(a, b, c, d)| Act::Rename(a, b, c, d)),
        2 => (b(), b()).prop_map(|(a, b)| Act::Remove(a, b)),
        1 => (b(), 0..0o777u32).prop_map(|(a, p)| Act::Chmod(a, p)),
        2 => b().prop_map(Act::Publish),
        1 => Just(Act::Settle),
        1 => Just(Act::Reopen),
    ];
    (0..NODES, act)
}

struct World {
    ns: Namespace,
    now: u64,
    horizon: Horizon,
    books: Vec<Book>,
    objects: u64,
    /// All inodes that were ever made.
    ever: BTreeSet<Ino>,
}

fn seen(ino: u64) -> Seen {
    let key = BackingKey { dev: 1, ino };
    Seen { key, size: 0, nlink: 2, mtime: NOW, ctime: NOW }
}

fn name(n: u8) -> Name {
    Name::new(format!("n{}", n % 5).as_bytes()).unwrap()
}

impl World {
    fn new() -> World {
        let (kind, seen) = (FileKind::Directory, seen(2));
        let root =
            Found { kind, perm: 0o755, uid: 0, gid: 0, rdev: 0, atime: NOW, seen, target: None };
        let ns = Namespace::new(&root, Ino(100));
        let books = vec![Book::default(); NODES];
        let ever = BTreeSet::new();
        World { ns, now: 1, horizon: Horizon::default(), books, objects: 1000, ever }
    }

    fn is_named(&self, ino: Ino) -> bool {
        self.ns.get(ino).is_some_and(|i| !i.links.is_empty())
    }

    fn apply(&mut self, plan: &Plan) {
        for step in &plan.steps {
            for record in &step.records {
                self.ns.apply(record).unwrap();
                self.now += 1;
            }
            self.ever.extend(self.ns.inodes().map(|i| i.ino).filter(|ino| *ino != Ino::ROOT));
            for r in &step.restat {
                if self.ns.get(r.ino).is_none() {
                    continue;
                }
                let known = self.ns.get(r.ino).unwrap().seen;
                self.objects += u64::from(known.is_none());
                let seen = Some(known.unwrap_or_else(|| seen(self.objects)));
                self.ns.apply(&Record::Seen { ino: r.ino, seen }).unwrap();
            }
        }
    }

    fn pick(&self, n: u8, which: impl Fn(&Inode) -> bool) -> Option<Ino> {
        let all: BTreeSet<Ino> = self.ns.inodes().filter(|i| which(i)).map(|i| i.ino).collect();
        all.iter().nth(n as usize % all.len().max(1)).copied()
    }

    fn dir(&self, n: u8) -> Ino {
        self.pick(n, |i| i.is_dir() && (i.ino == Ino::ROOT || !i.links.is_empty())).unwrap()
    }

    /// What a service tells of these names, and of the inodes that had or have them.
    fn tell(&mut self, node: usize, names: &[(Ino, Name)], mut inos: BTreeSet<Ino>) {
        let mut facts = Facts { settled: self.horizon.settled(), ..Facts::default() };
        for (parent, name) in names {
            let fact = self.ns.name_fact(self.now, *parent, name);
            inos.extend(fact.bound.map(|b| b.ino));
            facts.names.push(fact);
        }
        facts.inodes =
            inos.iter().map(|ino| self.ns.inode_fact(self.now, *ino, (0, false))).collect();
        let places = self.horizon.places(&self.ns, self.now, &facts.names);
        facts.names.extend(places.names);
        facts.inodes.extend(places.inodes);
        self.books[node].hear(&facts);
        self.ask(node);
    }

    fn ask(&mut self, node: usize) {
        for dir in self.books[node].unplaced(99) {
            let chain = self.ns.chain(self.now, dir, (0, false));
            self.books[node].hear(&chain);
            self.books[node].give_up(dir);
        }
    }

    fn at(&self, parent: Ino, name: &Name) -> BTreeSet<Ino> {
        self.ns.dentry(parent, name).ok().flatten().map(|d| d.ino).into_iter().collect()
    }

    fn act(&mut self, node: usize, act: &Act) {
        match act {
            Act::Make(dir, n, kind) => {
                let (dir, name) = (self.dir(*dir), name(*n));
                let kind =
                    [FileKind::Directory, FileKind::Regular, FileKind::Symlink][*kind as usize % 3];
                let target = (kind == FileKind::Symlink).then(|| (*b"to").into());
                let new = New { kind, perm: 0o755, uid: 1, gid: 2, rdev: 0, target };
                let Ok(plan) = self.ns.plan_make(dir, &name, &new, NOW) else { return };
                self.apply(&plan);
                self.tell(node, &[(dir, name)], BTreeSet::new());
            }
            Act::Link(ino, dir, n) => {
                let Some(ino) = self.pick(*ino, |i| !i.is_dir() && !i.links.is_empty()) else {
                    return;
                };
                let (dir, name) = (self.dir(*dir), name(*n));
                let Ok(plan) = self.ns.plan_link(ino, dir, &name, NOW) else { return };
                self.apply(&plan);
                self.tell(node, &[(dir, name)], BTreeSet::new());
            }
            Act::Rename(from, n, to, m) => {
                let (from, to) = ((self.dir(*from), name(*n)), (self.dir(*to), name(*m)));
                let mut before = self.at(from.0, &from.1);
                before.extend(self.at(to.0, &to.1));
                let planned =
                    self.ns.plan_rename((from.0, &from.1), (to.0, &to.1), RenameMode::Replace, NOW);
                let Ok(plan) = planned else { return };
                self.apply(&plan);
                for dir in before.iter().filter(|i| self.ns.get(**i).is_some_and(Inode::is_dir)) {
                    self.horizon.note_moved(*dir, self.now);
                }
                self.tell(node, &[from, to], before);
            }
            Act::Remove(dir, n) => {
                let (dir, name) = (self.dir(*dir), name(*n));
                let before = self.at(dir, &name);
                let is_dir = before.first().is_some_and(|i| self.ns.get(*i).unwrap().is_dir());
                let Ok(plan) = self.ns.plan_remove(dir, &name, is_dir, NOW) else { return };
                self.apply(&plan);
                self.tell(node, &[(dir, name)], before);
            }
            Act::Chmod(ino, perm) => {
                let Some(ino) = self.pick(*ino, |i| i.ino != Ino::ROOT && !i.links.is_empty())
                else {
                    return;
                };
                let change = AttrChange { perm: Some(*perm), ..AttrChange::default() };
                self.ns.apply(&Record::Attr { ino, change }).unwrap();
                self.now += 1;
                self.tell(node, &[], BTreeSet::from([ino]));
            }
            Act::Publish(ino) => {
                let Some(ino) = self.pick(*ino, |i| i.ino != Ino::ROOT && !i.links.is_empty())
                else {
                    return;
                };
                if let Ok(plan) = self.ns.plan_publish(ino, 0, None, NOW) {
                    self.apply(&plan);
                }
            }
            Act::Settle => {
                let settled = self.horizon.look(&self.ns, self.now);
                self.books[node].hear(&Facts { settled, ..Facts::default() });
                self.ask(node);
            }
            Act::Reopen => {
                let mut again = Book::default();
                self.books[node].facts().iter().for_each(|f| again.hear(f));
                assert_eq!(again.missing(), self.books[node].missing());
                self.books[node] = again;
            }
        }
    }

    /// Path, number and permissions of all that the backing lacks.
    fn lacking(&self) -> BTreeMap<Vec<u8>, (Ino, u32)> {
        let mut out = BTreeMap::new();
        for inode in self.ns.inodes().filter(|i| self.ns.is_local(i.ino)) {
            for link in &inode.links {
                let path = self.ns.path(link.parent).unwrap().join(&link.name);
                out.insert(path.to_bytes(), (inode.ino, inode.perm));
            }
        }
        out
    }
}

fn said(book: &Book) -> BTreeMap<Vec<u8>, (Ino, u32)> {
    let (missing, astray) = book.missing();
    assert!(astray.is_empty(), "{astray:?}");
    let bytes = |path: &[Name]| path.iter().map(Name::as_bytes).collect::<Vec<_>>().join(&b'/');
    missing.iter().map(|m| (bytes(&m.path), (m.ino, m.shape.perm))).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn all_books_together_say_what_the_backing_lacks(
        acts in prop::collection::vec(act(), 1..40),
        order in Just((0..NODES).collect::<Vec<_>>()).prop_shuffle(),
    ) {
        let mut world = World::new();
        for (node, act) in &acts {
            world.act(*node, act);
        }
        let mut all = Book::default();
        order.iter().for_each(|n| all.join(&world.books[*n]));
        let lacking = world.lacking();
        let said = said(&all);
        for (path, what) in &lacking {
            prop_assert_eq!(said.get(path), Some(what), "{}", String::from_utf8_lossy(path));
        }
        // Also what was settled long ago.
        for (ino, named) in world.ever.iter().map(|ino| (*ino, world.is_named(*ino))) {
            prop_assert_eq!(all.was_removed(ino), !named, "{:?}", ino);
        }
        // What nobody told, because the backing got it by the way, may still be said to be missing: it
        // is found there.
        for (path, (ino, _)) in said.iter().filter(|(p, _)| !lacking.contains_key(*p)) {
            let path = String::from_utf8_lossy(path);
            let inode = world.ns.get(*ino);
            prop_assert!(inode.is_some_and(|i| i.home == Home::Own), "{}: {:?}", path, inode);
            let there = inode.unwrap().links.iter().any(|l| {
                let at = world.ns.path(l.parent).unwrap().join(&l.name);
                String::from_utf8_lossy(&at.to_bytes()) == path
            });
            prop_assert!(there, "{} is said, and not there", path);
        }
    }
}

#[test]
fn books_that_are_settled_are_empty() {
    let mut world = World::new();
    world.act(0, &Act::Make(0, 0, 0));
    world.act(1, &Act::Make(1, 1, 1));
    let inode = world.pick(0, |i| i.kind == FileKind::Regular).unwrap();
    assert_eq!(said(&world.books[1]).len(), 2, "the directory is known besides the file");
    assert_eq!(world.horizon.look(&world.ns, world.now), 0);
    let plan = world.ns.plan_publish(inode, 0, None, NOW).unwrap();
    world.apply(&plan);
    world.act(0, &Act::Settle);
    world.act(1, &Act::Settle);
    assert!(world.books[0].is_empty() && world.books[1].is_empty());
    // One file that never gets there holds back only what came after it.
    world.act(0, &Act::Make(0, 3, 1));
    world.act(0, &Act::Settle);
    assert!(!world.books[0].is_empty());
}

/// The node that moved the directory has forgotten it by the time when the other one is lost.
#[test]
fn where_a_directory_was_moved_is_known_by_who_makes_a_name_in_it_later() {
    for is_deep in [false, true] {
        let mut world = World::new();
        world.act(1, &Act::Make(0, 0, 0));
        if is_deep {
            world.act(1, &Act::Make(1, 3, 0));
        }
        for ino in world.ns.inodes().map(|i| i.ino).filter(|i| *i != Ino::ROOT).collect::<Vec<_>>()
        {
            let plan = world.ns.plan_publish(ino, 0, None, NOW).unwrap();
            world.apply(&plan);
        }
        world.act(0, &Act::Make(0, 4, 1));
        let waited_for = world.pick(0, |i| i.kind == FileKind::Regular).unwrap();
        world.act(2, &Act::Rename(0, 0, 0, 1));
        world.act(0, &Act::Settle);
        world.act(1, &Act::Make(1 + u8::from(is_deep), 2, 1));
        let plan = world.ns.plan_publish(waited_for, 0, None, NOW).unwrap();
        world.apply(&plan);
        world.act(2, &Act::Settle);
        assert!(world.books[2].is_empty(), "it is settled");
        world.act(0, &Act::Make(0, 0, 0));
        let mut all = Book::default();
        world.books.iter().for_each(|book| all.join(book));
        let made = if is_deep { &b"n1/n3/n2"[..] } else { b"n1/n2" };
        let said = said(&all);
        assert!(said.contains_key(made) && said.len() == 2, "{said:?}");
    }
}

/// Of so many only the newest.
#[test]
fn what_was_removed_is_remembered_when_it_is_settled_and_not_for_ever() {
    const MANY: u64 = 5_000;
    let mut book = Book::default();
    for i in 1..=MANY {
        let gone = ebb_types::facts::InodeFact { at: i, ino: Ino(10 + i), shape: None };
        book.hear(&Facts { inodes: vec![gone], settled: i, ..Facts::default() });
    }
    assert!(book.is_empty());
    let known = (1..=MANY).filter(|i| book.was_removed(Ino(10 + i))).collect::<Vec<_>>();
    assert_eq!(known, (MANY - 4095..=MANY).collect::<Vec<_>>());
    let mut other = Book::default();
    other.join(&book);
    assert!(other == book);
}

#[test]
fn directories_in_a_circle_lead_nowhere() {
    let mut book = Book::default();
    let bound = |ino| Some(ebb_types::facts::Bound { ino: Ino(ino), placed: false, replaces: 0 });
    let fact = |parent, n, ino| ebb_types::facts::NameFact {
        at: 1,
        parent: Ino(parent),
        name: name(n),
        bound: bound(ino),
    };
    book.hear(&Facts { names: vec![fact(5, 0, 6), fact(6, 1, 5)], ..Facts::default() });
    assert!(book.paths(Ino(5)).is_empty());
    book.hear(&Facts { settled: 9, ..Facts::default() });
    assert!(book.is_empty());
}

/// Every local name with what it is.
fn local_names(ns: &Namespace) -> BTreeMap<(Ino, Name), (Ino, FileKind, u32)> {
    let local = ns.inodes().filter(|i| i.home != Home::Own);
    let names = |i: &Inode| {
        let what = (i.ino, i.kind, i.perm);
        i.links.iter().map(|l| ((l.parent, l.name.clone()), what)).collect::<Vec<_>>()
    };
    local.flat_map(names).collect()
}

/// The names that files of the backing have and have not got there with; and all names of files.
fn pending_names(ns: &Namespace, all: bool) -> BTreeSet<(Ino, Name, Ino)> {
    let files = ns.inodes().filter(|i| i.kind == FileKind::Regular);
    let pending = |l: &Link| ns.dentry(l.parent, &l.name).unwrap().unwrap().under == Under::Nothing;
    let names = files.flat_map(|i| i.links.iter().map(move |l| (i, l)));
    let wanted = names.filter(|(i, l)| all || (i.home == Home::Own && pending(l)));
    wanted.map(|(i, l)| (l.parent, l.name.clone(), i.ino)).collect()
}

/// What the backing, which is as the whole world has it, says of what is to come back.
fn on_backing(world: &World, forgotten: &[Forgotten]) -> OnBacking {
    let mut there = OnBacking::default();
    for f in forgotten {
        let dentry = world.ns.dentry(f.parent, &f.name).ok().flatten();
        let object = dentry.filter(|d| d.under == Under::This).and_then(|d| world.ns.get(d.ino));
        there.note(f, object.and_then(|i| Some((i.kind, i.seen?))), None);
    }
    there
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// A service forgets the end; what all nodes have heard brings back what the backing does not have.
    #[test]
    fn names_that_were_forgotten_come_back(
        acts in prop::collection::vec(act(), 1..40),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut world = World::new();
        let cut = cut.index(acts.len());
        acts[..cut].iter().for_each(|(node, act)| world.act(*node, act));
        let (mut left, after) = (world.ns.clone(), world.now);
        // Of what was settled in that time nodes remember nothing: what was removed then is there again.
        let later = acts[cut..].iter().filter(|(_, act)| !matches!(act, Act::Settle));
        later.for_each(|(node, act)| world.act(*node, act));
        let mut told = Book::default();
        for book in &world.books {
            for facts in book.facts_after(after).values() {
                told.hear(facts);
            }
        }
        // What has got to the backing in that time is found there, and is not the question.
        let published = |ns: &Namespace, ino| ns.get(ino).is_some_and(|i| i.home == Home::Own);
        let first = Ino(1 << 40);
        let forgotten = left.forgotten_in(&told, after, first);
        let there = on_backing(&world, &forgotten);
        for record in left.plan_reassert(&told, after, first, &there) {
            prop_assert_eq!(left.apply(&record), Ok(()), "{:?}", record);
        }
        let whole = local_names(&world.ns);
        let mut got = local_names(&left);
        got.retain(|_, (ino, ..)| !published(&world.ns, *ino));
        prop_assert_eq!(got, whole);
        let (pending, all) = (pending_names(&left, false), pending_names(&world.ns, true));
        prop_assert!(pending.is_subset(&all), "{:?}, {:?}", pending, all);
        let is_known = |ino: &Ino| left.get(*ino).is_some();
        for (parent, name, ino) in pending_names(&world.ns, false) {
            let got = left.dentry(parent, &name).ok().flatten().map(|d| d.ino);
            prop_assert!(got == Some(ino) || !is_known(&ino), "{:?} {:?}: {:?}", parent, name, got);
        }
        // And again: nothing changes.
        let before = left.snapshot();
        let there = on_backing(&world, &left.forgotten_in(&told, after, first));
        for record in left.plan_reassert(&told, after, first, &there) {
            prop_assert!(matches!(record, Record::Attr { .. }), "{:?}", record);
            left.apply(&record).unwrap();
        }
        prop_assert_eq!(left.snapshot(), before);
    }

    /// A service has nothing at all; what all nodes have heard, and the backing, bring it back.
    #[test]
    fn names_come_back_to_a_service_that_has_nothing(
        acts in prop::collection::vec(act(), 1..40),
    ) {
        let mut world = World::new();
        acts.iter().for_each(|(node, act)| world.act(*node, act));
        let mut left = World::new().ns;
        let mut told = Book::default();
        for book in &world.books {
            book.facts_after(0).values().for_each(|facts| told.hear(facts));
        }
        // Some may have forgotten what others say, because it is not so any more.
        let settled = world.books.iter().map(Book::settled).max().unwrap_or_default();
        told.hear(&Facts { settled, ..Facts::default() });
        loop {
            let dirs = left.directories_in(&told);
            let before = left.inodes().count();
            for (parent, name, ino) in dirs {
                let path = left.path(parent).unwrap().join(&name);
                let found = on_disk(&world.ns, &path).filter(|f| f.kind == FileKind::Directory);
                let plan = found.map(|f| left.plan_known(parent, &name, ino, &f));
                for record in plan.unwrap_or_default() {
                    prop_assert_eq!(left.apply(&record), Ok(()), "{:?}", record);
                }
            }
            if left.inodes().count() == before {
                break;
            }
        }
        let first = Ino(1 << 40);
        let mut there = OnBacking::default();
        for f in left.forgotten_in(&told, 0, first) {
            let Some(dir) = left.path(f.parent) else { continue };
            let object = on_disk(&world.ns, &dir.join(&f.name));
            there.note(&f, object.map(|found| (found.kind, found.seen)), None);
        }
        for record in left.plan_reassert(&told, 0, first, &there) {
            prop_assert_eq!(left.apply(&record), Ok(()), "{:?}", record);
        }
        let published = |ino| world.ns.get(ino).is_some_and(|i| i.home == Home::Own);
        let mut got = local_names(&left);
        got.retain(|_, (ino, ..)| !published(*ino));
        prop_assert_eq!(got, local_names(&world.ns));
    }
}

/// What the backing has at this path.
fn on_disk(ns: &Namespace, path: &BackingPath) -> Option<Found> {
    let mut at = Ino::ROOT;
    for name in path.names() {
        at = ns.dentry(at, name).ok()?.filter(|d| d.under == Under::This)?.ino;
    }
    let i = ns.get(at).filter(|i| i.home == Home::Own)?;
    Some(Found {
        kind: i.kind,
        perm: i.perm,
        uid: i.uid,
        gid: i.gid,
        rdev: i.rdev,
        atime: i.atime,
        seen: i.seen?,
        target: i.target.clone(),
    })
}
