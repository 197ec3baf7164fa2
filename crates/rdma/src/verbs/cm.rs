//! The connection manager: ids, what happens to them, and the queue pairs that they connect.

use super::calls::{Calls, calls};
use super::device::{Block, Completions, Domain, Receives, Work, named};
use ebb_locks::Mutex;
use rdma_sys::{
    ibv_context, ibv_qp_init_attr, ibv_qp_type, ibv_send_flags, ibv_send_wr, ibv_wr_opcode,
    rdma_cm_event, rdma_cm_event_type as event, rdma_cm_id, rdma_conn_param, rdma_event_channel,
    rdma_port_space,
};
use std::ffi::c_int;
use std::io;
use std::mem::zeroed;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::time::Duration;

/// Most bytes of one's own that travel with a request for a connection.
pub(crate) const REQUEST_BYTES: usize = 56;
/// And with the answer to it.
pub(crate) const ANSWER_BYTES: usize = 196;

/// How often the device sends again what is not acknowledged (the most), before it gives up.
const RETRIES: u8 = 7;
/// The same for an end that has no room: without an end. The shared queue gets its blocks back at once.
const ROOM_RETRIES: u8 = 7;
/// Until the device sends again: 4.096 us times two to this power, 0.5 s. An end that is gone is so found out in
/// a few seconds, before whoever waits for a read gives it up; the usual value takes a quarter of a minute.
const ACK_TIMEOUT: u8 = 17;
/// Of `rdma/rdma_cma.h`, where they have no type that has a name.
const OPTION_ID: c_int = 0;
const OPTION_ACK_TIMEOUT: c_int = 3;
/// Connections that wait to be looked at.
const BACKLOG: c_int = 1024;

/// A call of the connection manager: 0, or -1 and errno.
fn done(result: c_int, what: &str) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(named(io::Error::last_os_error(), what)) }
}

/// What happens to ids, through a descriptor.
pub(crate) struct Events {
    calls: &'static Calls,
    channel: NonNull<rdma_event_channel>,
}

// SAFETY: the library locks.
unsafe impl Send for Events {}
// SAFETY: as above.
unsafe impl Sync for Events {}

/// Something that happened to an id.
pub(crate) enum Happened {
    AddressFound,
    RouteFound,
    /// Somebody wants to connect: by this id, saying this.
    Request(Id, Vec<u8>),
    /// The connection is there; the other end said this.
    Established(Vec<u8>),
    /// It will not be, or is not any more.
    Ended(String),
    /// Nothing of interest.
    Nothing,
}

impl Events {
    /// Loads the libraries, too.
    pub fn new() -> io::Result<Arc<Events>> {
        let calls = calls().map_err(io::Error::other)?;
        // SAFETY: takes nothing.
        let channel = NonNull::new(unsafe { (calls.rdma_create_event_channel)() });
        let channel = channel.ok_or_else(|| {
            named(
                io::Error::last_os_error(),
                "the kernel has no RDMA connection manager (rdma_ucm)",
            )
        })?;
        let events = Events { calls, channel };
        super::set_nonblocking(&events)?;
        Ok(Arc::new(events))
    }

    /// The next thing that happened, if any: `act` gets the key of the id and what it is. The id does not go
    /// away before `act` returns, so what `act` returns is about this id and no later one.
    pub fn next<T>(
        self: &Arc<Events>,
        find: impl FnOnce(usize) -> T,
    ) -> io::Result<Option<(T, Happened)>> {
        let mut raw = null_mut();
        // SAFETY: the channel lives, the place is good for the call.
        let got = unsafe { (self.calls.rdma_get_cm_event)(self.channel.as_ptr(), &raw mut raw) };
        if got != 0 {
            let e = io::Error::last_os_error();
            let nothing = e.kind() == io::ErrorKind::WouldBlock;
            return if nothing { Ok(None) } else { Err(named(e, "rdma_get_cm_event")) };
        }
        // SAFETY: a successful call gives an event, which stays until it is acknowledged.
        let event = unsafe { &*raw };
        let about = if event.listen_id.is_null() { event.id } else { event.listen_id };
        let found = find(about as usize);
        let happened = self.read(event);
        // SAFETY: acknowledged once, and not looked at any more.
        unsafe { (self.calls.rdma_ack_cm_event)(raw) };
        Ok(Some((found, happened)))
    }

