//! Rules that only a look at plans and records shows: what is inherited, what happens on the
//! backing and in which order, and that a snapshot is the whole state. (That the rules are those
//! of the kernel is tested against the kernel, where the effects are carried out.)

#![allow(clippy::unwrap_used)]

use ebb_namespace::*;
use ebb_types::{Errno, FileKind, Ino, Name, NodeId, Time};

const NOW: Time = Time { sec: 100, nsec: 0 };
const LATER: Time = Time { sec: 200, nsec: 0 };

fn name(s: &str) -> Name {
    Name::new(s.as_bytes()).unwrap()
}

fn found(kind: FileKind, ino: u64) -> Found {
    let seen = Seen {
        key: BackingKey { dev: 1, ino },
        size: 7,
        nlink: if kind == FileKind::Directory { 2 } else { 1 },
        mtime: NOW,
        ctime: NOW,
    };
    let target = None;
    Found { kind, perm: 0o755, uid: 0, gid: 0, rdev: 0, atime: NOW, seen, target }
}

fn new(kind: FileKind) -> New {
    New { kind, perm: 0o755, uid: 1, gid: 2, rdev: 0, target: None }
}

fn root() -> Namespace {
    Namespace::new(&found(FileKind::Directory, 2), Ino(100))
}

/// Applies a plan as if everything on the backing succeeded; every object gets a new key.
fn apply(ns: &mut Namespace, plan: &Plan) {
    for step in &plan.steps {
        step.records.iter().for_each(|r| ns.apply(r).unwrap());
        for r in &step.restat {
            let kind = ns.get(r.ino).unwrap().kind;
            let key = ns.get(r.ino).unwrap().seen.map_or(1000 + r.ino.0, |s| s.key.ino);
            let seen = Some(found(kind, key).seen);
            ns.apply(&Record::Seen { ino: r.ino, seen }).unwrap();
        }
    }
}

fn make(ns: &mut Namespace, parent: Ino, n: &str, kind: FileKind) -> Ino {
    let plan = ns.plan_make(parent, &name(n), &new(kind), NOW).unwrap();
    assert!(plan.is_local());
    apply(ns, &plan);
    plan.ino.unwrap()
}

fn adopt(ns: &mut Namespace, parent: Ino, n: &str, kind: FileKind, key: u64) -> Ino {
    let f = found(kind, key);
    let plan = ns.plan_found(parent, &name(n), Some(&f), &|_| false, u64::MAX, NOW).unwrap();
    apply(ns, &plan);
    plan.ino.unwrap()
}

fn effects(plan: &Plan) -> Vec<&Effect> {
    plan.steps.iter().flat_map(|s| &s.effects).collect()
}

#[test]
fn a_setgid_directory_hands_its_group_down() {
    let mut ns = root();
    let dir = make(&mut ns, Ino::ROOT, "d", FileKind::Directory);
    let set = Change { perm: Some(0o2775), gid: Some(50), ..Change::default() };
    let plan = ns.plan_set_attr(dir, &set, NOW).unwrap();
    apply(&mut ns, &plan);
    let sub = make(&mut ns, dir, "sub", FileKind::Directory);
    let file = make(&mut ns, dir, "file", FileKind::Regular);
    let (sub, file) = (ns.get(sub).unwrap(), ns.get(file).unwrap());
    assert_eq!((sub.gid, sub.perm & 0o2000), (50, 0o2000));
    assert_eq!((file.gid, file.perm & 0o2000), (50, 0));
    assert_eq!(ns.attr(dir).unwrap().nlink, 3);
}

#[test]
fn changing_the_owner_clears_privileges() {
    let mut ns = root();
    let f = make(&mut ns, Ino::ROOT, "f", FileKind::Regular);
    let change = |ns: &mut Namespace, c: Change| {
        let plan = ns.plan_set_attr(f, &c, LATER).unwrap();
        apply(ns, &plan);
        ns.get(f).unwrap().perm
    };
    let perm = |p| Change { perm: Some(p), ..Change::default() };
    assert_eq!(change(&mut ns, perm(0o6755)), 0o6755);
    assert_eq!(change(&mut ns, Change { uid: Some(9), ..Change::default() }), 0o755);
    assert_eq!(change(&mut ns, perm(0o6745)), 0o6745);
    // Without group execution the bit means mandatory locking and stays.
    assert_eq!(change(&mut ns, Change { kill_priv: true, ..Change::default() }), 0o2745);
    assert_eq!(ns.get(f).unwrap().ctime, LATER);
}

