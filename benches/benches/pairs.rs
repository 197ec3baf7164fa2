//! A producer and a consumer, two MPI programs that know nothing of Ebb: each step is one file, written collectively
//! by one and read collectively by the other, which compares every byte. How long it takes from the first step's
//! beginning until the last byte is compared:
//!
//! * `backing`: through a directory of a disk that is slower than the buffer. Files are synced (`MPI_File_sync`), and
//!   a second file says that one is there; what was read is removed. Reading it again costs nothing there: the kernel
//!   has it in memory. On a cluster it would come from the servers.
//! * `mount`: the same programs through mounts of two nodes (mpiio).
//! * `coupled`: the same mounts, a coupled directory (docs/coupling.md): no sync, no second file, nothing removed.
//!
//! Rounds in turn, medians. Writes `pairs.md` and `pairs.csv` to EBB_BENCH_OUT.
//! Variables: EBB_BENCH_ROUNDS, EBB_BENCH_STEPS, EBB_BENCH_STEP_MIB, EBB_BENCH_BACKING_MIB_S, EBB_BENCH_RANKS (of each
//! program).

use ebb_benches::{Spread, out_dir, rounds};
use ebb_testkit::{Cluster, Disk, Node, describe};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

#[derive(Clone, Copy)]
struct Work {
    steps: u64,
    mib: u64,
    ranks: u64,
}

/// How the two programs find each other.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    Backing,
    Mount,
    Coupled,
}

const WAYS: [Way; 3] = [Way::Backing, Way::Mount, Way::Coupled];

impl Way {
    fn name(self) -> &'static str {
        match self {
            Way::Backing => "backing",
            Way::Mount => "mount",
            Way::Coupled => "coupled",
        }
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
    let work = Work {
        steps: number("EBB_BENCH_STEPS", 6),
        mib: number("EBB_BENCH_STEP_MIB", 64),
        ranks: number("EBB_BENCH_RANKS", 2),
    };
    let mut disk = match Disk::new(2 * work.steps * work.mib + 512) {
        Ok(disk) => disk,
        Err(why) => return println!("SKIPPED: no disk to slow down: {why}"),
    };
    let rate = number("EBB_BENCH_BACKING_MIB_S", 80);
    if let Err(why) = disk.throttle(rate << 20) {
        return println!("SKIPPED: the disk cannot be slowed: {why}");
    }
    let dir = disk.path().parent().expect("it is in a directory").to_owned();
    let Some(program) = compiled(&dir) else { return };
    let [bare, backing] = ["bare", "ebb"].map(|name| disk.path().join(name));
    for dir in [&bare, &backing] {
        std::fs::create_dir(dir).expect("a directory");
    }
    let builder = Cluster::builder().nodes(2).consistency("mpiio").backing(backing);
    let cluster = builder.start();
    let mut report = Report::new(work, rate);
    for shape in ["particles", "patches"] {
        let mut seconds: [Vec<f64>; 3] = Default::default();
        for round in 0..=rounds() {
            for turn in 0..WAYS.len() {
                let at = (round + turn) % WAYS.len();
                let took = run(&program, &cluster, &bare, WAYS[at], shape, work);
                // The first round does not count.
                if round > 0 {
                    seconds[at].push(took);
                }
            }
        }
        report.add(shape, seconds);
    }
    report.save().expect("save");
    cluster.umount_all();
}

/// The program; none without an MPI.
fn compiled(dir: &Path) -> Option<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("mpi/pairs.c");
    let program = dir.join("pairs");
    let status =
        Command::new("mpicc").args(["-O2", "-Wall", "-o"]).arg(&program).arg(source).status();
    match status {
        Ok(status) if status.success() => Some(program),
        other => {
            println!("SKIPPED: no MPI ({other:?}; apt install mpich libmpich-dev)");
            None
        }
    }
}

