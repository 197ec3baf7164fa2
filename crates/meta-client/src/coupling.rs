//! Coupled files: what is asked of them, and answered. Waiting for one is as waiting for a lock (`locks`).

use crate::bytes::Opened;
use ebb_types::{Ino, Name};
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
    /// The file is coupled, as the service has said.
    pub coupled: bool,
    /// Of how many producers, or consumers, it has said to be one; 0: it has not.
    pub of: u32,
    /// How it ended.
    pub left: Option<Left>,
}

/// How an open of a coupled file ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// What was written is published, or what was to be read was read.
    Through,
    /// Who had it open was killed.
    Died,
    /// It came to nothing.
    Withdrawn,
}
