//! Names and attributes under leases, through real mounts: how many requests the small operations
//! cost, what all nodes see after every change of one of them, and what a holder costs that stands
//! still or is dead.

use ebb_testkit::random::{generator, seed};
use ebb_testkit::{Cluster, Node};
use rand::Rng;
use rand::seq::IndexedRandom;
use rustix::process::Signal;
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

/// The service's lease time, and what a busy machine may add to it.
const LEASE: Duration = Duration::from_secs(5);
const BUSY: Duration = Duration::from_secs(4);

/// Files of a count. What is asked once a second or once for a directory is not much beside them.
const FILES: usize = 200;

/// Requests that no application caused.
const OWN: [&str; 6] = ["heartbeat", "returned", "copies", "node_info", "hello", "materialize"];

/// How many requests the node has sent, by name, without its own.
fn requests(node: &Node) -> Vec<(String, u64)> {
    let status = node.status();
    let rpc = status["rpc"].as_object().expect("rpc");
    let counted = rpc.iter().filter(|(name, _)| !OWN.contains(&name.as_str()));
    counted.map(|(name, n)| (name.clone(), n.as_u64().expect("a count"))).collect()
}

/// Requests for each of `FILES` steps.
fn cost(node: &Node, what: &str, step: impl Fn(&Path)) -> f64 {
    let before = requests(node);
    for i in 0..FILES {
        step(&node.path(format!("d/f{i}")));
    }
    let after = requests(node);
    let had = |name: &str| before.iter().find(|(n, _)| n == name).map_or(0, |(_, c)| *c);
    let more: Vec<_> = after.iter().map(|(n, c)| (n, c - had(n))).filter(|(_, c)| *c > 0).collect();
    let each = more.iter().map(|(_, c)| *c).sum::<u64>() as f64 / FILES as f64;
    println!("{what}: {each:.2} requests each: {more:?}");
    each
}

/// What the small operations cost, which is the point of all this.
fn costs(model: &str, on_backing: bool) {
    let cluster = Cluster::builder().nodes(2).consistency(model).flush("end").prepare();
    if on_backing {
        fs::create_dir(cluster.backing().join("d")).expect("mkdir");
    }
    cluster.nodes().iter().for_each(|n| n.mount_with(&[]));
    let a = cluster.node(0);
    if !on_backing {
        fs::create_dir(a.path("d")).expect("mkdir");
    }
    let name = |what: &str| format!("{model}, {what}");
    let create = cost(a, &name("create"), |p| fs::write(p, [7; 4096]).expect("write"));
    let stat = cost(a, &name("stat"), |p| {
        fs::symlink_metadata(p).expect("stat");
    });
    let absent = cost(a, &name("absent"), |p| {
        let e = fs::symlink_metadata(p.with_extension("no")).expect_err("it is not there");
        assert_eq!(e.kind(), io::ErrorKind::NotFound);
    });
    let unlink = cost(a, &name("unlink"), |p| fs::remove_file(p).expect("unlink"));
    // Past the daemon the kernel asks once whether a write must clear file capabilities.
    let most =
        if std::env::var("EBB_TEST_IO_PATH").is_ok_and(|way| way == "auto") { 4.3 } else { 3.3 };
    assert!(create < most, "{model}: {create} requests for a create");
    assert!(stat < 0.2, "{model}: {stat} requests for a stat");
    assert!(absent < 0.2, "{model}: {absent} requests for what is not there");
    assert!(unlink < 1.3, "{model}: {unlink} requests for an unlink");
    cluster.umount_all();
}

#[test]
fn small_operations_under_session_cost_little() {
    costs("session", false);
}

#[test]
fn small_operations_in_a_directory_of_the_backing_cost_little() {
    costs("session", true);
}

#[test]
fn small_operations_under_posix_cost_little() {
    costs("posix", false);
}

#[test]
fn small_operations_under_mpiio_cost_little() {
    costs("mpiio", false);
}

const DIRS: [&str; 3] = ["", "x", "y"];

fn place(random: &mut impl Rng) -> String {
    let dir = DIRS.choose(random).expect("a directory");
    format!("{dir}/n{}", random.random_range(0..5)).trim_start_matches('/').to_owned()
}

#[derive(Clone, Debug)]
enum Step {
    Create(String),
    Write(String, usize),
    Unlink(String),
    Rename(String, String),
    Link(String, String),
    Mkdir(String),
    Rmdir(String),
    Chmod(String, u32),
    Truncate(String, u64),
}

