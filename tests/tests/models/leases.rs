//! Leases through real mounts: what a node does not ask while nobody shares, what everybody sees
//! when somebody does, and what a holder costs that stands still or is dead.

use ebb_testkit::random::{generator, seed};
use ebb_testkit::{Cluster, Node};
use ebb_tests::content::{bytes, same};
use rand::{Rng, RngCore};
use rustix::process::Signal;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

/// The service's lease time, and what a busy machine may add to it.
const LEASE: Duration = Duration::from_secs(5);
const BUSY: Duration = Duration::from_secs(4);

const RECORD: u64 = 8 << 10;

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).expect("open")
}

fn requests(node: &Node, name: &str) -> u64 {
    node.status()["rpc"][name].as_u64().unwrap_or(0)
}

fn read(file: &File, offset: u64, len: u64) -> Vec<u8> {
    let mut got = vec![0; len as usize];
    file.read_exact_at(&mut got, offset).expect("read");
    got
}

/// Questions of 1000 random small reads, after a first one, of a file that another node wrote.
fn queries_of_random_reads(more: &[&str]) -> u64 {
    const SIZE: u64 = 8 << 20;
    let cluster = Cluster::builder().nodes(2).consistency("commit").flush("end").prepare();
    cluster.nodes().iter().for_each(|n| n.mount_with(more));
    let (a, b) = (cluster.node(0), cluster.node(1));
    let data = bytes(1, 0, 0, SIZE);
    std::fs::write(a.path("f"), &data).expect("write");
    let file = open(&b.path("f"));
    read(&file, 0, 1);
    let before = requests(b, "query");
    let mut random = generator(7);
    for _ in 0..1000 {
        let offset = random.random_range(0..SIZE - RECORD);
        let want = &data[offset as usize..(offset + RECORD) as usize];
        same("a random read", &read(&file, offset, RECORD), want);
    }
    requests(b, "query") - before
}

#[test]
fn random_reads_under_commit_do_not_ask() {
    let asked = queries_of_random_reads(&[]);
    assert!(asked < 10, "{asked} queries");
}

/// The option for measurements does what it says, and the count above means something.
#[test]
fn a_naive_node_asks_every_time() {
    let asked = queries_of_random_reads(&["--naive"]);
    assert!(asked >= 1000, "{asked} queries");
}

#[test]
fn stats_and_reads_of_an_open_file_under_posix_do_not_ask() {
    // Past the daemon the file would sit at the first node.
    let cluster = Cluster::builder().nodes(2).consistency("posix").flush("end");
    let cluster = cluster.option("--io-path", "daemon").start();
    let (a, b) = (cluster.node(0), cluster.node(1));
    std::fs::write(a.path("f"), [1; 100]).expect("write");
    let (fa, fb) = (open(&a.path("f")), open(&b.path("f")));
    for file in [&fa, &fb] {
        read(file, 0, 100);
        file.metadata().expect("stat");
    }
    let before: Vec<_> = [a, b].map(|n| (requests(n, "query"), requests(n, "getattr"))).into();
    for _ in 0..300 {
        for file in [&fa, &fb] {
            assert_eq!(read(file, 0, 100), [1; 100]);
            assert_eq!(file.metadata().expect("stat").len(), 100);
        }
    }
    for (node, (queries, getattrs)) in [a, b].into_iter().zip(before) {
        let (q, g) = (requests(node, "query") - queries, requests(node, "getattr") - getattrs);
        assert!(q < 10 && g < 10, "{}: {q} queries, {g} getattrs", node.name());
    }
    let leases = &b.status()["leases"];
    assert!(
        leases["held"].as_u64() > Some(0) && leases["answered"].as_u64() > Some(500),
        "{leases}"
    );
}

/// What a file looks like to everybody, after each step of a random sequence.
struct Oracle {
    content: Vec<u8>,
    mode: u32,
}

fn check(what: &str, node: &Node, file: &File, want: &Oracle) {
    let meta = file.metadata().expect("stat");
    assert_eq!(meta.len(), want.content.len() as u64, "{what}: size on {}", node.name());
    assert_eq!(meta.mode() & 0o777, want.mode, "{what}: mode on {}", node.name());
    let got = read(file, 0, want.content.len() as u64);
    same(&format!("{what}: on {}", node.name()), &got, &want.content);
}

