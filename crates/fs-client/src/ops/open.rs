//! Opening, creating and releasing files. The service knows which nodes have a file open, so that
//! one that loses its last name lives on while somebody uses it.

use crate::counted::MAKING;
use crate::file::{CachedFile, State};
use crate::handles::OpenFile;
use crate::home::Look;
use crate::node::Node;
use crate::notes::home_of;
use crate::ops::coupling::{self, NotOpened, counted};
use crate::ops::names::MakeArgs;
use crate::ops::passing::Asked;
use crate::ops::sync::is_gone;
use crate::passing::{Door, Opening};
use crate::pauses::Pauses;
use crate::read_ahead::ReadAhead;
use ebb_backend::{BackendError, BackingFile, Identity};
use ebb_consistency::{IoPath, MapAnswer, SyncEvent};
use ebb_locks::Mutex;
use ebb_meta_client::{Backing, Made, MakeRequest, OpenAnswer, Opened, Wish};
use ebb_node_journal::Home;
use ebb_types::{Access, Attr, ByteRange, Errno, Ino, Name};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::AcqRel;
use std::time::{Duration, Instant};

/// An open starts over when the backing file changed hands under it: between the moment when a file
/// gets its name there and the one when the service says so, its directory is synced, which can
/// take its time. It pauses longer and longer up to this.
const PAUSE_MS_MAX: u64 = 100;

/// When a close could not publish, the next attempts are after pauses from the first to the second.
const PUBLISH_AGAIN: Duration = Duration::from_millis(100);
const PUBLISH_AGAIN_MOST: Duration = Duration::from_secs(2);

/// Starting over, for as long as a request may take.
pub(crate) struct Again {
    until: Instant,
    pause_ms: u64,
}

impl Again {
    pub(crate) fn within(deadline: Duration) -> Again {
        Again { until: Instant::now() + deadline, pause_ms: 1 }
    }

    /// ESTALE when that is over.
    pub(crate) async fn pause(&mut self) -> Result<(), Errno> {
        if Instant::now() >= self.until {
            return Err(Errno::ESTALE);
        }
        tokio::time::sleep(Duration::from_millis(self.pause_ms)).await;
        self.pause_ms = (self.pause_ms * 2).min(PAUSE_MS_MAX);
        Ok(())
    }
}

/// A backing file, its inode number there, and its state when it was opened just now.
type OpenedBacking = (u64, Arc<dyn BackingFile>, Option<Identity>);

/// Notes where the file is on the backing, and in which state.
fn note_home(state: &mut State, at: Option<&Backing>, opened: Option<&OpenedBacking>, look: Look) {
    let found = match (at, opened) {
        (None, _) => None,
        (Some(at), Some((.., Some(identity)))) => Some(home_of(&at.path, identity)),
        (Some(at), _) => match state.home.home() {
            Some(known) if known.ino == at.ino && known.path == at.path => return,
            _ => Some(Home { path: at.path.clone(), ino: at.ino, seen: None, changing: false }),
        },
    };
    state.home.found(look, found);
}

impl Node {
    pub(crate) fn enter_handle(&self, file: Arc<CachedFile>, path: IoPath, asked: &Asked) -> u64 {
        let access = asked.access;
        let read_ahead = Mutex::new(ReadAhead::default());
        let mappable = (access == Access::ReadWrite).then(|| Arc::clone(&file.mappable));
        self.handles.insert_file(OpenFile {
            fh: 0,
            file,
            path,
            access: Some(access),
            mappable,
            read_ahead,
            couple: asked.couple,
            closed_well: AtomicBool::new(false),
            killed: AtomicBool::new(false),
            told: AtomicBool::new(false),
        })
    }

    /// Opens a file for user `uid`, and waits for it where it is coupled and not ready.
    pub async fn open(
        &self,
        ino: Ino,
        flags: i32,
        uid: u32,
        door: &dyn Door,
    ) -> Result<Opening, Errno> {
        match self.open_if_ready(ino, flags, uid, door).await {
            Ok(opening) => Ok(opening),
            Err(NotOpened::Failed(e)) => Err(e),
            Err(NotOpened::Awaits(wait)) => {
                let again = || self.open_if_ready(ino, flags, uid, door);
                coupling::when_ready(self, ino, flags, wait, again).await
            }
        }
    }

