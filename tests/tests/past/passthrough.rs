//! Files that the kernel reads and writes past the daemon: exact on every node and on the backing,
//! whatever several nodes do to the same blocks; and proof that they went that way.
//!
//! EBB_SEED: only this seed. EBB_STEPS: steps of the random programs.

use ebb_testkit::{Builder, Cluster, Node, number, record_lock};
use ebb_tests::content::same;
use ebb_tests::model::close;
use ebb_tests::tools;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::Barrier;
use std::time::Duration;

/// Nodes that pass files through, whatever way other tests are told to take.
fn past(model: &str, nodes: usize) -> Builder {
    Cluster::builder().nodes(nodes).consistency(model).option("--io-path", "passthrough")
}

fn one_node() -> Cluster {
    past("session", 1).flush("end").start()
}

/// Opens that went this way so far.
fn opens(node: &Node, way: &str) -> u64 {
    node.status()["opens"][way].as_u64().unwrap_or(0)
}

fn rw(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).expect("open")
}

fn created(path: &Path) -> File {
    let mut how = OpenOptions::new();
    how.read(true).write(true).create(true).truncate(true).open(path).expect("create")
}

/// Bytes of a record, many of them zeros: these are what cannot be seen in a block.
fn record(who: u64, at: u64, len: u64) -> Vec<u8> {
    let mut random = ChaCha8Rng::seed_from_u64(who << 40 | at);
    (0..len).map(|_| if random.random_ratio(1, 3) { 0 } else { random.random() }).collect()
}

fn n_to_one(nodes: u64, record_len: u64, per_node: u64) {
    let cluster = past("session", nodes as usize).start();
    File::create(cluster.nodes()[0].path("shared")).expect("create");
    let all = nodes * per_node;
    let want: Vec<u8> =
        (0..all).flat_map(|r| record(r % nodes, r * record_len, record_len)).collect();
    let barrier = Barrier::new(nodes as usize);
    std::thread::scope(|threads| {
        for (who, node) in cluster.nodes().iter().enumerate() {
            let (barrier, want) = (&barrier, &want);
            threads.spawn(move || {
                let who = who as u64;
                let path = node.path("shared");
                // Both kinds of writers.
                let file = OpenOptions::new().write(true).read(who.is_multiple_of(2)).open(&path);
                let file = file.expect("open");
                barrier.wait();
                for r in (who..all).step_by(nodes as usize) {
                    let at = r * record_len;
                    file.write_all_at(&record(who, at, record_len), at).expect("write");
                }
                close(file).expect("close");
                barrier.wait();
                let got = std::fs::read(&path).expect("read");
                same(&format!("node {who}, {record_len} byte records"), &got, want);
            });
        }
    });
    for node in cluster.nodes() {
        assert!(opens(node, "passthrough-write") > 0, "{:#}", node.status());
        node.drain();
    }
    let got = std::fs::read(cluster.backing().join("shared")).expect("read");
    same(&format!("backing, {record_len} byte records"), &got, &want);
}

#[test]
fn two_nodes_write_one_file_in_unaligned_records() {
    n_to_one(2, 47_008, 40);
}

#[test]
fn four_nodes_write_one_file_in_unaligned_records() {
    n_to_one(4, 47_008, 40);
}

#[test]
fn four_nodes_write_one_file_in_aligned_records() {
    n_to_one(4, 8 << 10, 100);
}

#[test]
fn four_nodes_write_one_file_in_small_records() {
    n_to_one(4, 100, 500);
}

/// A record lock as a process on one node would take it.
fn lock(file: &File, kind: i32) {
    record_lock(file, libc::F_OFD_SETLKW, kind, (0, 0)).expect("lock");
}

const SPACE: u64 = 20_000;

