//! Calls about the bytes of files, flushes, and the node itself.

use crate::client::{CallError, MetaClient};
use crate::coupling::OpenAnswer;
use crate::driver::LEFT;
use crate::map::{Base, Mapped, grant_from_pb, map_from_pb, owned_from_pb};
use crate::names::{Wish, attr_for, expect_body, told_attr};
use crate::opened::{backing_from_pb, opened_from_pb, place_from_pb};
use ebb_consistency::{Detached, MapAnswer, Owned, Told};
use ebb_types::{Attr, ByteRange, Errno, Ino, NodeId, Time, Version};
use ebb_wire::pb::{self, reply::Body, request::Op};
use ebb_wire::{attr_from_pb, range_from_pb, range_to_pb, time_to_pb};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Ranges in one message: far below what the service takes.
const RANGES_AT_ONCE: usize = 1 << 16;

/// How often a map is asked for that must be whole and comes in several parts, while others change it.
const WHOLE_TRIES: usize = 16;

/// Where the unowned bytes of a file are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backing {
    /// Relative to the backing directory; each component is a valid name.
    pub path: Vec<u8>,
    /// `st_ino` there.
    pub ino: u64,
}

/// Where an inode is in the mount.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// One of its paths, without a leading slash; empty when it has no name left. For messages
    /// and rules only.
    pub path: Vec<u8>,
    /// The model that the nearest directory above asks for; empty: none does.
    pub model: String,
    /// How the nearest directory above couples its files; of a coupled file: where it stands. Or empty.
    pub couple: String,
}

/// What [`MetaClient::open`] gives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Opened {
    /// As they are published.
    pub attr: Attr,
    /// Of the whole file, or, where that has many ranges, of its beginning.
    pub map: Mapped,
    /// `None` when nothing of it is on the backing.
    pub backing: Option<Backing>,
    /// Where it is in the mount.
    pub place: Place,
    /// No other node has it open.
    pub sole: bool,
    /// It sits at this node, as it wished.
    pub seated: bool,
    /// It was opened, and not truncated: it sits at that node.
    pub seat: Option<NodeId>,
    /// Opens and closes of it count.
    pub coupled: bool,
    /// And it is not to be flushed without need.
    pub held: bool,
}

/// A seat that a node would like to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeatWish {
    /// Its number, which no other seat of this node has; not 0.
    pub id: u64,
    /// This node writes without telling, and is asked before others are told of the file.
    pub asked: bool,
}

impl SeatWish {
    pub(crate) fn to_pb(self) -> pb::Seat {
        pb::Seat { id: self.id, asked: self.asked }
    }
}

/// A question about the owners of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueryRequest {
    /// The file.
    pub ino: Ino,
    /// The bytes.
    pub range: ByteRange,
    /// The newest version this node knows; [`Version::ZERO`] for none.
    pub known: Version,
    /// A lease is of use.
    pub lease: bool,
}

impl QueryRequest {
    fn to_pb(self) -> pb::Query {
        let range = Some(range_to_pb(self.range));
        let lease = if self.lease { Wish::Full } else { Wish::No }.to_pb();
        let known_version = self.known.0;
        pb::Query { ino: self.ino.0, range, known_version, lease, changed_after: None }
    }
}

/// What became of a file since a version of it was known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changes {
    /// Who owns what.
    pub map: MapAnswer,
    /// Whose the bytes are that nobody owns.
    pub base: Base,
    /// Unowned bytes that changed, and perhaps owned ones; in any order.
    pub changed: Vec<ByteRange>,
    /// What changed by guesses alone: nobody is known to have written there.
    pub guessed: Vec<ByteRange>,
}