    fn read(self: &Arc<Events>, happened: &rdma_cm_event) -> Happened {
        match happened.event {
            event::RDMA_CM_EVENT_ADDR_RESOLVED => Happened::AddressFound,
            event::RDMA_CM_EVENT_ROUTE_RESOLVED => Happened::RouteFound,
            event::RDMA_CM_EVENT_CONNECT_REQUEST => match NonNull::new(happened.id) {
                Some(raw) => Happened::Request(Id::of(self, raw), said(happened, REQUEST_BYTES)),
                None => Happened::Nothing,
            },
            event::RDMA_CM_EVENT_ESTABLISHED => Happened::Established(said(happened, ANSWER_BYTES)),
            event::RDMA_CM_EVENT_ADDR_ERROR => failed("has no address that RDMA reaches", happened),
            event::RDMA_CM_EVENT_ROUTE_ERROR => failed("has no route over RDMA", happened),
            event::RDMA_CM_EVENT_CONNECT_ERROR => failed("does not connect over RDMA", happened),
            event::RDMA_CM_EVENT_UNREACHABLE => failed("is not reached over RDMA", happened),
            event::RDMA_CM_EVENT_REJECTED => failed("refuses the connection over RDMA", happened),
            event::RDMA_CM_EVENT_DISCONNECTED => {
                Happened::Ended("closed the RDMA connection".to_owned())
            }
            event::RDMA_CM_EVENT_DEVICE_REMOVAL => {
                Happened::Ended("cannot be reached: the RDMA device was removed".to_owned())
            }
            _ => Happened::Nothing,
        }
    }
}

fn failed(what: &str, event: &rdma_cm_event) -> Happened {
    let why = match event.status {
        // A negative errno, or a reason of the protocol.
        status @ ..0 => io::Error::from_raw_os_error(status.saturating_neg()).to_string(),
        status => format!("reason {status}"),
    };
    Happened::Ended(format!("{what}: {why}"))
}

/// What the other end said with its request or answer, at most so many bytes.
fn said(event: &rdma_cm_event, most: usize) -> Vec<u8> {
    // SAFETY: of such events, on connections of this kind, it is this part of the union.
    let conn = unsafe { event.param.conn };
    let len = usize::from(conn.private_data_len).min(most);
    if conn.private_data.is_null() {
        return Vec::new();
    }
    // SAFETY: the library says how long it is, and it stays until the event is acknowledged.
    unsafe { std::slice::from_raw_parts(conn.private_data.cast::<u8>(), len) }.to_vec()
}

impl AsRawFd for Events {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl AsFd for Events {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel and its descriptor live as long as this.
        unsafe { BorrowedFd::borrow_raw(self.channel.as_ref().fd) }
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        // SAFETY: every id holds it, so there is none left.
        unsafe { (self.calls.rdma_destroy_event_channel)(self.channel.as_ptr()) };
    }
}

/// One end of a connection that is, will be or was; or a place where they are taken.
pub(crate) struct Id {
    pub(super) calls: &'static Calls,
    raw: NonNull<rdma_cm_id>,
    _events: Arc<Events>,
}

// SAFETY: the library locks.
unsafe impl Send for Id {}
// SAFETY: as above.
unsafe impl Sync for Id {}

impl Id {
    fn of(events: &Arc<Events>, raw: NonNull<rdma_cm_id>) -> Id {
        Id { calls: events.calls, raw, _events: Arc::clone(events) }
    }

    pub fn new(events: &Arc<Events>) -> io::Result<Id> {
        let mut raw = null_mut();
        // SAFETY: the channel lives, the place is good for the call.
        let made = unsafe {
            let kind = rdma_port_space::RDMA_PS_TCP;
            (events.calls.rdma_create_id)(events.channel.as_ptr(), &raw mut raw, null_mut(), kind)
        };
        done(made, "rdma_create_id")?;
        let raw = NonNull::new(raw).ok_or(io::ErrorKind::Other)?;
        Ok(Id::of(events, raw))
    }

    /// What tells it from other ids that live.
    pub fn key(&self) -> usize {
        self.raw.as_ptr() as usize
    }

    pub(super) fn context(&self) -> *mut ibv_context {
        // SAFETY: lives as long as this.
        unsafe { self.raw.as_ref() }.verbs
    }

    /// Takes connections at `address`: the port.
    pub fn listen(&self, address: SocketAddr) -> io::Result<u16> {
        let mut address = Address::of(address);
        // SAFETY: the id lives, the address is read in the call.
        let bound = unsafe { (self.calls.rdma_bind_addr)(self.raw.as_ptr(), address.raw()) };
        done(bound, "rdma_bind_addr")?;
        // SAFETY: the id lives.
        let listens = unsafe { (self.calls.rdma_listen)(self.raw.as_ptr(), BACKLOG) };
        done(listens, "rdma_listen")?;
        // SAFETY: the id lives.
        Ok(u16::from_be(unsafe { (self.calls.rdma_get_src_port)(self.raw.as_ptr()) }))
    }