#[test]
fn a_directory_keeps_its_bits_when_its_owner_changes() {
    let mut ns = root();
    let d = make(&mut ns, Ino::ROOT, "d", FileKind::Directory);
    for change in [
        Change { perm: Some(0o7711), ..Change::default() },
        Change { gid: Some(7), kill_priv: true, ..Change::default() },
        Change { uid: Some(7), ..Change::default() },
    ] {
        let plan = ns.plan_set_attr(d, &change, LATER).unwrap();
        apply(&mut ns, &plan);
        assert_eq!(ns.get(d).unwrap().perm, 0o7711, "{change:?}");
    }
}

#[test]
fn what_goes_to_a_local_directory_takes_it_to_the_backing() {
    let mut ns = root();
    let old = adopt(&mut ns, Ino::ROOT, "old", FileKind::Regular, 10);
    let a = make(&mut ns, Ino::ROOT, "a", FileKind::Directory);
    let b = make(&mut ns, a, "b", FileKind::Directory);
    let (from, to) = (name("old"), name("new"));
    let plan = ns.plan_rename((Ino::ROOT, &from), (b, &to), RenameMode::Replace, NOW).unwrap();
    let made: Vec<String> = effects(&plan)
        .iter()
        .filter_map(|e| match e {
            Effect::Mkdir { path, .. } => Some(format!("mkdir {path}")),
            Effect::Rename { from, to, .. } => Some(format!("rename {from} {to}")),
            _ => None,
        })
        .collect();
    assert_eq!(made, ["mkdir a", "mkdir a/b", "rename old a/b/new"]);
    apply(&mut ns, &plan);
    assert_eq!(ns.path(old).unwrap().to_bytes(), b"a/b/new");
    assert_eq!(ns.get(b).unwrap().home, Home::Own);
}

#[test]
fn publishing_is_one_rename_after_everything_else() {
    let mut ns = root();
    adopt(&mut ns, Ino::ROOT, "ckpt", FileKind::Regular, 10);
    let f = make(&mut ns, Ino::ROOT, "tmp", FileKind::Regular);
    let (from, to) = (name("tmp"), name("ckpt"));
    let plan =
        ns.plan_rename((Ino::ROOT, &from), (Ino::ROOT, &to), RenameMode::Replace, NOW).unwrap();
    assert!(effects(&plan).is_empty(), "the old checkpoint stays");
    apply(&mut ns, &plan);
    assert_eq!(ns.dentry(Ino::ROOT, &to).unwrap().unwrap().under, Under::Older);
    let plan = ns.plan_publish(f, 5, None, NOW).unwrap();
    let all = effects(&plan);
    let at = |want: fn(&Effect) -> bool| all.iter().position(|e| want(e)).unwrap();
    let rename = at(|e| matches!(e, Effect::Rename { replace: Replace::Yes, .. }));
    assert!(at(|e| matches!(e, Effect::SetSize { len: 5, .. })) < rename);
    assert!(at(|e| matches!(e, Effect::SyncFile { .. })) < rename);
    assert!(rename < at(|e| matches!(e, Effect::SyncDir { .. })));
    apply(&mut ns, &plan);
    assert_eq!(ns.get(f).unwrap().home, Home::Own);
    assert_eq!(ns.dentry(Ino::ROOT, &to).unwrap().unwrap().under, Under::This);
}

#[test]
fn two_names_of_one_backing_object_are_one_inode() {
    let mut ns = root();
    let f = found(FileKind::Regular, 10);
    let listed = [(name("a"), f.clone()), (name("b"), f)].into();
    let plan = ns.plan_listed(Ino::ROOT, &listed, &|_| false, u64::MAX, NOW).unwrap();
    apply(&mut ns, &plan);
    let ino = |n: &str| ns.dentry(Ino::ROOT, &name(n)).unwrap().unwrap().ino;
    assert_eq!(ino("a"), ino("b"));
    assert_eq!(ns.get(ino("a")).unwrap().links.len(), 2);
}

