//! What `ebb trace` costs a call: the same loops with and without the preloaded library, in turn.
//! Processor time, so that others on the machine do not count. `cargo bench -p ebb-benches --bench tracing`

use ebb_testkit::ebb_binary;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

/// Runs of each kind.
const TURNS: usize = 9;
const CALLS: u32 = 200_000;
const LEN: usize = 64;

/// Nanoseconds of processor time of this process.
fn processor() -> u64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: it writes the structure.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut t) };
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// The traced program: so many calls; prints what one costs.
fn work(kind: &str, path: &Path) {
    let open = || OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
    let mut file = open().expect("open");
    let mut bytes = [7u8; LEN];
    file.write_all_at(&bytes, 0).expect("write");
    let start = processor();
    for _ in 0..CALLS {
        match kind {
            "pwrite" => file.write_all_at(&bytes, 0).expect("write"),
            "pread" => file.read_exact_at(&mut bytes, 0).expect("read"),
            "write" => file.write_all(&bytes).expect("write"),
            // Two calls.
            _ => drop(File::open(path).expect("open")),
        }
    }
    println!("{}", (processor() - start) / u64::from(CALLS));
}

fn one(kind: &str, dir: &Path, turn: usize, is_traced: bool) -> u64 {
    let own = std::env::current_exe().expect("this program");
    let file = dir.join("file");
    let arguments = ["--work".as_ref(), kind.as_ref(), file.as_os_str()];
    let mut command = match is_traced {
        false => Command::new(own),
        true => {
            let mut command = Command::new(ebb_binary());
            command.arg("trace").arg("-o").arg(dir.join(format!("t{turn}")));
            command.args(["--mpicc", "none", "--"]).arg(own);
            command
        }
    };
    let output = command.args(arguments).output().expect("run");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.trim().parse().unwrap_or_else(|e| {
        panic!("{e}: {text} {}", String::from_utf8_lossy(&output.stderr));
    })
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, flag, kind, path] = &arguments[..]
        && flag == "--work"
    {
        return work(kind, Path::new(path));
    }
    println!("{:<14} {:>10} {:>10} {:>12}", "call", "plain ns", "traced ns", "more a call");
    for (kind, calls) in [("pwrite", 1), ("pread", 1), ("write", 1), ("open, close", 2)] {
        let dir = tempfile::tempdir().expect("tempdir");
        let mut times = [Vec::new(), Vec::new()];
        for turn in 0..TURNS {
            times[0].push(one(kind, dir.path(), turn, false));
            times[1].push(one(kind, dir.path(), turn, true));
        }
        let [plain, traced] = times.map(|mut t| {
            t.sort_unstable();
            t[TURNS / 2]
        });
        println!(
            "{kind:<14} {plain:>10} {traced:>10} {:>12}",
            traced.saturating_sub(plain) / calls
        );
    }
    let _ = std::io::stdout().flush();
}
