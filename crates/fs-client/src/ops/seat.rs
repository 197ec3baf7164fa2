//! Seats: a file that this node alone has open past its daemon, under a model that asks at each
//! read or write, sits here. Its cache file is the one truth of it until the last handle is closed.
//! What a seat is, is in [`ebb_consistency::Seat`].
//!
//! * What other nodes want to change they do here ([`Node::do_at_seat`]), and this node does the
//!   same at theirs.
//! * Before others are told anything of the file, the service asks this node to publish.
//! * The node journal says of which files that holds, before the open is answered: a daemon that takes the
//!   cache over publishes all of the cache file.

use crate::cache;
use crate::file::{CachedFile, Place, State, checked_range};
use crate::node::Node;
use crate::ops::open::Again;
use crate::ops::passing::Asked;
use crate::ops::room::Need;
use crate::ops::sync::{is_gone, owes_publication};
use crate::passing::{Door, MySeat};
use ebb_consistency::path::wants_seat;
use ebb_locks::Mutex;
use ebb_meta_client::{PublishFor, SeatWish, SetAttr};
use ebb_transport::{SeatLink, SeatWork, WorkError};
use ebb_types::{Access, ByteRange, Errno, Ino, NodeId, Time, Version};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Before it is tried again to publish for others.
const PAUSE: Duration = Duration::from_millis(200);

/// What this node keeps about seats, here and elsewhere.
#[derive(Default)]
pub(crate) struct Seats {
    /// Held by who makes a file that is to sit here, until the node knows that it does.
    making: tokio::sync::RwLock<()>,
    /// The number of the last one.
    last: Mutex<u64>,
    links: Mutex<HashMap<NodeId, Arc<SeatLink>>>,
}

impl CachedFile {
    /// The seat of the file, when it is here.
    pub(crate) fn seat(&self) -> Option<MySeat> {
        self.state.read().seat()
    }
}

impl State {
    /// The seat of the file, when it is here.
    pub(crate) fn seat(&self) -> Option<MySeat> {
        self.passing.as_ref()?.seat
    }
}

impl Node {
    /// A number that no other seat of this node has had, in this life or another.
    fn next_seat(&self) -> u64 {
        let now = Time::now();
        let now = now.sec.unsigned_abs().wrapping_mul(1_000_000_000).wrapping_add(now.nsec.into());
        let next = |last: u64| last.max(now).wrapping_add(1).max(1);
        let mut last = self.seats.last.lock();
        *last = next(*last);
        *last
    }

    /// Whether the file should sit here, when it is opened so and nobody else has it open.
    pub(crate) fn seat_wish(
        &self,
        state: Option<&State>,
        access: Access,
        fresh: bool,
        door: &dyn Door,
    ) -> Option<SeatWish> {
        let model = state.map_or_else(|| self.rules.job(), |s| &s.model);
        let here = state.is_none_or(|s| {
            let known = s.view.known_version() != Version::ZERO && s.view.is_complete();
            s.opens == 0 && s.passing.is_none() && !s.orphan && (fresh || known)
        });
        let told = !access.writes() || self.paths.telling.state().is_ok();
        let free = self.paths.obstacle().or_else(|| door.obstacle()).is_none();
        let wanted = wants_seat(model) && here && told && free && !self.config.naive;
        let asked = access.writes() && model.writes_publish();
        wanted.then(|| SeatWish { id: self.next_seat(), asked })
    }

