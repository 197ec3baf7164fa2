//! An adoption that ended with its daemon: the service may have made bytes of a lost node this
//! node's, and the copies are all there is of them here.
//!
//! Which bytes the service was asked for is in the log of the set, and this node's journal had none
//! of them as published when it was asked ([`super::adopt`]). So what the service shows as this
//! node's by now, and what the journal does not hold, is what the copies say. What the journal
//! does hold was written here since, or stored before the daemon died.

use crate::cache;
use crate::node::Node;
use ebb_consistency::MapAnswer;
use ebb_node_journal::{Header, Held, Kept, Note};
use ebb_types::{ByteRange, Errno, Ino, NodeId, Version};

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
            let ours = mine(note.as_ref(), &asked, answer, self.me);
            let ranges: Vec<ByteRange> = ours.iter().map(|(range, _)| *range).collect();
            if ranges.is_empty() {
                continue;
            }
            let Some(copies) = self.replicas.held.open(set, ino, &ranges) else { continue };
            cache::copy(&copies, &self.cache.file(ino)?, &ranges)?;
            tracing::info!(%ino, owner = %set.owner, ?ranges, "adopted by an earlier daemon");
            let note = match note {
                Some(note) => note,
                None => note.insert(Note::new(self.introduced(ino, path).await?)),
            };
            let held =
                |v| Held { kept: Kept::Owned(v), durable: false, guessed: false, damaged: false };
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
    me: NodeId,
) -> Vec<(ByteRange, Version)> {
    let owned = answer.ranges.iter().filter(|o| o.node == me && !o.flushed);
    let mut out = Vec::new();
    for owned in owned {
        for range in asked.iter().map(|r| r.intersect(owned.range)).filter(|r| !r.is_empty()) {
            let missing = note.map_or_else(|| vec![range], |note| note.not_held(range));
            out.extend(missing.into_iter().map(|part| (part, owned.version)));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_consistency::Owned;
    use ebb_types::Time;

    const ME: NodeId = NodeId(2);
    const LOST: NodeId = NodeId(1);

    fn range(start: u64, end: u64) -> ByteRange {
        ByteRange::new(start, end)
    }

    fn answer() -> MapAnswer {
        let owned = |start, end, node, version, flushed| Owned {
            range: range(start, end),
            node,
            version: Version(version),
            flushed,
        };
        MapAnswer {
            version: Version(9),
            ranges: vec![
                owned(0, 10, ME, 9, false),
                owned(10, 20, LOST, 4, false),
                owned(20, 30, ME, 5, true),
                owned(30, 40, ME, 9, false),
            ],
            base_version: Version(1),
            base_len: 0,
            size: 50,
            covers: ByteRange::ALL,
            unchanged: false,
        }
    }

    /// Only what was asked for, is this node's by now, is not on the backing, and is not held.
    #[test]
    fn what_the_copies_stand_for_is_what_was_moved_and_not_stored() {
        let all = [range(0, 50)];
        let v9 = |start, end| (range(start, end), Version(9));
        assert_eq!(mine(None, &all, &answer(), ME), [v9(0, 10), v9(30, 40)]);
        assert_eq!(mine(None, &[range(5, 35)], &answer(), ME), [v9(5, 10), v9(30, 35)]);
        assert_eq!(mine(None, &[], &answer(), ME), []);
        let header = Header {
            path: b"f".to_vec(),
            perm: 0o600,
            uid: 0,
            gid: 0,
            atime: Time::now(),
            mtime: Time::now(),
            size: 50,
            home: None,
            under: None,
            shared: true,
        };
        let mut note = Note::new(header);
        note.set_held([
            (
                range(2, 4),
                Held { kept: Kept::Written, durable: false, guessed: false, damaged: false },
            ),
            (
                range(30, 40),
                Held {
                    kept: Kept::Owned(Version(9)),
                    durable: false,
                    guessed: false,
                    damaged: false,
                },
            ),
        ]);
        assert_eq!(mine(Some(&note), &all, &answer(), ME), [v9(0, 2), v9(4, 10)]);
    }
}
