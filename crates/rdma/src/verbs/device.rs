//! A device as it was opened by an id of the connection manager, and what belongs to it.
//!
//! What hardware reads and writes lives longer than what it was told: a queue owns the [`Block`]s that
//! are posted to it, a queue pair keeps its queues, everything keeps its device. So nothing here can
//! be used after it is gone, and every other module is safe code.

use super::calls::Calls;
use super::cm::Id;
use bytes::BytesMut;
use ebb_locks::Mutex;
use rdma_sys::{
    ibv_access_flags, ibv_comp_channel, ibv_context, ibv_cq, ibv_device_attr, ibv_mr, ibv_pd,
    ibv_recv_wr, ibv_sge, ibv_srq, ibv_srq_init_attr, ibv_wc, ibv_wc_status,
};
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::io;
use std::mem::{self, zeroed};
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

const PAGE: usize = 4096;

/// What a call gave, or the system's error.
fn given<T>(pointer: *mut T, what: &str) -> io::Result<NonNull<T>> {
    NonNull::new(pointer).ok_or_else(|| named(io::Error::last_os_error(), what))
}

pub(super) fn named(e: io::Error, what: &str) -> io::Error {
    io::Error::new(e.kind(), format!("{what}: {e}"))
}

/// A protection domain: what one end's queue pairs share.
pub(crate) struct Domain {
    pub(super) calls: &'static Calls,
    pub(super) context: NonNull<ibv_context>,
    pub(super) pd: NonNull<ibv_pd>,
    /// Keeps the device open.
    _id: Arc<Id>,
}

// SAFETY: verbs may be called from every thread; the libraries lock.
unsafe impl Send for Domain {}
// SAFETY: as above.
unsafe impl Sync for Domain {}

impl Domain {
    /// Of the device that `id` is bound to.
    pub fn new(id: Arc<Id>) -> io::Result<Domain> {
        let calls = id.calls;
        let context = given(id.context(), "no device at the address")?;
        // SAFETY: the context is of an open device, which the id keeps.
        let pd = given(unsafe { (calls.ibv_alloc_pd)(context.as_ptr()) }, "ibv_alloc_pd")?;
        Ok(Domain { calls, context, pd, _id: id })
    }

    /// What the device can do.
    pub fn limits(&self) -> io::Result<ibv_device_attr> {
        // SAFETY: plain numbers, for which zeros are a value.
        let mut attr: ibv_device_attr = unsafe { zeroed() };
        // SAFETY: context and place are good for the call.
        match unsafe { (self.calls.ibv_query_device)(self.context.as_ptr(), &raw mut attr) } {
            0 => Ok(attr),
            e => Err(named(io::Error::from_raw_os_error(e), "ibv_query_device")),
        }
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: all that was made of it holds it, so nothing is left.
        unsafe { (self.calls.ibv_dealloc_pd)(self.pd.as_ptr()) };
    }
}

/// Memory that the device may use.
struct Registered {
    domain: Arc<Domain>,
    mr: NonNull<ibv_mr>,
}

// SAFETY: as for the domain.
unsafe impl Send for Registered {}
// SAFETY: as for the domain.
unsafe impl Sync for Registered {}

impl Registered {
    /// # Safety
    ///
    /// The memory stays until this is dropped, and where the device may write it, nobody else
    /// uses it meanwhile.
    unsafe fn new(
        domain: Arc<Domain>,
        memory: *mut u8,
        len: usize,
        may: ibv_access_flags,
    ) -> io::Result<Registered> {
        let flags = may.0 as i32;
        // SAFETY: the caller's memory; the domain lives.
        let mr =
            unsafe { (domain.calls.ibv_reg_mr)(domain.pd.as_ptr(), memory.cast(), len, flags) };
        let mr = given(
            mr,
            "registering memory for RDMA (is the limit of locked memory too low? ulimit -l)",
        )?;
        Ok(Registered { domain, mr })
    }

    fn lkey(&self) -> u32 {
        // SAFETY: lives until it is deregistered.
        unsafe { self.mr.as_ref() }.lkey
    }

    fn rkey(&self) -> u32 {
        // SAFETY: as above.
        unsafe { self.mr.as_ref() }.rkey
    }
}

impl Registered {
    /// Ends it: false when the device may go on using the memory, which then must stay for ever.
    fn end(&self) -> bool {
        // SAFETY: registered once, and ended once by its owner.
        let e = unsafe { (self.domain.calls.ibv_dereg_mr)(self.mr.as_ptr()) };
        if e != 0 {
            let why = io::Error::from_raw_os_error(e);
            tracing::error!(%why, "memory stays registered for RDMA, and is lost until the end");
        }
        e == 0
    }
}

