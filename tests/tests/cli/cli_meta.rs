//! The metadata service: alone, inside a daemon that others depend on, and what it says of a job.

use ebb_testkit::node::is_running;
use ebb_testkit::{Cluster, describe, mounts, skip_reason};
use ebb_tests::tools::wait_until;
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::time::Duration;

const SOON: Duration = Duration::from_secs(20);

#[test]
fn a_service_says_where_it_listens_and_ends_at_sigterm() {
    let cluster = Cluster::builder().prepare();
    let mut command = cluster.ebb();
    command.args(["meta", "--listen", "127.0.0.1:0", "--state"]).arg(cluster.root().join("state"));
    let mut child =
        command.arg(cluster.backing()).stdout(Stdio::piped()).spawn().expect("ebb meta");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let line = lines.next().expect("a line").expect("readable");
    let address = line.strip_prefix("ebb meta: listening on 127.0.0.1:").expect("the address");
    assert_ne!(address.parse::<u16>().expect("a port"), 0);
    let target = format!("127.0.0.1:{address}");
    let status = cluster.run_ebb(&["status", &target, "--json"]);
    assert!(status.status.success(), "{}", describe(&status));
    let status: serde_json::Value = serde_json::from_slice(&status.stdout).expect("JSON");
    assert_eq!(status["meta"], target.as_str());
    assert_eq!(status["nodes"].as_array().map(Vec::len), Some(0));

    let second = cluster
        .ebb()
        .args(["meta", "--listen", "127.0.0.1:0", "--state"])
        .arg(cluster.root().join("state"))
        .arg(cluster.backing())
        .output()
        .expect("ebb meta");
    assert_eq!(second.status.code(), Some(2), "one state, one service: {}", describe(&second));

    let pid = Pid::from_raw(child.id().cast_signed()).expect("a process id");
    kill_process(pid, Signal::TERM).expect("signal");
    assert_eq!(child.wait().expect("it ends").code(), Some(0));
}

#[test]
fn nodes_of_one_service_see_each_other() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = Cluster::builder().nodes(3).separate_meta().token().start();
    std::fs::write(cluster.node(0).path("f"), "from the first").expect("write");
    for node in cluster.nodes() {
        assert_eq!(std::fs::read(node.path("f")).expect("read"), b"from the first");
        assert_eq!(node.status()["peers"].as_array().map(Vec::len), Some(2), "{:#}", node.status());
    }
    let address = cluster.meta_address().expect("a service").to_owned();
    let screen = cluster.run_ebb(&["status", &address]);
    let text = String::from_utf8_lossy(&screen.stdout);
    for name in ["node0", "node1", "node2"] {
        assert!(text.contains(name), "{text}");
    }
    cluster.umount_all();
}

/// What the service is told of a node, when it is that much.
fn wait_told(cluster: &Cluster, node: &str, bytes: u64) {
    let address = cluster.meta_address().expect("a service").to_owned();
    wait_until(SOON, "the service is told", || {
        let said = cluster.run_ebb(&["status", &address, "--json"]);
        let status: serde_json::Value = serde_json::from_slice(&said.stdout).expect("JSON");
        let nodes = status["nodes"].as_array().cloned().unwrap_or_default();
        let of_it = nodes.iter().find(|n| n["name"] == node);
        of_it.is_some_and(|n| n["dirty_bytes"] == bytes)
    });
}

/// Somebody may switch a node off who believes it.
#[test]
fn the_service_says_how_much_of_each_node_is_not_on_the_backing() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = Cluster::builder().nodes(2).separate_meta().flush("end").start();
    let (first, second) = (cluster.node(0), cluster.node(1));
    std::fs::write(first.path("f"), vec![1; 300_000]).expect("write");
    wait_told(&cluster, "node0", 300_000);
    wait_told(&cluster, "node1", 0);
    let peers = second.status()["peers"].clone();
    assert_eq!(peers[0]["dirty_bytes"], 300_000, "{peers}");
    first.drain();
    wait_told(&cluster, "node0", 0);
    cluster.umount_all();
}

#[test]
fn an_embedded_service_stays_until_the_others_have_left() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = Cluster::builder().nodes(2).flush("end").start();
    let (first, second) = (cluster.node(0), cluster.node(1));
    let daemon = first.pid().expect("mounted");
    std::fs::write(first.path("a"), "a").expect("write");
    std::fs::write(second.path("b"), "b").expect("write");
    let output = first.ebb("umount", &[], &[]);
    assert_eq!(output.status.code(), Some(0), "{}", describe(&output));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("stays") && said.contains(&daemon.to_string()), "{said}");
    assert!(is_running(daemon) && !mounts::is_mounted(first.mountpoint()));
    // The other node still works, also for names that it never saw.
    assert_eq!(std::fs::read(second.path("a")).expect("read"), b"a");
    std::fs::write(second.path("c"), "c").expect("write");
    second.umount();
    assert!(mounts::wait_until(SOON, || !is_running(daemon)), "the service does not end");
    for name in ["a", "b", "c"] {
        assert_eq!(std::fs::read(cluster.backing().join(name)).expect("drained"), name.as_bytes());
    }
}

#[test]
fn a_node_with_another_model_or_the_wrong_token_is_refused() {
    if skip_reason().is_some() {
        return;
    }
    let cluster =
        Cluster::builder().nodes(2).separate_meta().token().consistency("session").prepare();
    cluster.node(0).mount();
    let other = cluster.node(1).mount_command(&["--consistency", "posix"]).output().expect("ebb");
    assert_ne!(other.status.code(), Some(0), "clap takes the last one");
    let fresh = cluster.root().join("other-token").display().to_string();
    assert!(cluster.run_ebb(&["token", &fresh]).status.success());
    let mut wrong = cluster.ebb();
    wrong.args(["mount", "--token-file", &fresh, "--meta"]);
    wrong
        .arg(cluster.meta_address().expect("a service"))
        .arg("--cache")
        .arg(cluster.node(1).cache());
    wrong.arg(cluster.backing()).arg(cluster.node(1).mountpoint());
    let wrong = wrong.output().expect("ebb");
    assert_eq!(wrong.status.code(), Some(2), "{}", describe(&wrong));
    assert!(!mounts::is_mounted(cluster.node(1).mountpoint()));
    cluster.node(0).umount();
}
