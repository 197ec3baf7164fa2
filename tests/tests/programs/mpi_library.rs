//! libebb-mpi: unmodified MPI programs with it preloaded. Collective calls do what MPI says, under every model, and
//! cost the service what nodes are, not what ranks are: counted, beside the same program without it.

use super::mpi::{LIMIT, compile, may_run, mounts, on_two_nodes, programs};
use ebb_testkit::{Cluster, ebb_binary};
use ebb_tests::tools::{run, shell, try_run};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const ALL: [&str; 5] = ["posix", "commit", "session", "mpiio", "romio"];

/// Beside the library that it needs.
fn build(into: &Path) -> PathBuf {
    let libebb = ebb_binary().parent().expect("a directory").join("libebb.so");
    std::fs::copy(&libebb, into.join("libebb.so")).unwrap_or_else(|e| {
        panic!("{}: {e}", libebb.display());
    });
    std::os::unix::fs::symlink("libebb.so", into.join("libebb.so.0")).expect("symlink");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace");
    run(Command::new(source.join("crates/ebb-api/mpi/build.sh")).arg(into), LIMIT);
    into.join("libebb-mpi-mpich.so")
}

fn with_tools(needed: &[&str], test: impl FnOnce(&Path, &Path)) {
    let all = [&["mpicc.mpich", "mpiexec.mpich", "unshare", "timeout"], needed].concat();
    if may_run(&all) {
        let scratch = tempfile::tempdir().expect("tempdir");
        let library = build(scratch.path());
        test(scratch.path(), &library);
    }
}

#[test]
fn one_sync_is_enough_under_every_model_and_all_else_is_as_ever() {
    with_tools(&[], |scratch, library| {
        let program = compile("mpicc.mpich", "collective.c", scratch);
        for model in ALL {
            on_two_nodes(model, &program, None, scratch, Some(library));
        }
    });
}

/// By handles, and by name where there are shared file pointers, which the MPI library keeps in a file beside the one
/// that was opened.
#[test]
fn programs_of_mpi_io_go_on_with_it() {
    with_tools(&[], |scratch, library| {
        let with_pointers = compile("mpicc.mpich", "mpiio.c", scratch);
        let source = scratch.join("plain.c");
        let text = programs().join("mpiio.c");
        let text = format!("#define NO_SHARED_POINTERS\n#include \"{}\"\n", text.display());
        std::fs::write(&source, text).expect("write");
        let plain = compile("mpicc.mpich", source.to_str().expect("UTF-8"), scratch);
        let parts = ["independent", "collective", "sieving", "mixed", "sizes", "atomic"];
        let plain = parts.map(|part| (&plain, part, "by a handle"));
        for (program, part, way) in
            plain.into_iter().chain([(&with_pointers, "shared", "by its name")])
        {
            let file = on_two_nodes("session", program, Some(part), scratch, Some(library));
            println!("{part}: {}", file.display());
            let said = opened(program, part, scratch, library);
            assert!(said.contains(way), "{part}: {said}");
        }
    });
}

/// What the library says of how it opens a file for one rank on each of two nodes.
fn opened(program: &Path, part: &str, scratch: &Path, library: &Path) -> String {
    let cluster = Cluster::builder().nodes(2).consistency("posix").token().start();
    let job = scratch.join("told");
    std::fs::create_dir_all(&job).expect("mkdir");
    let mut command = Command::new("mpiexec.mpich");
    command.args(["-n", "2"]).arg(programs().join("rank.sh")).arg("env");
    command.arg(format!("LD_PRELOAD={}", library.display())).arg("EBB_MPI_VERBOSE=1");
    command.arg(program).arg(part).arg(job.join("data"));
    command.env("EBB_JOB", &job).env("EBB_MOUNTS", mounts(&cluster));
    let ended = try_run(&mut command, LIMIT).expect("mpiexec can be started");
    assert!(ended.status.is_some_and(|s| s.success()), "{part}: {}", ended.err);
    cluster.umount_all();
    ended.err
}

#[test]
fn parallel_hdf5_goes_on_with_it() {
    with_tools(&["h5pcc.mpich", "h5dump"], |scratch, library| {
        let program = compile("h5pcc.mpich", "phdf5.c", scratch);
        for model in ALL {
            let file = on_two_nodes(model, &program, None, scratch, Some(library));
            let header = shell(scratch, &format!("h5dump -H '{}'", file.display()), LIMIT);
            assert!(header.contains("DATASET \"chunked\""), "{header}");
        }
    });
}

