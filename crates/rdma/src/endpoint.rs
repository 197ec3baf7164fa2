//! A device at one address: who connects there, and how one connects from there.

use crate::lane::{self, Lane};
use crate::stream::{DEPTH, Inner, Landing, Staged, Stream};
use crate::verbs::{Arena, Completions, Domain, Events, Happened, Id, Receives, watch};
use crate::{ANSWER_BYTES, Answer, Hello, NUMBER_BYTES, Options, STAGED_BYTES, Stats, flow};
use bytes::BytesMut;
use ebb_locks::Mutex;
use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize};
use std::sync::{Arc, Weak};
use subtle::ConstantTimeEq;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::AbortHandle;
use tokio::time::timeout;

/// Messages that can have arrived and not been looked at, of all connections.
const RECEIVES: usize = 1024;
/// Pieces of memory from which landings are filled, for all connections.
const STAGES: usize = 64;
/// Who is expected at a time.
const EXPECTED_MAX: usize = 4096;

#[derive(Debug, Default)]
pub(crate) struct Cells {
    pub connections: AtomicU64,
    pub refused: AtomicU64,
    pub broken: AtomicU64,
    pub landing: AtomicU64,
    pub written: AtomicU64,
    registered: AtomicI64,
}

impl Cells {
    pub fn registered(&self, more: i64) {
        self.registered.fetch_add(more, Relaxed);
    }
}

/// An id of which something is awaited.
#[derive(Clone)]
enum Entry {
    Listener,
    /// Of who connects from here.
    Connecting(mpsc::UnboundedSender<Happened>),
    /// Connected, or about to be.
    Conn(Weak<Inner>, Option<mpsc::UnboundedSender<Happened>>),
}

/// A place in the table of ids. Keys are used again, numbers are not.
pub(crate) struct Entered {
    key: usize,
    number: u64,
}

struct Ticket {
    hello: Hello,
    answer: Answer,
    came: oneshot::Sender<Stream>,
}

/// What an endpoint's tasks and connections share.
pub(crate) struct Shared {
    pub options: Options,
    pub lanes: Vec<Lane>,
    pub receives: Arc<Receives>,
    pub domain: Arc<Domain>,
    pub cells: Cells,
    stages: Arc<Arena>,
    staging: Arc<Semaphore>,
    events: Arc<Events>,
    address: SocketAddr,
    next_lane: AtomicUsize,
    ids: Mutex<Ids>,
    expected: Mutex<HashMap<u64, Ticket>>,
    failed: Mutex<Option<String>>,
}

#[derive(Default)]
struct Ids {
    next: u64,
    entries: HashMap<usize, (u64, Entry)>,
}

impl Ids {
    fn enter(&mut self, key: usize, entry: Entry) -> Entered {
        self.next += 1;
        self.entries.insert(key, (self.next, entry));
        Entered { key, number: self.next }
    }
}

impl Shared {
    fn open(options: Options) -> io::Result<Shared> {
        let events = Events::new()?;
        let listener = Arc::new(Id::new(&events)?);
        let port = listener.listen(SocketAddr::new(options.address, 0))?;
        let mut ids = Ids::default();
        ids.enter(listener.key(), Entry::Listener);
        let domain = Arc::new(Domain::new(listener)?);
        let limits = domain.limits()?;
        let at_most = |wanted: usize, most: i32| wanted.min(usize::try_from(most).unwrap_or(0));
        let receives = at_most(RECEIVES, limits.max_srq_wr);
        let arrivals = Arena::new(Arc::clone(&domain), flow::MESSAGE_BYTES, receives)?;
        let blocks = std::iter::from_fn(|| arrivals.take()).take(receives).collect();
        let receives_queue = Arc::new(Receives::new(Arc::clone(&domain), blocks)?);
        let lanes = options.lanes.max(1);
        let conns = at_most(options.connections_max, limits.max_qp).div_ceil(lanes);
        let room = at_most(receives + conns * DEPTH, limits.max_cqe);
        let conns = conns.min(room.saturating_sub(receives) / DEPTH);
        let lane = |_| {
            let completions = Completions::new(Arc::clone(&domain), room)?;
            Ok(Lane::new(completions, Arc::clone(&receives_queue), conns))
        };
        let lanes = (0..lanes).map(lane).collect::<io::Result<Vec<_>>>()?;
        let stages = Arena::new(Arc::clone(&domain), STAGED_BYTES, STAGES)?;
        let cells = Cells::default();
        cells.registered((STAGED_BYTES * STAGES + flow::MESSAGE_BYTES * receives) as i64);
        Ok(Shared {
            options,
            lanes,
            receives: receives_queue,
            domain,
            cells,
            stages,
            staging: Arc::new(Semaphore::new(STAGES)),
            events,
            address: SocketAddr::new(options.address, port),
            next_lane: AtomicUsize::new(0),
            ids: Mutex::new(ids),
            expected: Mutex::default(),
            failed: Mutex::default(),
        })
    }

