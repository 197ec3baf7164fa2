//! Measures what tracking costs a write: `cost [DIR]`. Writes of 8 KiB over a file of 64 MiB in the
//! page cache, without a tracker, with one that watches another file, and with one that watches
//! this file. Rounds take turns, and the median of each is printed.

use ebb_tracker::{Tracker, Writers};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const SIZE: usize = 8 << 10;
const FILE: u64 = 64 << 20;
const PASSES: u64 = 2;
const ROUNDS: usize = 15;
const FILES: u32 = 20_000;

fn ns_per_write(file: &File, bytes: &[u8]) -> f64 {
    let began = Instant::now();
    for _ in 0..PASSES {
        for at in (0..FILE).step_by(SIZE) {
            file.write_all_at(bytes, at).expect("a write");
        }
    }
    began.elapsed().as_nanos() as f64 / (PASSES * FILE / SIZE as u64) as f64
}

/// What a file costs beside its writes: to be watched, asked once, and not to be watched any more.
fn whole_life(dir: &Path) {
    let began = Instant::now();
    let Ok(tracker) = Tracker::open(dir) else { return };
    println!("starting a tracker    {:8.1} ms", began.elapsed().as_secs_f64() * 1e3);
    let file = tempfile::tempfile_in(dir).expect("a file");
    let (mut watch, mut drain, mut end) = (Duration::ZERO, Duration::ZERO, Duration::ZERO);
    for i in 0..FILES {
        let began = Instant::now();
        let watched = tracker.watch(&file, Writers::All).expect("watched");
        watch += began.elapsed();
        file.write_all_at(b"x", u64::from(i)).expect("a write");
        let began = Instant::now();
        watched.drain().expect("nothing is lost");
        drain += began.elapsed();
        let began = Instant::now();
        drop(watched);
        end += began.elapsed();
    }
    let ns = |time: Duration| time.as_nanos() / u128::from(FILES);
    println!("watch, drain, end     {:8} {} {} ns", ns(watch), ns(drain), ns(end));
}

fn main() {
    let dir = std::env::args().nth(1).map_or_else(std::env::temp_dir, PathBuf::from);
    let files = [0, 1].map(|_| tempfile::tempfile_in(&dir).expect("a file"));
    let bytes = vec![7; SIZE];
    ns_per_write(&files[0], &bytes);
    let mut times = [const { Vec::new() }; 3];
    for _ in 0..ROUNDS {
        times[0].push(ns_per_write(&files[0], &bytes));
        let tracker = match Tracker::open(&dir) {
            Ok(tracker) => tracker,
            Err(e) => return println!("no tracker: {e}"),
        };
        let other = tracker.watch(&files[1], Writers::All).expect("watched");
        times[1].push(ns_per_write(&files[0], &bytes));
        let watched = tracker.watch(&files[0], Writers::All).expect("watched");
        times[2].push(ns_per_write(&files[0], &bytes));
        let seen = watched.drain().expect("nothing is lost");
        assert!(seen.ranges.iter().eq([&(0..FILE)]) && other.drain().is_ok());
    }
    whole_life(&dir);
    let median = |times: &mut Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    };
    let [bare, other, watched] = times.each_mut().map(median);
    println!("without a tracker     {bare:8.0} ns per write of 8 KiB");
    println!("another file watched  {other:8.0} ns, {:.3} times", other / bare);
    println!("this file watched     {watched:8.0} ns, {:.3} times", watched / bare);
}
