//! What many nodes cost the metadata service, phase by phase: clients in this process, the service in a
//! process of its own; figures are in docs/scale.md.
//!
//! `cargo bench -p ebb-benches --bench nodes -- --nodes 10,100,1000 --records 1000`

use clap::Parser;
use ebb_benches::nodes::pattern::Pattern;
use ebb_benches::nodes::phase::Phase;
use ebb_benches::nodes::{Settings, raise_descriptors, report, run};
use ebb_benches::out_dir;
use ebb_transport::Secure;
use ebb_types::units::Span;
use std::path::PathBuf;
use std::process::ExitCode;

/// What many nodes cost the metadata service, phase by phase
#[derive(Parser)]
struct Args {
    /// How many nodes; all phases with each
    #[arg(long, value_delimiter = ',', default_value = "10,40,160,640",
          value_parser = clap::value_parser!(u32).range(1..=10_000))]
    nodes: Vec<u32>,
    /// Records of each node in the shared file
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    records: u32,
    /// How they lie: strided or irregular
    #[arg(long, default_value = "strided")]
    pattern: Pattern,
    /// Phases to report [default: all]; what they need is run, too
    #[arg(long, value_delimiter = ',')]
    phases: Vec<Phase>,
    /// Which connections are encrypted; those of a real job, between machines, are by default
    #[arg(long, default_value = "on")]
    secure: Secure,
    /// `--lease` of the service: a long one for more nodes than this machine can send heartbeats of
    #[arg(long, default_value = "10s")]
    lease: Span,
    /// A phase that takes longer is cut short, and is the last one with so many nodes
    #[arg(long, default_value = "30s")]
    limit: Span,
    /// How long the idle phase is
    #[arg(long, default_value = "5s")]
    idle: Span,
    /// Where the figures go [default: nodes.json where the other benchmarks have theirs]
    #[arg(long)]
    json: Option<PathBuf>,
    /// Given by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

impl Args {
    fn settings(&self) -> Settings {
        let phases = if self.phases.is_empty() { Phase::ALL.to_vec() } else { self.phases.clone() };
        Settings {
            records: u64::from(self.records),
            pattern: self.pattern,
            phases,
            secure: self.secure,
            lease: self.lease.0,
            limit: self.limit.0,
            idle: self.idle.0,
        }
    }
}

fn main() -> ExitCode {
    match measure(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{e}");
            ExitCode::FAILURE
        }
    }
}

fn measure(args: &Args) -> Result<(), String> {
    let settings = args.settings();
    raise_descriptors(u64::from(args.nodes.iter().copied().max().unwrap_or(0)))?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|e| e.to_string())?;
    let mut rows = Vec::new();
    for &nodes in &args.nodes {
        rows.extend(runtime.block_on(run(&settings, nodes as usize, |m| {
            eprintln!("{} nodes, {}: {:.2} s", m.nodes, m.phase.word(), m.took.as_secs_f64());
        }))?);
    }
    print!("{}", report::tables(&settings, &rows));
    save(args, &settings, &rows).map_err(|e| format!("the figures cannot be stored: {e}"))
}

fn save(
    args: &Args,
    settings: &Settings,
    rows: &[ebb_benches::nodes::stage::Measured],
) -> std::io::Result<()> {
    let path = match &args.json {
        Some(path) => path.clone(),
        None => out_dir()?.join("nodes.json"),
    };
    std::fs::write(&path, format!("{:#}\n", report::json(settings, rows)))?;
    println!("\n{}", path.display());
    Ok(())
}