    /// The lane with the fewest connections, each in its turn where they have as many.
    pub fn next_lane(&self) -> usize {
        let first = self.next_lane.fetch_add(1, Relaxed);
        let all = (0..self.lanes.len()).map(|i| (first + i) % self.lanes.len());
        all.min_by_key(|i| self.lanes[*i].len()).unwrap_or(0)
    }

    /// What happens to the id goes to the connection from here on.
    pub fn enter_conn(&self, key: usize, conn: &Arc<Inner>) -> Entered {
        let mut ids = self.ids.lock();
        let steps = match ids.entries.get(&key) {
            Some((_, Entry::Connecting(steps))) => Some(steps.clone()),
            _ => None,
        };
        ids.enter(key, Entry::Conn(Arc::downgrade(conn), steps))
    }

    pub fn leave(&self, entered: &Entered) {
        let mut ids = self.ids.lock();
        if ids.entries.get(&entered.key).is_some_and(|(number, _)| *number == entered.number) {
            ids.entries.remove(&entered.key);
        }
    }

    /// A piece of memory, when there is one.
    pub async fn stage(&self) -> io::Result<Staged> {
        let permit = Arc::clone(&self.staging).acquire_owned().await;
        let permit = permit.map_err(io::Error::other)?;
        // Blocks go back before their permits do.
        let block =
            self.stages.take().ok_or_else(|| io::Error::other("no memory is registered"))?;
        Ok(Staged { block, permit })
    }

    /// Nothing works here any more.
    pub fn fail(&self, why: &str) {
        tracing::error!(why, "RDMA is given up");
        self.failed.lock().get_or_insert_with(|| why.to_owned());
        for lane in &self.lanes {
            lane.fail_all(why);
        }
    }

    fn take_expected(&self, said: &[u8]) -> Option<Ticket> {
        let number = said.first_chunk::<NUMBER_BYTES>().map(|n| u64::from_le_bytes(*n))?;
        let mut expected = self.expected.lock();
        let ticket = expected.get(&number)?;
        // What is said may be padded with zeros on the way.
        let hello = said.get(..ticket.hello.len())?;
        if !bool::from(ticket.hello.ct_eq(hello)) {
            return None;
        }
        expected.remove(&number)
    }
}

/// A device at one of its addresses. Dropping it ends the event loops; connections end with the last of them.
pub struct Endpoint {
    shared: Arc<Shared>,
    tasks: Vec<AbortHandle>,
}

/// Somebody who shall connect; dropping it before takes that back.
pub struct Expected {
    shared: Arc<Shared>,
    number: u64,
    came: oneshot::Receiver<Stream>,
}

impl Drop for Expected {
    fn drop(&mut self) {
        self.shared.expected.lock().remove(&self.number);
    }
}

impl Expected {
    /// Waits until it has connected.
    pub async fn connected(mut self) -> io::Result<Stream> {
        let came = (&mut self.came).await;
        came.map_err(|_| io::Error::other("the connection over RDMA did not come about"))
    }
}

