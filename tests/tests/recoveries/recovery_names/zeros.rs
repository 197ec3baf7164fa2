//! Files that are as long as they are and have no byte that counts: no cache has anything of them but the
//! length that its node heard last.

use super::{Way, cluster, cluster_of, run_all, sync};
use ebb_testkit::{Cluster, Node, random, skip_reason};
use ebb_tests::recoveries::{all_die, ended_with, recover, said};
use ebb_tests::tools::names;
use std::fs::File;
use std::os::unix::fs::FileExt;

/// A file that is as long as this and has never had a byte that counts, or has none any more.
const ZEROS: u64 = 6657;

fn is_zeros(cluster: &Cluster, name: &str, len: u64) {
    let got = std::fs::read(cluster.backing().join(name)).expect("it is on the backing");
    assert!(got.len() as u64 == len && got.iter().all(|b| *b == 0), "{name}: {} bytes", got.len());
}

fn set_len(node: &Node, name: &str, len: u64) {
    let file = File::options().write(true).create(true).truncate(false).open(node.path(name));
    file.and_then(|f| f.set_len(len)).expect("a length");
}

#[test]
fn a_file_of_zeros_alone_comes_back() {
    let Some(mut cluster) = cluster(1) else { return };
    let node = cluster.node(0);
    set_len(node, "grown", ZEROS);
    std::fs::write(node.path("cut"), vec![7; 20_000]).expect("write");
    set_len(node, "cut", 0);
    set_len(node, "cut", ZEROS);
    sync(node);
    all_die(&mut cluster);
    ended_with(&recover(&cluster, cluster.node(0), &[]), 0, &[]);
    is_zeros(&cluster, "grown", ZEROS);
    is_zeros(&cluster, "cut", ZEROS);
}

/// Two nodes have the file open, one writes behind where the other cuts it: nobody's cache has a byte
/// of it, so no recovery has anything to say but the name.
#[test]
fn what_two_nodes_cut_down_to_zeros_comes_back() {
    for way in [Way::AtOnce, Way::InTurn, Way::Killed] {
        let Some(mut cluster) = cluster_of("posix", 2) else { return };
        let mut dice = random::generator(random::seed());
        let (a, b) = (cluster.node(0), cluster.node(1));
        let write = |node: &Node, name: &str| {
            File::options().write(true).create(true).truncate(false).open(node.path(name))
        };
        for name in ["first", "second"] {
            let (one, two) = (write(a, name).expect("open"), write(b, name).expect("open"));
            one.write_all_at(&[7; 3000], 10_000).expect("write");
            one.sync_all().expect("fsync");
            let cutter = if name == "first" { &one } else { &two };
            cutter.set_len(ZEROS).expect("cut");
            cutter.sync_all().expect("fsync");
        }
        cluster.nodes().iter().for_each(sync);
        all_die(&mut cluster);
        run_all(&cluster, way, &mut dice);
        is_zeros(&cluster, "first", ZEROS);
        is_zeros(&cluster, "second", ZEROS);
    }
}

/// What one node has heard last of the length of such a file is not what another one has.
#[test]
fn the_newest_length_of_a_file_of_zeros_counts() {
    for (older, newer) in [(ZEROS, 50), (50, ZEROS), (0, ZEROS), (ZEROS, 0)] {
        for order in [[0, 1], [1, 0]] {
            let Some(mut cluster) = cluster_of("posix", 2) else { return };
            set_len(cluster.node(0), "file", older);
            set_len(cluster.node(1), "file", newer);
            cluster.nodes().iter().for_each(sync);
            all_die(&mut cluster);
            for node in order {
                ended_with(&recover(&cluster, cluster.node(node), &["--wait", "0s"]), 0, &[]);
            }
            is_zeros(&cluster, "file", newer);
        }
    }
}

/// What a recovery made is its user's from then on.
#[test]
fn a_file_of_zeros_that_is_in_use_since_is_left_alone() {
    for (order, shared) in [([0, 1], false), ([1, 0], false), ([0, 1], true), ([1, 0], true)] {
        let Some(mut cluster) = cluster_of("posix", 2) else { return };
        set_len(cluster.node(0), "file", ZEROS);
        // Who cuts what others have open notes that it cut what may be theirs.
        let open = shared.then(|| File::open(cluster.node(0).path("file")).expect("open"));
        set_len(cluster.node(1), "file", 50);
        cluster.nodes().iter().for_each(sync);
        drop(open);
        all_die(&mut cluster);
        let [first, second] = order.map(|n| cluster.node(n));
        ended_with(&recover(&cluster, first, &["--wait", "0s"]), 0, &[]);
        // Of the second length alone nobody but its node tells the name.
        std::fs::write(cluster.backing().join("file"), "in use").expect("write");
        let output = recover(&cluster, second, &["--wait", "0s"]);
        assert!(matches!(output.status.code(), Some(0 | 3)), "{}", said(&output));
        let got = std::fs::read_to_string(cluster.backing().join("file")).expect("read");
        assert_eq!(got, "in use", "{}", said(&output));
    }
}