#[test]
fn a_name_that_is_to_be_replaced_counts_no_more() {
    let mut ns = root();
    let mut f = found(FileKind::Regular, 10);
    f.seen.nlink = 4;
    let listed = [(name("a"), f.clone()), (name("b"), f)].into();
    let plan = ns.plan_listed(Ino::ROOT, &listed, &|_| false, u64::MAX, NOW).unwrap();
    apply(&mut ns, &plan);
    let old = ns.dentry(Ino::ROOT, &name("b")).unwrap().unwrap().ino;
    let nlink = |ns: &Namespace| ns.attr(old).unwrap().nlink;
    assert_eq!(nlink(&ns), 4, "two are names that nobody has looked at");
    make(&mut ns, Ino::ROOT, "tmp", FileKind::Regular);
    let rename = |ns: &mut Namespace, from: &str, to: &str, mode| {
        let (from, to) = (name(from), name(to));
        let plan = ns.plan_rename((Ino::ROOT, &from), (Ino::ROOT, &to), mode, NOW).unwrap();
        apply(ns, &plan);
    };
    rename(&mut ns, "tmp", "a", RenameMode::Replace);
    // The step looks at the object again, and this test's backing says 1.
    let mut seen = found(FileKind::Regular, 10).seen;
    seen.nlink = 4;
    let look = Record::Seen { ino: old, seen: Some(seen) };
    ns.apply(&look).unwrap();
    assert_eq!(nlink(&ns), 3);
    let plan = ns.plan_link(old, Ino::ROOT, &name("c"), NOW).unwrap();
    plan.steps.iter().flat_map(|s| &s.records).for_each(|r| ns.apply(r).unwrap());
    seen.nlink = 5;
    let look = Record::Seen { ino: old, seen: Some(seen) };
    ns.apply(&look).unwrap();
    assert_eq!(nlink(&ns), 4, "one more");
    make(&mut ns, Ino::ROOT, "other", FileKind::Regular);
    rename(&mut ns, "other", "a", RenameMode::Exchange);
    rename(&mut ns, "other", "a", RenameMode::Replace);
    ns.apply(&look).unwrap();
    assert_eq!(nlink(&ns), 4);
    let mut copy = Namespace::empty();
    ns.snapshot().iter().for_each(|r| copy.apply(r).unwrap());
    assert_eq!(nlink(&copy), 4, "a snapshot knows what is hidden");
    let plan = copy.plan_remove(Ino::ROOT, &name("a"), false, NOW).unwrap();
    assert!(plan.steps.iter().flat_map(|s| &s.restat).any(|r| r.ino == old));
    seen.nlink = 4;
    plan.steps.iter().flat_map(|s| &s.records).for_each(|r| copy.apply(r).unwrap());
    copy.apply(&Record::Seen { ino: old, seen: Some(seen) }).unwrap();
    assert_eq!(nlink(&copy), 4);
}

#[test]
fn names_that_are_ours_cannot_be_made() {
    let mut ns = root();
    let part = name(".ebb-part-5");
    let made = ns.plan_make(Ino::ROOT, &part, &new(FileKind::Regular), NOW);
    assert_eq!(made.unwrap_err(), Errno::EPERM);
    make(&mut ns, Ino::ROOT, "f", FileKind::Regular);
    let f = name("f");
    let to = (Ino::ROOT, &part);
    let renamed = ns.plan_rename((Ino::ROOT, &f), to, RenameMode::Replace, NOW);
    assert_eq!(renamed.unwrap_err(), Errno::EPERM);
    assert_eq!(ns.look(Ino::ROOT, &part), Ok(Absence::Absent));
}

#[test]
fn xattrs_have_limits() {
    let mut ns = root();
    let f = make(&mut ns, Ino::ROOT, "f", FileKind::Regular);
    let set = |ns: &Namespace, n: &str, len: usize, mode| {
        ns.plan_set_xattr(f, n.as_bytes(), &vec![0; len], mode, NOW).map(drop)
    };
    use XattrMode::{Create, Either, Replace};
    assert_eq!(set(&ns, "user.a", 65_536, Either), Ok(()));
    assert_eq!(set(&ns, "user.a", 65_537, Either), Err(Errno::E2BIG));
    assert_eq!(set(&ns, "user.a", 1, Replace), Err(Errno::ENODATA));
    assert_eq!(set(&ns, "other", 1, Either), Err(Errno::EOPNOTSUPP));
    assert_eq!(set(&ns, "user.", 1, Either), Err(Errno::EOPNOTSUPP));
    assert_eq!(set(&ns, &format!("user.{}", "x".repeat(251)), 1, Either), Err(Errno::ERANGE));
    let plan = ns.plan_set_xattr(f, b"user.a", b"1", Create, NOW).unwrap();
    apply(&mut ns, &plan);
    assert_eq!(set(&ns, "user.a", 1, Create), Err(Errno::EEXIST));
    assert_eq!(ns.xattr(f, b"user.a"), Ok(XattrSource::Here(&b"1"[..])));
}