impl Endpoint {
    /// Opens the device; must be called on a runtime, which then does the work.
    pub fn open(options: Options) -> io::Result<Endpoint> {
        let shared = Arc::new(Shared::open(options)?);
        let lanes = (0..shared.lanes.len())
            .map(|at| tokio::spawn(lane::serve(Arc::clone(&shared), at)).abort_handle());
        let mut tasks: Vec<_> = lanes.collect();
        tasks.push(tokio::spawn(serve_ids(Arc::clone(&shared))).abort_handle());
        Ok(Endpoint { shared, tasks })
    }

    #[cfg(test)]
    pub(crate) fn domain(&self) -> Arc<Domain> {
        Arc::clone(&self.shared.domain)
    }

    /// Where connections are taken.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.shared.address
    }

    /// Why it does not work any more.
    #[must_use]
    pub fn failed(&self) -> Option<String> {
        self.shared.failed.lock().clone()
    }

    /// Takes a connection of who says `hello`, once, and answers `answer`.
    pub fn expect(&self, hello: Hello, answer: Answer) -> io::Result<Expected> {
        let mut number = [0; NUMBER_BYTES];
        number.copy_from_slice(&hello[..NUMBER_BYTES]);
        let number = u64::from_le_bytes(number);
        let (tell, came) = oneshot::channel();
        let mut expected = self.shared.expected.lock();
        if expected.len() >= EXPECTED_MAX || expected.contains_key(&number) {
            return Err(io::Error::other("too many connections over RDMA are awaited"));
        }
        expected.insert(number, Ticket { hello, answer, came: tell });
        drop(expected);
        Ok(Expected { shared: Arc::clone(&self.shared), number, came })
    }

    /// Connects to another endpoint, where `hello` is expected: the connection, and the answer.
    pub async fn connect(&self, to: SocketAddr, hello: &Hello) -> io::Result<(Stream, Answer)> {
        if let Some(why) = self.failed() {
            return Err(io::Error::other(why));
        }
        let shared = &self.shared;
        let id = Id::new(&shared.events)?;
        let (tell, mut steps) = mpsc::unbounded_channel();
        let entered = shared.ids.lock().enter(id.key(), Entry::Connecting(tell));
        let entered = scopeguard(shared, entered);
        let patience = shared.options.patience;
        id.find_address(SocketAddr::new(shared.options.address, 0), to, patience)?;
        self.step(&mut steps, |h| matches!(h, Happened::AddressFound)).await?;
        id.find_route(patience)?;
        self.step(&mut steps, |h| matches!(h, Happened::RouteFound)).await?;
        let stream = Stream::new(shared, id)?;
        drop(entered);
        stream.inner.id().connect(hello)?;
        let said = self.step(&mut steps, |h| matches!(h, Happened::Established(_))).await?;
        let Happened::Established(said) = said else { return Err(io::ErrorKind::Other.into()) };
        let answer = said.first_chunk::<ANSWER_BYTES>().copied();
        let answer = answer.ok_or_else(|| io::Error::other("the answer over RDMA is too short"))?;
        Ok((stream, answer))
    }

    /// The step that is awaited, or why it is not done.
    async fn step(
        &self,
        steps: &mut mpsc::UnboundedReceiver<Happened>,
        awaited: impl Fn(&Happened) -> bool,
    ) -> io::Result<Happened> {
        let next = async {
            loop {
                match steps.recv().await {
                    Some(happened) if awaited(&happened) => return Ok(happened),
                    Some(Happened::Ended(why)) => return Err(io::Error::other(why)),
                    Some(_) => {}
                    None => return Err(io::Error::other("RDMA is given up")),
                }
            }
        };
        let late = |_| io::Error::new(io::ErrorKind::TimedOut, "does not answer over RDMA in time");
        timeout(self.shared.options.patience, next).await.map_err(late)?
    }

    /// Lets the other ends write into all bytes that `buffer` has.
    pub fn land(&self, buffer: BytesMut) -> io::Result<Landing> {
        Landing::new(&self.shared, buffer)
    }

    /// What it did so far.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let cells = &self.shared.cells;
        let landing_bytes = cells.landing.load(Relaxed);
        let own = u64::try_from(cells.registered.load(Relaxed)).unwrap_or(0);
        Stats {
            connections: cells.connections.load(Relaxed),
            refused: cells.refused.load(Relaxed),
            broken: cells.broken.load(Relaxed),
            landing_bytes,
            registered_bytes: own + landing_bytes,
            written_bytes: cells.written.load(Relaxed),
        }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
        for lane in &self.shared.lanes {
            lane.fail_all("RDMA was given up here");
        }
    }
}

