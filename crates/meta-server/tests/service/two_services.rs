//! Two services that each have a copy of one state, where no lock keeps one of them out.

#![allow(clippy::unwrap_used)]

use crate::common::{Node, ROOT, Service};
use ebb_transport::auth;
use ebb_types::Errno;
use ebb_wire::pb;
use std::path::Path;

fn hello(name: &str, welcomed: Option<&pb::Welcome>) -> pb::Hello {
    let welcomed = welcomed.copied().unwrap_or_default();
    pb::Hello {
        protocol: ebb_wire::PROTOCOL,
        node: name.to_owned(),
        incarnation: 1,
        peer_address: "127.0.0.1:1".to_owned(),
        consistency: "session".to_owned(),
        nonce: auth::nonce().to_vec(),
        resume: welcomed.node_id != 0,
        job: welcomed.job,
        told_by: welcomed.service_instance,
        node_id: welcomed.node_id,
        ..Default::default()
    }
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

async fn join(s: &Service, name: &str, welcomed: Option<&pb::Welcome>) -> Result<Node, pb::Reply> {
    Node::join_as(s.address, hello(name, welcomed), None).await
}

#[tokio::test]
async fn copies_of_one_state_take_no_nodes_of_each_other() {
    let s = Service::start().await;
    s.node("before").await.create(ROOT, "f").await;
    let other = tempfile::tempdir().unwrap();
    let state = other.path().join("copied");
    copy(&s.dir.path().join("state"), &state);
    let first = s.crash_and_restart(|_| {}).await;
    let backing = first.backing();
    let second = Service::on(other, |c| {
        c.backing.clone_from(&backing);
        c.state_dir.clone_from(&state);
    })
    .await;
    for (its, others, name) in [(&first, &second, "a"), (&second, &first, "b")] {
        let node = join(its, name, None).await.unwrap();
        let welcomed = node.welcome;
        drop(node);
        let refused = join(others, name, Some(&welcomed)).await.err().unwrap();
        assert_eq!(refused.errno, Errno::ESTALE.0, "{refused:?}");
        assert!(refused.text.contains("an older one"), "{}", refused.text);
        join(its, name, Some(&welcomed)).await.unwrap();
    }
}
