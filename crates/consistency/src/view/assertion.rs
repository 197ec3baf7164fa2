//! What a node tells a service that lost the end of its journal: see [`crate::ownership::Assertion`].

use super::FileView;
use super::local::Local;
use crate::ownership::{Assertion, Claimed};
use ebb_types::{ByteRange, Version};

impl FileView {
    /// The newest version that anything is known of.
    #[must_use]
    pub fn newest_known(&self) -> Version {
        let known = &self.known;
        let told = known.whole().max(known.size.as_of()).max(known.base_len.as_of());
        let facts = known.facts(ByteRange::ALL).map(|(_, fact)| fact.as_of);
        let own = self.local.overlapping(ByteRange::ALL).map(|(_, state)| newest(state));
        facts.chain(own).fold(told, Version::max)
    }

    /// True when bytes of the file are, or were and may still count as, this node's.
    #[must_use]
    pub fn may_own(&self) -> bool {
        let owned = |state| !matches!(state, Local::Clean);
        self.local.overlapping(ByteRange::ALL).any(|(_, state)| owned(state))
            || self.known.facts(ByteRange::ALL).any(|(_, fact)| fact.owner == self.me)
    }

    /// What this node knows of a part of the file, and its service may have forgotten: what was
    /// told after `after`, and all of its own. The part ends after so many claims. `complete`: no
    /// place in the file is being given to this node just now.
    #[must_use]
    pub fn assertion(
        &self,
        covers: ByteRange,
        after: Version,
        most: usize,
        complete: bool,
    ) -> Assertion {
        let mut claims = Vec::new();
        let mut end = covers.end();
        let mut at = covers.start();
        let extents = self.local.overlapping(covers).filter(|(_, s)| !matches!(s, Local::Clean));
        for (range, state) in extents {
            self.told_between(ByteRange::new(at, range.start()), after, &mut claims);
            if claims.len() >= most {
                end = range.start();
                break;
            }
            claims.push((
                range,
                match state {
                    Local::Owned { last, flushed, .. } => Claimed::Own(last, flushed),
                    _ => Claimed::Keep,
                },
            ));
            at = range.end();
        }
        if end == covers.end() {
            self.told_between(ByteRange::new(at, end), after, &mut claims);
        }
        if claims.len() > most {
            claims.truncate(most);
            end = claims.last().map_or(end, |(range, _)| range.end());
        }
        let known = &self.known;
        Assertion {
            size: (known.size.value, known.size.as_of()),
            base_len: (known.base_len.value, known.base_len.as_of()),
            covers: ByteRange::new(covers.start(), end),
            claims,
            complete,
        }
    }

    /// The backing has nothing of these bytes after all: what is local is to be flushed again.
    pub fn not_flushed(&mut self, within: ByteRange) {
        let extents: Vec<_> = self.local.overlapping(within).collect();
        for (range, state) in extents {
            if let Local::Owned { first, last, flushed: true } = state {
                self.local.set(range, Some(Local::Owned { first, last, flushed: false }));
            }
        }
    }

    fn told_between(
        &self,
        range: ByteRange,
        after: Version,
        claims: &mut Vec<(ByteRange, Claimed)>,
    ) {
        let news = self.known.facts(range).filter(|(_, f)| f.as_of > after || f.owner == self.me);
        claims.extend(news.map(|(range, fact)| {
            let (node, version, as_of) = (fact.owner, fact.version, fact.as_of);
            (range, Claimed::Known { node, version, as_of })
        }));
    }
}

fn newest(state: Local) -> Version {
    match state {
        Local::Owned { last, .. } => last,
        _ => Version::ZERO,
    }
}
