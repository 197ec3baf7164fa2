//! Whether this node is the only one that ever had a file, as far as the service has told: then a
//! recovery without the service knows that what it does not hold was never written.

use ebb_consistency::MapAnswer;
use ebb_types::Version;

/// What the answers of the service prove about one file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Alone {
    proven: bool,
    /// Others had the file, or bytes of it. What they wrote may be gone at the service because it was
    /// written over, and still be in their caches: they would bring it back if this node forgot what it flushed.
    others: bool,
    /// The last version that is known to be this node's, or to have been there before.
    at: Version,
}

impl Alone {
    /// As a journal tells of it: it says alone, or has no proof of that.
    #[must_use]
    pub fn noted(alone: bool) -> Alone {
        Alone { others: !alone, ..Alone::default() }
    }

    /// True when nobody else has it, or ever had it.
    #[must_use]
    pub fn is_proven(self) -> bool {
        self.proven
    }

    /// It was opened. `sole`: nobody else has it open; `shared`: others have bytes of it; `part`: it
    /// has a place on the backing, and not its name.
    pub fn opened(&mut self, sole: bool, shared: bool, part: bool, map: &MapAnswer) {
        // Somebody has brought bytes there: this node, if nothing has happened since.
        let own = self.proven && self.at == map.version;
        self.others |= !sole || shared;
        self.proven = !self.others && (map.base_len == 0 || !part || own);
        self.at = map.version;
    }

    /// A change by this node got this version. Each change takes the next one.
    pub fn changed(&mut self, version: Version, others: bool) {
        self.others |= others;
        self.proven &= !self.others && version <= self.at.next();
        self.at = self.at.max(version);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_types::ByteRange;

    fn map(version: u64, base_len: u64) -> MapAnswer {
        MapAnswer {
            version: Version(version),
            size: base_len,
            base_version: Version::ZERO,
            base_len,
            unchanged: false,
            covers: ByteRange::ALL,
            ranges: Vec::new(),
        }
    }

    #[test]
    fn a_change_by_another_node_is_seen_in_the_versions() {
        let mut alone = Alone::default();
        alone.opened(true, false, false, &map(1, 0));
        alone.changed(Version(2), false);
        alone.changed(Version(2), false);
        assert!(alone.is_proven());
        alone.changed(Version(4), false);
        assert!(!alone.is_proven());
        alone.changed(Version(5), false);
        assert!(!alone.is_proven(), "what was never is not forgotten");
    }

    #[test]
    fn others_that_have_it_open_or_had_bytes_are_seen() {
        let mut alone = Alone::default();
        alone.opened(true, false, false, &map(1, 0));
        alone.changed(Version(2), true);
        assert!(!alone.is_proven());
        for (sole, shared, part, base_len) in
            [(false, false, false, 0), (true, true, false, 0), (true, false, true, 9)]
        {
            let mut alone = Alone::default();
            alone.opened(sole, shared, part, &map(1, base_len));
            assert!(!alone.is_proven());
        }
        let mut own_part = Alone::default();
        own_part.opened(true, false, false, &map(1, 0));
        own_part.changed(Version(2), false);
        own_part.opened(true, false, true, &map(2, 9));
        assert!(own_part.is_proven());
    }

    /// The service tells of bytes that are, and these are not any more.
    #[test]
    fn whose_bytes_were_written_over_may_still_have_them() {
        let mut seen_at_a_change = Alone::default();
        seen_at_a_change.opened(true, false, false, &map(1, 0));
        seen_at_a_change.changed(Version(2), true);
        let mut seen_at_an_open = Alone::default();
        seen_at_an_open.opened(true, true, false, &map(1, 0));
        for mut alone in [seen_at_a_change, seen_at_an_open, Alone::noted(false)] {
            alone.opened(true, false, false, &map(3, 0));
            assert!(!alone.is_proven());
        }
        let mut alone = Alone::noted(true);
        assert!(!alone.is_proven(), "the service is asked first");
        alone.opened(true, false, false, &map(3, 0));
        assert!(alone.is_proven());
    }
}
