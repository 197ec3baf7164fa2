//! The owner's side of a pair: bytes go to the partner before they are published, all that is
//! unflushed goes to a new partner, and copies that are not needed any more are given up there.
//!
//! Lock order: a file's turn, then the turn of the pair, then the state (a leaf, never held across a
//! call).

use crate::cache::read_padded;
use crate::file::CachedFile;
use crate::node::Node;
use crate::replica::held::bytes;
use ebb_locks::Mutex;
use ebb_meta_client::{AttachRequest, Attached, Pairs, Wish};
use ebb_transport::{CopyLink, CopySet, WorkError};
use ebb_types::{ByteRange, Errno, Ino, NodeId, Time};
use rangemap::RangeSet;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// Pairs that may end under one publication before it fails.
const ATTEMPTS_MAX: usize = 8;

/// A node that could not keep copies is not asked again for so long.
const AVOID: Duration = Duration::from_secs(15);

/// Bytes that are copied to a new partner while a file's sync events wait.
const STEP_BYTES: u64 = 8 << 20;

/// A pair that is in force.
#[derive(Clone)]
struct Pair {
    link: Arc<CopyLink>,
    partner: NodeId,
    address: String,
}

/// What changes together.
struct State {
    pair: Option<Pair>,
    /// What the partner has, by the answers of this pair.
    copied: HashMap<Ino, RangeSet<u64>>,
    /// Files of which it has more than it needs.
    surplus: HashSet<Ino>,
    /// There may be unflushed bytes that the partner lacks. Counts reasons: one that comes up
    /// while others are worked off is not overlooked.
    behind: u64,
    /// Since when, and why, something unflushed is here alone.
    degraded: Option<(Time, String)>,
    avoid: Vec<(NodeId, Instant)>,
}

/// The owner's side.
pub(super) struct Owner {
    wanted: bool,
    state: Mutex<State>,
    /// Whoever changes the pair has this, also while the service is told.
    turn: tokio::sync::Mutex<()>,
    /// Whoever catches up.
    catching_up: tokio::sync::Mutex<()>,
    wake: Arc<Notify>,
    copied_bytes: AtomicU64,
}

/// What status tells of the owner's side.
pub(super) struct Told {
    pub wanted: bool,
    pub partner: Option<(NodeId, String)>,
    pub copied_bytes: u64,
    pub degraded: Option<(Time, String)>,
}

impl Owner {
    pub fn new(wanted: bool) -> Owner {
        let alone = || (Time::now(), "no partner has been found yet".to_owned());
        Owner {
            wanted,
            state: Mutex::new(State {
                pair: None,
                copied: HashMap::new(),
                surplus: HashSet::new(),
                behind: 0,
                degraded: wanted.then(alone),
                avoid: Vec::new(),
            }),
            turn: tokio::sync::Mutex::new(()),
            catching_up: tokio::sync::Mutex::new(()),
            wake: Arc::default(),
            copied_bytes: AtomicU64::new(0),
        }
    }

    pub fn is_wanted(&self) -> bool {
        self.wanted
    }

    /// Fires when there is something to look after.
    pub fn wake(&self) -> Arc<Notify> {
        Arc::clone(&self.wake)
    }

    /// Whether a partner is wanted, and who is not.
    pub fn wishes(&self) -> (bool, Vec<NodeId>) {
        let mut state = self.state.lock();
        state.avoid.retain(|(_, since)| since.elapsed() < AVOID);
        let avoid = state.avoid.iter().map(|(node, _)| *node).collect();
        (self.wanted && state.pair.is_none(), avoid)
    }

    pub fn told(&self) -> Told {
        let state = self.state.lock();
        Told {
            wanted: self.wanted,
            partner: state.pair.as_ref().map(|p| (p.partner, p.address.clone())),
            copied_bytes: self.copied_bytes.load(Relaxed),
            degraded: state.degraded.clone(),
        }
    }

    fn pair(&self) -> Option<Pair> {
        self.state.lock().pair.clone()
    }

    fn epoch(&self) -> u64 {
        self.state.lock().pair.as_ref().map_or(0, |p| p.link.set().epoch)
    }

    /// The partner of this epoch has these bytes; false when the epoch has ended.
    fn note_copied(&self, epoch: u64, ino: Ino, ranges: &[ByteRange]) -> bool {
        let mut state = self.state.lock();
        if state.pair.as_ref().is_none_or(|p| p.link.set().epoch != epoch) {
            return false;
        }
        let copied = state.copied.entry(ino).or_default();
        for range in ranges.iter().filter(|r| !r.is_empty()) {
            copied.insert(range.to_std());
            self.copied_bytes.fetch_add(range.len(), Relaxed);
        }
        true
    }

