//! When the engine flushes: each policy, against real files.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod world;

use ebb_backend::faulty::Faults;
use ebb_flusher::{
    BypassSource, FileUse, FlushSource, FlushState, Options, Policy, PolicyKind, Waiting,
};
use ebb_types::Ino;
use ebb_types::units::Percent;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use world::{World, eventually, pattern, quick};

/// Long enough that a flusher that should not act would have acted.
const A_WHILE: Duration = Duration::from_millis(300);

fn idle_after(ms: u64) -> Policy {
    Policy { wait_interval: Duration::from_millis(ms), ..Policy::of(PolicyKind::Idle) }
}

#[test]
fn idle_flushes_nothing_during_activity_and_everything_after_it() {
    let world = World::new(1);
    let engine = world.start(quick(), idle_after(50));
    let operation = world.activity.enter();
    for ino in 2..6 {
        world.write(Ino(ino), 0, &pattern(ino as u8, 300_000));
        engine.kick();
    }
    std::thread::sleep(A_WHILE);
    let status = engine.status();
    assert_eq!((status.flushed_bytes, status.state), (0, FlushState::Waiting));
    assert!(!world.on_backing(Ino(2)));
    drop(operation);
    eventually("everything arrives", || world.dirty_bytes() == 0);
    world.assert_all_arrived();
    eventually("the flusher rests", || engine.status().state == FlushState::Idle);
    assert_eq!(engine.status().flushed_bytes, 4 * 300_000);
}

#[test]
fn idle_waits_out_short_gaps() {
    let world = World::new(1);
    let engine = world.start(quick(), idle_after(60_000));
    world.write(Ino(2), 0, b"x");
    engine.kick();
    std::thread::sleep(A_WHILE);
    assert_eq!(engine.status().runs, 0);
    assert!(!world.on_backing(Ino(2)));
}

#[test]
fn a_learned_interval_uses_pauses_that_the_fixed_one_waits_out() {
    const INTERVAL: Duration = Duration::from_secs(2);
    const PAUSE: Duration = Duration::from_millis(600);
    let options = || Options { stop_within: Duration::from_millis(50), ..quick() };
    let fixed = Policy { wait_interval: INTERVAL, ..Policy::of(PolicyKind::Idle) };
    let adaptive = Policy { waiting: Waiting::Adaptive, ..fixed };
    let worlds = [World::new(1), World::new(1)];
    let engines = [worlds[0].start(options(), fixed), worlds[1].start(options(), adaptive)];
    let mut longest = Duration::ZERO;
    let mut rounds = 0;
    // Five pauses to learn from; more when the machine is too busy to keep them equal.
    while engines[1].status().runs == 0 && rounds < 60 {
        for (world, engine) in worlds.iter().zip(&engines) {
            world.write(Ino(2), 0, &pattern(rounds, 50_000));
            engine.kick();
        }
        let pause = Instant::now();
        std::thread::sleep(PAUSE);
        longest = longest.max(pause.elapsed());
        rounds += 1;
    }
    assert!(engines[1].status().runs > 0, "nothing was learned in {rounds} pauses");
    assert!(rounds > 5, "started early without experience, after {rounds}");
    if longest < INTERVAL {
        assert_eq!(engines[0].status().runs, 0, "the fixed interval was not waited out");
    }
    eventually("everything arrives", || worlds[1].dirty_bytes() == 0);
    worlds[1].assert_all_arrived();
}

#[test]
fn a_temporary_file_never_appears_on_the_backing() {
    let world = World::new(1);
    let engine = world.start(quick(), idle_after(30));
    {
        let _burst = world.activity.enter();
        world.write(Ino(2), 0, &pattern(1, 100_000));
        world.write(Ino(3), 0, &pattern(2, 100));
        engine.kick();
        std::thread::sleep(Duration::from_millis(100));
        world.remove(Ino(2));
    }
    eventually("the other file arrives", || world.dirty_bytes() == 0);
    assert!(world.on_backing(Ino(3)) && !world.on_backing(Ino(2)));
    assert_eq!(engine.status().flushed_bytes, 100);
}

#[test]
fn returning_activity_stops_a_run_and_the_stop_is_measured() {
    let world = World::new(1);
    // Slow enough that the run cannot be over before it is interrupted.
    let delay_for = Duration::from_millis(20);
    world.faulty.set(Faults { delay: 1.0, delay_for, ..Faults::default() });
    let size = 16 << 20;
    world.write_silently(Ino(2), 0, &pattern(3, size));
    let engine = world.start(quick(), idle_after(20));
    eventually("a run begins", || engine.status().in_flight > 0);
    let operation = world.activity.enter();
    eventually("it stops", || engine.status().in_flight == 0);
    let stopped_at = engine.status().flushed_bytes;
    assert!(world.dirty_bytes() > 0, "the run was over already");
    std::thread::sleep(A_WHILE);
    assert_eq!(engine.status().flushed_bytes, stopped_at, "it went on during activity");
    eventually("the stop is counted", || engine.status().stop_latency.is_some());
    let latency = engine.status().stop_latency.unwrap();
    // One grant of at most 1 MiB and its fsync on this backing: 0.1 s. Generously:
    assert!(latency.max_us < 10_000_000, "{latency:?}");
    drop(operation);
    eventually("the rest arrives", || world.dirty_bytes() == 0);
    world.assert_all_arrived();
}

