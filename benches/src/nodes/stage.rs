//! A service, its nodes and who watches: runs phases one after the other and measures each.

use super::Settings;
use super::crowd::{self, Introduction, Tally, each};
use super::pattern::Layout;
use super::phase::Phase;
use super::probe::{Probe, make_file};
use super::service::Service;
use super::traffic::{Carried, Traffic};
use ebb_meta_client::{AttachRequest, MetaClient, QueryRequest, Wish};
use ebb_types::{ByteRange, Ino, Name, Time, Version, in_steps};
use ebb_wire::pb::{self, reply::Body, request::Op};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// What a daemon asks at a time to write to the backing (`grant_bytes` of the flusher).
const GRANT_BYTES: u64 = 64 << 20;
/// Answers to opens and questions that may be here at a time.
const OPENS_AT_ONCE: usize = 64;
/// What a reader asks about at first, as a daemon does.
const LOOK_BYTES: u64 = 16 << 20;
/// How long the probe alone asks at first, so that what it costs can be taken off the figures.
const ALONE: Duration = Duration::from_millis(500);
/// Between two looks whether all nodes are back.
const LOOK: Duration = Duration::from_millis(20);

/// How a phase ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All nodes are through.
    Done,
    /// Not all were at its limit.
    Limit,
    /// Something went wrong.
    Failed(String),
}

/// A phase with so many nodes.
#[derive(Clone, Debug)]
pub struct Measured {
    /// Which.
    pub phase: Phase,
    /// So many took part.
    pub nodes: u64,
    /// Nodes that are through.
    pub done: u64,
    /// Ranges that were named, in all.
    pub ranges: u64,
    /// CPU time of the service, less what the probe's questions cost.
    pub cpu: Duration,
    /// From the beginning to the end, on this machine.
    pub took: Duration,
    /// Memory of the service at the end, in bytes.
    pub resident: u64,
    /// Bytes on its connections.
    pub carried: Carried,
    /// The longest wait of the probe.
    pub stall: Duration,
    /// Joins that were tried in vain, and connections that broke and were made again.
    pub again: u64,
    /// How it ended.
    pub outcome: Outcome,
}

/// One service with its nodes.
pub struct Stage {
    // First: whoever waits for the service must not be waited for when it is gone.
    probe: Probe,
    /// CPU time of the service for an answer to it.
    per_answer: Duration,
    traffic: Traffic,
    clients: Vec<MetaClient>,
    service: Service,
    introduction: Introduction,
    settings: Settings,
    layout: Layout,
    file: Ino,
    /// The grants of each node that may flush.
    grants: Vec<Vec<u64>>,
}

impl Stage {
    /// Starts the service and who watches it.
    pub async fn start(settings: &Settings, nodes: usize) -> Result<Stage, String> {
        let Settings { secure, lease, limit, .. } = *settings;
        let service = tokio::time::timeout(limit, Service::start(secure, lease)).await;
        let service = service.map_err(|_| "the service does not listen in time".to_owned())??;
        let introduction = Introduction::to(&service, secure, lease, limit * 2);
        let probe = Probe::start(introduction.of("probe", 0)).await?;
        let address: SocketAddr =
            service.address().parse().map_err(|e| format!("{}: {e}", service.address()))?;
        let layout =
            Layout { pattern: settings.pattern, nodes: nodes as u64, records: settings.records };
        Ok(Stage {
            per_answer: alone(&service, &probe).await,
            probe,
            traffic: Traffic::with(address),
            clients: Vec::new(),
            service,
            introduction,
            settings: settings.clone(),
            layout,
            file: Ino::ROOT,
            grants: Vec::new(),
        })
    }

    /// Runs a phase; what it needs must have been run.
    pub async fn run(&mut self, phase: Phase) -> Measured {
        let tally = Arc::new(Tally::default());
        let sessions = self.sessions();
        let (cpu, carried, begun) = (self.service.cpu(), self.traffic.carried(), Instant::now());
        self.probe.begin();
        let ended = tokio::time::timeout(self.settings.limit, self.work(phase, &tally)).await;
        let done = tally.done.load(Relaxed);
        let outcome = match (ended, tally.error()) {
            (Ok(Err(e)), _) | (_, Some(e)) => Outcome::Failed(e),
            (Err(_), None) => Outcome::Limit,
            (Ok(Ok(())), None) => Outcome::Done,
        };
        let again = match phase {
            Phase::JoinInTurn | Phase::Join => tally.refused.load(Relaxed),
            // Once is what is asked of each.
            Phase::Restart => self.sessions().saturating_sub(sessions + done),
            _ => self.sessions() - sessions,
        };
        Measured {
            phase,
            nodes: self.layout.nodes,
            done,
            ranges: tally.ranges.load(Relaxed),
            cpu: (self.service.cpu() - cpu).saturating_sub(self.per_answer * self.probe.answers()),
            took: begun.elapsed(),
            resident: self.service.resident(),
            carried: self.traffic.carried() - carried,
            stall: self.probe.longest(),
            again,
            outcome,
        }
    }

