//! A node dies in the middle of writing a checkpoint over: the old one stays, and who has bytes of the new
//! one is told.

use super::{SOON, empty, has_a_partner, is_new, is_old, new, old, there, went_its_way};
use ebb_testkit::{Cluster, Node, mounts, skip_reason};
use ebb_tests::content::same;
use ebb_tests::recoveries::ended_with;
use rustix::process::Signal;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// Models and options that go other ways from each other.
fn everywhere() -> [(&'static str, &'static [(&'static str, &'static str)]); 3] {
    [
        ("posix", &[("--io-path", "daemon")]),
        ("session", &[("--io-path", "auto")]),
        ("commit", &[("--cache-size", "64MiB")]),
    ]
}

/// The same, and with copies at a partner.
fn everywhere_with_copies()
-> impl Iterator<Item = (&'static str, &'static [(&'static str, &'static str)])> {
    let copies: &[(&str, &str)] = &[("--replicas", "2")];
    everywhere().into_iter().chain([("session", copies), ("posix", copies)])
}

/// Two nodes, of which a silent one is given up soon.
fn with_a_short_lease(model: &str, options: &[(&str, &str)], flush: &str) -> Cluster {
    let builder = Cluster::builder().nodes(2).separate_meta().consistency(model);
    let add = |b: ebb_testkit::Builder, (name, value): &(&str, &str)| b.option(name, value);
    let builder = options.iter().fold(builder.flush(flush).lease("1s"), add);
    let cluster = builder.start();
    std::fs::write(there(&cluster), old()).expect("write");
    cluster
}

/// The daemon dies with the file open; and is given up for its silence, or not yet.
fn dies(node: &Node, file: File, given_up: bool) {
    node.kill9();
    drop(file);
    if given_up {
        std::thread::sleep(Duration::from_secs(5));
    }
}

/// With its cache.
fn comes_back(node: &Node) {
    let _ = node.ebb("umount", &[], &[]);
    node.mount();
}

/// What it had written may be half of a checkpoint: neither others' drains nor its being given up put that
/// in the place of the old one.
#[test]
fn a_writer_that_died_leaves_the_old_one_also_when_others_drain_and_leave() {
    if skip_reason().is_some() {
        return;
    }
    for (model, options) in everywhere() {
        for given_up in [false, true] {
            let what = format!("{model} {options:?}, given up: {given_up}");
            let cluster = with_a_short_lease(model, options, "immediate");
            let (a, b) = (cluster.node(0), cluster.node(1));
            let file = empty(a);
            file.write_all_at(&new(), 0).expect("write");
            file.sync_all().expect("fsync");
            if !options.contains(&("--io-path", "auto")) {
                a.wait_status(SOON, |s| s["dirty_bytes"] == 0);
            }
            went_its_way(a, options, &what);
            dies(a, file, given_up);
            b.drain();
            is_old(&cluster, &format!("{what}: another node has drained"));
            b.umount();
            is_old(&cluster, &format!("{what}: another node has left"));
            comes_back(a);
            a.umount();
            is_new(&cluster, &format!("{what}: it was back"));
        }
    }
}

/// A node that died before its first sync has written nothing that anybody was told of; that it had made the
/// file empty counts.
#[test]
fn a_writer_that_died_before_its_first_sync_leaves_the_old_one() {
    if skip_reason().is_some() {
        return;
    }
    for (model, options) in everywhere_with_copies() {
        for given_up in [false, true] {
            let what = format!("{model} {options:?}, given up: {given_up}");
            let mut cluster = with_a_short_lease(model, options, "idle");
            let a = cluster.node(0);
            let file = empty(a);
            File::open(a.mountpoint()).and_then(|d| d.sync_all()).expect("fsync");
            a.kill9();
            drop(file);
            if given_up {
                // Also by a service that has it from its journal.
                cluster.kill_meta();
                cluster.restart_meta();
                std::thread::sleep(Duration::from_secs(5));
            }
            let (a, b) = (cluster.node(0), cluster.node(1));
            b.drain();
            is_old(&cluster, &format!("{what}: another node has drained"));
            b.umount();
            is_old(&cluster, &format!("{what}: another node has left"));
            comes_back(a);
            a.umount();
            same(&what, &std::fs::read(there(&cluster)).expect("read"), &[]);
        }
    }
}

/// A node that lost its power looks like one that lives until its lease ends; here it stands still.
#[test]
fn a_writer_whose_death_nobody_has_noticed_yet_leaves_the_old_one() {
    if skip_reason().is_some() {
        return;
    }
    for (model, options) in everywhere_with_copies() {
        let what = format!("{model} {options:?}");
        let cluster = with_a_short_lease(model, options, "idle");
        let (a, b) = (cluster.node(0), cluster.node(1));
        has_a_partner(a, options);
        // In a process that is started before: every other one would have to close it as well.
        let mut writer = a.command("sh");
        let writer = writer.args(["-c", "exec 3> checkpoint; sync .; echo; read -r _"]);
        let mut writer =
            writer.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a shell");
        writer.stdout.take().expect("its output").read_exact(&mut [0]).expect("it has begun");
        if !options.contains(&("--replicas", "2")) {
            went_its_way(a, options, &what);
        }
        a.signal(Signal::STOP);
        let began = Instant::now();
        let drained = b.ebb("drain", &[], &[]);
        let (took, found) = (began.elapsed(), std::fs::read(there(&cluster)));
        a.signal(Signal::CONT);
        ended_with(&drained, 0, &[]);
        same(&what, &found.expect("read"), &old());
        // Not before it was certain, and no longer.
        assert!(took > Duration::from_millis(500) && took < SOON, "{what}: {took:?}");
        // Now it is known to live.
        let drained_with_it = || {
            b.drain();
            std::fs::read(there(&cluster)).expect("read").is_empty()
        };
        assert!(mounts::wait_until(SOON, drained_with_it), "{what}: it lives");
        drop(writer.stdin.take());
        writer.wait().expect("it ends");
        a.umount();
        b.umount();
    }
}

