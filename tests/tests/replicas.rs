//! `--replicas 2`: a node dies and its cache with it; nothing that a sync event had acknowledged is
//! lost, for readers on other nodes and on the backing.

use ebb_testkit::{Cluster, Node, describe, skip_reason};
use ebb_tests::content::{bytes, same};
use ebb_tests::model::{Model, close};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

/// A lease of the service, and some.
const LEASE_MAX: Duration = Duration::from_secs(30);

fn cluster(nodes: usize, model: &str) -> Cluster {
    Cluster::builder()
        .nodes(nodes)
        .consistency(model)
        .flush("end")
        .option("--replicas", "2")
        .option("--request-timeout", "4s")
        .separate_meta()
        .start()
}

fn has_partner(node: &Node) {
    node.wait_status(LEASE_MAX, |s| {
        s["copies"]["partner"].is_u64() && s["copies"]["degraded"].is_null()
    });
}

fn lose(node: &Node) {
    node.kill9();
    fs::remove_dir_all(node.cache()).expect("its cache goes too");
}

fn clear(node: &Node) {
    let output = node.ebb("umount", &["--no-drain"], &[]);
    assert!(matches!(output.status.code(), Some(0 | 3)), "{}", describe(&output));
}

/// Writes a file in pieces, out of order and over each other, and ends with the model's sync event;
/// the file stays open under every model but session.
fn write(node: &Node, model: Model, name: &str, seed: u64) -> (Option<File>, Vec<u8>) {
    let path = node.path(name);
    let file = File::options().read(true).write(true).create(true).truncate(false).open(path);
    let file = file.expect("create");
    let mut whole = vec![0; 700_000];
    for (i, (at, len)) in
        [(300_000u64, 400_000u64), (0, 300_000), (100_000, 5_000), (299_000, 2_000)]
            .into_iter()
            .enumerate()
    {
        let data = bytes(seed, i as u64, at, len);
        file.write_all_at(&data, at).expect("write");
        whole[at as usize..(at + len) as usize].copy_from_slice(&data);
    }
    match model {
        Model::Posix => (Some(file), whole),
        Model::Session => {
            close(file).expect("close");
            (None, whole)
        }
        Model::Commit | Model::Mpiio => {
            file.sync_all().expect("fsync");
            (Some(file), whole)
        }
    }
}

fn one_is_lost(nodes: usize, model: Model) {
    if skip_reason().is_some() {
        return;
    }
    let cluster = cluster(nodes, model.name());
    let others = 1..nodes;
    cluster.nodes().iter().for_each(has_partner);
    fs::create_dir(cluster.node(0).path("d")).expect("mkdir");
    let mut files = Vec::new();
    let mut open = Vec::new();
    for i in 0..4 {
        let (file, whole) = write(cluster.node(0), model, &format!("d/{i}"), i);
        open.extend(file);
        files.push((format!("d/{i}"), whole));
    }
    let status = cluster.node(0).status();
    let copied = status["copies"]["copied_bytes"].as_u64().expect("a number");
    assert!(copied >= 4 * 700_000, "{copied}");
    lose(cluster.node(0));
    drop(open);
    let check = |when: &str| {
        for i in others.clone() {
            for (name, whole) in &files {
                let start = Instant::now();
                let got = fs::read(cluster.node(i).path(name));
                let got = got.unwrap_or_else(|e| panic!("{when}, node {i}: {name}: {e}"));
                same(&format!("{when}, node {i}: {name}"), &got, whole);
                assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
            }
        }
    };
    check("at once");
    let adopted = |n: &Node| n.status()["copies"]["adopted_bytes"].as_u64().unwrap_or(0);
    let end = Instant::now() + LEASE_MAX;
    while cluster.nodes()[1..].iter().map(adopted).sum::<u64>() < 4 * 700_000 {
        assert!(Instant::now() < end, "nobody adopts the bytes");
        std::thread::sleep(Duration::from_millis(100));
    }
    check("adopted");
    clear(cluster.node(0));
    cluster.nodes()[1..].iter().rev().for_each(Node::umount);
    for (name, whole) in &files {
        same(name, &fs::read(cluster.backing().join(name)).expect("read"), whole);
    }
}

macro_rules! losses {
    ($($name:ident $nodes:literal $model:ident),* $(,)?) => {$(
        #[test]
        fn $name() {
            one_is_lost($nodes, Model::$model);
        }
    )*};
}
losses! {
    one_of_two_is_lost_under_posix 2 Posix,
    one_of_two_is_lost_under_commit 2 Commit,
    one_of_two_is_lost_under_session 2 Session,
    one_of_two_is_lost_under_mpiio 2 Mpiio,
    one_of_three_is_lost_under_posix 3 Posix,
    one_of_three_is_lost_under_commit 3 Commit,
    one_of_three_is_lost_under_session 3 Session,
    one_of_three_is_lost_under_mpiio 3 Mpiio,
    one_of_four_is_lost_under_posix 4 Posix,
    one_of_four_is_lost_under_commit 4 Commit,
    one_of_four_is_lost_under_session 4 Session,
    one_of_four_is_lost_under_mpiio 4 Mpiio,
}