fn step(random: &mut impl Rng) -> Step {
    let at = place(random);
    match random.random_range(0..16) {
        0..3 => Step::Create(at),
        3..5 => Step::Write(at, random.random_range(1..9000)),
        5..8 => Step::Unlink(at),
        8..11 => Step::Rename(at, place(random)),
        11 => Step::Link(at, place(random)),
        12 => Step::Mkdir(at),
        13 => Step::Rmdir(at),
        14 => Step::Truncate(at, random.random_range(0..9000)),
        _ => {
            let at = if random.random() { at } else { "x".into() };
            Step::Chmod(at, random.random_range(0o700..0o777))
        }
    }
}

fn run(root: &Path, step: &Step) -> Result<(), i32> {
    let at = |p: &String| root.join(p);
    let done = match step {
        Step::Create(p) => fs::File::create_new(at(p)).map(drop),
        Step::Write(p, len) => {
            let file = fs::OpenOptions::new().write(true).open(at(p));
            file.and_then(|f| std::os::unix::fs::FileExt::write_all_at(&f, &vec![1; *len], 0))
        }
        Step::Unlink(p) => fs::remove_file(at(p)),
        Step::Rename(from, to) => fs::rename(at(from), at(to)),
        Step::Link(from, to) => fs::hard_link(at(from), at(to)),
        Step::Mkdir(p) => fs::create_dir(at(p)),
        Step::Rmdir(p) => fs::remove_dir(at(p)),
        Step::Chmod(p, mode) => fs::set_permissions(at(p), fs::Permissions::from_mode(*mode)),
        Step::Truncate(p, len) => {
            let file = fs::OpenOptions::new().write(true).open(at(p));
            file.and_then(|f| f.set_len(*len))
        }
    };
    done.map_err(|e| e.raw_os_error().expect("an errno"))
}

/// What there is to see: every name that a step can touch, there or not, and the listings.
fn seen(root: &Path) -> Vec<String> {
    let mut out = Vec::new();
    for dir in DIRS {
        for n in 0..5 {
            let path = Path::new(dir).join(format!("n{n}"));
            out.push(match fs::symlink_metadata(root.join(&path)) {
                Err(e) => format!("{}: {:?}", path.display(), e.raw_os_error()),
                Ok(m) if m.is_dir() => format!("{}: {:o}", path.display(), m.mode()),
                Ok(m) => format!("{}: {:o} {} {}", path.display(), m.mode(), m.nlink(), m.size()),
            });
        }
        let mode = fs::metadata(root.join(dir)).map(|m| m.mode()).map_err(|e| e.raw_os_error());
        out.push(format!("{dir}: {mode:?}"));
    }
    out
}

fn listed(root: &Path) -> BTreeSet<String> {
    let list = |dir| fs::read_dir(root.join(dir)).expect("list");
    let names = DIRS.iter().flat_map(|dir| list(dir).map(move |e| (dir, e.expect("entry"))));
    names.map(|(dir, e)| format!("{dir}/{}", e.file_name().to_string_lossy())).collect()
}

/// After every step of one node, all nodes look at everything, mostly without asking: what they
/// say is what a local directory says that had the same steps.
fn storm(model: &str, nodes: usize, steps: usize, flush: &str) {
    let cluster = Cluster::builder().nodes(nodes).consistency(model).flush(flush).start();
    let seed = seed();
    println!("seed {seed} (EBB_SEED replays it)");
    let mut random = generator(seed);
    let reference = tempfile::tempdir().expect("tempdir");
    let reference = reference.path();
    for dir in &DIRS[1..] {
        fs::create_dir(reference.join(dir)).expect("mkdir");
        fs::create_dir(cluster.node(0).path(dir)).expect("mkdir");
    }
    let root_mode = fs::metadata(cluster.node(0).path("")).expect("stat").permissions();
    fs::set_permissions(reference, root_mode).expect("chmod");
    let mut log = Vec::new();
    for at in 0..steps {
        let step = step(&mut random);
        let n = random.random_range(0..nodes);
        log.push(format!("{at}: node{n}: {step:?}"));
        let last = || log[log.len().saturating_sub(12)..].join("\n");
        let (want, got) = (run(reference, &step), run(&cluster.node(n).path(""), &step));
        assert_eq!(got, want, "{model}, seed {seed}, step {at}\n{}", last());
        let want = seen(reference);
        for node in cluster.nodes() {
            for _ in 0..random.random_range(1..3) {
                let what = format!("{model}, seed {seed}, step {at}, on {}", node.name());
                assert_eq!(seen(&node.path("")), want, "{what}\n{}", last());
            }
            if random.random_range(0..10) == 0 {
                let what = format!("{model}, seed {seed}, step {at}, list of {}", node.name());
                assert_eq!(listed(&node.path("")), listed(reference), "{what}\n{}", last());
            }
        }
        if at % 97 == 96 {
            cluster.node(n).drain();
        }
    }
    let answered = |n: &Node| n.status()["leases"]["answered"].as_u64().unwrap_or(0);
    let answered: u64 = cluster.nodes().iter().map(answered).sum();
    assert!(answered > steps as u64, "the leases were of no use: {answered}");
    cluster.umount_all();
}

