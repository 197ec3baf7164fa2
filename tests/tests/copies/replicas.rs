//! `--replicas 2`: a node dies and its cache with it; nothing that a sync event had acknowledged is
//! lost, for readers on other nodes and on the backing.

use ebb_testkit::{Cluster, Node, describe, skip_reason};
use ebb_tests::content::{bytes, same};
use ebb_tests::copies::{
    LEASE_MAX, adopted, builder, clear, cluster, copies, has_partner, lose, on_backing, partner_of,
    store, wait_adopted,
};
use ebb_tests::model::{Model, close};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

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
        Model::Commit | Model::Mpiio | Model::Romio => {
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

/// The writer goes on without an error, says that it is degraded, takes another partner, and
/// copies there what the dead one had.
#[test]
fn when_the_partner_dies_another_one_gets_the_copies() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = cluster(3, "session");
    let (before, after) = (bytes(1, 1, 0, 3_000_000), bytes(1, 2, 0, 500_000));
    store(cluster.node(0), "before", &before);
    let first = partner_of(&cluster, 0);
    let second = 3 - first;
    let writing = std::thread::scope(|s| {
        let node = cluster.node(0);
        let writer = s.spawn(move || {
            let start = Instant::now();
            let mut round = 0;
            while start.elapsed() < Duration::from_secs(3) {
                store(node, "during", &bytes(2, round, 0, 1_500_000));
                round += 1;
            }
            bytes(2, round - 1, 0, 1_500_000)
        });
        std::thread::sleep(Duration::from_millis(400));
        lose(cluster.node(first));
        writer.join().expect("the writer meets no error")
    });
    has_partner(cluster.node(0));
    assert_eq!(partner_of(&cluster, 0), second);
    store(cluster.node(0), "after", &after);
    lose(cluster.node(0));
    let files = [("before", &before), ("during", &writing), ("after", &after)];
    for (name, want) in files {
        same(name, &fs::read(cluster.node(second).path(name)).expect("read"), want);
    }
    clear(cluster.node(0));
    clear(cluster.node(first));
    cluster.node(second).umount();
    files.iter().for_each(|(name, want)| on_backing(&cluster, name, want));
}

/// It hangs: the writer waits for the deadline, and no longer.
#[test]
fn a_partner_that_hangs_delays_a_write_by_the_deadline() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = cluster(3, "session");
    let first = partner_of(&cluster, 0);
    cluster.node(first).signal(rustix::process::Signal::STOP);
    let start = Instant::now();
    let data = bytes(1, 1, 0, 200_000);
    store(cluster.node(0), "f", &data);
    let took = start.elapsed();
    cluster.node(first).signal(rustix::process::Signal::CONT);
    assert!(took < Duration::from_secs(10), "{took:?}");
    has_partner(cluster.node(0));
    let status = copies(cluster.node(0));
    println!("{took:?}: {status}");
    lose(cluster.node(0));
    same("f", &fs::read(cluster.node(3 - first).path("f")).expect("read"), &data);
    clear(cluster.node(0));
    cluster.node(2).umount();
    cluster.node(1).umount();
    on_backing(&cluster, "f", &data);
}

#[test]
fn a_node_alone_says_so_and_goes_on() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = builder(1, "commit").separate_meta().start();
    let node = cluster.node(0);
    let data = bytes(1, 1, 0, 100_000);
    store(node, "f", &data);
    let status = node.wait_status(LEASE_MAX, |s| {
        let why = s["copies"]["degraded"]["why"].as_str();
        why.is_some_and(|why| why.contains("no other node"))
    });
    assert!(status["copies"]["partner"].is_null(), "{status:#}");
    let errors = status["errors"].as_array().expect("errors");
    assert!(errors.iter().any(|e| e["operation"] == "copies with a partner"), "{errors:?}");
    let screen = node.ebb("status", &[], &[]);
    assert!(String::from_utf8_lossy(&screen.stdout).contains("degraded"), "{}", describe(&screen));
    node.umount();
    on_backing(&cluster, "f", &data);
}

