//! A checkpoint that is written over in place (`O_TRUNC`, a cut to nothing): what the backing has stays
//! there until the new one is whole and closed, whatever ends in between.

mod dead;

use ebb_testkit::{Cluster, Node, mounts, random, skip_reason};
use ebb_tests::content::same;
use ebb_tests::recoveries::{all_die, ended_with, recover, said};
use rand::Rng;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::PathBuf;
use std::time::Duration;

/// What is written past the daemon is flushed when it is closed.
const FLUSHED_WHILE_OPEN: &[(&str, &str)] = &[("--flush", "immediate"), ("--io-path", "daemon")];

const SOON: Duration = Duration::from_secs(20);

const MODELS: [&str; 4] = ["session", "posix", "commit", "mpiio"];

fn old() -> Vec<u8> {
    vec![1; 300_000]
}

fn new() -> Vec<u8> {
    vec![2; 200_000]
}

/// A job whose backing has a checkpoint.
fn with_a_checkpoint(nodes: usize, model: &str, options: &[(&str, &str)]) -> Cluster {
    let builder = Cluster::builder().nodes(nodes).separate_meta().consistency(model);
    let builder = match options.iter().any(|(name, _)| *name == "--flush") {
        true => builder,
        false => builder.flush("end"),
    };
    let add = |b: ebb_testkit::Builder, (name, value): &(&str, &str)| b.option(name, value);
    let cluster = options.iter().fold(builder, add).start();
    std::fs::write(there(&cluster), old()).expect("write");
    cluster
}

/// What the backing has under the name.
fn there(cluster: &Cluster) -> PathBuf {
    cluster.backing().join("checkpoint")
}

fn is_old(cluster: &Cluster, when: &str) {
    same(when, &std::fs::read(there(cluster)).expect("the old one"), &old());
}

fn is_new(cluster: &Cluster, when: &str) {
    same(when, &std::fs::read(there(cluster)).expect("the new one"), &new());
}

fn empty(node: &Node) -> File {
    let file = File::options().write(true).truncate(true).open(node.path("checkpoint"));
    file.expect("open")
}

/// The node has worked in the way that the options ask for, where it can here.
fn went_its_way(node: &Node, options: &[(&str, &str)], what: &str) {
    let status = node.status();
    if options.contains(&("--io-path", "auto")) && status["io_path_obstacle"].is_null() {
        let past = status["opens"]["passthrough-write"].as_u64();
        assert!(past > Some(0), "{what}: {}", status["opens"]);
    }
    if options.contains(&("--replicas", "2")) {
        let copied = status["copies"]["copied_bytes"].as_u64();
        assert!(copied > Some(0), "{what}: {}", status["copies"]);
    }
}

/// From now on, where there are copies at all, what it writes has one.
fn has_a_partner(node: &Node, options: &[(&str, &str)]) {
    if options.contains(&("--replicas", "2")) {
        node.wait_status(SOON, |s| !s["copies"]["partner"].is_null());
    }
}

#[test]
fn the_old_one_stays_until_the_new_one_is_whole_and_closed() {
    if skip_reason().is_some() {
        return;
    }
    let ways: [&[(&str, &str)]; 4] =
        [&[], &[("--io-path", "auto")], &[("--cache-size", "64MiB")], FLUSHED_WHILE_OPEN];
    for model in MODELS {
        for options in ways {
            let what = format!("{model} {options:?}");
            let cluster = with_a_checkpoint(1, model, options);
            let node = cluster.node(0);
            let before = std::fs::metadata(there(&cluster)).expect("stat").ino();
            let file = empty(node);
            is_old(&cluster, &what);
            assert_eq!(
                std::fs::metadata(node.path("checkpoint")).expect("stat").len(),
                0,
                "{what}"
            );
            for part in 0..4 {
                file.write_all_at(&[2; 50_000], part * 50_000).expect("write");
                file.sync_all().expect("fsync");
                is_old(&cluster, &what);
            }
            if options.contains(&("--flush", "immediate")) && model == "posix" {
                // Everything is flushed, and may be more to come.
                node.wait_status(SOON, |s| s["dirty_bytes"] == 0);
                is_old(&cluster, &what);
            }
            went_its_way(node, options, &what);
            drop(file);
            node.wait_closed();
            if options.contains(&("--flush", "immediate")) {
                let whole = || std::fs::read(there(&cluster)).is_ok_and(|b| b == new());
                assert!(mounts::wait_until(SOON, whole), "{what}: not published at the close");
            } else {
                is_old(&cluster, &what);
                node.drain();
            }
            is_new(&cluster, &what);
            assert_ne!(std::fs::metadata(there(&cluster)).expect("stat").ino(), before, "{what}");
            same(&what, &std::fs::read(node.path("checkpoint")).expect("read"), &new());
            node.umount();
            is_new(&cluster, &what);
        }
    }
}

