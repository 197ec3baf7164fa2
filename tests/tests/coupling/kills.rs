//! Services, daemons, producers and consumers that are killed: nobody waits beyond the deadline, and nobody
//! reads a wrong byte.

use crate::together::*;
use ebb_testkit::{Cluster, random, skip_reason};
use ebb_tests::{content, tools};
use rand::Rng;
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::time::{Duration, Instant};

const PART: u64 = 1 << 20;

fn start(model: &str) -> Option<Cluster> {
    if let Some(why) = skip_reason() {
        eprintln!("SKIPPED: {why}");
        return None;
    }
    let cluster = Cluster::builder().nodes(2).separate_meta().consistency(model);
    Some(cluster.lease("5s").supervised().start())
}

/// Everybody goes on after the service, or a daemon, was killed while one waits and one writes.
#[test]
fn a_wait_outlives_its_daemon_and_the_service() {
    for model in ["posix", "session"] {
        let Some(mut cluster) = start(model) else { return };
        couple(cluster.node(0), "d", "producers=2 consumers=2 wait=2m");
        let root = cluster.root().to_owned();
        let copies = [root.join("copy0"), root.join("copy1")];
        let file = "d/f";
        cluster.node(0).shell("echo first > d/f");
        let named = reads(cluster.node(0), "d/later", &root.join("copy2"));
        let consumers = [0, 1].map(|n| reads(cluster.node(n), file, &copies[n]));
        wait_awaiting(&cluster, 3);
        let producer = cluster.node(1).spawn(
            "exec 3>> d/f; echo second >&3; while ! test -e go; do sleep 0.1; done; echo third >&3",
        );
        let node = cluster.node(1);
        let writes = || attribute(&node.path(file)).is_ok_and(|text| text.contains("1 writing"));
        tools::wait_until(LIMIT, "somebody writes", writes);
        cluster.kill_meta();
        cluster.restart_meta();
        wait_awaiting(&cluster, 3);
        for node in [0, 1] {
            assert!(cluster.node(node).kill_daemon(), "there is a daemon");
            let waits = || coupled(&cluster)["awaiting"] == 3;
            tools::wait_until(LIMIT, "who waited waits again", waits);
        }
        for number in [0, 1] {
            let node = cluster.node(number);
            let stands = attribute(&node.path(file)).expect("an attribute");
            assert!(stands.starts_with("awaited: 1 of 2 producers through, 1 writing"), "{stands}");
        }
        cluster.node(0).shell("echo go > go");
        is_done(producer, "the producer");
        for (consumer, copy) in consumers.into_iter().zip(&copies) {
            is_done(consumer, "a consumer");
            assert_eq!(fs::read_to_string(copy).expect("a copy"), "first\nsecond\nthird\n");
        }
        fs::remove_file(cluster.node(0).path("go")).expect("removed");
        wait_released(&cluster, file);
        cluster.node(0).shell("echo x > d/later; echo y >> d/later");
        is_done(named, "who waited for a name");
        assert_eq!(fs::read_to_string(root.join("copy2")).expect("a copy"), "x\ny\n");
        cluster.umount_all();
    }
}

/// Producers and consumers are killed at random moments. `EBB_COUPLING_KILLS` of them.
#[test]
fn whoever_is_killed_nobody_hangs_and_nobody_reads_half_a_file() {
    let kills = tools::amount("EBB_COUPLING_KILLS", 16);
    let Some(cluster) = start("session") else { return };
    couple(cluster.node(0), "d", "producers=2 consumers=2 wait=3s");
    let seed = random::seed();
    let mut dice = random::generator(seed);
    let (mut whole, mut failed, mut killed) = (0, 0, 0);
    let mut round = 0;
    while killed < kills {
        round += 1;
        let file = format!("d/f{round}");
        let parts: Vec<_> = (0..2)
            .map(|who| {
                let path = cluster.root().join(format!("part{who}"));
                fs::write(&path, content::bytes(who, round, who * PART, PART)).expect("a part");
                path
            })
            .collect();
        let copies = [0, 1].map(|n| cluster.root().join(format!("copy{n}")));
        let producers: Vec<_> = (0..2)
            .map(|who| writes(cluster.node(who), &file, &parts[who], who as u64 * PART))
            .collect();
        let consumers: Vec<_> = (0..2).map(|n| reads(cluster.node(n), &file, &copies[n])).collect();
        let mut all: Vec<_> = producers.into_iter().chain(consumers).collect();
        let victim = dice.random_range(0..all.len());
        std::thread::sleep(Duration::from_millis(dice.random_range(0..60)));
        let alive = all[victim].try_wait().expect("waits").is_none();
        if alive {
            kill_process(Pid::from_child(&all[victim]), Signal::KILL).expect("a signal");
            killed += 1;
        }
        let began = Instant::now();
        for (who, child) in all.into_iter().enumerate() {
            let status = ended(child, &format!("round {round}, program {who}"));
            assert!(began.elapsed() < Duration::from_secs(15), "round {round}: it hangs");
            if who < 2 {
                continue;
            }
            let got = fs::read(&copies[who - 2]).expect("a copy");
            if status.success() {
                let want: Vec<u8> =
                    (0..2).flat_map(|w| content::bytes(w, round, w * PART, PART)).collect();
                content::same(&format!("round {round}, seed {seed}"), &got, &want);
                whole += 1;
            } else {
                failed += 1;
                assert!(victim == who || got.is_empty(), "round {round}: half a file");
            }
        }
    }
    eprintln!(
        "{round} rounds, {killed} killed: {whole} whole files, {failed} that could not be read"
    );
    assert!(whole > 0 && failed > 0, "the dice have missed");
    cluster.umount_all();
}

/// The service is killed, and a standby of it takes over, while one waits, one writes and one has just left.
#[test]
fn a_standby_goes_on_with_who_waits_and_who_writes() {
    if let Some(why) = skip_reason() {
        return eprintln!("SKIPPED: {why}");
    }
    for model in ["posix", "session"] {
        let cluster = Cluster::builder().nodes(2).separate_meta().consistency(model);
        let mut cluster = cluster.coordinator().lease("5s").start();
        couple(cluster.node(0), "d", "producers=3 consumers=1 wait=2m");
        let standby = cluster.start_standby("standby");
        let _ = standby.says("in step", LIMIT);
        let copy = cluster.root().join("copy");
        cluster.node(0).shell("echo first > d/f");
        wait_stands(cluster.node(1), "d/f", "awaited: 1 of 3 producers through, 0 writing");
        let consumer = reads(cluster.node(1), "d/f", &copy);
        let script = "exec 3>> d/f; echo second >&3; \
                      while ! test -e go; do sleep 0.1; done; echo third >&3";
        let producer = cluster.node(1).spawn(script);
        wait_stands(cluster.node(0), "d/f", "awaited: 1 of 3 producers through, 1 writing");
        cluster.node(0).shell(": >> d/f");
        cluster.kill_meta();
        let _old = cluster.is_succeeded_by(standby, LIMIT);
        wait_stands(cluster.node(0), "d/f", "awaited: 2 of 3 producers through, 1 writing");
        cluster.node(0).shell("echo go > go");
        is_done(producer, "the producer");
        is_done(consumer, "the consumer");
        let got = fs::read_to_string(&copy).expect("a copy");
        assert_eq!(got, "first\nsecond\nthird\n", "{model}");
        fs::remove_file(cluster.node(0).path("go")).expect("removed");
        wait_released(&cluster, "d/f");
        cluster.umount_all();
    }
}
