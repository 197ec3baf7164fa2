//! Attaches that were sent and not answered. The same bytes can be in several of them, and
//! answers come in any order: bytes are owned only when the last of their attaches is answered.

use ebb_types::{ByteRange, Extents, Version};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Flight {
    attaches: u32,
    newest: Version,
}

/// The attaches under way, per byte.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Flying {
    flights: Extents<Flight>,
}

impl Flying {
    /// An attach of `range` was sent.
    pub(crate) fn start(&mut self, range: ByteRange) {
        for (piece, flight) in self.pieces(range) {
            let flight = flight.unwrap_or_default();
            let attaches = flight.attaches.saturating_add(1);
            self.flights.insert(piece, Flight { attaches, ..flight });
        }
    }

    /// The same for all of `ranges`, which do not meet.
    pub(crate) fn start_all(&mut self, ranges: &[ByteRange]) {
        if self.flights.is_empty() {
            let first = Flight { attaches: 1, ..Flight::default() };
            let all: Vec<_> = ranges.iter().map(|range| (*range, Some(first))).collect();
            self.flights.assign(&all);
        } else {
            ranges.iter().for_each(|range| self.start(*range));
        }
    }

    /// An attach of `ranges`, which do not meet, was answered with `version` (or failed:
    /// `Version::ZERO`). Returns the parts that no other attach is under way for, with the newest
    /// version of all of theirs.
    pub(crate) fn land(
        &mut self,
        ranges: &[ByteRange],
        version: Version,
    ) -> Vec<(ByteRange, Version)> {
        let (mut landed, mut changes) = (Vec::new(), Vec::new());
        for (piece, flight) in self.flights.within(ranges) {
            let newest = flight.newest.max(version);
            let attaches = flight.attaches.saturating_sub(1);
            if attaches == 0 {
                landed.push((piece, newest));
            }
            changes.push((piece, (attaches > 0).then_some(Flight { attaches, newest })));
        }
        self.flights.assign(&changes);
        landed
    }

    fn pieces(&self, range: ByteRange) -> Vec<(ByteRange, Option<Flight>)> {
        let known = self.flights.overlapping(range).map(|(r, flight)| (r, Some(flight)));
        let gaps = self.flights.gaps(range).map(|gap| (gap, None));
        known.chain(gaps).collect()
    }
}
