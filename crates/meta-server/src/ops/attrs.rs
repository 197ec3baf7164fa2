//! getattr, setattr, readlink, access, statfs.

use super::{Call, OpResult, entry, size};
use crate::core::{Core, Turn};
use crate::state::{Entry, FileOp, State};
use ebb_namespace::{AttrChange, Change, Effect, Plan, Record, Restat, SetTime, Step};
use ebb_types::{ByteRange, Errno, Ino, NodeId, Time};
use ebb_wire::pb;
use ebb_wire::pb::reply::Body;

/// What becomes of the size of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// It is cut or extended to this.
    Exactly(u64),
    /// It is extended to this where it is shorter; what others have written is never cut.
    AtLeast(u64),
}

impl Size {
    /// Whether that changes a file of this size.
    fn changes(self, had: u64) -> bool {
        match self {
            Size::Exactly(len) => had != len,
            Size::AtLeast(len) => had < len,
        }
    }

    /// The change, in words of the journal.
    fn op(self) -> FileOp {
        match self {
            Size::Exactly(len) => FileOp::Truncate(len),
            // Others may attach bytes beyond it until this is applied.
            Size::AtLeast(len) => FileOp::Grow(len),
        }
    }

    fn len(self) -> u64 {
        match self {
            Size::Exactly(len) | Size::AtLeast(len) => len,
        }
    }

    /// From where on nobody may flush meanwhile.
    fn claims_from(self, had: u64) -> u64 {
        match self {
            Size::Exactly(len) => len.min(had),
            Size::AtLeast(_) => had,
        }
    }
}

impl Call {
    pub(super) fn get_attr_fast(&self, op: &pb::GetAttr) -> Option<OpResult> {
        let ino = Ino(op.ino);
        let fresh = self.core.needs_no_compare(ino);
        match fresh {
            Err(e) => Some(Err(e.into())),
            Ok(true) => Some(entry(&self.core.state(), ino)),
            Ok(false) => None,
        }
    }

    pub(super) async fn get_attr(&self, op: &pb::GetAttr) -> OpResult {
        self.core.compare(Ino(op.ino), false).await?;
        entry(&self.core.state(), Ino(op.ino))
    }

    pub(super) fn access(&self, op: &pb::Access) -> OpResult {
        self.core.state().ns.inode(Ino(op.ino))?;
        Ok(None)
    }

    pub(super) fn read_link(&self, op: &pb::ReadLink) -> OpResult {
        let state = self.core.state();
        let target = state.ns.inode(Ino(op.ino))?.target.as_ref().ok_or(Errno::EINVAL)?;
        Ok(Some(Body::Bytes(pb::Bytes { data: target.to_vec() })))
    }

    pub(super) async fn stat_fs(&self) -> OpResult {
        let s = self.core.backing.run(|b| b.stat_fs()).await?;
        let small = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
        Ok(Some(Body::StatFs(pb::StatFsReply {
            blocks: s.f_blocks,
            bfree: s.f_bfree,
            bavail: s.f_bavail,
            files: s.f_files,
            ffree: s.f_ffree,
            bsize: small(s.f_bsize),
            namelen: small(s.f_namemax),
            frsize: small(s.f_frsize),
        })))
    }

    pub(super) async fn set_attr(&self, op: &pb::SetAttr) -> OpResult {
        let ino = Ino(op.ino);
        let change = change_of(op)?;
        match op.size {
            None => {
                self.core.compare(ino, false).await?;
                let plan = |state: &State| state.ns.plan_set_attr(ino, &change, Time::now());
                self.core.change(&[], plan, |_| Vec::new()).await?;
                self.set(ino, op.lease, false)
            }
            Some(len) => {
                let len = size(len)?;
                let to = if op.only_grow { Size::AtLeast(len) } else { Size::Exactly(len) };
                let seat = self.core.set_size(self.who.node, ino, to, &change).await?;
                let mut set = self.set(ino, op.lease, true)?;
                if let Some(Body::Entry(entry)) = &mut set {
                    entry.seat = seat;
                }
                Ok(set)
            }
        }
    }
}

