//! Does flushing get in the way? A program that writes in bursts with gaps between them runs under
//! `end` (nothing is flushed while it runs), `idle` and `immediate`, in turn, round by round, over
//! a backing that is slower than the buffer. Reports the bandwidth of the bursts: medians, the
//! spread of equal runs, the ratio to `end`, how fast the flusher stopped, and a time-line.
//!
//! Files are written over in place: fresh ones differ by a factor of three between equal runs.
//! Writes `phases.csv`, `phases.md`, `phases-time.csv` and `phases.svg` to EBB_BENCH_OUT.
//!
//! Variables: EBB_BENCH_ROUNDS, EBB_BENCH_BURSTS, EBB_BENCH_BURST_MIB (of all nodes together),
//! EBB_BENCH_GAP_MS, EBB_BENCH_BACKING_MIB_S, EBB_BENCH_NODES (1 or 4; default: both),
//! EBB_BENCH_SHAPE (rows whose files are called so, like MPI; default: all).

use ebb_benches::timeline::{self, Look, Panel};
use ebb_benches::{Spread, out_dir, rounds};
use ebb_testkit::{Cluster, Disk};
use serde_json::Value;
use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, Write as _};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const POLICIES: [&str; 3] = ["end", "idle", "immediate"];

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

/// What the program does.
#[derive(Clone, Copy)]
struct Work {
    bursts: u64,
    burst_mib: u64,
    gap: Duration,
}

/// How its files lie.
#[derive(Clone, Copy, PartialEq)]
enum Shape {
    /// A file for each process.
    Own,
    /// One file, a part for each process.
    Shared,
    /// The same two through MPI-IO.
    MpiOwn,
    MpiShared,
}

impl Shape {
    fn name(self) -> &'static str {
        match self {
            Shape::Own => "file per process",
            Shape::Shared => "one shared file",
            Shape::MpiOwn => "MPI-IO, file per process",
            Shape::MpiShared => "MPI-IO, one shared file",
        }
    }

    fn is_mpi(self) -> bool {
        matches!(self, Shape::MpiOwn | Shape::MpiShared)
    }
}

fn main() {
    // `cargo bench` hands its own flags on; a test run only wants to know that it builds.
    if std::env::args().any(|a| a == "--test") {
        return;
    }
    if let Some(why) = ebb_testkit::skip_reason() {
        return println!("SKIPPED: {why}");
    }
    let mut disk = match Disk::new(2048) {
        Ok(disk) => disk,
        Err(why) => return println!("SKIPPED: no disk to slow down: {why}"),
    };
    let rate = number("EBB_BENCH_BACKING_MIB_S", 80) << 20;
    if let Err(why) = disk.throttle(rate) {
        return println!("SKIPPED: the disk cannot be slowed: {why}");
    }
    let work = Work {
        bursts: number("EBB_BENCH_BURSTS", 6),
        burst_mib: number("EBB_BENCH_BURST_MIB", 384),
        gap: Duration::from_millis(number("EBB_BENCH_GAP_MS", 1000)),
    };
    let mpi = mpi_program(disk.path().parent().expect("it is in a directory"));
    let mut report = Report::new(work, rate);
    let only = number("EBB_BENCH_NODES", 0);
    let wanted = std::env::var("EBB_BENCH_SHAPE").unwrap_or_default();
    for nodes in [1, 4].into_iter().filter(|n| only == 0 || only == *n as u64) {
        for shape in [Shape::Own, Shape::Shared, Shape::MpiOwn, Shape::MpiShared] {
            if shape.name().contains(&wanted) && (!shape.is_mpi() || mpi.is_some()) {
                compare(&disk, nodes, shape, work, mpi.as_deref(), &mut report);
            }
        }
    }
    report.save().expect("save");
}

/// Compiles the MPI program; none without an MPI.
fn mpi_program(dir: &Path) -> Option<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("mpi/phases.c");
    let program = dir.join("phases");
    let compiled =
        Command::new("mpicc").args(["-O2", "-Wall", "-o"]).arg(&program).arg(source).status();
    match compiled {
        Ok(status) if status.success() => Some(program),
        other => {
            println!("SKIPPED: MPI-IO ({other:?}; apt install mpich libmpich-dev)");
            None
        }
    }
}