/// Several nodes keep one file open past the daemon and change it in turn under a lock: bytes of
/// each other's blocks, zeros, cuts, mappings. Everybody sees what an array shows.
fn locked_turns(model: &str, seed: u64, steps: u64) {
    let cluster = past(model, 3).start();
    File::create(cluster.nodes()[0].path("f")).expect("create");
    let files: Vec<File> = cluster.nodes().iter().map(|n| rw(&n.path("f"))).collect();
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut oracle: Vec<u8> = Vec::new();
    for step in 0..steps {
        let who = random.random_range(0..files.len());
        let file = &files[who];
        let what = format!("EBB_SEED={seed}, {model}, step {step}, node {who}");
        lock(file, libc::F_WRLCK);
        assert_eq!(file.metadata().expect("stat").size(), oracle.len() as u64, "{what}: size");
        let mut got = vec![0; oracle.len()];
        file.read_exact_at(&mut got, 0).expect("read");
        same(&what, &got, &oracle);
        for _ in 0..random.random_range(0..4) {
            change(file, &mut oracle, &mut random);
        }
        lock(file, libc::F_UNLCK);
        if random.random_ratio(1, 10) {
            // A second handle comes and goes, and must see everything as well.
            let shown = std::fs::read(cluster.nodes()[who].path("f")).expect("read");
            same(&format!("{what}, another handle"), &shown, &oracle);
        }
        if random.random_ratio(1, 20) {
            cluster.nodes()[who].drain();
        }
    }
    drop(files);
    for node in cluster.nodes() {
        let got = std::fs::read(node.path("f")).expect("read");
        same(&format!("EBB_SEED={seed}, {model}, at the end"), &got, &oracle);
        node.drain();
    }
    let got = std::fs::read(cluster.backing().join("f")).expect("read");
    same(&format!("EBB_SEED={seed}, {model}, backing"), &got, &oracle);
    let passed: u64 = cluster.nodes().iter().map(|n| opens(n, "passthrough-write")).sum();
    assert!(passed > 0, "nothing was passed through");
}

fn change(file: &File, oracle: &mut Vec<u8>, random: &mut ChaCha8Rng) {
    let at = random.random_range(0..SPACE);
    let most = if random.random_ratio(1, 4) { 6000 } else { 50 };
    let len = random.random_range(1..=most);
    match random.random_range(0..10) {
        0 => {
            file.set_len(at).expect("truncate");
            oracle.resize(at as usize, 0);
        }
        1 if at + len <= oracle.len() as u64 => {
            store_mapped(file, at, &vec![7; len as usize], oracle)
        }
        _ => {
            let zeros = random.random_ratio(1, 3);
            let data: Vec<u8> =
                (0..len).map(|_| if zeros { 0 } else { random.random_range(0..3) }).collect();
            file.write_all_at(&data, at).expect("write");
            put(oracle, at, &data);
        }
    }
}

fn put(oracle: &mut Vec<u8>, at: u64, data: &[u8]) {
    let end = at as usize + data.len();
    oracle.resize(oracle.len().max(end), 0);
    oracle[at as usize..end].copy_from_slice(data);
}

/// Stores through a shared mapping.
fn store_mapped(file: &File, at: u64, data: &[u8], oracle: &mut Vec<u8>) {
    // SAFETY: the mapping is as long as the file, which nobody cuts meanwhile, and is taken away
    // before the function ends.
    unsafe {
        let len = oracle.len();
        let how = libc::PROT_READ | libc::PROT_WRITE;
        let map = libc::mmap(std::ptr::null_mut(), len, how, libc::MAP_SHARED, file.as_raw_fd(), 0);
        assert_ne!(map, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
        let to = map.cast::<u8>().add(at as usize);
        std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len());
        assert_eq!(libc::munmap(map, len), 0);
    }
    put(oracle, at, data);
}

fn seeds() -> Vec<u64> {
    match std::env::var("EBB_SEED") {
        Ok(seed) => vec![seed.parse().expect("EBB_SEED is a number")],
        Err(_) => vec![1, 2, 3],
    }
}

#[test]
fn three_nodes_take_turns_under_a_lock_session() {
    seeds()
        .into_iter()
        .for_each(|seed| locked_turns("session", seed, tools::amount("EBB_STEPS", 250)));
}

#[test]
fn three_nodes_take_turns_under_a_lock_mpiio() {
    seeds()
        .into_iter()
        .for_each(|seed| locked_turns("mpiio", seed, tools::amount("EBB_STEPS", 150)));
}

/// Zeros beside others' bytes are claimed with their block; not where the file has been cut since.
#[test]
fn a_claim_does_not_undo_a_cut() {
    let cluster = past("session", 2).start();
    let (one, other) = (cluster.node(0), cluster.node(1));
    let mine = created(&one.path("f"));
    let theirs = rw(&other.path("f"));
    assert!(opens(one, "passthrough-write") == 1 && opens(other, "passthrough-write") == 1);
    theirs.write_all_at(&[5; 28], 17_348).expect("write");
    close(theirs).expect("close");
    // Brings these bytes here, and nobody looks yet at what else is in their block.
    lock(&mine, libc::F_WRLCK);
    let mut got = [0; 28];
    mine.read_exact_at(&mut got, 17_348).expect("read");
    assert_eq!(got, [5; 28]);
    OpenOptions::new()
        .write(true)
        .open(other.path("f"))
        .and_then(|f| f.set_len(2270))
        .expect("cut");
    lock(&mine, libc::F_UNLCK);
    close(mine).expect("close");
    // While it is open, it is as long as it was at the last query.
    cluster.nodes().iter().for_each(Node::wait_closed);
    for node in cluster.nodes() {
        assert_eq!(
            std::fs::metadata(node.path("f")).expect("stat").size(),
            2270,
            "{}",
            node.name()
        );
        assert_eq!(std::fs::read(node.path("f")).expect("read"), vec![0; 2270]);
    }
}