    /// Connections that the nodes have made.
    fn sessions(&self) -> u64 {
        self.clients.iter().map(MetaClient::session).sum()
    }

    async fn work(&mut self, phase: Phase, tally: &Arc<Tally>) -> Result<(), String> {
        match phase {
            Phase::JoinInTurn => self.join(1, tally).await,
            Phase::Join => self.join(self.layout.nodes as usize, tally).await,
            Phase::OpenEmpty => self.open_empty(tally).await?,
            Phase::Attach => self.attach(tally).await,
            Phase::Open => self.open(tally).await,
            Phase::Look => self.look(tally).await,
            Phase::Close => self.close(tally).await,
            Phase::FlushBegin => self.flush_begin(tally).await,
            Phase::FlushEnd => self.flush_end(tally).await,
            Phase::Idle => {
                tokio::time::sleep(self.settings.idle).await;
                tally.done.store(self.layout.nodes, Relaxed);
            }
            Phase::Restart => self.restart(tally).await?,
            Phase::Goodbye => self.goodbye(tally).await,
        }
        Ok(())
    }

    async fn join(&mut self, width: usize, tally: &Arc<Tally>) {
        let nodes = self.layout.nodes as usize;
        self.clients = crowd::join(&self.introduction, nodes, width, tally).await;
    }

    fn nodes(&self) -> impl Iterator<Item = MetaClient> + use<> {
        self.clients.clone().into_iter()
    }

    async fn open_empty(&mut self, tally: &Arc<Tally>) -> Result<(), String> {
        let first = self.clients.first().ok_or("nobody has joined")?;
        let name = Name::new(b"shared").expect("it is a name");
        let made = make_file(first, &name, false).await;
        self.file = made.map_err(|e| format!("making the shared file: {e}"))?;
        let file = self.file;
        each(self.nodes(), self.clients.len(), tally, move |_, client| async move {
            let opened = client.open(file, true, false, Version::ZERO, Wish::No).await;
            opened.map(drop).map_err(|e| format!("open of the empty file: {e}"))
        })
        .await;
        Ok(())
    }

    async fn attach(&self, tally: &Arc<Tally>) {
        let (file, layout) = (self.file, self.layout);
        each(self.nodes(), self.clients.len(), tally, |i, client| {
            let tally = Arc::clone(tally);
            async move {
                let ranges = layout.of_node(i as u64);
                tally.ranges.fetch_add(ranges.len() as u64, Relaxed);
                let attached = client.attach(&attach_of(file, ranges)).await;
                attached.map(drop).map_err(|e| format!("attach: {e}"))
            }
        })
        .await;
    }

    async fn open(&self, tally: &Arc<Tally>) {
        let (file, layout) = (self.file, self.layout);
        let owners: Arc<Vec<u32>> = Arc::new(self.clients.iter().map(|c| c.node_id().0).collect());
        each(self.nodes(), OPENS_AT_ONCE, tally, |i, client| {
            let (tally, owners) = (Arc::clone(tally), Arc::clone(&owners));
            async move {
                let mut map = opened(&client, file).await?;
                tally.ranges.fetch_add(map.ranges.len() as u64, Relaxed);
                let told = map.covers.map_or(0, |covers| covers.end.min(layout.len()));
                let bytes: u64 = map.ranges.iter().map(|r| r.end - r.start).sum();
                if (bytes, map.size) != (told, layout.len()) {
                    let (size, written) = (map.size, layout.len());
                    return Err(format!(
                        "an open found {bytes} owned bytes of {told}, in all {size} of {written}"
                    ));
                }
                // All of it by the first one.
                if i != 0 {
                    return Ok(());
                }
                rest_of_map(&client, file, &mut map).await?;
                layout.check(&map.ranges, &owners)
            }
        })
        .await;
    }

    /// Each around one of its own records, as a reader that goes on from there does.
    async fn look(&self, tally: &Arc<Tally>) {
        let (file, layout) = (self.file, self.layout);
        each(self.nodes(), OPENS_AT_ONCE, tally, |i, client| {
            let tally = Arc::clone(tally);
            async move {
                let own = layout.of_node(i as u64);
                let at = own[own.len() / 2].start();
                let range = ByteRange::at(at, LOOK_BYTES);
                let query = QueryRequest { ino: file, range, known: Version::ZERO, lease: false };
                let map = client.query(query).await.map_err(|e| format!("query: {e}"))?.map;
                let found = map.ranges.iter().map(|o| o.range.intersect(range));
                tally.ranges.fetch_add(map.ranges.len() as u64, Relaxed);
                let there = range.intersect(ByteRange::new(0, layout.len()));
                if bytes_of(found) != there.len() {
                    return Err(format!("the owners of {there} were not found"));
                }
                Ok(())
            }
        })
        .await;
    }

