//! Nodes whose bytes go over RDMA. `make test-rdma` runs them in a virtual machine that has a device, and says so
//! with `EBB_REQUIRE_RDMA`; elsewhere they are skipped. Of what soft-RoCE is, nothing is known here.

use ebb_testkit::{Builder, Cluster, Node, number};
use ebb_tests::content::{bytes, same};
use ebb_tests::tools::{amount, wait_until};
use serde_json::Value;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::time::{Duration, Instant};

/// An emulated machine does nothing in a hurry.
const LONG: Duration = Duration::from_secs(120);

const MIB: u64 = 1 << 20;

fn is_there() -> bool {
    let there = std::env::var_os("EBB_REQUIRE_RDMA").is_some();
    if !there {
        println!("SKIPPED: no RDMA device is promised (make test-rdma)");
    }
    there
}

fn nodes(count: usize, model: &str) -> Builder {
    let builder = Cluster::builder().nodes(count).consistency(model).flush("end").token();
    builder.separate_meta().option("--request-timeout", "60s")
}

fn over_rdma(count: usize, model: &str) -> Cluster {
    nodes(count, model).option("--transport", "rdma").start()
}

fn rdma(node: &Node) -> Value {
    node.status()["transport"]["rdma"].clone()
}

fn write(node: &Node, name: &str, seed: u64, len: u64) {
    fs::write(node.path(name), bytes(seed, seed, 0, len)).expect("write");
}

fn is_read(node: &Node, name: &str, seed: u64, len: u64) {
    let got = fs::read(node.path(name)).expect("read");
    same(name, &got, &bytes(seed, seed, 0, len));
}

/// No peer may write anywhere once nothing is read.
fn nothing_is_open(node: &Node) {
    wait_until(LONG, "no landing is left", || number(&rdma(node), "landing_bytes") == 0);
}

#[test]
fn bytes_come_over_rdma_under_every_model() {
    if !is_there() {
        return;
    }
    for model in ["session", "commit", "posix", "mpiio"] {
        let cluster = over_rdma(2, model);
        for (from, to) in [(0, 1), (1, 0)] {
            let name = format!("from-{from}");
            write(cluster.node(from), &name, from as u64, 2_000_000);
            is_read(cluster.node(to), &name, from as u64, 2_000_000);
        }
        for node in cluster.nodes() {
            let over = rdma(node);
            for way in ["placed_bytes", "written_bytes"] {
                let bytes = number(&over, way);
                assert!((1_900_000..4_000_000).contains(&bytes), "{model}: {way} {bytes}");
            }
            assert_eq!(number(&over, "fell_back") + number(&over, "broken"), 0, "{over}");
            assert!(over["peers"].as_object().expect("peers").values().all(Value::is_null));
            assert_eq!(node.counter("ebb_rdma_placed_bytes_total"), number(&over, "placed_bytes"));
            let screen = node.ebb("status", &[], &[]);
            let screen = String::from_utf8_lossy(&screen.stdout).into_owned();
            assert!(screen.contains("not encrypted: 1 of 1 peers"), "{screen}");
            nothing_is_open(node);
        }
        cluster.umount_all();
        let drained = fs::read(cluster.backing().join("from-1")).expect("read");
        same("backing", &drained, &bytes(1, 1, 0, 2_000_000));
    }
}