/// Zeros are made of a file only when nobody has its bytes.
#[test]
fn a_file_whose_bytes_are_in_another_cache_is_not_made_of_zeros() {
    let Some(mut cluster) = cluster_of("posix", 2) else { return };
    let (a, b) = (cluster.node(0), cluster.node(1));
    set_len(b, "file", ZEROS);
    b.wait_status(std::time::Duration::from_secs(20), |s| s["open_files"] == 0);
    std::fs::write(a.path("file"), vec![7; 100]).expect("write");
    File::open(a.path("file")).and_then(|f| f.sync_all()).expect("fsync");
    std::fs::rename(b.path("file"), b.path("moved")).expect("rename");
    cluster.nodes().iter().for_each(sync);
    all_die(&mut cluster);
    let [a, b] = [0, 1].map(|n| cluster.node(n));
    let early = recover(&cluster, b, &["--wait", "0s"]);
    ended_with(&early, 3, &["moved: 0 bytes (bytes of it are in caches"]);
    assert!(!cluster.backing().join("moved").exists());
    ended_with(&recover(&cluster, a, &["--wait", "0s"]), 0, &[]);
    ended_with(&recover(&cluster, b, &["--wait", "0s"]), 0, &[]);
    assert_eq!(std::fs::read(cluster.backing().join("moved")).expect("read"), vec![7; 100]);
}

/// Each way in which a node tells the service of what it writes, and each way to the cache.
const MOUNTS: [(&str, &str); 6] = [
    ("posix", "daemon"),
    ("posix", "auto"),
    ("commit", "daemon"),
    ("commit", "auto"),
    ("session", "auto"),
    ("mpiio", "auto"),
];

fn mounted(model: &str, io_path: &str) -> Option<Cluster> {
    let builder = Cluster::builder().nodes(2).separate_meta().flush("end");
    let builder = builder.consistency(model).option("--io-path", io_path);
    skip_reason().is_none().then(|| builder.start())
}

fn is_past_the_daemon(node: &Node, io_path: &str) {
    let opens = node.status()["opens"]["passthrough-write"].as_u64();
    // Without root or the tracker everything goes through the daemon.
    let required = io_path == "auto" && std::env::var_os("EBB_REQUIRE_TRACKER").is_some();
    assert!(!required || opens > Some(0), "{opens:?}");
}

/// Its only bytes are cut off before anybody closes it, and the service hears only then that nobody
/// writes to it any more.
#[test]
fn what_was_cut_down_to_zeros_while_it_was_open_comes_back() {
    for (model, io_path) in MOUNTS {
        let Some(mut cluster) = mounted(model, io_path) else { return };
        let node = cluster.node(0);
        let file = File::create(node.path("file")).expect("create");
        file.write_all_at(&[7; 45], 55_915).expect("write");
        file.set_len(ZEROS).expect("cut");
        drop(file);
        is_past_the_daemon(node, io_path);
        node.wait_closed();
        sync(node);
        all_die(&mut cluster);
        ended_with(&recover(&cluster, cluster.node(0), &["--wait", "0s"]), 0, &[]);
        is_zeros(&cluster, "file", ZEROS);
    }
}

/// Whoever asks where a file is does not make it shorter.
#[test]
fn a_file_of_zeros_that_was_asked_for_is_as_long_as_it_was() {
    for model in ["posix", "session"] {
        let Some(mut cluster) = cluster_of(model, 1) else { return };
        let node = cluster.node(0);
        set_len(node, "file", ZEROS);
        assert_eq!(node.shell("getfattr -n user.ebb.consistency --only-values file"), model);
        node.wait_closed();
        sync(node);
        all_die(&mut cluster);
        ended_with(&recover(&cluster, cluster.node(0), &["--wait", "0s"]), 0, &[]);
        is_zeros(&cluster, "file", ZEROS);
    }
}

/// What takes the place of an older file was flushed into a part file, and then cut down to what was never
/// written: nobody's journal has a byte of it, and it waits for its name all the same.
#[test]
fn what_was_flushed_and_cut_down_to_zeros_comes_back() {
    for (nodes, model) in [(1, "session"), (1, "posix"), (2, "posix")] {
        if skip_reason().is_some() {
            return;
        }
        // What is written past the daemon is flushed when it is closed.
        let builder = Cluster::builder().nodes(nodes).separate_meta().consistency(model);
        let builder = builder.flush("immediate").option("--io-path", "daemon");
        let mut cluster = builder.start();
        let node = cluster.node(0);
        std::fs::write(node.path("file"), "older").expect("write");
        node.drain();
        let file =
            File::options().write(true).truncate(true).open(node.path("file")).expect("open");
        file.write_all_at(&[7; 3000], 10_000).expect("write");
        file.sync_all().expect("fsync");
        node.wait_status(std::time::Duration::from_secs(20), |s| s["dirty_bytes"] == 0);
        let there = names(cluster.backing());
        let has_part = there.iter().any(|name| name.starts_with(".ebb-part-"));
        assert!(has_part, "it was flushed, and waits for its name: {there:?}");
        assert_eq!(std::fs::read(cluster.backing().join("file")).expect("read"), b"older");
        file.set_len(ZEROS).expect("cut");
        file.sync_all().expect("fsync");
        cluster.nodes().iter().for_each(sync);
        all_die(&mut cluster);
        drop(file);
        for node in cluster.nodes() {
            let _ = recover(&cluster, node, &["--wait", "0s"]);
        }
        ended_with(&recover(&cluster, cluster.node(0), &["--wait", "0s"]), 0, &[]);
        is_zeros(&cluster, "file", ZEROS);
    }
}