/// Seconds until the last byte is compared. Afterwards nothing is left anywhere.
fn run(
    program: &Path,
    cluster: &Cluster,
    backing: &Path,
    way: Way,
    shape: &str,
    work: Work,
) -> f64 {
    let (a, b) = (cluster.node(0), cluster.node(1));
    let sides = match way {
        Way::Backing => [backing.join("pairs"), backing.join("pairs")],
        Way::Mount => [a.path("mounted"), b.path("mounted")],
        Way::Coupled => [a.path("coupled"), b.path("coupled")],
    };
    std::fs::create_dir(&sides[0]).expect("a directory");
    if way == Way::Coupled {
        // MPI-IO makes the file with an open of its own.
        let terms = format!("producers={} consumers={} wait=60s", work.ranks + 1, work.ranks);
        ebb::exchange::exchange(&sides[0], Some(&terms)).expect("a coupled directory");
    }
    let start = |role: &str, dir: &Path| {
        let mut command = Command::new("mpiexec");
        command.args(["-n", &work.ranks.to_string()]).arg(program).args([role, shape]);
        command.args([work.steps, work.mib].map(|n| n.to_string()));
        command.arg(if way == Way::Coupled { "plain" } else { "marks" }).arg(dir);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("mpiexec")
    };
    let programs = [start("consume", &sides[1]), start("produce", &sides[0])];
    let times = programs.map(|program| {
        let output = program.wait_with_output().expect("mpiexec");
        assert!(output.status.success(), "{}: {}", way.name(), describe(&output));
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let time = text.split_whitespace().nth(1).and_then(|time| time.parse::<f64>().ok());
        time.unwrap_or_else(|| panic!("{text}"))
    });
    released(cluster, &sides[0]);
    times[0] - times[1]
}

/// Both caches are as they were before.
fn released(cluster: &Cluster, dir: &Path) {
    let end = Instant::now() + Duration::from_secs(30);
    let is_empty = |node: &Node| node.status()["cache_bytes"].as_u64() == Some(0);
    let mut is_removed = false;
    loop {
        is_removed = is_removed || std::fs::remove_dir(dir).is_ok();
        if is_removed && cluster.nodes().iter().all(is_empty) {
            return;
        }
        assert!(Instant::now() < end, "{} is not released", dir.display());
        std::thread::sleep(Duration::from_millis(20));
    }
}

struct Report {
    csv: String,
    table: String,
}

impl Report {
    fn new(work: Work, rate: u64) -> Report {
        let table = format!(
            "# A producer and a consumer\n\n{} files of {} MiB, {} ranks each, collective MPI-IO, backing limited to \
             {rate} MiB/s, {} rounds in turn.\n\n\
             | parts | way | seconds | smallest | largest | times as fast as the backing |\n\
             |---|---|---|---|---|---|\n",
            work.steps,
            work.mib,
            work.ranks,
            rounds()
        );
        println!("{} MiB", work.steps * work.mib);
        Report { csv: "parts,way,median,least,most,ratio\n".to_owned(), table }
    }

    fn add(&mut self, shape: &str, seconds: [Vec<f64>; 3]) {
        let spreads = seconds.map(Spread::of);
        for (way, s) in WAYS.iter().zip(spreads) {
            let ratio = spreads[0].median / s.median;
            let name = way.name();
            let _ = writeln!(
                self.csv,
                "{shape},{name},{:.3},{:.3},{:.3},{ratio:.2}",
                s.median, s.least, s.most
            );
            let line = format!(
                "| {shape} | {name} | {:.2} | {:.2} | {:.2} | {ratio:.2} |",
                s.median, s.least, s.most
            );
            println!("{line}");
            let _ = writeln!(self.table, "{line}");
        }
    }

    fn save(self) -> std::io::Result<()> {
        let dir = out_dir()?;
        std::fs::write(dir.join("pairs.csv"), self.csv)?;
        std::fs::write(dir.join("pairs.md"), self.table)?;
        println!("{}", dir.join("pairs.md").display());
        Ok(())
    }
}
