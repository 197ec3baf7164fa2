//! The seat of a file: while one node alone has it open past its daemon, under a model that asks at
//! each read or write, that node's cache file is the one truth of it. Part of [`FileState`].
//!
//! * Who has the seat asks nobody and need not be asked by its own applications: nobody else
//!   changes a byte of the file. What other nodes want to change they do there, at the seat.
//! * Where the model's writes publish, the seat is asked to publish before anybody else is told
//!   anything of the file ([`Seat::asked`]); else it publishes at the calls of its model.
//! * A seat is not trusted for a time and never taken away: the kernel goes on reading and writing
//!   the cache file, whatever becomes of the daemon. It ends when the node says so, or is gone
//!   for good. As long as the node is silent, nobody is told anything that it may have changed.

use super::FileState;
use ebb_types::NodeId;
use serde::{Deserialize, Serialize};

/// A node at which a file sits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Seat {
    /// Which one.
    pub node: NodeId,
    /// Told apart from every other seat of that node: its own choice.
    pub id: u64,
    /// It writes without telling, and is asked before anybody else is told of the file.
    pub asked: bool,
}

impl FileState {
    /// Where the file sits.
    #[must_use]
    pub fn seat(&self) -> Option<Seat> {
        self.seat
    }

    /// Where others than `node` must go to change a byte of it.
    #[must_use]
    pub fn seat_elsewhere(&self, node: NodeId) -> Option<Seat> {
        self.seat.filter(|seat| seat.node != node)
    }

    /// From now on the file sits there. It sits nowhere else at that time.
    pub fn take_seat(&mut self, seat: Seat) {
        self.seat = Some(seat);
    }

    /// That seat has ended, after everything that was written there was published.
    pub fn leave_seat(&mut self, node: NodeId, id: u64) {
        self.seat.take_if(|seat| seat.node == node && seat.id == id);
    }
}
