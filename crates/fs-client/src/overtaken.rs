//! Taking over a cache, beside a claim of blocks: another node wrote into the same blocks past its
//! daemon and claimed them whole, zeros included. Bytes of ours there, synced and never published,
//! were overtaken by a guess. What is there now decides: where that is zero nobody else wrote, and
//! ours come back; where it is not, somebody did, and ours are kept aside. Where nobody can say what
//! is there, because its node is gone, ours come back: a program that follows its model cannot
//! have written there on two nodes.

use crate::file::CachedFile;
use crate::node::Node;
use crate::ops::fetch::split;
use crate::passing::written_runs;
use crate::restore::Verdict;
use ebb_consistency::claim::changed_runs;
use ebb_consistency::{FileView, MapAnswer, Piece, Source};
use ebb_node_journal::Held;
use ebb_transport::ReadRequest;
use ebb_types::{ByteRange, Errno, Ino, NodeId, split_by};
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

/// A node that does not answer so long is not asked again while a cache is taken over.
const PATIENCE: Duration = Duration::from_secs(5);

/// Bytes with what becomes of them, and how the journal has them.
pub(crate) type Judged = Vec<(ByteRange, Verdict, Option<Held>)>;

/// Nodes that do not answer.
pub(crate) type Silent = HashSet<NodeId>;

/// Looks again at what would be kept aside: the zeros of our own guesses are dropped, and what only
/// the `guessed` claims of others overtook is dirty where there is nothing now.
pub(crate) async fn look_again(
    node: &Arc<Node>,
    ino: Ino,
    judged: Judged,
    answer: &MapAnswer,
    guessed: &[ByteRange],
    silent: &mut Silent,
) -> Result<Judged, Errno> {
    if !judged.iter().any(|(_, v, _)| *v == Verdict::Aside) {
        return Ok(judged);
    }
    let there = There { node, ino, answer, file: bystander(node, ino, answer) };
    let mut out = Vec::with_capacity(judged.len());
    for (range, verdict, held) in judged {
        if verdict != Verdict::Aside {
            out.push((range, verdict, held));
            continue;
        }
        let written = match held.is_some_and(|h| h.guessed) {
            true => written_runs(&node.cache.file(ino)?, &[range])?,
            false => vec![range],
        };
        let held = held.map(|h| Held { guessed: false, ..h });
        for range in written {
            let (certain, doubtful) = split_by(&[range], guessed);
            let mut parts: Vec<_> = certain.into_iter().map(|r| (r, Verdict::Aside)).collect();
            for range in doubtful {
                let taken = there.taken(range, silent).await?;
                let (free, taken) = split_by(&[range], &taken);
                parts.extend(free.into_iter().map(|r| (r, Verdict::Dirty)));
                parts.extend(taken.into_iter().map(|r| (r, Verdict::Aside)));
            }
            parts.sort_unstable_by_key(|(r, _)| *r);
            out.extend(parts.into_iter().map(|(r, v)| (r, v, held)));
        }
    }
    there.leave().await;
    Ok(out)
}

/// The file as it is for a node that has nothing of it.
fn bystander(node: &Node, ino: Ino, answer: &MapAnswer) -> Arc<CachedFile> {
    let file = CachedFile::new(ino, NodeId::NOBODY, Arc::clone(node.rules.job()));
    let mut view = FileView::new(NodeId::NOBODY);
    view.apply(answer);
    file.state.write().view = view;
    Arc::new(file)
}

/// What the others have.
struct There<'a> {
    node: &'a Arc<Node>,
    ino: Ino,
    answer: &'a MapAnswer,
    file: Arc<CachedFile>,
}

impl There<'_> {
    /// The parts of `range` that are not zero now, as far as can be found out.
    async fn taken(&self, range: ByteRange, silent: &mut Silent) -> Result<Vec<ByteRange>, Errno> {
        let plan = self.file.state.read().view.plan_read(range.intersect(self.content()));
        let mut taken = Vec::new();
        for piece in plan.into_iter().flat_map(split) {
            match self.bytes(piece, silent).await {
                Ok(Some(bytes)) => taken.extend(changed_runs(piece.range.start(), &bytes, &[])),
                Ok(None) => {}
                Err(e) => {
                    let (ino, range) = (self.ino, piece.range);
                    tracing::warn!(%ino, %range, error = %e, "claimed by a node that cannot be asked: synced bytes of this one come back there");
                }
            }
        }
        Ok(taken)
    }

    fn content(&self) -> ByteRange {
        ByteRange::new(0, self.answer.size)
    }

    /// `None`: zeros.
    async fn bytes(&self, piece: Piece, silent: &mut Silent) -> Result<Option<Vec<u8>>, Errno> {
        let owner = match piece.source {
            Source::Zero | Source::Local => return Ok(None),
            Source::Backing => {
                let read = self.node.fetch_from_backing(&self.file, piece.range);
                return read.await.map(Some);
            }
            Source::Peer { node, .. } => node,
            // Nothing is required of this view.
            Source::Unknown => return Err(Errno::EIO),
        };
        if silent.contains(&owner) {
            return Err(Errno::EHOSTUNREACH);
        }
        let asked = tokio::time::timeout(PATIENCE, self.ask(owner, piece.range)).await;
        let answer = asked.unwrap_or(Err(Errno::ETIMEDOUT));
        if answer.is_err() {
            silent.insert(owner);
        }
        answer.map(Some)
    }

    async fn ask(&self, owner: NodeId, range: ByteRange) -> Result<Vec<u8>, Errno> {
        let address = self.node.address_of(owner).await?.ok_or(Errno::EHOSTUNREACH)?;
        let request = ReadRequest::of_owner(self.ino, vec![range]);
        match self.node.peers.read(&address, &request).await {
            Ok(bytes) if bytes.len() as u64 == range.len() => Ok(bytes.to_vec()),
            Ok(_) => Err(Errno::EPROTO),
            Err(e) => {
                self.node.addresses.lock().remove(&owner);
                tracing::debug!(ino = %self.ino, node = %owner, error = %e, "does not tell what it claimed");
                Err(Errno::EHOSTUNREACH)
            }
        }
    }

    /// The service counts whoever reads the backing as having the file open.
    async fn leave(&self) {
        let is_open = self.file.state.read().backing.is_some();
        if is_open && let Err(e) = self.node.meta.release(self.ino, false).await {
            tracing::debug!(ino = %self.ino, error = %e, "not released");
        }
    }
}