/// Every node has the file open; after each change of one of them, all others must see it at once
/// (under commit: after an fsync), through reads and stats that mostly need no question.
fn storm(model: &str, nodes: usize, steps: usize) {
    let cluster = Cluster::builder().nodes(nodes).consistency(model).start();
    let seed = seed();
    let mut random = generator(seed);
    let at = |n: usize| cluster.node(n).path("f");
    std::fs::write(at(0), [7; 5000]).expect("write");
    let files: Vec<File> = (0..nodes).map(|n| open(&at(n))).collect();
    let mut want = Oracle { content: vec![7; 5000], mode: 0o644 };
    std::fs::set_permissions(at(0), std::fs::Permissions::from_mode(0o644)).expect("chmod");
    for step in 0..steps {
        let n = random.random_range(0..nodes);
        let what = match random.random_range(0..10) {
            0..6 => {
                let offset = random.random_range(0..want.content.len() + 100);
                let mut data = vec![0; random.random_range(1..3000)];
                random.fill_bytes(&mut data);
                files[n].write_all_at(&data, offset as u64).expect("write");
                if model == "commit" {
                    files[n].sync_all().expect("fsync");
                }
                let end = (offset + data.len()).max(want.content.len());
                want.content.resize(end, 0);
                want.content[offset..offset + data.len()].copy_from_slice(&data);
                "write"
            }
            6..8 => {
                let len = random.random_range(0..8000);
                files[n].set_len(len as u64).expect("truncate");
                want.content.resize(len, 0);
                "truncate"
            }
            8 => {
                want.mode = 0o600 + random.random_range(0..8) * 8;
                let mode = std::fs::Permissions::from_mode(want.mode);
                std::fs::set_permissions(at(n), mode).expect("chmod");
                "chmod"
            }
            _ => {
                // A name more, and away again: the link count is an attribute, too.
                let other = cluster.node(n).path("g");
                std::fs::hard_link(at(n), &other).expect("link");
                for file in &files {
                    assert_eq!(
                        file.metadata().expect("stat").nlink(),
                        2,
                        "seed {seed} step {step}"
                    );
                }
                std::fs::remove_file(&other).expect("unlink");
                for file in &files {
                    assert_eq!(
                        file.metadata().expect("stat").nlink(),
                        1,
                        "seed {seed} step {step}"
                    );
                }
                "link"
            }
        };
        let what = format!("{model}, seed {seed}, step {step}, {what} by node{n}");
        for (node, file) in cluster.nodes().iter().zip(&files) {
            for _ in 0..random.random_range(1..3) {
                check(&what, node, file, &want);
            }
        }
    }
    let answered: u64 =
        cluster.nodes().iter().filter_map(|n| n.status()["leases"]["answered"].as_u64()).sum();
    assert!(answered > steps as u64 / 2, "the leases were of no use: {answered}");
    drop(files);
    cluster.umount_all();
    same("the backing", &std::fs::read(cluster.backing().join("f")).expect("read"), &want.content);
}

#[test]
fn a_storm_of_two_nodes_under_posix() {
    storm("posix", 2, 250);
}

#[test]
fn a_storm_of_four_nodes_under_posix() {
    storm("posix", 4, 120);
}

#[test]
fn a_storm_of_three_nodes_under_commit() {
    storm("commit", 3, 150);
}

/// A reader with a lease whose daemon is stopped or killed; how long the next write of another
/// node takes, which nobody must wait for longer than the lease time.
fn write_beside_a_silent_holder(cluster: &Cluster, signal: Signal) -> File {
    let (a, b) = (cluster.node(0), cluster.node(1));
    std::fs::write(a.path("f"), [1; 4096]).expect("write");
    let held = open(&b.path("f"));
    assert_eq!(read(&held, 0, 4096), [1; 4096]);
    assert_eq!(read(&held, 0, 4096), [1; 4096]);
    assert!(b.status()["leases"]["held"].as_u64() > Some(0));
    let writer = open(&a.path("f"));
    match signal {
        Signal::KILL => b.kill9(),
        other => b.signal(other),
    }
    let start = Instant::now();
    writer.write_all_at(&[2; 4096], 0).expect("write");
    let first = start.elapsed();
    println!("the first write took {first:?}");
    assert!(first < LEASE + BUSY, "the first write took {first:?}");
    let start = Instant::now();
    for _ in 0..20 {
        writer.write_all_at(&[3; 4096], 0).expect("write");
    }
    let others = start.elapsed();
    assert!(others < BUSY, "the writes after it took {others:?}");
    held
}

#[test]
fn a_stopped_holder_delays_a_write_by_a_lease_and_is_never_stale() {
    let cluster = Cluster::builder().nodes(2).consistency("posix").flush("end").start();
    let held = write_beside_a_silent_holder(&cluster, Signal::STOP);
    let b = cluster.node(1);
    // Asked while it stands still, answered when it goes on: by then its lease is over.
    let reading = std::thread::spawn(move || read(&held, 0, 4096));
    std::thread::sleep(Duration::from_millis(300));
    b.signal(Signal::CONT);
    assert_eq!(reading.join().expect("the reader"), [3; 4096], "stale bytes");
    assert_eq!(std::fs::metadata(b.path("f")).expect("stat").len(), 4096);
    cluster.umount_all();
}

#[test]
fn a_killed_holder_delays_a_write_by_a_lease() {
    let cluster = Cluster::builder().nodes(2).consistency("posix").flush("end").start();
    drop(write_beside_a_silent_holder(&cluster, Signal::KILL));
}

/// A service that was restarted does not know the leases of before. A node that is still away may
/// hold some: changes are acknowledged when it is back, or one lease time later.
#[test]
fn a_restarted_service_waits_for_the_nodes_of_before() {
    // Past the daemon nobody else has a lease of what the first node has open.
    let cluster = Cluster::builder().nodes(2).consistency("posix").flush("end");
    let mut cluster = cluster.option("--io-path", "daemon").separate_meta().start();
    let at_b = cluster.node(1).path("f");
    let fa = {
        let a = cluster.node(0).path("f");
        std::fs::write(&a, [1; 4096]).expect("write");
        open(&a)
    };
    // Closed again: starting a program would have to close it, and hang while the node is stopped.
    assert_eq!(std::fs::read(&at_b).expect("read"), [1; 4096]);
    cluster.node(1).signal(Signal::STOP);
    cluster.kill_meta();
    cluster.restart_meta();
    let start = Instant::now();
    fa.write_all_at(&[2; 4096], 0).expect("write");
    let took = start.elapsed();
    cluster.node(1).signal(Signal::CONT);
    assert!(took > Duration::from_secs(1), "nobody was waited for: {took:?}");
    assert!(took < LEASE + BUSY, "{took:?}");
    assert_eq!(std::fs::read(&at_b).expect("read"), [2; 4096], "stale bytes");
    // With everybody there nothing waits.
    let start = Instant::now();
    fa.write_all_at(&[3; 4096], 0).expect("write");
    assert!(start.elapsed() < BUSY);
    assert_eq!(std::fs::read(&at_b).expect("read"), [3; 4096]);
    drop(fa);
    cluster.umount_all();
}
