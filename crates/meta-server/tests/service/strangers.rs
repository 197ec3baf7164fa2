//! Others who may write to the same directory: they find out no name in advance, and what they
//! put in the place of a part file is neither written to nor published.

#![allow(clippy::unwrap_used)]

use crate::common::{ROOT, Service, write_granted};
use ebb_wire::pb;
use ebb_wire::pb::reply::Body;
use ebb_wire::pb::request::Op;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

fn part(s: &Service) -> PathBuf {
    let entries = std::fs::read_dir(s.backing()).unwrap().map(|e| e.unwrap().path());
    let is_part = |p: &PathBuf| p.to_string_lossy().contains("/.ebb-part-");
    let mut parts: Vec<PathBuf> = entries.filter(is_part).collect();
    assert_eq!(parts.len(), 1, "{parts:?}");
    parts.pop().unwrap()
}

async fn failures(node: &mut crate::common::Node) -> Vec<pb::Failure> {
    let reply = node.ask(Op::Materialize(pb::Materialize::default())).await.unwrap();
    let Some(Body::Materialize(reply)) = reply else { panic!("{reply:?}") };
    reply.failures
}

#[tokio::test]
async fn a_part_file_that_was_swapped_is_never_published_nor_changed() {
    let s = Service::start().await;
    let mut a = s.node("a").await;
    let file = a.create(ROOT, "f").await;
    a.attach(file, 0, 5).await;
    let grant = a.begin(file, 0, 5).await.unwrap();
    write_granted(&s.backing(), &grant, b'a');
    let part = part(&s);
    let aside = s.backing().join("aside");
    std::fs::rename(&part, &aside).unwrap();
    std::fs::write(s.dir.path().join("victim"), "the victim's").unwrap();
    std::fs::hard_link(s.dir.path().join("victim"), &part).unwrap();
    let before = std::fs::metadata(&part).unwrap();

    assert!(!a.end(file, grant.grant, true).await.unwrap().published);
    let after = std::fs::metadata(&part).unwrap();
    let of = |m: &std::fs::Metadata| (m.len(), m.mode(), m.uid(), m.mtime_nsec(), m.ino());
    assert_eq!(of(&after), of(&before), "nothing of it changes");
    assert!(!s.backing().join("f").exists(), "another file never gets the name");
    let failed = failures(&mut a).await;
    assert_eq!(failed.len(), 1, "{failed:?}");
    assert_eq!((&failed[0].path[..], failed[0].errno), (&b"f"[..], libc::ESTALE));
    assert!(a.unlink(ROOT, "f").await.is_ok());
    assert!(part.exists(), "it is not ours to remove");
}

#[tokio::test]
async fn names_of_part_files_cannot_be_foretold_and_outlive_the_service() {
    let s = Service::start().await;
    let mut a = s.node("a").await;
    let mut seen = Vec::new();
    for name in ["f", "g"] {
        let file = a.create(ROOT, name).await;
        a.attach(file, 0, 5).await;
        let grant = a.begin(file, 0, 5).await.unwrap();
        let path = String::from_utf8(grant.backing.unwrap().path).unwrap();
        let (number, secret) = path.strip_prefix(".ebb-part-").unwrap().split_once('-').unwrap();
        assert_eq!((number, secret.len()), (format!("{file:x}").as_str(), 16));
        seen.push((file, path.clone(), secret.to_owned()));
        a.end(file, grant.grant, false).await.unwrap();
    }
    assert_ne!(seen[0].2, seen[1].2);
    drop(a);
    let s = s.crash_and_restart(|_| {}).await;
    let mut a = crate::common::Node::join(s.address, "a", 1, None).await.unwrap();
    // Numbers of requests go on where they were.
    a.next = 10_000;
    for (file, path, _) in seen {
        let grant = a.begin(file, 0, 5).await.unwrap();
        assert_eq!(grant.backing.unwrap().path, path.as_bytes());
    }
}