    /// The same without waiting for who writes it.
    pub async fn open_if_ready(
        &self,
        ino: Ino,
        flags: i32,
        uid: u32,
        door: &dyn Door,
    ) -> Result<Opening, NotOpened> {
        let mut couple = 0;
        let opened = self.open_counted(ino, flags, uid, door, &mut couple).await;
        if opened.is_err() {
            coupling::not_entered(self, ino, couple).await;
        }
        opened
    }

    /// `couple`: the number under which the service has counted it.
    async fn open_counted(
        &self,
        ino: Ino,
        flags: i32,
        uid: u32,
        door: &dyn Door,
        couple: &mut u64,
    ) -> Result<Opening, NotOpened> {
        let mut truncate = flags & libc::O_TRUNC != 0;
        let write = flags & libc::O_ACCMODE != libc::O_RDONLY;
        let file = self.file_or_new(ino, self.rules.job());
        let _turn = file.turn.lock().await;
        // A second open that the model does not make a synchronisation event is local.
        if !truncate && self.join_open(&file) {
            let asked = Asked::new(flags, false, file.state.read().attr.as_ref());
            return Ok(self.entered(&file, asked, door).await?);
        }
        let _touching = truncate.then(|| self.note_touching(&file));
        // What is written past the daemon must be this node's before others' bytes are shown.
        self.publish_unseen(&file).await?;
        match truncate {
            true => self.end_quiet_in_turn(&file).await?,
            false => drop(self.tell_owed_in_turn(&file).await?),
        }
        let mut again = Again::within(self.deadline());
        let access = Asked::access_of(flags);
        let seat = self.seat_wish(Some(&file.state.read()), access, truncate, door);
        loop {
            let known = file.state.read().view.known_version();
            let mut changing = truncate.then(|| self.changing(&[], &[ino]));
            let ticket = changing.as_ref().map_or_else(|| self.asking(), |c| c.asked());
            let wish = self.wish(ticket, Some(ino));
            // Whoever truncates it makes it, also when that is done elsewhere by now.
            let how = (write || flags & libc::O_TRUNC != 0, truncate);
            let handle = counted();
            self.counted.begins(ino, handle, how.0);
            let answer = self.meta.open_counted(ino, how, known, wish, seat, handle).await;
            let answer = match answer {
                Ok(OpenAnswer::Opened(opened)) => Ok(*opened),
                Ok(OpenAnswer::Awaits(wait)) => {
                    self.counted.is_nothing(handle);
                    return Err(NotOpened::Awaits(wait));
                }
                Err(e) => Err(e),
            };
            if let Some(changing) = &mut changing {
                changing.heard(&answer);
            }
            let opened = match answer {
                Ok(opened) => opened,
                Err(e) => {
                    self.forget(ino);
                    match is_doubtful(e) {
                        true => *couple = handle,
                        false => self.counted.is_nothing(handle),
                    }
                    return Err(e.into());
                }
            };
            *couple = if opened.coupled { handle } else { 0 };
            self.counted.is_told(ino, handle, opened.coupled);
            if let Some(node) = opened.seat {
                match self.cut_at_seat(ino, node, 0).await {
                    Ok(()) => truncate = false,
                    Err(e) => self.seat_again(&mut again, e).await?,
                }
                continue;
            }
            let privileged = opened.attr.perm & 0o6000 != 0;
            let asked = Asked::new(flags, opened.sole, Some(&opened.attr));
            let asked = Asked { couple: *couple, ..asked.seated(seat, opened.seated) };
            match changing {
                Some(mut changing) => changing.told(opened.told()),
                None => self.known.learn(ticket, opened.told()),
            }
            if self.take_opened(&file, opened, truncate, ticket).await? {
                // The kernel leaves it to us when O_TRUNC comes with the open.
                if flags & libc::O_TRUNC != 0 && privileged && uid != 0 {
                    self.kill_priv(ino).await?;
                }
                return Ok(self.entered(&file, asked, door).await?);
            }
            again.pause().await?;
        }
    }

