//! Who may write which bytes of the backing now. Pure: waiting is the driver's.
//!
//! A claim covers bytes of one file. Claims of one file never overlap, whoever holds them: a
//! flush, a truncate and a publication of the same bytes take turns.

use ebb_consistency::Owned;
use ebb_types::{Attr, ByteRange, Ino, NodeId, Version};
use std::collections::HashMap;

/// Identifies a claim; never 0.
pub type ClaimId = u64;

/// What a flush may do.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Right {
    /// Write these bytes.
    pub ranges: Vec<Owned>,
    /// Give the file these attributes, which are right as long as it has this version.
    pub shape: Option<(Attr, Version)>,
}

#[derive(Debug)]
struct Claim {
    id: ClaimId,
    node: NodeId,
    ranges: Vec<ByteRange>,
    granted: Right,
}

/// All claims.
#[derive(Debug, Default)]
pub struct Grants {
    files: HashMap<Ino, Vec<Claim>>,
    last: ClaimId,
}

impl Grants {
    /// Claims ranges of a file, unless a claim overlaps them. `NodeId::NOBODY` is the service.
    pub fn claim(&mut self, ino: Ino, node: NodeId, ranges: &[ByteRange]) -> Option<ClaimId> {
        let claims = self.files.entry(ino).or_default();
        let taken = claims.iter().flat_map(|c| &c.ranges);
        let overlaps = taken.into_iter().any(|t| ranges.iter().any(|r| r.overlaps(*t)));
        if overlaps {
            return None;
        }
        self.last += 1;
        claims.push(Claim {
            id: self.last,
            node,
            ranges: ranges.to_vec(),
            granted: Right::default(),
        });
        Some(self.last)
    }

    /// Narrows a claim to what was granted.
    pub fn narrow(&mut self, ino: Ino, id: ClaimId, granted: Right) {
        let claims = self.files.get_mut(&ino);
        if let Some(claim) = claims.and_then(|c| c.iter_mut().find(|c| c.id == id)) {
            claim.ranges = granted.ranges.iter().map(|o| o.range).collect();
            claim.granted = granted;
        }
    }

    /// Ends a claim of a node; what was granted by it, if there is such a claim.
    pub fn end(&mut self, ino: Ino, id: ClaimId, node: NodeId) -> Option<Right> {
        let claims = self.files.get_mut(&ino)?;
        let at = claims.iter().position(|c| c.id == id && c.node == node)?;
        let claim = claims.swap_remove(at);
        if claims.is_empty() {
            self.files.remove(&ino);
        }
        Some(claim.granted)
    }

    /// Ends all claims of a node; true when there were any.
    pub fn end_node(&mut self, node: NodeId) -> bool {
        let mut any = false;
        self.files.retain(|_, claims| {
            let before = claims.len();
            claims.retain(|c| c.node != node);
            any |= claims.len() != before;
            !claims.is_empty()
        });
        any
    }

    /// True when this one has a claim on it; `NodeId::NOBODY` is the service.
    pub fn is_held_by(&self, ino: Ino, node: NodeId) -> bool {
        self.files.get(&ino).is_some_and(|claims| claims.iter().any(|c| c.node == node))
    }

    /// True when somebody may be writing to the file.
    pub fn is_busy(&self, ino: Ino) -> bool {
        self.files.get(&ino).is_some_and(|c| !c.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: NodeId = NodeId(1);
    const B: NodeId = NodeId(2);

    #[test]
    fn overlapping_claims_take_turns() {
        let mut g = Grants::default();
        let f = Ino(9);
        let first = g.claim(f, A, &[ByteRange::new(0, 10)]).unwrap();
        assert_eq!(g.claim(f, B, &[ByteRange::new(9, 20)]), None);
        assert!(g.claim(f, B, &[ByteRange::new(10, 20)]).is_some());
        assert_eq!(g.claim(f, NodeId::NOBODY, &[ByteRange::ALL]), None);
        assert_eq!(g.end(f, first, B), None, "somebody else's claim");
        assert_eq!(g.end(f, first, A), Some(Right::default()));
        assert_eq!(g.end(f, first, A), None, "ended twice");
        assert!(g.claim(f, A, &[ByteRange::new(0, 10)]).is_some());
        assert!(g.end_node(B) && !g.end_node(B));
        assert!(g.is_busy(f) && !g.is_busy(Ino(1)));
    }
}