/// By each call that makes a file empty; what the file is besides its bytes stays.
#[test]
fn every_way_to_write_over_keeps_what_the_file_was() {
    if skip_reason().is_some() {
        return;
    }
    let ways = [
        "cat > checkpoint",
        "truncate -s 0 checkpoint; cat >> checkpoint",
        "cp /dev/stdin checkpoint",
    ];
    for way in ways {
        let cluster = with_a_checkpoint(1, "posix", &[]);
        let node = cluster.node(0);
        let mode = std::fs::Permissions::from_mode(0o640);
        std::fs::set_permissions(there(&cluster), mode).expect("chmod");
        rustix::fs::setxattr(there(&cluster), "user.run", b"7", rustix::fs::XattrFlags::empty())
            .expect("setxattr");
        let script = format!(
            "cd {}; head -c 200000 /dev/zero | tr '\\0' '\\2' | {{ {way}; }}",
            node.mountpoint().display()
        );
        node.shell(&script);
        is_old(&cluster, way);
        node.drain();
        is_new(&cluster, way);
        let now = std::fs::metadata(there(&cluster)).expect("stat");
        assert_eq!(now.mode() & 0o7777, 0o640, "{way}");
        let mut value = [0; 8];
        for path in [there(&cluster), node.path("checkpoint")] {
            let len =
                rustix::fs::getxattr(&path, "user.run", &mut value[..]).expect("the attribute");
            assert_eq!(&value[..len], b"7", "{way}");
        }
    }
}

/// Where another object could not be the same, what is there is cut as ever.
#[test]
fn with_a_second_name_the_file_is_written_in_place() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = with_a_checkpoint(1, "posix", &[]);
    let node = cluster.node(0);
    std::fs::hard_link(there(&cluster), cluster.backing().join("second")).expect("link");
    std::fs::write(node.path("checkpoint"), new()).expect("write");
    node.drain();
    is_new(&cluster, "first name");
    same("second name", &std::fs::read(cluster.backing().join("second")).expect("read"), &new());
    same("in the mount", &std::fs::read(node.path("second")).expect("read"), &new());
}

/// The whole job is lost in the middle: the old checkpoint is there, and the caches bring the new one.
#[test]
fn when_all_die_the_old_one_is_there_until_the_caches_bring_the_new_one() {
    if skip_reason().is_some() {
        return;
    }
    let ways: [&[(&str, &str)]; 4] =
        [&[], &[("--io-path", "auto")], FLUSHED_WHILE_OPEN, &[("--replicas", "2")]];
    for model in ["session", "posix"] {
        for options in ways {
            for nodes in [1, 2] {
                if nodes == 1 && options.contains(&("--replicas", "2")) {
                    continue;
                }
                let what = format!("{model} {options:?}, {nodes} node(s)");
                let mut cluster = with_a_checkpoint(nodes, model, options);
                let node = cluster.node(0);
                has_a_partner(node, options);
                let file = empty(node);
                file.write_all_at(&new(), 0).expect("write");
                file.sync_all().expect("fsync");
                went_its_way(node, options, &what);
                if options.contains(&("--flush", "immediate")) && model == "posix" {
                    node.wait_status(SOON, |s| s["dirty_bytes"] == 0);
                }
                is_old(&cluster, &what);
                File::open(node.mountpoint()).and_then(|d| d.sync_all()).expect("fsync");
                all_die(&mut cluster);
                drop(file);
                is_old(&cluster, &what);
                for node in cluster.nodes() {
                    println!("{what}: {}", said(&recover(&cluster, node, &["--wait", "0s"])));
                }
                for node in cluster.nodes() {
                    ended_with(&recover(&cluster, node, &["--wait", "0s"]), 0, &[]);
                }
                is_new(&cluster, &what);
            }
        }
    }
}

