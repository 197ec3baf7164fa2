//! The daemon as the flusher sees it: which files are dirty, and the right to write them.

use crate::file::{CachedFile, State};
use crate::node::{Fate, Node};
use crate::ops::sync::is_gone;
use crate::pauses::Pauses;
use ebb_flusher::{DirtyFile, Fate as Ending, FileUse, FlushError, FlushSource, Grant, Want};
use ebb_meta_client::{Backing, CallError, FlushGrant, MetaClient};
use ebb_types::{ByteRange, Errno, Ino, Version, split_by};
use futures_util::future::join_all;
use std::fs::File;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Ranges of one grant: bounds the size of the request for badly fragmented files.
const RANGES_MAX: usize = 8192;

/// When it is asked first, and most rarely, whether a file without a name is still open elsewhere.
const ASK_FIRST: Duration = Duration::from_secs(1);
const ASK_MOST: Duration = Duration::from_secs(10);

/// What the flusher holds of the daemon.
pub struct NodeSource(pub Weak<Node>);

impl NodeSource {
    fn node(&self) -> Result<Arc<Node>, FlushError> {
        self.0.upgrade().ok_or_else(|| service("flush", Errno::ECANCELED))
    }
}

fn explained(operation: &'static str, e: &CallError) -> FlushError {
    FlushError::Service { operation, errno: e.errno, text: e.to_string() }
}

fn service(operation: &'static str, errno: Errno) -> FlushError {
    FlushError::Service { operation, errno, text: errno.to_string() }
}

/// What was written is not what is there, or may not be.
fn failing() -> FlushError {
    let text = "the disk of the cache failed; the file is looked through";
    FlushError::Service { operation: "cache", errno: Errno::EIO, text: text.to_owned() }
}

impl FlushSource for NodeSource {
    fn dirty_files(&self) -> Vec<DirtyFile> {
        self.0.upgrade().map_or_else(Vec::new, |node| node.dirty_files())
    }

    /// The flusher asks at least once a second. Heartbeats tell the service the last answer: counting waits for
    /// files that are being written to a disk that may hang, for which they must not wait.
    fn dirty_bytes(&self) -> u64 {
        let Some(node) = self.0.upgrade() else { return 0 };
        let bytes = node.unflushed_bytes();
        node.meta.set_dirty_bytes(bytes);
        bytes
    }

    fn capacity(&self) -> u64 {
        self.0.upgrade().map_or(0, |node| node.capacity())
    }

    fn label(&self, ino: Ino) -> String {
        let file = self.0.upgrade().and_then(|node| node.file(ino));
        file.map_or_else(|| ino.to_string(), |f| f.label())
    }

    fn begin(&self, wants: &[Want]) -> Vec<Result<Option<Grant>, FlushError>> {
        let node = match self.node() {
            Ok(node) => node,
            Err(e) => return wants.iter().map(|_| Err(e.clone())).collect(),
        };
        let begin = |w: &Want| node.begin_flush(w.ino, w.from, w.most_bytes);
        node.runtime.block_on(join_all(wants.iter().map(begin)))
    }

    fn end(&self, grants: Vec<(Grant, Ending)>) -> Vec<Result<(), FlushError>> {
        let node = match self.node() {
            Ok(node) => node,
            Err(e) => return grants.iter().map(|_| Err(e.clone())).collect(),
        };
        let end = |(grant, fate)| node.end_flush(grant, fate);
        node.runtime.block_on(join_all(grants.into_iter().map(end)))
    }
}

impl Node {
    /// Files with bytes that are not on the backing.
    #[must_use]
    pub fn dirty_files(&self) -> Vec<DirtyFile> {
        let mut found = Vec::new();
        for file in self.listed_dirty() {
            let state = file.state.read();
            let tracked = state.passing.as_ref().is_some_and(|p| p.track.is_some());
            // How much was written past the daemon is known when it is looked for.
            let shows = u64::from(tracked && self.shows_unseen(&file, &state));
            let unseen = self.unseen_bytes(&file, &state);
            let bytes = (state.view.unflushed_bytes() + unseen).max(shows);
            if bytes == 0 {
                drop(state);
                self.unlist_if_clean(&file);
                continue;
            }
            let in_use = match state.opens {
                _ if state.held => FileUse::Coupled,
                0 => FileUse::Closed,
                _ if tracked => FileUse::Untracked,
                _ => FileUse::Open,
            };
            found.push(DirtyFile { ino: file.ino, bytes, in_use });
        }
        found.sort_by_key(|f| f.ino);
        found
    }

    /// How many bytes are not on the backing.
    fn unflushed_bytes(&self) -> u64 {
        self.listed_dirty().iter().map(|file| file.state.read().view.unflushed_bytes()).sum()
    }