    async fn close(&self, tally: &Arc<Tally>) {
        let file = self.file;
        each(self.nodes(), self.clients.len(), tally, move |_, client| async move {
            client.release(file, false).await.map_err(|e| format!("close: {e}"))
        })
        .await;
    }

    async fn flush_begin(&mut self, tally: &Arc<Tally>) {
        let (file, layout) = (self.file, self.layout);
        let granted = each(self.nodes(), self.clients.len(), tally, |i, client| {
            let tally = Arc::clone(tally);
            async move {
                let mut grants = Vec::new();
                for step in in_steps(&layout.of_node(i as u64), GRANT_BYTES, usize::MAX) {
                    tally.ranges.fetch_add(step.len() as u64, Relaxed);
                    let granted = client.flush_begin(file, &step).await;
                    let granted = granted.map_err(|e| format!("begin of a flush: {e}"))?;
                    if bytes_of(granted.ranges.iter().map(|o| o.range)) != bytes_of(step) {
                        return Err("a flush was granted less than was asked for".to_owned());
                    }
                    grants.push(granted.grant);
                }
                Ok(grants)
            }
        });
        self.grants = granted.await.into_iter().map(|(_, grants)| grants).collect();
    }

    /// As if the bytes were on the backing: the service takes the node's word.
    async fn flush_end(&self, tally: &Arc<Tally>) {
        let (file, records) = (self.file, self.layout.records);
        let all = self.nodes().zip(self.grants.clone());
        each(all, self.clients.len(), tally, |_, (client, grants)| {
            tally.ranges.fetch_add(records, Relaxed);
            async move {
                for grant in grants {
                    let ended = client.flush_end(file, grant, true, false).await;
                    ended.map_err(|e| format!("end of a flush: {e}"))?;
                }
                Ok(())
            }
        })
        .await;
    }

    async fn restart(&mut self, tally: &Arc<Tally>) -> Result<(), String> {
        let before: Vec<u64> = self.clients.iter().map(MetaClient::session).collect();
        self.service.restart().await?;
        let is_back = |(client, before): (&MetaClient, &u64)| {
            client.is_connected() && client.session() > *before
        };
        loop {
            let back = self.clients.iter().zip(&before).filter(|pair| is_back(*pair)).count();
            tally.done.store(back as u64, Relaxed);
            if back == self.clients.len() {
                return Ok(());
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    async fn goodbye(&self, tally: &Arc<Tally>) {
        each(self.nodes(), self.clients.len(), tally, |_, client| async move {
            client.goodbye().await.map_err(|e| format!("goodbye: {e}"))
        })
        .await;
    }
}

/// CPU time of the service for an answer to the probe, while nobody else is there.
async fn alone(service: &Service, probe: &Probe) -> Duration {
    let cpu = service.cpu();
    probe.begin();
    tokio::time::sleep(ALONE).await;
    (service.cpu() - cpu) / probe.answers().max(1)
}

fn bytes_of(ranges: impl IntoIterator<Item = ByteRange>) -> u64 {
    ranges.into_iter().map(ByteRange::len).sum()
}

fn attach_of(ino: Ino, ranges: Vec<ByteRange>) -> AttachRequest {
    AttachRequest { mtime: Some(Time::now()), ..AttachRequest::new(ino, ranges) }
}

/// Opens the file; what was heard of its map.
async fn opened(client: &MetaClient, file: Ino) -> Result<pb::FileMap, String> {
    let open = Op::Open(pb::Open { ino: file.0, ..pb::Open::default() });
    match client.call(open).await.map_err(|e| format!("open: {e}"))? {
        Some(Body::Opened(pb::Opened { map: Some(map), .. })) => Ok(map),
        _ => Err("an open was answered without a map".to_owned()),
    }
}

/// Asks for the rest of the map where an answer ends before the file does.
async fn rest_of_map(client: &MetaClient, file: Ino, map: &mut pb::FileMap) -> Result<(), String> {
    while let Some(end) = map.covers.as_ref().map(|c| c.end).filter(|end| *end < u64::MAX) {
        let range = Some(pb::Range { start: end, end: u64::MAX });
        let query = Op::Query(pb::Query { ino: file.0, range, ..pb::Query::default() });
        let Some(Body::Map(rest)) = client.call(query).await.map_err(|e| format!("query: {e}"))?
        else {
            return Err("a query was answered without a map".to_owned());
        };
        map.covers = rest.covers;
        map.ranges.extend(rest.ranges);
    }
    Ok(())
}