/// Every node writes its part of one file, record by record, and every node reads all of it.
#[test]
fn many_nodes_write_one_file_and_all_read_it() {
    if !is_there() {
        return;
    }
    const NODES: u64 = 3;
    const RECORD: u64 = 47_008;
    const ROUNDS: u64 = 20;
    let cluster = over_rdma(NODES as usize, "session");
    let record = |node: u64, round: u64| bytes(node, round, 0, RECORD);
    std::thread::scope(|scope| {
        for (who, node) in (0..).zip(cluster.nodes()) {
            scope.spawn(move || {
                let options = File::options().write(true).create(true).truncate(false).clone();
                let file = options.open(node.path("all")).expect("open");
                for round in 0..ROUNDS {
                    let at = (round * NODES + who) * RECORD;
                    file.write_all_at(&record(who, round), at).expect("write");
                }
            });
        }
    });
    let all: Vec<u8> =
        (0..ROUNDS).flat_map(|round| (0..NODES).flat_map(move |n| record(n, round))).collect();
    for node in cluster.nodes() {
        node.wait_closed();
        same(node.name(), &fs::read(node.path("all")).expect("read"), &all);
        assert!(number(&rdma(node), "placed_bytes") >= (NODES - 1) * ROUNDS * RECORD);
    }
    cluster.umount_all();
    same("backing", &fs::read(cluster.backing().join("all")).expect("read"), &all);
}

#[test]
fn a_node_without_rdma_is_spoken_to_over_tcp() {
    if !is_there() {
        return;
    }
    let cluster = nodes(3, "session").prepare();
    cluster.node(0).mount_with(&["--transport", "rdma"]);
    cluster.node(1).mount_with(&["--transport", "tcp"]);
    cluster.node(2).mount_with(&["--transport", "auto", "--secure", "loopback"]);
    for (from, to) in [(0, 1), (1, 0), (2, 0), (0, 2)] {
        let name = format!("{from}-to-{to}");
        write(cluster.node(from), &name, from as u64, MIB);
        is_read(cluster.node(to), &name, from as u64, MIB);
    }
    let over = rdma(cluster.node(0));
    assert_eq!((number(&over, "placed_bytes"), number(&over, "moved")), (0, 0), "{over}");
    assert!(number(&over, "fell_back") >= 2, "{over}");
    let screen = cluster.node(0).ebb("status", &[], &[]);
    let screen = String::from_utf8_lossy(&screen.stdout).into_owned();
    assert!(screen.contains("over tcp: has no RDMA"), "{screen}");
    let encrypts = cluster.node(2).status()["transport"].clone();
    let why = encrypts["tcp_because"].as_str().expect("a reason");
    assert!(why.contains("not encrypted"), "{why}");
}

#[test]
fn what_cannot_be_is_refused_with_the_reason() {
    if !is_there() {
        return;
    }
    let cluster = nodes(1, "session").prepare();
    for (more, words) in [
        (&["--transport", "rdma", "--secure", "on"][..], "not encrypted"),
        (&["--transport", "rdma", "--rdma-device", "mlx5_7"], "mlx5_7"),
        (&["--transport", "rdma", "--rdma-device", "203.0.113.9"], "203.0.113.9"),
    ] {
        let refused = cluster.node(0).mount_command(more).output().expect("ebb can be started");
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && said.contains(words), "{more:?}: {said}");
    }
    let device = fs::read_dir("/sys/class/infiniband").expect("devices").flatten().next();
    let name = device.expect("a device").file_name().into_string().expect("a name");
    cluster.node(0).mount_with(&["--transport", "rdma", "--rdma-device", &format!("{name}:1")]);
}

/// With copies at a partner, work goes over RDMA too.
#[test]
fn copies_at_a_partner_go_over_rdma() {
    if !is_there() {
        return;
    }
    let cluster = nodes(2, "session").option("--transport", "rdma").option("--replicas", "2");
    let cluster = cluster.start();
    for node in cluster.nodes() {
        node.wait_status(LONG, |s| s["copies"]["partner_name"].is_string());
    }
    write(cluster.node(0), "kept", 5, 3_000_000);
    let copied = number(&cluster.node(0).status()["copies"], "copied_bytes");
    assert!(copied >= 3_000_000, "{copied}");
    assert!(number(&rdma(cluster.node(0)), "moved") > 0);
    cluster.node(0).kill9();
    is_read(cluster.node(1), "kept", 5, 3_000_000);
}

