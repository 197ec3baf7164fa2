//! Telling a service that lost the end of its journal what this node knows: of each file that it
//! has, from the view ([`ebb_consistency::FileView::assertion`]); of what a daemon before this one left,
//! from the node journal; and what is locked here.
//!
//! Consistency: most requests of every node wait at the service until this node has told, or a
//! lease is over.
//! Retries: what fails is told anew, after a while and with the next connection. An
//! answer that a call is still taking in when its file is told is told once more when requests go on.

use crate::file::CachedFile;
use crate::node::Node;
use ebb_consistency::{Assertion, Claimed};
use ebb_meta_client::{KnownFile, Located, SeatWish};
use ebb_node_journal::{Found, Held, Kept, Note};
use ebb_types::facts::Moment;
use ebb_types::{ByteRange, Errno, Ino, Version};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Files asked for in one request.
const FILES: usize = 1 << 12;

/// Before it is tried again to tell.
const PAUSE: Duration = Duration::from_secs(1);

/// So long is waited, before all is told, for who is at work at a file.
const TURNS: Duration = Duration::from_secs(2);

/// Ranges in one request.
const CLAIMS: usize = 1 << 15;

impl Node {
    /// Tells whenever a session begins whose service asks for it.
    pub(crate) async fn keep_reasserting(node: Weak<Node>) {
        let Some(mut owed) = node.upgrade().map(|node| node.meta.owes_words()) else { return };
        let mut owes = *owed.borrow_and_update() > 0;
        loop {
            let Some(here) = node.upgrade() else { return };
            if std::mem::take(&mut owes)
                && let Err(e) = here.reassert_all().await
            {
                tracing::warn!(error = %e, "what the service forgot is not told yet");
                owes = true;
            }
            drop(here);
            let again = tokio::time::sleep(PAUSE);
            tokio::select! {
                () = again, if owes => {}
                changed = owed.changed() => match changed {
                    Ok(()) => owes = true,
                    Err(_) => return,
                },
            }
        }
    }

    async fn reassert_all(&self) -> Result<(), Errno> {
        let to = self.meta.listener();
        if self.meta.is_rebuilt() {
            let files = self.all_files();
            self.meta.locate(to, files.iter().filter_map(located).collect()).await?;
        }
        let after = self.meta.names_after();
        let heard = self.journal.get().map(|j| (j.heard_after(after), j.settled()));
        let (heard, settled) = heard.unwrap_or_default();
        self.meta.reassert_names(to, heard, settled).await?;
        let (mut told, mut late, mut unknown) = (0_u64, Vec::new(), Vec::new());
        for files in self.all_files().chunks(FILES) {
            let asks: Vec<KnownFile> = files.iter().map(known).collect();
            let forgotten = self.meta.forgotten_of(&asks).await?;
            for (ino, after) in forgotten.news {
                let Some(file) = self.file(ino) else { continue };
                told += 1;
                // Who has the turn may be waiting for the service.
                let turn = file.turn.try_lock();
                self.reassert(&file, after, turn.is_ok()).await?;
                if turn.is_err() {
                    late.push(Arc::clone(&file));
                }
            }
            unknown.extend(forgotten.unknown);
        }
        // Who keeps a turn for longer may be waiting for this.
        let busy = self.tell_quiet_within(TURNS).await;
        let coupled = self.counted.all();
        for ino in self.meta.reasserted(to, Some(self.locks_now()), Some(&coupled)).await? {
            self.file(ino).iter().for_each(|file| self.lose_locks_of(file));
        }
        for file in busy {
            let _turn = file.turn.lock().await;
            self.end_quiet_in_turn(&file).await?;
        }
        self.metrics.reasserted.fetch_add(told, Relaxed);
        for ino in unknown {
            if let Some(file) = self.file(ino) {
                self.find_by_name(&file).await;
                late.push(file);
            }
        }
        for file in late {
            let _turn = file.turn.lock().await;
            let forgotten = self.meta.forgotten_of(&[known(&file)]).await?;
            for (_, after) in forgotten.news {
                self.reassert(&file, after, true).await?;
            }
        }
        if told > 0 {
            tracing::info!(files = told, "told the service what it may have forgotten");
        }
        Ok(())
    }

