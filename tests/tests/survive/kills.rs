//! kill -9 at random moments under load.

use crate::load::Program;
use ebb_testkit::cluster::number;
use ebb_testkit::{Cluster, Node, random, skip_reason};
use ebb_tests::tools::amount;
use rand::Rng;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

const PROGRAMS: usize = 3;
/// Nothing may stand still for so long.
const STUCK: Duration = Duration::from_secs(45);

/// Ends the process when nothing has been done for long: threads in a mount that hangs cannot be
/// ended otherwise.
fn watch(node: &Node, done: &AtomicU64, stop: &AtomicBool) {
    let mut last = (0, Instant::now());
    while !stop.load(Relaxed) {
        let now = done.load(Relaxed);
        if now != last.0 {
            last = (now, Instant::now());
        }
        if last.1.elapsed() > STUCK {
            eprintln!("nothing has been done for {STUCK:?}; the log says\n{}", node.log());
            node.kill_all();
            std::process::exit(1);
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn killed_under_load(model: &str, flush: &str, separate: bool) {
    if let Some(reason) = skip_reason() {
        return eprintln!("skipped: {reason}");
    }
    let kills = amount("EBB_SURVIVE_KILLS", 10);
    let mut dice = random::generator(random::seed());
    let mut builder = Cluster::builder().supervised().consistency(model).flush(flush);
    if separate {
        builder = builder.separate_meta();
    }
    let cluster = builder.start();
    let node = cluster.node(0);
    let (stop, over, done) = (AtomicBool::new(false), AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| watch(node, &done, &over));
        let programs: Vec<_> = (0..PROGRAMS)
            .map(|n| {
                let dir = node.path(format!("program{n}"));
                let dice = random::derived(&mut dice);
                let (stop, done) = (&stop, &done);
                scope.spawn(move || Program::new(dir, dice, done).run(stop))
            })
            .collect();
        let mut killed = 0;
        while killed < kills && !programs.iter().any(|p| p.is_finished()) {
            std::thread::sleep(Duration::from_millis(dice.random_range(50..1500)));
            // Also one that has only just been started.
            let early = dice.random_bool(0.25);
            killed += u64::from(if early { node.kill_daemon_only() } else { node.kill_daemon() });
        }
        stop.store(true, Relaxed);
        let ended: Vec<_> = programs.into_iter().map(|p| p.join()).collect();
        over.store(true, Relaxed);
        assert!(ended.iter().all(Result::is_ok), "a program failed");
        assert_eq!(killed, kills);
    });
    let status = node.status();
    let restarts = number(&status["supervisor"], "restarts");
    println!("{model} {flush}: {} operations, {restarts} restarts", done.load(Relaxed));
    assert!(restarts >= kills / 2, "{status:#}");
    node.umount();
    let left = std::fs::read_dir(cluster.backing()).expect("the backing").count();
    assert_eq!(left, PROGRAMS, "each program's directory is on the backing");
}

#[test]
fn session_programs_do_not_notice() {
    killed_under_load("session", "immediate", false);
}

#[test]
fn posix_programs_do_not_notice() {
    killed_under_load("posix", "idle", false);
}

#[test]
fn commit_programs_do_not_notice_with_a_service_of_its_own() {
    killed_under_load("commit", "close", true);
}
