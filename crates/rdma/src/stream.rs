//! A connection, and the memory that goes with it.

use crate::Place;
use crate::endpoint::Shared;
use crate::flow::{Flow, HEAD_BYTES, Head, MESSAGE_BYTES};
use crate::verbs::{self, Arena, Block, Failure, Id, Post, QueuePair, Tag};
use bytes::{Buf, BufMut, Bytes, BytesMut};
use ebb_locks::Mutex;
use std::collections::VecDeque;
use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use tokio::sync::{Notify, OwnedSemaphorePermit};

/// Messages with bytes on their way out, at a time.
const SLOTS: usize = 8;
/// Writes into landings on their way out, at a time.
const WRITES: usize = 4;
/// What can be posted at a time: those, and a word.
pub(crate) const DEPTH: usize = SLOTS + 1 + WRITES;
/// Messages up to this size are handed to the device with the request itself, where it takes that.
const INLINE: u32 = 220;

/// One end of a connection: what its stream, its event loop and its id share.
pub(crate) struct Inner {
    pair: QueuePair,
    slots: Arc<Arena>,
    state: Mutex<State>,
    readable: Notify,
    writable: Notify,
}

#[derive(Default)]
struct State {
    flow: Flow,
    inbox: VecDeque<Bytes>,
    messages_out: usize,
    /// Of the writes that are on their way.
    writes_out: Vec<OwnedSemaphorePermit>,
    broken: Option<Broken>,
}

#[derive(Clone)]
struct Broken {
    why: Arc<str>,
    /// The other end hung up: that is the end of the stream, and no error.
    orderly: bool,
}

impl Broken {
    fn error(&self) -> io::Error {
        io::Error::new(io::ErrorKind::ConnectionReset, &*self.why)
    }
}

fn would_block() -> io::Error {
    io::ErrorKind::WouldBlock.into()
}

impl Inner {
    pub fn number(&self) -> u32 {
        self.pair.number()
    }

    #[cfg(test)]
    pub fn pair(&self) -> &QueuePair {
        &self.pair
    }

    pub fn id(&self) -> &Id {
        self.pair.id()
    }

    /// For the event loop, under its lock.
    pub fn destroy(&self) {
        self.fail("the connection was given up", false);
        self.pair.destroy();
        self.state.lock().writes_out.clear();
    }

    /// Nothing goes on here any more; the first reason counts. True when this was it.
    pub fn fail(&self, why: &str, orderly: bool) -> bool {
        let mut state = self.state.lock();
        let first = state.broken.is_none();
        if first {
            state.broken = Some(Broken { why: why.into(), orderly });
        }
        drop(state);
        // Also closes it: what was written to a landing before this returns is all that ever will be.
        self.pair.close();
        self.readable.notify_one();
        self.writable.notify_one();
        first
    }

    /// A message has come, or an error in its place.
    pub fn arrived(&self, message: Result<&[u8], Failure>) {
        let received = match message {
            Ok(message) => self.receive(message).map_err(|e| e.to_string()),
            Err(e) => Err(e.to_string()),
        };
        if let Err(why) = received {
            self.fail(&why, false);
        }
    }

    fn receive(&self, message: &[u8]) -> Result<(), crate::flow::FlowError> {
        let (head, bytes) = Head::decode(message)?;
        let mut state = self.state.lock();
        state.flow.receive(head)?;
        if !bytes.is_empty() {
            state.inbox.push_back(Bytes::copy_from_slice(bytes));
        }
        drop(state);
        if !bytes.is_empty() {
            self.readable.notify_one();
        }
        if head.credits > 0 {
            self.writable.notify_one();
        }
        Ok(())
    }

    /// Something that was posted is done, or failed.
    pub fn posted_done(&self, at: u32, result: Result<(), Failure>) {
        let Some((block, tag)) = self.pair.done(at) else { return };
        // Given back before anybody is told that there is room.
        drop(block);
        let mut state = self.state.lock();
        match tag {
            Tag::Message => state.messages_out -= 1,
            Tag::Word => state.flow.word_arrived(),
            Tag::Write => drop(state.writes_out.pop()),
            #[cfg(test)]
            Tag::Raw => {}
        }
        let told = self.tell_credits(&mut state);
        drop(state);
        match result.map_err(|e| e.to_string()).and(told.map_err(|e| e.to_string())) {
            Ok(()) => self.writable.notify_one(),
            Err(why) => drop(self.fail(&why, false)),
        }
    }