    /// The rest of an open that the service and this node have counted.
    async fn entered(
        &self,
        file: &Arc<CachedFile>,
        asked: Asked,
        door: &dyn Door,
    ) -> Result<Opening, Errno> {
        let complete = self.complete(file).await;
        let mut entered = complete.and_then(|()| self.enter(file, asked, door));
        if asked.seat.is_some() {
            let ready = match self.give_seat_back(file, &asked).await {
                // A daemon that comes after this one must know.
                Ok(()) => self.write_notes(),
                failed => failed,
            };
            if let (Err(e), Ok(opening)) = (ready, &entered) {
                self.handles.remove_file(opening.fh);
                entered = Err(e);
            }
        }
        if entered.is_err() {
            self.closed(file).await;
        }
        entered
    }

    fn join_open(&self, file: &CachedFile) -> bool {
        let mut state = file.state.write();
        let asks = state.model.on(SyncEvent::Open).query.is_some();
        // Whether it is ready is known by the service.
        if !state.registered || state.coupled || (asks && !self.open_is_leased(&state)) {
            return false;
        }
        state.opens += 1;
        drop(state);
        file.set_in_use(true);
        true
    }

    /// Takes the service's answer in. False when the backing file is not the one that was meant
    /// (it was replaced since): ask again.
    pub(crate) async fn take_opened(
        &self,
        file: &Arc<CachedFile>,
        opened: Opened,
        truncated: bool,
        ticket: Option<ebb_consistency::Asked>,
    ) -> Result<bool, Errno> {
        let look = file.state.read().home.look();
        let backing = match &opened.backing {
            Some(at) if opened.map.map.base_len > 0 => match self.open_backing(file, at).await? {
                Some(backing) => Some(backing),
                None => return Ok(false),
            },
            _ => None,
        };
        let mut stable = Ok(());
        if truncated {
            file.state.write().path.clone_from(&opened.place.path);
            stable = self.cut_is_stable(file, 0, opened.map.map.version).await;
            self.apply_cut(file, 0, &opened.map);
        } else {
            self.learn(file, &opened.map);
        }
        let rest = self.require_opened(file, &opened.map.map);
        self.note_opened(file, opened, backing, look, ticket);
        if truncated {
            // Where it is on the backing was not known when the cut was noted.
            self.note_header(file, &file.state.read());
        }
        if rest && stable.is_ok() {
            stable = self.query(file, ByteRange::ALL).await;
        }
        if let Err(e) = stable {
            self.closed(file).await;
            return Err(e);
        }
        Ok(true)
    }

    /// From here on reads see what the open was answered of, or newer. Where the answer ends before the file
    /// does they ask for the rest; true: the kernel reads by itself, and it must be asked for now.
    pub(crate) fn require_opened(&self, file: &CachedFile, answer: &MapAnswer) -> bool {
        let mut state = file.state.write();
        state.view.require(answer.version);
        answer.rest_of(ByteRange::ALL).is_some() && state.passing.is_some()
    }

    fn note_opened(
        &self,
        file: &CachedFile,
        opened: Opened,
        backing: Option<OpenedBacking>,
        look: Look,
        ticket: Option<ebb_consistency::Asked>,
    ) {
        let mut state = file.state.write();
        state.attr = Some(opened.attr);
        (state.coupled, state.held) = (opened.coupled, opened.held);
        note_home(&mut state, opened.backing.as_ref(), backing.as_ref(), look);
        let part = state.home.home().is_some_and(Home::is_part);
        // What is not told yet may be another's.
        let rest = opened.map.map.rest_of(ByteRange::ALL).is_some();
        let shared = rest || state.view.is_shared();
        state.alone.opened(opened.sole, shared, part, &opened.map.map);
        self.note_alone(file, &state);
        let replaced = backing.and_then(|(ino, b, _)| state.backing.replace((ino, b)));
        self.close_aside(replaced);
        if state.opens == 0 {
            state.model = self.rules.of(&opened.place.path, &opened.place.model);
        }
        self.take_grant(&mut state, ticket, opened.map.lease);
        if !opened.place.path.is_empty() {
            state.path = opened.place.path;
        }
        if state.opens == 0 {
            self.note_header(file, &state);
        }
        state.opens += 1;
        state.registered = true;
        drop(state);
        file.set_in_use(true);
    }