/// Bytes to publish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttachRequest {
    /// The file.
    pub ino: Ino,
    /// The bytes, all in this node's cache. These and the next two are sorted and disjoint.
    pub ranges: Vec<ByteRange>,
    /// Blocks in which something may have been written: attached where nobody else has them, and
    /// nothing changed since the version `known`.
    pub guessed: Vec<ByteRange>,
    /// See `guessed`.
    pub known: Version,
    /// Bytes that may have been written again: attached where they are this node's still.
    pub again: Vec<ByteRange>,
    /// When they were written last; none: a time was set explicitly since, and stays.
    pub mtime: Option<Time>,
    /// Answer when this is on stable storage.
    pub durable: bool,
    /// Asked in the same step, after the attach.
    pub then_query: Option<QueryRequest>,
    /// Epoch under which the partner has these bytes; 0: nowhere.
    pub copies: u64,
    /// A lease of the attributes.
    pub lease: Wish,
    /// All that was written quietly and not told yet, where that may be.
    pub quietly: Option<Quietly>,
}

impl AttachRequest {
    /// Of bytes that nobody else need know more of; no time is set.
    #[must_use]
    pub fn new(ino: Ino, ranges: Vec<ByteRange>) -> AttachRequest {
        AttachRequest {
            ino,
            ranges,
            guessed: Vec::new(),
            known: Version::ZERO,
            again: Vec::new(),
            mtime: None,
            durable: false,
            then_query: None,
            copies: 0,
            lease: Wish::No,
            quietly: None,
        }
    }
}

/// What a node tells of bytes that it wrote without telling.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Quietly {
    /// Which ones; together with those of the request that is all.
    pub ranges: Vec<ByteRange>,
    /// The version of the file when it was granted.
    pub since: Version,
    /// How far it would like to write so from now on; 0: not.
    pub wish: u64,
}

/// What [`MetaClient::attach`] and [`MetaClient::append`] give.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attached {
    /// Of the attached bytes.
    pub version: Version,
    /// Published size now.
    pub size: u64,
    /// The answer to `then_query`.
    pub map: Option<Mapped>,
    /// The guessed and repeated bytes that were not attached.
    pub contested: Vec<ByteRange>,
    /// The attributes now, under a lease.
    pub told: Option<Told>,
    /// With that lease this node may write quietly as far as here; 0: it may not.
    pub quiet_end: u64,
    /// Bytes written quietly that others have changed since.
    pub overtaken: Vec<ByteRange>,
    /// Nothing was done: the file sits at that node.
    pub seat: Option<NodeId>,
    /// Other nodes have the file open, or had bytes of it until now.
    pub others: bool,
    /// When they have it open: where the file is on the backing.
    pub backing: Option<Backing>,
}

/// Permission to write bytes to the backing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlushGrant {
    /// Its number, for [`MetaClient::flush_end`].
    pub grant: u64,
    /// Those of the bytes asked for that this node still owns unflushed; may be none.
    pub ranges: Vec<Owned>,
    /// Where to write them.
    pub backing: Option<Backing>,
    /// Published size of the file.
    pub size: u64,
    /// What the file may be given before its sync: these are the last bytes that it lacks.
    pub shape: Option<Attr>,
    /// The file's user.
    pub owner: u32,
}

impl Opened {
    /// What it tells under a lease.
    #[must_use]
    pub fn told(&self) -> Option<Told> {
        told_attr(self.attr, self.map.lease)
    }
}

/// What became of a flush.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlushDone {
    /// The file has its own name, size and attributes on the backing; nothing is missing.
    pub published: bool,
    /// Nothing is missing, and it replaces an older file when nobody has it open any more.
    pub waits: bool,
    /// The file's newest version.
    pub version: Version,
    /// These became newer meanwhile and count as unflushed.
    pub again: Vec<ByteRange>,
}

/// One step of [`MetaClient::materialize`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Materialized {
    /// Names that this step brought to the backing.
    pub done: u64,
    /// Names that are left.
    pub remaining: u64,
    /// What went wrong.
    pub failures: Vec<pb::Failure>,
    /// Files with bytes that only some node's cache holds.
    pub unfinished: Vec<pb::Unfinished>,
    /// Files with flushed bytes of this node that do not get their names, because of a node that is gone.
    pub held_back: Vec<pb::HeldBack>,
}

