//! The file system exerciser (crates.io `fsx`) on one mount under each model. It keeps its own
//! copy of what the file must hold and compares at every read.
//!
//! EBB_FSX_OPS: operations per seed. EBB_SEED: only this seed.

use ebb_testkit::Cluster;
use ebb_tests::content::same;
use ebb_tests::model::Model;
use ebb_tests::tools;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const SEEDS: [u64; 5] = [1, 20, 300, 4_000, 50_000];
const OPS: u64 = 3_000;

/// Every operation that fsx knows. Sizes go beyond the kernel's largest request and are aligned
/// to nothing.
const CONFIG: &str = "
flen = 1500000
[opsize]
min = 1
max = 250000
[weights]
close_open = 3
invalidate = 1
mapread = 10
mapwrite = 10
read = 10
write = 10
truncate = 5
fsync = 0.5
fdatasync = 0.5
posix_fallocate = 3
punch_hole = 5
sendfile = 5
posix_fadvise = 1
copy_file_range = 5
";

/// Small files and operations, where a mistake of one byte or one page shows soonest. Not of no
/// bytes at all: posix_fallocate answers EINVAL to those on every file system.
const CONFIG_SMALL: &str = "
flen = 20000
[opsize]
min = 1
max = 5000
[weights]
close_open = 5
invalidate = 2
mapread = 10
mapwrite = 10
read = 10
write = 10
truncate = 10
fsync = 1
posix_fallocate = 5
punch_hole = 10
sendfile = 5
copy_file_range = 10
";

fn seeds() -> Vec<u64> {
    match std::env::var("EBB_SEED") {
        Ok(seed) => vec![seed.parse().expect("EBB_SEED is a number")],
        Err(_) => SEEDS.to_vec(),
    }
}

/// Where a failed run leaves fsx's log and its copy of the file.
fn keep(artifacts: &Path, name: &str) -> PathBuf {
    let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/fsx-failures").join(name);
    std::fs::create_dir_all(&kept).expect("create");
    for file in std::fs::read_dir(artifacts).expect("list") {
        let file = file.expect("entry");
        std::fs::copy(file.path(), kept.join(file.file_name())).expect("copy");
    }
    kept
}

fn run_model(model: Model) {
    if !tools::available(&["fsx"]) {
        return;
    }
    let fsx = tools::find("fsx").expect("just found");
    let ops = tools::amount("EBB_FSX_OPS", OPS);
    let limit = Duration::from_secs(120) + Duration::from_millis(ops * 20);
    let cluster = Cluster::builder().nodes(1).consistency(model.name()).start();
    let node = &cluster.nodes()[0];
    for seed in seeds() {
        for (size, config) in [("large", CONFIG), ("small", CONFIG_SMALL)] {
            let name = format!("fsx-{}-{size}-{seed}", model.name());
            let artifacts = tempfile::tempdir().expect("tempdir");
            let settings = artifacts.path().join("fsx.toml");
            std::fs::write(&settings, config).expect("write");
            let mut command = Command::new(&fsx);
            command
                .args(["-N", &(ops / 2).to_string(), "-S", &seed.to_string()])
                .arg("-P")
                .arg(artifacts.path())
                .arg("-f")
                .arg(&settings)
                .arg(node.path(&name));
            let ended = tools::try_run(&mut command, limit).expect("fsx runs");
            println!("{name}: {} operations in {:?}", ops / 2, ended.time);
            if !ended.status.is_some_and(|s| s.success()) {
                let kept = keep(artifacts.path(), &name);
                let tail = &ended.err[ended.err.len().saturating_sub(3000)..];
                panic!(
                    "EBB_SEED={seed}, {}, {size}: {:?}\n{tail}\nfsx's log and copy: {}",
                    model.name(),
                    ended.status,
                    kept.display()
                );
            }
            let shown = std::fs::read(node.path(&name)).expect("read");
            node.drain();
            let drained = std::fs::read(cluster.backing().join(&name)).expect("read");
            same(&format!("{name} on the backing"), &drained, &shown);
        }
    }
}

#[test]
fn fsx_posix() {
    run_model(Model::Posix);
}

#[test]
fn fsx_commit() {
    run_model(Model::Commit);
}

#[test]
fn fsx_session() {
    run_model(Model::Session);
}

#[test]
fn fsx_mpiio() {
    run_model(Model::Mpiio);
}
