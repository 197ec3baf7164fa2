//! Quiet writes through real mounts: what a node that uses a file alone need not tell, what everybody
//! sees as soon as somebody asks, and what is left of it when the node stands still, or it or the
//! service is dead. Through the daemon: past it files sit at nodes (`seats.rs`).

use ebb_testkit::random::generator;
use ebb_testkit::{Builder, Cluster, Node};
use ebb_tests::content::{bytes, same};
use ebb_tests::nodes::{append, open, requests, unasked};
use ebb_tests::reboot;
use ebb_tests::turns::Turns;
use rand::Rng;
use rustix::process::Signal;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// The service's lease time, and what a busy machine may add to it.
const LEASE: Duration = Duration::from_secs(5);
const BUSY: Duration = Duration::from_secs(4);

const RECORD: u64 = 8 << 10;

fn told(node: &Node) -> u64 {
    requests(node, "attach") + requests(node, "append") + requests(node, "query")
}

fn quiet(node: &Node) -> u64 {
    unasked(node, "quiet")
}

fn through() -> Builder {
    Cluster::builder().consistency("posix").option("--io-path", "daemon")
}

fn posix(nodes: usize) -> Cluster {
    through().nodes(nodes).flush("end").separate_meta().start()
}

fn record(step: u64) -> Vec<u8> {
    bytes(1, 0, step * RECORD, RECORD)
}

/// Requests of a thousand writes.
fn cost(more: &[&str], appends: bool) -> u64 {
    let cluster = through().nodes(2).flush("end").prepare();
    cluster.nodes().iter().for_each(|n| n.mount_with(more));
    let a = cluster.node(0);
    let mut file = if appends { append(&a.path("f")) } else { open(&a.path("f")) };
    let before = told(a);
    for step in 0..1000 {
        match appends {
            true => file.write_all(&record(step)).expect("append"),
            false => file.write_all_at(&record(step), step * RECORD).expect("write"),
        }
    }
    let cost = told(a) - before;
    println!("{cost} requests, {} quiet writes", quiet(a));
    let want = bytes(1, 0, 0, 1000 * RECORD);
    same("on the other node", &std::fs::read(cluster.node(1).path("f")).expect("read"), &want);
    drop(file);
    cluster.umount_all();
    same("on the backing", &std::fs::read(cluster.backing().join("f")).expect("read"), &want);
    cost
}

#[test]
fn a_node_alone_tells_of_few_writes() {
    let cost = cost(&[], false);
    assert!(cost < 20, "{cost} requests");
}

#[test]
fn a_node_alone_tells_of_few_appends() {
    let cost = cost(&[], true);
    assert!(cost < 20, "{cost} requests");
}

/// The option for measurements does what it says, and the counts above mean something.
#[test]
fn a_naive_node_tells_of_every_write() {
    assert!(cost(&["--naive"], false) >= 1000);
}

/// A file of which node 0 has written `steps` records, most of them quietly.
fn written_quietly(cluster: &Cluster, steps: u64) -> File {
    let a = cluster.node(0);
    let file = open(&a.path("f"));
    let before = quiet(a);
    let write = |steps: Range<u64>| {
        for step in steps {
            file.write_all_at(&record(step), step * RECORD).expect("write");
        }
    };
    let half = steps / 2;
    write(0..half);
    assert!(quiet(a) - before + 5 >= half, "{} of {half} were quiet", quiet(a) - before);
    // To ask a node makes it tell: nobody asks after these.
    write(half..steps);
    file
}

/// How much of what its newest daemon took over nobody had been told of.
fn untold(node: &Node) -> u64 {
    let log = node.log();
    let (_, said) = log.rsplit_once(" untold=").expect("it took something over");
    let number = said.split_once(' ').expect("a number").0;
    number.parse().expect("a number")
}

