//! What goes between nodes and to the metadata service is encrypted where it leaves the machine, as
//! the default is: whole mounts in network namespaces, with a relay in the middle that records and
//! changes what passes, daemons and services that die, and ends that do not agree.

use ebb_testkit::{
    Builder, Change, Cluster, Network, Node, Port, Relay, Towards, describe, number, skip_reason,
};
use ebb_tests::content::{bytes, same};
use ebb_tests::copies::LEASE_MAX;
use ebb_tests::tools::wait_until;
use serde_json::Value;
use std::fs;
use std::sync::Arc;
use std::time::Duration;

const SECRET: &str = "nobody on the way may read this. ";

fn network(nodes: usize) -> Option<Arc<Network>> {
    if skip_reason().is_some() {
        return None;
    }
    let made = Network::new(nodes).inspect_err(|why| println!("SKIPPED: {why}"));
    made.ok().map(Arc::new)
}

fn encrypted(node: &Node) -> Value {
    node.status()["encrypted"].clone()
}

fn secret(bytes: usize) -> Vec<u8> {
    SECRET.bytes().cycle().take(bytes).collect()
}

/// Writes on one node, reads on the other, both ways.
fn exchange(cluster: &Cluster, round: u64) {
    for (from, to) in [(0, 1), (1, 0)] {
        let name = format!("from-{from}-{round}");
        let content = bytes(from as u64, round, 0, 2_000_000);
        fs::write(cluster.node(from).path(&name), &content).expect("write");
        let read = fs::read(cluster.node(to).path(&name)).expect("read");
        same(&name, &read, &content);
    }
}

fn two_nodes(network: &Arc<Network>, model: &str) -> Builder {
    let builder = Cluster::builder().nodes(2).consistency(model).flush("end");
    builder.network(Arc::clone(network))
}

/// Nobody asked for it, and all of it is: what a node reads from a peer and what it asks the service.
#[test]
fn between_machines_everything_is_encrypted_under_every_model() {
    for model in ["session", "commit", "posix", "mpiio"] {
        let Some(network) = network(2) else { return };
        let cluster = two_nodes(&network, model).start();
        exchange(&cluster, 1);
        for node in cluster.nodes() {
            let (status, encrypted) = (node.status(), encrypted(node));
            assert_eq!(status["secure"], "loopback", "{model}");
            for way in ["sent_bytes", "received_bytes"] {
                let bytes = number(&encrypted, way);
                assert!(bytes > 2_000_000, "{model}: {way} {bytes}");
            }
            // All that came from peers is among it.
            assert!(number(&encrypted, "received_bytes") >= number(&status, "fetched_bytes_peer"));
            assert_eq!(number(&encrypted, "broken") + number(&encrypted, "refused"), 0);
            let screen = node.ebb("status", &[], &[]);
            let screen = String::from_utf8_lossy(&screen.stdout).into_owned();
            assert!(screen.contains("encrypted but for loopback"), "{screen}");
        }
        cluster.umount_all();
        let drained = fs::read(cluster.backing().join("from-0-1")).expect("read");
        same("backing", &drained, &bytes(0, 1, 0, 2_000_000));
    }
}

/// With copies at a partner, a daemon that is killed, one that is replaced, and a service that is
/// killed: whoever comes back is encrypted again.
#[test]
fn restarts_and_copies_go_encrypted() {
    if skip_reason().is_some() {
        return;
    }
    let builder = Cluster::builder().nodes(2).separate_meta().token().supervised().flush("end");
    let builder = builder.option("--secure", "on").option("--replicas", "2");
    let mut cluster = builder.start();
    for node in cluster.nodes() {
        node.wait_status(LEASE_MAX, |s| s["copies"]["partner_name"].is_string());
    }
    exchange(&cluster, 1);
    let content = bytes(7, 7, 0, 700_000);
    fs::write(cluster.node(0).path("kept"), &content).expect("write");
    let copied = number(&cluster.node(0).status()["copies"], "copied_bytes");
    assert!(copied >= 700_000, "{copied}");
    assert!(number(&encrypted(cluster.node(0)), "sent_bytes") > copied, "copies are among it");
    assert!(cluster.node(0).kill_daemon());
    same("an heir", &fs::read(cluster.node(0).path("kept")).expect("read"), &content);
    cluster.kill_meta();
    cluster.restart_meta();
    exchange(&cluster, 2);
    let restarted = cluster.node(1).ebb("restart", &[], &[]);
    assert!(restarted.status.success(), "{}", describe(&restarted));
    exchange(&cluster, 3);
    for node in cluster.nodes() {
        assert_eq!(node.status()["secure"], "on");
        assert!(number(&encrypted(node), "received_bytes") > 2_000_000);
        let screen = node.ebb("status", &[], &[]);
        assert!(String::from_utf8_lossy(&screen.stdout).contains("everything is encrypted"));
    }
    cluster.umount_all();
    same("backing", &fs::read(cluster.backing().join("kept")).expect("read"), &content);
}

