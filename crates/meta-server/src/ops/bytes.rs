//! open, release, query, attach, append, detach: who has which bytes.

use super::attrs::Size;
use super::{Call, OpResult, coupling, ranges, size};
use crate::state::{Entry, FileOp, Outcome, State};
use ebb_consistency::{Claim, FileState, MapAnswer};
use ebb_namespace::{AttrChange, Change, Home, Record};
use ebb_types::{ByteRange, Errno, Ino, NodeId, Time, Version};
use ebb_wire::pb;
use ebb_wire::pb::reply::Body;
use std::sync::Arc;

/// At every so many intervals of a file it is tried to do with fewer.
const COMPACT_EVERY: usize = 1 << 16;

/// What is known of a part of a file, as sent.
pub(super) fn map(
    state: &State,
    ino: Ino,
    range: ByteRange,
    known: u64,
) -> Result<pb::FileMap, Errno> {
    map_of(state, ino, &state.file(ino)?.query(range, Version(known)))
}

fn map_of(state: &State, ino: Ino, answer: &MapAnswer) -> Result<pb::FileMap, Errno> {
    let ranges = answer.ranges.iter().map(owned).collect();
    Ok(pb::FileMap {
        version: answer.version.0,
        size: answer.size,
        base_version: answer.base_version.0,
        base_len: answer.base_len,
        unchanged: answer.unchanged,
        covers: Some(ebb_wire::range_to_pb(answer.covers)),
        ranges,
        mtime: Some(ebb_wire::time_to_pb(state.ns.inode(ino)?.mtime)),
        lease: None,
        changed: Vec::new(),
        guessed: Vec::new(),
        object: state.ns.get(ino).and_then(|i| i.seen).map_or(0, |s| s.key.ino),
        replaces: state.ns.replaces(ino),
    })
}

pub(super) fn owned(o: &ebb_consistency::Owned) -> pb::OwnedRange {
    pb::OwnedRange {
        start: o.range.start(),
        end: o.range.end(),
        node: o.node.0,
        version: o.version.0,
        flushed: o.flushed,
    }
}

pub(super) fn backing_ref(state: &State, ino: Ino) -> Option<pb::BackingRef> {
    let path = state.ns.home_path(ino)?.to_bytes();
    let ino = state.ns.get(ino)?.seen?.key.ino;
    Some(pb::BackingRef { path, ino })
}

fn range_of(range: Option<pb::Range>) -> Result<ByteRange, Errno> {
    range.map_or(Ok(ByteRange::ALL), ebb_wire::range_from_pb)
}

impl Call {
    /// Of a large file the answer tells version and size, and of the map the beginning: all nodes of a job
    /// open one file, and each reads a part of it.
    pub(super) fn opened(&self, state: &State, ino: Ino, known: u64) -> OpResult {
        let answer = state.file(ino)?.query_at_open(Version(known));
        let mut opened = pb::Opened {
            attr: Some(ebb_wire::attr_to_pb(&state.attr(ino)?)),
            map: Some(map_of(state, ino, &answer)?),
            backing: backing_ref(state, ino),
            r#where: Some(super::describe::place(state, ino)),
            sole: !state.ns.is_open_by_others(ino, self.who.node),
            ..pb::Opened::default()
        };
        coupling::note_coupled(state, ino, &mut opened);
        Ok(Some(Body::Opened(opened)))
    }

    /// Notes that this node has it open; false: it had already.
    fn open_first(&self, ino: Ino) -> Result<bool, Errno> {
        let mut state = self.core.state();
        let first = !state.ns.is_open_by(ino, self.who.node);
        let records = state.ns.plan_open(self.who.node, ino)?;
        self.core.commit_ns(&mut state, records);
        Ok(first)
    }

    fn note_open(&self, op: &pb::Open) -> OpResult {
        let mut state = self.core.state();
        let ino = Ino(op.ino);
        state.file(ino)?;
        match op.write || op.truncate {
            true => coupling::produces(self, &mut state, ino, op.handle, false)?,
            false => {
                if let Some(awaits) = coupling::consumes(self, &mut state, ino, op.handle)? {
                    return Ok(Some(Body::Opened(awaits)));
                }
            }
        }
        let records = state.ns.plan_open(self.who.node, ino)?;
        self.core.commit_ns(&mut state, records);
        let seated = self.core.take_seat(&mut state, self, ino, op.seat.as_ref());
        let mut opened = self.opened(&state, ino, op.known_version)?;
        if let Some(Body::Opened(opened)) = &mut opened {
            opened.seated = seated;
        }
        Ok(opened)
    }