    /// Begins to look for `to`, from `from`.
    pub fn find_address(
        &self,
        from: SocketAddr,
        to: SocketAddr,
        within: Duration,
    ) -> io::Result<()> {
        let (mut from, mut to) = (Address::of(from), Address::of(to));
        // SAFETY: the id lives, the addresses are read in the call.
        let begun = unsafe {
            (self.calls.rdma_resolve_addr)(self.raw.as_ptr(), from.raw(), to.raw(), millis(within))
        };
        done(begun, "rdma_resolve_addr")
    }

    pub fn find_route(&self, within: Duration) -> io::Result<()> {
        // SAFETY: the id lives.
        let begun = unsafe { (self.calls.rdma_resolve_route)(self.raw.as_ptr(), millis(within)) };
        done(begun, "rdma_resolve_route")
    }

    pub fn connect(&self, say: &[u8]) -> io::Result<()> {
        self.set_ack_timeout();
        let mut param = param(say);
        // SAFETY: the id lives, the parameters are read in the call.
        done(
            unsafe { (self.calls.rdma_connect)(self.raw.as_ptr(), &raw mut param) },
            "rdma_connect",
        )
    }

    pub fn accept(&self, say: &[u8]) -> io::Result<()> {
        self.set_ack_timeout();
        let mut param = param(say);
        // SAFETY: as above.
        done(unsafe { (self.calls.rdma_accept)(self.raw.as_ptr(), &raw mut param) }, "rdma_accept")
    }

    /// Where the kernel lets it be chosen; elsewhere it is the device's.
    fn set_ack_timeout(&self) {
        let mut timeout = ACK_TIMEOUT;
        // SAFETY: the id lives, the value is read in the call.
        let set = unsafe {
            let value = (&raw mut timeout).cast();
            (self.calls.rdma_set_option)(self.raw.as_ptr(), OPTION_ID, OPTION_ACK_TIMEOUT, value, 1)
        };
        if set != 0 {
            let why = io::Error::last_os_error();
            tracing::debug!(%why, "how long the RDMA device waits cannot be chosen");
        }
    }

    pub fn reject(&self) -> io::Result<()> {
        // SAFETY: the id lives, and says nothing.
        done(unsafe { (self.calls.rdma_reject)(self.raw.as_ptr(), null_mut(), 0) }, "rdma_reject")
    }

    /// Nothing goes out or comes in any more.
    fn disconnect(&self) {
        // SAFETY: the id lives. It fails where nothing is connected.
        unsafe { (self.calls.rdma_disconnect)(self.raw.as_ptr()) };
    }
}

impl Drop for Id {
    fn drop(&mut self) {
        // SAFETY: destroyed once; its queue pair is destroyed before. Waits until what happened to it
        // is acknowledged, which is done before anything is done about it.
        unsafe { (self.calls.rdma_destroy_id)(self.raw.as_ptr()) };
    }
}

fn millis(time: Duration) -> c_int {
    c_int::try_from(time.as_millis()).unwrap_or(c_int::MAX)
}

fn param(say: &[u8]) -> rdma_conn_param {
    assert!(say.len() <= REQUEST_BYTES, "what is said fits into a request");
    // SAFETY: numbers and a pointer that may be null.
    let mut param: rdma_conn_param = unsafe { zeroed() };
    param.private_data = say.as_ptr().cast();
    param.private_data_len = say.len() as u8;
    param.retry_count = RETRIES;
    param.rnr_retry_count = ROOM_RETRIES;
    param
}

/// A socket address for the library.
enum Address {
    V4(libc::sockaddr_in),
    V6(libc::sockaddr_in6),
}

impl Address {
    fn of(address: SocketAddr) -> Address {
        match address {
            SocketAddr::V4(a) => Address::V4(libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: a.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(a.ip().octets()) },
                sin_zero: [0; 8],
            }),
            SocketAddr::V6(a) => Address::V6(libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: a.port().to_be(),
                sin6_flowinfo: a.flowinfo(),
                sin6_addr: libc::in6_addr { s6_addr: a.ip().octets() },
                sin6_scope_id: a.scope_id(),
            }),
        }
    }

    fn raw(&mut self) -> *mut libc::sockaddr {
        match self {
            Address::V4(a) => (&raw mut *a).cast(),
            Address::V6(a) => (&raw mut *a).cast(),
        }
    }
}

/// A reliable connection's queue pair. It owns the blocks that are posted.
pub(crate) struct QueuePair {
    id: Id,
    number: u32,
    inline: usize,
    posted: Mutex<Posted>,
    _domain: Arc<Domain>,
    _receives: Arc<Receives>,
    _completions: Arc<Completions>,
}

struct Posted {
    /// Nothing is posted any more.
    closed: bool,
    /// No hardware uses it any more.
    destroyed: bool,
    blocks: Vec<Option<(Block, Tag)>>,
}

/// What it is to whoever posts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tag {
    Message,
    Word,
    Write,
    /// Past the rules.
    #[cfg(test)]
    Raw,
}