/// The node at which something must be done; 0: it is done.
pub(crate) fn node_from_pb(node: u32) -> Option<NodeId> {
    (node != 0).then_some(NodeId(node))
}

fn attached_from_pb(ino: Ino, attached: pb::Attached) -> Result<Attached, Errno> {
    let attr = attached.attr.map(|attr| attr_for(ino, Some(attr))).transpose()?;
    let told = attr.and_then(|attr| told_attr(attr, attached.lease.map(grant_from_pb)));
    if attached.version == 0 || attached.size > i64::MAX as u64 {
        return Err(Errno::EPROTO);
    }
    Ok(Attached {
        version: Version(attached.version),
        size: attached.size,
        map: attached.map.map(map_from_pb).transpose()?,
        contested: attached.contested.into_iter().map(range_from_pb).collect::<Result<_, _>>()?,
        quiet_end: if told.is_some() { attached.quiet_end } else { 0 },
        told,
        overtaken: attached.overtaken.into_iter().map(range_from_pb).collect::<Result<_, _>>()?,
        seat: node_from_pb(attached.seat),
        others: attached.others,
        backing: attached.backing.map(backing_from_pb).transpose()?,
    })
}

/// Checks what a detach is answered with. Without a length of what the backing has, the bytes given up
/// would be taken for zeros.
pub fn detached_from_pb(attached: &pb::Attached) -> Result<Detached, Errno> {
    let pb::Attached { version, size, base_len, .. } = *attached;
    let base_len = base_len.filter(|len| *len <= size).ok_or(Errno::EPROTO)?;
    if version == 0 || size > i64::MAX as u64 {
        return Err(Errno::EPROTO);
    }
    Ok(Detached { version: Version(version), size, base_len })
}

/// True when one of `sorted` contains `range`.
fn within(sorted: &[ByteRange], range: ByteRange) -> bool {
    let at = sorted.partition_point(|r| r.start() <= range.start());
    at.checked_sub(1).is_some_and(|i| sorted[i].contains(range))
}

impl MetaClient {
    /// Opens a file on this node and asks for the beginning of its map in one step. `known` is the newest version
    /// this node knows; `lease`: one is of use.
    pub async fn open(
        &self,
        ino: Ino,
        write: bool,
        truncate: bool,
        known: Version,
        lease: Wish,
    ) -> Result<Opened, Errno> {
        match self.open_counted(ino, (write, truncate), known, lease, None, 0).await? {
            OpenAnswer::Opened(opened) => Ok(*opened),
            // Only opens that count wait.
            OpenAnswer::Awaits(_) => Err(Errno::EPROTO),
        }
    }

    /// The same; `seat`: the file should sit at this node; `handle`: it counts under this number, if the file is
    /// coupled.
    pub async fn open_counted(
        &self,
        ino: Ino,
        (write, truncate): (bool, bool),
        known: Version,
        lease: Wish,
        seat: Option<SeatWish>,
        handle: u64,
    ) -> Result<OpenAnswer, Errno> {
        let (known_version, lease, seat) = (known.0, lease.to_pb(), seat.map(SeatWish::to_pb));
        let ino_ = ino.0;
        let open = pb::Open { ino: ino_, write, truncate, known_version, lease, seat, handle };
        let opened = expect_body!(self.call(Op::Open(open)).await?, Opened);
        if opened.await_ms > 0 {
            return Ok(OpenAnswer::Awaits(Duration::from_millis(opened.await_ms)));
        }
        attr_for(ino, opened.attr)?;
        opened_from_pb(opened).map(|opened| OpenAnswer::Opened(Box::new(opened)))
    }

    /// Where an inode is in the mount.
    pub async fn describe(&self, ino: Ino) -> Result<Place, Errno> {
        let reply = self.call(Op::Describe(pb::Describe { ino: ino.0 })).await?;
        Ok(place_from_pb(expect_body!(reply, Description)))
    }