#[test]
fn whoever_asks_sees_everything() {
    let cluster = posix(3);
    let want = bytes(1, 0, 0, 50 * RECORD);
    let ask: [(&str, fn(&Path) -> Vec<u8>); 3] = [
        ("read", |path| std::fs::read(path).expect("read")),
        ("stat", |path| vec![0; std::fs::metadata(path).expect("stat").len() as usize]),
        ("list", |path| {
            let entry = std::fs::read_dir(path.parent().expect("dir")).expect("list").next();
            vec![0; entry.expect("a name").expect("entry").metadata().expect("stat").len() as usize]
        }),
    ];
    for (how, ask) in ask {
        let file = written_quietly(&cluster, 50);
        let start = Instant::now();
        let got = ask(&cluster.node(1).path("f"));
        assert!(start.elapsed() < BUSY, "{how}: {:?}", start.elapsed());
        assert_eq!(got.len(), want.len(), "{how}");
        if how == "read" {
            same(how, &got, &want);
        }
        drop(file);
        std::fs::remove_file(cluster.node(2).path("f")).expect("unlink");
        // Where others have just asked, every write is told for a moment.
        std::thread::sleep(Duration::from_millis(800));
    }
}

#[test]
fn own_stats_show_what_was_not_told() {
    let cluster = posix(2);
    let a = cluster.node(0);
    let file = written_quietly(&cluster, 20);
    let len = |path: &Path| std::fs::metadata(path).expect("stat").len();
    for step in 20..40 {
        file.write_all_at(&record(step), step * RECORD).expect("write");
        let want = (step + 1) * RECORD;
        assert_eq!((file.metadata().expect("stat").len(), len(&a.path("f"))), (want, want));
    }
    assert_eq!(len(&cluster.node(1).path("f")), 40 * RECORD);
}

#[test]
fn what_others_cut_rename_or_unlink() {
    let cluster = posix(2);
    let (a, b) = (cluster.node(0), cluster.node(1));
    let file = written_quietly(&cluster, 20);
    let other = OpenOptions::new().write(true).open(b.path("f")).expect("open");
    other.set_len(3 * RECORD).expect("cut");
    drop(other);
    assert_eq!(file.metadata().expect("stat").len(), 3 * RECORD);
    same("cut", &std::fs::read(a.path("f")).expect("read"), &bytes(1, 0, 0, 3 * RECORD));
    file.write_all_at(&record(9), 9 * RECORD).expect("write");
    std::fs::rename(b.path("f"), b.path("g")).expect("rename");
    file.write_all_at(&record(10), 10 * RECORD).expect("write");
    assert_eq!(std::fs::metadata(b.path("g")).expect("stat").len(), 11 * RECORD);
    std::fs::remove_file(b.path("g")).expect("unlink");
    file.write_all_at(&record(11), 11 * RECORD).expect("write");
    let mut got = vec![0; RECORD as usize];
    file.read_exact_at(&mut got, 11 * RECORD).expect("read");
    same("unlinked", &got, &record(11));
    drop(file);
    cluster.umount_all();
    assert_eq!(std::fs::read_dir(cluster.backing()).expect("list").count(), 0);
}

#[test]
fn appends_of_two_nodes_are_all_there() {
    const EACH: u64 = 400;
    let cluster = posix(2);
    std::thread::scope(|scope| {
        for n in 0..2u64 {
            let mut file = append(&cluster.node(n as usize).path("f"));
            scope.spawn(move || {
                let mut random = generator(n);
                for step in 0..EACH {
                    let line = format!("{n} {step:06}\n");
                    file.write_all(line.as_bytes()).expect("append");
                    if random.random_range(0..100) == 0 {
                        std::thread::sleep(Duration::from_millis(900));
                    }
                }
            });
        }
    });
    let text = std::fs::read_to_string(cluster.node(0).path("f")).expect("read");
    for n in 0..2 {
        let mine: Vec<&str> = text.lines().filter(|l| l.starts_with(&format!("{n} "))).collect();
        let want: Vec<String> = (0..EACH).map(|s| format!("{n} {s:06}")).collect();
        assert_eq!(mine, want, "of node {n}");
    }
}