    fn note_dropped(&self, epoch: u64, ino: Ino, ranges: &[ByteRange]) {
        let mut state = self.state.lock();
        if state.pair.as_ref().is_none_or(|p| p.link.set().epoch != epoch) {
            return;
        }
        let Some(copied) = state.copied.get_mut(&ino) else { return };
        ranges.iter().filter(|r| !r.is_empty()).for_each(|r| copied.remove(r.to_std()));
        if copied.is_empty() {
            state.copied.remove(&ino);
        }
    }

    /// What the partner has of a file within `within`.
    fn copied(&self, ino: Ino, within: ByteRange) -> Vec<ByteRange> {
        let state = self.state.lock();
        let Some(copied) = state.copied.get(&ino) else { return Vec::new() };
        let parts = copied.iter().map(|r| bytes(r).intersect(within));
        parts.filter(|r| !r.is_empty()).collect()
    }

    /// The parts of `ranges` that the partner lacks, up to so many bytes.
    fn missing(&self, ino: Ino, ranges: &[ByteRange], most: u64) -> Vec<ByteRange> {
        let state = self.state.lock();
        let none = RangeSet::new();
        let copied = state.copied.get(&ino).unwrap_or(&none);
        let mut missing = Vec::new();
        let mut room = most;
        for range in ranges.iter().filter(|r| !r.is_empty()) {
            for gap in copied.gaps(&range.to_std()) {
                if room == 0 {
                    return missing;
                }
                let gap = ByteRange::at(gap.start, (gap.end - gap.start).min(room));
                room -= gap.len();
                missing.push(gap);
            }
        }
        missing
    }

    fn set_pair(&self, pair: Option<Pair>, avoid: Option<NodeId>, why: &str) {
        let mut state = self.state.lock();
        state.pair = pair;
        state.copied.clear();
        state.surplus.clear();
        state.behind += 1;
        state.avoid.extend(avoid.map(|node| (node, Instant::now())));
        let since = state.degraded.take().map_or_else(Time::now, |(since, _)| since);
        state.degraded = Some((since, why.to_owned()));
        drop(state);
        self.wake.notify_one();
    }

    fn say_why(&self, why: &str) {
        let mut state = self.state.lock();
        if let Some((_, told)) = state.degraded.as_mut().filter(|(_, told)| told != why) {
            tracing::warn!(why, "unflushed bytes have no copy");
            *told = why.to_owned();
        }
    }
}

impl Node {
    /// Bytes of a file are here unflushed without having been copied.
    pub(super) fn copies_behind(&self) {
        let owner = &self.replicas.owner;
        if owner.wanted {
            let mut state = owner.state.lock();
            state.behind += 1;
            let why = || (Time::now(), "copying to the partner".to_owned());
            state.degraded.get_or_insert_with(why);
            drop(state);
            owner.wake.notify_one();
        }
    }

    /// Some bytes of a file may not need their copies any more.
    pub(crate) fn copies_in_surplus(&self, ino: Ino) {
        let owner = &self.replicas.owner;
        if owner.wanted {
            let mut state = owner.state.lock();
            if state.copied.contains_key(&ino) {
                state.surplus.insert(ino);
            }
        }
    }

    /// Published bytes that are here alone, although they should not be.
    pub(super) fn uncopied_bytes(&self) -> u64 {
        let owner = &self.replicas.owner;
        if !owner.wanted {
            return 0;
        }
        let of_file = |file: Arc<CachedFile>| -> u64 {
            let unflushed = file.state.read().view.unflushed(ByteRange::ALL);
            let ranges: Vec<ByteRange> = unflushed.into_iter().map(|(range, _)| range).collect();
            owner.missing(file.ino, &ranges, u64::MAX).iter().map(|r| r.len()).sum()
        };
        self.listed_dirty().into_iter().map(of_file).sum()
    }

    /// True when fsync has to publish, so that what it makes safe can be found after the loss of
    /// this node.
    pub(crate) fn fsync_publishes(&self) -> bool {
        self.replicas.owner.wanted
    }

    /// Copies what an attach is going to publish, and attaches. The caller has the file's turn.
    pub(crate) async fn copy_and_attach(
        &self,
        file: &CachedFile,
        mut request: AttachRequest,
    ) -> Result<Attached, Errno> {
        for _ in 0..ATTEMPTS_MAX {
            request.copies = self.copy(file, &request.ranges).await?;
            match self.meta.attach(&request).await {
                Err(Errno::EREMCHG) => self.out_of_step(request.copies).await?,
                done => return done,
            }
        }
        Err(Errno::EIO)
    }