/// What is posted.
pub(crate) enum Post {
    /// Goes to the other end's shared queue.
    Send,
    /// Goes to a place in the other end's memory.
    Write { address: u64, key: u32 },
}

impl QueuePair {
    /// Of a connection that is about to be; `depth` blocks can be posted at a time.
    pub fn new(
        id: Id,
        domain: &Arc<Domain>,
        receives: &Arc<Receives>,
        completions: &Arc<Completions>,
        depth: u32,
        inline: u32,
    ) -> io::Result<QueuePair> {
        if id.context() != domain.context.as_ptr() {
            return Err(io::Error::other("the connection goes over another RDMA device"));
        }
        // SAFETY: numbers and pointers that may be null.
        let mut init: ibv_qp_init_attr = unsafe { zeroed() };
        init.qp_type = ibv_qp_type::IBV_QPT_RC;
        (init.send_cq, init.recv_cq) = (completions.raw(), completions.raw());
        init.srq = receives.raw();
        (init.cap.max_send_wr, init.cap.max_send_sge) = (depth, 1);
        init.cap.max_inline_data = inline;
        // SAFETY: all of it lives and is kept; the attributes are read and written in the call.
        let made = unsafe {
            (id.calls.rdma_create_qp)(id.raw.as_ptr(), domain.pd.as_ptr(), &raw mut init)
        };
        done(made, "rdma_create_qp")?;
        // SAFETY: the call has set it.
        let number = unsafe { (*id.raw.as_ref().qp).qp_num };
        let blocks = (0..depth).map(|_| None).collect();
        Ok(QueuePair {
            id,
            number,
            inline: init.cap.max_inline_data as usize,
            posted: Mutex::new(Posted { closed: false, destroyed: false, blocks }),
            _domain: Arc::clone(domain),
            _receives: Arc::clone(receives),
            _completions: Arc::clone(completions),
        })
    }

    pub fn number(&self) -> u32 {
        self.number
    }

    pub fn id(&self) -> &Id {
        &self.id
    }

    /// Posts the first `len` bytes of `block`; a completion tells when it is done.
    pub fn post(&self, what: &Post, block: Block, len: usize, tag: Tag) -> io::Result<()> {
        let mut posted = self.posted.lock();
        if posted.closed {
            return Err(io::ErrorKind::NotConnected.into());
        }
        let free = posted.blocks.iter().position(Option::is_none);
        let at = free.ok_or(io::ErrorKind::WouldBlock)?;
        let mut piece = block.piece(len);
        // SAFETY: numbers and pointers that may be null.
        let mut wr: ibv_send_wr = unsafe { zeroed() };
        wr.wr_id = Work::Posted(at as u32).to_wr_id();
        (wr.sg_list, wr.num_sge) = (&raw mut piece, 1);
        wr.send_flags = ibv_send_flags::IBV_SEND_SIGNALED.0;
        match what {
            Post::Send => {
                wr.opcode = ibv_wr_opcode::IBV_WR_SEND;
                if len <= self.inline {
                    wr.send_flags |= ibv_send_flags::IBV_SEND_INLINE.0;
                }
            }
            Post::Write { address, key } => {
                wr.opcode = ibv_wr_opcode::IBV_WR_RDMA_WRITE;
                wr.wr.rdma.remote_addr = *address;
                wr.wr.rdma.rkey = *key;
            }
        }
        let mut bad = null_mut();
        // SAFETY: the queue pair is destroyed only after `closed` is set under this lock; the block stays in
        // `blocks` until its completion, or until the queue pair is destroyed.
        let e =
            unsafe { rdma_sys::ibv_post_send(self.id.raw.as_ref().qp, &raw mut wr, &raw mut bad) };
        if e != 0 {
            return Err(named(io::Error::from_raw_os_error(e), "ibv_post_send"));
        }
        posted.blocks[at] = Some((block, tag));
        Ok(())
    }

    /// The block of a completion.
    pub fn done(&self, at: u32) -> Option<(Block, Tag)> {
        self.posted.lock().blocks.get_mut(at as usize)?.take()
    }

    /// From here on nothing comes in or goes out.
    pub fn close(&self) {
        let mut posted = self.posted.lock();
        if !posted.closed {
            posted.closed = true;
            self.id.disconnect();
        }
    }

    /// Has the hardware forget it. Its completions that are there already stay.
    pub fn destroy(&self) {
        self.close();
        let mut posted = self.posted.lock();
        if !posted.destroyed {
            posted.destroyed = true;
            // SAFETY: destroyed once; nothing is posted after `closed`.
            unsafe { (self.id.calls.rdma_destroy_qp)(self.id.raw.as_ptr()) };
        }
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        self.destroy();
    }
}