#[test]
fn a_stopped_holder_delays_others_by_a_lease_and_loses_nothing() {
    let cluster = posix(2);
    let (a, b) = (cluster.node(0), cluster.node(1));
    let file = written_quietly(&cluster, 20);
    a.signal(Signal::STOP);
    let start = Instant::now();
    let len = std::fs::metadata(b.path("f")).expect("stat").len();
    let took = start.elapsed();
    assert!(took < LEASE + BUSY, "{took:?}");
    assert!(len >= 20 * RECORD, "a short file: {len}");
    // Zeros, or what was before, would be wrong.
    let other = open(&b.path("f"));
    other.write_all_at(&record(100), 5 * RECORD).expect("write");
    a.signal(Signal::CONT);
    std::thread::sleep(Duration::from_secs(2));
    let mut want = bytes(1, 0, 0, 20 * RECORD);
    want[5 * RECORD as usize..6 * RECORD as usize].copy_from_slice(&record(100));
    for node in [a, b] {
        let got = std::fs::read(node.path("f")).expect("read");
        same(&format!("afterwards on {}", node.name()), &got, &want);
    }
    drop((file, other));
    cluster.umount_all();
    same("on the backing", &std::fs::read(cluster.backing().join("f")).expect("read"), &want);
}

/// A busy machine can keep a node from hearing of the service for so long that it tells of everything, as
/// it must. Such a run shows nothing of what was not told: it is tried again.
fn until_something_was_untold(run: fn() -> u64) {
    let told = (0..3).map(|_| run()).take_while(|untold| *untold <= 5 * RECORD).count();
    assert!(told < 3, "all of it was told, each time");
}

#[test]
fn a_dead_holder_loses_no_byte_silently() {
    until_something_was_untold(a_dead_holder);
}

fn a_dead_holder() -> u64 {
    let cluster = posix(2);
    let (a, b) = (cluster.node(0), cluster.node(1));
    let file = written_quietly(&cluster, 20);
    a.kill9();
    drop(file);
    let _ = a.ebb("umount", &[], &[]);
    let start = Instant::now();
    let other = open(&b.path("f"));
    assert!(start.elapsed() < LEASE + BUSY, "{:?}", start.elapsed());
    assert!(other.metadata().expect("stat").len() >= 20 * RECORD, "a short file");
    let mut got = vec![0; RECORD as usize];
    for step in [0, 10, 19] {
        let read = other.read_exact_at(&mut got, step * RECORD);
        assert!(read.is_err(), "record {step} of a dead node was read");
    }
    drop(other);
    // Its bytes are in its cache, and its next daemon brings them.
    a.mount();
    let untold = untold(a);
    let want = bytes(1, 0, 0, 20 * RECORD);
    for node in [a, b] {
        let got = std::fs::read(node.path("f")).expect("read");
        same(&format!("afterwards on {}", node.name()), &got, &want);
    }
    cluster.umount_all();
    same("on the backing", &std::fs::read(cluster.backing().join("f")).expect("read"), &want);
    untold
}

#[test]
fn a_daemon_that_comes_back_at_once_has_what_was_not_told() {
    until_something_was_untold(a_daemon_that_comes_back);
}

fn a_daemon_that_comes_back() -> u64 {
    let cluster = posix(2);
    let (a, b) = (cluster.node(0), cluster.node(1));
    drop(written_quietly(&cluster, 3));
    let file = written_quietly(&cluster, 20);
    a.kill9();
    drop(file);
    let _ = a.ebb("umount", &[], &[]);
    a.mount();
    let mut want = bytes(1, 0, 0, 20 * RECORD);
    same("afterwards", &std::fs::read(b.path("f")).expect("read"), &want);
    // What that daemon has told is not told a second time by the one after it, over what others wrote.
    let first = untold(a);
    for (node, step) in [(b, 15), (b, 17), (a, 16)] {
        let at = (step * RECORD) as usize;
        let file = open(&node.path("f"));
        file.write_all_at(&record(step + 50), step * RECORD).expect("write");
        want[at..at + RECORD as usize].copy_from_slice(&record(step + 50));
        same("written on", &std::fs::read(b.path("f")).expect("read"), &want);
    }
    a.kill9();
    let _ = a.ebb("umount", &[], &[]);
    a.mount();
    for node in [b, a] {
        same("after another one", &std::fs::read(node.path("f")).expect("read"), &want);
    }
    assert_eq!(untold(a), 0, "{}", a.log());
    assert!(!a.log().contains("overwritten since"), "{}", a.log());
    first
}

