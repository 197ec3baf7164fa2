//! Real MPI-IO (Debian's mpich, ROMIO) and parallel HDF5 programs: ranks on two nodes use one file
//! under one path, each through its own node's mount. The programs check every byte themselves;
//! after the unmount the backing is compared with what the mount showed.

use ebb_testkit::{Cluster, Node};
use ebb_tests::copies::{clear, cluster, lose, wait_adopted};
use ebb_tests::tools::{available, run, shell};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

pub(crate) const LIMIT: Duration = Duration::from_secs(120);
const RANKS: &str = "4";
const ALL: [&str; 5] = ["posix", "commit", "session", "mpiio", "romio"];

pub(crate) fn programs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("programs")
}

pub(crate) fn compile(compiler: &str, source: &str, into: &Path) -> PathBuf {
    let program = into.join(source.trim_end_matches(".c"));
    let source = programs().join(source);
    // Where it leaves its object file.
    let mut command = Command::new(compiler);
    command.current_dir(into).args(["-O1", "-Wall", "-o"]).arg(&program).arg(source);
    run(&mut command, LIMIT);
    program
}

/// The mounts of all nodes, for `rank.sh`.
pub(crate) fn mounts(cluster: &Cluster) -> String {
    let mounts = cluster.nodes().iter().map(|n: &Node| n.path("").display().to_string());
    mounts.collect::<Vec<_>>().join(" ")
}

/// Runs `program` with its ranks spread over the nodes of `cluster`; they all know the mount as
/// the same path.
fn mpiexec(
    cluster: &Cluster,
    job: &Path,
    program: &Path,
    arguments: &[&str],
    preload: Option<&Path>,
) {
    let mut command = Command::new("mpiexec.mpich");
    command.args(["-n", RANKS]).arg(programs().join("rank.sh"));
    if let Some(library) = preload {
        command.arg("env").arg(format!("LD_PRELOAD={}", library.display()));
    }
    command.arg(program).args(arguments).env("EBB_JOB", job).env("EBB_MOUNTS", mounts(cluster));
    run(&mut command, LIMIT);
}

/// Runs the program under `model` and returns what the first node shows of `file` afterwards,
/// having compared it with the backing.
pub(crate) fn on_two_nodes(
    model: &str,
    program: &Path,
    part: Option<&str>,
    scratch: &Path,
    preload: Option<&Path>,
) -> PathBuf {
    let builder = Cluster::builder().nodes(2).consistency(model);
    // Without one there are no handles.
    let cluster = if preload.is_some() { builder.token() } else { builder }.start();
    let job = scratch.join("job");
    std::fs::create_dir_all(&job).expect("mkdir");
    let file = job.join("data");
    let file = file.to_str().expect("UTF-8");
    let arguments: Vec<&str> = part.into_iter().chain([file]).collect();
    mpiexec(&cluster, &job, program, &arguments, preload);
    let copy = scratch.join(format!("copy-{}", model));
    std::fs::copy(cluster.nodes()[1].path("data"), &copy).expect("copy");
    for node in cluster.nodes().iter().rev() {
        node.umount();
    }
    let backing = std::fs::read(cluster.backing().join("data")).expect("read the backing");
    assert!(backing == std::fs::read(&copy).expect("read"), "{model:?}: the backing differs");
    copy
}

/// A checkpoint of ranks on two nodes, under `--replicas 2`; then one of them is lost with its cache.
fn then_lose_a_node(model: &str, part: &str, program: &Path, scratch: &Path) {
    let cluster = cluster(2, model);
    let job = scratch.join(format!("job-{model}"));
    std::fs::create_dir_all(&job).expect("mkdir");
    let file = job.join("data");
    mpiexec(&cluster, &job, program, &[part, file.to_str().expect("UTF-8")], None);
    let (lost, other) = (cluster.node(0), cluster.node(1));
    // Through the node that is lost: the other one has no more than it had.
    let want = std::fs::read(lost.path("data")).expect("read");
    let dirty = |node: &Node| node.status()["dirty_bytes"].as_u64().expect("a number");
    let (theirs, own) = (dirty(lost), dirty(other));
    println!("{model}, {part}: {theirs} bytes on the node that is lost, {own} on the other");
    // All collective writes of one host go through its first rank.
    assert!(theirs > 0 && (own > 0 || part == "collective"), "{model}: {theirs}, {own}");
    lose(lost);
    assert!(std::fs::read(other.path("data")).expect("read") == want, "{model}: on the other node");
    wait_adopted(other, theirs);
    clear(lost);
    other.umount();
    let backing = std::fs::read(cluster.backing().join("data")).expect("read the backing");
    assert!(backing == want, "{model}: the backing differs");
}

pub(crate) fn may_run(needed: &[&str]) -> bool {
    // SAFETY: no arguments, no memory.
    let root = unsafe { libc::geteuid() } == 0;
    if !root {
        println!("SKIPPED: mount namespaces for the ranks need root");
    }
    root && available(needed)
}

fn mpi_io(part: &str, models: &[&str]) {
    if !may_run(&["mpicc.mpich", "mpiexec.mpich", "unshare"]) {
        return;
    }
    let scratch = tempfile::tempdir().expect("tempdir");
    let program = compile("mpicc.mpich", "mpiio.c", scratch.path());
    for model in models {
        on_two_nodes(model, &program, Some(part), scratch.path(), None);
    }
}

/// Sync, barrier, sync, through ROMIO, which leaves the reader's sync out (docs/semantics.md).
#[test]
fn independent_writes_with_sync() {
    mpi_io("independent", &["romio", "commit", "posix"]);
}

#[test]
fn collective_writes() {
    mpi_io("collective", &ALL);
}

/// Read-modify-write of stretches that hold other ranks' bytes, under byte-range locks.
#[test]
fn data_sieving() {
    mpi_io("sieving", &ALL);
}

/// The same of bytes that others have written without a lock, and not published.
#[test]
fn data_sieving_beside_plain_writes() {
    mpi_io("mixed", &ALL);
}

/// Sizes after sync, barrier, sync; and preallocation, which must lose nothing.
#[test]
fn sizes() {
    mpi_io("sizes", &["romio", "mpiio", "commit", "posix"]);
}

#[test]
fn atomic_mode() {
    mpi_io("atomic", &ALL);
}

#[test]
fn shared_file_pointers() {
    mpi_io("shared", &ALL);
}

#[test]
fn a_checkpoint_with_two_copies_survives_the_loss_of_a_node() {
    if !may_run(&["mpicc.mpich", "mpiexec.mpich", "unshare"]) {
        return;
    }
    let scratch = tempfile::tempdir().expect("tempdir");
    let program = compile("mpicc.mpich", "mpiio.c", scratch.path());
    for model in ["romio", "commit", "posix"] {
        then_lose_a_node(model, "independent", &program, scratch.path());
    }
    for model in ["session", "mpiio"] {
        then_lose_a_node(model, "collective", &program, scratch.path());
    }
}

#[test]
fn parallel_hdf5() {
    if !may_run(&["h5pcc.mpich", "mpiexec.mpich", "unshare", "h5dump"]) {
        return;
    }
    let scratch = tempfile::tempdir().expect("tempdir");
    let program = compile("h5pcc.mpich", "phdf5.c", scratch.path());
    for model in ALL {
        let file = on_two_nodes(model, &program, None, scratch.path(), None);
        let header = shell(scratch.path(), &format!("h5dump -H '{}'", file.display()), LIMIT);
        assert!(header.contains("DATASET \"chunked\""), "{header}");
    }
}
