//! Mapped memory: what stores become, and what loads see.

use super::{create, open, two};
use ebb_tests::content::{bytes, same};
use ebb_tests::mapping::{Map, WRITABLE};
use std::fs;
use std::os::unix::fs::FileExt;

const LEN: usize = 300_000;

#[test]
fn stores_into_a_shared_mapping_reach_the_other_node_with_msync() {
    let cluster = two();
    let (a, b) = (cluster.node(0).path("f"), cluster.node(1).path("f"));
    let file = create(&a);
    let mut want = bytes(1, 1, 0, LEN as u64);
    file.write_all_at(&want, 0).expect("write");
    let map = Map::new(&file, LEN, WRITABLE, libc::MAP_SHARED);
    same("mapped", &map.load(0, LEN), &want);
    for (round, at) in [(2, 17), (3, 100_001), (4, LEN - 5_000)] {
        let data = bytes(1, round, at as u64, 5_000);
        map.store(at, &data);
        want[at..at + 5_000].copy_from_slice(&data);
    }
    map.sync();
    same("other node after msync", &fs::read(&b).expect("read"), &want);
    assert_eq!(fs::metadata(&b).expect("stat").len(), LEN as u64, "no longer than it was");
    drop(map);
    drop(file);
    cluster.node(0).drain();
    same("backing", &fs::read(cluster.backing().join("f")).expect("read"), &want);
}

#[test]
fn stores_before_munmap_and_close_are_not_lost() {
    let cluster = two();
    let (a, b) = (cluster.node(0).path("f"), cluster.node(1).path("f"));
    let file = create(&a);
    file.set_len(LEN as u64).expect("extend");
    let map = Map::new(&file, LEN, WRITABLE, libc::MAP_SHARED);
    let want = bytes(1, 1, 0, LEN as u64);
    map.store(0, &want);
    drop(map);
    drop(file);
    same("same node", &fs::read(&a).expect("read"), &want);
    same("other node", &fs::read(&b).expect("read"), &want);
}

#[test]
fn a_shared_mapping_and_write_on_one_node_agree() {
    let cluster = two();
    let file = create(&cluster.node(0).path("f"));
    let mut want = bytes(1, 1, 0, LEN as u64);
    file.write_all_at(&want, 0).expect("write");
    let map = Map::new(&file, LEN, WRITABLE, libc::MAP_SHARED);
    same("loaded", &map.load(0, LEN), &want);
    let data = bytes(1, 2, 0, 50_000);
    file.write_all_at(&data, 33_333).expect("write");
    want[33_333..83_333].copy_from_slice(&data);
    same("loaded after write", &map.load(0, LEN), &want);
    map.store(200_000, b"through the mapping");
    want[200_000..200_019].copy_from_slice(b"through the mapping");
    let mut got = vec![0; LEN];
    file.read_exact_at(&mut got, 0).expect("read");
    same("read after store", &got, &want);
}

#[test]
fn stores_into_a_private_mapping_stay_private() {
    let cluster = two();
    let file = create(&cluster.node(0).path("f"));
    let want = bytes(1, 1, 0, LEN as u64);
    file.write_all_at(&want, 0).expect("write");
    let map = Map::new(&file, LEN, WRITABLE, libc::MAP_PRIVATE);
    map.store(1_000, &[0; 100_000]);
    assert_eq!(map.load(1_000, 100_000), vec![0; 100_000]);
    drop(map);
    for node in cluster.nodes() {
        same(node.name(), &fs::read(node.path("f")).expect("read"), &want);
    }
}

#[test]
fn a_new_mapping_shows_what_the_other_node_wrote() {
    let cluster = two();
    let (a, b) = (cluster.node(0).path("f"), cluster.node(1).path("f"));
    create(&a);
    for round in 0..4 {
        let (writer, reader) = if round % 2 == 0 { (&a, &b) } else { (&b, &a) };
        let want = bytes(round, round, 0, LEN as u64);
        fs::write(writer, &want).expect("write");
        let file = open(reader);
        let map = Map::new(&file, LEN, libc::PROT_READ, libc::MAP_SHARED);
        same(&format!("round {round}"), &map.load(0, LEN), &want);
    }
}

#[test]
fn a_program_runs_from_the_mount() {
    let cluster = two();
    let program = cluster.node(0).path("my-true");
    fs::copy("/bin/true", &program).expect("copy");
    for node in cluster.nodes() {
        let status = std::process::Command::new(node.path("my-true")).status().expect("exec");
        assert!(status.success(), "{}: {status}", node.name());
    }
}
