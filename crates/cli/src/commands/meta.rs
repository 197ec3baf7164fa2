//! `ebb meta`: the metadata service alone, in the foreground, for many nodes.

use crate::cachedir;
use crate::checks;
use crate::exit::{Context, Failure};
use crate::logging;
use crate::service::{Service, Start, advertised};
use crate::standby::{Standby, Wish};
use ebb_coordinator::{CoordinatorError, Directory, Taken, Tenure, Term};
use ebb_meta_server::Fits;
use ebb_transport::Secure;
use ebb_transport::auth::Token;
use ebb_types::units::Span;
use std::path::PathBuf;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

/// A service that is there can be connected to within this time.
const ANSWERS_WITHIN: Duration = Duration::from_secs(3);

/// Run the metadata service alone, for many nodes; ends at SIGTERM
#[derive(clap::Args)]
#[command(after_help = "Example:
  ebb meta --listen $(hostname):7400 --state /local/ebb-meta --token-file ~/job.token /lustre/proj/run7
then on every node
  ebb mount --meta HOST:7400 --listen $(hostname):7401 --token-file ~/job.token ...
When its state is lost and the 4 nodes of the job are still there:
  ebb meta --rebuild 4 --listen $(hostname):7400 --state /local/ebb-meta --token-file ~/job.token /lustre/proj/run7
So that it can begin again on any machine, say where it is in a directory that all of them reach:
  ebb meta --coordinator dir:/lustre/proj/run7.ebb --listen $(hostname):7400 --state /local/ebb-meta ... /lustre/proj/run7
  ebb mount --meta dir:/lustre/proj/run7.ebb ...
and, on another machine, one that takes over by itself when that one is silent:
  ebb meta --standby --coordinator dir:/lustre/proj/run7.ebb --listen $(hostname):7400 --state /local/ebb-standby ...")]
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
    /// Directory that all nodes reach, and nobody else may write to (made when it is not there): this
    /// service says in it where it is, and nodes look for it there (`ebb mount --meta dir:DIR`). A service
    /// that begins later, on any machine, takes its place
    #[arg(long, value_name = "dir:DIR")]
    coordinator: Option<String>,
    /// Take the place of a service that still answers
    #[arg(long, requires = "coordinator")]
    take_over: bool,
    /// Keep a copy of the journal of the service that there is, on stable storage, and take its place when it
    /// ends or is silent for its lease (5 s at most)
    #[arg(long, requires = "coordinator", conflicts_with_all = ["rebuild", "take_over"])]
    standby: bool,
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
            tenure: Tenure::default(),
        };
        let way = match (self.standby, self.take_over) {
            (true, _) => Way::StandBy,
            (false, true) => Way::TakeOver,
            (false, false) => Way::Follow,
        };
        let place = self.coordinator.as_deref().map(|text| Place::parse(text, way));
        let outcome = runtime.block_on(serve(start, &self.listen, place.transpose()?));
        runtime.shutdown_background();
        outcome
    }
}

