//! What the benchmarks share: interleaved rounds, medians with their spread, one table and one
//! CSV file. Every figure stands beside one of the bare directory from the same run; but those of
//! [`nodes`], a simulation of many nodes, which are what one service pays.

pub mod asking;
pub mod crew;
pub mod fetching;
pub mod hollow;
pub mod nodes;
pub mod one_file;
pub mod through;
pub mod timeline;

use std::fmt::Write as _;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Bytes of a MiB.
pub const MIB: f64 = (1 << 20) as f64;

/// Rounds of every measurement; odd, so that the median is one of them.
#[must_use]
pub fn rounds() -> usize {
    std::env::var("EBB_BENCH_ROUNDS").ok().and_then(|r| r.parse().ok()).unwrap_or(7)
}

/// The middle value, and the smallest and the largest.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// Half of the rounds were better, half worse.
    pub median: f64,
    /// Smallest.
    pub least: f64,
    /// Largest.
    pub most: f64,
}

impl Spread {
    /// Of some values; at least one.
    #[must_use]
    pub fn of(mut values: Vec<f64>) -> Spread {
        values.sort_by(f64::total_cmp);
        let at = |i: usize| values.get(i).copied().unwrap_or(f64::NAN);
        Spread { median: at(values.len() / 2), least: at(0), most: at(values.len() - 1) }
    }
}

/// Amount per second of one call of `work`, which returns the amount.
pub fn rate(work: impl FnOnce() -> f64) -> f64 {
    let start = Instant::now();
    let amount = work();
    amount / start.elapsed().as_secs_f64()
}

/// Writes records one after another for about `bytes`; MiB per second.
///
/// # Panics
/// When a write fails.
pub fn write(file: &File, record: usize, bytes: usize) -> f64 {
    let data = vec![0x5a; record];
    rate(|| {
        for at in (0..bytes).step_by(record) {
            file.write_all_at(&data, at as u64).expect("write");
        }
        bytes as f64 / MIB
    })
}

/// Writes records to a new file and removes it; MiB per second of the writes.
///
/// # Panics
/// When that fails.
pub fn write_new(path: &Path, record: usize, bytes: usize) -> f64 {
    let file = File::create_new(path).expect("create");
    let rate = write(&file, record, bytes);
    drop(file);
    std::fs::remove_file(path).expect("remove");
    rate
}

/// Where reports go; made when missing.
pub fn out_dir() -> std::io::Result<PathBuf> {
    let dir = PathBuf::from(std::env::var("EBB_BENCH_OUT").unwrap_or_else(|_| "../out".into()));
    std::fs::create_dir_all(&dir)?;
    Ok(dir)
}

/// One line of the report.
struct Row {
    what: String,
    unit: &'static str,
    bare: Spread,
    mount: Spread,
}

/// Collects measurements and prints them.
pub struct Report {
    name: &'static str,
    rows: Vec<Row>,
}

impl Report {
    /// An empty report; `name` is the CSV file's.
    #[must_use]
    pub fn new(name: &'static str) -> Report {
        Report { name, rows: Vec::new() }
    }

    /// Measures `bare` and `mount` in turn, round by round, after one round that is thrown away.
    pub fn compare(
        &mut self,
        what: impl Into<String>,
        unit: &'static str,
        mut bare: impl FnMut() -> f64,
        mut mount: impl FnMut() -> f64,
    ) {
        bare();
        mount();
        let mut values = (Vec::new(), Vec::new());
        for _ in 0..rounds() {
            values.0.push(bare());
            values.1.push(mount());
        }
        self.add(what, unit, values.0, values.1);
    }

    /// A line of what was measured in turn elsewhere.
    pub fn add(
        &mut self,
        what: impl Into<String>,
        unit: &'static str,
        bare: Vec<f64>,
        mount: Vec<f64>,
    ) {
        let row = Row { what: what.into(), unit, bare: Spread::of(bare), mount: Spread::of(mount) };
        println!("{}", line(&row));
        self.rows.push(row);
    }

    /// Prints the heading.
    pub fn head(&self, bare: &str, mount: &str) {
        println!("{:<72}{:>12}{:>12}{:>8}  spread", self.name, bare, mount, "ratio");
    }

    /// Writes `out/NAME.csv`.
    pub fn save(&self) -> std::io::Result<PathBuf> {
        let mut csv = String::from(
            "what,unit,bare_median,bare_min,bare_max,mount_median,mount_min,mount_max,ratio\n",
        );
        for r in &self.rows {
            let ratio = r.mount.median / r.bare.median;
            let _ = writeln!(
                csv,
                "{},{},{:.1},{:.1},{:.1},{:.1},{:.1},{:.1},{ratio:.3}",
                r.what,
                r.unit,
                r.bare.median,
                r.bare.least,
                r.bare.most,
                r.mount.median,
                r.mount.least,
                r.mount.most
            );
        }
        let path = out_dir()?.join(format!("{}.csv", self.name));
        std::fs::write(&path, csv)?;
        Ok(path)
    }
}

fn line(r: &Row) -> String {
    format!(
        "{:<72}{:>12.0}{:>12.0}{:>8.3}  [{:.0}..{:.0}] {}",
        r.what,
        r.bare.median,
        r.mount.median,
        r.mount.median / r.bare.median,
        r.mount.least,
        r.mount.most,
        r.unit
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle() {
        let s = Spread::of(vec![3.0, 1.0, 2.0]);
        assert_eq!((s.median, s.least, s.most), (2.0, 1.0, 3.0));
    }
}
