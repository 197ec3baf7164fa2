//! One connection to a peer, shared by many reads: requests go out as they come, replies come
//! back in the same order. When anything is wrong with it, it is closed and every read on it
//! hears so; whether to ask again elsewhere is the pool's business.
//!
//! A request is written by the task that makes it (no hop to another task unless the socket is
//! full); one task reads the replies, the bytes straight into the buffer that the read brought.

use crate::secure::Channel;
use crate::source::Subject;
use crate::sys;
use crate::wire::{self, REPLY_LEN, Reply, Status, TRAILER_LEN};
use bytes::{Buf, BufMut, BytesMut};
use ebb_locks::Mutex;
use ebb_rdma::Landing;
use ebb_types::ByteRange;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use tokio::sync::{Notify, oneshot};
use tokio::task::AbortHandle;

/// The read buffer for everything but the bytes of large replies. Holds a small reply whole, so
/// that it takes one system call.
const STASH_BYTES: usize = 32 << 10;

/// Bytes of a large reply that are waited for at once, in place of every packet: takes 8 % of the
/// processor time of a first read away (1.07 to 0.98 ms a MiB, both nodes and the reader on one machine).
const WAKE_BYTES: usize = 256 << 10;

/// How a part of a read ended.
pub(crate) enum Outcome {
    /// The bytes are good and fill the buffer.
    Good(BytesMut),
    /// The bytes are good and in the landing.
    Placed,
    /// The peer answered, but not with the bytes.
    Answered(Status),
    /// The connection broke before the answer was whole.
    Broken(Arc<str>),
}

/// Where the bytes of a part go.
pub(crate) enum Target {
    /// Behind what is in the buffer.
    Buffer(BytesMut),
    /// The owner writes them there, from this byte on.
    Landing(Arc<Landing>, usize),
}

struct Pending {
    id: u64,
    len: usize,
    into: Target,
    done: oneshot::Sender<Outcome>,
}

#[derive(Default)]
struct Queue {
    next_id: u64,
    pending: VecDeque<Pending>,
    /// What the socket did not take; the writer task sends it. While it is not empty new
    /// requests line up behind it.
    unsent: Vec<u8>,
    closed: Option<Arc<str>>,
}

struct Shared {
    queue: Mutex<Queue>,
    channel: Channel,
    unsent: Notify,
    /// Bytes that were asked for and have not arrived, to find the least busy link.
    load: AtomicU64,
    /// Bytes that ever arrived, to tell a slow peer from a stuck one.
    arrived: AtomicU64,
}

/// A connection after its handshake. Dropping it closes it.
pub(crate) struct Link {
    shared: Arc<Shared>,
    tasks: [AbortHandle; 2],
}

impl Drop for Link {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
        self.shared.close("the connection was given up");
    }
}

impl Link {
    /// Takes a connection over; must be called on a runtime.
    pub fn new(channel: Channel) -> Link {
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            channel,
            unsent: Notify::new(),
            load: AtomicU64::new(0),
            arrived: AtomicU64::new(0),
        });
        let read = tokio::spawn(read_replies(shared.clone())).abort_handle();
        let write = tokio::spawn(write_unsent(shared.clone())).abort_handle();
        Link { shared, tasks: [read, write] }
    }

    /// Asks for `ranges`, whose `len` bytes go to `into`. On a link that is
    /// closed that comes back.
    pub fn submit(
        &self,
        subject: Subject,
        ranges: &[ByteRange],
        len: usize,
        into: Target,
    ) -> Result<oneshot::Receiver<Outcome>, Target> {
        let (done, outcome) = oneshot::channel();
        let mut queue = self.shared.queue.lock();
        if queue.closed.is_some() {
            return Err(into);
        }
        let id = queue.next_id;
        queue.next_id += 1;
        let place = match &into {
            Target::Buffer(_) => None,
            Target::Landing(landing, at) => Some(landing.place(*at)),
        };
        queue.pending.push_back(Pending { id, len, into, done });
        self.shared.load.fetch_add(len as u64, Relaxed);
        self.shared.send(&mut queue, |out| wire::put_read_to(out, id, subject, ranges, place));
        Ok(outcome)
    }

    /// Bytes that are still to arrive.
    pub fn load(&self) -> u64 {
        self.shared.load.load(Relaxed)
    }

    /// Bytes that arrived so far.
    pub fn arrived(&self) -> u64 {
        self.shared.arrived.load(Relaxed)
    }

    /// Whether it goes over RDMA.
    pub fn is_rdma(&self) -> bool {
        self.shared.channel.rdma().is_some()
    }

    /// False when nothing can be asked here any more.
    pub fn is_open(&self) -> bool {
        self.shared.queue.lock().closed.is_none()
    }

    /// Closes it, with the reason for the reads on it.
    pub fn close(&self, reason: &str) {
        self.shared.close(reason);
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl Shared {
    /// Sends what `put` appends, now if the socket takes it.
    fn send(&self, queue: &mut Queue, put: impl FnOnce(&mut Vec<u8>)) {
        let before = queue.unsent.len();
        put(&mut queue.unsent);
        if before > 0 {
            return;
        }
        // An error is seen by the reader too, which closes the link.
        let sent = self.channel.try_write(&queue.unsent).unwrap_or_default();
        queue.unsent.drain(..sent);
        if !queue.unsent.is_empty() || self.channel.has_unsent() {
            self.unsent.notify_one();
        }
    }

    fn close(&self, reason: &str) {
        let mut queue = self.queue.lock();
        if queue.closed.is_some() {
            return;
        }
        let reason: Arc<str> = reason.into();
        queue.closed = Some(reason.clone());
        let pending = std::mem::take(&mut queue.pending);
        drop(queue);
        // Before anybody asks elsewhere for bytes that could still be on their way.
        self.channel.shut();
        for part in pending {
            // A read that gave up meanwhile does not listen.
            let _ = part.done.send(Outcome::Broken(reason.clone()));
        }
    }
}

async fn write_unsent(shared: Arc<Shared>) {
    loop {
        shared.unsent.notified().await;
        while !shared.queue.lock().unsent.is_empty() || shared.channel.has_unsent() {
            if let Err(e) = shared.channel.writable().await {
                return shared.close(&e.to_string());
            }
            let mut queue = shared.queue.lock();
            let flushed = shared.channel.try_flush();
            match flushed.and_then(|()| shared.channel.try_write(&queue.unsent)) {
                Ok(n) => drop(queue.unsent.drain(..n)),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) => {
                    drop(queue);
                    return shared.close(&e.to_string());
                }
            }
        }
    }
}

