//! Runs the metadata service, inside a daemon or on its own.

use crate::checks;
use crate::exit::{Context, Failure};
use crate::plan::{Plan, host_name};
use ebb_coordinator::Tenure;
use ebb_fs_client::MetaAt;
use ebb_meta_server::{Config, JournalError, Server, StartError};
use ebb_transport::Secure;
use ebb_transport::auth::Token;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Ports that are tried after the one that the daemon itself listens on.
const NEXT_PORTS: u16 = 64;
/// In the directory of its state: where it listened last.
const ADDRESS: &str = "address";
/// How often a service that stays for other nodes looks whether they have left.
const LINGER_INTERVAL: Duration = Duration::from_millis(200);

/// What a service is started with.
pub struct Start<'a> {
    /// The backing directory.
    pub backing: PathBuf,
    /// Where its journal is.
    pub state: PathBuf,
    /// The job's model and rules, as every node must name them; none: the first node decides.
    pub consistency: Option<String>,
    /// File with the job's secret.
    pub token_file: Option<&'a Path>,
    /// Which connections must be encrypted.
    pub secure: Secure,
    /// How long a silent node counts as there.
    pub lease: Duration,
    /// Jobs that write to the backing at the same time.
    pub jobs_hint: Option<u32>,
    /// Above so many inodes, clean ones are forgotten.
    pub inodes_max: usize,
    /// The state is rebuilt from what so many nodes know.
    pub rebuild: Option<u32>,
    /// Until when it may answer.
    pub tenure: Tenure,
}

/// A service that listens.
pub struct Service {
    server: Arc<Server>,
    address: String,
    /// Where it listens, in numbers.
    pub bound: SocketAddr,
    stop: oneshot::Sender<()>,
    serving: JoinHandle<Result<(), String>>,
}

impl Service {
    /// The service inside a daemon: listens on the daemon's host, where the one before it did if it can.
    /// `before`: where that is in the hands of this daemon.
    pub fn embedded(runtime: &Runtime, plan: &Plan, before: &str) -> Result<Service, Failure> {
        let config = &plan.config;
        let start = Start {
            backing: config.backing.clone(),
            state: config.state.clone(),
            consistency: Some(crate::models::job_text(config)?),
            token_file: config.token_file.as_deref(),
            secure: config.secure,
            lease: Config::LEASE,
            jobs_hint: plan.jobs_hint,
            inodes_max: plan.inodes_max,
            rebuild: None,
            tenure: Tenure::default(),
        };
        let addresses = checks::resolve(&config.listen, "--listen")?;
        runtime.block_on(async {
            let listener = match before {
                "" => match where_it_was(&config.state, &addresses).await {
                    Some(listener) => Ok(listener),
                    None => next_free(&addresses).await,
                },
                before => TcpListener::bind(before).await,
            };
            let listener = listener
                .or_failed(format!("metadata service on the host of --listen {}", config.listen))?;
            let service = Service::start(start, listener, &config.listen).await?;
            note_address(&config.state, service.bound);
            Ok(service)
        })
    }

    /// Opens the state and serves on `listener`. Others reach it under the host of `listen`.
    pub async fn start(
        start: Start<'_>,
        listener: TcpListener,
        listen: &str,
    ) -> Result<Service, Failure> {
        let token = start.token_file.map(Token::load).transpose().or_usage("--token-file")?;
        let port = listener.local_addr().or_failed("listening")?;
        let state = start.state.clone();
        let config = Config {
            backing: start.backing,
            state_dir: start.state,
            token,
            secure: start.secure,
            consistency: start.consistency,
            lease: start.lease,
            trust: Config::TRUST,
            publishes_within: Config::PUBLISHES_WITHIN,
            jobs_hint: start.jobs_hint,
            inodes_max: start.inodes_max,
            rebuild: start.rebuild,
            tenure: start.tenure,
        };
        // It looks at the backing, and may have to wait.
        let opened = tokio::task::spawn_blocking(move || Server::open(config)).await;
        let server = opened.or_failed("metadata service")?.map_err(|e| refusal(&e, &state))?;
        let (stop, stopped) = oneshot::channel();
        let until = async {
            let _ = stopped.await;
        };
        let served = Arc::clone(&server);
        let serving =
            tokio::spawn(
                async move { served.serve(listener, until).await.map_err(|e| e.to_string()) },
            );
        let address = advertised(listen, port);
        tracing::info!("metadata service listens on {address}");
        Ok(Service { server, address, bound: port, stop, serving })
    }

