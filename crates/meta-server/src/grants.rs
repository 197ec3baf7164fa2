//! Who may write which bytes of the backing now. Pure: waiting is the driver's.
//!
//! A claim covers bytes of one file. Claims of one file never overlap, whoever holds them: a
//! flush, a truncate and a publication of the same bytes take turns. What a call costs grows with what it
//! names, and with how much is claimed only as a logarithm: all nodes of a job flush one file at once.

use ebb_consistency::Owned;
use ebb_types::{Attr, ByteRange, Ino, NodeId, Version};
use std::collections::{BTreeMap, BTreeSet, HashMap};

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
    node: NodeId,
    /// In order, none beside or over another.
    ranges: Vec<ByteRange>,
    granted: Right,
}

/// The claims of one file.
#[derive(Debug, Default)]
struct Claims {
    by_id: HashMap<ClaimId, Claim>,
    /// Where each claimed range begins, and where it ends. None overlaps another.
    taken: BTreeMap<u64, u64>,
}

impl Claims {
    fn is_taken(&self, range: ByteRange) -> bool {
        let before = self.taken.range(..range.end()).next_back();
        before.is_some_and(|(_, end)| *end > range.start())
    }

    fn take(&mut self, ranges: &[ByteRange]) {
        self.taken.extend(ranges.iter().map(|r| (r.start(), r.end())));
    }

    fn free(&mut self, ranges: &[ByteRange]) {
        for range in ranges {
            self.taken.remove(&range.start());
        }
    }
}

/// All claims.
#[derive(Debug, Default)]
pub struct Grants {
    files: HashMap<Ino, Claims>,
    of_nodes: HashMap<NodeId, BTreeSet<(Ino, ClaimId)>>,
    last: ClaimId,
}

impl Grants {
    /// Claims ranges of a file, unless a claim overlaps them. `NodeId::NOBODY` is the service.
    pub fn claim(&mut self, ino: Ino, node: NodeId, ranges: &[ByteRange]) -> Option<ClaimId> {
        let ranges = joined(ranges);
        let claims = self.files.get(&ino);
        if claims.is_some_and(|claims| ranges.iter().any(|range| claims.is_taken(*range))) {
            return None;
        }
        self.last += 1;
        let claims = self.files.entry(ino).or_default();
        claims.take(&ranges);
        claims.by_id.insert(self.last, Claim { node, ranges, granted: Right::default() });
        self.of_nodes.entry(node).or_default().insert((ino, self.last));
        Some(self.last)
    }

    /// Narrows a claim to what was granted, which lies in it.
    pub fn narrow(&mut self, ino: Ino, id: ClaimId, granted: Right) {
        let Some(claims) = self.files.get_mut(&ino) else { return };
        let Some(mut claim) = claims.by_id.remove(&id) else { return };
        claims.free(&claim.ranges);
        claim.ranges = joined(&granted.ranges.iter().map(|o| o.range).collect::<Vec<_>>());
        claims.take(&claim.ranges);
        claim.granted = granted;
        claims.by_id.insert(id, claim);
    }

    /// Ends a claim of a node; what was granted by it, if there is such a claim.
    pub fn end(&mut self, ino: Ino, id: ClaimId, node: NodeId) -> Option<Right> {
        let claims = self.files.get_mut(&ino)?;
        claims.by_id.get(&id).filter(|claim| claim.node == node)?;
        let claim = claims.by_id.remove(&id)?;
        claims.free(&claim.ranges);
        if claims.by_id.is_empty() {
            self.files.remove(&ino);
        }
        if let Some(its) = self.of_nodes.get_mut(&node) {
            its.remove(&(ino, id));
            if its.is_empty() {
                self.of_nodes.remove(&node);
            }
        }
        Some(claim.granted)
    }

    /// Ends all claims of a node; true when there were any.
    pub fn end_node(&mut self, node: NodeId) -> bool {
        let its = self.of_nodes.get(&node).cloned().unwrap_or_default();
        for (ino, id) in &its {
            self.end(*ino, *id, node);
        }
        !its.is_empty()
    }

    /// True when this one has a claim on it; `NodeId::NOBODY` is the service.
    pub fn is_held_by(&self, ino: Ino, node: NodeId) -> bool {
        let its = self.of_nodes.get(&node);
        its.is_some_and(|its| its.range((ino, 0)..=(ino, ClaimId::MAX)).next().is_some())
    }

    /// True when somebody may be writing to the file.
    pub fn is_busy(&self, ino: Ino) -> bool {
        self.files.contains_key(&ino)
    }
}