    /// The backing file that unowned bytes come from. It can have come into being after this node
    /// opened the file: then the service is asked where it is.
    pub(crate) async fn backing_of(
        &self,
        file: &Arc<CachedFile>,
    ) -> Result<Arc<dyn BackingFile>, Errno> {
        let mut again = Again::within(self.deadline());
        loop {
            if let Some((_, backing)) = file.state.read().backing.clone() {
                return Ok(backing);
            }
            let known = file.state.read().view.known_version();
            let opened = self.meta.open(file.ino, false, false, known, Wish::No).await?;
            let at = opened.backing.ok_or(Errno::EIO)?;
            match self.open_backing(file, &at).await? {
                Some((ino, backing, _)) => file.state.write().backing = Some((ino, backing)),
                None => again.pause().await?,
            }
        }
    }

    /// Opens the backing file, unless the open one is still the right one. `None`: the path leads
    /// to another file by now.
    pub(crate) async fn open_backing(
        &self,
        file: &CachedFile,
        at: &Backing,
    ) -> Result<Option<OpenedBacking>, Errno> {
        let current = file.state.read().backing.clone();
        if let Some((ino, current)) = current
            && ino == at.ino
        {
            return Ok(Some((ino, current, None)));
        }
        let backing = Arc::clone(&self.backing);
        let (path, ino) = (at.path.clone(), at.ino);
        let open = self.on_backing(move || {
            let file = backing.open_read(&path, ino)?;
            let identity = file.identity()?;
            Ok((file, identity))
        });
        match open.await {
            Err(e) => Err(e),
            Ok(Ok((opened, identity))) => Ok(Some((at.ino, opened, Some(identity)))),
            Ok(Err(BackendError::Moved { .. })) => Ok(None),
            Ok(Err(e)) => {
                tracing::warn!(path = %String::from_utf8_lossy(&at.path), error = %e, "backing");
                Err(e.errno())
            }
        }
    }

    /// Lets go of what is open on the backing. Closing waits for a backing that hangs, and nobody
    /// else must.
    pub(crate) fn close_aside(&self, backing: Option<(u64, Arc<dyn BackingFile>)>) {
        if backing.is_some() {
            let closing = self.when_there_is_a_place(move || drop(backing));
            self.runtime.spawn(closing);
        }
    }

    /// Makes a file and opens it in one step.
    pub async fn create(
        &self,
        parent: Ino,
        name: &Name,
        args: MakeArgs,
        flags: i32,
        door: &dyn Door,
    ) -> Result<(Attr, Opening), Errno> {
        let uid = args.uid;
        let seat = self.seat_wish(None, Asked::access_of(flags), true, door);
        let _making = match seat {
            Some(_) => Some(self.making_seat().await),
            None => None,
        };
        let mut changing = self.changing(&[(parent, name)], &[]);
        let request = args.request(parent, name, true, changing.wish())?;
        let handle = counted();
        self.counted.begins(MAKING, handle, true);
        let made = self.meta.make(&MakeRequest { seat, handle, ..request }).await;
        changing.heard(&made);
        let ticket = changing.asked();
        if let Ok(Made::Opened(_, new)) = &made {
            changing.told(new.told.iter().cloned());
        }
        changing.end();
        match self.in_dirs(&[parent], made).await {
            Ok(Made::Made(..)) => Err(Errno::EPROTO),
            Ok(Made::Opened(opened, _)) => {
                let attr = opened.attr;
                let file = self.file_or_new(attr.ino, self.rules.job());
                let _turn = file.turn.lock().await;
                let asked = Asked::new(flags, opened.sole, Some(&attr)).made();
                let couple = if opened.coupled { handle } else { 0 };
                self.counted.is_told(attr.ino, handle, opened.coupled);
                let asked = Asked { couple, ..asked.seated(seat, opened.seated) };
                let entered = match self.take_opened(&file, opened, false, ticket).await {
                    Ok(_) => self.entered(&file, asked, door).await,
                    Err(e) => Err(e),
                };
                if entered.is_err() {
                    coupling::not_entered(self, attr.ino, couple).await;
                }
                Ok((attr, entered?))
            }
            // Another node was faster; without O_EXCL that is an open.
            Err(Errno::EEXIST) if flags & libc::O_EXCL == 0 => {
                self.counted.is_nothing(handle);
                let attr = self.lookup(parent, name).await?;
                let opening = match self.open_if_ready(attr.ino, flags, uid, door).await {
                    Ok(opening) => opening,
                    Err(NotOpened::Failed(e)) => return Err(e),
                    // While it makes a name the kernel lets nobody else make one. It looks again, and opens it.
                    Err(NotOpened::Awaits(_)) => return Err(Errno::ESTALE),
                };
                Ok((self.getattr(attr.ino).await?, opening))
            }
            Err(e) => {
                // One that may have been made all the same is given up with the node, or told of again.
                if !is_doubtful(e) {
                    self.counted.is_nothing(handle);
                }
                Err(e)
            }
        }
    }

