//! Files of very many ranges, on the real journal.

#![allow(clippy::unwrap_used)]

use crate::common::{Node, ROOT, Service};
use ebb_wire::pb;
use ebb_wire::pb::reply::Body;
use ebb_wire::pb::request::Op;

/// Of each node: together their records in the journal are above the largest body.
const RANGES: u64 = 1_000_000;

async fn attach_many(node: &mut Node, ino: u64, first: u64) {
    let ranges = (0..RANGES).map(|i| first + 4 * i).map(|at| pb::Range { start: at, end: at + 1 });
    let op = pb::Attach { ino, ranges: ranges.collect(), ..Default::default() };
    let done = node.ask(Op::Attach(op)).await.unwrap();
    assert!(matches!(done, Some(Body::Attached(_))), "{done:?}");
}

/// The owners of the whole file, page by page; and how many pages that took.
async fn owners(node: &mut Node, ino: u64) -> (Vec<pb::OwnedRange>, u32) {
    let (mut owners, mut start, mut pages) = (Vec::new(), 0, 0);
    loop {
        let range = Some(pb::Range { start, end: u64::MAX });
        let op = Op::Query(pb::Query { ino, range, ..Default::default() });
        let Ok(Some(Body::Map(map))) = node.ask(op).await else { panic!("no map from {start} on") };
        owners.extend(map.ranges);
        pages += 1;
        let covers = map.covers.unwrap();
        assert!(covers.end > start, "a page that says nothing");
        start = covers.end;
        if start == u64::MAX {
            return (owners, pages);
        }
    }
}

#[tokio::test]
async fn a_file_of_very_many_ranges_survives_two_restarts() {
    let s = Service::start().await;
    let file = {
        let (mut a, mut b) = (s.node("a").await, s.node("b").await);
        let file = a.create(ROOT, "f").await;
        attach_many(&mut a, file, 0).await;
        attach_many(&mut b, file, 2).await;
        file
    };
    let (before, pages) = owners(&mut s.node("c").await, file).await;
    assert_eq!(before.len() as u64, 2 * RANGES);
    assert!(pages > 1, "no answer has all of it");
    let s = s.crash_and_restart(|_| {}).await;
    // The journal is now a snapshot with all of it in one state.
    let snapshot = std::fs::metadata(s.dir.path().join("state/journal")).unwrap().len();
    assert!(snapshot > 17 << 20, "{snapshot} bytes");
    let s = s.crash_and_restart(|_| {}).await;
    s.node("c").await.attach(file, 1, 2).await;
    let s = s.crash_and_restart(|_| {}).await;
    let (after, _) = owners(&mut s.node("c").await, file).await;
    assert_eq!(after.len() as u64, 2 * RANGES + 1);
    let known = after.into_iter().filter(|r| r.start != 1);
    assert!(known.eq(before), "the owners are what they were");
}