    /// Says what was read, when it is time to.
    fn tell_credits(&self, state: &mut State) -> io::Result<()> {
        if !state.flow.wants_word() || state.broken.is_some() {
            return Ok(());
        }
        // There is always one for a word, and one word at a time.
        let Some(block) = self.slots.take() else { return Ok(()) };
        let credits = state.flow.send_word();
        self.post_message(block, Head { credits, len: 0 }, &[], Tag::Word)
    }

    fn post_message(&self, mut block: Block, head: Head, bytes: &[u8], tag: Tag) -> io::Result<()> {
        let len = HEAD_BYTES + bytes.len();
        block[..HEAD_BYTES].copy_from_slice(&head.encode());
        block[HEAD_BYTES..len].copy_from_slice(bytes);
        self.pair.post(&Post::Send, block, len, tag)
    }

    /// Sends the beginning of `bytes`, one message: how much.
    fn send_some(&self, state: &mut State, bytes: &[u8]) -> io::Result<usize> {
        if let Some(broken) = &state.broken {
            return Err(broken.error());
        }
        if state.messages_out == SLOTS || !state.flow.may_send() {
            return Err(would_block());
        }
        let block = self.slots.take().ok_or_else(would_block)?;
        let n = bytes.len().min(MESSAGE_BYTES - HEAD_BYTES);
        let head = Head { credits: state.flow.send(), len: n as u32 };
        state.messages_out += 1;
        self.post_message(block, head, &bytes[..n], Tag::Message)?;
        Ok(n)
    }

    fn read_some(&self, state: &mut State, buf: &mut impl BufMut) -> io::Result<usize> {
        let Some(first) = state.inbox.front_mut() else {
            return match &state.broken {
                Some(broken) if broken.orderly => Ok(0),
                Some(broken) => Err(broken.error()),
                None => Err(would_block()),
            };
        };
        let n = first.len().min(buf.remaining_mut());
        buf.put_slice(&first[..n]);
        first.advance(n);
        if first.is_empty() {
            state.inbox.pop_front();
            state.flow.read();
        }
        Ok(n)
    }
}

/// A connection. Its calls are those of a socket that does not wait; both directions can be used at the same
/// time, each by one task. Dropping it closes it.
pub struct Stream {
    pub(crate) inner: Arc<Inner>,
    shared: Arc<Shared>,
    lane: usize,
    entry: crate::endpoint::Entered,
}

impl Stream {
    /// Of an id that is about to connect, or to be connected.
    pub(crate) fn new(shared: &Arc<Shared>, id: Id) -> io::Result<Stream> {
        let slots = Arena::new(Arc::clone(&shared.domain), MESSAGE_BYTES, SLOTS + 1)?;
        let lane = shared.next_lane();
        let (domain, receives) = (&shared.domain, &shared.receives);
        let completions = &shared.lanes[lane].completions;
        let pair = QueuePair::new(id, domain, receives, completions, DEPTH as u32, INLINE)?;
        let inner = Arc::new(Inner {
            pair,
            slots,
            state: Mutex::default(),
            readable: Notify::new(),
            writable: Notify::new(),
        });
        if !shared.lanes[lane].admit(&inner) {
            return Err(io::Error::other("too many connections over RDMA"));
        }
        let entry = shared.enter_conn(inner.id().key(), &inner);
        shared.cells.registered(slot_bytes());
        shared.cells.connections.fetch_add(1, Relaxed);
        Ok(Stream { inner, shared: Arc::clone(shared), lane, entry })
    }

    /// Reads what is there: as `TcpStream::try_read_buf`.
    pub fn try_read_buf(&self, buf: &mut impl BufMut) -> io::Result<usize> {
        let mut state = self.inner.state.lock();
        let mut taken = 0;
        let result = loop {
            if !buf.has_remaining_mut() {
                break Ok(taken);
            }
            match self.inner.read_some(&mut state, buf) {
                Ok(n) if n > 0 => taken += n,
                // What was taken is told first.
                _ if taken > 0 => break Ok(taken),
                end => break end,
            }
        };
        let told = self.inner.tell_credits(&mut state);
        drop(state);
        if let Err(e) = told {
            self.inner.fail(&e.to_string(), false);
        }
        result
    }

