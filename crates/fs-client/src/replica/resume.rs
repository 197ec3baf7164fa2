//! An adoption that ended with its daemon: the service may have made bytes of a lost node this
//! node's, and the copies are all there is of them here.
//!
//! Which bytes the service was asked for is in the log of the set, and this node's journal had none
//! of them as published when it was asked ([`super::adopt`]). So what the service shows as this
//! node's by now, and what the journal does not hold, is what the copies say. What the journal
//! does hold was written here since, or stored before the daemon died.

use crate::journal::{Header, Held, Kept, Note};
use crate::node::Node;
use crate::restore;
use ebb_consistency::MapAnswer;
use ebb_types::{ByteRange, Errno, Ino, Version};

impl Node {
    /// Puts such bytes into the cache file, and into the note that the file is restored from.
    pub(crate) async fn resume_adoption(
        &self,
        ino: Ino,
        path: &[u8],
        note: &mut Option<Note>,
        answer: &MapAnswer,
    ) -> Result<(), Errno> {
        for (set, asked) in self.replicas.held.adopting(ino) {
            let ours = mine(note.as_ref(), &asked, answer, self);
            let ranges: Vec<ByteRange> = ours.iter().map(|(range, _)| *range).collect();
            if ranges.is_empty() {
                continue;
            }
            let Some(copies) = self.replicas.held.open(set, ino, &ranges) else { continue };
            restore::copy(&copies, &self.cache.file(ino)?, &ranges)?;
            tracing::info!(%ino, owner = %set.owner, ?ranges, "adopted by an earlier daemon");
            let note = match note {
                Some(note) => note,
                None => note.insert(Note::new(self.introduced(ino, path).await?)),
            };
            let held = |v| Held { kept: Kept::Owned(v), durable: false };
            let more = ours.into_iter().map(|(range, version)| (range, held(version)));
            note.set_held(note.held().chain(more).collect::<Vec<_>>());
        }
        Ok(())
    }

    async fn introduced(&self, ino: Ino, path: &[u8]) -> Result<Header, Errno> {
        let attr = self.meta.getattr(ino).await?;
        Ok(Header {
            path: path.to_vec(),
            perm: attr.perm,
            uid: attr.uid,
            gid: attr.gid,
            atime: attr.atime,
            mtime: attr.mtime,
            size: attr.size,
            home: None,
            under: None,
            shared: true,
        })
    }
}

/// The parts of `asked` that are this node's, unflushed, and that the journal does not hold.
fn mine(
    note: Option<&Note>,
    asked: &[ByteRange],
    answer: &MapAnswer,
    node: &Node,
) -> Vec<(ByteRange, Version)> {
    let owned = answer.ranges.iter().filter(|o| o.node == node.me && !o.flushed);
    let mut out = Vec::new();
    for owned in owned {
        for range in asked.iter().map(|r| r.intersect(owned.range)).filter(|r| !r.is_empty()) {
            let missing = note.map_or_else(|| vec![range], |note| note.not_held(range));
            out.extend(missing.into_iter().map(|part| (part, owned.version)));
        }
    }
    out
}
