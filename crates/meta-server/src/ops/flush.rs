//! Flushing: who may write to the backing, and what follows when nothing is missing there.

use super::{Call, OpError, OpResult, ranges};
use crate::core::Core;
use crate::grants::{ClaimId, Right};
use crate::state::{Entry, FileOp, State};
use ebb_consistency::FileState;
use ebb_namespace::Home;
use ebb_types::{Attr, ByteRange, Errno, FileKind, Ino, NodeId, Time, Version};
use ebb_wire::pb;
use ebb_wire::pb::reply::Body;
use std::sync::Arc;

/// What a part file was given, synced with its bytes, as long as the file has this version.
#[derive(Clone, Copy)]
struct Shaped {
    shape: Attr,
    version: Version,
}

/// What holds a file back that replaces an older one on the backing: more may be written to it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Unless {
    /// Somebody has it open.
    Open,
    /// A node that has written to it has it open and is gone: it may have died in the middle. (Whoever only
    /// read it must not keep what others drain from its name.)
    OpenByTheDead,
}

fn held_back(state: &State, ino: Ino, counts: impl Fn(NodeId) -> bool) -> bool {
    let replaces = state.ns.replaces(ino) != 0 && !state.is_dirty(ino);
    replaces && state.ns.open_by(ino).any(counts)
}

/// A claim that ends when it is dropped.
pub(super) struct Claim<'a> {
    core: &'a Core,
    ino: Ino,
    id: ClaimId,
    node: NodeId,
    kept: bool,
}

impl<'a> Claim<'a> {
    pub fn new(core: &'a Core, ino: Ino, id: ClaimId, node: NodeId) -> Claim<'a> {
        Claim { core, ino, id, node, kept: false }
    }

    /// It stays until somebody ends it.
    fn keep(mut self) -> ClaimId {
        self.kept = true;
        self.id
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        if !self.kept {
            self.core.end_claim(self.ino, self.id, self.node);
        }
    }
}

impl Call {
    pub(super) async fn flush_begin(&self, op: &pb::FlushBegin) -> OpResult {
        let ino = Ino(op.ino);
        let node = self.who.node;
        let wanted = ranges(&op.ranges)?;
        if !self.may_flush(ino, &wanted)? {
            return Ok(Some(Body::FlushGrant(self.nothing_to_flush(ino)?)));
        }
        let id = self.core.claim(ino, node, &wanted).await.map_err(|e| {
            OpError::new(e, "others were writing these bytes to the backing for too long")
        })?;
        let claim = Claim::new(&self.core, ino, id, node);
        self.place(ino).await?;
        self.check_life()?;
        let (granted, backing, size, shape, owner) = {
            let state = self.core.state();
            let file = state.file(ino)?;
            let granted = file.grantable(node, &wanted);
            let bytes: u64 = granted.iter().map(|o| o.range.len()).sum();
            let last = bytes == file.unflushed_bytes();
            let may = last && state.ns.needs_only_a_shape(ino);
            let shape = if may { Some((state.attr(ino)?, file.version())) } else { None };
            let owner = state.ns.inode(ino)?.uid;
            (granted, super::bytes::backing_ref(&state, ino), file.size(), shape, owner)
        };
        if granted.is_empty() {
            return Ok(Some(Body::FlushGrant(self.nothing_to_flush(ino)?)));
        }
        let ranges = granted.iter().map(super::bytes::owned).collect();
        self.core.narrow_claim(ino, id, Right { ranges: granted, shape });
        let shape = shape.map(|(attr, _)| ebb_wire::attr_to_pb(&attr));
        // While the claim still ends by itself: who is answered with a failure will never end it.
        self.core.noted().await?;
        let grant = claim.keep();
        Ok(Some(Body::FlushGrant(pb::FlushGrant { grant, ranges, backing, size, shape, owner })))
    }

    /// ENOENT for a file without a name: its bytes are needed on no backing.
    fn may_flush(&self, ino: Ino, wanted: &[ByteRange]) -> Result<bool, OpError> {
        let state = self.core.state();
        let file = state.file(ino)?;
        if state.ns.inode(ino)?.links.is_empty() {
            return Err(OpError::new(Errno::ENOENT, "the file was deleted"));
        }
        Ok(!file.grantable(self.who.node, wanted).is_empty())
    }

    fn nothing_to_flush(&self, ino: Ino) -> Result<pb::FlushGrant, OpError> {
        let state = self.core.state();
        let size = state.file(ino)?.size();
        let backing = super::bytes::backing_ref(&state, ino);
        Ok(pb::FlushGrant { backing, size, ..Default::default() })
    }

    /// The file gets a place on the backing.
    async fn place(&self, ino: Ino) -> Result<(), OpError> {
        if self.core.state().ns.inode(ino)?.home != Home::None {
            return Ok(());
        }
        let core = Arc::clone(&self.core);
        let plan = move |state: &State| {
            let striping = core.striping_of(state, ino);
            let len = state.files.get(&ino).and_then(|file| file.len_beyond_bytes());
            state.ns.plan_place(ino, striping, len, Time::now()).map(Some)
        };
        let placed = self.core.in_round(ino, plan).await;
        let why = |e: Errno| format!("making the file on the backing failed: {e}");
        placed.map(drop).map_err(|e| OpError::new(e, why(e)))
    }

