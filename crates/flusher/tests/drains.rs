//! What a drain promises and reports, with backings that fail, fill up, lie and hang.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod world;

use ebb_backend::faulty::Faults;
use ebb_flusher::{DrainScope, FlushSource, FlushState, Options, Policy, PolicyKind, Progress};
use ebb_types::Ino;
use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use world::{PATIENCE, World, eventually, pattern, quick};

fn end() -> Policy {
    Policy::of(PolicyKind::End)
}

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

#[test]
fn the_report_is_exact() {
    let world = World::new(1);
    let engine = world.start(quick(), end());
    let mut total = 0;
    for ino in 2..12u64 {
        let bytes = pattern(ino as u8, 100_000 * ino as usize);
        world.write(Ino(ino), 7 * ino, &bytes);
        total += bytes.len() as u64;
    }
    let mut seen: Vec<Progress> = Vec::new();
    let report = engine.drain(&DrainScope::All, soon(), &mut |p| seen.push(*p));
    assert!(report.is_clean(), "{report:?}");
    assert_eq!((report.files, report.bytes, report.verified_bytes), (10, total, total));
    world.assert_all_arrived();
    let last = seen.last().unwrap();
    assert_eq!((last.files_done, last.files_total), (10, 10));
    assert_eq!((last.bytes_done, last.bytes_total), (total, total));
    assert!(seen.windows(2).all(|w| w[0].bytes_done <= w[1].bytes_done));
    let again = world.drain(&engine);
    assert_eq!((again.files, again.bytes, again.is_clean()), (0, 0, true));
}

#[test]
fn a_large_file_goes_in_aligned_grants_and_several_streams() {
    let world = World::new(1);
    let options = Options { chunk: 2 << 20, grant_bytes: 3 << 20, ..quick() };
    let engine = world.start(options, end());
    world.write(Ino(2), 12_345, &pattern(1, 13 << 20));
    let report = world.drain(&engine);
    assert!(report.is_clean(), "{report:?}");
    world.assert_all_arrived();
    // 2 MiB at a time after the first boundary: 12 KiB to 2 MiB, then 2 MiB each.
    assert_eq!(engine.status().grants, 7);
}

#[test]
fn only_the_named_files_are_drained() {
    let world = World::new(1);
    let engine = world.start(quick(), end());
    for ino in 2..6 {
        world.write(Ino(ino), 0, &pattern(ino as u8, 1000));
    }
    let scope = DrainScope::Files(HashSet::from([Ino(3), Ino(5), Ino(99)]));
    let report = engine.drain(&scope, soon(), &mut |_| {});
    assert!(report.is_clean(), "{report:?}");
    assert_eq!((report.files, report.bytes), (2, 2000));
    let left: Vec<Ino> = world.dirty_files().iter().map(|f| f.ino).collect();
    assert_eq!(left, [Ino(2), Ino(4)]);
    assert!(!world.on_backing(Ino(2)));
}

#[test]
fn a_full_backing_is_reported_file_by_file_and_recovers() {
    let world = World::new(1);
    world.faulty.set(Faults { enospc: 1.0, ..Faults::default() });
    let engine = world.start(quick(), end());
    for ino in 2..5 {
        world.write(Ino(ino), 0, &pattern(ino as u8, 1000 * ino as usize));
    }
    let report = world.drain(&engine);
    assert!(!report.is_clean() && !report.timed_out);
    assert_eq!((report.files, report.bytes), (0, 0));
    assert_eq!(report.failures.len(), 3);
    for failure in &report.failures {
        assert_eq!((failure.errno, failure.operation.as_str()), (libc::ENOSPC, "write"));
    }
    let remaining: Vec<u64> = report.remaining.iter().map(|r| r.bytes).collect();
    assert_eq!(remaining, [2000, 3000, 4000]);
    let status = engine.status();
    assert_eq!(status.errors.len(), 3);
    assert!(status.errors.iter().all(|e| e.errno == libc::ENOSPC && e.attempts >= 5), "{status:?}");
    assert_eq!(status.errors[0].path, report.failures[0].path);

    world.faulty.set(Faults::default());
    let report = world.drain(&engine);
    assert!(report.is_clean(), "{report:?}");
    assert_eq!(report.bytes, 9000);
    assert_eq!(engine.status().errors, []);
    world.assert_all_arrived();
}

#[test]
fn passing_failures_are_retried_until_everything_arrived() {
    for seed in 0..6 {
        let world = World::new(seed);
        world.faulty.set(Faults {
            eio: 0.08,
            enospc: 0.05,
            short: 0.3,
            damage: 0.05,
            ..Faults::default()
        });
        let options = Options { drain_attempts: 1000, ..quick() };
        let engine = world.start(options, end());
        for ino in 2..10u64 {
            world.write(Ino(ino), 0, &pattern(ino as u8, 150_000 * ino as usize));
        }
        world.refuse_begin.store(5, Ordering::Relaxed);
        world.lose_end.store(3, Ordering::Relaxed);
        let report = world.drain(&engine);
        assert!(report.is_clean(), "seed {seed}: {report:?}");
        assert!(world.faulty.injected() > 0);
        world.assert_all_arrived();
        assert_eq!(engine.status().errors, []);
    }
}