    /// Where the daemon that it is in reaches it.
    #[must_use]
    pub fn at(&self) -> MetaAt {
        MetaAt { address: self.address.clone(), side_door: Some(self.server.side_door()) }
    }

    /// Where others reach it.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Waits until every node but this daemon's own has left (or its lease has run out), then
    /// ends the service; `tell` hears for whom it stays. True when nobody can need its journal any
    /// more.
    pub async fn linger(self, own: &str, tell: impl Fn(&str)) -> bool {
        let mut said = String::new();
        loop {
            let nodes = self.server.status().nodes;
            let there = nodes.into_iter().filter(|n| n.alive && n.name != own).map(|n| n.name);
            let names = there.collect::<Vec<_>>().join(", ");
            if names.is_empty() || self.serving.is_finished() {
                break;
            }
            if names != said {
                tracing::info!("the mount is gone; the metadata service stays for: {names}");
                tell(&names);
                said = names;
            }
            tokio::time::sleep(LINGER_INTERVAL).await;
        }
        let status = self.server.status();
        match self.end().await {
            Ok(()) => tracing::info!("metadata service ended"),
            Err(e) => tracing::error!("{e}"),
        }
        status.nodes.is_empty() && status.unflushed_bytes == 0 && status.errors.is_empty()
    }

    /// Serves until `end` comes, or until it fails.
    pub async fn until(mut self, end: impl Future<Output = ()>) -> Result<(), Failure> {
        tokio::select! {
            () = end => {}
            ended = &mut self.serving => {
                return Err(Failure::failed(format!("metadata service ended by itself: {ended:?}")));
            }
        }
        self.end().await
    }

    /// Ends the service: no new requests, and the journal is on stable storage.
    async fn end(self) -> Result<(), Failure> {
        let _ = self.stop.send(());
        let served = self.serving.await.or_failed("metadata service")?;
        let server = self.server;
        let closed = tokio::task::spawn_blocking(move || server.shutdown()).await;
        closed.or_failed("metadata service")?;
        served.or_failed("metadata service")
    }
}

/// Why a service does not start, as the user can mend it.
fn refusal(error: &StartError, state: &Path) -> Failure {
    let text = format!("metadata service: {error}");
    let state = state.display();
    match error {
        StartError::OtherBacking { .. } | StartError::Consistency { .. } => {
            Failure::usage(format!(
                "{text} (what {state} holds is of another job: name another --state, or remove that \
             directory when the job is over)"
            ))
        }
        StartError::Journal(JournalError::Damaged { .. } | JournalError::Header { .. }) => {
            Failure::failed(format!(
                "{text}; with the nodes of the job alive, `ebb meta --rebuild NODES` begins anew with what \
                 they know (the journal is kept)"
            ))
        }
        StartError::NeedsToken { .. } => Failure::usage(text),
        StartError::Journal(JournalError::Locked { .. }) => Failure::usage(text),
        _ => Failure::failed(text),
    }
}

