//! Rates of small operations on a mount against the bare directory: create (with 4 KiB and
//! close), stat, list, unlink, with one and eight threads.

use ebb_benches::{Report, rate};
use ebb_testkit::Cluster;
use std::path::{Path, PathBuf};

const FILES: usize = 400;

fn each(dir: &Path, threads: usize, work: impl Fn(PathBuf) + Sync) -> f64 {
    rate(|| {
        std::thread::scope(|scope| {
            for t in 0..threads {
                let work = &work;
                scope.spawn(move || {
                    for i in (t..FILES).step_by(threads) {
                        work(dir.join(format!("f{i}")));
                    }
                });
            }
        });
        FILES as f64
    })
}

fn main() {
    let mut report = Report::new("metadata");
    report.head("bare", "mount");
    for model in ["session", "posix"] {
        let cluster = Cluster::builder().nodes(1).consistency(model).flush("end").start();
        let bare_dir = tempfile::tempdir().expect("tempdir");
        let (bare, mount) = (bare_dir.path().to_path_buf(), cluster.nodes()[0].path(""));
        for threads in [1, 8] {
            let create =
                |dir: &Path| each(dir, threads, |p| std::fs::write(p, [7; 4096]).expect("write"));
            let unlink =
                |dir: &Path| each(dir, threads, |p| std::fs::remove_file(p).expect("unlink"));
            let stat = |dir: &Path| {
                each(dir, threads, |p| {
                    std::fs::symlink_metadata(p).expect("stat");
                })
            };
            let label = |what: &str| format!("{model}: {what}, {threads} threads");
            report.compare(
                label("create+write 4 KiB+close"),
                "op/s",
                || {
                    let speed = create(&bare);
                    unlink(&bare);
                    speed
                },
                || {
                    let speed = create(&mount);
                    unlink(&mount);
                    speed
                },
            );
            create(&bare);
            create(&mount);
            report.compare(label("stat"), "op/s", || stat(&bare), || stat(&mount));
            let list = |dir: &Path| {
                rate(|| std::fs::read_dir(dir).expect("list").filter(Result::is_ok).count() as f64)
            };
            report.compare(label("readdir"), "names/s", || list(&bare), || list(&mount));
            report.compare(
                label("unlink"),
                "op/s",
                || {
                    let speed = unlink(&bare);
                    create(&bare);
                    speed
                },
                || {
                    let speed = unlink(&mount);
                    create(&mount);
                    speed
                },
            );
            unlink(&bare);
            unlink(&mount);
        }
    }
    println!("{}", report.save().expect("save").display());
}