    /// Held while a file is made that is to sit here: a question about it waits for that.
    pub(crate) async fn making_seat(&self) -> tokio::sync::RwLockReadGuard<'_, ()> {
        self.seats.making.read().await
    }

    /// A seat that came with an open and is not used is given back. The caller has the turn.
    pub(crate) async fn give_seat_back(
        &self,
        file: &CachedFile,
        asked: &Asked,
    ) -> Result<(), Errno> {
        match asked.seat {
            Some(seat) if file.seat() != Some(seat) => {
                match self.meta.published(file.ino, seat.id, 0, false).await {
                    Err(Errno::ESTALE) => Ok(()),
                    done => done,
                }
            }
            _ => Ok(()),
        }
    }

    // ---- where files sit here ----------------------------------------------------------------

    /// Somebody else asks about a file that sits here, as far as the service knows, or has locked
    /// some of it.
    pub(crate) fn asked_to_publish(&self, asked: PublishFor) {
        let Some(node) = self.me_arc() else { return };
        self.runtime.spawn(async move {
            match asked.seat {
                0 => node.publish_for_lock(asked).await,
                _ => node.publish_for_others(asked).await,
            }
        });
    }

    async fn publish_for_others(&self, asked: PublishFor) {
        let PublishFor { ino, seat, seq, .. } = asked;
        if self.begun.subscribe().wait_for(|b| *b).await.is_err() {
            return;
        }
        let connection = self.meta.connection();
        let is_seat = |file: &Arc<CachedFile>| file.seat().is_some_and(|s| s.id == seat);
        if !self.file(ino).is_some_and(|file| is_seat(&file)) {
            // Whoever makes a file learns that it sits here only with the answer.
            drop(self.seats.making.write().await);
        }
        let file = self.file(ino);
        while self.meta.connection() == connection {
            let turn = match &file {
                Some(file) => Some(file.turn.lock().await),
                None => None,
            };
            let seated = file.as_ref().filter(|file| is_seat(file));
            let published = match seated {
                Some(file) => self.publish_unseen(file).await,
                None => Ok(()),
            };
            match published {
                Ok(()) => {
                    let done = self.meta.published(ino, seat, seq, seated.is_some()).await;
                    if let Err(e) = done {
                        tracing::debug!(%ino, error = %e, "whoever asked is not told");
                    }
                    return;
                }
                // Nobody can ask for it any more.
                Err(e) if is_gone(e) => return,
                Err(e) => tracing::warn!(%ino, error = %e, "not published yet for others"),
            }
            drop(turn);
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Another node has locked bytes that may have been written here. Nothing of this waits for a lock.
    async fn publish_for_lock(&self, asked: PublishFor) {
        let PublishFor { ino, range, seq, .. } = asked;
        if self.begun.subscribe().wait_for(|b| *b).await.is_err() {
            return;
        }
        let connection = self.meta.connection();
        while self.meta.connection() == connection {
            match self.publish_within(ino, range).await {
                Ok(()) => break,
                // Nobody can read it any more.
                Err(e) if is_gone(e) => break,
                Err(e) => tracing::warn!(%ino, error = %e, "not published yet for a lock"),
            }
            tokio::time::sleep(PAUSE).await;
        }
        if let Err(e) = self.meta.published(ino, 0, seq, false).await {
            tracing::debug!(%ino, error = %e, "whoever has the lock is not told");
        }
    }

    async fn publish_within(&self, ino: Ino, range: ByteRange) -> Result<(), Errno> {
        let Some(file) = self.file(ino) else { return Ok(()) };
        let _turn = file.turn.lock().await;
        // What was written past the daemon is looked for, and found, in the file as a whole.
        let range = if file.is_tracked() { ByteRange::ALL } else { range };
        self.attach(&file, range, false, false).await
    }

    /// What was written to files that sit here is published though nobody asks: a node that is
    /// lost takes no more with it than that.
    pub(crate) async fn publish_seats(&self) {
        for file in self.files_written_past() {
            let unseen = {
                let state = file.state.read();
                let owed = self.shows_unseen(&file, &state) || owes_publication(&state);
                state.seat().is_some() && owed
            };
            if unseen {
                let _turn = file.turn.lock().await;
                if let Err(e) = self.publish_unseen(&file).await {
                    tracing::debug!(ino = %file.ino, error = %e, "not published yet");
                }
            }
        }
    }

    /// Does what another node wants done to a file that sits here.
    pub(crate) async fn do_at_seat(
        &self,
        ino: Ino,
        work: SeatWork,
        ranges: &[ByteRange],
        bytes: &[u8],
    ) -> Result<(), Errno> {
        let file = self.file(ino).filter(|f| f.seat().is_some()).ok_or(Errno::ESTALE)?;
        match work {
            SeatWork::Look => return Ok(()),
            SeatWork::Sync => return self.fsync_file(&file).await,
            SeatWork::Cut => {
                let size = ranges.first().ok_or(Errno::EINVAL)?.end();
                let args = SetAttr { size: Some(size), ..SetAttr::default() };
                return self.setattr(ino, args).await.map(drop);
            }
            SeatWork::Grow => {
                let size = ranges.first().ok_or(Errno::EINVAL)?.end();
                return self.grow(ino, size, false).await;
            }
            SeatWork::Write | SeatWork::Append => {}
        }
        if self.is_over_capacity() {
            self.make_room(Need::Share).await?;
        }
        let _turn = file.turn.lock().await;
        if file.seat().is_none() {
            return Err(Errno::ESTALE);
        }
        let mut at = 0;
        for range in ranges {
            let part = bytes.get(at..at + range.len() as usize).ok_or(Errno::EPROTO)?;
            at += part.len();
            let stored = match work {
                SeatWork::Append => self.append_here(&file, part)?,
                _ => file.store(&self.cache, Place::At(range.start()), part, |_| {})?,
            };
            self.note_taken();
            self.note_stored(&file, stored);
            self.list_dirty(&file);
            if stored.len() != part.len() as u64 {
                return Err(Errno::ENOSPC);
            }
        }
        // Done here it is, so that nobody may take it for not done and do it again.
        let published = self.attach(&file, ByteRange::ALL, false, false).await;
        published.map_err(|e| if is_gone(e) { Errno::EIO } else { e })
    }

    /// Appends to the cache file, into which applications may append at the same time.
    fn append_here(&self, file: &CachedFile, data: &[u8]) -> Result<ByteRange, Errno> {
        let cache = cache::reopened_for_appending(&*file.cache_to_write(&self.cache)?)?;
        let mut state = file.state.write();
        let range = cache::append(&cache, data)?;
        checked_range(range.start(), range.len())?;
        state.view.write(range);
        state.mtime = Some(Time::now());
        Ok(range)
    }

    // ---- where files sit elsewhere -----------------------------------------------------------

    async fn seat_link(&self, node: NodeId) -> Result<Arc<SeatLink>, Errno> {
        self.leases.at_seats.fetch_add(1, Relaxed);
        if let Some(link) = self.seats.links.lock().get(&node) {
            return Ok(Arc::clone(link));
        }
        let address = self.address_of(node).await?.ok_or(Errno::EIO)?;
        let link = Arc::new(SeatLink::new(Arc::clone(&self.peers), address));
        self.seats.links.lock().insert(node, Arc::clone(&link));
        Ok(link)
    }

    /// What an application is told when a seat cannot do what it should. ESTALE: it is none any more.
    fn seat_fails(&self, node: NodeId, e: &WorkError) -> Errno {
        match e {
            WorkError::Refused(errno) | WorkError::Local(errno) => *errno,
            WorkError::Silent(why) | WorkError::Unreached(why) => {
                // It may be elsewhere by now.
                self.seats.links.lock().remove(&node);
                self.addresses.lock().remove(&node);
                tracing::warn!(%node, why, "a node that has a file open past its daemon does not answer");
                Errno::EHOSTUNREACH
            }
        }
    }

    /// Bytes that were written here go to the node at which the file sits. ESTALE: it does not any
    /// more. The caller has the turn.
    pub(crate) async fn write_at_seat(
        &self,
        file: &Arc<CachedFile>,
        node: NodeId,
        ranges: &[ByteRange],
    ) -> Result<(), Errno> {
        let link = self.seat_link(node).await?;
        let _held = file.hold(ranges);
        let from = file.cache(&self.cache)?;
        let read =
            |range: ByteRange, into: &mut [u8]| cache::read_padded(&from, into, range.start());
        let done = link.write(file.ino, ranges, read).await;
        done.map_err(|e| self.seat_fails(node, &e))
    }

    /// The same of bytes that go behind the end. EIO: it may have been done.
    pub(crate) async fn append_at_seat(
        &self,
        ino: Ino,
        node: NodeId,
        data: &[u8],
    ) -> Result<(), Errno> {
        let link = self.seat_link(node).await?;
        link.append(ino, data).await.map_err(|e| match self.seat_fails(node, &e) {
            Errno::EHOSTUNREACH if matches!(e, WorkError::Silent(_)) => Errno::EIO,
            errno => errno,
        })
    }

    /// The same of a cut.
    pub(crate) async fn cut_at_seat(&self, ino: Ino, node: NodeId, size: u64) -> Result<(), Errno> {
        let link = self.seat_link(node).await?;
        link.cut(ino, size).await.map_err(|e| self.seat_fails(node, &e))
    }

    /// The same of what only makes it longer.
    pub(crate) async fn grow_at_seat(
        &self,
        ino: Ino,
        node: NodeId,
        size: u64,
    ) -> Result<(), Errno> {
        let link = self.seat_link(node).await?;
        link.grow(ino, size).await.map_err(|e| self.seat_fails(node, &e))
    }

    /// `fsync` where the file sits.
    pub(crate) async fn sync_at_seat(&self, ino: Ino, node: NodeId) -> Result<(), Errno> {
        let link = self.seat_link(node).await?;
        link.sync(ino).await.map_err(|e| self.seat_fails(node, &e))
    }

    /// Something is tried again when the file has left the node at which it sat, or that does not
    /// answer: it may be coming back. Anything else is the end of it.
    pub(crate) async fn seat_again(&self, again: &mut Again, e: Errno) -> Result<(), Errno> {
        match e {
            Errno::ESTALE | Errno::EHOSTUNREACH => again.pause().await.map_err(|_| Errno::EIO),
            other => Err(other),
        }
    }
}
