//! What is paid for sharing, and what for a model that could share: several nodes on one file beside
//! files of their own, reads of another node's file under each model, and a file of one node alone
//! under posix and commit, all beside the same work under session.

use ebb_benches::{MIB, Report, rate, write, write_new};
use ebb_testkit::{Cluster, Node};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::time::Duration;

const WRITERS: usize = 4;
/// What each node writes, about.
const NODE_BYTES: usize = 32 << 20;
/// Of a file of one node.
const SOLE_BYTES: usize = 8 << 20;
/// Until the daemons have freed what was removed: whoever comes next must not pay for it.
const FREED: Duration = Duration::from_millis(200);
const READ_BYTES: usize = 16 << 20;
const RECORD: usize = 8 << 10;

fn cluster(nodes: usize, model: &str, io_path: &str) -> Cluster {
    let builder = Cluster::builder().nodes(nodes).consistency(model).flush("end").separate_meta();
    builder.option("--io-path", io_path).start()
}

fn main() {
    let mut report = Report::new("sharing");
    report.head("reference", "measured");
    for io_path in ["auto", "daemon"] {
        many_writers(&mut report, io_path);
    }
    others_file(&mut report);
    for io_path in ["auto", "daemon"] {
        one_node_alone(&mut report, io_path);
    }
    println!("{}", report.save().expect("save").display());
}

// ---- one file of several nodes ---------------------------------------------------------------

/// All nodes open a file, and then write at the same time; MiB per second of a node, with the close that
/// publishes.
fn write_all(
    paths: &[PathBuf],
    record: usize,
    offset: impl Fn(usize, usize) -> usize + Sync,
) -> f64 {
    let records = NODE_BYTES / record;
    let barrier = Barrier::new(paths.len());
    let one = |who: usize, path: &Path| {
        let data = vec![who as u8 + 1; record];
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(path);
        let file = file.expect("open");
        // As after MPI_File_open.
        barrier.wait();
        rate(|| {
            for i in 0..records {
                file.write_all_at(&data, offset(who, i) as u64).expect("write");
            }
            drop(file);
            (records * record) as f64 / MIB
        })
    };
    let rates: Vec<f64> = std::thread::scope(|scope| {
        let threads: Vec<_> = paths
            .iter()
            .enumerate()
            .map(|(who, path)| scope.spawn(move || one(who, path)))
            .collect();
        threads.into_iter().map(|t| t.join().expect("writer")).collect()
    });
    rates.iter().sum::<f64>() / rates.len() as f64
}

fn many_writers(report: &mut Report, io_path: &str) {
    let cluster = cluster(WRITERS, "session", io_path);
    let on = |name: &dyn Fn(usize) -> String| -> Vec<PathBuf> {
        cluster.nodes().iter().enumerate().map(|(i, n)| n.path(name(i))).collect()
    };
    let (own, shared) = (on(&|who| format!("own-{who}")), on(&|_| "shared".into()));
    for record in [RECORD, 47_008] {
        report.compare(
            format!("{io_path}: {WRITERS} nodes, {record} byte records, own / one file"),
            "MiB/s a node",
            || {
                let speed = write_all(&own, record, |_, i| i * record);
                own.iter().for_each(|p| std::fs::remove_file(p).expect("remove"));
                std::thread::sleep(FREED);
                speed
            },
            || {
                File::create_new(&shared[0]).expect("create");
                let speed = write_all(&shared, record, |who, i| (i * WRITERS + who) * record);
                let got = std::fs::read(&shared[0]).expect("read");
                let mut records = got.chunks(record).enumerate();
                let right =
                    |(i, r): (usize, &[u8])| r.iter().all(|b| *b == (i % WRITERS) as u8 + 1);
                assert!(records.all(right) && got.len() == NODE_BYTES / record * record * WRITERS);
                std::fs::remove_file(&shared[0]).expect("remove");
                std::thread::sleep(FREED);
                speed
            },
        );
    }
    println!("opens of node 0: {}", cluster.node(0).status()["opens"]);
}