    /// A file that the job itself is writing needs no look at the backing.
    pub(super) fn open_fast(&self, op: &pb::Open) -> Option<OpResult> {
        if op.truncate || self.core.is_comparable(Ino(op.ino)) {
            return None;
        }
        let opened = self.note_open(op);
        let goes = || self.core.state().couplings.is_to_go(Ino(op.ino));
        if opened.as_ref().is_err_and(|e| e.errno == Errno::ESTALE) && goes() {
            return None;
        }
        Some(opened)
    }

    pub(super) async fn open(&self, op: &pb::Open) -> OpResult {
        let ino = Ino(op.ino);
        let is_named = |state: &State| state.ns.get(ino).is_some_and(|i| !i.links.is_empty());
        let (was_named, goes) = {
            let state = self.core.state();
            state.file(ino)?;
            (is_named(&state), state.couplings.is_to_go(ino))
        };
        if goes {
            // Who opens it means a file of that name which is to be read still, or is to be made.
            crate::coupling::remove_consumed(&self.core).await;
            return Err(Errno::ESTALE.into());
        }
        self.core.compare(ino, true).await?;
        // Another file has its name now. It may still be open somewhere, but who opens it meant the name.
        if was_named && !is_named(&self.core.state()) {
            return Err(Errno::ESTALE.into());
        }
        let mut seat = 0;
        if op.truncate {
            // Open before it is empty: nobody must take that for all that it is to be.
            let first = self.open_first(ino)?;
            let produces = coupling::produces(self, &mut self.core.state(), ino, op.handle, true);
            let change = Change::default();
            let cut = async {
                produces?;
                self.core.set_size(self.who.node, ino, Size::Exactly(0), &change).await
            };
            seat = match cut.await {
                Ok(seat) => seat,
                Err(e) => {
                    coupling::withdraws(self, &mut self.core.state(), ino, op.handle);
                    if first {
                        let mut state = self.core.state();
                        let records = state.ns.plan_release(self.who.node, ino);
                        self.core.commit_ns(&mut state, records);
                    }
                    return Err(e.into());
                }
            };
        }
        let mut opened = self.note_open(op)?;
        if let Some(Body::Opened(opened)) = &mut opened {
            opened.seat = seat;
        }
        Ok(opened)
    }

    pub(super) fn release(&self, op: &pb::Release) -> OpResult {
        let mut state = self.core.state();
        if op.settles {
            self.core.settled_at_close(&mut state, self.who.node, Ino(op.ino));
        }
        self.core.leave_seat(&mut state, self.who.node, Ino(op.ino));
        let records = state.ns.plan_release(self.who.node, Ino(op.ino));
        self.core.commit_ns(&mut state, records);
        Ok(None)
    }

    pub(super) fn query(&self, op: &pb::Query) -> OpResult {
        let state = self.core.state();
        let ino = Ino(op.ino);
        let mut map = map(&state, ino, range_of(op.range)?, op.known_version)?;
        if let Some(since) = op.changed_after {
            let changed = state.file(ino)?.changed_after(Version(since));
            map.changed = changed.into_iter().map(ebb_wire::range_to_pb).collect();
            let guessed = state.file(ino)?.guessed_after(Version(since));
            map.guessed = guessed.into_iter().map(ebb_wire::range_to_pb).collect();
        }
        Ok(Some(Body::Map(map)))
    }