#[test]
fn a_grant_under_way_is_given_back() {
    let world = World::new(1);
    // One grant of 16 pieces that take a fifth of a second each.
    let delay_for = Duration::from_millis(200);
    world.faulty.set(Faults { delay: 1.0, delay_for, ..Faults::default() });
    world.write_silently(Ino(2), 0, &pattern(3, 16 << 20));
    let options = Options { chunk: 16 << 20, grant_bytes: 16 << 20, ..quick() };
    let engine = world.start(options, idle_after(20));
    eventually("the grant is being written", || engine.status().in_flight > 0);
    let operation = world.activity.enter();
    eventually("it stops", || engine.status().in_flight == 0);
    assert_eq!(engine.status().flushed_bytes, 0, "the whole grant was written first");
    assert_eq!(world.dirty_bytes(), 16 << 20);
    world.faulty.set(Faults::default());
    drop(operation);
    eventually("it arrives later", || world.dirty_bytes() == 0);
    world.assert_all_arrived();
}

#[test]
fn io_that_bypasses_the_daemon_counts() {
    struct Device(AtomicU64);
    impl BypassSource for Device {
        fn changes(&self) -> u64 {
            // Never the same twice: always busy, until switched off.
            let step = self.0.load(Ordering::Relaxed);
            if step > 0 { self.0.fetch_add(1, Ordering::Relaxed) } else { 0 }
        }
    }
    let world = World::new(1);
    let device = Arc::new(Device(AtomicU64::new(1)));
    world.activity.add_source(Arc::clone(&device) as Arc<dyn BypassSource>);
    world.write(Ino(2), 0, b"x");
    let engine = world.start(quick(), idle_after(150));
    std::thread::sleep(2 * A_WHILE);
    assert_eq!(engine.status().flushed_bytes, 0);
    device.0.store(0, Ordering::Relaxed);
    eventually("the file arrives", || world.dirty_bytes() == 0);
}

#[test]
fn immediate_does_not_wait_for_anything() {
    let world = World::new(1);
    let engine = world.start(quick(), Policy::of(PolicyKind::Immediate));
    let _operation = world.activity.enter();
    world.write(Ino(2), 0, &pattern(1, 5000));
    engine.kick();
    eventually("it arrives during activity", || world.dirty_bytes() == 0);
    world.assert_all_arrived();
}

#[test]
fn close_takes_closed_files_only() {
    let world = World::new(1);
    world.write(Ino(2), 0, b"open");
    world.set_use(Ino(2), FileUse::Open);
    // Not before: the engine may look at any moment.
    let engine = world.start(quick(), Policy::of(PolicyKind::Close));
    world.write(Ino(3), 0, b"closed");
    engine.kick();
    eventually("the closed file arrives", || world.dirty_of(Ino(3)) == 0);
    std::thread::sleep(A_WHILE);
    assert!(!world.on_backing(Ino(2)));
    world.set_use(Ino(2), FileUse::Closed);
    engine.kick();
    eventually("the other one, too", || world.dirty_bytes() == 0);
    world.assert_all_arrived();
}

#[test]
fn watermark_flushes_from_high_to_low() {
    const MIB: u64 = 1 << 20;
    for kind in [PolicyKind::Watermark, PolicyKind::Idle, PolicyKind::End] {
        let world = World::new(1);
        world.set_capacity(16 * MIB);
        let policy = Policy { low: Percent(25.0), high: Percent(50.0), ..Policy::of(kind) };
        // With one thread nothing else is being written when the mark is reached.
        let engine = world.start(Options { threads: 1, ..quick() }, policy);
        // Pressure does not ask for silence, nor for settled files.
        let _operation = world.activity.enter();
        for ino in 2..9 {
            world.write(Ino(ino), 0, &pattern(ino as u8, MIB as usize));
            world.set_use(Ino(ino), FileUse::Untracked);
        }
        engine.kick();
        std::thread::sleep(A_WHILE);
        assert_eq!(engine.status().flushed_bytes, 0, "{kind}: below the high watermark");
        world.write(Ino(9), 0, &pattern(9, MIB as usize));
        engine.kick();
        eventually("room is made", || world.dirty_bytes() <= 4 * MIB);
        std::thread::sleep(A_WHILE);
        assert_eq!(
            world.dirty_bytes(),
            4 * MIB,
            "{kind}: down to the low watermark and no further"
        );
    }
}