    /// Reserves and attaches bytes at the end of a file. The caller has the file's turn, and
    /// [`Node::copy`]s them once they are stored.
    ///
    /// The service refuses it where others have cut off bytes of this node: should the daemon die before
    /// it has stored the new ones, its journal must not have the old ones at their place.
    pub(crate) async fn append_under_pair(
        &self,
        file: &CachedFile,
        len: u64,
        now: Time,
        lease: Wish,
    ) -> Result<Attached, Errno> {
        let owner = &self.replicas.owner;
        for _ in 0..ATTEMPTS_MAX {
            let epoch = owner.epoch();
            // Copies from before a cut must not count for what is appended there, either.
            let copied = owner.copied(file.ino, ByteRange::ALL).last().map_or(0, |r| r.end());
            let end = copied.max(file.state.read().view.owned_end());
            match self.meta.append(file.ino, len, now, epoch, end, lease).await {
                Err(Errno::EREMCHG) => {
                    self.out_of_step(epoch).await?;
                    self.query_anew(file, ByteRange::ALL).await?;
                    self.write_notes()?;
                    let size = file.state.read().view.published_size();
                    self.uncopy(file.ino, ByteRange::from(size)).await?;
                }
                done => return done,
            }
        }
        Err(Errno::EIO)
    }

    /// Copies bytes to the partner; answers the epoch under which it has them, 0 when there is no
    /// partner. The caller has the file's turn.
    pub(crate) async fn copy(&self, file: &CachedFile, ranges: &[ByteRange]) -> Result<u64, Errno> {
        let owner = &self.replicas.owner;
        while let Some(pair) = owner.pair() {
            let epoch = pair.link.set().epoch;
            match self.copy_to(&pair, file, ranges).await {
                Ok(()) if owner.note_copied(epoch, file.ino, ranges) => return Ok(epoch),
                Ok(()) => {}
                Err(e) => self.part(epoch, &e.to_string()).await?,
            }
        }
        Ok(0)
    }

    async fn copy_to(
        &self,
        pair: &Pair,
        file: &CachedFile,
        ranges: &[ByteRange],
    ) -> Result<(), WorkError> {
        let cache = file.cache(&self.cache).map_err(WorkError::Local)?;
        let read = move |range: ByteRange, buf: &mut [u8]| read_padded(&cache, buf, range.start());
        pair.link.keep(file.ino, ranges, read).await
    }

    /// The partner gives up what it has of these bytes. The caller has the file's turn.
    pub(super) async fn uncopy(&self, ino: Ino, range: ByteRange) -> Result<(), Errno> {
        let owner = &self.replicas.owner;
        let copied = owner.copied(ino, range);
        self.drop_copies(ino, &copied).await
    }

    async fn drop_copies(&self, ino: Ino, ranges: &[ByteRange]) -> Result<(), Errno> {
        let owner = &self.replicas.owner;
        let Some(pair) = owner.pair().filter(|_| !ranges.is_empty()) else { return Ok(()) };
        let epoch = pair.link.set().epoch;
        match pair.link.drop_ranges(ino, ranges).await {
            Ok(()) => owner.note_dropped(epoch, ino, ranges),
            Err(e) => self.part(epoch, &e.to_string()).await?,
        }
        Ok(())
    }

    // ---- pairs ---------------------------------------------------------------------------------

    /// Ends the pair of this epoch, if that is still the one. Its copies count for nothing once the
    /// service has heard it.
    async fn part(&self, epoch: u64, why: &str) -> Result<(), Errno> {
        let owner = &self.replicas.owner;
        let _turn = owner.turn.lock().await;
        let Some(pair) = owner.pair().filter(|p| p.link.set().epoch == epoch) else {
            return Ok(());
        };
        self.meta.pair(None).await?;
        tracing::warn!(partner = %pair.partner, why, "the pair has ended; looking for another one");
        owner.set_pair(None, Some(pair.partner), why);
        Ok(())
    }

    /// The service refused something under `epoch`. When that is still what this node believes in,
    /// the two begin anew.
    async fn out_of_step(&self, epoch: u64) -> Result<(), Errno> {
        let owner = &self.replicas.owner;
        let _turn = owner.turn.lock().await;
        if owner.epoch() != epoch || self.meta.copies(&[], false, &[]).await?.epoch == epoch {
            return Ok(());
        }
        self.meta.pair(None).await?;
        owner.set_pair(None, None, "the service has given the pair up");
        Ok(())
    }