    pub(super) fn attach(&self, op: &pb::Attach) -> OpResult {
        let ino = Ino(op.ino);
        let (guessed, again) = (ranges(&op.guessed)?, ranges(&op.again)?);
        let (mut ranges, quiet) = (ranges(&op.ranges)?, ranges(&op.quiet)?);
        let mtime = op.mtime.map(ebb_wire::time_from_pb).transpose()?;
        let then = op.then_query.as_ref().map(|q| Ok::<_, Errno>((range_of(q.range)?, q)));
        let then = then.transpose()?;
        let mut state = self.core.state();
        state.file(ino)?;
        if !op.renew {
            self.check_copies(&state, op.copies)?;
        }
        if let Some((_, q)) = then {
            state.file(Ino(q.ino))?;
        }
        let seat = self.core.seat_elsewhere(&state, self.who.node, ino);
        if seat != 0 && !op.renew && ranges.iter().any(|r| !r.is_empty()) {
            return seated_at(state.file(ino)?, seat);
        }
        // Before it is written over: its owner may have it in a journal for a long time.
        let others = self.is_beside_others(state.file(ino)?);
        let (mut claimed, mut contested) = (Vec::new(), Vec::new());
        if op.renew {
            // What was a guess stays one.
            claimed = still_owned(state.file(ino)?, self.who.node, &ranges);
            ranges.clear();
        }
        let told = self.core.told_quietly(&mut state, self.who.node, op, &quiet)?;
        ranges.extend(told.granted);
        let known = Version(op.known);
        // Of a file that sits elsewhere nobody else has anything new that is only a guess.
        let elsewhere = seat != 0 && !op.renew;
        for (list, claim) in [(guessed, Claim::Guessed { known }), (again, Claim::Again)] {
            for range in list {
                if elsewhere {
                    contested.push(ebb_wire::range_to_pb(range));
                    continue;
                }
                let (granted, refused) = state.file(ino)?.judge_claim(self.who.node, range, claim);
                claimed.extend(granted);
                contested.extend(refused.into_iter().map(ebb_wire::range_to_pb));
            }
        }
        if ranges.iter().chain(&claimed).any(|r| !r.is_empty()) {
            let attached = match claimed.is_empty() {
                true => FileOp::Attach(self.who.node, ranges),
                false => FileOp::Claim(self.who.node, ranges, claimed),
            };
            let entries = written(&state, ino, attached, mtime)?;
            self.core.commit(&mut state, &entries);
            self.bound_memory(&mut state, ino);
        }
        let quiet_end = match op.settles {
            true => self.core.quiet_again(&mut state, self, op),
            false => 0,
        };
        let map = then.map(|(r, q)| map(&state, Ino(q.ino), r, q.known_version)).transpose()?;
        let file = state.file(ino)?;
        let (version, size) = (file.version().0, file.size());
        let overtaken = told.refused.into_iter().map(ebb_wire::range_to_pb).collect();
        let attached =
            pb::Attached { version, map, size, contested, overtaken, others, ..Default::default() };
        let mut attached = self.with_attr(&state, ino, op.lease, attached);
        if let Some(lease) = attached.lease.filter(|_| quiet_end > 0) {
            attached.quiet_end = quiet_end;
            self.core.note_quiet_grant(ino, self.stream, lease.seq);
        }
        Ok(Some(Body::Attached(attached)))
    }

    /// An attach changes size and times: whoever has a lease of them is told how.
    fn with_attr(
        &self,
        state: &State,
        ino: Ino,
        wish: u32,
        attached: pb::Attached,
    ) -> pb::Attached {
        let lease = self.core.lend(state, self.who.node, self.stream, ino, wish);
        let attr = lease.and_then(|_| state.attr(ino).ok()).map(|a| ebb_wire::attr_to_pb(&a));
        let open = state.ns.is_open_by_others(ino, self.who.node);
        let backing = if open { backing_ref(state, ino) } else { None };
        pb::Attached { attr, lease, others: open || attached.others, backing, ..attached }
    }

    /// Other nodes have bytes of it.
    fn is_beside_others(&self, file: &FileState) -> bool {
        file.owners().any(|owner| owner != self.who.node)
    }

    /// Many tiny writes make many small intervals. They need not be kept apart while nobody
    /// flushes the file. (Not journalled: it changes no answer's meaning.)
    fn bound_memory(&self, state: &mut State, ino: Ino) {
        let many = |f: &Arc<FileState>| f.entries() >= COMPACT_EVERY;
        if !state.files.get(&ino).is_some_and(many) || self.core.is_busy(ino) {
            return;
        }
        if let Some(file) = state.files.get_mut(&ino).map(Arc::make_mut)
            && file.entries().is_multiple_of(COMPACT_EVERY)
        {
            file.compact(&[]);
        }
    }

    pub(super) async fn attach_durably(&self, op: &pb::Attach) -> OpResult {
        let body = self.attach(op)?;
        self.core.journal.synced(self.core.journal.tail()).await?;
        Ok(body)
    }

