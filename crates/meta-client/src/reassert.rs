//! Telling a service that lost the end of its journal what this node knows
//! ([`ebb_consistency::Assertion`]).

use crate::bytes::SeatWish;
use crate::client::MetaClient;
use crate::coupling::{CoupledHandle, Left};
use crate::locks::LockKind;
use crate::names::expect_body;
use ebb_consistency::{Assertion, Claimed};
use ebb_types::facts::{Facts, Moment};
use ebb_types::{ByteRange, Errno, Ino, Time, Version};
use ebb_wire::pb::{self, asserted::Kind, reply::Body, request::Op};
use ebb_wire::{range_to_pb, time_to_pb};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tokio::sync::watch;

/// What a node knows something of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KnownFile {
    /// Which file.
    pub ino: Ino,
    /// The newest version.
    pub newest: Version,
    /// Bytes of it are, or may count as, the node's own.
    pub owns: bool,
    /// Somebody here has it open.
    pub open: bool,
    /// It sits here.
    pub seat: Option<SeatWish>,
}

/// One life of the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listener(u64);

impl Listener {
    fn step(self) -> pb::Reassert {
        pb::Reassert { to_instance: self.0, ..pb::Reassert::default() }
    }
}

/// Where a file is on the backing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Located {
    /// Which file.
    pub ino: Ino,
    /// Where it may be, from the backing directory: its part file, its name.
    pub paths: Vec<Vec<u8>>,
    /// `st_ino` of the object; 0: this node has not heard that the backing has it.
    pub object: u64,
    /// It is open here, or has bytes that the backing lacks: others may have moved it.
    pub needed: bool,
    /// The newest version of the file that this node knows: of two nodes the one that knows more has the newer object.
    pub as_of: Version,
}

/// What an owner on this node has locked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnedLocks {
    /// Of which file.
    pub ino: Ino,
    /// The kernel's number.
    pub owner: u64,
    /// `flock` rather than `fcntl`.
    pub flock: bool,
    /// These and no others.
    pub certain: bool,
    /// The ranges.
    pub locks: Vec<(ByteRange, LockKind, u32)>,
}

/// The service waits for others at most ten seconds; a shorter deadline of a call must not end that.
const OTHERS: Duration = Duration::from_secs(60);

/// Moments that one request speaks of.
const MOMENTS_MAX: usize = 1 << 10;

/// Files that one request says where they are.
const FILES_MAX: usize = 1 << 12;

/// Owners that one request may speak of.
const OWNERS_MAX: usize = 1 << 16;

/// What the service does not know of what it was asked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Forgotten {
    /// Files of which it may have forgotten something: what it said after that version.
    pub news: Vec<(Ino, Version)>,
    /// Files that it does not know.
    pub unknown: Vec<Ino>,
}

impl MetaClient {
    /// Counts the sessions whose service wants to hear what this node knows: told in full, and then
    /// [`MetaClient::reasserted`].
    #[must_use]
    pub fn owes_words(&self) -> watch::Receiver<u64> {
        self.inner.owed.subscribe()
    }

    /// After which moment the service may have forgotten something that it said of names.
    #[must_use]
    pub fn names_after(&self) -> Moment {
        self.inner.names_after.load(Relaxed)
    }

    /// Tells all that this node has heard of names since then, by moment, and up to where it has
    /// heard that everything is on the backing. Comes back when every node has.
    pub async fn reassert_names(
        &self,
        to: Listener,
        mut told: BTreeMap<Moment, Facts>,
        settled: Moment,
    ) -> Result<(), Errno> {
        if settled > 0 {
            told.entry(settled).or_default().settled = settled;
        }
        let facts: Vec<pb::Facts> =
            told.iter().map(|(at, facts)| ebb_wire::facts_to_pb(*at, facts)).collect();
        for some in facts.chunks(MOMENTS_MAX) {
            let names = pb::Reassert { names: some.to_vec(), ..to.step() };
            self.call(Op::Reassert(names)).await?;
        }
        let named = pb::Reassert { named: true, ..to.step() };
        self.within(OTHERS).call(Op::Reassert(named)).await.map(drop)
    }

    /// True when the service has nothing but what nodes tell it.
    #[must_use]
    pub fn is_rebuilt(&self) -> bool {
        self.names_after() == 0
    }

    /// The service that is told now: what is told in steps is begun anew with another one.
    #[must_use]
    pub fn listener(&self) -> Listener {
        Listener(self.inner.known.lock().told_by)
    }

    /// Tells where files are on the backing; before [`MetaClient::reassert_names`].
    pub async fn locate(&self, to: Listener, files: Vec<Located>) -> Result<(), Errno> {
        for some in files.chunks(FILES_MAX) {
            let one = |f: &Located| pb::Located {
                ino: f.ino.0,
                paths: f.paths.clone(),
                object: f.object,
                needed: f.needed,
                as_of: f.as_of.0,
            };
            let located = some.iter().map(one).collect();
            self.call(Op::Reassert(pb::Reassert { located, ..to.step() })).await?;
        }
        Ok(())
    }