// ---- a file that another node wrote ----------------------------------------------------------

/// Records in an order that jumps about; MiB per second.
fn read_at_random(file: &File) -> f64 {
    let mut data = vec![0; RECORD];
    let records = READ_BYTES / RECORD;
    let mut at = 0;
    rate(|| {
        for _ in 0..records {
            at = (at + records / 2 + 7) % records;
            file.read_exact_at(&mut data, (at * RECORD) as u64).expect("read");
        }
        READ_BYTES as f64 / MIB
    })
}

fn queries(node: &Node) -> u64 {
    node.status()["rpc"]["query"].as_u64().unwrap_or(0)
}

/// A cluster in which the first node wrote a file, opened on the second, which has read it once.
fn read_once(model: &str, naive: bool) -> (Cluster, File) {
    let more: &[&str] = if naive { &["--naive"] } else { &[] };
    let builder = Cluster::builder().nodes(2).consistency(model).flush("end").separate_meta();
    let cluster = builder.prepare();
    cluster.nodes().iter().for_each(|n| n.mount_with(more));
    std::fs::write(cluster.node(0).path("f"), vec![0x21; READ_BYTES]).expect("write");
    let file = File::open(cluster.node(1).path("f")).expect("open");
    read_at_random(&file);
    (cluster, file)
}

fn others_file(report: &mut Report) {
    let session = read_once("session", false);
    for (model, naive) in [("commit", false), ("posix", false), ("commit", true), ("posix", true)] {
        let (cluster, file) = read_once(model, naive);
        let before = queries(cluster.node(1));
        let name = if naive { format!("{model}, naive") } else { model.to_owned() };
        report.compare(
            format!("8 KiB reads of another's file: session / {name}"),
            "MiB/s",
            || read_at_random(&session.1),
            || read_at_random(&file),
        );
        let reads = (ebb_benches::rounds() + 1) * READ_BYTES / RECORD;
        println!("{} queries in {reads} reads", queries(cluster.node(1)) - before);
    }
}

// ---- a file of one node ----------------------------------------------------------------------

fn one_node_alone(report: &mut Report, io_path: &str) {
    let session = cluster(2, "session", io_path);
    for model in ["commit", "posix"] {
        let other = cluster(2, model, io_path);
        let (a, b) = (session.node(0).path("new"), other.node(0).path("new"));
        let open = |cluster: &Cluster| {
            let path = cluster.node(0).path("old");
            let mut options = OpenOptions::new();
            let file = options.read(true).write(true).create(true).truncate(false).open(path);
            let file = file.expect("open");
            write(&file, 1 << 20, SOLE_BYTES);
            file
        };
        let (old_a, old_b) = (open(&session), open(&other));
        for record in [RECORD, 64 << 10, 1 << 20] {
            let label =
                |what: &str| format!("{io_path}: {what} {} KiB: session / {model}", record >> 10);
            let (new, over, read) = (label("write new"), label("write over"), label("read"));
            report.compare(
                new,
                "MiB/s",
                || write_new(&a, record, SOLE_BYTES),
                || write_new(&b, record, SOLE_BYTES),
            );
            report.compare(
                over,
                "MiB/s",
                || write(&old_a, record, SOLE_BYTES),
                || write(&old_b, record, SOLE_BYTES),
            );
            report.compare(
                read,
                "MiB/s",
                || read_back(&old_a, record),
                || read_back(&old_b, record),
            );
        }
    }
}

/// MiB per second of reads of a whole file of one node, in an order that nobody foresees.
fn read_back(file: &File, record: usize) -> f64 {
    let records = SOLE_BYTES / record;
    let mut bytes = vec![0; record];
    rate(|| {
        for i in 0..records {
            // Odd, so that every record comes once where their number is a power of two.
            let at = (i * 617) % records * record;
            file.read_exact_at(&mut bytes, at as u64).expect("read");
        }
        SOLE_BYTES as f64 / MIB
    })
}