    async fn begin_flush(
        &self,
        ino: Ino,
        from: u64,
        most: u64,
    ) -> Result<Option<Grant>, FlushError> {
        let Some(file) = self.file(ino) else { return Ok(None) };
        if file.hear_now(&self.cache).is_err() {
            return Err(failing());
        }
        match self.publish(&file).await {
            Ok(()) => {}
            // Unlinked and nobody's any more: it never touches the backing.
            Err(e) if is_gone(e) => return self.unlinked(&file, e).await.map(|()| None),
            Err(e) => return Err(service("attach", e)),
        }
        let (wanted, next) = pick(&file, from, most);
        if wanted.is_empty() {
            return Ok(None);
        }
        let granted_in = self.meta.grants();
        let answer = self.patient_meta().flush_begin(ino, &wanted).await;
        note_granted(&file, &wanted, answer.as_ref().ok());
        let granted = match answer {
            Ok(granted) => granted,
            Err(e) if is_gone(e.errno) => {
                return self.unlinked(&file, e.errno).await.map(|()| None);
            }
            Err(e) => return Err(explained("flush_begin", &e)),
        };
        let cache = match self.ready_to_flush(&file, &wanted, &granted).await {
            Ok(cache) => cache,
            Err(e) => {
                self.give_grant_back(&file, &granted).await;
                return Err(e);
            }
        };
        let backing = granted.backing.unwrap_or(Backing { path: Vec::new(), ino: 0 });
        if !granted.ranges.is_empty() {
            self.note_flushing(&file, &backing.path, backing.ino);
            self.keep_flushed(&file, &backing).await;
        }
        Ok(Some(Grant {
            ino,
            id: granted.grant,
            ranges: granted.ranges.iter().map(|o| (o.range, o.version)).collect(),
            next,
            shape: granted.shape,
            cache,
            guard: Some(Arc::new(Guard {
                node: self.me_arc(),
                file: Arc::clone(&file),
                meta: self.meta.clone(),
                granted_in,
            })),
            backing_path: backing.path,
            backing_ino: backing.ino,
            owner: granted.owner,
            label: file.label(),
        }))
    }

    /// What is granted is known to be this node's, and can be read.
    async fn ready_to_flush(
        &self,
        file: &Arc<CachedFile>,
        wanted: &[ByteRange],
        granted: &FlushGrant,
    ) -> Result<Arc<File>, FlushError> {
        let asked: u64 = wanted.iter().map(|r| r.len()).sum();
        if granted.ranges.iter().map(|o| o.range.len()).sum::<u64>() < asked {
            // Some of them are another node's by now, or flushed already: learn which.
            self.query_anew(file, ByteRange::ALL).await.map_err(|e| service("query", e))?;
            self.complete(file).await.map_err(|e| service("fetch", e))?;
        }
        file.cache(&self.cache).map_err(|e| service("open cache", e))
    }

    /// A grant that is not used: as long as it is out nobody else can flush or cut these bytes.
    async fn give_grant_back(&self, file: &CachedFile, granted: &FlushGrant) {
        let ranges: Vec<ByteRange> = granted.ranges.iter().map(|o| o.range).collect();
        if granted.grant != 0 {
            let ended = self.patient_meta().flush_end(file.ino, granted.grant, false, false).await;
            if let Err(e) = ended {
                tracing::debug!(ino = %file.ino, error = %e.errno, "a grant was not given back");
            }
        }
        file.state.write().quiet.end_flush(&ranges);
    }

    async fn end_flush(&self, grant: Grant, fate: Ending) -> Result<(), FlushError> {
        // Number 0 stands for a grant of nothing.
        if grant.id == 0 {
            return Ok(());
        }
        let (done, shaped) = match fate {
            Ending::Done { shaped } => (true, shaped),
            Ending::GivenBack => (false, false),
        };
        // What was read before the kernel knows of no error was right.
        let failed = done && !self.is_heard_well_of(grant.ino).await;
        let done = done && !failed;
        let ended = self.patient_meta().flush_end(grant.ino, grant.id, done, shaped).await;
        let file = self.file(grant.ino);
        if let Some(file) = &file
            && (!done || ended.is_ok())
        {
            let ranges: Vec<ByteRange> = grant.ranges.iter().map(|(r, _)| *r).collect();
            file.state.write().quiet.end_flush(&ranges);
        }
        if let Some(file) = file.as_ref().filter(|_| !grant.ranges.is_empty()) {
            file.state.write().home.changed();
        }
        match ended {
            Ok(ended) if done => {
                if let Some(file) = file {
                    let at = (&grant.backing_path[..], grant.backing_ino);
                    let ranges = without(&grant.ranges, &ended.again);
                    let how = (ended.published, ended.waits);
                    self.note_flushed(&file, &ranges, at, how).await;
                    if ended.waits {
                        // The close can have come while this was on its way, and have left it to us.
                        self.replace_when_closed(&file).await;
                    }
                    self.unlist_if_clean(&file);
                }
                Ok(())
            }
            Ok(_) if failed => Err(failing()),
            Ok(_) => Ok(()),
            // Unlinked under the flush: there is nothing to be safe any more. (ESTALE is not that:
            // the grant ended with the service's life or with our lease, and the bytes still count
            // as dirty, so they have to be flushed again.)
            Err(e) if e.errno == Errno::ENOENT => Ok(()),
            Err(e) if e.errno == Errno::ESTALE => {
                Err(FlushError::LostGrant { text: e.to_string() })
            }
            Err(e) => Err(explained("flush_end", &e)),
        }
    }