async fn read_replies(shared: Arc<Shared>) {
    let stash = BytesMut::with_capacity(STASH_BYTES);
    let mut reader = Reader { stash, shared, wakes_at: 1 };
    let reason = loop {
        match reader.one_reply().await {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
                break "the peer closed the connection".to_owned();
            }
            Err(e) => break e.to_string(),
        }
    };
    reader.shared.close(&reason);
}

struct Reader {
    stash: BytesMut,
    shared: Arc<Shared>,
    /// Bytes that must be there before the kernel says so.
    wakes_at: usize,
}

impl Reader {
    async fn one_reply(&mut self) -> io::Result<()> {
        let head: [u8; REPLY_LEN] = self.take().await?;
        let reply = wire::decode_reply(&head).map_err(io::Error::other)?;
        let Some(part) = self.next_pending(&reply) else {
            return Err(io::Error::other("the peer sent a reply that was not asked for"));
        };
        let Pending { id, len, into, done } = part;
        let outcome = match reply.status {
            Status::Ok => match self.good(id, len, into, &reply).await {
                Ok(outcome) => outcome,
                Err(e) => {
                    let _ = done.send(Outcome::Broken(e.to_string().into()));
                    return Err(e);
                }
            },
            status => Outcome::Answered(status),
        };
        self.shared.load.fetch_sub(len as u64, Relaxed);
        // A read that gave up meanwhile does not listen.
        let _ = done.send(outcome);
        Ok(())
    }

    /// The request that `reply` answers, when it is the oldest one and has the right length.
    fn next_pending(&self, reply: &Reply) -> Option<Pending> {
        let mut queue = self.shared.queue.lock();
        let first = queue.pending.front()?;
        let lands = matches!(first.into, Target::Landing(..));
        let fits =
            reply.status != Status::Ok || reply.len == first.len as u64 && reply.placed == lands;
        if first.id == reply.id && fits { queue.pending.pop_front() } else { None }
    }

    async fn good(
        &mut self,
        id: u64,
        len: usize,
        into: Target,
        reply: &Reply,
    ) -> io::Result<Outcome> {
        match into {
            Target::Buffer(into) => self.bytes(id, len, into, reply).await,
            // Given back before anybody is told, so that the read has it alone.
            Target::Landing(_landing, _) => {
                // They are there before this can be read.
                self.shared.arrived.fetch_add(len as u64, Relaxed);
                let trailer: [u8; TRAILER_LEN] = self.take().await?;
                match wire::decode_trailer(&trailer, id).map_err(io::Error::other)? {
                    Status::Ok => Ok(Outcome::Placed),
                    status => Ok(Outcome::Answered(status)),
                }
            }
        }
    }

    async fn bytes(
        &mut self,
        id: u64,
        len: usize,
        mut into: BytesMut,
        reply: &Reply,
    ) -> io::Result<Outcome> {
        into.reserve(len);
        let mut missing = len;
        let stashed = self.stash.len().min(missing);
        into.extend_from_slice(&self.stash[..stashed]);
        self.stash.advance(stashed);
        missing -= stashed;
        while missing > 0 {
            self.wake_at(missing.min(WAKE_BYTES))?;
            let n = self.shared.channel.read_buf(&mut (&mut into).limit(missing)).await?;
            missing -= self.count(n)?;
        }
        self.wake_at(1)?;
        let trailer: [u8; TRAILER_LEN] = self.take().await?;
        if reply.held {
            let mut queue = self.shared.queue.lock();
            self.shared.send(&mut queue, |out| wire::put_received(out, id));
        }
        match wire::decode_trailer(&trailer, id).map_err(io::Error::other)? {
            Status::Ok => Ok(Outcome::Good(into)),
            status => Ok(Outcome::Answered(status)),
        }
    }

    /// The next `N` bytes, through the stash.
    async fn take<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        while self.stash.len() < N {
            if self.stash.is_empty() {
                // Takes the room of what was consumed back without copying.
                self.stash.clear();
            }
            let room = STASH_BYTES - self.stash.len();
            self.stash.reserve(room);
            let n = self.shared.channel.read_buf(&mut (&mut self.stash).limit(room)).await?;
            self.count(n)?;
        }
        let mut out = [0; N];
        self.stash.copy_to_slice(&mut out);
        Ok(out)
    }

    /// Whoever waits for many bytes is woken when they are there, not for each of their packets.
    fn wake_at(&mut self, bytes: usize) -> io::Result<()> {
        if self.shared.channel.rdma().is_some() {
            return Ok(());
        }
        let bytes = self.shared.channel.low_water(bytes);
        if self.wakes_at != bytes {
            sys::set_receive_low_water(self.shared.channel.tcp(), bytes)?;
            self.wakes_at = bytes;
        }
        Ok(())
    }

    fn count(&self, n: usize) -> io::Result<usize> {
        if n == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.shared.arrived.fetch_add(n as u64, Relaxed);
        Ok(n)
    }
}
