//! Reading and writing. What is local is answered at once; the rest waits for the service, a
//! peer or the backing.

use crate::cache::{self, read_padded};
use crate::file::{CachedFile, Place, checked_range};
use crate::handles::OpenFile;
use crate::node::Node;
use crate::ops::fetch::is_unknown;
use crate::ops::open::Again;
use crate::ops::room::Need;
use crate::ops::sync::is_gone;
use crate::quiet::Stored;
use bytes::Bytes;
use ebb_consistency::{Scope, Source, SyncEvent};
use ebb_handover::Placed;
use ebb_types::{ByteRange, Errno, NodeId, Time};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// What became of a write.
#[derive(Debug)]
pub enum Written {
    /// So many bytes are written and the model asks for nothing more.
    Done(u32),
    /// More has to happen before the application may go on.
    Then(Rest),
}

impl Written {
    /// True when everything is written.
    #[must_use]
    pub fn is_all_of(&self, data: &[u8]) -> bool {
        matches!(self, Written::Done(n) if *n as usize == data.len())
    }
}

/// The part of a write that has to wait.
#[derive(Debug)]
pub enum Rest {
    /// The bytes are here; they must be published.
    Publish(ByteRange),
    /// The end of the file must be asked for first.
    Append(Vec<u8>),
    /// Others may have moved the end of the file: they must be asked first.
    AskEnd(Vec<u8>),
    /// The buffer is full: room must be made first.
    NoRoom(Need, Place, Vec<u8>),
    /// Setuid bits must go first.
    KillPriv(u64, bool, Vec<u8>),
}

impl Node {
    /// Stores an application's bytes, and says what is left to do.
    pub fn write_local(
        &self,
        handle: &OpenFile,
        offset: u64,
        append: bool,
        kill_priv: bool,
        data: &[u8],
    ) -> Result<Written, Errno> {
        if kill_priv {
            return Ok(Written::Then(Rest::KillPriv(offset, append, data.to_vec())));
        }
        if append && let Some(rest) = self.before_append(&handle.file, data) {
            return self.append_quietly_or(&handle.file, data, rest);
        }
        self.write_at(&handle.file, if append { Place::End } else { Place::At(offset) }, data)
    }

    /// What an append must wait for: under some models others can have moved the end.
    fn before_append(&self, file: &CachedFile, data: &[u8]) -> Option<Rest> {
        let state = file.state.read();
        if state.model.append_is_atomic() {
            return Some(Rest::Append(data.to_vec()));
        }
        let asks = state.model.append_asks() && !self.map_is_leased(&state);
        asks.then(|| Rest::AskEnd(data.to_vec()))
    }

    /// Where nobody else writes, the end of the file is known here.
    fn append_quietly_or(
        &self,
        file: &Arc<CachedFile>,
        data: &[u8],
        rest: Rest,
    ) -> Result<Written, Errno> {
        // What comes again may have been sent by the daemon that asked first.
        let again = ebb_meta_client::caller().is_some_and(|c| c.again);
        if !matches!(rest, Rest::Append(_)) || again || self.is_over_capacity() {
            return Ok(Written::Then(rest));
        }
        match self.write_quietly(file, Place::End, data) {
            Ok(Some(stored)) => Ok(self.written(file, stored)),
            Ok(None) => Ok(Written::Then(rest)),
            Err(e) if e.is_full() => Ok(Written::Then(rest)),
            Err(e) => Err(e),
        }
    }

    /// The rest of a write whose bytes are stored.
    fn written(&self, file: &Arc<CachedFile>, stored: Stored) -> Written {
        let (Stored::Quietly(range) | Stored::Aloud(range)) = stored;
        self.note_taken();
        self.note_for_heir(file, range);
        self.note_stored(file, range);
        self.list_dirty(file);
        self.metrics.bytes_written.fetch_add(range.len(), Relaxed);
        match stored {
            Stored::Quietly(range) => Written::Done(range.len() as u32),
            Stored::Aloud(range) => Written::Then(Rest::Publish(range)),
        }
    }