    /// What the service knows of an inode. That another call fails with ENOENT or ESTALE does not prove
    /// that the inode was deleted; this does.
    pub async fn exists(&self, ino: Ino) -> Result<pb::existence::What, Errno> {
        let reply = self.call(Op::Exists(pb::Exists { ino: ino.0 })).await?;
        Ok(expect_body!(reply, Existence).what())
    }

    /// The last local handle was closed. `settles`: nothing is written quietly any more, and all of it
    /// was told.
    pub async fn release(&self, ino: Ino, settles: bool) -> Result<(), Errno> {
        self.call(Op::Release(pb::Release { ino: ino.0, settles })).await.map(drop)
    }

    /// Who owns these bytes? Of a file of very many ranges that others change meanwhile the answer
    /// may cover the beginning only.
    pub async fn query(&self, query: QueryRequest) -> Result<Mapped, Errno> {
        let mut mapped = self.query_part(query).await?;
        self.query_rest(query, &mut mapped.map).await?;
        Ok(mapped)
    }

    /// The same, answered once: where there is too much to tell, about the beginning of the range.
    pub async fn query_part(&self, query: QueryRequest) -> Result<Mapped, Errno> {
        let part = map_from_pb(expect_body!(self.call(Op::Query(query.to_pb())).await?, Map))?;
        // Each answer brings the asker on, however often it has to ask.
        let (covers, range) = (part.map.covers, query.range);
        let answers = covers.start() <= range.start() && covers.end() > range.start();
        if answers || range.is_empty() { Ok(part) } else { Err(Errno::EPROTO) }
    }

    /// Goes on where an answer ends before what was asked, as long as the file stays as it is.
    async fn query_rest(&self, query: QueryRequest, map: &mut MapAnswer) -> Result<(), Errno> {
        while let Some(range) = map.rest_of(query.range) {
            let rest = QueryRequest { range, known: Version::ZERO, lease: false, ..query };
            let rest = self.query_part(rest).await?.map;
            if rest.version != map.version {
                return Ok(());
            }
            if rest.covers.start() != range.start() {
                return Err(Errno::EPROTO);
            }
            map.covers = ByteRange::new(map.covers.start(), rest.covers.end());
            map.ranges.extend(rest.ranges);
        }
        Ok(())
    }

    /// Who owns what of the whole file?
    pub async fn query_whole(&self, ino: Ino) -> Result<MapAnswer, Errno> {
        let query = QueryRequest { ino, range: ByteRange::ALL, known: Version::ZERO, lease: false };
        for _ in 0..WHOLE_TRIES {
            let map = self.query(query).await?.map;
            if map.covers == ByteRange::ALL {
                return Ok(map);
            }
        }
        Err(Errno::EAGAIN)
    }

    /// Who owns what of the whole file, and which unowned bytes have changed since `known`.
    pub async fn query_changes(&self, ino: Ino, known: Version) -> Result<Changes, Errno> {
        let query = pb::Query {
            ino: ino.0,
            range: Some(range_to_pb(ByteRange::ALL)),
            changed_after: Some(known.0),
            ..pb::Query::default()
        };
        for _ in 0..WHOLE_TRIES {
            let map = expect_body!(self.call(Op::Query(query)).await?, Map);
            let ranges = |list: &[pb::Range]| {
                list.iter().map(|r| range_from_pb(*r)).collect::<Result<_, _>>()
            };
            let (changed, guessed) = (ranges(&map.changed)?, ranges(&map.guessed)?);
            let Mapped { mut map, base, .. } = map_from_pb(map)?;
            let whole = QueryRequest { ino, range: ByteRange::ALL, known, lease: false };
            self.query_rest(whole, &mut map).await?;
            if map.covers == ByteRange::ALL {
                return Ok(Changes { map, base, changed, guessed });
            }
        }
        Err(Errno::EAGAIN)
    }