/// The close comes at every moment of the last flush: one of the two publishes.
#[test]
fn a_close_beside_the_last_flush_publishes() {
    if skip_reason().is_some() {
        return;
    }
    let seed = random::seed();
    let mut dice = random::generator(seed);
    let cluster = with_a_checkpoint(1, "posix", FLUSHED_WHILE_OPEN);
    for round in 2..20u8 {
        let file = empty(cluster.node(0));
        file.write_all_at(&[round; 20_000], 0).expect("write");
        std::thread::sleep(Duration::from_micros(dice.random_range(0..30_000)));
        drop(file);
        let whole = || std::fs::read(there(&cluster)).is_ok_and(|b| b == [round; 20_000]);
        assert!(mounts::wait_until(SOON, whole), "seed {seed}: round {round} is not published");
    }
}

/// Of two nodes that wrote it the first does not hear that it was published when the second one closed it.
#[test]
fn a_node_that_was_not_told_of_the_new_name_takes_it_for_nobody_elses() {
    if skip_reason().is_some() {
        return;
    }
    for dies in [false, true] {
        let mut cluster = with_a_checkpoint(2, "posix", FLUSHED_WHILE_OPEN);
        let (a, b) = (cluster.node(0), cluster.node(1));
        let first = empty(a);
        let second = File::options().write(true).open(b.path("checkpoint")).expect("open");
        first.write_all_at(&new()[..100_000], 0).expect("write");
        first.sync_all().expect("fsync");
        second.write_all_at(&new()[100_000..], 100_000).expect("write");
        second.sync_all().expect("fsync");
        for node in [a, b] {
            node.wait_status(SOON, |s| s["dirty_bytes"] == 0);
        }
        is_old(&cluster, "all is flushed, and it is open");
        drop(first);
        a.wait_closed();
        is_old(&cluster, "it is open elsewhere");
        drop(second);
        let whole = || std::fs::read(there(&cluster)).is_ok_and(|bytes| bytes == new());
        assert!(mounts::wait_until(SOON, whole), "not published at the last close");
        if dies {
            all_die(&mut cluster);
            for _ in 0..2 {
                for node in cluster.nodes() {
                    println!("{}", said(&recover(&cluster, node, &["--wait", "0s"])));
                }
            }
            for node in cluster.nodes() {
                ended_with(&recover(&cluster, node, &["--wait", "0s"]), 0, &[]);
            }
        } else {
            cluster.umount_all();
        }
        is_new(&cluster, "at last");
    }
}

/// What was flushed and has not got its name is remembered by the daemon that takes the cache over.
#[test]
fn what_waits_is_not_forgotten_by_the_next_daemon() {
    if skip_reason().is_some() {
        return;
    }
    let mut cluster = with_a_checkpoint(1, "session", FLUSHED_WHILE_OPEN);
    let node = cluster.node(0);
    let file = empty(node);
    file.write_all_at(&new(), 0).expect("write");
    file.sync_all().expect("fsync");
    node.wait_status(SOON, |s| s["dirty_bytes"] == 0);
    node.kill9();
    drop(file);
    let _ = node.ebb("umount", &[], &[]);
    node.mount();
    is_old(&cluster, "taken over");
    all_die(&mut cluster);
    is_old(&cluster, "all died");
    ended_with(&recover(&cluster, cluster.node(0), &["--wait", "0s"]), 0, &[]);
    is_new(&cluster, "recovered");
}