#[test]
fn a_storm_of_two_nodes_under_session() {
    storm("session", 2, 300, "end");
}

#[test]
fn a_storm_of_three_nodes_under_session_while_it_flushes() {
    storm("session", 3, 200, "immediate");
}

#[test]
fn a_storm_of_three_nodes_under_posix() {
    storm("posix", 3, 200, "end");
}

#[test]
fn a_storm_of_two_nodes_under_mpiio() {
    storm("mpiio", 2, 200, "idle");
}

/// Threads of two nodes make and remove names of one directory at the same time. Each looks at its
/// own name after each of its changes, and at the end all see the same.
#[test]
fn many_threads_change_one_directory() {
    let cluster = Cluster::builder().nodes(2).consistency("session").flush("idle").start();
    fs::create_dir(cluster.node(0).path("d")).expect("mkdir");
    std::thread::scope(|scope| {
        for (n, node) in cluster.nodes().iter().enumerate() {
            for thread in 0..4 {
                let own = node.path(format!("d/own-{n}-{thread}"));
                let moved = node.path(format!("d/moved-{n}-{thread}"));
                scope.spawn(move || {
                    for round in 0..60 {
                        fs::write(&own, vec![1; round]).expect("write");
                        assert_eq!(fs::metadata(&own).expect("just made").len(), round as u64);
                        fs::rename(&own, &moved).expect("rename");
                        assert!(!own.exists(), "it was just moved");
                        assert_eq!(fs::metadata(&moved).expect("moved").len(), round as u64);
                        if round % 7 != 6 {
                            fs::remove_file(&moved).expect("unlink");
                            assert!(!moved.exists(), "it was just removed");
                        }
                    }
                });
            }
        }
    });
    let names = |n: &Node| -> BTreeSet<_> {
        fs::read_dir(n.path("d")).expect("list").map(|e| e.expect("entry").file_name()).collect()
    };
    assert_eq!(names(cluster.node(0)), names(cluster.node(1)));
    cluster.umount_all();
}

/// One node makes names and tells the other of each: the other must see it at once, although it
/// has just seen that it was not there.
#[test]
fn what_was_not_there_is_seen_when_it_is() {
    let cluster = Cluster::builder().nodes(2).consistency("session").flush("end").start();
    let (a, b) = (cluster.node(0), cluster.node(1));
    for i in 0..60 {
        let name = format!("step{i}");
        assert!(!b.path(&name).exists() && !a.path(&name).exists());
        fs::write(a.path(&name), b"x").expect("write");
        assert_eq!(fs::metadata(b.path(&name)).expect("it is there").len(), 1);
        fs::remove_file(b.path(&name)).expect("unlink");
        assert!(!a.path(&name).exists(), "it is gone");
        std::thread::sleep(Duration::from_millis(i * 3));
    }
    cluster.umount_all();
}

/// Files that somebody else makes on the backing are found after a moment, as ever.
#[test]
fn names_that_appear_on_the_backing_are_found() {
    let cluster = Cluster::builder().nodes(2).consistency("session").flush("end").start();
    for node in cluster.nodes() {
        // Enough for the node to learn that it knows all names.
        assert!((0..20).all(|i| !node.path(format!("no{i}")).exists()));
        assert!(!node.path("late").exists());
    }
    fs::write(cluster.backing().join("late"), b"from outside").expect("write");
    std::thread::sleep(Duration::from_millis(2100));
    for node in cluster.nodes() {
        assert_eq!(fs::read(node.path("late")).expect("read"), b"from outside");
    }
    fs::remove_file(cluster.backing().join("late")).expect("unlink");
    std::thread::sleep(Duration::from_millis(2100));
    for node in cluster.nodes() {
        assert!(!node.path("late").exists(), "{}", node.name());
    }
    cluster.umount_all();
}