    /// The last descriptor of a handle is gone.
    pub async fn release(&self, handle: &OpenFile) {
        self.release_locks_of(handle).await;
        self.leave(handle).await;
        coupling::left_coupled(self, handle).await;
    }

    /// One handle less. The caller has the turn.
    pub(crate) async fn closed(&self, file: &Arc<CachedFile>) {
        let (last, registered, owes) = {
            let mut state = file.state.write();
            state.opens -= 1;
            let last = state.opens == 0;
            if last {
                self.stop_passing(file, &mut state);
            }
            let owes = last && state.registered && closes_publish(&state);
            (last, last && !owes && std::mem::take(&mut state.registered), owes)
        };
        if last {
            file.set_in_use(false);
            self.let_go(file.ino);
            if let Some(node) = self.me_arc() {
                node.settle_if_many(file).await;
            }
        }
        let settles = last && self.close_quiet_in_turn(file).await;
        // What is settled is told with the release.
        if owes && !settles {
            return self.release_when_published(file);
        }
        if registered || owes && std::mem::take(&mut file.state.write().registered) {
            self.released(file, settles).await;
        }
    }

    /// The close should have published what was written, and failed: as long as this is so, the node counts
    /// as one that has the file open, and whoever locks the file waits for what was written here. Else it would
    /// come later, over what others have written since.
    fn release_when_published(&self, file: &Arc<CachedFile>) {
        let Some(me) = self.me_arc() else { return };
        let (node, file) = (Arc::downgrade(&me), Arc::clone(file));
        self.runtime.spawn(async move {
            let mut pauses = Pauses::between(PUBLISH_AGAIN, PUBLISH_AGAIN_MOST);
            loop {
                pauses.pause().await;
                let Some(node) = node.upgrade() else { return };
                let published = node.publish(&file).await;
                let _turn = file.turn.lock().await;
                let registered = {
                    let mut state = file.state.write();
                    // Nobody can read it any more.
                    let gone = matches!(published, Err(e) if is_gone(e));
                    let owes = published.is_err() && !gone && closes_publish(&state);
                    match state.opens == 0 && state.registered {
                        // The next close sees to it.
                        false => return,
                        true => !owes && std::mem::take(&mut state.registered),
                    }
                };
                if registered {
                    return node.released(&file, false).await;
                }
                tracing::debug!(file = file.label(), ?published, "still not published");
            }
        });
    }

    /// Nobody here has the file open, and the service is told so. The caller has the turn.
    async fn released(&self, file: &Arc<CachedFile>, settles: bool) {
        let released = self.meta.release(file.ino, settles).await;
        if settles {
            let heard = matches!(released, Ok(()) | Err(Errno::ENOENT));
            self.quiet_given_up(file, heard);
        }
        match released {
            // It had no name left and this was the last who used it.
            Err(Errno::ENOENT) => return self.discard_if_deleted(file.ino).await,
            Err(e) => tracing::warn!(ino = %file.ino, error = %e, "release not reported"),
            Ok(()) => {
                let backing = file.state.write().backing.take();
                self.close_aside(backing);
                self.replace_when_closed(file).await;
            }
        }
        // It can have lost its name since the service was told of the release.
        if file.forgotten.swap(false, AcqRel) {
            self.discard_if_unlinked(file.ino).await;
        }
    }
}

/// The request may have been done all the same.
fn is_doubtful(e: Errno) -> bool {
    matches!(e, Errno::ETIMEDOUT | Errno::EIO)
}

/// Something is not published that a close publishes.
fn closes_publish(state: &State) -> bool {
    !state.orphan
        && state.view.has_unattached()
        && state.model.on(SyncEvent::Close).attach.is_some()
}