    /// Of which of these the service may have forgotten something.
    pub async fn forgotten_of(&self, files: &[KnownFile]) -> Result<Forgotten, Errno> {
        let asks = files.iter().map(|f| pb::KnownFile {
            ino: f.ino.0,
            newest: f.newest.0,
            owns: f.owns,
            open: f.open,
            seat: f.seat.map(SeatWish::to_pb),
        });
        let asks = pb::Reassert { asks: asks.collect(), ..pb::Reassert::default() };
        let wanted = expect_body!(self.call(Op::Reassert(asks)).await?, Wanted);
        Ok(Forgotten {
            news: wanted.files.iter().map(|w| (Ino(w.ino), Version(w.after))).collect(),
            unknown: wanted.unknown.into_iter().map(Ino).collect(),
        })
    }

    /// Tells what this node knows of a part of a file. True when the backing has nothing of it: what
    /// counts as flushed is not.
    pub async fn reassert(
        &self,
        ino: Ino,
        assertion: &Assertion,
        mtime: Option<Time>,
    ) -> Result<bool, Errno> {
        let mtime = mtime.map(time_to_pb);
        let files = vec![pb::Assertion { mtime, ..to_pb(ino, assertion) }];
        let told = pb::Reassert { files, ..pb::Reassert::default() };
        let wanted = expect_body!(self.call(Op::Reassert(told)).await?, Wanted);
        Ok(wanted.unflushed.contains(&ino.0))
    }

    /// This node has told everything, with these locks and opens of coupled files. Comes back when requests go on, with the files
    /// whose locks are lost. `None`: of locks it knows nothing.
    /// ESTALE: another service than `to`, which must hear all of it, has begun since.
    pub async fn reasserted(
        &self,
        to: Listener,
        locks: Option<Vec<OwnedLocks>>,
        coupled: Option<&[CoupledHandle]>,
    ) -> Result<Vec<Ino>, Errno> {
        let all_locks = locks.as_ref().is_some_and(|locks| locks.len() <= OWNERS_MAX);
        let owners = locks.filter(|_| all_locks).unwrap_or_default();
        let owners = owners.iter().map(owner_to_pb).collect();
        let handle = |c: &CoupledHandle| {
            let CoupledHandle { ino, handle, write, coupled, of, left } = *c;
            let through = left == Some(Left::Through);
            let (left, withdrawn) = (left.is_some(), left == Some(Left::Withdrawn));
            pb::CoupledHandle { ino: ino.0, handle, write, left, through, coupled, withdrawn, of }
        };
        let all_coupled = coupled.is_some();
        let coupled = coupled.unwrap_or_default().iter().map(handle).collect();
        let locks = pb::Reassert { owners, all_locks, ..to.step() };
        let done = pb::Reassert { done: true, coupled, all_coupled, ..locks };
        let done = self.within(OTHERS).call(Op::Reassert(done)).await?;
        let wanted = expect_body!(done, Wanted);
        Ok(wanted.lost.iter().map(|lost| Ino(lost.ino)).collect())
    }
}

fn owner_to_pb(owned: &OwnedLocks) -> pb::LockOwner {
    let held = |(range, kind, pid): &(ByteRange, LockKind, u32)| pb::HeldLock {
        range: Some(range_to_pb(*range)),
        r#type: kind.to_wire(),
        pid: *pid,
    };
    let OwnedLocks { ino, owner, flock, certain, locks } = owned;
    pb::LockOwner {
        ino: ino.0,
        owner: *owner,
        flock: *flock,
        certain: *certain,
        locks: locks.iter().map(held).collect(),
    }
}

fn to_pb(ino: Ino, assertion: &Assertion) -> pb::Assertion {
    let ((size, size_as_of), (base_len, base_len_as_of)) = (assertion.size, assertion.base_len);
    let claim = |(range, claim): &(ByteRange, Claimed)| {
        let (kind, node, version, as_of) = match claim {
            Claimed::Own(version, false) => (Kind::Own, 0, version.0, 0),
            Claimed::Own(version, true) => (Kind::OwnFlushed, 0, version.0, 0),
            Claimed::Keep => (Kind::Written, 0, 0, 0),
            Claimed::Known { node, version, as_of } => (Kind::Known, node.0, version.0, as_of.0),
        };
        let (start, end) = (range.start(), range.end());
        pb::Asserted { start, end, kind: kind.into(), node, version, as_of }
    };
    pb::Assertion {
        ino: ino.0,
        size,
        size_as_of: size_as_of.0,
        base_len,
        base_len_as_of: base_len_as_of.0,
        covers: Some(range_to_pb(assertion.covers)),
        claims: assertion.claims.iter().map(claim).collect(),
        complete: assertion.complete,
        mtime: None,
    }
}