/// A node that holds leases of names, and is stopped or killed; how long the next change takes.
fn change_beside_a_silent_holder(cluster: &Cluster, signal: Signal) {
    let (a, b) = (cluster.node(0), cluster.node(1));
    fs::create_dir(a.path("d")).expect("mkdir");
    fs::write(a.path("d/old"), [1; 10]).expect("write");
    for _ in 0..3 {
        assert_eq!(fs::metadata(b.path("d/old")).expect("stat").len(), 10);
        assert!(!b.path("d/new").exists());
    }
    match signal {
        Signal::KILL => b.kill9(),
        other => b.signal(other),
    }
    let start = Instant::now();
    fs::write(a.path("d/new"), [2; 20]).expect("write");
    let first = start.elapsed();
    println!("the first change took {first:?}");
    assert!(first < LEASE + BUSY, "the first change took {first:?}");
    let start = Instant::now();
    fs::rename(a.path("d/old"), a.path("d/moved")).expect("rename");
    for i in 0..20 {
        fs::write(a.path(format!("d/more{i}")), b"x").expect("write");
    }
    let others = start.elapsed();
    assert!(others < LEASE + BUSY, "the changes after it took {others:?}");
}

#[test]
fn a_stopped_holder_of_names_delays_a_change_by_a_lease_and_is_never_stale() {
    let cluster = Cluster::builder().nodes(2).consistency("session").flush("end").start();
    change_beside_a_silent_holder(&cluster, Signal::STOP);
    let b = cluster.node(1);
    let (new, old) = (b.path("d/new"), b.path("d/old"));
    // Asked while it stands still, answered when it goes on: by then its leases are over.
    let looking = std::thread::spawn(move || (fs::metadata(&new).map(|m| m.len()), old.exists()));
    std::thread::sleep(Duration::from_millis(300));
    b.signal(Signal::CONT);
    let (new, old) = looking.join().expect("the looker");
    assert_eq!(new.expect("a stale absence"), 20);
    assert!(!old, "a stale name");
    assert!(b.path("d/moved").exists());
    cluster.umount_all();
}

#[test]
fn a_killed_holder_of_names_delays_a_change_by_a_lease() {
    let cluster = Cluster::builder().nodes(2).consistency("session").flush("end").start();
    change_beside_a_silent_holder(&cluster, Signal::KILL);
}

/// A restarted service knows no leases: a change waits for the nodes that may have some.
#[test]
fn a_restarted_service_waits_for_those_who_may_know_names() {
    let mut cluster =
        Cluster::builder().nodes(2).consistency("session").flush("end").separate_meta().start();
    let (at_a, at_b) = (cluster.node(0).path("new"), cluster.node(1).path("new"));
    for _ in 0..6 {
        assert!(!at_b.exists() && !at_a.exists());
    }
    cluster.node(1).signal(Signal::STOP);
    cluster.kill_meta();
    cluster.restart_meta();
    let start = Instant::now();
    fs::write(&at_a, [1; 10]).expect("write");
    let took = start.elapsed();
    cluster.node(1).signal(Signal::CONT);
    assert!(took > Duration::from_secs(1), "nobody was waited for: {took:?}");
    assert!(took < LEASE + BUSY, "{took:?}");
    assert_eq!(fs::metadata(&at_b).expect("a stale absence").len(), 10);
    // With everybody there nothing waits, and leases are of use again.
    let start = Instant::now();
    fs::remove_file(&at_b).expect("unlink");
    assert!(!at_a.exists() && start.elapsed() < BUSY);
    // Where two nodes have just changed something, leases pause.
    std::thread::sleep(Duration::from_secs(1));
    let before = requests(cluster.node(0)).iter().map(|(_, n)| n).sum::<u64>();
    for _ in 0..50 {
        assert!(!at_a.exists());
    }
    let asked = requests(cluster.node(0)).iter().map(|(_, n)| n).sum::<u64>() - before;
    assert!(asked < 25, "{asked} requests for 50 looks");
    cluster.umount_all();
}
