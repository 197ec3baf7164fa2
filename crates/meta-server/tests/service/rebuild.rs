//! A service that begins with nothing but what its nodes tell: it believes no more than it must.

#![allow(clippy::unwrap_used)]

use crate::common::{Node, ROOT, Service, hello};
use ebb_meta_server::Config;
use ebb_types::Errno;
use ebb_wire::pb::request::Op;
use ebb_wire::pb::{self, Reassert};
use std::os::unix::fs::MetadataExt;

const JOB: u64 = 0x1234;

async fn nothing_left(nodes: u32) -> Service {
    let s = Service::start().await;
    let before = s.journal();
    let rebuild = move |c: &mut Config| c.rebuild = Some(nodes);
    let s = s.crash_and_restart(rebuild).await;
    assert_ne!(s.journal(), before, "another journal");
    s
}

/// A node of before, whom a service told something that is not here any more.
fn of_before(name: &str, number: u32) -> pb::Hello {
    let (job, node_id) = (JOB, number);
    pb::Hello { resume: true, job, told_by: 77, told: 1000, node_id, ..hello(name, 1) }
}

async fn refused(s: &Service, hello: pb::Hello) -> pb::Reply {
    Node::join_as(s.address, hello, None).await.err().expect("refused")
}

fn tell(step: Reassert) -> Op {
    Op::Reassert(step)
}

fn named() -> Op {
    tell(Reassert { named: true, ..Reassert::default() })
}

fn done() -> Op {
    tell(Reassert { done: true, ..Reassert::default() })
}

#[tokio::test]
async fn who_may_tell_is_a_node_of_before() {
    let s = nothing_left(2).await;
    let new = pb::Hello { job: 0, told_by: 0, resume: false, empty: true, ..of_before("new", 0) };
    let early = refused(&s, new.clone()).await;
    assert_eq!(early.errno, Errno::EAGAIN.0, "{}", early.text);
    let mut a = Node::join_as(s.address, of_before("a", 7), None).await.unwrap();
    assert_eq!((a.welcome.node_id, a.welcome.job, a.welcome.names_after), (7, JOB, 0));
    assert!(a.welcome.reassert);
    let other_job = refused(&s, pb::Hello { job: JOB + 1, ..of_before("b", 8) }).await;
    assert_eq!(other_job.errno, Errno::ESTALE.0, "{}", other_job.text);
    let same_number = refused(&s, of_before("b", 7)).await;
    assert_eq!(same_number.errno, Errno::EBUSY.0, "{}", same_number.text);
    // It joins, is asked nothing, and has a number that no node of before can have.
    let mut new = Node::join_as(s.address, new, None).await.unwrap();
    assert!(!new.welcome.reassert && new.welcome.node_id >= 1 << 20, "{:?}", new.welcome);
    let asked = new
        .send(Op::Lookup(pb::Lookup { parent: ROOT, name: b"f".to_vec(), ..Default::default() }))
        .await;
    a.send(named()).await;
    a.send(done()).await;
    assert!(new.is_quiet(asked).await, "one of two has told");
    let mut b = Node::join_as(s.address, of_before("b", 8), None).await.unwrap();
    b.ask(named()).await.unwrap();
    b.ask(done()).await.unwrap();
    assert_eq!(new.wait(asked).await.errno, Errno::ENOENT.0);
    let late = refused(&s, of_before("c", 9)).await;
    assert_eq!(late.errno, Errno::ESTALE.0);
    assert!(late.text.contains("rebuilt without this node"), "{}", late.text);
    // It joined, but did not tell.
    let joined =
        refused(&s, pb::Hello { told_by: a.welcome.service_instance, ..of_before("d", 10) });
    assert!(joined.await.text.contains("rebuilt without this node"));
    // A cache of before, of a daemon that is none any more.
    let mounted = pb::Hello { job: 0, told_by: 0, resume: false, ..of_before("c", 0) };
    assert!(refused(&s, mounted).await.text.contains("rebuilt without this node"));
    // It is as it is from now on.
    let s = s.crash_and_restart(|_| {}).await;
    let late = refused(&s, of_before("c", 9)).await;
    assert!(late.text.contains("rebuilt without this node"), "{}", late.text);
}

