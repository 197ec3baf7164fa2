//! Bytes that are not here: fetched once, from their owner or from the backing, kept as clean.

use crate::cache::read_padded;
use crate::file::{CachedFile, Fetch, FetchTicket};
use crate::handles::OpenFile;
use crate::node::Node;
use crate::read_ahead::PIECE_BYTES;
use crate::replica::Instead;
use bytes::Bytes;
use ebb_consistency::{Piece, Source};
use ebb_transport::{ReadError, ReadRequest};
use ebb_types::{ByteRange, Errno, NodeId, Version};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// How often a reader asks again at least when an owner says that the bytes are not there (any
/// more); and as long as a request may take: they may be on their way there from a lost node.
const ATTEMPTS_MIN: u32 = 12;

/// How often a reader looks up where its bytes are, while the file is opened again and again here.
const LOOK_UPS_MAX: u32 = 64;

/// Largest piece that is fetched at once.
const FETCH_BYTES_MAX: u64 = 4 << 20;

/// What one round over a range found.
enum Round {
    Complete(Bytes),
    /// Something changed under way: plan again.
    Again,
    /// The service must be asked about these bytes first.
    Unknown(ByteRange),
}

/// True when nothing is known about these bytes: the service must be asked first.
pub(crate) fn is_unknown(piece: &Piece) -> bool {
    piece.source != Source::Local && piece.as_of == Version::ZERO
}

/// The part of a plan about which the service must be asked first.
pub(crate) fn unknown_of(plan: &[Piece]) -> Option<ByteRange> {
    let mut unknown = plan.iter().filter(|piece| is_unknown(piece)).map(|piece| piece.range);
    let first = unknown.next()?;
    Some(ByteRange::new(first.start(), unknown.next_back().unwrap_or(first).end()))
}

/// The whole of `range`, when nothing of it is here and it is had from one place.
fn absent_as_one(file: &CachedFile, range: ByteRange) -> Option<Piece> {
    let plan = file.state.read().view.plan_read(range);
    let [piece] = plan[..] else { return None };
    let elsewhere = matches!(piece.source, Source::Peer { .. } | Source::Backing);
    (elsewhere && !is_unknown(&piece)).then_some(piece)
}

impl Node {
    /// The bytes of `range` as this node sees them, up to the end of the file.
    pub(crate) async fn gather(
        &self,
        file: &Arc<CachedFile>,
        range: ByteRange,
    ) -> Result<Bytes, Errno> {
        let end = Instant::now() + self.deadline();
        for attempt in 0.. {
            match self.gather_once(file, range).await? {
                Round::Complete(bytes) => return Ok(bytes),
                Round::Unknown(_) if attempt >= LOOK_UPS_MAX => break,
                Round::Unknown(part) => self.look_up(file, part).await?,
                Round::Again if attempt >= ATTEMPTS_MIN && Instant::now() >= end => break,
                Round::Again => {
                    tokio::time::sleep(Duration::from_millis(1 << attempt.min(8))).await;
                    self.query_anew(file, range).await?;
                }
            }
        }
        let pieces = self.local_part(file, range)?.1;
        tracing::warn!(ino = %file.ino, %range, ?pieces, "the owner of these bytes has them not");
        Err(Errno::EIO)
    }

    async fn gather_once(&self, file: &Arc<CachedFile>, range: ByteRange) -> Result<Round, Errno> {
        if let Some(piece) = absent_as_one(file, range) {
            let got = self.obtain(file, piece).await?;
            return Ok(got.map_or(Round::Again, Round::Complete));
        }
        let (mut bytes, missing) = self.local_part(file, range)?;
        self.note_used(file, ByteRange::at(range.start(), bytes.len() as u64));
        if let Some(unknown) = unknown_of(&missing) {
            return Ok(Round::Unknown(unknown));
        }
        for piece in missing {
            let got = match self.obtain(file, piece).await? {
                Some(got) => got,
                None => return Ok(Round::Again),
            };
            let at = (piece.range.start() - range.start()) as usize;
            bytes[at..at + got.len()].copy_from_slice(&got);
        }
        Ok(Round::Complete(bytes.into()))
    }

    /// What is here already, and the pieces that are not. One consistent look: the state is not
    /// let go between the plan and the copy.
    fn local_part(
        &self,
        file: &CachedFile,
        range: ByteRange,
    ) -> Result<(Vec<u8>, Vec<Piece>), Errno> {
        let state = file.state.read();
        let plan = state.view.plan_read(range);
        let end = plan.last().map_or(range.start(), |p| p.range.end());
        let mut bytes = vec![0; (end - range.start()) as usize];
        let mut missing = Vec::new();
        for piece in plan {
            let at = (piece.range.start() - range.start()) as usize;
            match piece.source {
                _ if is_unknown(&piece) => missing.push(piece),
                Source::Zero => {}
                Source::Local => {
                    let part = &mut bytes[at..at + piece.range.len() as usize];
                    read_padded(&*file.cache(&self.cache)?, part, piece.range.start())?;
                }
                Source::Peer { .. } | Source::Backing | Source::Unknown => missing.push(piece),
            }
        }
        Ok((bytes, missing))
    }

