//! What was forgotten is what it was, under the same number.

use super::*;

async fn forget_all(o: &Overlay) -> u64 {
    let before = o.core.forgetting.count();
    // A directory goes when nothing below it is known any more.
    for _ in 0..4 {
        o.core.grow_old();
        let _ = o.core.forget_some().await;
    }
    o.core.forgetting.count() - before
}

fn with_overlay(work: impl AsyncFnOnce(&mut Overlay, &Path)) {
    let dir = scratch();
    let backing = dir.path().join("backing");
    populate(&backing);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut o = Overlay::open(&backing, &dir.path().join("state"));
        work(&mut o, &backing).await;
    });
}

impl Overlay {
    async fn stat(&mut self, ino: u64) -> Result<pb::Attr, Errno> {
        let get = Op::GetAttr(pb::GetAttr { ino, lease: 0, ..Default::default() });
        match self.ask(get).await.map_err(|e| e.errno)? {
            Some(Body::Entry(e)) => Ok(e.attr.unwrap()),
            other => panic!("{other:?}"),
        }
    }
}

/// a/b/c
const DEEP: &[u8] = &[0, 1, 2];

#[test]
fn a_forgotten_inode_is_found_by_its_number_also_after_a_restart() {
    with_overlay(async |o, _| {
        let file = o.find(DEEP).await.unwrap();
        let dir = o.find(&DEEP[..2]).await.unwrap();
        assert_eq!(forget_all(o).await, 3, "a, a/b and a/b/c");
        assert_eq!(o.core.state().ns.len(), 1, "only the root");
        assert_eq!(o.stat(file.ino).await.unwrap(), file);
        assert_eq!(forget_all(o).await, 3);
        o.restart();
        assert_eq!(o.core.state().ns.len(), 1, "not known again by replay");
        assert_eq!(o.stat(dir.ino).await.unwrap(), dir);
        assert_eq!(o.find(DEEP).await.unwrap(), file);
    });
}

#[test]
fn a_second_name_of_a_forgotten_file_is_the_same_file() {
    with_overlay(async |o, _| {
        let one = o.find(&[1]).await.unwrap();
        assert!(forget_all(o).await > 0);
        let other = o.find(&[0, 3]).await.unwrap();
        assert_eq!((one.ino, one.nlink), (other.ino, 2));
        assert_eq!(o.find(&[1]).await.unwrap().ino, one.ino);
    });
}

#[test]
fn what_others_did_to_a_forgotten_file_is_newer_than_what_nodes_remember() {
    with_overlay(async |o, backing| {
        let ino = Ino(o.find(DEEP).await.unwrap().ino);
        let before = o.core.state().file(ino).unwrap().version();
        assert!(forget_all(o).await > 0);
        std::fs::write(backing.join("a/b/c"), b"new content").unwrap();
        assert_eq!(o.find(DEEP).await.unwrap().ino, ino.0);
        let version = o.core.state().file(ino).unwrap().base_version();
        assert!(version > before, "{version:?} after {before:?}: old copies must not be trusted");
        o.restart();
        assert_eq!(o.core.state().file(ino).unwrap().base_version(), version);
    });
}

#[test]
fn a_number_that_is_gone_is_never_given_again() {
    with_overlay(async |o, backing| {
        let ino = o.find(DEEP).await.unwrap().ino;
        let parent = o.find(&DEEP[..2]).await.unwrap().ino;
        let unlink = pb::Unlink { parent, name: b"c".into(), ..Default::default() };
        o.ask_errno(Op::Unlink(unlink)).await.unwrap();
        assert_eq!(o.stat(ino).await, Err(Errno::ESTALE));
        // File systems give inode numbers again: this one may be the same object as far as one sees.
        for n in 0..50 {
            std::fs::write(backing.join("a/b/c"), b"another one").unwrap();
            o.core.forget_checked();
            let again = o.find(DEEP).await.unwrap().ino;
            assert_ne!(again, ino, "round {n}");
            std::fs::remove_file(backing.join("a/b/c")).unwrap();
            o.core.forget_checked();
            assert_eq!(o.find(DEEP).await, Err(Errno::ENOENT));
        }
        o.restart();
        assert!(o.core.state().ns.get(Ino(ino)).is_none());
    });
}

#[test]
fn what_is_in_use_or_changed_is_not_forgotten() {
    with_overlay(async |o, _| {
        let ino = o.find(DEEP).await.unwrap().ino;
        let open = pb::Open { ino, ..Default::default() };
        o.ask_errno(Op::Open(open)).await.unwrap();
        assert_eq!(forget_all(o).await, 0, "it is open, and the others are above it");
        o.ask_errno(Op::Release(pb::Release { ino, settles: false })).await.unwrap();
        o.write(DEEP, b"dirty").await.unwrap();
        assert_eq!(forget_all(o).await, 0, "a node owns bytes of it");
        o.make(&[0, 1, 3], libc::S_IFREG | 0o644, b"").await.unwrap();
        o.find(&[1]).await.unwrap();
        assert_eq!(forget_all(o).await, 1, "b alone is as the backing has it");
        o.check_invariants();
    });
}

#[test]
fn what_was_used_a_moment_ago_is_not_forgotten() {
    with_overlay(async |o, _| {
        o.find(DEEP).await.unwrap();
        assert_eq!(o.core.forget_some().await, Some(false));
        assert_eq!(o.core.forgetting.count(), 0);
    });
}

#[test]
fn a_listing_goes_on_where_it_was_when_its_names_are_forgotten_in_between() {
    with_overlay(async |o, backing| {
        let wanted: Vec<String> = (0..40).map(|n| format!("file-{n:03}")).collect();
        wanted.iter().for_each(|n| std::fs::write(backing.join("a/b").join(n), n).unwrap());
        std::fs::remove_file(backing.join("a/b/c")).unwrap();
        let ino = o.find(&DEEP[..2]).await.unwrap().ino;
        let (mut got, mut after) = (Vec::new(), Vec::new());
        loop {
            let op = pb::ReadDir { ino, after: after.clone(), limit: 7, ..Default::default() };
            let Ok(Some(Body::DirPage(page))) = o.ask(Op::ReadDir(op)).await else { panic!() };
            got.extend(page.items.iter().map(|i| String::from_utf8(i.name.clone()).unwrap()));
            if page.end {
                break;
            }
            after = page.items.last().unwrap().name.clone();
            assert!(forget_all(o).await > 0);
        }
        assert_eq!(got, wanted);
    });
}