fn compare(
    disk: &Disk,
    nodes: usize,
    shape: Shape,
    work: Work,
    mpi: Option<&Path>,
    report: &mut Report,
) {
    let tag = format!("{nodes}-{}", shape as u8);
    let clusters = POLICIES.map(|policy| {
        let backing = disk.path().join(format!("{tag}-{policy}"));
        std::fs::create_dir(&backing).expect("backing");
        let model = if shape.is_mpi() { "mpiio" } else { "session" };
        let builder = Cluster::builder().nodes(nodes).consistency(model).flush(policy);
        builder.option("--wait-interval", "200ms").backing(backing).start()
    });
    let run = |cluster: &Cluster| match mpi.filter(|_| shape.is_mpi()) {
        Some(program) => run_mpi(program, cluster, shape, work),
        None => run_threads(cluster, shape, work).0,
    };
    let settle = |cluster: &Cluster| cluster.nodes().iter().for_each(ebb_testkit::Node::drain);
    // Once for nothing: the files come into being, and to the backing.
    clusters.iter().for_each(|c| {
        run(c);
        settle(c);
    });
    let mut rates: [Vec<f64>; 3] = Default::default();
    for round in 0..rounds() {
        for turn in 0..POLICIES.len() {
            let which = (round + turn) % POLICIES.len();
            rates[which].push(run(&clusters[which]));
            settle(&clusters[which]);
        }
    }
    for ((policy, cluster), rates) in POLICIES.iter().zip(&clusters).zip(rates) {
        report.add(nodes, shape, policy, rates, stop_latency(cluster));
    }
    if shape == Shape::Own {
        for (policy, cluster) in POLICIES.iter().zip(&clusters) {
            let title = format!("{nodes} node(s), {}, {policy}", shape.name());
            report.panels.push(watched_run(cluster, shape, work, title));
            settle(cluster);
        }
    }
    clusters.iter().for_each(Cluster::umount_all);
    for policy in POLICIES {
        std::fs::remove_dir_all(disk.path().join(format!("{tag}-{policy}"))).expect("remove");
    }
}

/// A writer for each node; MiB per second of all bursts, and when they were.
fn run_threads(cluster: &Cluster, shape: Shape, work: Work) -> (f64, Vec<(f64, f64)>) {
    let nodes = cluster.nodes().len();
    let mib = work.burst_mib as usize / nodes;
    let (barrier, start) = (Barrier::new(nodes), Instant::now());
    let bursts = std::thread::scope(|scope| {
        let writers: Vec<_> = (0..nodes)
            .map(|rank| {
                let barrier = &barrier;
                scope.spawn(move || {
                    let (name, base) = match shape {
                        Shape::Shared => ("shared".to_owned(), rank * mib),
                        _ => (format!("own-{rank}"), 0),
                    };
                    let path = cluster.node(rank).path(name);
                    let data = vec![rank as u8 + 1; 1 << 20];
                    let mut times = Vec::new();
                    for _ in 0..work.bursts {
                        barrier.wait();
                        let from = start.elapsed().as_secs_f64();
                        let mut options = OpenOptions::new();
                        options.write(true).create(true).truncate(false);
                        let file = options.open(&path).expect("open");
                        for i in 0..mib {
                            file.write_all_at(&data, ((base + i) << 20) as u64).expect("write");
                        }
                        drop(file);
                        barrier.wait();
                        times.push((from, start.elapsed().as_secs_f64()));
                        std::thread::sleep(work.gap);
                    }
                    times
                })
            })
            .collect();
        let times = writers.into_iter().map(|w| w.join().expect("a writer"));
        times.fold(Vec::new(), |_, last| last)
    });
    let seconds: f64 = bursts.iter().map(|(from, to)| to - from).sum();
    ((work.bursts as usize * mib * nodes) as f64 / seconds, bursts)
}

/// Four ranks, spread over the nodes.
fn run_mpi(program: &Path, cluster: &Cluster, shape: Shape, work: Work) -> f64 {
    const RANKS: u64 = 4;
    let mut command = Command::new("mpiexec");
    command.args(["-n", &RANKS.to_string()]).arg(program);
    command.arg(if shape == Shape::MpiShared { "shared" } else { "own" });
    let mib = work.burst_mib / RANKS;
    command.args([work.bursts, mib, work.gap.as_millis() as u64].map(|n| n.to_string()));
    command.args(cluster.nodes().iter().map(ebb_testkit::Node::mountpoint));
    let output = command.output().expect("mpiexec");
    assert!(output.status.success(), "{}", ebb_testkit::describe(&output));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let seconds: Vec<f64> = text.lines().filter_map(|l| l.parse().ok()).collect();
    assert_eq!(seconds.len() as u64, work.bursts, "{text}");
    (work.bursts * mib * RANKS) as f64 / seconds.iter().sum::<f64>()
}

/// A status without starting a process: the measured machine has few processors.
fn status(socket: &Path) -> Value {
    let mut stream = UnixStream::connect(socket).expect("control socket");
    stream.write_all(b"{\"cmd\":\"status\"}\n").expect("request");
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).expect("answer");
    let event: Value = serde_json::from_str(&line).expect("JSON");
    event["body"].clone()
}

