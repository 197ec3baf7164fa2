//! Whether an open may be passed through: its reads and writes then go from the kernel to the cache
//! file and never reach the daemon. One pure decision from what the model promises, what is known
//! of the file, and who else has it open. Nobody else decides this.
//!
//! The kernel wants all opens of an inode on a node to be of one kind, from the first to the
//! last: the first one chooses ([`Beside`]). While an inode is passed through, the daemon keeps its
//! cache file such that it reads right by itself; whatever a query shows is brought into it before
//! the call returns.

use crate::claim::shared_claims_are_exact;
use crate::model::{Model, SyncEvent};
use crate::view::FileView;
use ebb_types::Access;
use ebb_types::Version;
use std::fmt;

/// Most bytes that are copied when a file with content is opened to be written past the daemon.
const TWIN_BYTES_MAX: u64 = 64 << 20;

/// What the other local handles of the inode are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Beside {
    /// There are none.
    Nobody,
    /// Their reads and writes go to the daemon.
    Daemon,
    /// The inode is passed through, for reading only.
    Readers,
    /// The inode is passed through, and writes past the daemon are found in its cache file.
    Writers,
}

/// Everything the decision needs besides the view.
#[derive(Clone, Copy, Debug)]
pub struct Circumstances<'a> {
    /// The model of the file.
    pub model: &'a Model,
    /// What the open wants.
    pub access: Access,
    /// Other local handles.
    pub beside: Beside,
    /// The file sits here ([`crate::Seat`]): nobody else changes what this open may see, for as
    /// long as it lives, nor is told of it without asking.
    pub seated: bool,
    /// The service says that no other node has the file open.
    pub sole: bool,
    /// The file has setuid or setgid bits, which a write must clear.
    pub privileged: bool,
    /// What keeps this node from it, whatever the file: found at start.
    pub obstacle: Option<Reason>,
    /// The buffer is nearly full.
    pub crowded: bool,
    /// The disk of the cache ends where the buffer does, or soon after: nothing else stops a writer
    /// past the daemon.
    pub confined: bool,
    /// The kernel tells which bytes are written past the daemon, so that nobody has to look for them.
    pub told: bool,
    /// What is open past the daemon keeps so much in the buffer that no more should be.
    pub pinned: bool,
}

/// Why an open goes to the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// `--io-path daemon`.
    SwitchedOff,
    /// `--replicas 2`: a partner is told of every write.
    Copies,
    /// The kernel has no FUSE passthrough.
    Kernel,
    /// CAP_SYS_ADMIN is missing.
    Privilege,
    /// The cache is on a file system that cannot be passed through.
    Stacked,
    /// The cache's file system cannot tell whether a mapping is left (leases of files).
    CacheFs,
    /// The model asks the service at each read or write.
    ModelAsks,
    /// Other local handles of the file go to the daemon.
    OtherOpens,
    /// Some bytes are not in the cache.
    NotLocal,
    /// It is to be written and has content already, and nobody tells of writes past the daemon, or
    /// too much of it is other nodes' or the backing's.
    NotEmpty,
    /// Other nodes have it open, and the model lets an open file see their bytes.
    Shared,
    /// A write must clear setuid or setgid bits.
    SetId,
    /// The buffer is nearly full, and writers past the daemon are not slowed.
    BufferNearlyFull,
    /// The buffer is to be smaller than its disk, and only the disk stops writers past the daemon.
    CacheSize,
    /// Files that are open past the daemon, which cannot be given up, are half of the buffer.
    BufferPinned,
    /// The node itself opens it, as for staging: there is no kernel to pass it to.
    Inside,
}

impl Reason {
    /// Every reason.
    pub const ALL: [Reason; 16] = [
        Reason::SwitchedOff,
        Reason::Copies,
        Reason::Kernel,
        Reason::Privilege,
        Reason::Stacked,
        Reason::CacheFs,
        Reason::ModelAsks,
        Reason::OtherOpens,
        Reason::NotLocal,
        Reason::NotEmpty,
        Reason::Shared,
        Reason::SetId,
        Reason::BufferNearlyFull,
        Reason::CacheSize,
        Reason::BufferPinned,
        Reason::Inside,
    ];