/// Whoever reads from a daemon that is killed gets all bytes or an error; the next daemon is reached over RDMA
/// again. The owner of what a killed reader was sent notices nothing.
#[test]
fn an_end_that_is_killed_in_the_middle() {
    if !is_there() {
        return;
    }
    const FILES: u64 = 12;
    let cluster = over_rdma(2, "session");
    for round in 0..amount("EBB_RDMA_KILLS", 3) {
        let name = |file: u64| format!("round-{round}-{file}");
        let (owner, reader) =
            (cluster.node((round % 2) as usize), cluster.node(1 - (round % 2) as usize));
        for file in 0..FILES {
            write(owner, &name(file), file, 3 * MIB);
        }
        let killed = if round % 3 == 2 { reader } else { owner };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for file in 0..FILES {
                    // Of a reader that is killed only errors are left.
                    if let Ok(got) = fs::read(reader.path(name(file))) {
                        same(&name(file), &got, &bytes(file, file, 0, 3 * MIB));
                    }
                }
            });
            std::thread::sleep(Duration::from_millis(150 + 400 * round));
            killed.kill9();
        });
        killed.mount();
        for file in 0..FILES {
            is_read(reader, &name(file), file, 3 * MIB);
            is_read(owner, &name(file), file, 3 * MIB);
        }
        for node in cluster.nodes() {
            nothing_is_open(node);
        }
        assert!(number(&rdma(reader), "placed_bytes") > 0, "round {round}");
    }
}

fn link(state: &str) {
    let device = std::env::var("EBB_RDMA_LINK").expect("the device whose link the test may cut");
    let done = Command::new("ip").args(["link", "set", &device, state]).status();
    assert!(done.expect("ip can be started").success(), "{device} {state}");
}

/// The network of RDMA goes while TCP stays: bytes come over TCP, and that is seen.
#[test]
fn a_link_that_goes_is_done_without() {
    if !is_there() || std::env::var_os("EBB_RDMA_LINK").is_none() {
        println!("SKIPPED: no link may be cut (EBB_RDMA_LINK)");
        return;
    }
    let cluster = over_rdma(2, "session");
    let [owner, reader] = [0, 1].map(|n| cluster.node(n));
    write(owner, "before", 1, 2 * MIB);
    is_read(reader, "before", 1, 2 * MIB);
    link("down");
    write(owner, "during", 2, 2 * MIB);
    is_read(reader, "during", 2, 2 * MIB);
    let over = rdma(reader);
    link("up");
    assert!(number(&over, "fell_back") > 0, "{over}");
    let why: Vec<_> = over["peers"].as_object().expect("peers").values().collect();
    assert!(why.iter().any(|why| why.is_string()), "{over}");
    write(owner, "after", 3, 2 * MIB);
    is_read(reader, "after", 3, 2 * MIB);
    nothing_is_open(reader);
}

/// However long it goes on, the device may use as much memory as at the beginning.
#[test]
fn registered_memory_does_not_grow() {
    if !is_there() {
        return;
    }
    let cluster = over_rdma(2, "session");
    let seconds = Duration::from_secs(amount("EBB_RDMA_SECONDS", 20));
    let (begin, mut round, mut first) = (Instant::now(), 0, None);
    while begin.elapsed() < seconds || round < 4 {
        for (from, to) in [(0, 1), (1, 0)] {
            let name = format!("{from}");
            write(cluster.node(from), &name, round, MIB + round % 7 * 50_000);
            is_read(cluster.node(to), &name, round, MIB + round % 7 * 50_000);
        }
        round += 1;
        if round == 3 {
            first = Some([0, 1].map(|n| number(&rdma(cluster.node(n)), "registered_bytes")));
        }
    }
    for node in cluster.nodes() {
        nothing_is_open(node);
    }
    let last = [0, 1].map(|n| number(&rdma(cluster.node(n)), "registered_bytes"));
    println!("{round} rounds, {first:?} and then {last:?} bytes are registered");
    // A connection more or less at either end is no growth.
    for (first, last) in first.expect("rounds").iter().zip(last) {
        assert!(last <= first + MIB, "{first} bytes at first and {last} after {round} rounds");
    }
}