fn watched_run(cluster: &Cluster, shape: Shape, work: Work, title: String) -> Panel {
    let over = AtomicBool::new(false);
    let sockets: Vec<PathBuf> =
        cluster.nodes().iter().map(|n| n.cache().join("control.sock")).collect();
    let sum = |statuses: &[Value], at: &str| {
        statuses.iter().filter_map(|s| s.pointer(at)?.as_f64()).sum::<f64>()
    };
    let start = Instant::now();
    std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let (mut looks, mut first) = (Vec::new(), None);
            while !over.load(Ordering::Relaxed) {
                let seen: Vec<Value> = sockets.iter().map(|s| status(s)).collect();
                let flushed = sum(&seen, "/flushed_bytes");
                let since = *first.get_or_insert(flushed);
                looks.push(Look {
                    at: start.elapsed().as_secs_f64(),
                    dirty: sum(&seen, "/dirty_bytes"),
                    flushed: flushed - since,
                });
                std::thread::sleep(Duration::from_millis(50));
            }
            looks
        });
        let (_, bursts) = run_threads(cluster, shape, work);
        over.store(true, Ordering::Relaxed);
        Panel { title, bursts, looks: watcher.join().expect("the watcher") }
    })
}

/// Stops, p99 and longest of the slowest node, in milliseconds.
fn stop_latency(cluster: &Cluster) -> Option<(u64, f64, f64)> {
    let of = |node: &ebb_testkit::Node| {
        let latency = node.status()["flush"]["stop_latency"].clone();
        let ms = |key: &str| Some(latency[key].as_f64()? / 1e3);
        Some((latency["count"].as_u64()?, ms("p99_us")?, ms("max_us")?))
    };
    cluster.nodes().iter().filter_map(of).max_by(|a, b| a.1.total_cmp(&b.1))
}

struct Report {
    csv: String,
    table: String,
    panels: Vec<Panel>,
    none: f64,
}

impl Report {
    fn new(work: Work, rate: u64) -> Report {
        let table = format!(
            "# Foreground bandwidth under the flush policies\n\n{} bursts of {} MiB with gaps of \
             {} ms, files written over in place, backing limited to {} MiB/s, {} rounds in turn.\n\
             `end` flushes nothing meanwhile.\n\n\
             | nodes | files | policy | MiB/s | smallest | largest | of `end` | stops | p99 | longest |\n\
             |---|---|---|---|---|---|---|---|---|---|\n",
            work.bursts,
            work.burst_mib,
            work.gap.as_millis(),
            rate >> 20,
            rounds()
        );
        let csv = "nodes,files,policy,median,least,most,ratio,stops,stop_p99_ms,stop_max_ms\n";
        Report { csv: csv.to_owned(), table, panels: Vec::new(), none: 0.0 }
    }

    fn add(
        &mut self,
        nodes: usize,
        shape: Shape,
        policy: &str,
        rates: Vec<f64>,
        stops: Option<(u64, f64, f64)>,
    ) {
        let s = Spread::of(rates);
        if policy == "end" {
            self.none = s.median;
        }
        let ratio = s.median / self.none;
        let name = shape.name();
        let (count, p99, longest) = stops.unwrap_or_default();
        let _ = writeln!(
            self.csv,
            "{nodes},{name:?},{policy},{:.1},{:.1},{:.1},{ratio:.3},{count},{p99:.2},{longest:.2}",
            s.median, s.least, s.most
        );
        let line = format!(
            "| {nodes} | {name} | {policy} | {:.0} | {:.0} | {:.0} | {ratio:.3} | {count} | \
             {p99:.1} ms | {longest:.1} ms |",
            s.median, s.least, s.most
        );
        println!("{line}");
        let _ = writeln!(self.table, "{line}");
    }

    fn save(self) -> std::io::Result<()> {
        let dir = out_dir()?;
        let mut times = String::from("run,seconds,dirty_bytes,flushed_bytes\n");
        for panel in &self.panels {
            for look in &panel.looks {
                let (at, dirty, flushed) = (look.at, look.dirty, look.flushed);
                let _ = writeln!(times, "{:?},{at:.3},{dirty},{flushed}", panel.title);
            }
        }
        std::fs::write(dir.join("phases-time.csv"), times)?;
        std::fs::write(dir.join("phases.csv"), self.csv)?;
        std::fs::write(dir.join("phases.svg"), timeline::svg(&self.panels))?;
        let table = self.table + "\n![time-line](phases.svg)\n";
        std::fs::write(dir.join("phases.md"), table)?;
        println!("{}", dir.join("phases.md").display());
        Ok(())
    }
}