/// The same bytes, in order, without empty ranges and as few as there can be.
fn joined(ranges: &[ByteRange]) -> Vec<ByteRange> {
    let mut sorted: Vec<ByteRange> = ranges.iter().filter(|r| !r.is_empty()).copied().collect();
    sorted.sort_unstable_by_key(|r| r.start());
    let mut out: Vec<ByteRange> = Vec::with_capacity(sorted.len());
    for range in sorted {
        match out.last_mut() {
            Some(last) if last.end() >= range.start() => {
                *last = ByteRange::new(last.start(), last.end().max(range.end()));
            }
            _ => out.push(range),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

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

    /// Each claim with its bytes: what the other one must agree with.
    #[derive(Default)]
    struct Plain(Vec<(Ino, ClaimId, NodeId, Vec<ByteRange>)>);

    impl Plain {
        fn is_free(&self, ino: Ino, ranges: &[ByteRange]) -> bool {
            let mut taken = self.0.iter().filter(|c| c.0 == ino).flat_map(|c| &c.3);
            !taken.any(|t| ranges.iter().any(|r| r.overlaps(*t)))
        }
    }

    fn ranges() -> impl Strategy<Value = Vec<ByteRange>> {
        let range = (0..60u64, 0..9u64).prop_map(|(at, len)| ByteRange::new(at, at + len));
        prop::collection::vec(range, 0..5)
    }

    #[derive(Clone, Debug)]
    enum Act {
        Claim(u64, u32, Vec<ByteRange>),
        /// To every other range of what it has.
        Narrow(prop::sample::Index),
        End(prop::sample::Index, u32),
        EndNode(u32),
    }

    fn act() -> impl Strategy<Value = Act> {
        prop_oneof![
            4 => (1..3u64, 0..4u32, ranges()).prop_map(|(i, n, r)| Act::Claim(i, n, r)),
            2 => any::<prop::sample::Index>().prop_map(Act::Narrow),
            3 => (any::<prop::sample::Index>(), 0..4u32).prop_map(|(c, n)| Act::End(c, n)),
            1 => (0..4u32).prop_map(Act::EndNode),
        ]
    }

    proptest! {
        #[test]
        fn claims_are_what_a_plain_list_says(acts in prop::collection::vec(act(), 1..60)) {
            let (mut grants, mut plain) = (Grants::default(), Plain::default());
            for act in acts {
                match act {
                    Act::Claim(ino, node, ranges) => {
                        let (ino, node) = (Ino(ino), NodeId(node));
                        let id = grants.claim(ino, node, &ranges);
                        prop_assert_eq!(id.is_some(), plain.is_free(ino, &ranges));
                        plain.0.extend(id.map(|id| (ino, id, node, ranges)));
                    }
                    Act::Narrow(which) if !plain.0.is_empty() => {
                        let claim = which.index(plain.0.len());
                        let (ino, id, node, ranges) = &mut plain.0[claim];
                        *ranges = ranges.iter().step_by(2).copied().collect();
                        let owned = |range: &ByteRange| Owned {
                            range: *range,
                            node: *node,
                            version: Version(1),
                            flushed: false,
                        };
                        let ranges = ranges.iter().map(owned).collect();
                        grants.narrow(*ino, *id, Right { ranges, shape: None });
                    }
                    Act::End(which, node) if !plain.0.is_empty() => {
                        let claim = which.index(plain.0.len());
                        let (ino, id, holder, _) = plain.0[claim];
                        let ended = grants.end(ino, id, NodeId(node)).is_some();
                        prop_assert_eq!(ended, holder == NodeId(node));
                        if ended {
                            plain.0.remove(claim);
                        }
                    }
                    Act::Narrow(_) | Act::End(..) => {}
                    Act::EndNode(node) => {
                        let any = plain.0.iter().any(|c| c.2 == NodeId(node));
                        prop_assert_eq!(grants.end_node(NodeId(node)), any);
                        plain.0.retain(|c| c.2 != NodeId(node));
                    }
                }
                for ino in [Ino(1), Ino(2)] {
                    let its = || plain.0.iter().filter(|c| c.0 == ino);
                    prop_assert_eq!(grants.is_busy(ino), its().next().is_some());
                    for node in (0..4).map(NodeId) {
                        let has = its().any(|c| c.2 == node);
                        prop_assert_eq!(grants.is_held_by(ino, node), has);
                    }
                    for at in 0..70 {
                        let byte = [ByteRange::new(at, at + 1)];
                        let free = grants.claim(ino, NodeId(9), &byte);
                        prop_assert_eq!(free.is_some(), plain.is_free(ino, &byte), "{}", at);
                        free.iter().for_each(|id| drop(grants.end(ino, *id, NodeId(9))));
                    }
                }
            }
        }
    }
}