/// Under a supervisor the program that writes it over notices nothing of a dead daemon.
#[test]
fn a_daemon_that_dies_under_its_supervisor_changes_nothing() {
    if skip_reason().is_some() {
        return;
    }
    for flush in ["idle", "immediate"] {
        let builder = Cluster::builder().nodes(1).separate_meta().consistency("posix");
        let cluster = builder.flush(flush).supervised().start();
        std::fs::write(there(&cluster), old()).expect("write");
        let node = cluster.node(0);
        let file = empty(node);
        for part in 0..4 {
            file.write_all_at(&[2; 50_000], part * 50_000).expect("write");
            file.sync_all().expect("fsync");
            assert!(node.kill_daemon_only(), "{flush}: no daemon to kill");
            is_old(&cluster, flush);
        }
        same(flush, &std::fs::read(node.path("checkpoint")).expect("read"), &new());
        is_old(&cluster, flush);
        drop(file);
        node.drain();
        is_new(&cluster, flush);
        node.umount();
    }
}

/// The service lives: what a dead node wrote is brought by its next daemon, or told.
#[test]
fn when_the_writer_dies_the_old_one_stays_until_it_is_back() {
    if skip_reason().is_some() {
        return;
    }
    for flush in ["end", "immediate"] {
        let cluster = with_a_checkpoint(2, "posix", &[("--flush", flush)]);
        let node = cluster.node(0);
        let file = empty(node);
        file.write_all_at(&new(), 0).expect("write");
        file.sync_all().expect("fsync");
        node.kill9();
        drop(file);
        is_old(&cluster, flush);
        let _ = node.ebb("umount", &[], &[]);
        node.mount();
        same(flush, &std::fs::read(cluster.node(1).path("checkpoint")).expect("read"), &new());
        node.drain();
        is_new(&cluster, flush);
    }
}

/// A file that was only made empty is empty on the backing in the end, not before.
#[test]
fn a_file_that_was_made_empty_is_empty_after_a_drain_and_after_a_recovery() {
    if skip_reason().is_some() {
        return;
    }
    for dies in [false, true] {
        let mut cluster = with_a_checkpoint(1, "posix", &[]);
        let node = cluster.node(0);
        drop(empty(node));
        File::open(node.mountpoint()).and_then(|d| d.sync_all()).expect("fsync");
        is_old(&cluster, "made empty");
        if dies {
            all_die(&mut cluster);
            is_old(&cluster, "made empty, and died");
            ended_with(&recover(&cluster, cluster.node(0), &["--wait", "0s"]), 0, &[]);
        } else {
            node.drain();
        }
        same("empty", &std::fs::read(there(&cluster)).expect("read"), &[]);
    }
}

/// A node that has the old object open must not read it as the new one.
#[test]
fn a_node_that_had_it_open_reads_the_new_one() {
    if skip_reason().is_some() {
        return;
    }
    for model in MODELS {
        let cluster = with_a_checkpoint(2, model, &[]);
        let (a, b) = (cluster.node(0), cluster.node(1));
        let held = File::open(b.path("checkpoint")).expect("open");
        let mut some = [0; 10];
        held.read_exact_at(&mut some, 0).expect("read");
        assert_eq!(some, [1; 10], "{model}");
        std::fs::write(a.path("checkpoint"), new()).expect("write");
        a.drain();
        is_new(&cluster, model);
        a.umount();
        same(model, &std::fs::read(b.path("checkpoint")).expect("read"), &new());
        if model == "posix" {
            held.read_exact_at(&mut some, 100_000).expect("read");
            assert_eq!(some, [2; 10], "{model}");
        }
    }
}

