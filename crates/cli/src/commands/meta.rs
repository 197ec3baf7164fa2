//! `ebb meta`: the metadata service alone, in the foreground, for many nodes.

use crate::cachedir;
use crate::checks;
use crate::exit::{Context, Failure};
use crate::logging;
use crate::service::{Service, Start};
use ebb_transport::Secure;
use ebb_types::units::Span;
use std::path::PathBuf;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

/// Run the metadata service alone, for many nodes; ends at SIGTERM
#[derive(clap::Args)]
#[command(after_help = "Example:
  ebb meta --listen $(hostname):7400 --state /local/ebb-meta --token-file ~/job.token /lustre/proj/run7
then on every node
  ebb mount --meta HOST:7400 --listen $(hostname):7401 --token-file ~/job.token ...
When its state is lost and the 4 nodes of the job are still there:
  ebb meta --rebuild 4 --listen $(hostname):7400 --state /local/ebb-meta --token-file ~/job.token /lustre/proj/run7")]
pub struct Args {
    /// Where nodes reach it; port 0 takes a free one and says which
    #[arg(long, value_name = "HOST:PORT")]
    listen: String,
    /// Directory of its journal
    #[arg(long, value_name = "DIR")]
    state: PathBuf,
    /// The job's model: posix, commit, session or mpiio, without rules [default: what the first
    /// node says]
    #[arg(long, value_name = "MODEL")]
    consistency: Option<String>,
    /// The job's shared secret, made by `ebb token`; without it only loopback is served
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Which connections must be encrypted: on (all), loopback (all but those over loopback of this
    /// user's and root's processes) or off (none); the same for all of a job
    #[arg(long, value_name = "WHICH", env = "EBB_SECURE", default_value = "loopback")]
    secure: Secure,
    /// A node that is silent for so long counts as gone, in ms, s, m, h
    #[arg(long, value_name = "TIME", default_value = "10s")]
    lease: Span,
    /// Jobs that write to the backing at the same time, this one included: on Lustre the stripe
    /// count of new files is chosen from it [default: striping is left to the backing]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    jobs_hint: Option<u32>,
    /// Above so many inodes, those that are exactly as the backing has them are forgotten, and looked
    /// up there again; about 2 KB each
    #[arg(long, value_name = "N", default_value_t = 500_000, value_parser = clap::value_parser!(u32).range(1000..=1_000_000_000))]
    inodes_max: u32,
    /// Begin with what the nodes of the job know, so many of them, when the journal is lost or damaged
    /// (what is there of it is kept as journal.before-*): until they all have told, operations wait. Nodes
    /// that have not told by then are out of the job
    #[arg(long, value_name = "NODES", value_parser = clap::value_parser!(u32).range(1..=65_535))]
    rebuild: Option<u32>,
    /// What is logged: error, warn, info, debug or trace
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    log_level: String,
    /// Log file [default: standard error]
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// The backing directory, as seen from here
    backing: PathBuf,
}

impl Args {
    /// Runs the command.
    pub fn run(self) -> Result<(), Failure> {
        logging::start(&self.log_level, self.log.as_deref())?;
        checks::listen(&self.listen, self.token_file.as_deref(), "--listen")?;
        checks::secure(self.secure, self.token_file.as_deref())?;
        let backing = self.backing.canonicalize();
        let backing = backing.or_usage(format!("backing {}", self.backing.display()))?;
        if !backing.is_dir() {
            return Err(Failure::usage(format!("backing {}: not a directory", backing.display())));
        }
        let state = std::path::absolute(&self.state).or_usage(self.state.display())?;
        cachedir::prepare(&state)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(std::thread::available_parallelism().map_or(2, usize::from).max(2))
            .enable_all()
            .build()
            .or_failed("threads")?;
        let consistency = match &self.consistency {
            Some(name) => Some(crate::models::describe(name)?),
            None => None,
        };
        let start = Start {
            backing,
            state,
            consistency,
            token_file: self.token_file.as_deref(),
            secure: self.secure,
            lease: self.lease.0,
            jobs_hint: self.jobs_hint,
            inodes_max: self.inodes_max as usize,
            rebuild: self.rebuild,
        };
        let outcome = runtime.block_on(serve(start, &self.listen));
        runtime.shutdown_background();
        outcome
    }
}

async fn serve(start: Start<'_>, listen: &str) -> Result<(), Failure> {
    let mut terminate = signal(SignalKind::terminate()).or_failed("signals")?;
    let mut interrupt = signal(SignalKind::interrupt()).or_failed("signals")?;
    let addresses = checks::resolve(listen, "--listen")?;
    let listener = TcpListener::bind(addresses.as_slice()).await;
    let listener = listener.or_failed(format!("--listen {listen}"))?;
    let service = Service::start(start, listener, listen).await?;
    println!("ebb meta: listening on {}", service.address());
    service
        .until(async {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        })
        .await
}