/// What the partner adopted is the partner's; a daemon on the old cache has none of it, writes
/// again, and is paired again.
#[test]
fn an_owner_that_comes_back_late_with_its_cache_finds_its_bytes_elsewhere() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = cluster(2, "session");
    let (old, new) = (bytes(1, 1, 0, 400_000), bytes(1, 2, 0, 150_000));
    store(cluster.node(0), "f", &old);
    cluster.node(0).kill9();
    wait_adopted(cluster.node(1), 400_000);
    let file = File::options().write(true).open(cluster.node(1).path("f")).expect("open");
    file.write_all_at(&new, 100_000).expect("write");
    close(file).expect("close");
    let output = cluster.node(0).ebb("umount", &["--no-drain"], &[]);
    assert!(matches!(output.status.code(), Some(0 | 3)), "{}", describe(&output));
    cluster.node(0).mount();
    let mut want = old;
    want[100_000..250_000].copy_from_slice(&new);
    for node in cluster.nodes() {
        same("f", &fs::read(node.path("f")).expect("read"), &want);
    }
    assert_eq!(cluster.node(0).status()["dirty_bytes"].as_u64(), Some(0));
    has_partner(cluster.node(0));
    cluster.umount_all();
    on_backing(&cluster, "f", &want);
}

/// Back before it is declared lost: it has its bytes, and the copies of its former life are dropped.
#[test]
fn an_owner_that_comes_back_soon_with_its_cache_keeps_its_bytes() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = cluster(2, "session");
    let data = bytes(1, 1, 0, 400_000);
    store(cluster.node(0), "f", &data);
    cluster.node(0).kill9();
    clear(cluster.node(0));
    cluster.node(0).mount();
    assert_eq!(cluster.node(0).status()["dirty_bytes"].as_u64(), Some(400_000));
    has_partner(cluster.node(0));
    cluster.node(1).wait_status(LEASE_MAX, |s| {
        s["copies"]["held_bytes"].as_u64() == Some(400_000) && s["copies"]["held_sets"] == 1
    });
    assert_eq!(adopted(cluster.node(1)), 0);
    // The copies of this life count.
    lose(cluster.node(0));
    same("f", &fs::read(cluster.node(1).path("f")).expect("read"), &data);
    clear(cluster.node(0));
    cluster.node(1).umount();
    on_backing(&cluster, "f", &data);
}

/// A new daemon with an empty cache is another node: its predecessor's bytes are adopted at once.
#[test]
fn an_owner_that_comes_back_without_its_cache_reads_its_bytes_elsewhere() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = cluster(2, "commit");
    let data = bytes(1, 1, 0, 400_000);
    store(cluster.node(0), "f", &data);
    lose(cluster.node(0));
    clear(cluster.node(0));
    cluster.node(0).mount();
    same("f", &fs::read(cluster.node(0).path("f")).expect("read"), &data);
    wait_adopted(cluster.node(1), 400_000);
    same("f", &fs::read(cluster.node(0).path("f")).expect("read"), &data);
    has_partner(cluster.node(0));
    has_partner(cluster.node(1));
    // Nothing is left of the lost one.
    let alone = |s: &serde_json::Value| s["peers"].as_array().is_some_and(|p| p.len() == 1);
    cluster.node(1).wait_status(LEASE_MAX, alone);
    cluster.umount_all();
    on_backing(&cluster, "f", &data);
}

/// A node that is frozen until it is lost must not publish under the old pair when it goes on.
#[test]
fn a_node_that_was_away_for_too_long_begins_another_pair() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = cluster(2, "posix");
    let (old, new) = (bytes(1, 1, 0, 300_000), bytes(1, 2, 0, 50_000));
    // No file stays open here: a process that starts others would wait for the frozen node.
    store(cluster.node(0), "f", &old);
    cluster.node(0).signal(rustix::process::Signal::STOP);
    wait_adopted(cluster.node(1), 300_000);
    cluster.node(0).signal(rustix::process::Signal::CONT);
    let file = File::options().write(true).open(cluster.node(0).path("f")).expect("open");
    file.write_all_at(&new, 200_000).expect("write");
    let mut want = old;
    want[200_000..250_000].copy_from_slice(&new);
    for node in cluster.nodes() {
        same("f", &fs::read(node.path("f")).expect("read"), &want);
    }
    drop(file);
    has_partner(cluster.node(0));
    lose(cluster.node(0));
    same("f", &fs::read(cluster.node(1).path("f")).expect("read"), &want);
    clear(cluster.node(0));
    cluster.node(1).umount();
    on_backing(&cluster, "f", &want);
}