/// What all nodes have asked the service for: not what they ask without being asked, nor for who looks.
fn asked(cluster: &Cluster) -> BTreeMap<String, u64> {
    let mut all = BTreeMap::new();
    for node in cluster.nodes() {
        let status = node.status();
        for (name, n) in status["rpc"].as_object().expect("an object") {
            if !["heartbeat", "node_info", "returned"].contains(&name.as_str()) {
                *all.entry(name.clone()).or_default() += n.as_u64().expect("a number");
            }
        }
    }
    all
}

/// What was asked for between the two, and how often.
fn between(before: &BTreeMap<String, u64>, after: &BTreeMap<String, u64>) -> BTreeMap<String, u64> {
    let more = after.iter().map(|(name, n)| (name.clone(), n - before.get(name).unwrap_or(&0)));
    more.filter(|(_, n)| *n > 0).collect()
}

/// How many requests each phase of `collective FILE count` takes.
fn count(
    cluster: &Cluster,
    job: &Path,
    program: &Path,
    ranks: usize,
    library: Option<&Path>,
) -> Phases {
    // Nothing hangs for ever.
    let mut command = Command::new("timeout");
    command
        .args(["--signal=KILL", "120", "mpiexec.mpich", "-n", &ranks.to_string()])
        .arg(programs().join("rank.sh"));
    if let Some(library) = library {
        command
            .arg("env")
            .arg(format!("LD_PRELOAD={}", library.display()))
            .env("EBB_MPI_VERBOSE", "1");
    }
    command.arg(program).arg(job.join("data")).arg("count");
    command.env("EBB_JOB", job).env("EBB_MOUNTS", mounts(cluster));
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("mpiexec can be started");
    let (mut to, from) = (child.stdin.take().expect("piped"), child.stdout.take().expect("piped"));
    let (mut phases, mut before) = (Phases::new(), BTreeMap::new());
    for line in BufReader::new(from).lines() {
        let now = asked(cluster);
        let (phase, asked_for) = (line.expect("a line"), between(&before, &now));
        println!("{phase}: {asked_for:?}");
        phases.insert(phase, asked_for.values().sum());
        // What looking itself costs is no part of the next phase.
        before = asked(cluster);
        to.write_all(b"\n").expect("the program waits");
    }
    let ended = child.wait().expect("it ends");
    assert!(ended.success(), "{ended}");
    phases
}

type Phases = BTreeMap<String, u64>;

/// Of that many ranks on that many nodes, each time in a job of its own.
fn counted(program: &Path, ranks: usize, nodes: usize, library: Option<&Path>) -> Phases {
    let builder = Cluster::builder().nodes(nodes).consistency("posix").flush("end").token();
    let cluster = builder.option("--io-path", "daemon").start();
    let job = tempfile::tempdir().expect("tempdir");
    let phases = count(&cluster, job.path(), program, ranks, library);
    cluster.umount_all();
    let with = if library.is_some() { "with" } else { "without" };
    println!("{ranks} ranks on {nodes} nodes, {with}: {phases:?}");
    phases
}

#[test]
fn collective_calls_cost_less_than_without_it() {
    with_tools(&[], |scratch, library| {
        let program = compile("mpicc.mpich", "collective.c", scratch);
        let without = counted(&program, 12, 2, None);
        let with = counted(&program, 12, 2, Some(library));
        // Making a file, every rank looks for it first; each syncs for itself. What ranks open that is there their node
        // asks for once in any case.
        for (call, most) in [("open creating", 14), ("sync", 9)] {
            let (a, b) = (without[call], with[call]);
            assert!(b <= most && b * 3 <= a * 2, "{call}: {a} without, {b} with");
        }
        for counts in [without, with] {
            // One of each rank for the room on the file system alone were more.
            assert!(counts["open existing"] <= 14, "open existing: {counts:?}");
        }
    });
}

#[test]
fn collective_calls_cost_what_nodes_are_and_not_what_ranks_are() {
    with_tools(&[], |scratch, library| {
        let program = compile("mpicc.mpich", "collective.c", scratch);
        for (ranks, nodes) in [(2, 2), (16, 2), (4, 4), (16, 4)] {
            let counts = counted(&program, ranks, nodes, Some(library));
            let of_nodes = |call: &str, once: u64, each: u64| {
                let most = once + each * nodes as u64;
                assert!(counts[call] <= most, "{call}: {} of {most}: {counts:?}", counts[call]);
            };
            of_nodes("open creating", 4, 6);
            of_nodes("open existing", 2, 4);
            of_nodes("sync", 0, 2);
            of_nodes("set_size", 2, 0);
            of_nodes("preallocate", 4, 0);
            of_nodes("get_size", 1, 1);
            of_nodes("close", 0, 1);
        }
    });
}