#[tokio::test]
async fn what_was_told_to_another_service_is_told_anew() {
    let s = nothing_left(1).await;
    let mut a = Node::join_as(s.address, of_before("a", 7), None).await.unwrap();
    let instance = a.welcome.service_instance;
    let to = |to_instance| tell(Reassert { named: true, to_instance, ..Reassert::default() });
    assert_eq!(a.ask(to(instance ^ 1)).await.err(), Some(Errno::ESTALE));
    a.ask(to(instance)).await.unwrap();
}

/// What was said after this service began, as the clock has it, cannot be told from what it says itself.
#[tokio::test]
async fn what_was_heard_later_than_now_is_refused_and_nothing_is_answered() {
    let s = nothing_left(1).await;
    let mut a = Node::join_as(s.address, of_before("a", 7), None).await.unwrap();
    let later = pb::Facts { at: 1 << 62, ..pb::Facts::default() };
    let told = tell(Reassert { names: vec![later], ..Reassert::default() });
    assert_eq!(a.ask(told).await.err(), Some(Errno::ESTALE));
    let asked = a
        .send(Op::Lookup(pb::Lookup { parent: ROOT, name: b"f".to_vec(), ..Default::default() }))
        .await;
    assert!(a.is_quiet(asked).await);
}

/// From where on the state would give out versions that is rebuilt in this second.
fn first_version() -> u64 {
    const BEGINNING_OF_2026: u64 = 1_767_225_600;
    let now = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs();
    (now + 3600 - BEGINNING_OF_2026) << 34
}

#[tokio::test]
async fn versions_that_it_would_give_out_are_refused() {
    let before = first_version();
    let s = nothing_left(1).await;
    let after = first_version() - (1 << 34);
    assert!(after >= before, "it has waited for the next second");
    let mut a = Node::join_as(s.address, of_before("a", 7), None).await.unwrap();
    for (version, refused) in [(after, true), (1 << 63, true), (before - 1, false)] {
        let asks = vec![pb::KnownFile { ino: 61, newest: version, ..pb::KnownFile::default() }];
        let located = vec![pb::Located { ino: 62, as_of: version, ..pb::Located::default() }];
        for told in
            [Reassert { asks, ..Reassert::default() }, Reassert { located, ..Reassert::default() }]
        {
            let error = refused.then_some(Errno::ESTALE);
            assert_eq!(a.ask(tell(told)).await.err(), error, "{version}");
        }
    }
    a.ask(named()).await.unwrap();
}

/// Two rebuilds one after the other, and starts on their states: each gives out newer versions than the one before,
/// though the second rebuild knows nothing of the first but what the clock says.
#[tokio::test]
async fn rebuilt_again_at_once_it_gives_out_newer_versions() {
    let (mut last, mut told_by) = (0, 77);
    let mut s = Service::start().await;
    std::fs::write(s.backing().join("over"), "over").unwrap();
    let object = std::fs::symlink_metadata(s.backing().join("over")).unwrap().ino();
    for round in 0..6 {
        s = s.crash_and_restart(|c| c.rebuild = (round % 3 != 2).then_some(1)).await;
        let hello = pb::Hello { told_by, told: 0, ..of_before("a", 7) };
        let mut a = Node::join_as(s.address, hello, None).await.unwrap();
        told_by = a.welcome.service_instance;
        if a.welcome.reassert {
            let paths = vec![b"over".to_vec()];
            let over = pb::Located { ino: 61, paths, object, needed: true, as_of: last };
            let located = vec![over];
            a.ask(tell(Reassert { located, ..Reassert::default() })).await.unwrap();
            a.ask(named()).await.unwrap();
            a.ask(done()).await.unwrap();
        }
        let ranges = vec![pb::Range { start: 0, end: 10 }];
        let attach = pb::Attach { ino: 61, ranges, ..pb::Attach::default() };
        let attached = a.ask(Op::Attach(attach)).await.unwrap();
        let Some(pb::reply::Body::Attached(attached)) = attached else { panic!("{attached:?}") };
        assert!(attached.version > last, "round {round}: {} after {last}", attached.version);
        last = attached.version;
    }
}

