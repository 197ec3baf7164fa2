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

    /// An attach of `range` was answered with `version` (or failed: `Version::ZERO`). Returns the
    /// parts that no other attach is under way for, with the newest version of all of theirs.
    pub(crate) fn land(&mut self, range: ByteRange, version: Version) -> Vec<(ByteRange, Version)> {
        let mut landed = Vec::new();
        for (piece, flight) in self.pieces(range) {
            let Some(flight) = flight else { continue };
            let newest = flight.newest.max(version);
            if flight.attaches <= 1 {
                self.flights.remove(piece);
                landed.push((piece, newest));
            } else {
                let attaches = flight.attaches - 1;
                self.flights.insert(piece, Flight { attaches, newest });
            }
        }
        landed
    }

    fn pieces(&self, range: ByteRange) -> Vec<(ByteRange, Option<Flight>)> {
        let known = self.flights.overlapping(range).map(|(r, flight)| (r, Some(flight)));
        let gaps = self.flights.gaps(range).map(|gap| (gap, None));
        known.chain(gaps).collect()
    }
}
