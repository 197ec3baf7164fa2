//! Appends that are cut short: by a daemon that dies in the middle of one.

use ebb_testkit::{Builder, Cluster, Node, skip_reason};
use ebb_tests::copies::{self, has_partner};
use rustix::process::Signal;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::time::Duration;

fn appends(node: &Node) -> u64 {
    // Not by a process, which would tell a node that stands still of what it closes as it begins.
    node.counter("ebb_requests_total{request=\"append\"}")
}

/// Another node cuts the file. The append is refused, asked for again and made, and the daemon dies before
/// its bytes are stored: what it has at their place was cut, and does not come back.
fn killed_in_an_append_behind_a_cut(cluster: &Cluster) {
    let [writer, cutter, reader] = [0, 1, 2].map(|i| cluster.node(i));
    let mut file =
        File::options().append(true).create(true).open(writer.path("log")).expect("open");
    file.write_all(b"some lines\n").expect("append");
    File::options().write(true).open(cutter.path("log")).unwrap().set_len(4).expect("cut");
    // Whoever has a lease is waited for before a change is answered.
    let held = File::open(reader.path("log")).expect("open");
    held.read_exact_at(&mut [0; 4], 0).expect("read");
    let before = appends(writer);
    reader.signal(Signal::STOP);
    let appending = std::thread::spawn(move || file.write_all(b" and more"));
    std::thread::sleep(Duration::from_secs(1));
    let (waits, asked) = (!appending.is_finished(), appends(writer) - before);
    writer.kill9();
    reader.signal(Signal::CONT);
    assert!(waits, "nobody was waited for");
    assert_eq!(asked, 2, "refused, and made");
    appending.join().expect("no panic").expect_err("the daemon is dead");
    drop(held);
    // What its cache has is not lost: it is mounted again.
    let _ = writer.ebb("umount", &["--no-drain"], &[]);
    writer.mount();
    for node in [reader, cutter, writer] {
        let found = fs::read(node.path("log")).expect("read");
        assert!(found == b"some\0\0\0\0\0\0\0\0\0", "{}", found.escape_ascii());
    }
    cluster.umount_all();
    let found = fs::read(cluster.backing().join("log")).expect("read");
    assert!(found == b"some\0\0\0\0\0\0\0\0\0", "{}", found.escape_ascii());
}

fn builder() -> Builder {
    Cluster::builder().nodes(3).consistency("posix").flush("end").separate_meta()
}

/// (Past the daemon the other node has the cut made here.)
#[test]
fn what_another_node_cut_does_not_come_back_where_an_append_is_lost() {
    if skip_reason().is_none() {
        killed_in_an_append_behind_a_cut(&builder().option("--io-path", "daemon").start());
    }
}

#[test]
fn what_another_node_cut_does_not_come_back_with_copies() {
    if skip_reason().is_none() {
        let cluster = copies::builder(3, "posix").separate_meta().start();
        cluster.nodes().iter().for_each(has_partner);
        killed_in_an_append_behind_a_cut(&cluster);
    }
}
