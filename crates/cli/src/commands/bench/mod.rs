//! `ebb bench`: the workloads of the literature on mounts of this machine, under several models, in
//! interleaved rounds; a table, a CSV file and an HTML page. The patterns are in `ebb-workloads`;
//! here are the mounts, the order and what is said about the machine.

mod job;
mod machine;
mod plan;

use crate::exit::{Context, Failure};
use crate::models;
use ebb_links::{Network, Port};
use ebb_types::units::Size;
use ebb_workloads::Place;
use ebb_workloads::remote::Ends;
use ebb_workloads::report::Report;
use job::Job;
use plan::{Section, Variant, Work};
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Measure Ebb on this machine: shared files, checkpoints, training reads, small files, under
/// several models, with a report (table, CSV, HTML with charts)
#[derive(clap::Args)]
#[command(after_help = "Examples:
  ebb bench --quick                                     two minutes, two nodes
  ebb bench --nodes 1,2,4,8 --rounds 7 --out report     what a paper would show
  ebb bench --buffer /local/nvme --backing /lustre/me --workloads shared --naive
  ebb bench --buffer /local/nvme --backing /lustre/me --workloads pairs --nodes 2
  ebb bench --links 10gbit --workloads remote           nodes with links between them (root)

Each node is a daemon of this machine with a buffer of its own. Open OUT/report.html afterwards.")]
pub struct Args {
    /// Where the report goes
    #[arg(long, value_name = "DIR", default_value = "ebb-bench")]
    out: PathBuf,
    /// Directory in which the buffers and the bare files are made [default: the temporary one]
    #[arg(long, value_name = "DIR")]
    buffer: Option<PathBuf>,
    /// Directory in which the backings are made [default: the same]
    #[arg(long, value_name = "DIR")]
    backing: Option<PathBuf>,
    /// Models to compare
    #[arg(
        long,
        value_name = "M1,M2,...",
        value_delimiter = ',',
        default_value = "session,mpiio,commit,posix"
    )]
    models: Vec<String>,
    /// Measure every model a second time without leases and passthrough
    #[arg(long)]
    naive: bool,
    /// Numbers of nodes
    #[arg(long, value_name = "N1,N2,...", value_delimiter = ',', default_value = "1,2,4")]
    nodes: Vec<usize>,
    /// Processes on each node
    #[arg(long, value_name = "N", default_value_t = 1)]
    per_node: usize,
    /// Rounds that count, after one that does not
    #[arg(long, value_name = "N", default_value_t = 5)]
    rounds: u64,
    /// Accesses of each process to a shared file
    #[arg(long, value_name = "N", default_value_t = 10)]
    accesses: usize,
    /// Size of the large accesses, in B, KiB, MiB, GiB (the small ones have 8 KiB)
    #[arg(long, value_name = "SIZE", default_value = "8MiB")]
    large: Size,
    /// Workloads: single, files, shared, checkpoint, samples, remote, pairs
    #[arg(long, value_name = "W1,W2,...", value_delimiter = ',')]
    workloads: Vec<Section>,
    /// Give each node a network of its own, with links between them (needs root and iproute2); RATE
    /// as tc has it (10gbit), or as fast as they go
    #[arg(long, value_name = "RATE", num_args = 0..=1, default_missing_value = FREE)]
    links: Option<String>,
    /// Small amounts, three rounds, one and two nodes
    #[arg(long)]
    quick: bool,
}

/// Links of no particular rate.
const FREE: &str = "free";

/// More daemons than this are not a measurement of one machine any more.
const NODES_MAX: usize = 64;

impl Args {
    /// Runs the command.
    pub fn run(mut self) -> Result<(), Failure> {
        self.simplify()?;
        let variants = self.variants()?;
        std::fs::create_dir_all(&self.out).or_failed(self.out.display())?;
        let stop = Arc::new(AtomicBool::new(false));
        stop_on_signal(Arc::clone(&stop));
        let mut report = Report::new();
        for nodes in self.nodes.clone() {
            self.measure(nodes, &variants, &stop, &mut report)?;
        }
        self.write(&report, &variants)
    }

    fn simplify(&mut self) -> Result<(), Failure> {
        if self.quick {
            self.rounds = self.rounds.min(3);
            self.nodes.retain(|n| *n <= 2);
            self.large.0 = self.large.0.min(1 << 20);
        }
        let fits = |n: &usize| (1..=NODES_MAX).contains(n);
        if self.nodes.is_empty() || !self.nodes.iter().all(fits) {
            return Err(Failure::usage(format!("--nodes: numbers from 1 to {NODES_MAX}")));
        }
        if self.rounds == 0 || self.per_node == 0 || self.accesses == 0 || self.large.0 == 0 {
            let text = "--rounds, --per-node, --accesses and --large must not be 0";
            return Err(Failure::usage(text));
        }
        if self.workloads.is_empty() {
            self.workloads = Section::ALL.to_vec();
        }
        Ok(())
    }