    /// Makes this node the owner of bytes.
    pub async fn attach(&self, attach: &AttachRequest) -> Result<Attached, Errno> {
        let quietly = attach.quietly.as_ref();
        let op = Op::Attach(pb::Attach {
            ino: attach.ino.0,
            ranges: attach.ranges.iter().copied().map(range_to_pb).collect(),
            mtime: attach.mtime.map(time_to_pb),
            durable: attach.durable,
            then_query: attach.then_query.map(QueryRequest::to_pb),
            renew: false,
            guessed: attach.guessed.iter().copied().map(range_to_pb).collect(),
            again: attach.again.iter().copied().map(range_to_pb).collect(),
            copies: attach.copies,
            known: attach.known.0,
            lease: attach.lease.to_pb(),
            quiet: quietly
                .map_or(&[][..], |q| &q.ranges)
                .iter()
                .copied()
                .map(range_to_pb)
                .collect(),
            quiet_since: quietly.map_or(0, |q| q.since.0),
            settles: quietly.is_some(),
            quiet_wish: quietly.map_or(0, |q| q.wish),
        });
        let attached = attached_from_pb(attach.ino, expect_body!(self.call(op).await?, Attached))?;
        // Nothing else was asked for, so nothing else can be refused.
        let refused = |c: &ByteRange| within(&attach.guessed, *c) || within(&attach.again, *c);
        if !attached.contested.iter().all(refused) {
            return Err(Errno::EPROTO);
        }
        let quiet = quietly.map_or(&[][..], |q| &q.ranges);
        if !attached.overtaken.iter().all(|o| within(quiet, *o)) {
            return Err(Errno::EPROTO);
        }
        // Without the answer the view would keep an old map and take it for the new one.
        if attach.then_query.is_some() && attached.map.is_none() && attached.seat.is_none() {
            return Err(Errno::EPROTO);
        }
        Ok(attached)
    }

    /// Nothing more is written quietly to a file, and all that was is told.
    pub async fn tell_quiet(&self, ino: Ino) -> Result<(), Errno> {
        let op = Op::Attach(pb::Attach { ino: ino.0, settles: true, ..pb::Attach::default() });
        attached_from_pb(ino, expect_body!(self.call(op).await?, Attached)).map(drop)
    }

    /// Everything that was written to a file that sits here before this was asked is published; not
    /// `seated`: and the file does not sit here any more. ESTALE: it does not anyway.
    pub async fn published(
        &self,
        ino: Ino,
        seat: u64,
        seq: u64,
        seated: bool,
    ) -> Result<(), Errno> {
        let op = Op::Published(pb::Published { ino: ino.0, seat, seq, seated });
        self.call(op).await.map(drop)
    }

    /// Publishes bytes again where they are this node's, flushed or not, and answers the map of the whole
    /// file then.
    pub async fn attach_again(&self, ino: Ino, ranges: &[ByteRange]) -> Result<MapAnswer, Errno> {
        for some in ranges.chunks(RANGES_AT_ONCE) {
            let request =
                AttachRequest { again: some.to_vec(), ..AttachRequest::new(ino, Vec::new()) };
            self.attach(&request).await?;
        }
        self.query_whole(ino).await
    }

    /// Gives what this node owns unflushed of these bytes a new version, and answers the map of the
    /// whole file then. Copies that other nodes have are not the newest any more.
    pub async fn renew(&self, ino: Ino, ranges: &[ByteRange]) -> Result<MapAnswer, Errno> {
        for some in ranges.chunks(RANGES_AT_ONCE) {
            let op = Op::Attach(pb::Attach {
                ino: ino.0,
                ranges: some.iter().copied().map(range_to_pb).collect(),
                renew: true,
                ..pb::Attach::default()
            });
            attached_from_pb(ino, expect_body!(self.call(op).await?, Attached))?;
        }
        self.query_whole(ino).await
    }

