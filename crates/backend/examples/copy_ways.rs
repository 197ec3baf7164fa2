//! Measures ways to bring a cache file's bytes into a backing file, each with its fsync:
//! `copy_ways [DIR] [MiB] [ROUNDS]`. Prints the median and the spread in MiB/s.
//!
//! Both files exist and are overwritten, so that fresh blocks and fresh memory do not drown the
//! differences. `plain` hashes what it writes, as the flusher does; `copy_file_range` cannot.

use ebb_backend::{Access, Backend, PosixDir};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::Instant;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let dir = args.next().unwrap_or_else(|| ".".to_owned());
    let size = args.next().map_or(Ok(256), |s| s.parse::<u64>())? << 20;
    let rounds = args.next().map_or(Ok(5), |s| s.parse::<usize>())?;
    let dir = Path::new(&dir);
    let (from, to) = (dir.join("copy-ways-cache"), dir.join("copy-ways-backing"));
    for path in [&from, &to] {
        fill(path, size)?;
    }
    let ways: [(&str, Way); 6] = [
        ("plain 256 KiB", |f, t, n| plain(f, t, n, 256 << 10)),
        ("plain 1 MiB", |f, t, n| plain(f, t, n, 1 << 20)),
        ("plain 8 MiB", |f, t, n| plain(f, t, n, 8 << 20)),
        ("O_DIRECT 1 MiB", |f, t, n| direct(f, t, n, 1 << 20)),
        ("O_DIRECT 8 MiB", |f, t, n| direct(f, t, n, 8 << 20)),
        ("copy_file_range", whole),
    ];
    let mut rates = vec![Vec::new(); ways.len()];
    for _ in 0..rounds {
        for (i, (_, way)) in ways.iter().enumerate() {
            let began = Instant::now();
            way(&from, &to, size)?;
            rates[i].push((size >> 20) as f64 / began.elapsed().as_secs_f64());
        }
    }
    for ((name, _), mut rates) in ways.iter().zip(rates) {
        rates.sort_by(f64::total_cmp);
        let (low, mid, high) = (rates[0], rates[rounds / 2], rates[rounds - 1]);
        println!("{name:16} {mid:7.0} MiB/s  ({low:.0} to {high:.0})");
    }
    std::fs::remove_file(&from)?;
    std::fs::remove_file(&to)?;
    Ok(())
}

type Way = fn(&Path, &Path, u64) -> Result<()>;

fn fill(path: &Path, size: u64) -> Result<()> {
    let file = File::create(path)?;
    let block: Vec<u8> =
        (0..1u32 << 20).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    for at in (0..size).step_by(1 << 20) {
        file.write_all_at(&block, at)?;
    }
    file.sync_all()?;
    Ok(())
}

fn plain(from: &Path, to: &Path, size: u64, piece: usize) -> Result<()> {
    let from = File::open(from)?;
    let dir = PosixDir::open_root(to.parent().ok_or("no directory")?)?;
    let name = to.file_name().ok_or("no name")?.as_encoded_bytes();
    let to = dir.open(name, std::fs::metadata(to)?.ino(), Access::Write)?;
    let mut buf = vec![0; piece];
    let mut sum = 0;
    for at in (0..size).step_by(piece) {
        from.read_exact_at(&mut buf, at)?;
        sum ^= xxhash_rust::xxh3::xxh3_64(&buf);
        to.write_all_at(&buf, at)?;
    }
    std::hint::black_box(sum);
    to.sync_data()?;
    Ok(())
}

fn direct(from: &Path, to: &Path, size: u64, piece: usize) -> Result<()> {
    let from = File::open(from)?;
    let to = OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(to)?;
    let mut space = vec![0; piece + 4096];
    let skip = space.as_ptr().align_offset(4096);
    let buf = &mut space[skip..skip + piece];
    for at in (0..size).step_by(piece) {
        from.read_exact_at(buf, at)?;
        to.write_all_at(buf, at)?;
    }
    to.sync_data()?;
    Ok(())
}

fn whole(from: &Path, to: &Path, size: u64) -> Result<()> {
    let from = File::open(from)?;
    let to = OpenOptions::new().write(true).open(to)?;
    let (mut off_in, mut off_out) = (0, 0);
    while off_in < size {
        let left = (size - off_in) as usize;
        let n =
            rustix::fs::copy_file_range(&from, Some(&mut off_in), &to, Some(&mut off_out), left)?;
        if n == 0 {
            return Err("the cache file ended early".into());
        }
    }
    to.sync_data()?;
    Ok(())
}