/// Where the other end may write until this is gone: the memory of a buffer.
pub(crate) struct Landing {
    registered: Registered,
    buffer: BytesMut,
}

impl Landing {
    /// Of all bytes that `buffer` has, at least one.
    pub fn new(domain: Arc<Domain>, mut buffer: BytesMut) -> io::Result<Landing> {
        if buffer.is_empty() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let may =
            ibv_access_flags::IBV_ACCESS_LOCAL_WRITE | ibv_access_flags::IBV_ACCESS_REMOTE_WRITE;
        // SAFETY: the buffer's memory does not move while nobody touches the buffer, which is done
        // only after the key has ended.
        let registered =
            unsafe { Registered::new(domain, buffer.as_mut_ptr(), buffer.len(), may) }?;
        Ok(Landing { registered, buffer })
    }

    pub fn address(&self) -> u64 {
        self.buffer.as_ptr() as u64
    }

    pub fn key(&self) -> u32 {
        self.registered.rkey()
    }

    pub fn len(&self) -> usize {
        self.buffer.len()
    }

    /// The buffer, when nobody may write to it any more.
    pub fn take(mut self) -> BytesMut {
        self.end();
        // An empty one in its place says that it has ended.
        mem::take(&mut self.buffer)
    }

    /// Once: afterwards there is no memory that anybody could write to.
    fn end(&mut self) {
        if self.buffer.is_empty() {
            return;
        }
        if !self.registered.end() {
            let len = self.buffer.len();
            mem::forget(mem::replace(&mut self.buffer, BytesMut::zeroed(len)));
        }
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        self.end();
    }
}

/// Registered memory in blocks of one size.
pub(crate) struct Arena {
    registered: Option<Registered>,
    memory: NonNull<u8>,
    layout: Layout,
    block: usize,
    free: Mutex<Vec<u32>>,
}

// SAFETY: the memory is given out in blocks that do not overlap, each to one owner.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

impl Arena {
    /// `count` blocks of `block` bytes; the device may read them, and write what is received.
    pub fn new(domain: Arc<Domain>, block: usize, count: usize) -> io::Result<Arc<Arena>> {
        let bytes = block.checked_mul(count).filter(|bytes| *bytes > 0);
        let layout = bytes.and_then(|bytes| Layout::from_size_align(bytes, PAGE).ok());
        let layout = layout.ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: the size is not zero.
        let memory = NonNull::new(unsafe { alloc_zeroed(layout) });
        let Some(memory) = memory else { handle_alloc_error(layout) };
        let mut arena = Arena {
            registered: None,
            memory,
            layout,
            block,
            free: Mutex::new((0..count as u32).rev().collect()),
        };
        let may = ibv_access_flags::IBV_ACCESS_LOCAL_WRITE;
        // SAFETY: freed after it is deregistered; what is posted belongs to its queue alone.
        let registered = unsafe { Registered::new(domain, memory.as_ptr(), layout.size(), may) };
        arena.registered = Some(registered?);
        Ok(Arc::new(arena))
    }

    /// A block that nobody uses.
    pub fn take(self: &Arc<Arena>) -> Option<Block> {
        let at = self.free.lock().pop()?;
        Some(Block { arena: Arc::clone(self), at })
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if self.registered.as_ref().is_none_or(Registered::end) {
            // SAFETY: allocated so, and no block is left.
            unsafe { dealloc(self.memory.as_ptr(), self.layout) };
        }
    }
}

/// A piece of an arena. Whoever has it alone uses its bytes; dropping it gives it back.
pub(crate) struct Block {
    arena: Arc<Arena>,
    at: u32,
}

impl Block {
    fn place(&self) -> *mut u8 {
        // SAFETY: the arena has more blocks than `at`.
        unsafe { self.arena.memory.as_ptr().add(self.at as usize * self.arena.block) }
    }

    pub(super) fn piece(&self, len: usize) -> ibv_sge {
        assert!(len <= self.arena.block, "within the block");
        let lkey = self.arena.registered.as_ref().map_or(0, Registered::lkey);
        ibv_sge { addr: self.place() as u64, length: len as u32, lkey }
    }
}

impl Deref for Block {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: initialised, and of this owner alone; a queue that has it posted lends it to nobody.
        unsafe { std::slice::from_raw_parts(self.place(), self.arena.block) }
    }
}