impl Call {
    /// The answer when attributes were set.
    fn set(&self, ino: Ino, wish: u32, sized: bool) -> OpResult {
        let state = self.core.state();
        let lease = self.core.lend(&state, self.who.node, self.stream, ino, wish);
        let attr = Some(ebb_wire::attr_to_pb(&state.attr(ino)?));
        let whole = || super::bytes::map(&state, ino, ByteRange::ALL, 0);
        let map = sized.then(whole).transpose()?;
        Ok(Some(Body::Entry(pb::Entry { attr, map, lease, ..Default::default() })))
    }
}

fn change_of(op: &pb::SetAttr) -> Result<Change, Errno> {
    let time = |t: &Option<pb::TimeSet>| match t {
        None => Ok::<_, Errno>(None),
        Some(t) if t.now => Ok(Some(SetTime::Now)),
        Some(t) => {
            let at = ebb_wire::time_from_pb(t.time.ok_or(Errno::EPROTO)?)?;
            Ok(Some(SetTime::At(at)))
        }
    };
    Ok(Change {
        perm: op.mode.map(|m| m & 0o7777),
        uid: op.uid,
        gid: op.gid,
        atime: time(&op.atime)?,
        mtime: time(&op.mtime)?,
        kill_priv: op.kill_priv,
    })
}

impl Core {
    /// Cuts or extends a file, for all nodes and on the backing, once nobody flushes what is cut.
    /// Gives the node at which it must be done instead; 0: it is done.
    pub async fn set_size(
        &self,
        node: NodeId,
        ino: Ino,
        to: Size,
        change: &Change,
    ) -> Result<u32, Errno> {
        self.compare(ino, false).await?;
        let had = self.state().file(ino)?.size();
        let cut = [ByteRange::from(to.claims_from(had))];
        let claim = self.claim(ino, NodeId::NOBODY, &cut).await?;
        let _claim = super::flush::Claim::new(self, ino, claim, NodeId::NOBODY);
        let turn = self.turn().await;
        // While the claim is held, no node is given a seat.
        let seat = self.seat_elsewhere(&self.state(), node, ino);
        if seat != 0 {
            return Ok(seat);
        }
        self.resize(&turn, node, ino, to).await?;
        if *change != Change::default() {
            let plan = self.state().ns.plan_set_attr(ino, change, Time::now())?;
            self.execute(&turn, plan, Vec::new()).await?;
        }
        Ok(0)
    }

    async fn resize(&self, turn: &Turn<'_>, node: NodeId, ino: Ino, to: Size) -> Result<(), Errno> {
        let (now, len) = (Time::now(), to.len());
        let empties = to == Size::Exactly(0) && self.state().file(ino)?.size() > 0;
        if empties && self.renew(turn, node, ino).await? {
            return Ok(());
        }
        let (step, with) = {
            let state = self.state();
            let changes = to.changes(state.file(ino)?.size());
            if !changes && matches!(to, Size::AtLeast(_)) {
                return Ok(());
            }
            let mut step = Step::default();
            if let Some(path) = state.ns.home_path(ino).filter(|_| changes) {
                step.effects.push(Effect::SetSize { path: path.clone(), len });
                step.restat.push(Restat { ino, path });
            }
            let times = AttrChange { mtime: Some(now), ctime: Some(now), ..AttrChange::default() };
            step.records.push(Record::Attr { ino, change: times });
            let mut with = if changes { vec![Entry::File(ino, to.op())] } else { vec![] };
            if to == Size::Exactly(0) && state.ns.replaces(ino) != 0 {
                with.extend(self.written_anew(&state, node, ino));
            }
            (step, with)
        };
        self.execute(turn, Plan { steps: vec![step], ino: None }, with).await
    }

    /// A file that replaces an older one is made empty again: nothing is left of what nodes that are gone
    /// had written.
    fn written_anew(&self, state: &State, node: NodeId, ino: Ino) -> Vec<Entry> {
        let gone = self.left_half_by(state, ino).into_iter();
        let ended = gone.map(|gone| Entry::WritesOver(ino, gone, false));
        let begun = !state.halves.has(ino, node);
        ended.chain(begun.then_some(Entry::WritesOver(ino, node, true))).collect()
    }
}