/// What was written without a word and not synced when the node lost its power is lost as it is anywhere: the
/// file is as long as it was synced.
#[test]
fn after_a_power_loss_a_file_is_as_long_as_it_was_synced() {
    let cluster = posix(2);
    let (a, b) = (cluster.node(0), cluster.node(1));
    let file = written_quietly(&cluster, 20);
    file.sync_all().expect("fsync");
    for step in 20..40 {
        file.write_all_at(&record(step), step * RECORD).expect("write");
    }
    a.kill9();
    drop(file);
    let _ = a.ebb("umount", &[], &[]);
    reboot::of_a_node(&a.cache().join("journal"));
    a.mount();
    let want = bytes(1, 0, 0, 20 * RECORD);
    for node in [b, a] {
        let (file, mut got) = (File::open(node.path("f")).expect("open"), vec![0; want.len()]);
        file.read_exact_at(&mut got, 0).expect("read");
        same(&format!("on {}", node.name()), &got, &want);
        // What was told and not synced is lost by name.
        let len = file.metadata().expect("stat").len();
        assert!((20 * RECORD..=40 * RECORD).contains(&len), "{len} bytes");
    }
    assert!(a.log().contains("written without a word when the node went down"), "{}", a.log());
}

/// Whoever asks while there is no daemon is answered when the next one has told everything, not when it is
/// welcome.
#[test]
fn who_waits_for_an_heir_sees_what_was_not_told() {
    wait_for_heirs(through(), 8);
}

/// The same with little room for it. (With copies nothing is written that nobody is told of.)
#[test]
fn who_waits_for_an_heir_with_a_small_cache_sees_what_was_not_told() {
    wait_for_heirs(through().option("--cache-size", "64MiB"), 3);
}

fn wait_for_heirs(builder: Builder, rounds: u64) {
    let cluster = builder.nodes(2).flush("end").separate_meta().supervised().start();
    let (a, b) = (cluster.node(0), cluster.node(1));
    let want = bytes(1, 0, 0, 20 * RECORD);
    let mut found = 0;
    for round in 0..rounds {
        let file = written_quietly(&cluster, 20);
        assert!(a.kill_daemon_only(), "no daemon");
        let path = b.path("f");
        // On a busy machine it may have been given up before it was back.
        match std::fs::read(&path) {
            Ok(got) => same(&format!("round {round}"), &got, &want),
            Err(e) => assert_eq!(e.raw_os_error(), Some(libc::EIO)),
        }
        found += untold(a);
        drop(file);
        same(&format!("round {round}, again"), &std::fs::read(&path).expect("read"), &want);
        std::fs::remove_file(path).expect("unlink");
        std::thread::sleep(Duration::from_millis(800));
    }
    assert!(found > rounds * RECORD, "most of it was told: {found} bytes were not");
    cluster.umount_all();
}