impl DerefMut for Block {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.place(), self.arena.block) }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.arena.free.lock().push(self.at);
    }
}

/// Blocks that wait for what others send, whoever it is.
pub(crate) struct Receives {
    domain: Arc<Domain>,
    srq: NonNull<ibv_srq>,
    posted: Mutex<Vec<Option<Block>>>,
}

// SAFETY: as for the domain.
unsafe impl Send for Receives {}
// SAFETY: as for the domain.
unsafe impl Sync for Receives {}

impl Receives {
    /// A shared receive queue with these blocks.
    pub fn new(domain: Arc<Domain>, blocks: Vec<Block>) -> io::Result<Receives> {
        // SAFETY: numbers and a pointer that may be null.
        let mut init: ibv_srq_init_attr = unsafe { zeroed() };
        init.attr.max_wr = blocks.len() as u32;
        init.attr.max_sge = 1;
        // SAFETY: the domain lives, and the attributes are read in the call.
        let srq = unsafe { (domain.calls.ibv_create_srq)(domain.pd.as_ptr(), &raw mut init) };
        let srq = given(srq, "ibv_create_srq")?;
        let posted = Mutex::new((0..blocks.len()).map(|_| None).collect());
        let receives = Receives { domain, srq, posted };
        for (at, block) in blocks.into_iter().enumerate() {
            receives.post(at as u32, block)?;
        }
        Ok(receives)
    }

    /// Posts a block at a free place.
    pub fn post(&self, at: u32, block: Block) -> io::Result<()> {
        let mut piece = block.piece(block.len());
        let mut wr = ibv_recv_wr {
            wr_id: Work::Received(at).to_wr_id(),
            next: null_mut(),
            sg_list: &raw mut piece,
            num_sge: 1,
        };
        // The block is the queue's before it can be filled.
        let mut posted = self.posted.lock();
        let place = posted.get_mut(at as usize).ok_or(io::ErrorKind::InvalidInput)?;
        let mut bad = null_mut();
        // SAFETY: the queue lives, and what is posted stays in `posted` until it comes back.
        match unsafe { rdma_sys::ibv_post_srq_recv(self.srq.as_ptr(), &raw mut wr, &raw mut bad) } {
            0 => {
                *place = Some(block);
                Ok(())
            }
            e => Err(named(io::Error::from_raw_os_error(e), "ibv_post_srq_recv")),
        }
    }

    /// The block that a completion says is not the queue's any more.
    pub fn done(&self, at: u32) -> Option<Block> {
        self.posted.lock().get_mut(at as usize)?.take()
    }

    pub(super) fn raw(&self) -> *mut ibv_srq {
        self.srq.as_ptr()
    }
}

impl Drop for Receives {
    fn drop(&mut self) {
        // SAFETY: the queue pairs that use it hold it; the blocks go after this.
        unsafe { (self.domain.calls.ibv_destroy_srq)(self.srq.as_ptr()) };
    }
}

/// What a completion is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// Something arrived at this place of the shared queue.
    Received(u32),
    /// What was posted at this place of a queue pair.
    Posted(u32),
}

impl Work {
    pub(super) fn to_wr_id(self) -> u64 {
        match self {
            Work::Received(at) => u64::from(at),
            Work::Posted(at) => 1 << 32 | u64::from(at),
        }
    }

    fn of_wr_id(id: u64) -> Work {
        match id >> 32 {
            0 => Work::Received(id as u32),
            _ => Work::Posted(id as u32),
        }
    }
}

/// Word of the device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Completion {
    pub work: Work,
    pub queue_pair: u32,
    /// How many bytes, of what arrived.
    pub result: Result<usize, Failure>,
}

/// How the device says that it failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} (status {status}, vendor's {vendor})", failure_text(*status))]
pub(crate) struct Failure {
    status: u32,
    vendor: u32,
}

fn failure_text(status: u32) -> &'static str {
    match status {
        ibv_wc_status::IBV_WC_WR_FLUSH_ERR => "the RDMA connection was closed",
        ibv_wc_status::IBV_WC_RETRY_EXC_ERR => "the other end does not answer over RDMA",
        ibv_wc_status::IBV_WC_RNR_RETRY_EXC_ERR => "the other end takes nothing over RDMA",
        ibv_wc_status::IBV_WC_REM_ACCESS_ERR => {
            "the other end's memory may not be written any more"
        }
        ibv_wc_status::IBV_WC_REM_INV_REQ_ERR => "the other end refuses what was sent over RDMA",
        ibv_wc_status::IBV_WC_LOC_LEN_ERR => "more came over RDMA than fits",
        _ => "the RDMA device reports an error",
    }
}