#[test]
fn a_snapshot_is_the_whole_state() {
    let mut ns = root();
    let d = adopt(&mut ns, Ino::ROOT, "d", FileKind::Directory, 5);
    let f = make(&mut ns, d, "f", FileKind::Regular);
    let plan = ns.plan_link(f, Ino::ROOT, &name("same"), NOW).unwrap();
    apply(&mut ns, &plan);
    let plan = ns.plan_set_xattr(f, b"user.a", b"1", XattrMode::Either, NOW).unwrap();
    apply(&mut ns, &plan);
    let plan = ns.plan_place(f, None, None, NOW).unwrap();
    apply(&mut ns, &plan);
    ns.plan_open(NodeId(3), f).unwrap().iter().for_each(|r| ns.apply(r).unwrap());
    let mut again = Namespace::empty();
    ns.snapshot().iter().for_each(|r| again.apply(r).unwrap());
    assert_eq!(again.snapshot(), ns.snapshot());
    assert_eq!(again.next_ino(), ns.next_ino());
    assert_eq!(again.home_path(f), ns.home_path(f));
    assert_eq!(
        again.pending_after(None).collect::<Vec<_>>(),
        ns.pending_after(None).collect::<Vec<_>>()
    );
    assert!(again.is_open_by(f, NodeId(3)));
    assert!(
        again
            .apply(&Record::Inode(Box::new(match &ns.snapshot()[1] {
                Record::Inode(i) => (**i).clone(),
                other => panic!("{other:?}"),
            })))
            .is_err(),
        "twice is not replay"
    );
}

#[test]
fn the_last_close_frees_a_nameless_file() {
    let mut ns = root();
    let f = make(&mut ns, Ino::ROOT, "f", FileKind::Regular);
    for node in [1, 2] {
        ns.plan_open(NodeId(node), f).unwrap().iter().for_each(|r| ns.apply(r).unwrap());
    }
    let plan = ns.plan_remove(Ino::ROOT, &name("f"), false, NOW).unwrap();
    apply(&mut ns, &plan);
    assert_eq!(ns.attr(f).unwrap().nlink, 0);
    ns.plan_release(NodeId(1), f).iter().for_each(|r| ns.apply(r).unwrap());
    assert!(ns.get(f).is_some());
    ns.plan_release_all(NodeId(2)).iter().for_each(|r| ns.apply(r).unwrap());
    assert!(ns.get(f).is_none());
}

#[test]
fn an_old_look_does_not_undo_what_was_done_meanwhile() {
    let mut ns = root();
    let f = adopt(&mut ns, Ino::ROOT, "f", FileKind::Regular, 10);
    let asked = ns.now_seen();
    let old = found(FileKind::Regular, 10);
    let plan = ns.plan_set_attr(f, &Change { perm: Some(0o600), ..Change::default() }, LATER);
    let plan = plan.unwrap();
    plan.steps[0].records.iter().for_each(|r| ns.apply(r).unwrap());
    let seen = Some(Seen { ctime: LATER, ..old.seen });
    ns.apply(&Record::Seen { ino: f, seen }).unwrap();
    let look = |ns: &Namespace, asked| {
        ns.plan_found(Ino::ROOT, &name("f"), Some(&old), &|_| false, asked, NOW).unwrap()
    };
    assert!(look(&ns, asked).is_empty());
    assert!(!look(&ns, ns.now_seen()).is_empty(), "a new look is believed");
}

/// The number of a file follows from the object in which it was found. When others removed that one
/// while the job had bytes for it, the file is published as another object: forgotten and found
/// again, it would have another number.
#[test]
fn a_file_that_became_another_object_is_not_forgotten() {
    let mut ns = root();
    let file = adopt(&mut ns, Ino::ROOT, "f", FileKind::Regular, 5);
    assert!(ns.is_forgettable(file));
    let other = found(FileKind::Regular, 6);
    let plan =
        ns.plan_found(Ino::ROOT, &name("f"), Some(&other), &|_| true, u64::MAX, NOW).unwrap();
    apply(&mut ns, &plan);
    assert_eq!((plan.ino, ns.get(file).unwrap().home), (Some(file), Home::None));
    let plan = ns.plan_publish(file, 7, None, NOW).unwrap();
    apply(&mut ns, &plan);
    let inode = ns.get(file).unwrap();
    assert_eq!(inode.home, Home::Own);
    assert_ne!(inode.seen.unwrap().key.ino, 5);
    assert!(!ns.is_forgettable(file), "{inode:?}");
}
