//! What a run leaves behind: its events, and curves of what its processes use.

use ebb_testkit::Cluster;
use ebb_tests::load::Work;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

pub struct Record {
    directory: PathBuf,
    start: Instant,
    events: File,
    curves: File,
    operations: u64,
    read_elsewhere: u64,
    longest_ms: u64,
}

impl Record {
    pub fn new(seed: u64) -> Record {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace");
        let directory = root.join("target/chaos").join(seed.to_string());
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir_all(&directory).expect("a directory for the run");
        let file = |name| File::create(directory.join(name)).expect("a file of the run");
        let (events, mut curves) = (file("events"), file("curves.csv"));
        writeln!(curves, "seconds,round,process,pid,rss_kib,descriptors,cache_bytes")
            .expect("curves");
        let start = Instant::now();
        let (operations, read_elsewhere, longest_ms) = (0, 0, 0);
        Record { directory, start, events, curves, operations, read_elsewhere, longest_ms }
    }

    pub fn directory(&self) -> &Path {
        &self.directory
    }

    pub fn event(&mut self, text: &str) {
        let line = format!("{:7.2} s  {text}", self.start.elapsed().as_secs_f64());
        println!("{line}");
        writeln!(self.events, "{line}").expect("events");
    }

    pub fn add(&mut self, work: &Work) {
        self.operations += work.operations;
        self.read_elsewhere += work.read_elsewhere;
        self.longest_ms = self.longest_ms.max(work.longest_ms);
    }

    /// One line for each process.
    pub fn sample(&mut self, round: u64, cluster: &Cluster) {
        self.line(round, "service", cluster.meta_pid(), 0);
        for node in cluster.nodes() {
            let pid = node.pid().expect("it is mounted");
            self.line(round, node.name(), pid, bytes_below(&node.cache().join("data")));
        }
    }

    fn line(&mut self, round: u64, name: &str, pid: u32, cache: u64) {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let rss = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let rss = rss.and_then(|text| text.split_whitespace().next()).unwrap_or("0");
        let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
        let seconds = self.start.elapsed().as_secs();
        writeln!(self.curves, "{seconds},{round},{name},{pid},{rss},{descriptors},{cache}")
            .expect("curves");
    }

    pub fn total(&mut self, rounds: u64) {
        let Record { operations, read_elsewhere, longest_ms, .. } = *self;
        self.event(&format!(
            "{rounds} rounds, {operations} operations, {read_elsewhere} reads of published bytes \
             on other nodes, the longest operation {longest_ms} ms: no violation"
        ));
    }
}

/// Bytes that the files of a directory take on the disk.
fn bytes_below(directory: &Path) -> u64 {
    let Ok(list) = fs::read_dir(directory) else { return 0 };
    list.flatten()
        .map(|entry| match entry.metadata() {
            Ok(meta) if meta.is_dir() => bytes_below(&entry.path()),
            Ok(meta) => meta.blocks() * 512,
            Err(_) => 0,
        })
        .sum()
}
