//! Real writes of real files, with an oracle of exact ranges. Each test says SKIPPED where the
//! kernel or the user's rights do not allow a tracker, and fails there with EBB_REQUIRE_TRACKER=1.

#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(clippy::single_range_in_vec_init, reason = "sets of one range are meant")]

mod world;

use ebb_tracker::{Limits, Lost, Tracker, Unavailable, Watched, Why, Writers};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rangemap::RangeSet;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use world::{Scratch, drained, fast_limits, tracker, write_randomly};

/// Bytes below this are written anywhere; above it only one appends.
const BASE: u64 = 8 << 20;

fn seed() -> u64 {
    let seed = std::env::var("EBB_SEED").ok().and_then(|s| s.parse().ok());
    let seed = seed.unwrap_or_else(rand::random);
    eprintln!("EBB_SEED={seed}");
    seed
}

/// Threads write in every way, then all is drained and compared.
fn exact(scratch: &Scratch, rounds: u32) {
    let Some(tracker) = tracker(scratch.dir(), Limits::default()) else { return };
    let seed = seed();
    let (path, file) = scratch.file();
    file.set_len(BASE).unwrap();
    let watched = tracker.watch(&file, Writers::All).unwrap();
    for round in 0..rounds {
        let oracle = Mutex::new(RangeSet::new());
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let (oracle, path) = (&oracle, &path);
                let mut rng = ChaCha8Rng::seed_from_u64(seed ^ u64::from(round * 8 + thread));
                scope.spawn(move || {
                    for _ in 0..rng.random_range(1..40) {
                        let range = write_randomly(path, &mut rng, BASE, thread == 0);
                        range.into_iter().for_each(|r| oracle.lock().unwrap().insert(r));
                    }
                });
            }
        });
        assert_eq!(drained(&watched), oracle.into_inner().unwrap(), "round {round}");
    }
    assert!(watched.events() > u64::from(rounds));
}

#[test]
fn every_kind_of_write_is_told_of_by_the_byte() {
    exact(&Scratch::here(), 40);
}

#[test]
fn ext4_without_delayed_allocation() {
    let Some(scratch) = Scratch::ext4("nodelalloc", "") else { return };
    exact(&scratch, 10);
}

#[test]
fn ext4_that_journals_data() {
    let Some(scratch) = Scratch::ext4("data=journal", "") else { return };
    exact(&scratch, 10);
}

/// Small files are in their inodes at first, and blocks are smaller than pages.
#[test]
fn ext4_with_small_blocks_and_data_in_inodes() {
    let Some(scratch) = Scratch::ext4("defaults", "-b 1024 -I 256 -O inline_data") else { return };
    let Some(tracker) = tracker(scratch.dir(), Limits::default()) else { return };
    let (_, file) = scratch.file();
    let watched = tracker.watch(&file, Writers::All).unwrap();
    file.write_all_at(&[1; 20], 10).unwrap();
    file.write_all_at(&[1; 5], 40).unwrap();
    assert_eq!(drained(&watched), RangeSet::from([10..30, 40..45]));
    file.write_all_at(&[1; 3000], 42).unwrap();
    assert_eq!(drained(&watched), RangeSet::from([42..3042]));
    exact(&scratch, 10);
}

#[test]
fn xfs() {
    let Some(scratch) = Scratch::xfs() else { return };
    exact(&scratch, 20);
}

/// A disk that fills up: what was written is told of, and more only of the write that failed.
#[test]
fn a_full_disk() {
    for scratch in [Scratch::ext4("defaults", ""), Scratch::xfs()].into_iter().flatten() {
        let Some(tracker) = tracker(scratch.dir(), Limits::default()) else { return };
        let (_, file) = scratch.file();
        let watched = tracker.watch(&file, Writers::All).unwrap();
        let bytes = vec![1; 3 << 20];
        let mut at = 0;
        while let Ok(n) = file.write_at(&bytes, at) {
            at += n as u64;
        }
        let seen = drained(&watched);
        assert!(seen.gaps(&(0..at)).next().is_none(), "{seen:?} up to {at}");
        assert!(seen.iter().all(|r| r.end <= at + bytes.len() as u64), "{seen:?} up to {at}");
    }
}

/// Drains while threads write: together they tell of everything, and nothing that they tell of is
/// unreadable.
#[test]
fn drains_beside_writers() {
    for scratch in [Some(Scratch::here()), Scratch::xfs()].into_iter().flatten() {
        beside_writers(&scratch);
    }
}

