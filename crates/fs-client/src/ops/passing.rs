//! Opens that are passed through to the kernel: when an inode begins and ends to be, what was
//! written past the daemon, and keeping the cache file such that it reads right by itself.

use crate::cache;
use crate::file::{CachedFile, State};
use crate::handles::OpenFile;
use crate::node::{Fate, Node};
use crate::ops::fetch::{is_unknown, split};
use crate::ops::room::Need;
use crate::ops::sync::owes_publication;
use crate::passing::{self, Door, MySeat, Opening, Passing, Stamp, Track};
use ebb_consistency::path::{Circumstances, decide, wants_seat};
use ebb_consistency::{Beside, Changes, IoPath, Reason, Source};
use ebb_flusher::BypassSource;
use ebb_meta_client::SeatWish;
use ebb_types::{Access, Attr, ByteRange, Errno};
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::Weak;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// Rounds of fetching what an observation showed, at least, before it is called hopeless; and as
/// long as a request may take: its owner may be coming back.
const ROUNDS_MIN: u32 = 8;

/// Looks for a writable mapping that outlives its last handle: at first at once, then so often.
const MAPPED_LOOK_MAX: Duration = Duration::from_millis(500);

/// Looks made before a release is answered, and the rest left to a task.
const LOOKS_AT_ONCE: u32 = 4;

/// What an open asks for.
#[derive(Clone, Copy)]
pub(crate) struct Asked {
    pub access: Access,
    pub sole: bool,
    pub privileged: bool,
    /// This open made the file, or emptied it.
    pub fresh: bool,
    /// From now on the file sits here.
    pub seat: Option<MySeat>,
    /// Under which number it counts, where the file is coupled; 0: it does not.
    pub couple: u64,
}

impl Asked {
    /// From the flags of the call and what the service answered.
    pub(crate) fn new(flags: i32, sole: bool, attr: Option<&Attr>) -> Asked {
        let access = Asked::access_of(flags);
        let privileged = attr.is_some_and(|a| a.perm & 0o6000 != 0);
        Asked { access, sole, privileged, fresh: flags & libc::O_TRUNC != 0, seat: None, couple: 0 }
    }

    /// The same, where the service was asked for this seat, and said so.
    pub(crate) fn seated(self, wish: Option<SeatWish>, seated: bool) -> Asked {
        let writes = self.access.writes();
        let seat = wish.filter(|_| seated).map(|w| MySeat { id: w.id, asked: w.asked, writes });
        Asked { seat, ..self }
    }

    /// What the flags of a call ask for.
    pub(crate) fn access_of(flags: i32) -> Access {
        match flags & libc::O_ACCMODE {
            libc::O_RDONLY => Access::Read,
            libc::O_WRONLY => Access::Write,
            _ => Access::ReadWrite,
        }
    }

    /// The same, of a file that was just made.
    pub(crate) fn made(self) -> Asked {
        Asked { fresh: true, ..self }
    }
}

impl Node {
    /// Chooses the way of an open that is counted in `opens` already, and takes the handle in. The
    /// caller has the turn.
    pub(crate) fn enter(
        &self,
        file: &Arc<CachedFile>,
        asked: Asked,
        door: &dyn Door,
    ) -> Result<Opening, Errno> {
        let (path, id) = self.choose(file, asked, door)?;
        self.paths.count(path);
        let fh = self.enter_handle(Arc::clone(file), path, &asked);
        if file.is_tracked() {
            self.list_dirty(file);
        }
        Ok(Opening { fh, path, id })
    }