/// A completion queue whose events come through a descriptor.
pub(crate) struct Completions {
    domain: Arc<Domain>,
    channel: NonNull<ibv_comp_channel>,
    cq: NonNull<ibv_cq>,
}

// SAFETY: as for the domain.
unsafe impl Send for Completions {}
// SAFETY: as for the domain.
unsafe impl Sync for Completions {}

const POLL: usize = 32;

impl Completions {
    pub fn new(domain: Arc<Domain>, room: usize) -> io::Result<Completions> {
        let calls = domain.calls;
        // SAFETY: the context lives.
        let channel = unsafe { (calls.ibv_create_comp_channel)(domain.context.as_ptr()) };
        let channel = given(channel, "ibv_create_comp_channel")?;
        // SAFETY: context and channel live.
        let cq = unsafe {
            let context = domain.context.as_ptr();
            (calls.ibv_create_cq)(context, room as i32, null_mut(), channel.as_ptr(), 0)
        };
        let cq = given(cq, "ibv_create_cq").inspect_err(|_| {
            // SAFETY: made above, and nothing uses it.
            unsafe { (calls.ibv_destroy_comp_channel)(channel.as_ptr()) };
        })?;
        let completions = Completions { domain, channel, cq };
        super::set_nonblocking(&completions)?;
        Ok(completions)
    }

    pub(super) fn raw(&self) -> *mut ibv_cq {
        self.cq.as_ptr()
    }

    /// How many there can be.
    pub fn room(&self) -> usize {
        // SAFETY: lives as long as this.
        unsafe { self.cq.as_ref() }.cqe as usize
    }

    /// Takes the events that the descriptor has.
    pub fn take_events(&self) -> io::Result<()> {
        let mut taken = 0;
        let (mut cq, mut context) = (null_mut(), null_mut());
        // SAFETY: the channel lives, and both places are good for the call.
        while unsafe {
            (self.domain.calls.ibv_get_cq_event)(
                self.channel.as_ptr(),
                &raw mut cq,
                &raw mut context,
            )
        } == 0
        {
            taken += 1;
        }
        let e = io::Error::last_os_error();
        if taken > 0 {
            // SAFETY: the events of this channel are all of this queue.
            unsafe { (self.domain.calls.ibv_ack_cq_events)(self.raw(), taken) };
        }
        if e.kind() == io::ErrorKind::WouldBlock {
            Ok(())
        } else {
            Err(named(e, "ibv_get_cq_event"))
        }
    }

    /// Has the next completion make an event.
    pub fn arm(&self) -> io::Result<()> {
        // SAFETY: the queue lives.
        match unsafe { rdma_sys::ibv_req_notify_cq(self.raw(), 0) } {
            0 => Ok(()),
            e => Err(named(io::Error::from_raw_os_error(e), "ibv_req_notify_cq")),
        }
    }

    /// Gives `each` what is there, some of it: how many.
    pub fn poll(&self, mut each: impl FnMut(Completion)) -> io::Result<usize> {
        // SAFETY: numbers, for which zeros are a value.
        let mut all: [ibv_wc; POLL] = unsafe { zeroed() };
        // SAFETY: the queue lives, and there is room for so many.
        let n = unsafe { rdma_sys::ibv_poll_cq(self.raw(), POLL as i32, all.as_mut_ptr()) };
        let n = usize::try_from(n).map_err(|_| io::Error::other("ibv_poll_cq fails"))?;
        for wc in &all[..n] {
            let result = match wc.status {
                ibv_wc_status::IBV_WC_SUCCESS => Ok(wc.byte_len as usize),
                status => Err(Failure { status, vendor: wc.vendor_err }),
            };
            each(Completion { work: Work::of_wr_id(wc.wr_id), queue_pair: wc.qp_num, result });
        }
        Ok(n)
    }
}

impl AsRawFd for Completions {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl AsFd for Completions {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel and its descriptor live as long as this.
        unsafe { BorrowedFd::borrow_raw(self.channel.as_ref().fd) }
    }
}

impl Drop for Completions {
    fn drop(&mut self) {
        // SAFETY: the queue pairs that use it hold it, and all events were acknowledged.
        unsafe {
            (self.domain.calls.ibv_destroy_cq)(self.cq.as_ptr());
            (self.domain.calls.ibv_destroy_comp_channel)(self.channel.as_ptr());
        }
    }
}
