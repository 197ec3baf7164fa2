//! The entries of the journal: what can happen to the state, and how it is written. New kinds come last, so
//! that older journals are read as ever.

use super::Misfit;
use crate::begun::Begun;
use crate::lineage::Start;
use crate::rebuild::Rebuild;
use ebb_consistency::{
    Assertion, FileState, Leap, Owned, QuietState, Seat, StoredChanges, StoredGuesses,
};
use ebb_coupling::{Coupled, Step, Terms};
use ebb_namespace::Record;
use ebb_namespace::locks::{Lock, Owner, Space};
use ebb_types::facts::Moment;
use ebb_types::{ByteRange, Incarnation, Ino, NodeId, Version};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// One change. A journal record is a list of them that belong together.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Entry {
    /// All nodes of the job agree on this.
    Consistency(String),
    /// A change of names, inodes or opens.
    Ns(Record),
    /// A change of the bytes of a file.
    File(Ino, FileOp),
    /// A node joined, or came back as another incarnation.
    Node(NodeRecord),
    /// A node left for good.
    NodeLeft(NodeId),
    /// Numbers of nodes below this one are taken.
    NextNode(u32),
    /// A lock is held.
    Lock(Ino, Space, Lock),
    /// A range is not locked by this owner.
    Unlock(Ino, Space, Owner, ByteRange),
    /// A node holds no locks.
    UnlockNode(NodeId),
    /// Everything below this directory has that model, or its own way again.
    Model(Ino, Option<String>),
    /// A request that must not be done twice has been done.
    Answered(NodeId, u64, Outcome),
    /// A change of the backing begins.
    Begun(Box<Begun>),
    /// It is done, and what it changed is in the state; or it failed.
    Ended,
    /// Where copies of a node's unflushed bytes are.
    Paired(NodeId, Option<Pair>),
    /// The copies of this epoch belong to a lost node and may be adopted; or no longer.
    Orphaned(u64, Option<Orphaned>),
    /// Epochs of copies below this one are used up.
    NextEpoch(u64),
    /// A node goes on as another incarnation: what was answered to the old one still counts.
    Heir(NodeRecord),
    /// A service begins on this state.
    Started(Start),
    /// In a snapshot, as its last entry: so many records were journalled before what follows.
    Journalled(u64),
    /// A node was given up for its silence and has not heard of it yet; or it has.
    GivenUp(NodeId, bool),
    /// Versions up to this one were given to files that were forgotten since.
    Forgotten(Version),
    /// This node has told again what a service that lost the end of its journal may have forgotten.
    Reasserted(NodeId),
    /// In a snapshot: below this no version is given out any more, these nodes have not told yet, and after
    /// which moment names may be lost.
    Leapt(Version, Vec<NodeId>, Option<(Moment, Ino)>),
    /// Names are as nodes have told them again; what comes later is too late.
    Named,
    /// The node is writing this file over (`Halves`); or it is not any more.
    WritesOver(Ino, NodeId, bool),
    /// This state is being rebuilt from what nodes know, or was.
    Rebuilding(Box<Rebuild>),
    /// The job of a state that was rebuilt, as its nodes say.
    Job(u64),
    /// This node has not told yet what it knows.
    Owes(NodeId),
    /// It is gone, and the state is rebuilt without it.
    LeftOut(NodeId),
    /// These were deleted before the state was rebuilt.
    Deleted(Vec<Ino>),
    /// In a snapshot, after the nodes: so many lives of nodes there were.
    Lives(u32),
    /// The files of this directory are coupled, or not.
    Couples(Ino, Option<Terms>),
    /// A coupled file was made; or, in a snapshot, is there. Or it is a plain file from now on.
    Coupled(Ino, Option<Box<Coupled>>),
    /// Somebody opened it, or left.
    CoupledStep(Ino, Step),
}

/// Where copies of a node's unflushed bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pair {
    /// The node that holds them.
    pub partner: NodeId,
    /// Told apart from the copies of every other pair.
    pub epoch: u64,
}

/// Copies of a lost node's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Orphaned {
    /// The lost node.
    pub owner: NodeId,
    /// Who has them.
    pub partner: NodeId,
}

/// What a repeated request is answered with after the service was restarted in between.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// Success, nothing to tell.
    Plain,
    /// The inode that was made, linked or changed.
    Inode(Ino),
    /// The end of the file after an append, and its version.
    Appended(u64, Version),
}

