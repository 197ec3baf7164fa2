//! Rates of small operations on a mount against the bare directory: create (with 4 KiB and close),
//! stat, list, unlink, by one process and by eight, in one directory and in one each.
//!
//! Beside Ebb stand daemons with nothing behind them (`hollow.rs`): one that asks nobody, which is
//! what FUSE leaves to any daemon, and some that ask a real metadata service for what Ebb asks today,
//! or for everything as before there were leases, on the stream or with unary calls.

use ebb_benches::asking::{Asked, Asker, Way};
use ebb_benches::crew::{Crew, Deed, was_worker};
use ebb_benches::hollow::Hollow;
use ebb_benches::{Report, rate, rounds};
use ebb_testkit::Cluster;
use std::path::{Path, PathBuf};

const CREWS: [Crew; 3] = [
    Crew { processes: 1, apart: false },
    Crew { processes: 8, apart: false },
    Crew { processes: 8, apart: true },
];

/// Files of a round. Those of the documentation are 10,000, which takes long.
fn files() -> usize {
    std::env::var("EBB_BENCH_FILES").ok().and_then(|f| f.parse().ok()).unwrap_or(1000)
}

/// `EBB_BENCH_PROCESSES` chooses those of so many processes.
fn crews() -> Vec<Crew> {
    let wanted = std::env::var("EBB_BENCH_PROCESSES").ok().and_then(|p| p.parse().ok());
    CREWS.into_iter().filter(|c| wanted.is_none_or(|w: usize| c.processes == w)).collect()
}

/// A directory to measure.
struct Side {
    name: &'static str,
    dir: PathBuf,
    asker: Option<Asker>,
}

/// Operations per second of a crew, one value for each round.
#[derive(Clone, Default)]
struct Rates {
    create: Vec<f64>,
    stat: Vec<f64>,
    list: Vec<f64>,
    unlink: Vec<f64>,
    /// Requests for a create.
    asked: f64,
}

impl Side {
    fn round(&self, crew: Crew, rates: &mut Rates) {
        let (files, dir) = (files(), self.dir.join("d"));
        crew.prepare(&dir);
        let before = self.asker.as_ref().map_or(0, Asker::asked);
        rates.create.push(crew.run(Deed::Create, &dir, files));
        let after = self.asker.as_ref().map_or(0, Asker::asked);
        rates.asked = (after - before) as f64 / files as f64;
        rates.stat.push(crew.run(Deed::Stat, &dir, files));
        if !crew.apart {
            rates.list.push(list(&dir));
        }
        rates.unlink.push(crew.run(Deed::Unlink, &dir, files));
        crew.clear(&dir);
    }
}

fn list(dir: &Path) -> f64 {
    rate(|| std::fs::read_dir(dir).expect("list").filter(Result::is_ok).count() as f64)
}

fn main() {
    if was_worker() {
        return;
    }
    let bare = tempfile::tempdir().expect("tempdir");
    let cluster = |model| Cluster::builder().consistency(model).flush("end").start();
    let clusters = [("session", cluster("session")), ("posix", cluster("posix"))];
    let service = tempfile::tempdir().expect("tempdir");
    let asked = Asked::start(service.path());
    let hollow = [
        ("hollow", None),
        ("hollow, asks on the stream", Some(asked.asker(Way::Stream, false))),
        ("hollow, unary calls", Some(asked.asker(Way::Unary, false))),
        ("hollow, all on the stream", Some(asked.asker(Way::Stream, true))),
        ("hollow, all as unary calls", Some(asked.asker(Way::Unary, true))),
    ];
    let points: Vec<_> = hollow.iter().map(|_| tempfile::tempdir().expect("tempdir")).collect();
    let mut sides = vec![Side { name: "bare", dir: bare.path().into(), asker: None }];
    sides.extend(clusters.iter().map(|(name, cluster)| {
        let dir = cluster.node(0).path("");
        Side { name, dir, asker: None }
    }));
    let mut mounted = Vec::new();
    for ((name, asker), at) in hollow.into_iter().zip(&points) {
        mounted.push(Hollow::mount(at.path(), asker.clone()).expect("a mount"));
        sides.push(Side { name, dir: at.path().into(), asker });
    }
    let mut report = Report::new("metadata");
    report.head("bare", "other");
    crews().into_iter().for_each(|crew| measure(&mut report, &sides, crew));
    println!("{}", report.save().expect("save").display());
}

/// All sides in turn, round by round, after one round that is thrown away.
fn measure(report: &mut Report, sides: &[Side], crew: Crew) {
    let mut rates = vec![Rates::default(); sides.len()];
    sides.iter().for_each(|side| side.round(crew, &mut Rates::default()));
    for _ in 0..rounds() {
        for (side, rates) in sides.iter().zip(&mut rates) {
            side.round(crew, rates);
        }
    }
    let (bare, others) = rates.split_first().expect("the bare directory");
    // What it is, of whom, and whether asking is part of it.
    let lines: [(&str, fn(&Rates) -> &Vec<f64>, bool); 4] = [
        (Deed::Create.name(), |r| &r.create, true),
        (Deed::Stat.name(), |r| &r.stat, false),
        ("readdir", |r| &r.list, false),
        (Deed::Unlink.name(), |r| &r.unlink, true),
    ];
    for (what, of, asks) in lines.into_iter().filter(|(_, of, _)| !of(bare).is_empty()) {
        let shown = sides[1..].iter().zip(others).filter(|(side, _)| asks || side.asker.is_none());
        for (side, rates) in shown {
            let label = format!("{}: {what}, {}", side.name, crew.name());
            report.add(label, "op/s", of(bare).clone(), of(rates).clone());
        }
    }
    for (side, rates) in sides[1..].iter().zip(others).filter(|(_, r)| r.asked > 0.0) {
        println!("{}: {:.2} requests for a create", side.name, rates.asked);
    }
}
