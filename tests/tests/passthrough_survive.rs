//! Daemons that are killed while the kernel reads and writes files past them: programs go on with
//! their open files, and what they write meanwhile is found by the next daemon.
//!
//! EBB_SEED: only this seed. EBB_STEPS: steps of the random programs.

use ebb_testkit::{Builder, Cluster, Node, number, random};
use ebb_tests::content::{bytes, same};
use ebb_tests::model::close;
use ebb_tests::tools;
use ebb_tests::turns::{Turns, opens, rw};
use rand::Rng;
use rand::seq::SliceRandom;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

fn past(model: &str, nodes: usize) -> Builder {
    let builder = Cluster::builder().nodes(nodes).consistency(model).supervised();
    builder.option("--io-path", "passthrough").flush("end")
}

fn restarts(node: &Node) -> u64 {
    node.status()["supervisor"]["restarts"].as_u64().unwrap_or(0)
}

#[test]
fn a_writer_and_a_reader_go_on() {
    let cluster = past("session", 2).start();
    let (node, other) = (cluster.node(0), cluster.node(1));
    let data = bytes(1, 0, 0, 300_000);
    let mut new = OpenOptions::new();
    let file = new.read(true).write(true).create_new(true).open(node.path("f")).expect("create");
    file.write_all_at(&data[..100_000], 0).expect("write");
    assert_eq!(opens(node, "passthrough-write"), 1);
    assert!(node.kill_daemon(), "another one goes on");
    file.write_all_at(&data[100_000..200_000], 100_000).expect("write past the next one");
    assert!(node.kill_daemon_only());
    // Nobody serves the mount just now.
    file.write_all_at(&data[200_000..], 200_000).expect("write past nobody");
    let mut got = vec![0; 300_000];
    file.read_exact_at(&mut got, 0).expect("read");
    same("the open file", &got, &data);
    // A second handle of the same inode must be passed through like the first.
    same("another handle", &std::fs::read(node.path("f")).expect("read"), &data);
    close(file).expect("close");
    assert_eq!(restarts(node), 2);
    same("the other node", &std::fs::read(other.path("f")).expect("read"), &data);

    let reader = File::open(node.path("f")).expect("open");
    assert!(opens(node, "passthrough-read") > 0, "{:#}", node.status()["opens"]);
    assert!(node.kill_daemon());
    reader.read_exact_at(&mut got, 0).expect("read");
    same("a reader", &got, &data);
    drop(reader);
    node.drain();
    same("backing", &std::fs::read(cluster.backing().join("f")).expect("read"), &data);
}

/// A mapping has outlived its handle, and its daemon as well.
#[test]
fn a_mapping_goes_on() {
    let cluster = past("session", 1).start();
    let node = cluster.node(0);
    File::create(node.path("mapped")).expect("create");
    let file = rw(&node.path("mapped"));
    file.set_len(8192).expect("truncate");
    file.write_all_at(&[1; 10], 0).expect("write");
    // SAFETY: the file is as long as the mapping.
    let map = unsafe {
        use std::os::fd::AsRawFd;
        let how = libc::PROT_READ | libc::PROT_WRITE;
        libc::mmap(std::ptr::null_mut(), 8192, how, libc::MAP_SHARED, file.as_raw_fd(), 0)
    };
    assert_ne!(map, libc::MAP_FAILED);
    close(file).expect("close");
    std::thread::sleep(Duration::from_millis(50));
    assert!(node.kill_daemon());
    // SAFETY: the mapping is there still.
    unsafe {
        map.cast::<u8>().add(4).write(9);
        map.cast::<u8>().add(5000).write(8);
        assert_eq!(libc::munmap(map, 8192), 0);
    }
    node.umount();
    let got = std::fs::read(cluster.backing().join("mapped")).expect("read");
    assert_eq!((got.len(), got[3], got[4], got[5], got[5000]), (8192, 1, 9, 1, 8));
}

/// All nodes write one file in records that share blocks, in random order, while daemons are killed;
/// then every node reads all of it. Several times over: later rounds rewrite what is there.
#[test]
fn many_writers_go_on() {
    const NODES: usize = 3;
    const RECORD: u64 = 3000;
    let seed = random::seed();
    let cluster = past("session", NODES).start();
    let per_node = tools::amount("EBB_STEPS", 600);
    let all = per_node * NODES as u64;
    for round in 0..3 {
        let name = format!("shared-{round}");
        File::create(cluster.node(0).path(&name)).expect("create");
        let barrier = Barrier::new(NODES);
        let done = AtomicBool::new(false);
        let want: Vec<u8> = (0..all).flat_map(|r| bytes(seed, round, r, RECORD)).collect();
        std::thread::scope(|threads| {
            let writers: Vec<_> = cluster
                .nodes()
                .iter()
                .enumerate()
                .map(|(who, node)| {
                    let (barrier, want, name) = (&barrier, &want, &name);
                    threads.spawn(move || {
                        let what = format!("seed {seed}, round {round}, node {who}");
                        let mut records: Vec<u64> = (who as u64..all).step_by(NODES).collect();
                        records.shuffle(&mut random::generator(seed + who as u64));
                        let file =
                            OpenOptions::new().write(true).open(node.path(name)).expect("open");
                        barrier.wait();
                        for r in records {
                            let at = (r * RECORD) as usize;
                            let data = &want[at..at + RECORD as usize];
                            file.write_all_at(data, at as u64).expect("write");
                            std::thread::sleep(Duration::from_micros(500));
                        }
                        close(file).expect("close");
                        barrier.wait();
                        same(&what, &std::fs::read(node.path(name)).expect("read"), want);
                    })
                })
                .collect();
            let killer = threads.spawn(|| {
                let mut dice = random::generator(seed ^ round);
                while !done.load(Relaxed) {
                    std::thread::sleep(Duration::from_millis(dice.random_range(20..400)));
                    let _ = cluster.node(dice.random_range(0..NODES)).kill_daemon_only();
                }
            });
            let ended: Vec<_> = writers.into_iter().map(|w| w.join()).collect();
            done.store(true, Relaxed);
            killer.join().expect("killer");
            ended.into_iter().for_each(|e| e.expect("writer"));
        });
        for node in cluster.nodes() {
            node.wait_status(Duration::from_secs(30), |s| number(s, "open_files") == 0);
            node.drain();
        }
        let got = std::fs::read(cluster.backing().join(&name)).expect("read");
        same(&format!("seed {seed}, round {round}, backing"), &got, &want);
    }
    let restarts: u64 = cluster.nodes().iter().map(restarts).sum();
    println!("{restarts} daemons were killed, seed {seed}");
    assert!(restarts > 3, "{restarts}");
}

fn turns(model: &str, seed: u64) {
    let way = std::env::var("EBB_TEST_WAY").unwrap_or_else(|_| "passthrough".into());
    let cluster = past(model, 3).option("--io-path", &way).start();
    let steps = tools::amount("EBB_STEPS", 120);
    Turns { cluster: &cluster, model, seed, kills: true }.take(steps);
    let restarts: u64 = cluster.nodes().iter().map(restarts).sum();
    println!("{restarts} daemons were killed, seed {seed}");
    assert!(restarts > 0);
}

#[test]
fn nodes_take_turns_under_a_lock_while_daemons_are_killed_session() {
    turns("session", random::seed());
}

#[test]
fn nodes_take_turns_under_a_lock_while_daemons_are_killed_mpiio() {
    turns("mpiio", random::seed());
}