    fn choose(
        &self,
        file: &Arc<CachedFile>,
        asked: Asked,
        door: &dyn Door,
    ) -> Result<(IoPath, Option<Arc<ebb_fuse::BackingId>>), Errno> {
        let writes = asked.access.writes();
        let (crowded, confined) = (writes && self.is_crowded(), writes && self.is_confined());
        let mut state = file.state.write();
        let told = self.paths.telling.state().is_ok();
        let pinned = (told || !writes) && self.is_pinned(&state);
        let seat = asked.seat.or_else(|| state.seat());
        let publishes = state.model.writes_publish();
        let seated = seat.is_some_and(|s| s.asked || !writes || !publishes);
        let beside = passing::beside(state.passing.as_ref(), state.opens.saturating_sub(1));
        let path = decide(
            &state.view,
            &Circumstances {
                model: &state.model,
                access: asked.access,
                beside,
                seated,
                sole: asked.sole,
                privileged: asked.privileged,
                obstacle: self.paths.obstacle().or_else(|| door.obstacle()),
                crowded,
                confined,
                told,
                pinned,
            },
        );
        if matches!(path, IoPath::Daemon(_)) {
            if path == IoPath::Daemon(Reason::BufferNearlyFull) {
                self.clear_up();
            }
            return Ok((path, None));
        }
        if beside == Beside::Nobody
            && let Err(e) = self.begin_passing(file, &mut state, door)
        {
            let reason = passing::obstacle_of(&e);
            tracing::warn!(error = %e, %reason, "no passthrough; opens go to the daemon");
            self.paths.set_obstacle(Some(reason));
            return Ok((IoPath::Daemon(reason), None));
        }
        self.begin_tracking(file, &mut state, path, asked)?;
        let wanted = seated && wants_seat(&state.model);
        if let (Some(seat), Some(passing)) = (asked.seat.filter(|_| wanted), &mut state.passing) {
            passing.seat = Some(seat);
            self.leases.seats.fetch_add(1, Relaxed);
            if seat.writes {
                self.note_seat(file, &state, seat.id);
            }
        }
        if state.passing.as_ref().is_some_and(|p| p.track.is_some()) {
            self.watch(file);
        }
        Ok((path, state.passing.as_ref().map(|p| Arc::clone(&p.id))))
    }

    /// From now on the cache file reads right by itself.
    fn begin_passing(
        &self,
        file: &CachedFile,
        state: &mut State,
        door: &dyn Door,
    ) -> io::Result<()> {
        let cache = file.cache_to_write(&self.cache)?;
        // Nobody tells what is written there from now on.
        state.sums = crate::sums::Sums::default();
        let size = state.view.size();
        // Freeing the space of lost bytes can have failed before.
        for hole in state.view.absent(ByteRange::new(0, size)) {
            cache::punch(&cache, hole)?;
        }
        if cache.metadata()?.len() != size {
            cache.set_len(size)?;
        }
        let id = door.register(self.cache.for_kernel(file.ino)?.as_fd())?;
        let held = state.view.unflushed_bytes() + state.view.clean_bytes();
        self.room.past.pin(0, held);
        state.passing =
            Some(Passing { id: Arc::new(id), track: None, size, held, ahead: 0, seat: None });
        Ok(())
    }

    fn begin_tracking(
        &self,
        file: &CachedFile,
        state: &mut State,
        path: IoPath,
        asked: Asked,
    ) -> Result<(), Errno> {
        let State { passing: Some(passing), view, .. } = state else { return Ok(()) };
        // A mapping of any handle leads to the cache file; to map it writably takes both.
        let tracked = path == IoPath::Write || asked.access == Access::ReadWrite;
        if !tracked {
            return Ok(());
        }
        let cache = file.cache(&self.cache)?;
        if passing.track.is_none() {
            // First of all: what is told may be too much, and must not be too little.
            let told = self.paths.telling.watch(&cache);
            let mut track = Track::start(&cache, self.paths.fine_times(), told)?;
            for clean in view.clean(ByteRange::ALL) {
                track.remember(&cache, clean)?;
            }
            passing.track = Some(track);
        }
        // An empty file that somebody else has open, or made: many are going to write it.
        let many = !(asked.sole && asked.fresh);
        if path == IoPath::Write && many && view.is_blank() {
            self.take_ahead(file, passing);
        }
        if let Some(track) = passing.track.as_mut().filter(|_| asked.access == Access::ReadWrite) {
            track.may_be_mapped(&cache, self.paths.access_times())?;
        }
        Ok(())
    }

