//! Coupled files: waiting for one, and leaving it.

use crate::bytes::Opened;
use crate::client::MetaClient;
use crate::locks::LockCall;
use ebb_types::{Errno, Ino, Name};
use ebb_wire::pb::{self, request::Op};
use std::time::Duration;

/// How an open that counts is answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OpenAnswer {
    /// It is open.
    Opened(Box<Opened>),
    /// Nothing was done: its producers are not through. Wait so long at most, and ask again.
    Awaits(Duration),
}

/// What is waited for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Awaited {
    /// This file.
    File(Ino),
    /// One of that name.
    Named(Ino, Name),
}

/// A file and a number of an open of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CoupledHandle {
    /// The file.
    pub ino: Ino,
    /// As it was told with the open; not 0.
    pub handle: u64,
    /// Opened to write.
    pub write: bool,
}

impl MetaClient {
    /// Waits until a coupled file can be read. EIO: a producer died. As with a lock, nothing but the caller
    /// ends it; dropping it cancels.
    pub fn await_coupled(&self, what: &Awaited) -> LockCall {
        let (ino, parent, name) = match what {
            Awaited::File(ino) => (ino.0, 0, Vec::new()),
            Awaited::Named(parent, name) => (0, parent.0, name.as_bytes().to_vec()),
        };
        self.waiting_call(Op::Await(pb::Await { ino, parent, name }), true)
    }

    /// An open of a coupled file has ended.
    pub async fn leave_coupled(&self, ino: Ino, handle: u64, through: bool) -> Result<(), Errno> {
        self.call(Op::Leave(pb::Leave { ino: ino.0, handle, through })).await.map(drop)
    }
}