/// A node whose way to the service leads over a relay: it sees neither names nor contents, and what it
/// changes only breaks the connection. Without encryption it sees both.
#[test]
fn a_relay_to_the_service_sees_and_changes_nothing() {
    if skip_reason().is_some() {
        return;
    }
    for (which, seen) in [("off", true), ("on", false)] {
        let builder = Cluster::builder().nodes(1).separate_meta().token();
        let cluster = builder.option("--secure", which).start();
        let relay = Relay::new(cluster.meta_address().expect("a service of its own"));
        let point = cluster.root().join("through");
        fs::create_dir(&point).expect("mkdir");
        let token = cluster.root().join("token").display().to_string();
        let (address, cache) = (relay.address().to_string(), cluster.root().join("cache-through"));
        let mut command = cluster.ebb();
        command.args(["mount", "--meta", &address, "--token-file", &token, "--secure", which]);
        command.args(["--supervise", "off", "--node", "through", "--cache"]);
        let mounted = command.arg(&cache).arg(cluster.backing()).arg(&point).output();
        let mounted = mounted.expect("ebb can be started");
        assert!(mounted.status.success(), "{}", describe(&mounted));
        fs::write(point.join("a-name-that-is-secret"), secret(1000)).expect("write");
        assert_eq!(relay.has_seen(b"a-name-that-is-secret"), seen, "{which}");
        assert_eq!(relay.has_seen(b"through"), seen, "{which}: the hello");
        if !seen {
            for (round, at) in [(0, 900), (1, 1500), (2, 4000)] {
                relay.change(Towards::Server, at, Change::Flip, 1);
                let name = point.join(format!("after-{round}"));
                // Each connection begins anew.
                relay.break_all();
                wait_until(Duration::from_secs(20), "the change is made", || {
                    fs::write(&name, secret(3000)).expect("a write over a broken connection");
                    relay.changes_left() == 0
                });
                same("after it", &fs::read(&name).expect("read"), &secret(3000));
            }
        }
        let gone = cluster.run_ebb(&["umount", &point.display().to_string()]);
        assert!(gone.status.success(), "{}", describe(&gone));
        assert_eq!(
            fs::read(cluster.backing().join("a-name-that-is-secret")).expect("read"),
            secret(1000)
        );
        cluster.umount_all();
    }
}

/// Ends that do not agree are told what to change, by the name of the option.
#[test]
fn ends_that_do_not_agree_name_the_option() {
    if skip_reason().is_some() {
        return;
    }
    for (service, node, said) in [
        ("on", "off", "takes only encrypted connections"),
        ("off", "on", "--secure off is set there"),
    ] {
        let cluster = Cluster::builder().nodes(1).separate_meta().token();
        let cluster = cluster.option("--secure", service).prepare();
        let point = cluster.root().join("other");
        fs::create_dir(&point).expect("mkdir");
        let token = cluster.root().join("token").display().to_string();
        let meta = cluster.meta_address().expect("a service of its own").to_owned();
        let mut command = cluster.ebb();
        command.args(["mount", "--meta", &meta, "--token-file", &token, "--secure", node]);
        command.arg("--cache").arg(cluster.root().join("other-cache"));
        let refused = command.arg(cluster.backing()).arg(&point).output().expect("ebb");
        let told = describe(&refused);
        assert!(!refused.status.success() && told.contains(said), "{told}");
        assert!(told.contains("--secure"), "{told}");
        let status = |which: &str| {
            cluster.run_ebb(&["status", "--token-file", &token, "--secure", which, "--json", &meta])
        };
        let (wrong, right) = (status(node), status(service));
        assert!(!wrong.status.success() && describe(&wrong).contains(said), "{}", describe(&wrong));
        assert!(right.status.success(), "{}", describe(&right));
        let right: Value = serde_json::from_slice(&right.stdout).expect("JSON");
        assert_eq!(right["secure"], service);
    }
}

/// Nothing is encrypted where that was asked for, and status says so.
#[test]
fn off_is_off_and_said() {
    let Some(network) = network(2) else { return };
    let cluster = two_nodes(&network, "session").option("--secure", "off").start();
    exchange(&cluster, 1);
    for node in cluster.nodes() {
        let status = node.status();
        assert_eq!(status["secure"], "off");
        assert_eq!(number(&status["encrypted"], "handshakes"), 0);
        let screen = node.ebb("status", &[], &[]);
        let screen = String::from_utf8_lossy(&screen.stdout).into_owned();
        assert!(screen.contains("nothing is encrypted (--secure off)"), "{screen}");
    }
    let host = network.host(Port::Service);
    assert!(cluster.node(1).status()["meta"].as_str().is_some_and(|m| m.starts_with(&host)));
    cluster.umount_all();
}
