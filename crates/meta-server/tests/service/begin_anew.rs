//! Files of the backing that are cut to nothing: what is there stays until the new one is whole.

use crate::common::{ROOT, Service};
use ebb_wire::pb;
use ebb_wire::pb::reply::Body;
use ebb_wire::pb::request::Op;
use rustix::fs::XattrFlags;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

fn emptied(ino: u64) -> Op {
    Op::Open(pb::Open { ino, truncate: true, ..Default::default() })
}

fn now(ino: u64, closed: bool) -> Op {
    Op::Materialize(pb::Materialize { ino, closed, ..Default::default() })
}

fn number(path: &Path) -> u64 {
    std::fs::metadata(path).expect("stat").ino()
}

#[tokio::test]
async fn what_is_there_stays_until_the_new_one_is_whole_and_closed() {
    let s = Service::start().await;
    let there = s.backing().join("f");
    std::fs::write(&there, b"old").unwrap();
    let old = number(&there);
    let mut a = s.node("a").await;
    let ino = a.lookup(ROOT, "f").await.unwrap().ino;
    assert_eq!((a.query(ino).await.object, a.query(ino).await.replaces), (old, 0));

    let Some(Body::Opened(opened)) = a.ask(emptied(ino)).await.unwrap() else { panic!() };
    let map = opened.map.unwrap();
    assert_eq!((map.size, map.base_len, map.object, map.replaces), (0, 0, 0, old));
    assert_eq!(std::fs::read(&there).unwrap(), b"old");

    // What it knows of that is in the journal.
    let s = s.crash_and_restart(|_| {}).await;
    let mut a = s.node("a").await;
    a.open(ino).await.unwrap();
    assert_eq!(a.query(ino).await.replaces, old);
    a.attach(ino, 0, 5).await;
    let done = a.flush(&s.backing(), ino, 7).await;
    assert!(done.waits && !done.published, "{done:?}");
    assert_eq!(std::fs::read(&there).unwrap(), b"old");
    let Some(Body::Materialize(early)) = a.ask(now(ino, true)).await.unwrap() else { panic!() };
    assert_eq!((early.done, std::fs::read(&there).unwrap()), (0, b"old".to_vec()));

    a.ask(Op::Release(pb::Release { ino, settles: false })).await.unwrap();
    let Some(Body::Materialize(done)) = a.ask(now(ino, true)).await.unwrap() else { panic!() };
    assert_eq!((done.done, done.failures.len()), (1, 0));
    assert_eq!(std::fs::read(&there).unwrap(), [7; 5]);
    let map = a.query(ino).await;
    assert_eq!((map.object, map.replaces), (number(&there), 0));
    assert_ne!(map.object, old);
    assert_eq!(std::fs::read_dir(s.backing()).unwrap().count(), 1, "a part file is left");
}

/// A drain does not wait for closes, and neither does an fsync that promises the backing.
#[tokio::test]
async fn whoever_asks_for_the_backing_gets_it_while_the_file_is_open() {
    for one in [false, true] {
        let s = Service::start().await;
        let there = s.backing().join("f");
        std::fs::write(&there, b"old").unwrap();
        let mut a = s.node("a").await;
        let ino = a.lookup(ROOT, "f").await.unwrap().ino;
        a.ask(emptied(ino)).await.unwrap();
        a.attach(ino, 0, 5).await;
        assert!(a.flush(&s.backing(), ino, 7).await.waits);
        if one {
            a.ask(now(ino, false)).await.unwrap();
        } else {
            a.materialize().await;
        }
        assert_eq!(std::fs::read(&there).unwrap(), [7; 5]);
    }
}

/// What a new object could not be is cut as it is.
#[tokio::test]
async fn an_object_that_another_could_not_replace_is_cut_in_place() {
    let set = |name: &'static str| {
        move |path: &Path| rustix::fs::setxattr(path, name, b"x", XattrFlags::empty()).is_ok()
    };
    let link = |path: &Path| std::fs::hard_link(path, path.with_file_name("second")).is_ok();
    let owned = |path: &Path| std::os::unix::fs::chown(path, Some(12345), None).is_ok();
    let cases: [(&str, &dyn Fn(&Path) -> bool, bool); 5] = [
        ("nothing special", &|_| true, false),
        ("a second name", &link, true),
        ("another owner", &owned, true),
        ("rights of its own", &set("security.ebb-test"), true),
        ("an attribute of its user", &set("user.run"), false),
    ];
    for (what, make, in_place) in cases {
        let s = Service::start().await;
        let there = s.backing().join("f");
        std::fs::write(&there, b"old").unwrap();
        if !make(&there) {
            println!("SKIPPED: {what} cannot be made here");
            continue;
        }
        let mut a = s.node("a").await;
        let ino = a.lookup(ROOT, "f").await.unwrap().ino;
        a.ask(emptied(ino)).await.unwrap();
        assert_eq!(std::fs::read(&there).unwrap().is_empty(), in_place, "{what}");
        assert_eq!(a.query(ino).await.replaces == 0, in_place, "{what}");
    }
}