    /// One missing piece: fetched here, or waited for when somebody does it already. `None`: it
    /// is not where it was said to be.
    pub(crate) async fn obtain(
        &self,
        file: &Arc<CachedFile>,
        piece: Piece,
    ) -> Result<Option<Bytes>, Errno> {
        loop {
            match file.fetch(piece.range) {
                Fetch::Mine(ticket) => return self.fetch_and_keep(file, piece, ticket).await,
                Fetch::Wait(mut done) => {
                    // An error means that the other one is done: its sender is gone.
                    while done.changed().await.is_ok() {}
                    let fetched = done.borrow().clone();
                    if let Some(got) = fetched.and_then(|f| f.part(piece.range, piece.as_of)) {
                        return Ok(Some(got));
                    }
                    let (bytes, missing) = self.local_part(file, piece.range)?;
                    if missing.is_empty() && bytes.len() as u64 == piece.range.len() {
                        return Ok(Some(bytes.into()));
                    }
                }
            }
        }
    }

    async fn fetch_and_keep(
        &self,
        file: &Arc<CachedFile>,
        piece: Piece,
        ticket: FetchTicket,
    ) -> Result<Option<Bytes>, Errno> {
        let got = match piece.source {
            Source::Peer { node, .. } => self.fetch_from_peer(file, node, piece.range).await?,
            Source::Backing => Some(self.fetch_from_backing(file, piece.range).await?.into()),
            Source::Local | Source::Zero | Source::Unknown => return Err(Errno::EIO),
        };
        // A buffer full of dirty bytes is for writers: readers do without a copy; not those of the
        // cache file itself.
        let must = file.state.read().passing.is_some();
        let Some(bytes) = got else { return Ok(None) };
        if must || !self.is_over_capacity() || self.make_room_to_keep().await {
            match file.keep(&self.cache, piece.range, piece.as_of, &bytes) {
                Ok(()) => self.note_stored(file, piece.range),
                // The reader has its bytes; only the copy for later is missing.
                Err(e) => tracing::debug!(ino = %file.ino, error = %e, "fetched bytes not kept"),
            }
        }
        ticket.finish(piece.as_of, &bytes);
        Ok(Some(bytes))
    }

    async fn fetch_from_peer(
        &self,
        file: &Arc<CachedFile>,
        owner: NodeId,
        range: ByteRange,
    ) -> Result<Option<Bytes>, Errno> {
        if owner == self.me {
            if !self.replicas.held.adopting(file.ino).is_empty() {
                // They are being stored just now.
                return Ok(None);
            }
            // What is known may be older than what this node has given back since.
            self.query_anew(file, range).await?;
            // Both at one moment: an append ends in between, and has its bytes then.
            let (plan, appends) = {
                let state = file.state.read();
                (state.view.plan_read(range), state.append_unheard.is_some())
            };
            let missing =
                |p: &Piece| matches!(p.source, Source::Peer { node, .. } if node == self.me);
            let Some(lost) = plan.into_iter().find(missing) else { return Ok(None) };
            if appends {
                // The place of an append that is under way, or of which is not known what came of it.
                if let Ok(_turn) = file.turn.try_lock() {
                    self.settle_append(file).await?;
                }
                return Ok(None);
            }
            // A program may ask for each of them, and again.
            if !file.said_lost.swap(true, Relaxed) {
                let path = file.label();
                tracing::error!(path, %range, ?lost, "bytes of this node are lost: reads get EIO");
            }
            return Err(Errno::EIO);
        }
        if self.is_down(owner) {
            match self.instead_of(file, owner, range, Duration::ZERO).await? {
                Instead::Bytes(bytes) => return Ok(Some(bytes.into())),
                Instead::Again => return Ok(None),
                // It may be back.
                Instead::Owner | Instead::Nothing => {}
            }
        }
        let Some(address) = self.address_of(owner).await? else {
            // It has left since the service was asked: by now its bytes are somebody else's.
            return Ok(None);
        };
        let request = ReadRequest::of_owner(file.ino, vec![range]);
        match self.peers.read(&address, &request).await {
            Ok(bytes) if bytes.len() as u64 == range.len() => {
                self.metrics.fetched_peer.fetch_add(range.len(), Relaxed);
                Ok(Some(bytes))
            }
            Ok(_) => Err(Errno::EPROTO),
            Err(ReadError::NotHere) => {
                // Another daemon may have got the port of one that is gone.
                self.addresses.lock().remove(&owner);
                Ok(None)
            }
            Err(e) if self.has_moved(owner, &address).await => {
                tracing::info!(node = %owner, error = %e, "the owner was mounted again elsewhere");
                Ok(None)
            }
            Err(e) => match self.instead_of(file, owner, range, self.deadline()).await? {
                Instead::Bytes(bytes) => Ok(Some(bytes.into())),
                Instead::Again => Ok(None),
                // One that hangs would be waited for again and again.
                Instead::Owner if e != ReadError::TimedOut => {
                    tracing::debug!(ino = %file.ino, %range, node = %owner, error = %e, "back");
                    Ok(None)
                }
                Instead::Owner | Instead::Nothing => {
                    tracing::warn!(ino = %file.ino, %range, node = %owner, error = %e, "peer read failed");
                    Err(Errno::EIO)
                }
            },
        }
    }

