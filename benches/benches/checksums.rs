//! What the sums of cached bytes cost: the same on a mount without them ("bare" is `--checksums off`) and
//! with them. Writes of several sizes, of part of a block too; a drain; first reads of another node's bytes.

use ebb_benches::{MIB, Report, rate, write, write_new};
use ebb_testkit::{Cluster, Node, describe};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

const FILE_BYTES: usize = 32 << 20;
const SMALL_BYTES: usize = 2 << 20;

fn cluster(checksums: &str) -> Cluster {
    let cluster = Cluster::builder().nodes(2).consistency("session").flush("end").separate_meta();
    cluster.option("--checksums", checksums).option("--durability", "local").start()
}

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).expect("open")
}

/// Writes a file and drains it; the rate of the drain.
fn drain(node: &Node) -> f64 {
    std::fs::write(node.path("drained"), vec![0x5a; FILE_BYTES]).expect("write");
    rate(|| {
        let drained = node.ebb("drain", &[], &[]);
        assert!(drained.status.success(), "{}", describe(&drained));
        FILE_BYTES as f64 / MIB
    })
}

/// Writes a file on one node and reads it on the other; the rate of the reading.
fn first_read(cluster: &Cluster) -> f64 {
    let (writer, reader) = (cluster.node(0), cluster.node(1));
    std::fs::write(writer.path("theirs"), vec![0x5b; FILE_BYTES]).expect("write");
    let file = File::open(reader.path("theirs")).expect("open");
    let mut data = vec![0; 1 << 20];
    rate(|| {
        for at in (0..FILE_BYTES).step_by(data.len()) {
            file.read_exact_at(&mut data, at as u64).expect("read");
        }
        FILE_BYTES as f64 / MIB
    })
}

/// Writes and syncs, again and again.
fn synced(file: &File, record: usize) -> f64 {
    let data = vec![0x77; record];
    rate(|| {
        for n in 0..200 {
            file.write_all_at(&data, (n * record) as u64).expect("write");
            file.sync_all().expect("fsync");
        }
        200.0
    })
}

fn main() {
    let mut report = Report::new("checksums");
    report.head("off", "on");
    let (off, on) = (cluster("off"), cluster("on"));
    let path = |cluster: &Cluster, name: &str| cluster.node(0).path(name);
    let (plain, summed) = (open(&path(&off, "f")), open(&path(&on, "f")));
    for record in [100, 4 << 10, 8 << 10, 64 << 10, 1 << 20] {
        let bytes = if record < 4096 { SMALL_BYTES } else { FILE_BYTES };
        report.compare(
            format!("new file, {record} B records"),
            "MiB/s",
            || write_new(&path(&off, "new"), record, bytes),
            || write_new(&path(&on, "new"), record, bytes),
        );
        report.compare(
            format!("written over, {record} B records"),
            "MiB/s",
            || write(&plain, record, bytes),
            || write(&summed, record, bytes),
        );
    }
    report.compare(
        "4 KiB and an fsync".to_owned(),
        "1/s",
        || synced(&plain, 4096),
        || synced(&summed, 4096),
    );
    report.compare("drain".to_owned(), "MiB/s", || drain(off.node(0)), || drain(on.node(0)));
    report.compare(
        "first read of 1 MiB from a peer".to_owned(),
        "MiB/s",
        || first_read(&off),
        || first_read(&on),
    );
    println!("{}", report.save().expect("save").display());
}
