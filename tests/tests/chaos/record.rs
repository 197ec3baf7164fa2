//! What a run leaves behind: its events, and curves of what its processes use.

use crate::leaks::{Curves, Sample};
use ebb_testkit::Cluster;
use ebb_tests::load::Work;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

pub struct Record {
    directory: PathBuf,
    start: Instant,
    events: File,
    csv: File,
    curves: Curves,
    operations: u64,
    read_elsewhere: u64,
    longest_ms: u64,
    written_elsewhere: u64,
    /// How often the common number was counted up: for certain, and perhaps.
    counted: (u64, u64),
    /// What took place, by its name.
    counts: BTreeMap<String, u64>,
    /// Opens by the way that their reads and writes took.
    opens: BTreeMap<String, u64>,
}

/// When a sample is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    AfterRound,
    /// Everything is on the backing: samples of this moment can be compared.
    Drained,
}

impl Record {
    pub fn new(seed: u64) -> Record {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace");
        let directory = root.join("target/chaos").join(seed.to_string());
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir_all(&directory).expect("a directory for the run");
        let file = |name| File::create(directory.join(name)).expect("a file of the run");
        let (events, mut csv) = (file("events"), file("curves.csv"));
        let columns = "seconds,round,moment,process,pid,rss_kib,descriptors,threads,cache_bytes,journal_bytes";
        writeln!(csv, "{columns}").expect("curves");
        let (operations, read_elsewhere, longest_ms) = (0, 0, 0);
        Record {
            directory,
            start: Instant::now(),
            events,
            csv,
            curves: Curves::default(),
            operations,
            read_elsewhere,
            longest_ms,
            written_elsewhere: 0,
            counted: (0, 0),
            counts: BTreeMap::new(),
            opens: BTreeMap::new(),
        }
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
        self.written_elsewhere += work.written_elsewhere;
        self.counted.0 += work.counted.0;
        self.counted.1 += work.counted.1;
        self.count("counts under a lock", work.counted.0);
        self.count("mapped stores", work.mapped);
        self.count("messages heard", work.heard);
        self.count("lock hand-overs", work.handed);
        self.count("numbers that a late node took back", work.went_back);
        self.count("changes of files with several names", work.linked);
        self.count("reads out of reach", work.missed.len() as u64);
    }

    /// Something took place.
    pub fn count(&mut self, what: &str, times: u64) {
        if times > 0 {
            *self.counts.entry(what.to_owned()).or_default() += times;
        }
    }

    /// `late`: a node that had lost its locks may have brought back what it wrote under one.
    ///
    /// # Panics
    /// When a count that was acknowledged is lost, or one is there that nobody tried.
    pub fn judge_count(&mut self, what: &str, found: u64, late: bool) {
        let (least, most) = self.counted;
        if late {
            assert!(found <= most, "{what}: counted {found}, more than {most}");
            return self.counted = (found, found);
        }
        assert!((least..=most).contains(&found), "{what}: counted {found}, not {least} to {most}");
    }

    /// What a daemon says at its end of the opens that it had.
    pub fn add_status(&mut self, status: &serde_json::Value) {
        self.count(
            "nodes that were told of what went past them",
            u64::from(status["tracker"] == "on"),
        );
        let encrypted = ["sent_bytes", "received_bytes"].map(|k| status["encrypted"][k].as_u64());
        self.count("bytes encrypted", encrypted.into_iter().flatten().sum());
        for (way, count) in status["opens"].as_object().into_iter().flatten() {
            *self.opens.entry(way.clone()).or_default() += count.as_u64().unwrap_or(0);
        }
    }

    /// One line for each process.
    pub fn sample(&mut self, round: u64, moment: Moment, cluster: &Cluster) {
        if cluster.has_meta() {
            let state = (0, bytes_below(&cluster.meta_state()));
            self.line(round, moment, "service", cluster.meta_pid(), state);
        }
        for node in cluster.nodes() {
            let pid = node.pid().expect("it is mounted");
            let journal = fs::metadata(node.cache().join("journal")).map_or(0, |m| m.len());
            let bytes = (bytes_below(&node.cache().join("data")), journal);
            self.line(round, moment, node.name(), pid, bytes);
        }
    }

    fn line(
        &mut self,
        round: u64,
        moment: Moment,
        name: &str,
        pid: u32,
        (cache_bytes, journal_bytes): (u64, u64),
    ) {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let of = |key: &str| -> u64 {
            let line = status.lines().find_map(|line| line.strip_prefix(key));
            line.and_then(|text| text.split_whitespace().next()?.parse().ok()).unwrap_or(0)
        };
        let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count) as u64;
        let sample = Sample {
            rss_kib: of("VmRSS:"),
            descriptors,
            threads: of("Threads:"),
            cache_bytes,
            journal_bytes,
        };
        let seconds = self.start.elapsed().as_secs();
        let Sample { rss_kib, threads, .. } = sample;
        writeln!(
            self.csv,
            "{seconds},{round},{moment:?},{name},{pid},{rss_kib},{descriptors},{threads},{cache_bytes},{journal_bytes}"
        )
        .expect("curves");
        if moment == Moment::Drained {
            self.curves.add(name, pid, sample);
        }
    }

    /// # Panics
    /// When something was only ever taken and never given back.
    pub fn judge_leaks(&mut self, what: &str) {
        for line in self.curves.summary() {
            self.event(&line);
        }
        let leaks = self.curves.leaks();
        assert!(leaks.is_empty(), "{what}: leaks, see {:?}: {leaks:#?}", self.directory);
    }

    pub fn total(&mut self, rounds: u64) {
        let Record { operations, read_elsewhere, longest_ms, .. } = *self;
        let opens = format!("{:?}", self.opens);
        let (written_elsewhere, counts) = (self.written_elsewhere, format!("{:?}", self.counts));
        self.event(&format!("opens: {opens}"));
        self.event(&format!("{written_elsewhere} writes through other nodes"));
        self.event(&format!("took place: {counts}"));
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
