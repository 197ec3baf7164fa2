//! N nodes write one shared file in interleaved, unaligned records; every node and the drained
//! backing must hold every byte, under each model with just the synchronisation that it asks for.

use ebb_testkit::Cluster;
use ebb_tests::content::{bytes, same};
use ebb_tests::model::Model;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Barrier;

const RECORDS: [u64; 4] = [100, 4096, 47_008, 1 << 20];

/// Records per node of one size: enough to make the ownership tree work, small enough for two
/// cores.
fn count(record: u64) -> u64 {
    (4 << 20) / record.max(16 << 10)
}

fn expected(nodes: u64, record: u64, round: u64) -> Vec<u8> {
    let all = nodes * count(record);
    (0..all).flat_map(|r| bytes(r % nodes, round, r * record, record)).collect()
}

fn one_node(model: Model, who: u64, nodes: u64, record: u64, path: &Path, barrier: &Barrier) {
    let mut file: Option<File> =
        Some(OpenOptions::new().read(true).write(true).open(path).expect("open"));
    for round in 0..2 {
        let writer = match file.take() {
            Some(file) => file,
            None => OpenOptions::new().read(true).write(true).open(path).expect("open"),
        };
        for r in (who..nodes * count(record)).step_by(nodes as usize) {
            let data = bytes(who, round, r * record, record);
            writer.write_all_at(&data, r * record).expect("write");
        }
        let open = model.publish(writer).expect("publish");
        barrier.wait();
        let reader = model.look_up(open, path).expect("look up");
        let want = expected(nodes, record, round);
        let mut got = vec![0; want.len()];
        reader.read_exact_at(&mut got, 0).expect("read");
        let what = format!("node {who}, {} byte records, {}, round {round}", record, model.name());
        same(&what, &got, &want);
        file = Some(reader);
        // Nobody writes the next round before everybody has read this one.
        barrier.wait();
    }
}

fn run(model: Model, nodes: u64) {
    let cluster = Cluster::builder().nodes(nodes as usize).consistency(model.name()).start();
    for record in RECORDS {
        let name = format!("shared-{record}");
        File::create(cluster.nodes()[0].path(&name)).expect("create");
        let barrier = Barrier::new(nodes as usize);
        std::thread::scope(|threads| {
            for (who, node) in cluster.nodes().iter().enumerate() {
                let (path, barrier) = (node.path(&name), &barrier);
                threads.spawn(move || one_node(model, who as u64, nodes, record, &path, barrier));
            }
        });
    }
    for node in cluster.nodes() {
        node.drain();
    }
    for record in RECORDS {
        let got = std::fs::read(cluster.backing().join(format!("shared-{record}"))).expect("read");
        same(&format!("backing, {record} byte records"), &got, &expected(nodes, record, 1));
    }
}

#[test]
fn two_nodes_posix() {
    run(Model::Posix, 2);
}

#[test]
fn two_nodes_commit() {
    run(Model::Commit, 2);
}

#[test]
fn two_nodes_session() {
    run(Model::Session, 2);
}

#[test]
fn two_nodes_mpiio() {
    run(Model::Mpiio, 2);
}

#[test]
fn four_nodes_posix() {
    run(Model::Posix, 4);
}

#[test]
fn four_nodes_commit() {
    run(Model::Commit, 4);
}

#[test]
fn four_nodes_session() {
    run(Model::Session, 4);
}

#[test]
fn four_nodes_mpiio() {
    run(Model::Mpiio, 4);
}

#[test]
fn two_nodes_romio() {
    run(Model::Romio, 2);
}

#[test]
fn four_nodes_romio() {
    run(Model::Romio, 4);
}