/// Cut, deleted, moved and appended to, under copies of what was there before.
#[test]
fn copies_follow_cuts_names_and_appends() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = cluster(3, "posix");
    let (long, tail) = (bytes(1, 1, 0, 300_000), bytes(1, 2, 0, 1_000));
    let node = cluster.node(0);
    for name in ["cut", "cut elsewhere", "gone", "moved"] {
        store(node, name, &long);
    }
    let cut = |node: &Node, name: &str| {
        let file = File::options().write(true).open(node.path(name)).expect("open");
        file.set_len(100_000).expect("truncate");
    };
    cut(node, "cut");
    cut(cluster.node(1), "cut elsewhere");
    fs::remove_file(node.path("gone")).expect("unlink");
    fs::rename(node.path("moved"), node.path("target")).expect("rename");
    for name in ["cut", "cut elsewhere"] {
        use std::io::Write;
        let mut file = File::options().append(true).open(node.path(name)).expect("open");
        file.write_all(&tail).expect("append");
        // A hole behind it, where the copies once had bytes.
        file.set_len(200_000).expect("extend");
    }
    lose(node);
    let mut want = long[..100_000].to_vec();
    want.extend_from_slice(&tail);
    want.resize(200_000, 0);
    let check = |when: &str, read: &dyn Fn(&str) -> std::io::Result<Vec<u8>>| {
        for name in ["cut", "cut elsewhere"] {
            same(&format!("{when}: {name}"), &read(name).expect("read"), &want);
        }
        same(&format!("{when}: target"), &read("target").expect("read"), &long);
        assert!(read("gone").is_err() && read("moved").is_err(), "{when}");
    };
    for i in 1..3 {
        check(&format!("node {i}"), &|name| fs::read(cluster.node(i).path(name)));
    }
    clear(node);
    cluster.nodes()[1..].iter().for_each(Node::umount);
    check("backing", &|name| fs::read(cluster.backing().join(name)));
}

/// A partner without room says no: degraded, and nothing fails.
#[test]
fn a_partner_without_room_leaves_the_writer_alone_and_said() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = Cluster::builder()
        .nodes(2)
        .flush("end")
        .option("--replicas", "2")
        .option("--cache-size", "8MiB")
        .separate_meta()
        .start();
    cluster.nodes().iter().for_each(has_partner);
    let data = bytes(1, 1, 0, 6 << 20);
    store(cluster.node(0), "f", &data);
    cluster.node(0).wait_status(LEASE_MAX, |s| !s["copies"]["degraded"].is_null());
    same("f", &fs::read(cluster.node(1).path("f")).expect("read"), &data);
    cluster.node(0).drain();
    // What is on the backing needs no copy.
    has_partner(cluster.node(0));
    cluster.umount_all();
    on_backing(&cluster, "f", &data);
}

/// A partner that leaves in peace; and the service dies in between: pairs are in its journal.
#[test]
fn pairs_survive_the_service_and_a_partner_may_leave() {
    if skip_reason().is_some() {
        return;
    }
    // A service that was started again waits for leases that a lost node may hold: five seconds.
    let mut cluster =
        Cluster::builder().nodes(3).flush("end").option("--replicas", "2").separate_meta().start();
    cluster.nodes().iter().for_each(has_partner);
    let data = bytes(1, 1, 0, 300_000);
    store(cluster.node(0), "f", &data);
    cluster.kill_meta();
    cluster.restart_meta();
    let first = partner_of(&cluster, 0);
    store(cluster.node(0), "g", &data);
    assert_eq!(partner_of(&cluster, 0), first, "no reason to begin another pair");
    cluster.node(first).umount();
    let second = 3 - first;
    let name = cluster.node(second).name().to_owned();
    cluster.node(0).wait_status(LEASE_MAX, |s| {
        s["copies"]["partner_name"] == name.as_str() && s["copies"]["degraded"].is_null()
    });
    lose(cluster.node(0));
    cluster.kill_meta();
    cluster.restart_meta();
    for name in ["f", "g"] {
        same(name, &fs::read(cluster.node(second).path(name)).expect("read"), &data);
    }
    wait_adopted(cluster.node(second), 600_000);
    clear(cluster.node(0));
    cluster.node(second).umount();
    for name in ["f", "g"] {
        on_backing(&cluster, name, &data);
    }
}

/// Without the option the loss of a node and its cache is told, and nothing is made up.
#[test]
fn without_copies_a_lost_node_is_told() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = Cluster::builder()
        .nodes(2)
        .flush("end")
        .option("--request-timeout", "4s")
        .separate_meta()
        .start();
    store(cluster.node(0), "f", &bytes(1, 1, 0, 10_000));
    lose(cluster.node(0));
    let read = fs::read(cluster.node(1).path("f"));
    assert_eq!(read.expect_err("nobody has it").raw_os_error(), Some(libc::EIO));
    clear(cluster.node(0));
    clear(cluster.node(1));
}