fn beside_writers(scratch: &Scratch) {
    let Some(tracker) = tracker(scratch.dir(), Limits::default()) else { return };
    let seed = seed();
    let (_, file) = scratch.file();
    let watched = tracker.watch(&file, Writers::All).unwrap();
    let (oracle, done) = (Mutex::new(RangeSet::new()), AtomicBool::new(false));
    let mut seen = RangeSet::new();
    std::thread::scope(|scope| {
        let (file, oracle, done) = (&file, &oracle, &done);
        scope.spawn(move || {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            for round in 1..2000u64 {
                let at = round * 20_000 + rng.random_range(0..5_000);
                let len = rng.random_range(1..15_000);
                file.write_all_at(&vec![0xaa; len as usize], at).unwrap();
                oracle.lock().unwrap().insert(at..at + len);
            }
            done.store(true, Relaxed);
        });
        while !done.load(Relaxed) {
            let before = oracle.lock().unwrap().clone();
            let told = drained(&watched);
            for range in told.iter() {
                let mut bytes = vec![0; (range.end - range.start) as usize];
                file.read_exact_at(&mut bytes, range.start).expect("told of before it is there");
                assert!(bytes.iter().all(|b| *b == 0xaa), "told of before it is written");
            }
            seen.extend(told);
            assert!(before.iter().all(|r| seen.gaps(r).next().is_none()), "missing");
        }
    });
    seen.extend(drained(&watched));
    assert_eq!(seen, oracle.into_inner().unwrap());
}

/// A ring that is much too small: whatever is lost is said to be.
#[test]
fn a_flooded_ring_is_told_of() {
    let scratch = Scratch::here();
    let Some(tracker) = tracker(scratch.dir(), fast_limits()) else { return };
    let (_, file) = scratch.file();
    let watched = tracker.watch(&file, Writers::All).unwrap();
    let mut losses = 0;
    for _ in 0..50 {
        let all: RangeSet<u64> = (0..5000).map(|i| i * 10..i * 10 + 3).collect();
        all.iter().for_each(|r| file.write_all_at(b"abc", r.start).unwrap());
        match watched.drain() {
            Ok(seen) => assert!(seen.ranges.iter().eq(all.iter()), "a loss that was not told of"),
            Err(Lost { why: Why::RingFull, known }) => {
                losses += 1;
                assert!(!known.iter().eq(all.iter()));
                assert!(known.iter().all(|r| all.gaps(r).next().is_none()));
            }
            Err(lost) => panic!("{lost}"),
        }
    }
    assert!(losses > 0, "5,000 writes never filled a ring of 100");
    assert!(drained(&watched).is_empty(), "a loss is told of once");
    file.write_all_at(b"x", 7).unwrap();
    assert_eq!(drained(&watched), RangeSet::from([7..8]), "it goes on after a loss");
}

#[test]
fn more_ranges_than_are_kept_are_told_of() {
    let scratch = Scratch::here();
    let limits = Limits { ranges_max: 100, ..Limits::default() };
    let Some(tracker) = tracker(scratch.dir(), limits) else { return };
    let (_, file) = scratch.file();
    let watched = tracker.watch(&file, Writers::All).unwrap();
    (0..300).for_each(|i| file.write_all_at(b"a", i * 10).unwrap());
    assert_eq!(watched.drain().unwrap_err().why, Why::TooManyRanges);
    (0..50).for_each(|i| file.write_all_at(b"a", i * 10).unwrap());
    assert_eq!(drained(&watched).len(), 50);
}

#[test]
fn other_files_and_sizes_are_nobodys_business() {
    let scratch = Scratch::here();
    let Some(tracker) = tracker(scratch.dir(), Limits::default()) else { return };
    let (_, file) = scratch.file();
    let (_, other) = scratch.file();
    let watched = tracker.watch(&file, Writers::All).unwrap();
    let before = tracker.activity();
    other.write_all_at(&[1; 10_000], 0).unwrap();
    file.set_len(123_456).unwrap();
    file.set_len(100).unwrap();
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, 50_000).unwrap();
    assert!(drained(&watched).is_empty());
    assert_eq!(tracker.activity(), before);
    file.write_all_at(b"x", 0).unwrap();
    assert_ne!(tracker.activity(), before);
}

/// Two that watch the same file would take each other's events: the second is refused.
#[test]
fn a_file_is_watched_once() {
    let scratch = Scratch::here();
    let Some(tracker) = tracker(scratch.dir(), Limits::default()) else { return };
    let (_, file) = scratch.file();
    let watched = tracker.watch(&file, Writers::All).unwrap();
    assert!(tracker.watch(&file, Writers::All).is_err());
    file.write_all_at(b"x", 0).unwrap();
    assert_eq!(drained(&watched), RangeSet::from([0..1]));
    drop(watched);
    let again = tracker.watch(&file, Writers::All).unwrap();
    assert!(drained(&again).is_empty(), "from now on");
}

