//! What an answer tells of names: the one that was asked for, and where its directory is when others may have
//! moved that and forgotten it.

use crate::common::{Node, ROOT, Service, make};
use ebb_wire::pb;
use ebb_wire::pb::reply::Body;
use ebb_wire::pb::request::Op;

/// Makes something; which inode it is, and the names that were told.
async fn made(node: &mut Node, parent: u64, name: &str, kind: u32) -> (u64, Vec<String>) {
    let id = node.send(make(parent, name, kind | 0o755)).await;
    let reply = node.wait(id).await;
    let Some(Body::Entry(entry)) = reply.body else { panic!("errno {}", reply.errno) };
    let told = reply.facts.expect("facts").names;
    let names = told.iter().map(|fact| String::from_utf8_lossy(&fact.name).into_owned());
    (entry.attr.expect("attributes").ino, names.collect())
}

#[tokio::test]
async fn where_a_directory_is_is_told_only_when_it_may_be_elsewhere() {
    let s = Service::start().await;
    let mut a = s.node("a").await;
    let (d, told) = made(&mut a, ROOT, "d", libc::S_IFDIR).await;
    assert_eq!(told, ["d"]);
    let (deep, told) = made(&mut a, d, "deep", libc::S_IFDIR).await;
    assert_eq!(told, ["deep"], "nobody can have moved anything before the first node");
    let (other, _) = made(&mut a, ROOT, "other", libc::S_IFDIR).await;
    let (name, new_name) = ("d".into(), "e".into());
    let rename =
        pb::Rename { parent: ROOT, name, new_parent: ROOT, new_name, ..Default::default() };
    a.ask(Op::Rename(rename)).await.unwrap();
    assert_eq!(made(&mut a, deep, "f", libc::S_IFREG).await.1, ["f", "deep", "e"]);
    assert_eq!(made(&mut a, other, "g", libc::S_IFREG).await.1, ["g"]);
    drop(a);
    let s = s.crash_and_restart(|_| {}).await;
    let mut b = s.node("b").await;
    assert_eq!(made(&mut b, other, "h", libc::S_IFREG).await.1, ["h", "other"], "it may have");
}
