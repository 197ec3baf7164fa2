//! What this node need not ask of its files' bytes: leases, where they meet the model, the service
//! and the mount. (Names and attributes: [`crate::known`].) The rules are in [`ebb_consistency::lease`]; when a lease is of use, the model's
//! row says.
//!
//! A recall takes the lease away under the file's state lock and is answered at once: whoever
//! looked at the state before it has begun before the change is acknowledged to anybody.
//!
//! An answer of the service that tells a size may have been given before this node published bytes,
//! and be heard after that: then neither it nor what is unpublished here knows of them
//! ([`Publications`]).

use crate::file::{CachedFile, State};
use crate::node::Node;
use ebb_consistency::{Asked, Grant, LeaseSeq, SyncEvent};
use ebb_types::{Attr, ByteRange, Errno, Ino, Time};
use std::sync::atomic::{AtomicU64, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed};

/// Counters of leases.
#[derive(Debug, Default)]
pub struct LeaseCounts {
    /// Leases granted.
    pub granted: AtomicU64,
    /// Leases called back.
    pub recalled: AtomicU64,
    /// Questions that a lease answered.
    pub answered: AtomicU64,
    /// Writes that were not told at once.
    pub quiet: AtomicU64,
    /// How often such writes were told.
    pub told: AtomicU64,
    /// Opens with which a file came to sit here.
    pub seats: AtomicU64,
    /// What was done at other nodes, because files sit there.
    pub at_seats: AtomicU64,
    /// What this node published.
    pub(crate) publications: Publications,
}

/// Counts publications of this node, of all files.
#[derive(Debug, Default)]
pub struct Publications {
    count: AtomicU64,
    /// The last one of a file that is forgotten here by now.
    of_forgotten: AtomicU64,
}

impl Publications {
    /// What the count is before a question: what has a greater number may be missing in its answer.
    pub(crate) fn so_far(&self) -> u64 {
        self.count.load(Acquire)
    }

    /// One more, for [`State::published`]. Under the lock of that state, before the bytes count as
    /// published.
    fn next(&self) -> u64 {
        self.count.fetch_add(1, AcqRel) + 1
    }

    /// A file is not known here any more.
    pub(crate) fn forgotten(&self, last: Published) {
        self.of_forgotten.fetch_max(last.number, AcqRel);
    }
}

/// This node's last publication of a file.
#[derive(Clone, Copy, Debug, Default)]
pub struct Published {
    /// Its number, of [`Publications`].
    number: u64,
    /// When what it published was written.
    mtime: Option<Time>,
}

impl Published {
    /// True when this node has published something of the file.
    pub(crate) fn is_some(&self) -> bool {
        self.number > 0
    }
}

impl Node {
    /// What this node sees as the attributes of an inode whose published ones are `attr`: so the
    /// service answered a question that was asked when there had been `asked` publications.
    pub(crate) async fn seen(&self, asked: u64, attr: Attr) -> Result<Attr, Errno> {
        if let Some(file) = self.file(attr.ino) {
            let attr = if self.tell_if_owed(&file).await? {
                self.meta.getattr(attr.ino).await?
            } else {
                attr
            };
            return Ok(self.seen_with(&file, &file.state.read(), asked, attr));
        }
        if self.leases.publications.of_forgotten.load(Acquire) <= asked {
            return Ok(attr);
        }
        // It may have been published, flushed and forgotten meanwhile.
        self.meta.getattr(attr.ino).await
    }

    /// Published attributes together with what is written here and not published yet, or was published
    /// after they were asked for. (The state after the own publication is one that the service had
    /// meanwhile: asking again would be no better, and could go on for ever beside a busy writer.)
    pub(crate) fn seen_with(
        &self,
        file: &CachedFile,
        state: &State,
        asked: u64,
        mut attr: Attr,
    ) -> Attr {
        let newer = Some(state.published).filter(|p| p.number > asked);
        let asks = state.model.on(SyncEvent::Stat).query.is_some();
        attr.size = match newer {
            None if state.opens == 0 || asks => attr.size.max(state.view.unattached_end()),
            _ => state.view.size(),
        };
        self.seen_past(file, state, &mut attr);
        let written = state.mtime.into_iter().chain(newer.and_then(|p| p.mtime)).max();
        if let Some(written) = written {
            attr.mtime = attr.mtime.max(written);
            attr.ctime = attr.ctime.max(written);
        }
        attr
    }