/// A number that an inode had belongs to another one later.
#[test]
fn numbers_of_inodes_come_again() {
    let scratch = Scratch::here();
    let Some(tracker) = tracker(scratch.dir(), Limits::default()) else { return };
    let mut again = 0;
    for _ in 0..100 {
        let (path, file) = scratch.file();
        let watched = tracker.watch(&file, Writers::All).unwrap();
        file.write_all_at(&[1; 100], 50).unwrap();
        let number = file.metadata().unwrap().ino();
        std::fs::remove_file(path).unwrap();
        drop((watched, file));
        let (_, next) = scratch.file();
        next.write_all_at(b"before it is watched", 0).unwrap();
        let watched = tracker.watch(&next, Writers::All).unwrap();
        next.write_all_at(b"x", 7).unwrap();
        assert_eq!(drained(&watched), RangeSet::from([7..8]));
        again += u32::from(next.metadata().unwrap().ino() == number);
    }
    assert!(again > 0, "no number came again");
}

/// Registrations come and go while others write: nobody hears of another one's writes.
#[test]
fn registrations_come_and_go_beside_writers() {
    let scratch = Scratch::here();
    let Some(tracker) = tracker(scratch.dir(), Limits::default()) else { return };
    let files: Vec<File> = (0..4).map(|_| scratch.file().1).collect();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (files, done) = (&files, &done);
        scope.spawn(move || {
            while !done.load(Relaxed) {
                (0..4u64).for_each(|i| files[i as usize].write_all_at(b"x", 100 * i).unwrap());
            }
        });
        for round in 0..3000 {
            let i = round % 4;
            let watched = tracker.watch(&files[i], Writers::All).unwrap();
            let expected = 100 * i as u64..100 * i as u64 + 1;
            assert!(drained(&watched).iter().all(|r| *r == expected));
        }
        done.store(true, Relaxed);
    });
}

#[test]
fn direct_writes_are_noticed() {
    let scratch = Scratch::here();
    let Some(tracker) = tracker(scratch.dir(), Limits::default()) else { return };
    let (path, file) = scratch.file();
    file.write_all_at(&[1; 8192], 0).unwrap();
    let watched = tracker.watch(&file, Writers::All).unwrap();
    let dd = |args: &[&str]| {
        let done = Command::new("dd").args(args).arg("status=none").status();
        assert!(done.expect("dd").success());
    };
    let name = path.to_str().unwrap();
    dd(&[&format!("if={name}"), "of=/dev/null", "bs=4096", "iflag=direct"]);
    assert!(drained(&watched).is_empty(), "a direct read writes nothing");
    dd(&[
        "if=/dev/zero",
        &format!("of={name}"),
        "bs=4096",
        "count=1",
        "oflag=direct",
        "conv=notrunc",
    ]);
    for _ in 0..2 {
        let lost = watched.drain().unwrap_err();
        assert!(lost.why == Why::Direct && lost.why.lasts());
    }
}

/// One map, to be written through or not, and what is told of it.
fn map_and<T>(file: &File, how: rustix::mm::ProtFlags, with: impl FnOnce(*mut u8) -> T) -> T {
    let at = unsafe {
        use rustix::mm::{MapFlags, mmap};
        mmap(std::ptr::null_mut(), 8192, how, MapFlags::SHARED, file, 0).unwrap()
    };
    let done = with(at.cast());
    unsafe { rustix::mm::munmap(at, 8192).unwrap() };
    done
}

#[test]
fn mappings_are_noticed() {
    for scratch in [Some(Scratch::here()), Scratch::xfs()].into_iter().flatten() {
        let Some(tracker) = tracker(scratch.dir(), Limits::default()) else { return };
        let (_, file) = scratch.file();
        file.write_all_at(&[1; 8192], 0).unwrap();
        for touch in 0..4 {
            let watched = tracker.watch(&file, Writers::Others).unwrap();
            file.read_exact_at(&mut [0], 0).unwrap();
            assert!(drained(&watched).is_empty(), "reading is not mapping");
            map(&file, &watched, touch);
            for _ in 0..2 {
                assert_eq!(watched.drain().expect_err("it was mapped").why, Why::Mapped);
            }
        }
        let (_, other) = scratch.file();
        other.set_len(8192).unwrap();
        let watched = tracker.watch(&file, Writers::Others).unwrap();
        map_and(&other, BOTH, |at| unsafe { at.write_volatile(1) });
        assert!(drained(&watched).is_empty(), "another file");
    }
}