/// A service that restarts forgets its grants, and a drain must not fail for that, however often it
/// happens in a bad second. (One that keeps none at all must not make it run for ever.)
#[test]
fn grants_that_the_service_forgot_are_no_failures() {
    let world = World::new(1);
    let engine = world.start(Options { drain_attempts: 2, ..quick() }, end());
    world.write(Ino(2), 0, &pattern(1, 1000));
    world.lose_grant.store(12, Ordering::Relaxed);
    let report = world.drain(&engine);
    assert!(report.is_clean(), "{report:?}");
    assert_eq!(world.lose_grant.load(Ordering::Relaxed), 0, "so many were lost");
    world.assert_all_arrived();
    world.write(Ino(2), 0, &pattern(2, 1000));
    world.lose_grant.store(u64::MAX, Ordering::Relaxed);
    let report = world.drain(&engine);
    assert_eq!((report.failures.len(), report.timed_out), (1, false), "{report:?}");
    assert!(report.failures[0].text.contains("no such grant"), "{report:?}");
}

#[test]
fn a_lying_backing_is_found_out() {
    let world = World::new(1);
    world.faulty.set(Faults { damage: 1.0, ..Faults::default() });
    let engine = world.start(quick(), end());
    world.write(Ino(2), 0, &pattern(1, 1000));
    let report = world.drain(&engine);
    assert_eq!(report.failures.len(), 1);
    assert_eq!(report.failures[0].operation, "verify");
    assert_eq!((report.bytes, report.verified_bytes, report.remaining.len()), (0, 0, 1));
}

#[test]
fn background_runs_verify_when_told_to() {
    let world = World::new(1);
    let options = Options { verify_background: true, ..quick() };
    let engine = world.start(options, Policy::of(PolicyKind::Immediate));
    world.write(Ino(2), 0, &pattern(1, 1000));
    engine.kick();
    eventually("it arrives", || engine.status().flushed_bytes == 1000);
    assert_eq!(engine.status().verified_bytes, 1000);
}

#[test]
fn one_hanging_file_does_not_hold_up_the_others() {
    let world = World::new(1);
    let options = Options { hang_after: Duration::from_millis(100), ..quick() };
    let engine = world.start(options, end());
    for ino in 2..12 {
        world.write(Ino(ino), 0, &pattern(ino as u8, 300_000));
    }
    world.faulty.hang(b"file-4-");
    let deadline = Instant::now() + Duration::from_secs(5);
    let report = engine.drain(&DrainScope::All, deadline, &mut |_| {});
    assert!(report.timed_out && Instant::now() >= deadline);
    assert_eq!(report.files, 9, "{report:?}");
    let remaining: Vec<(&str, u64)> =
        report.remaining.iter().map(|r| (r.path.as_str(), r.bytes)).collect();
    assert_eq!(remaining, [("file-4-", 300_000)]);
    assert_eq!(report.failures.len(), 1);
    assert_eq!(
        (report.failures[0].path.as_str(), report.failures[0].errno),
        ("file-4-", libc::ETIMEDOUT)
    );
    let errors = engine.status().errors;
    assert_eq!((errors.len(), errors[0].errno), (1, libc::ETIMEDOUT), "{errors:?}");
    assert_eq!(engine.status().state, FlushState::Flushing);

    // Threads that hang are replaced: as many files again can hang without stopping the rest.
    world.write(Ino(2), 0, b"changed");
    let scope = DrainScope::Files(HashSet::from([Ino(2)]));
    assert!(engine.drain(&scope, soon(), &mut |_| {}).is_clean());

    world.faulty.release();
    let report = world.drain(&engine);
    assert!(report.is_clean(), "{report:?}");
    world.assert_all_arrived();
    assert_eq!(engine.status().errors, []);
}

#[test]
fn running_out_of_time_is_no_failure_of_the_backing() {
    let world = World::new(1);
    let delay_for = Duration::from_millis(50);
    world.faulty.set(Faults { delay: 1.0, delay_for, ..Faults::default() });
    let engine = world.start(quick(), end());
    world.write(Ino(2), 0, &pattern(1, 8 << 20));
    let deadline = Instant::now() + Duration::from_millis(100);
    let report = engine.drain(&DrainScope::All, deadline, &mut |_| {});
    assert!(report.timed_out && report.failures.is_empty(), "{report:?}");
    assert!(report.remaining[0].bytes > 0);
    world.faulty.set(Faults::default());
    assert!(world.drain(&engine).is_clean());
    world.assert_all_arrived();
}