    /// Writes as much as is taken: as `TcpStream::try_write`.
    pub fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        let mut state = self.inner.state.lock();
        let mut sent = 0;
        while sent < bytes.len() {
            match self.inner.send_some(&mut state, &bytes[sent..]) {
                Ok(n) => sent += n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock && sent > 0 => break,
                Err(e) => return Err(e),
            }
        }
        Ok(sent)
    }

    /// Waits until there may be something to read; [`Stream::try_read_buf`] first.
    pub async fn readable(&self) -> io::Result<()> {
        self.inner.readable.notified().await;
        Ok(())
    }

    /// Waits until something may be taken.
    pub async fn writable(&self) -> io::Result<()> {
        self.inner.writable.notified().await;
        Ok(())
    }

    /// Nothing comes in or goes out from here on: the other end writes to no landing any more.
    pub fn close(&self) {
        self.inner.fail("the connection was given up", true);
    }

    /// A piece of memory to be filled and [written](Stream::write_to); waits for one.
    pub async fn stage(&self) -> io::Result<Staged> {
        self.shared.stage().await
    }

    /// Writes the first `len` bytes of a piece to the other end's landing. What is sent on the stream afterwards
    /// arrives after them. Whether they could be written is seen later: the stream breaks if not.
    pub async fn write_to(&self, staged: Staged, len: usize, to: Place) -> io::Result<()> {
        let mut staged = Some(staged);
        loop {
            match self.try_write_to(&mut staged, len, to) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => self.writable().await?,
                done => return done,
            }
        }
    }

    fn try_write_to(&self, staged: &mut Option<Staged>, len: usize, to: Place) -> io::Result<()> {
        let mut state = self.inner.state.lock();
        if let Some(broken) = &state.broken {
            return Err(broken.error());
        }
        if state.writes_out.len() == WRITES {
            return Err(would_block());
        }
        let Some(Staged { block, permit }) = staged.take() else { return Ok(()) };
        let post = Post::Write { address: to.address, key: to.key };
        self.inner.pair.post(&post, block, len, Tag::Write)?;
        state.writes_out.push(permit);
        drop(state);
        self.shared.cells.written.fetch_add(len as u64, Relaxed);
        Ok(())
    }
}

fn slot_bytes() -> i64 {
    (MESSAGE_BYTES * (SLOTS + 1)) as i64
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stream").field("number", &self.inner.number()).finish_non_exhaustive()
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let broken = self.inner.state.lock().broken.clone();
        if broken.is_some_and(|b| !b.orderly) {
            self.shared.cells.broken.fetch_add(1, Relaxed);
        }
        self.shared.leave(&self.entry);
        self.shared.lanes[self.lane].retire(&self.inner);
        self.shared.cells.registered(-slot_bytes());
        self.shared.cells.connections.fetch_sub(1, Relaxed);
    }
}

/// A piece of registered memory, of [`crate::STAGED_BYTES`] bytes.
pub struct Staged {
    pub(crate) block: Block,
    pub(crate) permit: OwnedSemaphorePermit,
}

impl Deref for Staged {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.block
    }
}

impl DerefMut for Staged {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.block
    }
}

/// A buffer into which the other end of any connection may write that knows its key, while it is one.
pub struct Landing {
    inner: verbs::Landing,
    _room: Room,
}

/// Counts bytes that are landings.
struct Room {
    shared: Arc<Shared>,
    len: u64,
}

impl Drop for Room {
    fn drop(&mut self) {
        self.shared.cells.landing.fetch_sub(self.len, Relaxed);
    }
}

impl Landing {
    pub(crate) fn new(shared: &Arc<Shared>, buffer: BytesMut) -> io::Result<Landing> {
        let len = buffer.len() as u64;
        let most = shared.options.landing_bytes_max;
        let taken = shared
            .cells
            .landing
            .fetch_update(Relaxed, Relaxed, |n| n.checked_add(len).filter(|n| *n <= most));
        taken.map_err(|_| io::Error::other("too many bytes are on their way over RDMA"))?;
        let room = Room { shared: Arc::clone(shared), len };
        Ok(Landing { inner: verbs::Landing::new(Arc::clone(&shared.domain), buffer)?, _room: room })
    }

    /// The place of its byte `at`.
    #[must_use]
    pub fn place(&self, at: usize) -> Place {
        assert!(at <= self.inner.len(), "within it");
        Place { address: self.inner.address() + at as u64, key: self.inner.key() }
    }

    /// The buffer again, which nobody can write to any more.
    #[must_use]
    pub fn take(self) -> BytesMut {
        self.inner.take()
    }
}
