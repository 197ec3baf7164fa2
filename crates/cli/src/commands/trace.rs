//! `ebb trace`: runs a command with the library preloaded that writes its calls on files down.

use super::run::{Signals, run_with};
use crate::exit::{Context, Failure};
use ebb_trace_format::Call;
use ebb_types::units::Size;
use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const LIBRARY: &str = "libebb_trace.so";
const MPI_LIBRARY: &str = "libebb_trace_mpi.so";
const MPI_SOURCE: &str = include_str!("../../../preload/mpi/ebb_trace_mpi.c");
/// What a compiler wrapper of MPI is called when nobody says.
const MPICC: &str = "mpicc";

/// Run CMD and write down what it does to files and what orders its processes; exits with CMD's
/// status (128 + signal when one killed it)
#[derive(clap::Args)]
#[command(
    args_override_self = true,
    after_help = "No mount is needed: CMD can work in any file system. What is recorded is the C library's calls on
regular files, processes that are made and waited for, locks, and of MPI programs messages and
collective calls. For these a small library is built with the MPI compiler that built the program.

Examples:
  ebb trace -o trace -- mpiexec -n 4 ./solver
  ebb trace -o trace --mpicc mpicc.openmpi -- mpirun -n 4 ./solver
  ebb trace -o trace -- ./pipeline.sh
  ebb check trace"
)]
pub struct Args {
    /// Directory for the trace, one file per process and program: made, or empty; all hosts must
    /// reach it under this path
    #[arg(short = 'o', long = "output", value_name = "DIR")]
    output: PathBuf,
    /// The MPI compiler that built the program, or `none` [default: mpicc, if there is one]
    #[arg(long, value_name = "CC")]
    mpicc: Option<OsString>,
    /// Command and arguments, after `--`
    #[arg(last = true, required = true, value_name = "CMD")]
    command: Vec<OsString>,
}

impl Args {
    /// Runs the command; its exit status.
    pub fn run(self) -> Result<u8, Failure> {
        let library = library()?;
        let dir = prepared(&self.output)?;
        let mut preload = vec![library.into_os_string()];
        if let Some(compiler) = compiler(self.mpicc) {
            preload.insert(0, mpi_library(&dir, &compiler)?.into_os_string());
        }
        if let Some(already) = std::env::var_os("LD_PRELOAD").filter(|v| !v.is_empty()) {
            preload.push(already);
        }
        let environment = [
            ("EBB_TRACE_DIR", dir.clone().into_os_string()),
            ("LD_PRELOAD", preload.join(&OsString::from(":"))),
        ];
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .or_failed("threads")?;
        let status = runtime.block_on(async {
            let mut signals = Signals::new().or_failed("signals")?;
            run_with(&self.command, &environment, &mut signals).await
        })?;
        say_what_is_there(&dir);
        Ok(status)
    }
}

/// The preloaded library is beside this program, or in the lib directory beside that of this program.
fn library() -> Result<PathBuf, Failure> {
    let program = std::env::current_exe().or_failed("/proc/self/exe")?;
    let beside = program.parent().unwrap_or(Path::new("/"));
    let places = [beside.join(LIBRARY), beside.join("../lib/ebb").join(LIBRARY)];
    places.iter().find(|p| p.is_file()).cloned().ok_or_else(|| {
        let [first, second] = &places;
        Failure::usage(format!(
            "{}: not found, nor {} (`make build` makes it; install it beside {})",
            first.display(),
            second.display(),
            program.display()
        ))
    })
}

/// The directory of the trace: new, or empty.
fn prepared(dir: &Path) -> Result<PathBuf, Failure> {
    let shown = dir.display();
    fs::create_dir_all(dir).or_usage(&shown)?;
    let dir = fs::canonicalize(dir).or_usage(&shown)?;
    if fs::read_dir(&dir).or_usage(&shown)?.next().is_some() {
        return Err(Failure::usage(format!(
            "{shown}: is not empty: a trace needs a directory of its own (remove it, or name another one)"
        )));
    }
    // In a list of libraries these would end a name.
    if dir.as_os_str().as_bytes().iter().any(|b| matches!(b, b':' | b' ')) {
        return Err(Failure::usage(format!(
            "{shown}: a path with colons or spaces cannot be used here"
        )));
    }
    Ok(dir)
}

fn compiler(asked: Option<OsString>) -> Option<OsString> {
    match asked {
        Some(name) if name == "none" => None,
        Some(name) => Some(name),
        None => {
            let paths = std::env::var_os("PATH").unwrap_or_default();
            let found = std::env::split_paths(&paths).any(|dir| dir.join(MPICC).is_file());
            found.then(|| MPICC.into())
        }
    }
}

/// Builds the part that knows MPI, in the directory of the trace.
fn mpi_library(dir: &Path, compiler: &OsString) -> Result<PathBuf, Failure> {
    let (source, made) = (dir.join("ebb_trace_mpi.c"), dir.join(MPI_LIBRARY));
    fs::write(&source, MPI_SOURCE).or_failed(source.display())?;
    let mut command = Command::new(compiler);
    command.args(["-shared", "-fPIC", "-O2", "-w", "-Wl,--as-needed"]);
    for call in Call::ALL.iter().filter(|c| c.name().starts_with("MPI_")) {
        command.arg(format!("-DCALL_{}={}", call.name(), *call as u8));
    }
    command.arg("-o").arg(&made).arg(&source).args(["-ldl", "-lpthread"]);
    let shown = compiler.to_string_lossy();
    let output = command.output().map_err(|e| {
        Failure::usage(format!(
            "{shown}: {e} (--mpicc names the MPI compiler, `none` does without)"
        ))
    })?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(Failure::usage(format!(
            "{shown}: the library that traces MPI cannot be built (`--mpicc none` does without):\n{said}"
        )));
    }
    Ok(made)
}

fn say_what_is_there(dir: &Path) {
    let shown = dir.display();
    match ebb_trace_check::count(dir) {
        Ok(counts) => {
            for what in &counts.damaged {
                eprintln!("ebb: {what}");
            }
            eprintln!(
                "ebb: {shown}: {} process(es), {} records, {}; `ebb check {shown}` looks for races",
                counts.processes,
                counts.records,
                Size(counts.bytes)
            );
        }
        Err(e) => eprintln!(
            "ebb: {e}: nothing was recorded; statically linked and setuid programs cannot be traced"
        ),
    }
}