#[test]
fn periodic_flushes_once_a_period() {
    let world = World::new(1);
    let policy = Policy { period: Duration::from_millis(400), ..Policy::of(PolicyKind::Periodic) };
    let engine = world.start(quick(), policy);
    let began = Instant::now();
    let _operation = world.activity.enter();
    world.write(Ino(2), 0, b"one");
    engine.kick();
    eventually("the first period ends", || world.dirty_bytes() == 0);
    assert!(began.elapsed() >= policy.period);
    world.write(Ino(2), 1, b"two");
    engine.kick();
    eventually("the second period ends", || world.dirty_bytes() == 0);
    assert!(began.elapsed() >= 2 * policy.period);
    world.assert_all_arrived();
    assert_eq!(engine.status().runs, 2);
}

#[test]
fn end_leaves_everything_to_the_drain() {
    let world = World::new(1);
    let engine = world.start(quick(), Policy::of(PolicyKind::End));
    world.write(Ino(2), 0, &pattern(1, 5000));
    engine.kick();
    std::thread::sleep(A_WHILE);
    assert_eq!(engine.status().runs, 0);
    let report = world.drain(&engine);
    assert!(report.is_clean(), "{report:?}");
    world.assert_all_arrived();
}

#[test]
fn files_written_past_the_daemon_wait_for_a_request() {
    let world = World::new(1);
    world.write(Ino(2), 0, b"settled");
    world.write(Ino(3), 0, b"untracked");
    world.set_use(Ino(3), FileUse::Untracked);
    let engine = world.start(quick(), Policy::of(PolicyKind::Immediate));
    eventually("the settled file arrives", || world.dirty_of(Ino(2)) == 0);
    std::thread::sleep(A_WHILE);
    assert!(!world.on_backing(Ino(3)));
    assert!(world.drain(&engine).is_clean());
    world.assert_all_arrived();
}

#[test]
fn pause_holds_the_background_but_not_a_drain() {
    let world = World::new(1);
    let engine = world.start(quick(), Policy::of(PolicyKind::Immediate));
    engine.pause();
    world.write(Ino(2), 0, b"one");
    engine.kick();
    std::thread::sleep(A_WHILE);
    assert_eq!((engine.status().state, world.on_backing(Ino(2))), (FlushState::Paused, false));
    assert!(world.drain(&engine).is_clean());
    world.write(Ino(2), 1, b"two");
    engine.kick();
    std::thread::sleep(A_WHILE);
    assert_eq!(world.dirty_bytes(), 3);
    engine.resume();
    eventually("it arrives", || world.dirty_bytes() == 0);
    world.assert_all_arrived();
}

#[test]
fn the_bandwidth_cap_holds_back_runs_and_not_drains() {
    let world = World::new(1);
    let options = Options { bandwidth_cap: Some(4 << 20), ..quick() };
    world.write(Ino(2), 0, &pattern(1, 4 << 20));
    let began = Instant::now();
    let engine = world.start(options, Policy::of(PolicyKind::Immediate));
    eventually("it arrives", || world.dirty_bytes() == 0);
    // The first of four pieces goes at once, each other one waits a quarter of a second.
    assert!(began.elapsed() >= Duration::from_millis(740), "{:?}", began.elapsed());
    let began = Instant::now();
    world.write(Ino(2), 0, &pattern(2, 4 << 20));
    let status = engine.status();
    assert!(world.drain(&engine).is_clean(), "{status:?}");
    // The drain may wait for a capped grant that was under way, which is let go at once then.
    assert!(began.elapsed() < Duration::from_secs(30));
    world.assert_all_arrived();
}

#[test]
fn what_found_no_room_says_so_until_it_is_tried_again() {
    let world = World::new(9);
    let engine = world.start(quick(), idle_after(1));
    world.write(Ino(2), 0, &pattern(2, 10_000));
    world.faulty.set(Faults { enospc: 1.0, ..Faults::default() });
    engine.kick();
    eventually("no room", || engine.no_room().is_some_and(|e| e.errno == libc::ENOSPC));
    world.faulty.hang(b"file-2");
    eventually("the next attempt hangs", || world.faulty.hanging() == 1);
    assert_eq!(engine.no_room(), None);
    assert_eq!(engine.status().errors.len(), 1, "it is still missing");
    world.faulty.set(Faults::default());
    world.faulty.release();
    eventually("it arrives", || world.dirty_bytes() == 0);
    assert_eq!(engine.no_room(), None);
}