/// A file that was written over is another object since. Of two nodes the one that knows the newer version of the
/// file knows which, whoever is heard last; an older word takes no object that is another file's by now; and an object
/// of which two files are told by their newest words is the one's that is needed, or nobody's.
#[tokio::test]
async fn of_two_objects_of_a_file_the_newer_one_counts() {
    for a_is_last in [false, true] {
        let s = nothing_left(2).await;
        let backing = s.backing();
        for name in ["over", "came", "old", "taken", "either"] {
            std::fs::write(backing.join(name), name).unwrap();
        }
        let object = |name: &str| std::fs::symlink_metadata(backing.join(name)).unwrap().ino();
        let at = |ino: u64, path: &str, object: u64, as_of: u64| pb::Located {
            ino,
            paths: vec![path.as_bytes().to_vec()],
            object,
            needed: false,
            as_of,
        };
        let tells = |located: Vec<pb::Located>| tell(Reassert { located, ..Reassert::default() });
        let mut a = Node::join_as(s.address, of_before("a", 7), None).await.unwrap();
        let mut b = Node::join_as(s.address, of_before("b", 8), None).await.unwrap();
        // Node a knows what is true; node b knows 61 by an object that is gone, and 62 as what has become 63.
        let of_a = vec![
            at(61, "over", object("over"), 9),
            at(62, "went", 4, 9),
            at(63, "came", object("came"), 2),
            pb::Located { needed: true, ..at(66, "taken", object("taken"), 2) },
            at(68, "either", object("either"), 2),
        ];
        let of_b = vec![
            at(61, "over", 5, 8),
            at(62, "came", object("came"), 8),
            at(64, "old", object("old"), 3),
            at(65, "taken", object("taken"), 8),
            at(67, "either", object("either"), 8),
        ];
        match a_is_last {
            true => {
                b.ask(tells(of_b)).await.unwrap();
                a.ask(tells(of_a)).await.unwrap();
            }
            false => {
                a.ask(tells(of_a)).await.unwrap();
                b.ask(tells(of_b)).await.unwrap();
            }
        }
        for node in [&mut a, &mut b] {
            node.send(named()).await;
        }
        for node in [&mut a, &mut b] {
            node.send(done()).await;
        }
        for (name, ino) in [("over", 61), ("came", 63), ("old", 64), ("taken", 66)] {
            assert_eq!(a.lookup(ROOT, name).await.unwrap().ino, ino, "{name}, {a_is_last}");
        }
        for ino in [62, 65, 67, 68] {
            assert_eq!(a.attr(ino).await.err(), Some(Errno::ESTALE), "{ino}");
        }
        assert!(a.lookup(ROOT, "either").await.unwrap().ino > 1 << 62, "found as ever");
    }
}

/// However many nodes tell of a file: what the one says that knows most of it.
#[tokio::test]
async fn of_many_words_the_newest_one_is_heard() {
    const WORDS: u64 = 300;
    let s = nothing_left(1).await;
    std::fs::write(s.backing().join("f"), "f").unwrap();
    let object = std::fs::metadata(s.backing().join("f")).unwrap().ino();
    let mut a = Node::join_as(s.address, of_before("a", 7), None).await.unwrap();
    for word in 0..WORDS {
        // Objects that are gone, and the last word but one is the truth.
        let is_newest = word == WORDS - 2;
        let located = pb::Located {
            ino: 61,
            paths: vec![b"f".to_vec()],
            object: if is_newest { object } else { 1_000_000_000 + word },
            needed: false,
            as_of: if is_newest { WORDS } else { word },
        };
        a.ask(tell(Reassert { located: vec![located], ..Reassert::default() })).await.unwrap();
    }
    a.ask(named()).await.unwrap();
    a.ask(done()).await.unwrap();
    assert_eq!(a.lookup(ROOT, "f").await.unwrap().ino, 61);
}

