//! `ebb check` on traces of a million to ten million events with as many conflicts: time and most
//! memory. `cargo bench -p ebb-benches --bench races [-- EVENTS...]`

use ebb_testkit::ebb_binary;
use ebb_trace_format::{Act, BLOCK, Block, Call, ENDING, Event, Flow, Header, Record, What};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

/// Processes of the traced program.
const PROCESSES: u32 = 16;
/// Accesses of each process between two barriers.
const STEP: u64 = 1000;
/// Bytes of an access.
const LEN: u64 = 4096;

/// A trace file that is being written.
struct Out {
    file: BufWriter<File>,
    block: Vec<u8>,
    used: usize,
    base: u64,
    now: u64,
}

impl Out {
    fn new(dir: &Path, process: u32) -> Out {
        let header = Header {
            host: b"bench".to_vec(),
            pid: 100 + process,
            parent: 1,
            start: 1,
            task: format!("PMI_RANK={process}").into_bytes(),
            program: b"/bin/generated".to_vec(),
            ..Header::default()
        };
        let path = dir.join(format!("bench-{process}-0.{ENDING}"));
        let mut file = BufWriter::new(File::create(path).expect("create"));
        file.write_all(&header.encode()).expect("write");
        let mut out = Out { file, block: vec![0; BLOCK], used: 0, base: 1, now: 1 };
        out.base = Block::begin(&mut out.block, 1).state().1;
        out.push(Call::MpiInit, 0, What::World { comm: 1, rank: process, size: PROCESSES });
        for site in 1..4 {
            let object = b"/bin/generated".to_vec();
            out.push(Call::Start, 0, What::Site { site, offset: u64::from(site) * 16, object });
        }
        let path = b"/scratch/shared".to_vec();
        out.push(Call::Open, 0, What::File { file: 1, ino: 7, born: 9, path });
        out.push(Call::Open, 1, What::Sync { file: 1, event: Event::Open });
        out
    }

    fn push(&mut self, call: Call, site: u32, what: What) {
        self.now += 700;
        let record = Record { begin: self.now - 300, end: self.now, thread: 0, call, site, what };
        loop {
            let mut block = Block::resume(&mut self.block, self.used, self.base);
            if block.push(&record).is_ok() {
                (self.used, self.base) = block.state();
                return;
            }
            block.seal();
            self.file.write_all(&self.block).expect("write");
            self.block.fill(0);
            (self.used, self.base) = Block::begin(&mut self.block, self.now).state();
        }
    }

    fn end(mut self) {
        self.push(Call::Exit, 0, What::Exit);
        Block::resume(&mut self.block, self.used, self.base).seal();
        self.file.write_all(&self.block).expect("write");
        self.file.flush().expect("write");
    }
}

/// Blocks are written by one process, read by the next and written again by the one after it: three events,
/// three conflicts. Every other round has no open after its barrier, which is a race under session.
fn generate(dir: &Path, events: u64) {
    let mut outs: Vec<Out> = (0..PROCESSES).map(|p| Out::new(dir, p)).collect();
    let rounds = events.div_ceil(3 * STEP * u64::from(PROCESSES));
    let per_round = events / rounds / 3 / u64::from(PROCESSES);
    let mut number = 0;
    for round in 0..rounds {
        for phase in 0..3u64 {
            for (p, out) in outs.iter_mut().enumerate() {
                for i in 0..per_round {
                    let owner = (p as u64 + phase) % u64::from(PROCESSES);
                    let start = ((round * u64::from(PROCESSES) + owner) * per_round + i) * LEN;
                    let (act, call) = match phase {
                        1 => (Act::Read, Call::Pread),
                        _ => (Act::Write, Call::Pwrite),
                    };
                    let what = What::Access { file: 1, act, start, end: start + LEN };
                    out.push(call, phase as u32 + 1, what);
                }
                out.push(Call::Close, 1, What::Sync { file: 1, event: Event::Close });
            }
            barrier(&mut outs, number);
            number += 1;
            for out in outs.iter_mut().filter(|_| round % 2 == 0) {
                out.push(Call::Open, 1, What::Sync { file: 1, event: Event::Open });
            }
        }
    }
    outs.into_iter().for_each(Out::end);
}

fn barrier(outs: &mut [Out], number: u64) {
    let now = outs.iter().map(|o| o.now).max().unwrap_or(0);
    for (rank, out) in (0..).zip(outs.iter_mut()) {
        let (size, root, flow) = (PROCESSES, 0, Flow::All);
        out.push(Call::MpiBarrier, 0, What::Enter { comm: 1, number, rank, size, root, flow });
        out.now = out.now.max(now + 1000);
        out.push(Call::MpiBarrier, 0, What::Leave { comm: 1, number, rank });
    }
}

/// Runs the command; seconds, seconds of processors, most memory in MiB, and what it says.
fn check(dir: &Path, models: &[&str]) -> (f64, f64, f64, serde_json::Value) {
    let start = Instant::now();
    let mut command = Command::new(ebb_binary());
    command.arg("check").arg(dir).arg("--json").stdout(Stdio::piped());
    command.args(models.iter().flat_map(|m| ["--model", m]));
    let child = command.spawn().expect("spawn");
    let pid = child.id();
    let mut child = child;
    let mut said = String::new();
    std::io::Read::read_to_string(child.stdout.as_mut().expect("a pipe"), &mut said).expect("read");
    let mut status = 0;
    // SAFETY: all zeros is a value of this structure of numbers.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: a child of ours that nobody has waited for; the structures are written.
    let got = unsafe { libc::wait4(pid as i32, &raw mut status, 0, &raw mut usage) };
    assert_eq!(got, pid as i32, "the child");
    let said = serde_json::from_str(&said).expect("JSON");
    let of = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 / 1e6;
    let processors = of(usage.ru_utime) + of(usage.ru_stime);
    (start.elapsed().as_secs_f64(), processors, usage.ru_maxrss as f64 / 1024.0, said)
}

fn main() {
    let asked: Vec<u64> = std::env::args().skip(1).filter_map(|a| a.parse().ok()).collect();
    let sizes =
        if asked.is_empty() { vec![1_000_000, 2_000_000, 5_000_000, 10_000_000] } else { asked };
    println!(
        "{:>10} {:>10} {:>8} {:>12} {:>12} {:>8} {:>8} {:>8}",
        "events", "trace MiB", "models", "conflicts", "races", "s", "cpu s", "MiB"
    );
    for events in sizes {
        let dir = tempfile::tempdir().expect("tempdir");
        generate(dir.path(), events);
        let files = std::fs::read_dir(dir.path()).expect("list").flatten();
        let bytes: u64 = files.map(|f| f.metadata().map_or(0, |m| m.len())).sum();
        for models in [&["session"][..], &["all"]] {
            let (seconds, processors, memory, said) = check(dir.path(), models);
            let of = |key: &str| said["models"][0][key].as_u64().unwrap_or(0);
            let count = said["models"].as_array().map_or(0, Vec::len);
            println!(
                "{events:>10} {:>10} {count:>8} {:>12} {:>12} {seconds:>8.1} {processors:>8.1} {memory:>8.0}",
                bytes >> 20,
                of("conflicts"),
                of("races")
            );
        }
    }
}