#[test]
fn when_every_thread_hangs_spare_ones_go_on() {
    let world = World::new(1);
    let options = Options { threads: 2, hang_after: Duration::from_millis(50), ..quick() };
    let engine = world.start(options, end());
    for ino in [21, 22, 3] {
        world.write(Ino(ino), 0, &pattern(ino as u8, 1000));
    }
    world.faulty.hang(b"file-2");
    let both = DrainScope::Files(HashSet::from([Ino(21), Ino(22)]));
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| engine.drain(&both, soon(), &mut |_| {}));
        eventually("both threads hang", || world.faulty.hanging() == 2);
        let other = DrainScope::Files(HashSet::from([Ino(3)]));
        let report = engine.drain(&other, soon(), &mut |_| {});
        assert!(report.is_clean(), "{report:?}");
        assert!(!waiting.is_finished());
        world.faulty.release();
        assert!(waiting.join().unwrap().is_clean());
    });
    world.assert_all_arrived();
}

#[test]
fn what_is_written_during_a_flush_is_flushed_again() {
    let world = World::new(1);
    let engine = world.start(quick(), Policy::of(PolicyKind::Immediate));
    world.faulty.hang(b"file-2-");
    world.write(Ino(2), 0, b"first version");
    engine.kick();
    eventually("the flush is on its way", || world.faulty.hanging() == 1);
    world.write(Ino(2), 6, b"VERSION, longer");
    engine.kick();
    world.faulty.release();
    eventually("both arrive", || world.dirty_bytes() == 0);
    world.assert_all_arrived();
    let stored = std::fs::read(world.backing_path(Ino(2))).unwrap();
    assert_eq!(stored, b"first VERSION, longer");
}

#[test]
fn a_drain_overtakes_a_background_run_and_takes_its_files_over() {
    let world = World::new(1);
    for ino in 2..8 {
        world.write(Ino(ino), 0, &pattern(ino as u8, 4 << 20));
    }
    // Nothing would arrive within the test at this rate.
    let options = Options { bandwidth_cap: Some(1), ..quick() };
    let engine = world.start(options, Policy::of(PolicyKind::Immediate));
    eventually("a run holds grants", || engine.status().in_flight > 0);
    let report = world.drain(&engine);
    assert!(report.is_clean(), "{report:?}");
    world.assert_all_arrived();
}

#[test]
fn drains_side_by_side() {
    let world = World::new(1);
    let engine = world.start(quick(), Policy::of(PolicyKind::Immediate));
    std::thread::scope(|scope| {
        for ino in 2..8u64 {
            let (world, engine) = (&world, &engine);
            scope.spawn(move || {
                for round in 0..8u8 {
                    world.write(Ino(ino), u64::from(round) * 500, &pattern(round, 900));
                    engine.kick();
                    let scope = DrainScope::Files(HashSet::from([Ino(ino), Ino(2)]));
                    let report = engine.drain(&scope, soon(), &mut |_| {});
                    assert!(report.failures.is_empty() && !report.timed_out, "{report:?}");
                    // Only this thread writes the file, so nothing of it is left.
                    assert_eq!(world.dirty_of(Ino(ino)), 0);
                }
            });
        }
    });
    assert!(world.drain(&engine).is_clean());
    world.assert_all_arrived();
}

#[test]
fn failures_in_the_background_are_shown_and_clear_themselves() {
    let world = World::new(1);
    world.faulty.set(Faults { eio: 1.0, ..Faults::default() });
    let engine = world.start(quick(), Policy::of(PolicyKind::Immediate));
    world.write(Ino(2), 0, b"x");
    world.write(Ino(3), 0, b"y");
    engine.kick();
    let failing = |n| engine.status().errors.iter().filter(|e| e.attempts >= 2).count() == n;
    eventually("both files are tried again", || failing(2));
    assert_eq!(engine.status().errors[0].errno, libc::EIO);
    world.remove(Ino(3));
    eventually("a removed file is no error", || engine.status().errors.len() == 1);
    world.faulty.set(Faults::default());
    eventually("the other arrives", || world.dirty_bytes() == 0);
    eventually("nothing is wrong any more", || engine.status().errors.is_empty());
    world.assert_all_arrived();
}

#[test]
fn shutdown_is_bounded_and_gives_grants_back() {
    let world = World::new(1);
    world.write(Ino(2), 0, &pattern(1, 1000));
    world.faulty.hang(b"file-2-");
    let engine = world.start(quick(), Policy::of(PolicyKind::Immediate));
    eventually("the flush hangs", || world.faulty.hanging() == 1);
    assert!(!engine.shutdown(Duration::from_millis(50)), "a hanging thread was overlooked");
    let report = engine.drain(&DrainScope::All, soon(), &mut |_| {});
    assert!(report.timed_out && report.remaining.len() == 1, "{report:?}");
    world.faulty.release();
    assert!(engine.shutdown(PATIENCE));
    // Opened, then told to stop before the write.
    assert_eq!(world.dirty_bytes(), 1000);
}
