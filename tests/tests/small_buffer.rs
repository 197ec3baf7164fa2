//! Buffers smaller than the data: what is flushed goes to make room, and every node must then find
//! it on the backing.

use ebb_testkit::{Cluster, Node, skip_reason};
use ebb_tests::content::{bytes, same};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;

/// More than the buffer holds.
const MUCH: u64 = 600_000;

fn write_at(node: &Node, offset: u64, data: &[u8]) {
    let mut options = File::options();
    let file = options.write(true).create(true).truncate(false).open(node.path("f"));
    file.expect("open").write_all_at(data, offset).expect("write");
}

/// So that the node gives up what it has flushed.
fn need_room(node: &Node) {
    node.drain();
    for i in 0..3 {
        fs::write(node.path(format!("{}-{i}", node.name())), bytes(9, i, 0, MUCH)).expect("write");
    }
    node.drain();
}

/// A node that has given bytes up must still learn how much of the file the backing has: this was
/// zeros once.
#[test]
fn what_others_append_and_give_up_is_read_from_the_backing() {
    if skip_reason().is_some() {
        return;
    }
    let builder = Cluster::builder().nodes(2).consistency("session").flush("immediate");
    let cluster = builder.option("--cache-size", "400KiB").start();
    let (a, b) = (cluster.node(0), cluster.node(1));
    let whole = bytes(1, 1, 0, 5_000);
    write_at(a, 0, &whole[..1_000]);
    need_room(a);
    // Held open: the node keeps what it knows of the file.
    let held = File::open(a.path("f")).expect("open");
    write_at(b, 1_000, &whole[1_000..]);
    need_room(b);
    same("on the node that was first", &fs::read(a.path("f")).expect("read"), &whole);
    same("on the other", &fs::read(b.path("f")).expect("read"), &whole);
    drop(held);
    cluster.umount_all();
    same("on the backing", &fs::read(cluster.backing().join("f")).expect("read"), &whole);
}