/// Leaves the table of ids when dropped.
struct Leaving<'a> {
    shared: &'a Shared,
    entered: Entered,
}

fn scopeguard(shared: &Shared, entered: Entered) -> Leaving<'_> {
    Leaving { shared, entered }
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.shared.leave(&self.entered);
    }
}

async fn serve_ids(shared: Arc<Shared>) {
    if let Err(why) = serve_events(&shared).await {
        shared.fail(&format!("the connection manager of RDMA failed: {why}"));
    }
}

async fn serve_events(shared: &Arc<Shared>) -> io::Result<()> {
    let events = watch(&shared.events)?;
    let mut coming = Coming { shared, streams: HashMap::new() };
    loop {
        let find = |key| (key, shared.ids.lock().entries.get(&key).map(|(_, e)| e.clone()));
        match shared.events.next(find)? {
            Some(((key, entry), happened)) => coming.handle(key, entry, happened),
            // What comes after the last look makes it ready again.
            None => events.readable().await?.clear_ready(),
        }
    }
}

/// Connections that were accepted and are not there yet.
struct Coming<'a> {
    shared: &'a Arc<Shared>,
    streams: HashMap<usize, (Stream, oneshot::Sender<Stream>)>,
}

impl Coming<'_> {
    fn handle(&mut self, key: usize, entry: Option<Entry>, happened: Happened) {
        match (entry, happened) {
            (Some(Entry::Listener), Happened::Request(id, said)) => self.request(id, &said),
            (Some(Entry::Listener), Happened::Ended(why)) => self.shared.fail(&why),
            (Some(Entry::Connecting(steps)), happened) => drop(steps.send(happened)),
            (Some(Entry::Conn(conn, steps)), happened) => {
                if let (Happened::Ended(why), Some(conn)) = (&happened, conn.upgrade()) {
                    conn.fail(&format!("the other end {why}"), true);
                }
                self.come(key, &happened);
                steps.map(|steps| steps.send(happened));
            }
            // Of an id that is given up already; one that nobody asked for is dropped here.
            _ => {}
        }
    }

    fn request(&mut self, id: Id, said: &[u8]) {
        let Some(ticket) = self.shared.take_expected(said) else {
            self.shared.cells.refused.fetch_add(1, Relaxed);
            tracing::debug!("a connection over RDMA that nobody expects is refused");
            drop(id.reject());
            return;
        };
        let key = id.key();
        let accepted = Stream::new(self.shared, id).and_then(|stream| {
            stream.inner.id().accept(&ticket.answer)?;
            Ok(stream)
        });
        match accepted {
            Ok(stream) => drop(self.streams.insert(key, (stream, ticket.came))),
            Err(why) => tracing::warn!(%why, "a connection over RDMA is not taken"),
        }
    }

    fn come(&mut self, key: usize, happened: &Happened) {
        match happened {
            Happened::Established(_) => {
                if let Some((stream, came)) = self.streams.remove(&key) {
                    // Who expected it may not wait any more.
                    drop(came.send(stream));
                }
            }
            Happened::Ended(_) => drop(self.streams.remove(&key)),
            _ => {}
        }
    }
}