const BOTH: rustix::mm::ProtFlags = rustix::mm::ProtFlags::READ.union(rustix::mm::ProtFlags::WRITE);

/// One of several ways.
fn map(file: &File, watched: &Watched, way: u32) {
    if way == 3 {
        // Of pages that are not in memory.
        rustix::fs::fsync(file).unwrap();
        rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    }
    map_and(file, BOTH, |at| match way {
        0 => assert!(watched.is_lost(), "it is there, untouched"),
        1 => drop(unsafe { at.add(5000).read_volatile() }),
        _ => unsafe { at.add(5000).write_volatile(1) },
    });
}

/// Threads touch one mapping at the same time, and one of them asks after its store.
#[test]
fn mappings_are_noticed_in_time() {
    let scratch = Scratch::here();
    let Some(tracker) = tracker(scratch.dir(), Limits::default()) else { return };
    let (_, file) = scratch.file();
    file.write_all_at(&[1; 8192], 0).unwrap();
    for _ in 0..1000 {
        let watched = tracker.watch(&file, Writers::Others).unwrap();
        map_and(&file, BOTH, |at| {
            let at = at as usize;
            std::thread::scope(|scope| {
                scope.spawn(move || unsafe { (at as *const u8).read_volatile() });
                scope.spawn(|| {
                    unsafe { (at as *mut u8).write_volatile(2) };
                    assert!(watched.is_lost());
                });
            });
        });
        assert!(watched.drain().is_err());
    }
}

#[test]
fn own_writes_are_left_out_where_asked() {
    let scratch = Scratch::here();
    let Some(tracker) = tracker(scratch.dir(), Limits::default()) else { return };
    let (path, file) = scratch.file();
    let watched = tracker.watch(&file, Writers::Others).unwrap();
    file.write_all_at(&[1; 100], 0).unwrap();
    std::thread::scope(|s| drop(s.spawn(|| file.write_all_at(&[1; 100], 500).unwrap())));
    let script =
        format!("printf abc | dd of={} bs=1 seek=10 conv=notrunc status=none", path.display());
    assert!(Command::new("sh").args(["-c", &script]).status().unwrap().success());
    assert_eq!(drained(&watched), RangeSet::from([10..13]));
}

#[test]
fn many_files_at_once() {
    let scratch = Scratch::here();
    let Some(tracker) = tracker(scratch.dir(), Limits::default()) else { return };
    let files: Vec<File> = (0..500).map(|_| scratch.file().1).collect();
    let watch = |file| tracker.watch(file, Writers::All).unwrap();
    let watched: Vec<Watched> = files.iter().map(watch).collect();
    for (i, file) in files.iter().enumerate() {
        file.write_all_at(b"abc", i as u64).unwrap();
    }
    for (i, watched) in watched.iter().enumerate() {
        let expected: Range<u64> = i as u64..i as u64 + 3;
        assert_eq!(drained(watched), RangeSet::from([expected]));
    }
}

#[test]
fn other_file_systems_are_refused_in_words() {
    let error = Tracker::open("/proc".as_ref()).err().expect("no writes of /proc");
    if std::env::var_os("EBB_REQUIRE_TRACKER").is_some() {
        assert!(matches!(error, Unavailable::FileSystem { .. }), "{error}");
        assert!(error.to_string().starts_with("/proc is on a file system"), "{error}");
    }
}

/// The other half of the next test.
#[test]
#[ignore = "run by unprivileged_users_are_told"]
fn as_somebody_else() {
    let error = Tracker::open("/tmp".as_ref()).err().expect("without any right");
    println!("told: {error}");
    assert!(matches!(error, Unavailable::Privilege { .. } | Unavailable::FileSystem { .. }));
}

#[test]
fn unprivileged_users_are_told() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("SKIPPED: only root can become somebody else");
    }
    // The test's own file may be where others cannot look.
    let dir = tempfile::tempdir_in("/tmp").unwrap();
    let copy = dir.path().join("writes");
    std::fs::copy(std::env::current_exe().unwrap(), &copy).unwrap();
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(dir.path(), open).unwrap();
    let mut other = Command::new(copy);
    other.args(["--ignored", "--exact", "as_somebody_else", "--nocapture"]).uid(65534).gid(65534);
    let done = other.output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stdout));
}