    pub(super) fn write_at(
        &self,
        file: &Arc<CachedFile>,
        place: Place,
        data: &[u8],
    ) -> Result<Written, Errno> {
        let attach = file.state.read().model.on(SyncEvent::Write).attach;
        let no_room = |need| Ok(Written::Then(Rest::NoRoom(need, place, data.to_vec())));
        if self.is_over_capacity() {
            return no_room(Need::Share);
        }
        match self.write_quietly(file, place, data) {
            Ok(None) => {}
            Ok(Some(stored)) => return Ok(self.written(file, stored)),
            Err(e) if e.is_full() => return no_room(Need::Disk),
            Err(e) => return Err(e),
        }
        let placed = |range| self.note_place(file.ino, range);
        let range = match file.store(&self.cache, place, data, placed) {
            Err(e) if e.is_full() => return no_room(Need::Disk),
            stored => stored?,
        };
        Ok(self.written(
            file,
            match attach {
                None => Stored::Quietly(range),
                Some(Scope::Range | Scope::File) => Stored::Aloud(range),
            },
        ))
    }

    /// Does what a write left to do.
    pub async fn finish_write(&self, handle: &OpenFile, rest: Rest) -> Result<u32, Errno> {
        self.finish(handle, rest, true).await
    }

    /// `told`: an error is told to who wrote, and the bytes have not been written then.
    async fn finish(&self, handle: &OpenFile, rest: Rest, told: bool) -> Result<u32, Errno> {
        match rest {
            Rest::Publish(range) => {
                let published = self.event(&handle.file, SyncEvent::Write, range, false).await;
                if let Err(e) = published {
                    if told && !is_gone(e) {
                        self.write_failed(&handle.file, range);
                    }
                    return Err(e);
                }
                Ok(range.len() as u32)
            }
            Rest::Append(data) => self.append(handle, &data).await,
            Rest::AskEnd(data) => {
                self.ask(&handle.file, ByteRange::ALL).await?;
                let written = self.write_at(&handle.file, Place::End, &data)?;
                self.finish_written(handle, written, told).await
            }
            Rest::KillPriv(offset, append, data) => {
                self.kill_priv(handle.file.ino).await?;
                let written = self.write_local(handle, offset, append, false, &data)?;
                self.finish_written(handle, written, told).await
            }
            Rest::NoRoom(need, place, data) => {
                self.make_room(need).await?;
                let written = self.write_at(&handle.file, place, &data)?;
                self.finish_written(handle, written, told).await
            }
        }
    }

    /// The same of pages that the kernel writes back: all of them, or an error.
    pub async fn finish_pages(
        &self,
        handle: &OpenFile,
        offset: u64,
        data: &[u8],
        begun: Written,
    ) -> Result<u32, Errno> {
        let (mut written, mut done) = (begun, 0);
        loop {
            match self.finish_written(handle, written, false).await? {
                0 => return Err(Errno::ENOSPC),
                n => done += n as usize,
            }
            let Some(rest) = data.get(done..).filter(|rest| !rest.is_empty()) else {
                return Ok(data.len() as u32);
            };
            written = self.write_local(handle, offset + done as u64, false, false, rest)?;
        }
    }

    async fn finish_written(
        &self,
        handle: &OpenFile,
        written: Written,
        told: bool,
    ) -> Result<u32, Errno> {
        match written {
            Written::Done(n) => Ok(n),
            Written::Then(rest) => Box::pin(self.finish(handle, rest, told)).await,
        }
    }

    /// A write that could not be published has failed: its bytes must not come later, over what others have
    /// written meanwhile.
    pub(super) fn write_failed(&self, file: &Arc<CachedFile>, range: ByteRange) {
        let mut state = file.state.write();
        let (failed, known) = (state.view.unattached(range), state.view.known_version());
        state.quiet.failed(&failed, known);
        drop(state);
        self.look_after_quiet(file);
    }

    /// Appends where the service says the end is, in one step with publishing. A reader that
    /// hears of the bytes before they are stored asks again (see `fetch.rs`).
    async fn append(&self, handle: &OpenFile, data: &[u8]) -> Result<u32, Errno> {
        let file = &handle.file;
        if self.is_over_capacity() {
            self.make_room(Need::Share).await?;
        }
        self.have_room_to_append(file, data.len() as u64).await?;
        let mut again = Again::within(self.deadline());
        loop {
            let _turn = file.turn.lock().await;
            if let Some(n) = self.append_quietly_if_asked(file, data).await? {
                return Ok(n);
            }
            match self.append_in_turn(file, data).await? {
                Ok(n) => return Ok(n),
                Err(seat) => {
                    // Should this daemon die now, the next one cannot know what came of it.
                    self.note_place(file.ino, Placed::sent_on());
                    match self.append_at_seat(file.ino, seat, data).await {
                        Ok(()) => return Ok(data.len() as u32),
                        Err(e) => self.seat_again(&mut again, e).await?,
                    }
                    self.note_place(file.ino, ByteRange::at(0, 0));
                }
            }
        }
    }