    /// Whether the service knows another address of this node by now: a daemon that takes over
    /// what a dead one left listens on a port of its own.
    async fn has_moved(&self, node: NodeId, known: &str) -> bool {
        self.addresses.lock().remove(&node);
        let address = self.address_of(node).await.ok().flatten();
        address.is_some_and(|address| address != known)
    }

    /// Unowned bytes from a node that has a copy of them; false when it has none that is good
    /// enough, or cannot be asked.
    pub(crate) async fn fetch_copy(
        &self,
        file: &Arc<CachedFile>,
        holder: NodeId,
        piece: Piece,
    ) -> Result<bool, Errno> {
        let Fetch::Mine(_ticket) = file.fetch(piece.range) else { return Ok(false) };
        let Ok(Some(address)) = self.address_of(holder).await else { return Ok(false) };
        let request = ReadRequest {
            ino: file.ino,
            copy_since: Some(piece.as_of),
            held: None,
            ranges: vec![piece.range],
        };
        let bytes = match self.peers.read(&address, &request).await {
            Ok(bytes) if bytes.len() as u64 == piece.range.len() => bytes,
            Ok(_) => return Err(Errno::EPROTO),
            Err(e) => {
                self.addresses.lock().remove(&holder);
                tracing::debug!(ino = %file.ino, node = %holder, error = %e, "no copy there");
                return Ok(false);
            }
        };
        self.metrics.fetched_peer.fetch_add(piece.range.len(), Relaxed);
        if !self.is_over_capacity() || self.make_room_to_keep().await {
            file.keep(&self.cache, piece.range, piece.as_of, &bytes)?;
            self.note_stored(file, piece.range);
        }
        Ok(true)
    }

    /// Where a node serves its bytes; `None`: it is none of this job (any more).
    pub(crate) async fn address_of(&self, node: NodeId) -> Result<Option<String>, Errno> {
        if let Some(address) = self.addresses.lock().get(&node) {
            return Ok(Some(address.clone()));
        }
        let nodes = self.meta.nodes(Some(node)).await?;
        let found = nodes.into_iter().find(|n| n.id == node.0).map(|n| n.peer_address);
        if let Some(address) = &found {
            self.addresses.lock().insert(node, address.clone());
        }
        Ok(found)
    }

    pub(crate) async fn fetch_from_backing(
        &self,
        file: &Arc<CachedFile>,
        range: ByteRange,
    ) -> Result<Vec<u8>, Errno> {
        let backing = self.backing_of(file).await?;
        let read = self.on_backing(move || {
            let mut bytes = vec![0; range.len() as usize];
            backing.read_full_at(&mut bytes, range.start()).map(|n| {
                // Shorter than the service said: what is cut off reads as zeros.
                bytes[n..].fill(0);
                bytes
            })
        });
        let bytes = match read.await {
            Ok(read) => read.map_err(|e| e.errno())?,
            Err(e) => {
                tracing::error!(ino = %file.ino, %range, "the backing does not answer");
                return Err(e);
            }
        };
        self.metrics.fetched_backing.fetch_add(range.len(), Relaxed);
        Ok(bytes)
    }

    /// Fetches what a sequential reader of `range` will want next; random readers do not pay for it.
    pub(crate) fn read_ahead(&self, handle: &OpenFile, range: ByteRange) {
        let Some(next) = handle.read_ahead.lock().after(range) else { return };
        let pieces = handle.file.state.read().view.plan_read(next);
        for piece in pieces.into_iter().flat_map(|piece| split_at(piece, PIECE_BYTES)) {
            if matches!(piece.source, Source::Peer { .. } | Source::Backing)
                && !is_unknown(&piece)
                && let Fetch::Mine(ticket) = handle.file.fetch(piece.range)
                && let Some(node) = self.me_arc()
            {
                let file = Arc::clone(&handle.file);
                self.runtime.spawn(async move {
                    if let Err(e) = node.fetch_and_keep(&file, piece, ticket).await {
                        tracing::debug!(ino = %file.ino, error = %e, "read-ahead failed");
                    }
                });
            }
        }
    }
}

pub(crate) fn split(piece: Piece) -> Vec<Piece> {
    split_at(piece, FETCH_BYTES_MAX)
}

fn split_at(piece: Piece, bytes_max: u64) -> Vec<Piece> {
    let mut parts = Vec::new();
    let mut start = piece.range.start();
    while start < piece.range.end() {
        let end = piece.range.end().min(start + bytes_max);
        parts.push(Piece { range: ByteRange::new(start, end), ..piece });
        start = end;
    }
    parts
}