    /// `complete`: nobody is being given a place in the file.
    async fn reassert(
        &self,
        file: &CachedFile,
        after: Version,
        complete: bool,
    ) -> Result<(), Errno> {
        let mut at = 0;
        while at < ByteRange::ALL.end() {
            let (part, mtime) = {
                let state = file.state.read();
                let mtime = state.attr.as_ref().map(|attr| attr.mtime);
                let rest = ByteRange::from(at);
                (state.view.assertion(rest, after, CLAIMS, complete), mtime)
            };
            at = part.covers.end();
            if self.meta.reassert(file.ino, &part, mtime).await? {
                tracing::warn!(file = file.label(), "what was flushed is flushed again");
                self.unforgotten.not_flushed(file.ino);
                file.state.write().view.not_flushed(part.covers);
                if let Some(file) = self.file(file.ino) {
                    self.list_dirty(&file);
                }
            }
        }
        Ok(())
    }

    /// A file that the service found on the backing in the time that it lost is found again by its name.
    async fn find_by_name(&self, file: &CachedFile) {
        let path = file.state.read().path.clone();
        let mut at = Ino::ROOT;
        for name in path.split(|b| *b == b'/').filter(|name| !name.is_empty()) {
            let Ok(name) = ebb_types::Name::new(name) else { return };
            let Ok(attr) = self.meta.lookup(at, &name).await else { return };
            at = attr.ino;
        }
    }

    /// What a daemon before this one had heard of names, and had published, as far as the service may
    /// have forgotten it.
    pub(crate) async fn reassert_noted(&self, found: &Found) -> Result<(), Errno> {
        let after = self.meta.names_after();
        if after < Moment::MAX {
            let to = self.meta.listener();
            let book = &found.image.book;
            self.meta.reassert_names(to, book.facts_after(after), book.settled()).await?;
        }
        let noted: Vec<(Ino, &Note)> = found.image.files().collect();
        for notes in noted.chunks(FILES) {
            let asks: Vec<KnownFile> = notes
                .iter()
                .map(|(ino, note)| KnownFile {
                    ino: *ino,
                    newest: published(note).map(|(_, v, _)| v).max().unwrap_or_default(),
                    owns: false,
                    open: false,
                    // Nobody writes there any more.
                    seat: None,
                })
                .collect();
            for (ino, after) in self.meta.forgotten_of(&asks).await?.news {
                let Some(note) = found.image.file(ino) else { continue };
                let claims = published(note)
                    .filter(|(_, version, held)| {
                        *version > after && (held.durable || !found.rebooted) && !held.damaged
                    })
                    .map(|(range, version, _)| (range, Claimed::Own(version, false)));
                let mut all = claims.collect::<Vec<_>>();
                while !all.is_empty() {
                    let rest = all.split_off(all.len().min(CLAIMS));
                    let nothing = (0, Version::ZERO);
                    let (size, base_len) = (nothing, nothing);
                    let part = Assertion {
                        size,
                        base_len,
                        covers: ByteRange::ALL,
                        claims: all,
                        complete: false,
                    };
                    self.meta.reassert(ino, &part, Some(note.header.mtime)).await?;
                    all = rest;
                }
            }
        }
        Ok(())
    }
}

fn known(file: &Arc<CachedFile>) -> KnownFile {
    let state = file.state.read();
    KnownFile {
        ino: file.ino,
        newest: state.view.newest_known(),
        owns: state.view.may_own(),
        open: state.opens > 0,
        seat: state.seat().map(|seat| SeatWish { id: seat.id, asked: seat.asked }),
    }
}

fn located(file: &Arc<CachedFile>) -> Option<Located> {
    let state = file.state.read();
    let unflushed = state.view.unflushed_bytes() > 0 || state.view.has_unattached();
    let needed = unflushed || state.opens > 0;
    let as_of = state.view.newest_known();
    let nowhere = Located { ino: file.ino, paths: Vec::new(), object: 0, needed, as_of };
    // Others may have brought it to the backing since, and moved it: needed all the same.
    let Some(home) = state.home.home() else { return needed.then_some(nowhere) };
    let mut paths = vec![home.path.clone()];
    if home.is_part() && !state.path.is_empty() {
        paths.push(state.path.clone());
    }
    Some(Located { paths, object: home.ino, ..nowhere })
}

fn published(note: &Note) -> impl Iterator<Item = (ByteRange, Version, Held)> + '_ {
    note.held().filter_map(|(range, held)| match held.kept {
        Kept::Owned(version) | Kept::Again(version) => Some((range, version, held)),
        Kept::Attaching | Kept::Written => None,
    })
}