    pub(super) fn append(&self, op: &pb::Append) -> OpResult {
        let ino = Ino(op.ino);
        let mtime = op.mtime.map(ebb_wire::time_from_pb).transpose()?;
        let mut state = self.core.state();
        self.check_copies(&state, op.copies)?;
        let file = state.file(ino)?;
        let seat = self.core.seat_elsewhere(&state, self.who.node, ino);
        if seat != 0 {
            return seated_at(file, seat);
        }
        let others = self.is_beside_others(file);
        if file.size() < op.not_below {
            return Err(super::OpError::new(Errno::EREMCHG, "the file was cut"));
        }
        let size = size(file.size().checked_add(op.len).ok_or(Errno::EFBIG)?)?;
        let version = if op.len == 0 { file.version() } else { file.version().next() };
        let mut entries = written(&state, ino, FileOp::Append(self.who.node, op.len), mtime)?;
        if op.len == 0 {
            entries.clear();
        }
        // One record: an append that is repeated after a crash must be known as done.
        entries.push(self.answered(Outcome::Appended(size, version)));
        self.core.commit(&mut state, &entries);
        debug_assert_eq!(state.file(ino).map(|f| (f.version(), f.size())), Ok((version, size)));
        if op.copies != 0 {
            let range = ByteRange::new(size.saturating_sub(op.len), size);
            self.core.appends.lock().note(self.who.node, op.copies, ino, range);
        }
        let attached = pb::Attached { version: version.0, size, others, ..Default::default() };
        Ok(Some(Body::Attached(self.with_attr(&state, ino, op.lease, attached))))
    }

    pub(super) fn detach(&self, op: &pb::Detach) -> OpResult {
        let ino = Ino(op.ino);
        let ranges = ranges(&op.ranges)?;
        let mut state = self.core.state();
        // First: what is not flushed must not get into the journal.
        let can = state.file(ino)?.check_detach(self.who.node, &ranges);
        can.map_err(|e| super::OpError::new(Errno::EBUSY, e.to_string()))?;
        let op = match op.anew {
            true => FileOp::DetachAnew(self.who.node, ranges),
            false => FileOp::Detach(self.who.node, ranges),
        };
        self.core.commit(&mut state, &[Entry::File(ino, op)]);
        let file = state.file(ino)?;
        let (version, size, base_len) = (file.version().0, file.size(), Some(file.base_len()));
        Ok(Some(Body::Attached(pb::Attached { version, size, base_len, ..Default::default() })))
    }
}

impl Call {
    pub(super) fn share(&self, op: &pb::Share) -> OpResult {
        let ino = Ino(op.ino);
        let state = self.core.state();
        let file = state.file(ino)?;
        let range = range_of(op.range)?.intersect(ByteRange::new(0, file.base_len()));
        let is_there = |node: NodeId| state.nodes.contains_key(&node);
        let subject = (ino, file.base_version());
        let mut copies = self.core.copies.lock();
        let holders = copies.share(subject, range, self.who.node, op.take, is_there);
        let holders = holders.into_iter().map(|h| pb::Holder {
            start: h.range.start(),
            end: h.range.end(),
            node: h.node.0,
        });
        Ok(Some(Body::Shared(pb::Shared { holders: holders.collect() })))
    }
}

/// Nothing was done: the file sits at that node.
fn seated_at(file: &FileState, seat: u32) -> OpResult {
    let (version, size) = (file.version().0, file.size());
    Ok(Some(Body::Attached(pb::Attached { version, size, seat, ..Default::default() })))
}

fn still_owned(file: &FileState, node: NodeId, ranges: &[ByteRange]) -> Vec<ByteRange> {
    file.grantable(node, ranges).into_iter().map(|owned| owned.range).collect()
}

/// Bytes of a file became new: what happens to them, its times, and what is due on the backing.
fn written(state: &State, ino: Ino, op: FileOp, mtime: Option<Time>) -> Result<Vec<Entry>, Errno> {
    let inode = state.ns.inode(ino)?;
    let mut entries = vec![Entry::File(ino, op)];
    // Without a time the node has set one explicitly since it wrote: that one stays.
    if let Some(mtime) = mtime {
        let mtime = mtime.max(inode.mtime);
        let change = AttrChange {
            mtime: Some(mtime),
            ctime: Some(mtime.max(inode.ctime)),
            ..AttrChange::default()
        };
        entries.push(Entry::Ns(Record::Attr { ino, change }));
    }
    if inode.home == Home::Own && !inode.due {
        entries.push(Entry::Ns(Record::Due { ino, due: true }));
    }
    Ok(entries)
}