async fn serve(start: Start<'_>, listen: &str, place: Option<Place>) -> Result<(), Failure> {
    let mut terminate = signal(SignalKind::terminate()).or_failed("signals")?;
    let mut interrupt = signal(SignalKind::interrupt()).or_failed("signals")?;
    let addresses = checks::resolve(listen, "--listen")?;
    let listener = TcpListener::bind(addresses.as_slice()).await;
    let listener = listener.or_failed(format!("--listen {listen}"))?;
    let end = async {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    tokio::pin!(end);
    let Some(place) = place else {
        let service = Service::start(start, listener, listen).await?;
        println!("ebb meta: listening on {}", service.address());
        return service.until(end).await;
    };
    let address = advertised(listen, listener.local_addr().or_failed("listening")?);
    let token = start.token_file.map(Token::load).transpose().or_usage("--token-file")?;
    let taken = match place.way {
        Way::StandBy => {
            let lease = term_lease(&start);
            let (dir, state, secure) = (&place.dir, &start.state, start.secure);
            let (backing, consistency) = (start.backing.clone(), start.consistency.clone());
            let fits = Fits { backing, consistency };
            let wish = Wish { dir, state, fits, address: &address, token, secure, lease };
            let mut standby = Standby::new(wish)?;
            loop {
                let ready = tokio::select! {
                    ready = standby.ready() => ready?,
                    () = &mut end => return Ok(()),
                };
                if let Some(taken) = standby.take(ready).await {
                    break taken;
                }
            }
        }
        _ => place.take(&address, &start).await?,
    };
    let tenure = taken.tenure.clone();
    let number = taken.number();
    tokio::select! {
        alone = taken.alone() => if let Err(e) = alone {
            tenure.end();
            return Err(Failure::failed(format!("metadata service: {e}")));
        },
        () = &mut end => {
            tenure.end();
            return Ok(());
        }
    }
    let start = Start { tenure: tenure.clone(), ..start };
    let service = tokio::select! {
        started = Service::start(start, listener, listen) => started.inspect_err(|_| tenure.end())?,
        // It is not known what it was at: who comes next waits.
        () = &mut end => {
            tenure.give_up();
            return Ok(());
        }
    };
    println!("ebb meta: listening on {} (term {number})", service.address());
    // What it began may still be under way when it ends: it says itself when nobody need wait for that.
    let mut over = None;
    let until = async {
        tokio::select! {
            () = end => {}
            why = tenure.over() => over = Some(why),
        }
    };
    let ended = service.until(until).await;
    match over {
        Some(why) => Err(Failure::failed(format!("metadata service: {why}; this one has ended"))),
        None => ended,
    }
}

/// Where this service says that it is the job's.
#[derive(Debug)]
struct Place {
    dir: PathBuf,
    way: Way,
}

/// What it does about the service that is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// It begins when that one has ended, or does not answer.
    Follow,
    TakeOver,
    StandBy,
}

/// A directory of terms that cannot be read for longer makes a service stand still; a standby waits for as long.
const TERM_LEASE_MAX: Duration = Duration::from_secs(5);

fn term_lease(start: &Start<'_>) -> Duration {
    start.lease.min(TERM_LEASE_MAX)
}

impl Place {
    fn parse(text: &str, way: Way) -> Result<Place, Failure> {
        let dir = ebb_coordinator::directory_of(text).filter(|dir| dir.is_absolute());
        let dir = dir.ok_or_else(|| {
            Failure::usage(format!(
                "--coordinator {text}: not dir:DIR with a DIR that begins with /"
            ))
        })?;
        Ok(Place { dir: dir.to_owned(), way })
    }

    /// Takes the next term. What follows a service that did not end goes on with its state, or rebuilds it; and one
    /// that answers is not replaced without a word.
    async fn take(&self, address: &str, start: &Start<'_>) -> Result<Taken, Failure> {
        let named = |e: CoordinatorError| Failure::usage(format!("--coordinator: {e}"));
        if let Some(before) = self.not_ended().map_err(named)? {
            let (dir, term, at) = (self.dir.display(), before.number, &before.address);
            if start.rebuild.is_none() && !start.state.join("journal").exists() {
                return Err(Failure::usage(format!(
                    "--state {}: nothing is there, and the service before ({at}, term {term} in {dir}) has not ended: \
                     name its state, or rebuild it with --rebuild NODES (for another job another directory: \
                     --coordinator)",
                    start.state.display(),
                )));
            }
            if self.way != Way::TakeOver && !before.holder.is_dead() && answers(at).await {
                return Err(Failure::usage(format!(
                    "--coordinator dir:{dir}: something answers at {at}, where the service of term {term} is: end it, or \
                     say --take-over if this one is to take its place (also when it stands still)"
                )));
            }
        }
        let taken = ebb_coordinator::take(&self.dir, address, term_lease(start)).map_err(named)?;
        if let Some((before, most)) = taken.waits_for() {
            println!(
                "ebb meta: waiting up to {} s until the service of term {} at {} can answer nothing any more",
                most.as_secs_f64().ceil(),
                before.number,
                before.address
            );
        }
        Ok(taken)
    }

    /// The service before, unless it has said that it ended.
    fn not_ended(&self) -> Result<Option<Term>, CoordinatorError> {
        let Some(newest) = ebb_coordinator::newest_in(&self.dir)? else { return Ok(None) };
        let has_ended = Directory::open(&self.dir)?.has_ended(newest.number)?;
        Ok((!has_ended).then_some(newest))
    }
}

/// True when something can be connected to there.
async fn answers(address: &str) -> bool {
    let connected = tokio::time::timeout(ANSWERS_WITHIN, tokio::net::TcpStream::connect(address));
    matches!(connected.await, Ok(Ok(_)))
}