/// A mapping outlives its handle; what is stored through it is not lost.
#[test]
fn stores_after_close_are_found() {
    let cluster = one_node();
    let node = &cluster.nodes()[0];
    let file = created(&node.path("mapped"));
    file.set_len(8192).expect("truncate");
    file.write_all_at(&[1; 10], 0).expect("write");
    // SAFETY: the file is as long as the mapping.
    let map = unsafe {
        let how = libc::PROT_READ | libc::PROT_WRITE;
        libc::mmap(std::ptr::null_mut(), 8192, how, libc::MAP_SHARED, file.as_raw_fd(), 0)
    };
    assert_ne!(map, libc::MAP_FAILED);
    close(file).expect("close");
    std::thread::sleep(Duration::from_millis(50));
    node.drain();
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

fn remounted(node: &Node) {
    node.kill9();
    let _ = node.ebb("umount", &[], &[]);
    node.mount();
}

/// What was published past the only daemon is there on the next one, and then on the backing.
fn survives_a_crash(cluster: &Cluster, file: File, want: &[u8]) {
    let node = cluster.node(0);
    assert_eq!(opens(node, "passthrough-write"), 1);
    node.kill9();
    drop(file);
    let _ = node.ebb("umount", &[], &[]);
    node.mount();
    same("after a crash", &std::fs::read(node.path("f")).expect("read"), want);
    node.umount();
    same("backing", &std::fs::read(cluster.backing().join("f")).expect("read"), want);
}

/// What was published past the daemon survives the daemon.
#[test]
fn published_bytes_survive_a_killed_daemon() {
    let cluster = one_node();
    let node = &cluster.nodes()[0];
    let file = created(&node.path("f"));
    lock(&file, libc::F_WRLCK);
    let data = record(1, 0, 100_000);
    file.write_all_at(&data, 0).expect("write");
    lock(&file, libc::F_UNLCK);
    survives_a_crash(&cluster, file, &data);
}

/// Descriptors that come and go in other processes are no reason to flush again what was not
/// written since; a store through a mapping is one.
#[test]
fn only_what_may_have_been_written_is_flushed_again() {
    let cluster = one_node();
    let node = &cluster.nodes()[0];
    let file = created(&node.path("f"));
    let mut want = record(1, 0, 100_000);
    file.write_all_at(&want, 0).expect("write");
    lock(&file, libc::F_WRLCK);
    lock(&file, libc::F_UNLCK);
    node.drain();
    for _ in 0..10 {
        assert!(std::process::Command::new("true").status().expect("true").success());
    }
    lock(&file, libc::F_WRLCK);
    lock(&file, libc::F_UNLCK);
    assert_eq!(number(&node.status(), "dirty_bytes"), 0);
    store_mapped(&file, 50_000, &[3; 10], &mut want);
    close(file).expect("close");
    node.drain();
    same("backing", &std::fs::read(cluster.backing().join("f")).expect("read"), &want);
}

/// Bytes that were drained, written again past the daemon and published again are this node's
/// still when it comes back.
#[test]
fn bytes_written_again_after_a_drain_survive_a_killed_daemon() {
    let cluster = one_node();
    let node = &cluster.nodes()[0];
    let file = created(&node.path("f"));
    let mut want = record(1, 0, 100_000);
    file.write_all_at(&want, 0).expect("write");
    lock(&file, libc::F_WRLCK);
    lock(&file, libc::F_UNLCK);
    node.drain();
    file.write_all_at(&[9; 5000], 3000).expect("write");
    put(&mut want, 3000, &[9; 5000]);
    lock(&file, libc::F_WRLCK);
    lock(&file, libc::F_UNLCK);
    survives_a_crash(&cluster, file, &want);
}

/// Zeros of a block that were claimed, and turned out to be another node's bytes, stay that
/// node's, whatever happens to the claimant.
#[test]
fn refused_zeros_are_forgotten_by_a_killed_daemon() {
    let cluster = past("session", 2).flush("end").start();
    let [one, two] = cluster.nodes() else { panic!("two nodes") };
    File::create(one.path("f")).expect("create");
    let (theirs, ours) = (rw(&one.path("f")), rw(&two.path("f")));
    let mut want = Vec::new();
    theirs.write_all_at(&[2; 1000], 2000).expect("write");
    put(&mut want, 2000, &[2; 1000]);
    close(theirs).expect("close");
    ours.write_all_at(&[1; 1000], 0).expect("write");
    put(&mut want, 0, &[1; 1000]);
    ours.write_all_at(&[1; 1000], 5000).expect("write");
    put(&mut want, 5000, &[1; 1000]);
    close(ours).expect("close");
    assert_eq!((opens(one, "passthrough-write"), opens(two, "passthrough-write")), (2, 1));
    // What the journal knows of the file besides its bytes is written again.
    std::fs::set_permissions(two.path("f"), PermissionsExt::from_mode(0o640)).expect("chmod");
    remounted(two);
    two.drain();
    for node in [one, two] {
        same("after a crash", &std::fs::read(node.path("f")).expect("read"), &want);
        node.drain();
    }
    same("backing", &std::fs::read(cluster.backing().join("f")).expect("read"), &want);
}

/// The way of each open and its reason are told.
#[test]
fn status_tells_which_way_and_why() {
    let cluster = past("session", 2).flush("end").option("--tracker", "off").start();
    let [one, two] = cluster.nodes() else { panic!("two nodes") };
    // The ways of opens depend on what else is open.
    std::fs::write(one.path("f"), [5; 10_000]).expect("write");
    one.wait_closed();
    for node in [one, two, two] {
        assert_eq!(std::fs::read(node.path("f")).expect("read"), [5; 10_000]);
        node.wait_closed();
    }
    let writer = OpenOptions::new().write(true).open(two.path("f")).expect("open");
    let open = two.status();
    assert_eq!(open["io_paths"][0]["path"], "f", "{open:#}");
    assert_eq!(open["io_paths"][0]["io_path"], "daemon:not-empty", "{open:#}");
    close(writer).expect("close");
    assert_eq!(opens(one, "passthrough-write"), 1);
    assert_eq!(opens(one, "passthrough-read"), 1);
    assert_eq!(opens(two, "daemon:not-local"), 1);
    assert_eq!(opens(two, "passthrough-read"), 1);
    assert!(number(&two.status(), "fetched_bytes_peer") >= 10_000);
    let metrics = std::fs::read_to_string(one.path(".ebb/metrics")).expect("read");
    let counted = "\nebb_opens_total{path=\"passthrough-write\"} 1\n";
    assert!(metrics.contains(counted), "{metrics}");
    let shown = one.ebb("status", &[], &[]);
    let screen = String::from_utf8_lossy(&shown.stdout);
    assert!(screen.contains("passthrough-write 1"), "{screen}");
}

#[test]
fn the_daemon_path_can_be_chosen() {
    let cluster = Cluster::builder().nodes(1).option("--io-path", "daemon").start();
    let node = &cluster.nodes()[0];
    std::fs::write(node.path("f"), b"bytes").expect("write");
    assert_eq!(std::fs::read(node.path("f")).expect("read"), b"bytes");
    let status = node.status();
    assert_eq!(status["io_path_obstacle"], "switched-off");
    let ways = status["opens"].as_object().expect("an object");
    // The writer's last descriptor may not be let go when the reader comes.
    let is_daemon = |way: &String| way == "daemon:switched-off" || way == "daemon:other-opens";
    assert!(ways.contains_key("daemon:switched-off") && ways.keys().all(is_daemon), "{ways:?}");
}

/// Reading an existing file past the daemon while somebody else opens it to write: both see each
/// other, also through a mapping.
#[test]
fn a_writer_beside_a_reader() {
    let cluster = past("session", 2).flush("end").option("--tracker", "off").start();
    let [one, two] = cluster.nodes() else { panic!("two nodes") };
    let mut want = record(3, 0, 50_000);
    std::fs::write(one.path("f"), &want).expect("write");
    one.wait_closed();
    assert_eq!(std::fs::read(two.path("f")).expect("fetch"), want);
    two.wait_closed();
    let reader = File::open(two.path("f")).expect("open");
    let writer = rw(&two.path("f"));
    assert_eq!(opens(two, "daemon-beside-passthrough"), 1);
    writer.write_all_at(b"beside", 4093).expect("write");
    put(&mut want, 4093, b"beside");
    store_mapped(&writer, 20_000, &[0; 300], &mut want);
    let mut got = vec![0; want.len()];
    reader.read_exact_at(&mut got, 0).expect("read");
    same("the reader", &got, &want);
    close(writer).expect("close");
    close(reader).expect("close");
    assert_eq!(std::fs::read(one.path("f")).expect("read").len(), want.len());
    same("the other node", &std::fs::read(one.path("f")).expect("read"), &want);
}