    /// The number of bytes, or the node at which the file sits.
    async fn append_in_turn(
        &self,
        file: &Arc<CachedFile>,
        data: &[u8],
    ) -> Result<Result<u32, NodeId>, Errno> {
        self.settle_append(file).await?;
        self.note_appending(file)?;
        let since = {
            let mut state = file.state.write();
            let since = state.view.heard_version();
            state.append_unheard = Some(since);
            since
        };
        let now = Time::now();
        let mut changing = self.changing(&[], &[file.ino]);
        let wish = changing.wish_for(&file.state.read().model);
        let done = self.append_under_pair(file, data.len() as u64, now, wish).await;
        changing.heard(&done);
        let done = done.inspect_err(|_| self.append_unheard(file, since))?;
        if let Some(seat) = done.seat {
            file.state.write().append_unheard = None;
            return Ok(Err(seat));
        }
        let start = done.size.checked_sub(data.len() as u64).ok_or(Errno::EPROTO)?;
        let range = checked_range(start, data.len() as u64)?;
        let cache = file.cache_to_write(&self.cache)?;
        if ebb_meta_client::caller().is_some_and(|c| c.again) {
            // The daemon that asked first may have gone on after the answer: published anew.
            {
                let mut state = file.state.write();
                all_of(file.put(&self.cache, &cache, &mut state, data, start))?;
                state.view.write(range);
                state.mtime = Some(now);
                state.append_unheard = None;
            }
            self.attach(file, range, false, false).await?;
            self.list_dirty(file);
            return Ok(Ok(data.len() as u32));
        }
        let stored = {
            let mut state = file.state.write();
            // The range is this node's by now: where the bytes do not fit it is zeros.
            let stored = all_of(file.put(&self.cache, &cache, &mut state, data, start));
            let stored = stored.or_else(|e| {
                state.sums.forget(range);
                zeros_instead(&cache, range).and(Err(e))
            });
            state.view.write(range);
            let changes = state.view.appended(range, done.version, done.size);
            state.append_unheard = None;
            self.attr_published(&mut state, done.size, Some(now));
            changing.told(done.told);
            changing.end();
            state.alone.changed(done.version, done.others);
            self.note_appended(file, &state, range, done.version, done.size);
            self.note_changes(file, &changes);
            stored
        };
        self.write_notes()?;
        self.note_stored(file, range);
        self.list_dirty(file);
        self.copy(file, &[range]).await?;
        stored?;
        self.note_taken();
        self.metrics.bytes_written.fetch_add(range.len(), Relaxed);
        Ok(Ok(data.len() as u32))
    }

    /// Asks for the right to append without asking each time, where that may pay. All that was
    /// written quietly is told afterwards, when this append is not. The caller has the turn.
    async fn append_quietly_if_asked(
        &self,
        file: &Arc<CachedFile>,
        data: &[u8],
    ) -> Result<Option<u32>, Errno> {
        let again = ebb_meta_client::caller().is_some_and(|c| c.again);
        let asks = !again && self.may_ask_to_write_quietly(&file.state.read());
        if asks {
            self.ask_to_write_quietly(file).await?;
            match self.write_quietly(file, Place::End, data) {
                Ok(Some(stored)) => {
                    if let Written::Done(n) = self.written(file, stored) {
                        return Ok(Some(n));
                    }
                }
                Ok(None) => {}
                Err(e) if e.is_full() => {}
                Err(e) => return Err(e),
            }
        }
        self.end_quiet_in_turn(file).await?;
        Ok(None)
    }