    async fn pair_up(&self, partner: NodeId, address: String) -> Result<(), Errno> {
        let owner = &self.replicas.owner;
        let unreachable = |e: WorkError| {
            tracing::warn!(%partner, error = %e, "cannot be this node's partner");
            owner.state.lock().avoid.push((partner, Instant::now()));
            owner.say_why(&e.to_string());
        };
        // Before it is said that copies are there.
        if let Err(e) = self.peers.reach(&address).await {
            unreachable(e);
            return Ok(());
        }
        let _turn = owner.turn.lock().await;
        if owner.pair().is_some() {
            return Ok(());
        }
        let epoch = self.meta.pair(Some(partner)).await?;
        let set = CopySet { owner: self.me, epoch };
        match CopyLink::begin(Arc::clone(&self.peers), address.clone(), set).await {
            Ok(link) => {
                tracing::info!(%partner, address, "copies go there");
                let pair = Pair { link: Arc::new(link), partner, address };
                owner.set_pair(Some(pair), None, "copying to the partner");
            }
            Err(e) => {
                unreachable(e);
                self.meta.pair(None).await?;
            }
        }
        Ok(())
    }

    /// Brings the pair to what the service says, and the partner to what is here.
    pub(super) async fn look_after_pair(&self, pairs: Pairs) -> Result<(), Errno> {
        let owner = &self.replicas.owner;
        if !owner.wanted {
            return Ok(());
        }
        let epoch = owner.epoch();
        if epoch != pairs.epoch {
            self.out_of_step(epoch).await?;
        }
        match (owner.pair(), pairs.partner) {
            (Some(pair), _) => {
                let epoch = pair.link.set().epoch;
                if epoch == pairs.epoch && !pairs.partner_alive {
                    self.part(epoch, "the partner is lost").await?;
                } else if let Err(e) = pair.link.check().await {
                    self.part(epoch, &e.to_string()).await?;
                }
            }
            (None, Some((partner, address))) => self.pair_up(partner, address).await?,
            (None, None) => owner.say_why("no other node can keep copies"),
        }
        if let Some(node) = self.me_arc() {
            self.runtime.spawn(async move { node.catch_up().await });
        }
        Ok(())
    }

    /// Gives up what is in surplus at the partner, and copies what it lacks.
    async fn catch_up(&self) {
        let owner = &self.replicas.owner;
        let Ok(_alone) = owner.catching_up.try_lock() else { return };
        let surplus = std::mem::take(&mut owner.state.lock().surplus);
        for ino in surplus {
            if let Err(e) = self.drop_surplus(ino).await {
                tracing::debug!(%ino, error = %e, "copies not given up");
                owner.state.lock().surplus.insert(ino);
            }
        }
        let epoch = owner.epoch();
        let behind = {
            let state = owner.state.lock();
            state.degraded.as_ref().map(|_| state.behind)
        };
        let Some(behind) = behind.filter(|_| epoch != 0) else { return };
        for file in self.listed_dirty() {
            while let Ok(true) = self.copy_step(&file, epoch).await {}
        }
        let mut state = owner.state.lock();
        let same = state.pair.as_ref().is_some_and(|p| p.link.set().epoch == epoch);
        if same && state.behind == behind {
            state.degraded = None;
            tracing::info!("everything unflushed has a copy");
        }
    }

    /// Copies some of what the partner of `epoch` lacks of a file; false when that is nothing, or
    /// the pair has ended.
    async fn copy_step(&self, file: &CachedFile, epoch: u64) -> Result<bool, Errno> {
        let owner = &self.replicas.owner;
        let _turn = file.turn.lock().await;
        let unflushed: Vec<ByteRange> = {
            let state = file.state.read();
            if state.orphan {
                return Ok(false);
            }
            state.view.unflushed(ByteRange::ALL).into_iter().map(|(range, _)| range).collect()
        };
        let missing = owner.missing(file.ino, &unflushed, STEP_BYTES);
        if missing.is_empty() || owner.epoch() != epoch {
            return Ok(false);
        }
        Ok(self.copy(file, &missing).await? == epoch)
    }

    async fn drop_surplus(&self, ino: Ino) -> Result<(), Errno> {
        let owner = &self.replicas.owner;
        let file = self.file(ino);
        let _turn = match &file {
            Some(file) => Some(file.turn.lock().await),
            None => None,
        };
        let mut surplus: RangeSet<u64> =
            owner.copied(ino, ByteRange::ALL).into_iter().map(ByteRange::to_std).collect();
        if let Some(file) = &file {
            let state = file.state.read();
            let needed = state.view.unflushed(ByteRange::ALL).into_iter().map(|(range, _)| range);
            let needed = needed.chain(state.view.unattached(ByteRange::ALL));
            needed.filter(|r| !r.is_empty()).for_each(|r| surplus.remove(r.to_std()));
        }
        let surplus: Vec<ByteRange> = surplus.iter().map(bytes).collect();
        self.drop_copies(ino, &surplus).await
    }
}
