//! Measures what tracking costs a write: `cost [DIR]`. Writes of 8 KiB over a file of 64 MiB in the
//! page cache, without a tracker, with one that watches another file, and with one that watches
//! this file. Rounds take turns, and the median of each is printed.

use ebb_tracker::{Tracker, Writers};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Instant;

const SIZE: usize = 8 << 10;
const FILE: u64 = 64 << 20;
const PASSES: u64 = 2;
const ROUNDS: usize = 15;

fn ns_per_write(file: &File, bytes: &[u8]) -> f64 {
    let began = Instant::now();
    for _ in 0..PASSES {
        for at in (0..FILE).step_by(SIZE) {
            file.write_all_at(bytes, at).expect("a write");
        }
    }
    began.elapsed().as_nanos() as f64 / (PASSES * FILE / SIZE as u64) as f64
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
    let median = |times: &mut Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    };
    let [bare, other, watched] = times.each_mut().map(median);
    println!("without a tracker     {bare:8.0} ns per write of 8 KiB");
    println!("another file watched  {other:8.0} ns, {:.3} times", other / bare);
    println!("this file watched     {watched:8.0} ns, {:.3} times", watched / bare);
}