/// Other nodes look for the job's service where it was, also after its whole node was down: where its state
/// says, on one of the addresses that it may have.
async fn where_it_was(state: &Path, addresses: &[SocketAddr]) -> Option<TcpListener> {
    let before: SocketAddr =
        std::fs::read_to_string(state.join(ADDRESS)).ok()?.trim().parse().ok()?;
    if !addresses.iter().any(|address| address.ip() == before.ip()) {
        return None;
    }
    match TcpListener::bind(before).await {
        Ok(listener) => Some(listener),
        Err(e) => {
            tracing::warn!(
                error = %e,
                "the metadata service was at {before} and cannot listen there again: nodes that are mounted \
                 will not find it"
            );
            None
        }
    }
}

fn note_address(state: &Path, bound: SocketAddr) {
    if let Err(e) = std::fs::write(state.join(ADDRESS), format!("{bound}\n")) {
        tracing::warn!(error = %e, "where the metadata service listens is not noted");
    }
}

/// Listens on the next free port after the given ones, or on any when they leave it open.
async fn next_free(addresses: &[SocketAddr]) -> std::io::Result<TcpListener> {
    let mut last = std::io::Error::from(std::io::ErrorKind::AddrNotAvailable);
    for address in addresses {
        let ports = match address.port() {
            0 => 0..=0,
            port => port.saturating_add(1)..=port.saturating_add(NEXT_PORTS),
        };
        for port in ports {
            match TcpListener::bind(SocketAddr::new(address.ip(), port)).await {
                Ok(listener) => return Ok(listener),
                Err(e) => last = e,
            }
        }
    }
    Err(last)
}

/// The host as the user named it, so that a name stays a name; an address that means "every
/// interface" says nothing to others, who get this machine's name.
pub fn advertised(listen: &str, bound: SocketAddr) -> String {
    let host = listen.rsplit_once(':').map_or(listen, |(host, _)| host);
    let is_any = host
        .trim_matches(['[', ']'])
        .parse::<std::net::IpAddr>()
        .is_ok_and(|ip| ip.is_unspecified());
    if host.is_empty() || is_any {
        return format!("{}:{}", host_name(), bound.port());
    }
    format!("{host}:{}", bound.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_service_listens_where_it_was_when_that_is_free_and_its_own() {
        let state = tempfile::tempdir().unwrap();
        let here = [SocketAddr::from(([127, 0, 0, 1], 0))];
        assert!(where_it_was(state.path(), &here).await.is_none(), "nothing is known");
        let first = next_free(&here).await.unwrap();
        let before = first.local_addr().unwrap();
        note_address(state.path(), before);
        assert!(where_it_was(state.path(), &here).await.is_none(), "it is taken");
        drop(first);
        let again = where_it_was(state.path(), &here).await.expect("it is free");
        assert_eq!(again.local_addr().unwrap(), before);
        drop(again);
        let elsewhere = [SocketAddr::from(([127, 0, 0, 2], 0))];
        assert!(where_it_was(state.path(), &elsewhere).await.is_none(), "another host");
        std::fs::write(state.path().join(ADDRESS), b"\xff127.0.0.1:1").unwrap();
        assert!(where_it_was(state.path(), &here).await.is_none(), "nonsense");
    }

    #[test]
    fn others_are_told_a_host_they_can_reach() {
        let bound: SocketAddr = "127.0.0.1:7401".parse().unwrap();
        assert_eq!(advertised("node1:7400", bound), "node1:7401");
        assert_eq!(advertised("[::1]:0", bound), "[::1]:7401");
        assert_eq!(advertised("0.0.0.0:0", bound), format!("{}:7401", host_name()));
        assert_eq!(advertised("[::]:0", bound), format!("{}:7401", host_name()));
    }

    #[test]
    fn the_next_free_port_is_taken() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let first = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let taken = first.local_addr().unwrap();
            let before = SocketAddr::new(taken.ip(), taken.port() - 1);
            let next = next_free(&[before]).await.unwrap().local_addr().unwrap();
            assert!(next.port() > taken.port(), "{next} after {taken}");
            let any = next_free(&["127.0.0.1:0".parse().unwrap()]).await.unwrap();
            assert_ne!(any.local_addr().unwrap().port(), 0);
        });
    }
}