    /// Reserves and attaches `len` bytes at the end of the file; they begin at `size - len`.
    /// Fails with EREMCHG when `copies` is not the epoch of this node's pair, or when the file is
    /// shorter than `not_below`.
    pub async fn append(
        &self,
        ino: Ino,
        len: u64,
        mtime: Time,
        copies: u64,
        not_below: u64,
        lease: Wish,
    ) -> Result<Attached, Errno> {
        let (mtime, lease) = (Some(time_to_pb(mtime)), lease.to_pb());
        let op = Op::Append(pb::Append { ino: ino.0, len, mtime, copies, not_below, lease });
        let attached = attached_from_pb(ino, expect_body!(self.call(op).await?, Attached))?;
        let short = attached.seat.is_none() && attached.size < len;
        if short { Err(Errno::EPROTO) } else { Ok(attached) }
    }

    /// Gives up flushed bytes of this node.
    pub async fn detach(&self, ino: Ino, ranges: &[ByteRange]) -> Result<Detached, Errno> {
        self.detach_how(ino, ranges, false).await
    }

    /// The same when the backing may have other bytes than others have copied from here.
    pub async fn detach_anew(&self, ino: Ino, ranges: &[ByteRange]) -> Result<Detached, Errno> {
        self.detach_how(ino, ranges, true).await
    }

    async fn detach_how(
        &self,
        ino: Ino,
        ranges: &[ByteRange],
        anew: bool,
    ) -> Result<Detached, Errno> {
        let mut detached = Detached { version: Version::ZERO, size: 0, base_len: 0 };
        let none = ranges.is_empty().then_some(ranges);
        for some in ranges.chunks(RANGES_AT_ONCE).chain(none) {
            let ranges = some.iter().copied().map(range_to_pb).collect();
            let op = Op::Detach(pb::Detach { ino: ino.0, ranges, anew });
            detached = detached_from_pb(&expect_body!(self.call(op).await?, Attached))?;
        }
        Ok(detached)
    }

    /// Who has copies of these unowned bytes; what nobody has (with `take`: all) is this node's to
    /// fetch. Sorted and disjoint, within `range`.
    pub async fn share(
        &self,
        ino: Ino,
        range: ByteRange,
        take: bool,
    ) -> Result<Vec<(ByteRange, NodeId)>, Errno> {
        let op = Op::Share(pb::Share { ino: ino.0, range: Some(range_to_pb(range)), take });
        let shared = expect_body!(self.call(op).await?, Shared);
        let mut at = range.start();
        let mut holders = Vec::with_capacity(shared.holders.len());
        for holder in shared.holders {
            if holder.start < at || holder.end <= holder.start || holder.end > range.end() {
                return Err(Errno::EPROTO);
            }
            at = holder.end;
            holders.push((ByteRange::new(holder.start, holder.end), NodeId(holder.node)));
        }
        Ok(holders)
    }

    /// May this node write these bytes to the backing now? Waits for others that write or cut
    /// them; give it the patience for that ([`MetaClient::within`]).
    pub async fn flush_begin(
        &self,
        ino: Ino,
        ranges: &[ByteRange],
    ) -> Result<FlushGrant, CallError> {
        let ranges = ranges.iter().copied().map(range_to_pb).collect();
        let op = Op::FlushBegin(pb::FlushBegin { ino: ino.0, ranges });
        let grant = expect_body!(self.call_explained(op).await?, FlushGrant);
        let newest = Version(u64::MAX);
        let ranges = owned_from_pb(&grant.ranges, ByteRange::ALL, newest)?;
        let backing = grant.backing.map(backing_from_pb).transpose()?;
        let own = ranges.iter().all(|r| r.node == self.node_id() && !r.flushed);
        if !own || (backing.is_none() && !ranges.is_empty()) {
            // Nobody would end what is not understood.
            let _ = self.flush_end(ino, grant.grant, false, false).await;
            return Err(Errno::EPROTO.into());
        }
        let shape = grant.shape.as_ref().map(attr_from_pb).transpose()?;
        let (size, owner) = (grant.size, grant.owner);
        Ok(FlushGrant { grant: grant.grant, ranges, backing, size, shape, owner })
    }

