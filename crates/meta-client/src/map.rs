//! Ownership maps as received, checked: what comes out keeps the order that the view of a file
//! relies on.

use ebb_consistency::{Grant, LeaseSeq, MapAnswer, Owned};
use ebb_types::{ByteRange, Errno, NodeId, Time, Version};
use ebb_wire::{pb, range_from_pb, time_from_pb};

/// Which objects of the backing a file has to do with, by their numbers there; 0: none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Base {
    /// Its unowned bytes are this one's.
    pub object: u64,
    /// This one has its name until it is published.
    pub replaces: u64,
}

/// What the service answered about the bytes of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapped {
    /// Who owns what.
    pub map: MapAnswer,
    /// Whose the bytes are that nobody owns.
    pub base: Base,
    /// When the published content last changed; absent when the answer is `unchanged`, or the
    /// service does not say.
    pub mtime: Option<Time>,
    /// A lease, when one was asked for and granted.
    pub lease: Option<Grant>,
}

/// A grant as received.
pub(crate) fn grant_from_pb(lease: pb::Lease) -> Grant {
    let pb::Lease { seq, version, compared } = lease;
    Grant { seq: LeaseSeq(seq), version: Version(version), compared }
}

/// Checks a map: ranges sorted, disjoint, inside what it covers, owned by somebody, none newer
/// than the file; sizes and versions that agree with each other.
pub fn map_from_pb(map: pb::FileMap) -> Result<Mapped, Errno> {
    let covers = match map.covers {
        Some(covers) => range_from_pb(covers)?,
        None if map.unchanged => ByteRange::ALL,
        None => return Err(Errno::EPROTO),
    };
    let sound = map.size <= i64::MAX as u64
        && map.base_len <= map.size
        && map.base_version <= map.version
        && (map.ranges.is_empty() || !map.unchanged);
    if !sound {
        return Err(Errno::EPROTO);
    }
    let mtime = map.mtime.map(time_from_pb).transpose()?;
    let version = Version(map.version);
    let answer = MapAnswer {
        version,
        size: map.size,
        base_version: Version(map.base_version),
        base_len: map.base_len,
        unchanged: map.unchanged,
        covers,
        ranges: owned_from_pb(&map.ranges, covers, version)?,
    };
    let base = Base { object: map.object, replaces: map.replaces };
    Ok(Mapped { map: answer, base, mtime, lease: map.lease.map(grant_from_pb) })
}

/// Checks owned ranges: not empty, sorted, disjoint, inside `covers`, not newer than `newest`.
pub(crate) fn owned_from_pb(
    ranges: &[pb::OwnedRange],
    covers: ByteRange,
    newest: Version,
) -> Result<Vec<Owned>, Errno> {
    let mut at = covers.start();
    let mut owned = Vec::with_capacity(ranges.len());
    for r in ranges {
        let inside = at <= r.start && r.start < r.end && r.end <= covers.end();
        if !inside || r.end > i64::MAX as u64 || r.node == 0 || r.version > newest.0 {
            return Err(Errno::EPROTO);
        }
        at = r.end;
        owned.push(Owned {
            range: ByteRange::new(r.start, r.end),
            node: NodeId(r.node),
            version: Version(r.version),
            flushed: r.flushed,
        });
    }
    Ok(owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn range(start: u64, end: u64) -> pb::OwnedRange {
        pb::OwnedRange { start, end, node: 1, version: 3, flushed: false }
    }

    fn sample(ranges: Vec<pb::OwnedRange>) -> pb::FileMap {
        pb::FileMap {
            version: 9,
            size: 100,
            base_version: 2,
            base_len: 50,
            unchanged: false,
            covers: Some(pb::Range { start: 10, end: 90 }),
            ranges,
            mtime: Some(pb::Time { sec: 5, nsec: 6 }),
            lease: Some(pb::Lease { seq: 3, version: 9, compared: true }),
            changed: Vec::new(),
            guessed: Vec::new(),
            object: 77,
            replaces: 0,
        }
    }

    #[test]
    fn a_sound_map_comes_through_whole() {
        let got = map_from_pb(sample(vec![range(10, 20), range(20, 30), range(80, 90)])).unwrap();
        assert_eq!(got.mtime, Some(Time { sec: 5, nsec: 6 }));
        assert_eq!((got.map.version, got.map.base_version), (Version(9), Version(2)));
        assert_eq!((got.map.size, got.map.base_len), (100, 50));
        let grant = Grant { seq: LeaseSeq(3), version: Version(9), compared: true };
        assert_eq!(got.lease, Some(grant));
        assert_eq!(got.map.covers, ByteRange::new(10, 90));
        let first = Owned {
            range: ByteRange::new(10, 20),
            node: NodeId(1),
            version: Version(3),
            flushed: false,
        };
        assert_eq!((got.map.ranges.len(), got.map.ranges[0]), (3, first));
        assert_eq!(got.base, Base { object: 77, replaces: 0 });
    }

    #[test]
    fn every_kind_of_nonsense_is_refused() {
        let bad: [fn(&mut pb::FileMap); 14] = [
            |m| m.ranges = vec![range(20, 30), range(10, 20)],
            |m| m.ranges = vec![range(10, 20), range(19, 30)],
            |m| m.ranges = vec![range(9, 20)],
            |m| m.ranges = vec![range(80, 91)],
            |m| m.ranges = vec![range(20, 20)],
            |m| m.ranges = vec![range(30, 20)],
            |m| m.ranges = vec![pb::OwnedRange { node: 0, ..range(20, 30) }],
            |m| m.ranges = vec![pb::OwnedRange { version: 10, ..range(20, 30) }],
            |m| m.covers = None,
            |m| m.covers = Some(pb::Range { start: 2, end: 1 }),
            |m| (m.unchanged, m.ranges) = (true, vec![range(20, 30)]),
            |m| m.base_len = 101,
            |m| m.base_version = 10,
            |m| m.mtime = Some(pb::Time { sec: 0, nsec: 1_000_000_000 }),
        ];
        for (i, spoil) in bad.iter().enumerate() {
            let mut map = sample(vec![range(20, 30)]);
            spoil(&mut map);
            assert_eq!(map_from_pb(map), Err(Errno::EPROTO), "case {i}");
        }
    }

    proptest! {
        /// Accepted exactly when an obvious check of every pair accepts it.
        #[test]
        fn order_is_judged_as_by_the_definition(
            list in prop::collection::vec((0..100u64, 0..100u64), 0..6),
        ) {
            let ranges: Vec<_> = list.iter().map(|(s, e)| range(*s, *e)).collect();
            let each = list.iter().all(|(s, e)| s < e && *s >= 10 && *e <= 90);
            let pairs = (0..list.len()).all(|i| (0..i).all(|j| list[j].1 <= list[i].0));
            prop_assert_eq!(map_from_pb(sample(ranges)).is_ok(), each && pairs);
        }
    }
}