    /// For a request about the map of a file, if a lease of it is of use.
    pub(crate) fn ticket(&self, state: &State) -> Option<Asked> {
        if state.model.wants_leases() { self.asking() } else { None }
    }

    /// Takes the grant of a file's map in. A recall finds the file here, whoever just asks about it.
    pub(crate) fn take_grant(&self, state: &mut State, asked: Option<Asked>, grant: Option<Grant>) {
        let (Some(asked), Some(grant)) = (asked, grant) else { return };
        if state.model.wants_leases() && state.lease.granted(grant, asked.epoch()) {
            self.leases.granted.fetch_add(1, Relaxed);
        }
    }

    fn hit(&self, leased: bool) -> bool {
        if leased {
            self.leases.answered.fetch_add(1, Relaxed);
        }
        leased
    }

    /// True when the map that this node knows needs no question.
    pub(crate) fn map_is_leased(&self, state: &State) -> bool {
        // First what needs no clock: most files of most models have none.
        if state.seat().is_some() {
            return true;
        }
        let some = state.lease.is_some();
        self.hit(some && state.lease.covers_map(self.meta.trust(), state.view.known_version()))
    }

    /// True when one more open of a file that is open here needs no question.
    pub(crate) fn open_is_leased(&self, state: &State) -> bool {
        if state.seat().is_some() {
            return true;
        }
        let some = state.lease.is_some();
        self.hit(some && state.lease.covers_open(self.meta.trust(), state.view.known_version()))
    }

    /// Who owns these bytes? Asked only when no lease says that nothing has changed.
    pub(crate) async fn ask(&self, file: &CachedFile, range: ByteRange) -> Result<(), Errno> {
        let leased = self.map_is_leased(&file.state.read());
        if leased { Ok(()) } else { self.query(file, range).await }
    }

    /// This node has published bytes: what it knows of the attributes is what the service has now.
    pub(crate) fn attr_published(&self, state: &mut State, size: u64, mtime: Option<Time>) {
        state.published = Published {
            number: self.leases.publications.next(),
            mtime: mtime.or(state.published.mtime),
        };
        if let Some(attr) = &mut state.attr {
            attr.size = size;
            attr.mtime = attr.mtime.max(mtime.unwrap_or(attr.mtime));
            attr.ctime = if mtime.is_some() { attr.ctime.max(attr.mtime) } else { attr.ctime };
        }
    }

    /// The service calls leases of an inode back. True when they can be returned at once.
    pub(crate) fn recalled(&self, ino: Ino, seq: LeaseSeq) -> bool {
        self.leases.recalled.fetch_add(1, Relaxed);
        self.known.recall(ino, seq);
        if !self.has_begun() {
            self.return_once_begun(ino, seq);
            return false;
        }
        let shows = self.has_pages(ino);
        let Some(file) = self.file(ino) else {
            if shows {
                self.return_without_pages(self.meta.connection(), ino, seq);
            }
            return !shows;
        };
        let tells = {
            let mut state = file.state.write();
            state.lease.recall(seq);
            state.quiet.recall(seq);
            state.quiet.has_untold()
        };
        match (tells, shows) {
            (true, _) => self.return_once_told(file, seq),
            (false, true) => self.return_without_pages(self.meta.connection(), ino, seq),
            (false, false) => {}
        }
        !tells && !shows
    }

    /// A file is forgotten here: its lease is of no use.
    pub(crate) fn return_lease(&self, file: &CachedFile) {
        if let Some(seq) = file.state.write().lease.give_up() {
            // The attributes are known under the same one.
            self.known.give_up(file.ino, seq);
            self.nobody_tells_of(file.ino);
            self.meta.return_lease(file.ino, seq);
        }
    }

    /// How many leases of maps this node holds, and how many names and attributes it knows.
    #[must_use]
    pub fn leases_held(&self) -> usize {
        let trust = self.meta.trust();
        let files = self.all_files();
        self.known.len() + files.iter().filter(|f| f.state.read().lease.holds(trust)).count()
    }
}