    /// Ends a grant; `done` when the bytes were written, synced and verified, `shaped` when the
    /// file was given the grant's shape before it was synced.
    pub async fn flush_end(
        &self,
        ino: Ino,
        grant: u64,
        done: bool,
        shaped: bool,
    ) -> Result<FlushDone, CallError> {
        let op = Op::FlushEnd(pb::FlushEnd { ino: ino.0, grant, done, shaped });
        let end = expect_body!(self.call_explained(op).await?, FlushDone);
        let again = end.again.into_iter().map(ebb_wire::range_from_pb).collect::<Result<_, _>>()?;
        let (published, waits) = (end.published, end.waits);
        Ok(FlushDone { published, waits, version: Version(end.version), again })
    }

    /// Brings to the backing what is not file content, at most `limit` names of it.
    pub async fn materialize(&self, limit: u32) -> Result<Materialized, CallError> {
        self.materialized(pb::Materialize { limit, ..pb::Materialize::default() }).await
    }

    /// The same, but for files that replace older ones and are open: more may be written.
    pub async fn materialize_closed(&self) -> Result<Materialized, CallError> {
        self.materialized(pb::Materialize { closed: true, ..pb::Materialize::default() }).await
    }

    /// A file of which nothing is missing on the backing gets its name; `closed`: unless somebody has it
    /// open.
    pub async fn materialize_one(&self, ino: Ino, closed: bool) -> Result<Materialized, CallError> {
        self.materialized(pb::Materialize { limit: 0, ino: ino.0, closed }).await
    }

    async fn materialized(&self, op: pb::Materialize) -> Result<Materialized, CallError> {
        let op = Op::Materialize(op);
        let m = expect_body!(self.call_explained(op).await?, Materialize);
        Ok(Materialized {
            done: m.done,
            remaining: m.remaining,
            failures: m.failures,
            unfinished: m.unfinished,
            held_back: m.held_back,
        })
    }

    /// Everything answered so far is on the service's stable storage. Those who come together ask once.
    pub async fn sync_meta(&self) -> Result<(), Errno> {
        let ask = |left| async move {
            self.within(left).call(Op::SyncMeta(pb::SyncMeta {})).await.map(drop)
        };
        self.inner.synced.get(Duration::ZERO, self.timeout, ask).await
    }

    /// The nodes of the job; all of them, or one.
    pub async fn nodes(
        &self,
        node: Option<ebb_types::NodeId>,
    ) -> Result<Vec<pb::NodeRecord>, Errno> {
        let op = Op::NodeInfo(pb::NodeInfo { node: node.map_or(0, |n| n.0), silent: false });
        Ok(expect_body!(self.call(op).await?, NodeInfo).nodes)
    }

    /// What is known of a node that did not answer; none when it has left.
    pub async fn silent_node(&self, node: NodeId) -> Result<Option<pb::NodeRecord>, Errno> {
        let op = Op::NodeInfo(pb::NodeInfo { node: node.0, silent: true });
        let nodes = expect_body!(self.call(op).await?, NodeInfo).nodes;
        Ok(nodes.into_iter().find(|n| n.id == node.0))
    }

    /// Leaves the job for good: no call succeeds afterwards, and no session comes after this one.
    pub async fn goodbye(&self) -> Result<(), Errno> {
        self.inner.leaving.store(true, Relaxed);
        match self.call(Op::Goodbye(pb::Goodbye {})).await {
            // The service ends the stream of a node that leaves; its answer may be lost with it.
            Ok(_) | Err(Errno::ENOTCONN) => {
                self.inner.exchange.end(Errno::ENOTCONN, LEFT);
                Ok(())
            }
            Err(e) => {
                self.inner.leaving.store(false, Relaxed);
                Err(e)
            }
        }
    }
}