/// An fsync that promises the backing keeps its promise.
#[test]
fn an_fsync_to_the_backing_replaces_it_at_once() {
    if skip_reason().is_some() {
        return;
    }
    let cluster = with_a_checkpoint(1, "posix", &[("--durability", "backing")]);
    let file = empty(cluster.node(0));
    file.write_all_at(&new(), 0).expect("write");
    is_old(&cluster, "before the fsync");
    file.sync_all().expect("fsync");
    is_new(&cluster, "after it");
    file.write_all_at(&[2; 100], 200_000).expect("write");
    file.set_len(200_000).expect("cut");
    drop(file);
    cluster.node(0).umount();
    is_new(&cluster, "after more");
}

/// Names and links meanwhile.
#[test]
fn names_of_a_file_that_begins_anew_can_change() {
    if skip_reason().is_some() {
        return;
    }
    for way in
        ["mv checkpoint other", "rm checkpoint", "ln checkpoint other", "mv other checkpoint"]
    {
        let cluster = with_a_checkpoint(2, "posix", &[]);
        let node = cluster.node(0);
        std::fs::write(node.path("checkpoint"), new()).expect("write");
        if way == "mv other checkpoint" {
            std::fs::write(node.path("other"), vec![3; 1000]).expect("write");
        }
        node.shell(&format!("cd {}; {way}", node.mountpoint().display()));
        node.drain();
        let read = |name: &str| std::fs::read(cluster.backing().join(name)).ok();
        let is = (read("checkpoint"), read("other"));
        let wanted = match way {
            "mv checkpoint other" => (None, Some(new())),
            "rm checkpoint" => (None, None),
            "ln checkpoint other" => (Some(new()), Some(new())),
            _ => (Some(vec![3; 1000]), None),
        };
        assert!(is == wanted, "{way}");
    }
}

/// Random programs that write over and read, on two nodes, with drains and restarted daemons and services
/// in between. A look at the backing finds a whole one, and never one that is older than before.
#[test]
fn whenever_it_is_looked_at_the_backing_has_a_whole_one() {
    if skip_reason().is_some() {
        return;
    }
    let seed = random::seed();
    let mut dice = random::generator(seed);
    let (mut published, mut kills) = (0, 0);
    for options in [FLUSHED_WHILE_OPEN, &[("--flush", "idle"), ("--io-path", "auto")]] {
        let mut cluster = with_a_checkpoint(2, "posix", options);
        let len = |round: u8| 40_000 + 10_000 * usize::from(round % 5);
        std::fs::write(there(&cluster), vec![1; len(1)]).expect("write");
        let mut newest = 1;
        for round in 2..30u8 {
            let who = cluster.node(dice.random_range(0..2));
            let file = empty(who);
            for at in (0..len(round)).step_by(10_000) {
                file.write_all_at(&vec![round; 10_000], at as u64).expect("write");
                if dice.random_bool(0.3) {
                    file.sync_all().expect("fsync");
                }
                let found = std::fs::read(there(&cluster)).expect("it is there");
                let of = found[0];
                same(&format!("seed {seed}, round {round}"), &found, &vec![of; len(of)]);
                assert!(of >= newest && of < round, "seed {seed}: {of} in round {round}");
                published += u64::from(of > newest);
                newest = of;
            }
            drop(file);
            match dice.random_range(0..6) {
                0 => {
                    let _ = who.ebb("drain", &[], &[]);
                }
                1 => {
                    cluster.kill_meta();
                    cluster.restart_meta();
                    kills += 1;
                }
                2 => {
                    who.kill9();
                    let _ = who.ebb("umount", &[], &[]);
                    who.mount();
                    kills += 1;
                }
                _ => {}
            }
            for node in cluster.nodes() {
                let got = std::fs::read(node.path("checkpoint")).expect("read");
                same(&format!("seed {seed}, after {round}"), &got, &vec![round; len(round)]);
            }
        }
        cluster.umount_all();
        same("at last", &std::fs::read(there(&cluster)).expect("read"), &vec![29; len(29)]);
    }
    println!("published {published} times on the way, {kills} kills");
    assert!(published > 0 && kills > 0, "seed {seed}");
}