    pub(super) async fn flush_end(&self, op: &pb::FlushEnd) -> OpResult {
        let ino = Ino(op.ino);
        let node = self.who.node;
        let (shaped, again) = {
            let mut state = self.core.state();
            // Under the state: nothing can be cut or claimed between the two.
            let granted = self.core.end_claim(ino, op.grant, node).ok_or_else(|| {
                OpError::new(Errno::ESTALE, "no such grant; it may have ended with the lease")
            })?;
            // Of the file as it is now: whatever else came to the backing since has changed it.
            let version = |state: &State| state.file(ino).map(FileState::version).ok();
            let current = granted.shape.filter(|(_, of)| op.shaped && version(&state) == Some(*of));
            let mut again = Vec::new();
            if op.done && state.file(ino).is_ok() {
                let entry = Entry::File(ino, FileOp::Flushed(node, granted.ranges.clone()));
                self.core.commit(&mut state, &[entry]);
                again = state.file(ino)?.newer_than_granted(node, &granted.ranges);
            }
            let shaped =
                current.and_then(|(shape, _)| Some(Shaped { shape, version: version(&state)? }));
            (shaped, again)
        };
        if self.core.state().ns.get(ino).is_none_or(|i| i.links.is_empty()) {
            return Err(OpError::new(Errno::ENOENT, "the file was deleted"));
        }
        let waits = op.done && self.core.waits_for_closes(ino);
        let published = match op.done && !waits {
            false => false,
            true => self.core.publish_shaped(ino, shaped, Unless::Open).await.unwrap_or_else(|e| {
                // The bytes are safe where they are; a drain tries again and reports.
                self.core.report(ino, "publish", e);
                false
            }),
        };
        // It may have been opened since, and emptied.
        let waits = waits || (op.done && !published && self.core.waits_for_closes(ino));
        let version = self.core.state().file(ino).map_or(0, |f| f.version().0);
        let again = again.into_iter().map(ebb_wire::range_to_pb).collect();
        Ok(Some(Body::FlushDone(pb::FlushDone { published, version, again, waits })))
    }
}

impl Core {
    /// Nothing of it is missing on the backing, and it replaces an older file there: that stays until
    /// nobody has the new one open any more, for more may be written.
    pub(super) fn waits_for_closes(&self, ino: Ino) -> bool {
        self.waits_for(ino, Unless::Open)
    }

    pub(super) fn waits_for(&self, ino: Ino, unless: Unless) -> bool {
        let state = self.state();
        let half = |node| self.sessions.is_gone(node) && state.may_be_half(ino, node);
        held_back(&state, ino, |node| unless == Unless::Open || half(node))
    }

    /// The nodes that are gone and may have died in the middle of writing it.
    pub(super) fn left_half_by(&self, state: &State, ino: Ino) -> Vec<NodeId> {
        state.writes_over(ino).filter(|node| self.sessions.is_gone(*node)).collect()
    }

    /// A failure on the backing that status shows.
    pub(super) fn report(&self, ino: Ino, operation: &str, errno: Errno) {
        let path = self.state().ns.path(ino).map(|p| p.to_bytes()).unwrap_or_default();
        tracing::warn!(path = %String::from_utf8_lossy(&path), operation, ?errno, "on the backing");
        self.stats.failed(&path, operation, errno);
    }

    /// Brings to the backing what is missing of an inode; false when that must wait, because
    /// bytes are unflushed or being written.
    pub(super) async fn publish(&self, ino: Ino, unless: Unless) -> Result<bool, Errno> {
        self.publish_shaped(ino, None, unless).await
    }

    async fn publish_shaped(
        &self,
        ino: Ino,
        shaped: Option<Shaped>,
        unless: Unless,
    ) -> Result<bool, Errno> {
        let regular = self.state().ns.inode(ino)?.kind == FileKind::Regular;
        let _claim = if regular {
            let Some(id) = self.try_claim(ino, NodeId::NOBODY, &[ByteRange::ALL]) else {
                return Ok(false);
            };
            Some(Claim::new(self, ino, id, NodeId::NOBODY))
        } else {
            None
        };
        let errno = match self.publish_once(ino, shaped, unless).await {
            Err(errno) => errno,
            done => return done,
        };
        // Others changed something there, or we did and could not note it.
        let surprise =
            matches!(errno, Errno::EEXIST | Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP);
        let links = self.state().ns.inode(ino)?.links.clone();
        for link in links {
            match self.look_again(link.parent, &link.name).await {
                Err(e) if surprise => return Err(e),
                _ => {}
            }
        }
        if surprise { self.publish_once(ino, None, unless).await } else { Err(errno) }
    }

    async fn publish_once(
        &self,
        ino: Ino,
        shaped: Option<Shaped>,
        unless: Unless,
    ) -> Result<bool, Errno> {
        let plan = move |state: &State| {
            let inode = state.ns.inode(ino)?;
            let nameless = inode.links.is_empty() && ino != Ino::ROOT;
            // Who asked may have looked before somebody opened it and cut it to nothing.
            let opened = unless == Unless::Open && held_back(state, ino, |_| true);
            if nameless || opened || state.is_dirty(ino) {
                return Ok(None);
            }
            let file = state.files.get(&ino);
            let size = file.map_or(0, |file| file.size());
            let shaped = shaped.filter(|s| file.is_some_and(|f| f.version() == s.version));
            let shaped = shaped.as_ref().map(|s| &s.shape);
            state.ns.plan_publish(ino, size, shaped, Time::now()).map(Some)
        };
        self.in_round(ino, plan).await
    }
}