/// What happens to the bytes of a file; see [`FileState`].
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum FileOp {
    State(Arc<FileState>),
    Attach(NodeId, Vec<ByteRange>),
    Append(NodeId, u64),
    Detach(NodeId, Vec<ByteRange>),
    Truncate(u64),
    Flushed(NodeId, Vec<Owned>),
    DetachAnew(NodeId, Vec<ByteRange>),
    /// Follows `State` in a snapshot.
    Changes(Box<StoredChanges>),
    Adopt(NodeId, NodeId, Vec<ByteRange>),
    Lost(NodeId),
    /// An attach: of what was written, and of granted claims.
    Claim(NodeId, Vec<ByteRange>, Vec<ByteRange>),
    /// Follows `State` in a snapshot.
    Guesses(Box<StoredGuesses>),
    /// The node may write quietly as far as this; `None`: not any more.
    Quiet(NodeId, Option<u64>),
    /// The node that may is given up.
    Lapse,
    /// What this node wrote quietly will never be told.
    Lose(NodeId),
    /// It is back and has told what it wrote.
    TakeBack(NodeId),
    /// Follows `State` in a snapshot.
    QuietState(Box<QuietState>),
    /// What this node was appending there when it was lost, and nobody has.
    UndoAppend(NodeId, ByteRange),
    /// The file sits at this node.
    Seat(Seat),
    /// It does not any more: at no node.
    NoSeat(NodeId, u64),
    /// It is at least so long.
    Grow(u64),
    /// What a node knows of it from before the service lost the end of its journal.
    Reassert(NodeId, Box<Assertion>),
    /// Follows `State` in a snapshot.
    Leap(Box<(Version, Option<Leap>)>),
}

impl FileOp {
    /// The nodes that `file` may concern by this, when it has been done, and did not before. (Others may
    /// have lost what they had.)
    pub(super) fn names(&self, file: &FileState) -> Vec<NodeId> {
        match self {
            FileOp::State(_) | FileOp::QuietState(_) => file.concerned().collect(),
            FileOp::Attach(node, _)
            | FileOp::Append(node, _)
            | FileOp::Detach(node, _)
            | FileOp::Flushed(node, _)
            | FileOp::DetachAnew(node, _)
            | FileOp::Lost(node)
            | FileOp::Claim(node, ..)
            | FileOp::Quiet(node, _)
            | FileOp::Lose(node)
            | FileOp::TakeBack(node)
            | FileOp::UndoAppend(node, _)
            | FileOp::NoSeat(node, _) => vec![*node],
            FileOp::Seat(seat) => vec![seat.node],
            FileOp::Adopt(from, to, _) => vec![*from, *to],
            FileOp::Reassert(teller, assertion) => {
                let mut nodes: Vec<NodeId> = assertion.owners().chain([*teller]).collect();
                nodes.sort_unstable();
                nodes.dedup();
                nodes
            }
            // Who may write quietly was one of them before it was given up.
            FileOp::Lapse
            | FileOp::Truncate(_)
            | FileOp::Grow(_)
            | FileOp::Changes(_)
            | FileOp::Guesses(_)
            | FileOp::Leap(_) => Vec::new(),
        }
    }
}

/// A node as the journal keeps it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeRecord {
    /// Its number.
    pub id: NodeId,
    /// Its name.
    pub name: String,
    /// Which life of its daemon.
    pub incarnation: Incarnation,
    /// Where it serves its bytes.
    pub peer_address: String,
}

/// Entries that belong together as the body of a record, of any length.
pub fn encode(entries: &[Entry]) -> Vec<u8> {
    postcard::to_stdvec(entries).expect("entries have no types that postcard refuses")
}

/// A snapshot as framed records, in bodies of moderate size.
pub fn encode_snapshot(entries: impl Iterator<Item = Entry>) -> Vec<u8> {
    let (mut out, mut entries) = (Vec::new(), entries.peekable());
    while entries.peek().is_some() {
        let chunk: Vec<Entry> = entries.by_ref().take(4096).collect();
        crate::journal::frame(&mut out, &encode(&chunk));
    }
    out
}

/// The entries of a record body.
pub fn decode(body: &[u8]) -> Result<Vec<Entry>, Misfit> {
    postcard::from_bytes(body).map_err(|e| format!("not a list of entries: {e}"))
}