    /// Reads from the cache file of a passed-through inode; `None` when it is not passed through.
    pub(crate) fn read_passed(
        &self,
        file: &CachedFile,
        offset: u64,
        buffer: &mut [u8],
    ) -> Result<Option<usize>, Errno> {
        let state = file.state.read();
        if state.passing.is_none() {
            return Ok(None);
        }
        let cache = file.cache(&self.cache)?;
        let mut done = 0;
        while done < buffer.len() {
            match cache.read_at(&mut buffer[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(Some(done))
    }

    /// What the cache file of a passed-through inode says of size and time, which the view does
    /// not know yet.
    pub(crate) fn seen_past(&self, file: &CachedFile, state: &State, attr: &mut Attr) {
        let Some(passing) = &state.passing else { return };
        let Ok(now) = file.cache(&self.cache).and_then(|c| Ok(Stamp::of(&c)?)) else { return };
        // Else others may have cut it, or made it longer, since it was made to agree.
        if now.len > passing.size {
            attr.size = attr.size.max(now.len);
        }
        if passing.track.as_ref().is_some_and(|t| t.shows_change(&now)) {
            attr.mtime = attr.mtime.max(now.modified());
            attr.ctime = attr.ctime.max(now.modified());
        }
    }

    /// True when something may have been written past the daemon since the last look.
    pub(crate) fn may_hold_unseen(&self, file: &CachedFile, state: &State) -> bool {
        let Some(track) = state.passing.as_ref().and_then(|p| p.track.as_ref()) else {
            return false;
        };
        let now = file.cache(&self.cache).and_then(|c| Ok(Stamp::of(&c)?));
        now.is_ok_and(|now| track.may_have_changed(&now))
    }

    /// The same, by what shows only: for lists that are made often.
    pub(crate) fn shows_unseen(&self, file: &CachedFile, state: &State) -> bool {
        let Some(track) = state.passing.as_ref().and_then(|p| p.track.as_ref()) else {
            return false;
        };
        let now = file.cache(&self.cache).and_then(|c| Ok(Stamp::of(&c)?));
        now.is_ok_and(|now| track.shows_change(&now))
    }

    /// Finds what was written past the daemon.
    pub(crate) fn collect(&self, file: &Arc<CachedFile>) -> Result<(), Errno> {
        if !file.is_tracked() {
            return Ok(());
        }
        let cache = file.cache(&self.cache)?;
        let seen = {
            let mut state = file.state.write();
            let State { passing: Some(Passing { track: Some(track), .. }), view, mtime, .. } =
                &mut *state
            else {
                return Ok(());
            };
            let now = Stamp::of(&cache)?;
            if !track.may_have_changed(&now) {
                return Ok(());
            }
            if track.shows_change(&now) {
                *mtime = (*mtime).max(Some(now.modified()));
            }
            track.look(&cache, now, view)?
        };
        if let Some(why) = seen.lost {
            self.paths.telling.note_loss(&file.label(), why);
        }
        seen.new.iter().for_each(|range| self.note_stored(file, *range));
        self.list_dirty(file);
        if seen.bytes > 0 {
            self.note_taken();
        }
        self.metrics.bytes_written.fetch_add(seen.bytes, Relaxed);
        Ok(())
    }

    /// Publishes what was written past the daemon, so that an answer of the service cannot be
    /// mistaken to be newer. The caller has the turn.
    pub(crate) async fn publish_unseen(&self, file: &Arc<CachedFile>) -> Result<(), Errno> {
        if !file.is_tracked() {
            return Ok(());
        }
        self.attach(file, ByteRange::ALL, false, false).await
    }

    /// Publishes what was written past the daemon of every file, stores through mappings as well,
    /// which show nowhere: a drain that was asked for begins with this.
    pub(crate) async fn publish_all_unseen(&self) {
        for file in self.listed_dirty() {
            let _turn = file.turn.lock().await;
            if let Err(e) = self.publish_unseen(&file).await {
                tracing::warn!(ino = %file.ino, error = %e, "not published before the drain");
            }
        }
    }

    /// Own bytes that may have been written again since they were attached. They count as sent with
    /// the `last` part of the file.
    pub(crate) fn take_again(
        &self,
        state: &mut State,
        within: ByteRange,
        last: bool,
    ) -> Vec<ByteRange> {
        let State { passing: Some(Passing { track: Some(track), .. }), view, .. } = state else {
            return Vec::new();
        };
        let due = if last { track.take_due() } else { track.is_due() };
        if due { view.owned(within) } else { Vec::new() }
    }

    /// They were not attached.
    pub(crate) fn again_failed(&self, state: &mut State) {
        if let Some(Passing { track: Some(track), .. }) = &mut state.passing {
            track.set_due();
        }
    }

    /// Guessed bytes that the service did not attach because others have them: of these, what is
    /// not zero was written here and is dirty by name now.
    pub(crate) fn settle_contested(
        &self,
        file: &CachedFile,
        contested: &[ByteRange],
    ) -> Result<(), Errno> {
        let cache = file.cache(&self.cache)?;
        let mut state = file.state.write();
        let (_, guessed) = state.view.by_precision(contested);
        let written = passing::written_runs(&cache, &guessed)?;
        let zeros = state.view.refused(contested, &written);
        if let Some(Passing { track: Some(track), .. }) = &mut state.passing {
            track.refuse(&zeros);
        }
        self.note_not_attached(file, &zeros);
        Ok(())
    }

    /// An answer took bytes from a passed-through inode. They stay in its cache file, for whoever
    /// reads it now, until the new ones are brought there ([`Node::complete`]); what is zeros now
    /// becomes so here.
    pub(crate) fn replace_lost(
        &self,
        file: &CachedFile,
        state: &mut State,
        changes: &Changes,
    ) -> Result<(), Errno> {
        let cache = file.cache(&self.cache)?;
        let State { passing: Some(passing), view, .. } = state else { return Ok(()) };
        for (list, were_own) in [(&changes.overtaken, true), (&changes.stale, false)] {
            for piece in list.iter().flat_map(|r| view.plan_read(*r)) {
                match (piece.source, &mut passing.track) {
                    (Source::Local, _) | (Source::Zero, None) => {}
                    (Source::Zero, Some(track)) => track.clear(piece.range)?,
                    (_, Some(track)) if were_own => track.overtaken(&cache, piece.range),
                    _ => {}
                }
                if piece.source == Source::Zero {
                    cache::punch(&cache, piece.range)?;
                }
            }
        }
        let before = std::mem::replace(&mut passing.size, view.published_size());
        if view.published_size() < before {
            cut(&cache, passing, view.size())?;
        }
        Ok(cache::extend(&cache, view.size())?)
    }

    /// The size was set by this node.
    pub(crate) fn resize_passed(&self, file: &CachedFile, state: &mut State, size: u64) {
        let Some(passing) = &mut state.passing else { return };
        passing.size = size;
        let done = file.cache(&self.cache).and_then(|cache| {
            if cache.metadata()?.len() != size {
                cut(&cache, passing, size)?;
            }
            Ok(())
        });
        if let Err(e) = done {
            tracing::error!(ino = %file.ino, error = %e, "a cache file that is passed through has a wrong size");
        }
    }

    /// Brings everything that this node has heard of into the cache file of a passed-through
    /// inode, before the call returns that asked. It stays in the buffer until the last close; where
    /// that is too much, the call fails.
    pub(crate) async fn complete(&self, file: &Arc<CachedFile>) -> Result<(), Errno> {
        let end = Instant::now() + self.deadline();
        for round in 0.. {
            let missing = {
                let state = file.state.read();
                // Where the file sits here, the cache file is right whatever the map says.
                if state.passing.is_none() || state.seat().is_some() {
                    return Ok(());
                }
                let remote = |s: &Source| matches!(s, Source::Peer { .. } | Source::Backing);
                let plan = state.view.plan_read(ByteRange::new(0, state.view.size()));
                plan.into_iter().filter(|p| remote(&p.source)).collect::<Vec<_>>()
            };
            if missing.is_empty() {
                return Ok(());
            }
            let mut moved = missing.iter().any(is_unknown);
            for piece in missing.into_iter().flat_map(split) {
                if self.is_over_capacity() {
                    self.make_room(Need::Share).await?;
                }
                let came = self.obtain(file, piece).await?.is_some();
                self.note_pinned(&mut file.state.write());
                moved |= !came;
                if came && !file.state.read().view.local(piece.range) {
                    // It could not be stored, or something newer has been heard of meanwhile.
                    if self.is_disk_short() {
                        self.make_room(Need::Disk).await?;
                    }
                    moved = true;
                    break;
                }
            }
            if moved {
                if round >= ROUNDS_MIN && Instant::now() >= end {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(1 << round.min(8))).await;
                self.query_anew(file, ByteRange::ALL).await?;
            }
        }
        tracing::warn!(ino = %file.ino, "what other nodes wrote cannot be brought into an open file");
        Err(if self.is_disk_short() { Errno::ENOSPC } else { Errno::EIO })
    }

    /// The last handle of an inode goes. When it was written past the daemon, the last look is
    /// made after the last writable mapping is gone, which outlives the handle.
    pub(crate) async fn leave(&self, handle: &OpenFile) {
        let file = &handle.file;
        for look in 0.. {
            let turn = file.turn.lock().await;
            let free = !self.must_wait_for_mappings(file);
            if free && self.may_leave(file).await {
                return self.closed(file).await;
            }
            drop(turn);
            if (free || look >= LOOKS_AT_ONCE)
                && let Some(node) = self.me_arc()
            {
                let file = Arc::clone(file);
                self.runtime.spawn(async move { node.leave_later(&file).await });
                return;
            }
            tokio::time::sleep(Duration::from_micros(200 << look)).await;
        }
    }

    async fn leave_later(&self, file: &Arc<CachedFile>) {
        let mut pause = Duration::from_millis(5);
        loop {
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(MAPPED_LOOK_MAX);
            let _turn = file.turn.lock().await;
            if !self.must_wait_for_mappings(file) && self.may_leave(file).await {
                return self.closed(file).await;
            }
        }
    }

    /// Ends the passing through with the last handle; false when it cannot end yet.
    async fn may_leave(&self, file: &Arc<CachedFile>) -> bool {
        file.state.read().opens != 1 || self.end_passing(file).await
    }

    /// True when this is the last handle, and somebody can still write.
    fn must_wait_for_mappings(&self, file: &CachedFile) -> bool {
        let last = file.state.read().opens == 1;
        last && file.is_tracked() && !file.has_no_writers(&self.cache)
    }

    /// Publishes what the last look finds; false when that cannot be done now.
    async fn end_passing(&self, file: &Arc<CachedFile>) -> bool {
        let tracked = file.is_tracked();
        if tracked {
            let owed = {
                let state = file.state.read();
                // Somebody may have looked since the close, and only noted it.
                self.may_hold_unseen(file, &state) || owes_publication(&state)
            };
            if owed && let Err(e) = self.attach(file, ByteRange::ALL, false, false).await {
                tracing::warn!(ino = %file.ino, error = %e, "not published at the last close");
                self.note_written_now(file);
                // Nobody could tell later which own bytes were written again. Of a file that is
                // gone nobody wants to know.
                if !matches!(e, Errno::ENOENT | Errno::ESTALE)
                    || !matches!(self.fate(file.ino).await, Ok(Fate::Deleted | Fate::Nameless))
                {
                    return false;
                }
            }
        }
        self.stop_passing(file, &mut file.state.write());
        if tracked {
            self.unlist_if_clean(file);
        }
        true
    }
}

/// Sets the length of a passed-through cache file.
fn cut(cache: &File, passing: &mut Passing, size: u64) -> io::Result<()> {
    cache.set_len(size)?;
    passing.ahead = passing.ahead.min(size);
    match &mut passing.track {
        Some(track) => track.clear(ByteRange::new(size, i64::MAX as u64)),
        None => Ok(()),
    }
}

/// Writes past the daemon as activity: the kernel's word, or else the files that are open for them
/// are looked at.
pub(crate) struct Bypass(pub Weak<Node>);

impl BypassSource for Bypass {
    fn changes(&self) -> u64 {
        let Some(node) = self.0.upgrade() else { return 0 };
        let mut sum = node.paths.telling.activity();
        let told = |p: &Passing| p.track.as_ref().is_some_and(Track::is_told);
        for file in node.listed_dirty() {
            if file.state.read().passing.as_ref().is_some_and(|p| !told(p))
                && let Ok(now) = file.cache(&node.cache).and_then(|c| Ok(Stamp::of(&c)?))
            {
                sum = sum.wrapping_mul(31).wrapping_add(now.mark());
            }
        }
        sum
    }
}