    /// Where the file system of the cache has little left, blocks for an append are taken before
    /// the service is asked: afterwards the file is longer, whether they fit or not.
    async fn have_room_to_append(&self, file: &Arc<CachedFile>, len: u64) -> Result<(), Errno> {
        while self.is_disk_short() {
            let taken = file.cache(&self.cache).and_then(|cache| {
                let end = file.state.read().view.size();
                cache::reserve(&cache, checked_range(end, len)?).map_err(Errno::from)
            });
            match taken {
                Err(e) if e.is_full() => self.make_room(Need::Disk).await?,
                other => return other,
            }
        }
        Ok(())
    }

    /// Reads into `buffer` if every byte is here and nobody need be asked; the number of bytes.
    pub fn read_local(
        &self,
        handle: &OpenFile,
        offset: u64,
        buffer: &mut [u8],
    ) -> Result<Option<usize>, Errno> {
        if let Some(n) = self.read_passed(&handle.file, offset, buffer)? {
            return Ok(Some(n));
        }
        if handle.file.is_failing() {
            return Ok(None);
        }
        let range = ByteRange::at(offset, buffer.len() as u64);
        let state = handle.file.state.read();
        if state.model.on(SyncEvent::Read).query.is_some() && !self.map_is_leased(&state) {
            return Ok(None);
        }
        let mut filled = 0;
        for piece in state.view.plan_read(range) {
            let at = (piece.range.start() - offset) as usize;
            let part = &mut buffer[at..at + piece.range.len() as usize];
            if is_unknown(&piece) {
                return Ok(None);
            }
            match piece.source {
                Source::Zero => part.fill(0),
                Source::Local => {
                    let cache = handle.file.cache(&self.cache)?;
                    read_padded(&cache, part, piece.range.start())?;
                }
                Source::Peer { .. } | Source::Backing | Source::Unknown => return Ok(None),
            }
            filled = at + piece.range.len() as usize;
        }
        drop(state);
        self.note_used(&handle.file, ByteRange::at(offset, filled as u64));
        self.metrics.bytes_read.fetch_add(filled as u64, Relaxed);
        if handle.read_ahead.lock().has_begun() {
            self.read_ahead(handle, ByteRange::at(offset, filled as u64));
        }
        Ok(Some(filled))
    }

    /// Reads, asking and fetching as needed.
    pub async fn read(&self, handle: &OpenFile, offset: u64, size: usize) -> Result<Bytes, Errno> {
        if handle.file.state.read().passing.is_some() {
            let mut passed = vec![0; size];
            if let Some(n) = self.read_passed(&handle.file, offset, &mut passed)? {
                passed.truncate(n);
                return Ok(passed.into());
            }
        }
        self.wait_for_the_disk(&handle.file).await?;
        let range = ByteRange::at(offset, size as u64);
        self.event(&handle.file, SyncEvent::Read, range, false).await?;
        let end = handle.file.state.read().view.size();
        self.read_ahead(handle, range.intersect(ByteRange::new(0, end)));
        let bytes = self.gather(&handle.file, range).await?;
        self.metrics.bytes_read.fetch_add(bytes.len() as u64, Relaxed);
        Ok(bytes)
    }

    /// Copies bytes between two open files, as `copy_file_range` does.
    pub async fn copy_range(
        &self,
        from: &OpenFile,
        offset_from: u64,
        to: &OpenFile,
        offset_to: u64,
        len: u64,
    ) -> Result<u32, Errno> {
        const STEP: u64 = 1 << 20;
        // The reply's count has 32 bits; the caller goes on where this ends.
        let len = len.min(1 << 30);
        let mut done = 0;
        while done < len {
            let want = (len - done).min(STEP) as usize;
            let bytes = self.read(from, offset_from + done, want).await?;
            if bytes.is_empty() {
                break;
            }
            let written = self.write_local(to, offset_to + done, false, false, &bytes)?;
            let n = self.finish_written(to, written, true).await?;
            done += u64::from(n);
        }
        Ok(done as u32)
    }
}

/// An error when not all was written.
fn all_of((_, stopped): (usize, Option<std::io::Error>)) -> Result<(), Errno> {
    stopped.map_or(Ok(()), |e| Err(Errno::from(e)))
}

/// A hole, which needs no room.
pub(super) fn zeros_instead(cache: &std::fs::File, range: ByteRange) -> Result<(), Errno> {
    cache::punch(cache, range)?;
    if cache.metadata()?.len() < range.end() {
        cache.set_len(range.end())?;
    }
    Ok(())
}