/// Who has bytes of what another node was writing over when it died is told that they are not under the
/// name; as the partner, to whom they went, or because it wrote some of it.
#[test]
fn who_has_bytes_of_what_a_dead_node_was_writing_over_is_told() {
    if skip_reason().is_some() {
        return;
    }
    for (model, options) in everywhere_with_copies() {
        let copies = options.contains(&("--replicas", "2"));
        for both in [false, true].into_iter().filter(|both| *both || copies) {
            for given_up in [false, true] {
                let what = format!("{model} {options:?}, both: {both}, given up: {given_up}");
                // Without copies: the backing lacks what the dead node has, or has all that is known of.
                let flush = if given_up && both { "immediate" } else { "idle" };
                let cluster = with_a_short_lease(model, options, flush);
                let (a, b) = (cluster.node(0), cluster.node(1));
                has_a_partner(a, options);
                let file = empty(a);
                file.write_all_at(&new()[..100_000], 0).expect("write");
                file.sync_all().expect("fsync");
                went_its_way(a, options, &what);
                if both {
                    let second = File::options().write(true).open(b.path("checkpoint"));
                    let second = second.expect("open");
                    second.write_all_at(&new()[100_000..], 100_000).expect("write");
                    second.sync_all().expect("fsync");
                }
                b.wait_closed();
                let past = options.contains(&("--io-path", "auto"));
                if flush == "immediate" && !past {
                    a.wait_status(SOON, |s| s["dirty_bytes"] == 0);
                }
                let half = copies || (flush == "immediate" && !past);
                dies(a, file, given_up);
                let why = if half { "the older file stays" } else { "with 100000 bytes of it" };
                let told = ["checkpoint", why, a.name()];
                ended_with(&b.ebb("drain", &[], &[]), 3, &told);
                is_old(&cluster, &format!("{what}: another node has drained"));
                if copies && flush == "idle" {
                    let adopted = b.status()["copies"]["adopted_bytes"].as_u64();
                    assert_eq!(adopted, Some(100_000), "{what}: {}", b.status()["copies"]);
                }
                ended_with(&b.ebb("umount", &[], &[]), 3, &told);
                is_old(&cluster, &format!("{what}: another node has tried to leave"));
                if given_up {
                    // It keeps its cache.
                    ended_with(&b.ebb("umount", &["--no-drain"], &[]), 3, &[]);
                    is_old(&cluster, &format!("{what}: another node has left"));
                    b.mount();
                    is_old(&cluster, &format!("{what}: another node is back"));
                }
                comes_back(a);
                let end = if both { 200_000 } else { 100_000 };
                same(&what, &std::fs::read(b.path("checkpoint")).expect("read"), &new()[..end]);
                b.drain();
                a.umount();
                b.umount();
                let there = std::fs::read(there(&cluster)).expect("read");
                same(&format!("{what}: it was back"), &there, &new()[..end]);
            }
        }
    }
}

/// It is written anew, and that is what counts.
#[test]
fn what_a_dead_node_was_writing_over_can_be_written_over() {
    if skip_reason().is_some() {
        return;
    }
    for (model, options) in everywhere_with_copies() {
        let what = format!("{model} {options:?}");
        let cluster = with_a_short_lease(model, options, "idle");
        let (a, b) = (cluster.node(0), cluster.node(1));
        has_a_partner(a, options);
        let file = empty(a);
        file.write_all_at(&[7; 400_000], 0).expect("write");
        file.sync_all().expect("fsync");
        went_its_way(a, options, &what);
        dies(a, file, true);
        std::fs::write(b.path("checkpoint"), new()).expect("write");
        b.drain();
        is_new(&cluster, &what);
        b.umount();
        is_new(&cluster, &what);
    }
}

/// A node that only read it and died must not keep what others write, drain and are told of from its name.
#[test]
fn a_reader_that_died_does_not_hold_back_what_others_drain() {
    if skip_reason().is_some() {
        return;
    }
    for (model, options) in everywhere() {
        for given_up in [false, true] {
            let what = format!("{model} {options:?}, given up: {given_up}");
            let cluster = with_a_short_lease(model, options, "idle");
            let (a, b) = (cluster.node(0), cluster.node(1));
            let file = File::open(a.path("checkpoint")).expect("open");
            file.read_exact_at(&mut [0; 10], 0).expect("read");
            dies(a, file, given_up);
            std::fs::write(b.path("checkpoint"), new()).expect("write");
            went_its_way(b, options, &what);
            b.drain();
            is_new(&cluster, &format!("{what}: drained with 0"));
            b.umount();
        }
    }
}