    fn variants(&self) -> Result<Vec<Variant>, Failure> {
        let table = models::table("")?;
        let mut variants = Vec::new();
        for name in &self.models {
            models::known(&table, name, "--models")?;
            let Some(model) = table.get(name) else { continue };
            variants.push(Variant::of(&model, false));
            if self.naive {
                variants.push(Variant::of(&model, true));
            }
        }
        Ok(variants)
    }

    /// Everything that is measured with so many nodes: all mounts stand at once, so that the
    /// rounds of the variants can take turns.
    fn measure(
        &self,
        nodes: usize,
        variants: &[Variant],
        stop: &AtomicBool,
        report: &mut Report,
    ) -> Result<(), Failure> {
        let work: Vec<Work> = self.work(nodes);
        if work.is_empty() {
            return Ok(());
        }
        let base = self.buffer.clone().unwrap_or_else(std::env::temp_dir);
        let backing = self.backing.clone().unwrap_or_else(|| base.clone());
        let bare = job::Directory::new(&base, "bare")?;
        let beside = job::Directory::new(&backing, "beside")?;
        let unmounted = (bare.path(), beside.path());
        let network = self.network(nodes)?;
        let (network, host) = (network.as_ref(), network.as_ref().map(|n| n.host(Port::Node(0))));
        let enter = |node| network.map_or(Ok(()), |n| n.move_into(Port::Node(node)));
        let ends = match &host {
            Some(host) => Ends { host, enter: &enter },
            None => Ends::HERE,
        };
        let mut jobs = Vec::new();
        for variant in variants {
            say(&format!("mounting {nodes} node(s) under {}", variant.name));
            jobs.push(Job::start(variant, nodes, &base, &backing, network)?);
        }
        for item in &work {
            for round in 0..=self.rounds {
                say(&format!("{nodes} node(s): {} [{round}/{}]", item.name, self.rounds));
                let mut kept = |variant: &str, measures| {
                    // The first round warms memory, caches and connections up.
                    if round > 0 {
                        report.add(item.section.title(), &item.name, nodes, variant, measures);
                    }
                };
                if let Some(measures) = item.bare(unmounted, (nodes, self.per_node), round, ends) {
                    kept("bare directory", measures.or_failed(&item.name)?);
                }
                for (variant, job) in variants.iter().zip(&jobs) {
                    if stop.load(Ordering::Relaxed) {
                        return Err(Failure::with_status(130, "interrupted; nothing is written"));
                    }
                    let place = Place {
                        nodes: job.mounts(),
                        per_node: self.per_node,
                        publish: variant.publish,
                    };
                    let measures = item.on(&place, round);
                    kept(
                        &variant.name,
                        measures.or_failed(format!("{}: {}", variant.name, item.name))?,
                    );
                }
            }
        }
        say("");
        Ok(())
    }

    fn network(&self, nodes: usize) -> Result<Option<Network>, Failure> {
        let Some(rate) = &self.links else { return Ok(None) };
        let needs = "networks of their own need root and iproute2";
        let failed = |why| Failure::failed(format!("--links {rate}: {why} ({needs})"));
        let network = Network::new(nodes).map_err(failed)?;
        if rate != FREE {
            for node in 0..nodes {
                network.limit(Port::Node(node), rate).map_err(failed)?;
            }
        }
        Ok(Some(network))
    }

    fn work(&self, nodes: usize) -> Vec<Work> {
        let scale = plan::Scale {
            accesses: self.accesses,
            large: self.large.0 as usize,
            quick: self.quick,
        };
        self.workloads.iter().flat_map(|s| s.work(nodes, &scale)).collect()
    }

    fn write(&self, report: &Report, variants: &[Variant]) -> Result<(), Failure> {
        let buffer = self.buffer.clone().unwrap_or_else(std::env::temp_dir);
        let mut about = machine::about(&buffer);
        let links = self.links.as_deref().map(|rate| format!("links between the nodes ({rate})"));
        about.push(("network".into(), links.unwrap_or_else(|| "loopback".into())));
        about.push(("rounds".into(), self.rounds.to_string()));
        about.push(("processes per node".into(), self.per_node.to_string()));
        for v in variants {
            about.push((format!("under {}", v.name), v.options.join(" ")));
        }
        let put = |name: &str, text: String| {
            let path = self.out.join(name);
            std::fs::write(&path, text).or_failed(path.display())
        };
        put("report.csv", report.csv())?;
        put("report.html", report.html("Ebb on this machine", &about))?;
        println!("{}", report.table());
        println!("{}", self.out.join("report.html").display());
        Ok(())
    }
}

/// One line on a terminal that replaces the one before.
fn say(text: &str) {
    if std::io::stderr().is_terminal() {
        eprint!("\r\x1b[K{text}");
    }
}

/// An interrupt is noticed between two measurements, so that no mount is left behind.
fn stop_on_signal(stop: Arc<AtomicBool>) {
    std::thread::spawn(move || {
        let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
            return;
        };
        if runtime.block_on(tokio::signal::ctrl_c()).is_ok() {
            stop.store(true, Ordering::Relaxed);
        }
    });
}

/// A path as an argument.
fn text(path: &Path) -> String {
    path.display().to_string()
}