/// Each has bytes of the file that the other one wrote quietly last, so each asks for what only the other
/// one can tell.
#[test]
fn daemons_that_take_over_at_the_same_time_do_not_wait_for_each_other() {
    let limit = Duration::from_secs(20);
    let cluster = through().nodes(2).flush("end").separate_meta();
    let cluster = cluster.option("--request-timeout", "20s").start();
    let mut held = Vec::new();
    for (n, name) in ["f", "g"].into_iter().enumerate() {
        let (holder, other) = (cluster.node(n), cluster.node(1 - n));
        // At its end, which nobody writes over.
        let file = open(&other.path(name));
        file.write_all_at(&record(60), 60 * RECORD).expect("write");
        drop(file);
        let file = open(&holder.path(name));
        let before = quiet(holder);
        for steps in [0..20, 61..81] {
            for step in steps {
                file.write_all_at(&record(step), step * RECORD).expect("write");
            }
            // Where others have just been called back every write is told for a moment.
            std::thread::sleep(Duration::from_millis(800));
        }
        assert!(quiet(holder) > before + 5, "{}", quiet(holder) - before);
        held.push(file);
    }
    cluster.nodes().iter().for_each(Node::kill9);
    drop(held);
    for node in cluster.nodes() {
        let _ = node.ebb("umount", &[], &[]);
    }
    let start = Instant::now();
    std::thread::scope(|scope| {
        cluster.nodes().iter().for_each(|node| drop(scope.spawn(move || node.mount())));
    });
    assert!(start.elapsed() < limit / 2, "{:?}", start.elapsed());
    let got = |node: &Node, name: &str| std::fs::read(node.path(name)).expect("read");
    for (node, name) in cluster.nodes().iter().flat_map(|n| [(n, "f"), (n, "g")]) {
        let got = got(node, name);
        for step in (0..20).chain(60..81) {
            let at = (step * RECORD) as usize;
            let what = format!("{name}, record {step} on {}", node.name());
            same(&what, &got[at..at + RECORD as usize], &record(step));
        }
    }
    cluster.umount_all();
}

#[test]
fn an_heir_goes_on_writing() {
    let cluster = through().nodes(2).flush("end").separate_meta().supervised().start();
    let (a, b) = (cluster.node(0), cluster.node(1));
    let file = open(&a.path("f"));
    let mut log = append(&a.path("log"));
    for step in 0..120 {
        file.write_all_at(&record(step), step * RECORD).expect("write");
        log.write_all(format!("{step:06}\n").as_bytes()).expect("append");
        if step % 40 == 30 {
            assert!(a.kill_daemon_only(), "no daemon");
        }
    }
    let want = bytes(1, 0, 0, 120 * RECORD);
    let lines: String = (0..120).map(|step| format!("{step:06}\n")).collect();
    for node in [b, a] {
        same(node.name(), &std::fs::read(node.path("f")).expect("read"), &want);
        assert_eq!(std::fs::read_to_string(node.path("log")).expect("read"), lines);
    }
    drop((file, log));
    cluster.umount_all();
}

#[test]
fn a_restarted_service_counts_on_the_holder() {
    let mut cluster = through().nodes(2).flush("end").separate_meta().start();
    let want = bytes(1, 0, 0, 20 * RECORD);
    for _ in 0..2 {
        let file = written_quietly(&cluster, 20);
        cluster.kill_meta();
        cluster.restart_meta();
        let got = std::fs::read(cluster.node(1).path("f")).expect("read");
        same("after the restart", &got, &want);
        drop(file);
        std::fs::remove_file(cluster.node(0).path("f")).expect("unlink");
    }
    cluster.umount_all();
}

#[test]
fn a_drain_brings_what_was_not_told() {
    let cluster = posix(2);
    let (a, b) = (cluster.node(0), cluster.node(1));
    let file = written_quietly(&cluster, 20);
    a.drain();
    let there = || std::fs::read(cluster.backing().join("f")).expect("read");
    same("drained", &there(), &bytes(1, 0, 0, 20 * RECORD));
    for step in 0..40 {
        file.write_all_at(&record(step + 7), step * RECORD).expect("write");
    }
    a.drain();
    let want = bytes(1, 0, 7 * RECORD, 40 * RECORD);
    same("drained again", &there(), &want);
    same("on the other node", &std::fs::read(b.path("f")).expect("read"), &want);
    drop(file);
    cluster.umount_all();
}

fn turns(nodes: usize, flush: &str) {
    let cluster = through().nodes(nodes).flush(flush).start();
    // Pauses let a node be alone again.
    let turns = Turns { steps: 1500, in_a_row: 20, pauses: true, commits: false };
    turns.take(&cluster, |cluster| {
        let quietly: u64 = cluster.nodes().iter().map(quiet).sum();
        assert!(quietly > 30, "{quietly} quiet writes");
    });
}

#[test]
fn two_nodes_in_turn() {
    turns(2, "end");
}

#[test]
fn three_nodes_in_turn_while_it_is_flushed() {
    turns(3, "immediate");
}
