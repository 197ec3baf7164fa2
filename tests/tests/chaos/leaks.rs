//! Judges the curves: a process that lived through many drains must not need more at the end than
//! after its first ones. Samples are taken when everything is drained, so they are alike.

use std::collections::BTreeMap;

/// What a process uses.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sample {
    pub rss_kib: u64,
    pub descriptors: u64,
    pub threads: u64,
    pub cache_bytes: u64,
    pub journal_bytes: u64,
}

/// Something that can leak: what it is, and how much more at the end is no leak: a share of what
/// it was, or this many, whichever is more.
struct Measure {
    name: &'static str,
    of: fn(&Sample) -> u64,
    spare_percent: u64,
    spare: u64,
}

const MEASURES: [Measure; 5] = [
    // The threads of a drain come and go, and the allocator keeps the MiB that each of them had.
    Measure { name: "rss_kib", of: |s| s.rss_kib, spare_percent: 25, spare: 16 << 10 },
    Measure { name: "descriptors", of: |s| s.descriptors, spare_percent: 25, spare: 8 },
    Measure { name: "threads", of: |s| s.threads, spare_percent: 25, spare: 8 },
    Measure { name: "cache_bytes", of: |s| s.cache_bytes, spare_percent: 50, spare: 2 << 20 },
    // Grows until it is compacted: the service's at 64 MiB.
    Measure { name: "journal_bytes", of: |s| s.journal_bytes, spare_percent: 0, spare: 80 << 20 },
];

/// Fewer samples than this say nothing.
const SAMPLES_MIN: usize = 8;

/// The samples of each process, oldest first.
#[derive(Debug, Default)]
pub struct Curves {
    of: BTreeMap<(String, u32), Vec<Sample>>,
}

fn median(samples: &[Sample], of: fn(&Sample) -> u64) -> u64 {
    let mut values: Vec<u64> = samples.iter().map(of).collect();
    values.sort_unstable();
    values[values.len() / 2]
}

impl Curves {
    pub fn add(&mut self, process: &str, pid: u32, sample: Sample) {
        self.of.entry((process.to_owned(), pid)).or_default().push(sample);
    }

    /// First and last quarter, of those that lived long enough. The first samples are left out:
    /// until then everything is made for the first time.
    fn quarters(&self) -> impl Iterator<Item = (&(String, u32), &[Sample], &[Sample])> {
        self.of.iter().filter(|(_, samples)| samples.len() >= SAMPLES_MIN).map(|(who, samples)| {
            let warm = &samples[samples.len() / 8..];
            let quarter = warm.len() / 4;
            (who, &warm[..quarter.max(1)], &warm[warm.len() - quarter.max(1)..])
        })
    }

    pub fn summary(&self) -> Vec<String> {
        let line = |((name, pid), first, last): (&(String, u32), &[Sample], &[Sample])| {
            let of = |m: &Measure| {
                format!("{} {} -> {}", m.name, median(first, m.of), median(last, m.of))
            };
            let all: Vec<String> = MEASURES.iter().map(of).collect();
            format!("{name} ({pid}): {}", all.join(", "))
        };
        self.quarters().map(line).collect()
    }

    /// What grew and should not have.
    pub fn leaks(&self) -> Vec<String> {
        let mut found = Vec::new();
        for ((name, pid), first, last) in self.quarters() {
            for Measure { name: what, of, spare_percent, spare } in &MEASURES {
                let (before, after) = (median(first, *of), median(last, *of));
                if after > before + (before * spare_percent / 100).max(*spare) {
                    found.push(format!("{name} ({pid}): {what} grew from {before} to {after}"));
                }
            }
        }
        found
    }
}

#[test]
fn what_only_grows_is_found_and_what_goes_up_and_down_is_not() {
    let curves = |descriptors: fn(u64) -> u64| {
        let mut curves = Curves::default();
        for i in 0..40 {
            let sample =
                Sample { descriptors: descriptors(i), rss_kib: 50_000, ..Sample::default() };
            curves.add("node0", 7, sample);
        }
        curves.leaks()
    };
    assert!(curves(|i| 100 + i % 30).is_empty());
    assert!(curves(|i| if i < 5 { 20 } else { 100 }).is_empty(), "warming up");
    assert_eq!(curves(|i| 100 + 2 * i).len(), 1);
}