    /// True when the kernel knows of no error of the cache file.
    async fn is_heard_well_of(&self, ino: Ino) -> bool {
        let (Some(node), Some(file)) = (self.me_arc(), self.file(ino)) else { return true };
        let hear = move || file.hear(&node.cache).is_ok();
        tokio::task::spawn_blocking(hear).await.unwrap_or(false)
    }

    /// The service says that there is no such file. If it proves that the file has no name left, its
    /// bytes live on for those who have it open, here or elsewhere. Else they stay as they are, and so does
    /// what tells of them: a service that has lost its state says the same.
    pub(crate) async fn unlinked(
        &self,
        file: &CachedFile,
        answer: Errno,
    ) -> Result<(), FlushError> {
        let fate = self.fate(file.ino).await.map_err(|e| service("is it deleted", e))?;
        if fate == Fate::Kept {
            let text = "the metadata service does not know this file and has not deleted it: its bytes \
                        stay in the cache (ebb umount --no-drain, ebb recover)";
            let errno = Errno::ESTALE;
            return Err(FlushError::Service { operation: "attach", errno, text: text.to_owned() });
        }
        tracing::debug!(ino = %file.ino, error = %answer, ?fate, "not flushed");
        self.note_nameless(file.ino, self.file(file.ino));
        if fate == Fate::Deleted && file.state.read().opens == 0 {
            self.discard(file.ino);
        } else {
            self.make_orphan(file.ino, &mut file.state.write());
        }
        self.unlist(file);
        Ok(())
    }

    /// Its bytes stay, but not for a name.
    pub(crate) fn make_orphan(&self, ino: Ino, state: &mut State) {
        if !std::mem::replace(&mut state.orphan, true) {
            self.discard_when_unused(ino);
        }
    }

    /// Nobody tells when the last node closes such a file; it is asked for.
    fn discard_when_unused(&self, ino: Ino) {
        let Some(me) = self.me_arc() else { return };
        let node = Arc::downgrade(&me);
        self.runtime.spawn(async move {
            let mut pauses = Pauses::between(ASK_FIRST, ASK_MOST);
            loop {
                pauses.pause().await;
                let Some(node) = node.upgrade() else { return };
                if node.file(ino).is_none() {
                    return;
                }
                node.discard_if_unlinked(ino).await;
            }
        });
    }
}

/// Knows what was written into a cache file, and whether the grant to flush it holds.
struct Guard {
    node: Option<Arc<Node>>,
    file: Arc<CachedFile>,
    meta: MetaClient,
    /// See [`MetaClient::grants`].
    granted_in: Option<u64>,
}

impl ebb_flusher::Guard for Guard {
    fn is_right(&self, bytes: &[u8], offset: u64) -> bool {
        self.node.as_ref().is_none_or(|node| self.file.is_right(&node.cache, bytes, offset))
    }

    fn is_unreadable(&self) {
        if let Some(node) = &self.node {
            self.file.is_unreadable(&node.cache);
        }
    }

    fn may_write(&self) -> bool {
        self.granted_in.is_some() && self.meta.grants() == self.granted_in
    }
}

/// What was flushed, but for bytes that became newer meanwhile.
fn without(flushed: &[(ByteRange, Version)], newer: &[ByteRange]) -> Vec<(ByteRange, Version)> {
    let rest = |(range, version): &(ByteRange, Version)| {
        let version = *version;
        split_by(&[*range], newer).0.into_iter().map(move |r| (r, version))
    };
    flushed.iter().flat_map(rest).collect()
}

/// What was picked is flushed only as far as it was granted.
fn note_granted(file: &CachedFile, wanted: &[ByteRange], granted: Option<&FlushGrant>) {
    let quiet = &mut file.state.write().quiet;
    let granted = granted.map_or(&[][..], |g| &g.ranges);
    quiet.begin_flush(&granted.iter().map(|o| o.range).collect::<Vec<_>>());
    quiet.end_flush(wanted);
}

/// The first dirty ranges from `from` on, at most `most` bytes of them, and where to go on. From now
/// on they count as being flushed.
fn pick(file: &CachedFile, from: u64, most: u64) -> (Vec<ByteRange>, Option<u64>) {
    let mut state = file.state.write();
    let picked = pick_from(&state, from, most);
    state.quiet.begin_flush(&picked.0);
    picked
}

fn pick_from(state: &State, from: u64, most: u64) -> (Vec<ByteRange>, Option<u64>) {
    let mut picked: Vec<ByteRange> = Vec::new();
    let mut bytes = 0;
    for (range, _) in state.view.unflushed(ByteRange::from(from)) {
        if bytes >= most || picked.len() >= RANGES_MAX {
            return (picked, Some(range.start()));
        }
        let take = ByteRange::at(range.start(), range.len().min(most - bytes));
        bytes += take.len();
        match picked.last_mut() {
            Some(last) if last.end() == take.start() => {
                *last = ByteRange::new(last.start(), take.end());
            }
            _ => picked.push(take),
        }
        if take.end() < range.end() {
            return (picked, Some(take.end()));
        }
    }
    (picked, None)
}