/// Where a node says that a file is: nothing outside of the backing, nothing that is another object, no name
/// that something has.
#[tokio::test]
async fn a_file_is_where_a_node_says_only_if_that_is_so() {
    let s = nothing_left(1).await;
    let backing = s.backing();
    std::fs::create_dir(backing.join("d")).unwrap();
    for name in ["d/f", "d/g", "d/.ebb-part-77-1", "d/.ebb-part-78-1", "d/.ebb-part-79-1", "away"] {
        std::fs::write(backing.join(name), name).unwrap();
    }
    std::fs::hard_link(backing.join("d/.ebb-part-79-1"), backing.join("d/second")).unwrap();
    std::os::unix::fs::symlink("../away", backing.join("d/link")).unwrap();
    let object = |name: &str| std::fs::symlink_metadata(backing.join(name)).unwrap().ino();
    let at = |ino: u64, path: &str, object: u64| pb::Located {
        ino,
        paths: vec![path.as_bytes().to_vec()],
        object,
        needed: false,
        as_of: 0,
    };
    let mut a = Node::join_as(s.address, of_before("a", 7), None).await.unwrap();
    let ask = |located: Vec<pb::Located>| tell(Reassert { located, ..Reassert::default() });
    for path in ["../away", "d/../../x", "/etc/passwd", "d//f", "d/."] {
        let told = a.ask(ask(vec![at(50, path, 1)])).await;
        assert_eq!(told.err(), Some(Errno::EPROTO), "{path}");
    }
    let told = vec![
        at(51, "d/f", object("d/f")),
        at(52, "d/g", object("d/f")),
        at(53, "d/link", object("d/link")),
        at(54, "d/none", 5),
        at(ROOT, "d/g", object("d/g")),
        at(0x77, "d/.ebb-part-77-1", object("d/.ebb-part-77-1")),
        at(0x78, "d/.ebb-part-78-1", object("d/.ebb-part-77-1")),
        at(0x79, "d/.ebb-part-79-1", object("d/.ebb-part-79-1")),
        at(0x7a, "d/.ebb-part-78-1", object("d/.ebb-part-78-1")),
    ];
    a.ask(ask(told)).await.unwrap();
    a.ask(named()).await.unwrap();
    a.ask(done()).await.unwrap();
    assert_eq!(a.attr(51).await.unwrap().size, 3, "it is that object");
    for ino in [52, 53, 54, 0x77, 0x78, 0x79] {
        assert_eq!(a.attr(ino).await.err(), Some(Errno::ESTALE), "{ino:x}");
    }
    let d = a.lookup(ROOT, "d").await.unwrap().ino;
    assert_eq!(a.lookup(d, "f").await.unwrap().ino, 51);
    assert!(a.lookup(d, "g").await.unwrap().ino > 1 << 62, "found as ever");
    // The first one has the name that this service gives it; the others are nobody's.
    let mut parts: Vec<String> = std::fs::read_dir(backing.join("d"))
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with(".ebb-part"))
        .collect();
    parts.sort();
    let kept = [".ebb-part-78-1", ".ebb-part-79-1"];
    assert!(parts.len() == 3 && parts[0].starts_with(".ebb-part-77-"), "{parts:?}");
    assert!(parts[0] != ".ebb-part-77-1" && parts[1..] == kept, "{parts:?}");
    assert_eq!(std::fs::read(backing.join("away")).unwrap(), b"away");
}

/// Copies of a node that has not come back may be all that there is of its bytes.
#[tokio::test]
async fn copies_of_who_is_not_there_are_kept() {
    let s = nothing_left(2).await;
    let mut a = Node::join_as(s.address, of_before("a", 7), None).await.unwrap();
    let mut b = Node::join_as(s.address, of_before("b", 8), None).await.unwrap();
    for node in [&mut a, &mut b] {
        node.send(named()).await;
    }
    for node in [&mut a, &mut b] {
        node.send(done()).await;
    }
    let held = |owner, epoch| pb::Holding { owner, epoch, done: false };
    let copies =
        Op::Copies(pb::Copies { held: vec![held(8, 3), held(9, 4)], ..pb::Copies::default() });
    let Some(pb::reply::Body::Copies(reply)) = a.ask(copies).await.unwrap() else {
        panic!("no answer")
    };
    assert_eq!(reply.drop, [3], "its owner is here and has its bytes");
    assert!(reply.take.is_empty() && reply.silent.is_empty(), "{reply:?}");
}