    /// Its name in status and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Reason::SwitchedOff => "switched-off",
            Reason::Copies => "copies",
            Reason::Kernel => "kernel",
            Reason::Privilege => "privilege",
            Reason::Stacked => "stacked",
            Reason::CacheFs => "cache-fs",
            Reason::ModelAsks => "model-asks",
            Reason::OtherOpens => "other-opens",
            Reason::NotLocal => "not-local",
            Reason::NotEmpty => "not-empty",
            Reason::Shared => "shared",
            Reason::SetId => "set-id",
            Reason::BufferNearlyFull => "buffer-nearly-full",
            Reason::CacheSize => "cache-size",
            Reason::BufferPinned => "buffer-pinned",
            Reason::Inside => "inside",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Which way an open goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IoPath {
    /// Past the daemon, which need not know of reads.
    Read,
    /// Past the daemon; what is written the kernel tells, or it is found in the cache file afterwards.
    Write,
    /// Through the daemon.
    Daemon(Reason),
    /// The inode is passed through and stays it; this handle's own reads and writes go to the
    /// daemon, so that its writes are known by the byte.
    DaemonBeside(Reason),
}

/// Decides for one open. `view` is what is known once the open has asked what its model asks.
#[must_use]
pub fn decide(view: &FileView, of: &Circumstances<'_>) -> IoPath {
    if of.beside == Beside::Daemon {
        return IoPath::Daemon(Reason::OtherOpens);
    }
    if of.beside == Beside::Nobody
        && let Some(reason) = of.obstacle.or_else(|| against_model(of))
    {
        return IoPath::Daemon(reason);
    }
    match (of.beside, of.access.writes()) {
        (Beside::Nobody, false) => first_reader(view, of),
        (Beside::Nobody, true) => first_writer(view, of).map_or(IoPath::Write, IoPath::Daemon),
        (_, false) => IoPath::Read,
        (Beside::Writers, true) => IoPath::Write,
        (_, true) if of.told => match against_model(of).or_else(|| first_writer(view, of)) {
            None => IoPath::Write,
            Some(reason) => IoPath::DaemonBeside(reason),
        },
        (_, true) => IoPath::DaemonBeside(Reason::NotEmpty),
    }
}

/// A model that asks at each read or write: past the daemon only with a seat ([`crate::Seat`]).
#[must_use]
pub fn wants_seat(model: &Model) -> bool {
    model.reads_ask() || model.on(SyncEvent::Write).attach.is_some()
}

/// A model that asks at each read or write wants to be asked, unless there is nothing to ask.
fn against_model(of: &Circumstances<'_>) -> Option<Reason> {
    (wants_seat(of.model) && !of.seated).then_some(Reason::ModelAsks)
}

fn first_reader(view: &FileView, of: &Circumstances<'_>) -> IoPath {
    if view.known_version() == Version::ZERO || !view.is_complete() {
        IoPath::Daemon(Reason::NotLocal)
    } else if of.pinned {
        IoPath::Daemon(Reason::BufferPinned)
    } else {
        IoPath::Read
    }
}

/// What speaks against writing past the daemon.
fn first_writer(view: &FileView, of: &Circumstances<'_>) -> Option<Reason> {
    let alone = of.sole && of.seated;
    if view.known_version() == Version::ZERO || !(view.is_blank() || may_be_rewritten(view, of)) {
        Some(Reason::NotEmpty)
    } else if !(alone || shared_claims_are_exact(of.model)) {
        Some(Reason::ModelAsks)
    } else if looks_while_open(of.model) && !of.sole {
        Some(Reason::Shared)
    } else if of.privileged {
        Some(Reason::SetId)
    } else if !of.confined {
        Some(Reason::CacheSize)
    } else if of.crowded {
        Some(Reason::BufferNearlyFull)
    } else if of.pinned && !view.is_blank() {
        Some(Reason::BufferPinned)
    } else {
        None
    }
}

/// A file with content may be written past the daemon where the writes are told of. What was lost of
/// that is looked for as in any other file, so that others' bytes need a twin from the beginning:
/// not more of them than can be copied in an instant.
fn may_be_rewritten(view: &FileView, of: &Circumstances<'_>) -> bool {
    of.told && view.is_complete() && view.borrowed_bytes() <= TWIN_BYTES_MAX
}

/// An open file comes to see what others wrote at a call that programs make often. Everything
/// that the call shows would have to be fetched at once, so writers that share a file are better
/// off with the daemon. Not a question of being right.
fn looks_while_open(model: &Model) -> bool {
    let often = [SyncEvent::Fsync, SyncEvent::Close, SyncEvent::Stat];
    often.into_iter().any(|event| model.on(event).query.is_some())
}

#[cfg(test)]
#[path = "path_tests.rs"]
mod tests;
