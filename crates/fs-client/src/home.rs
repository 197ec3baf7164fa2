//! Where a file is on the backing, and as whoever looks for its bytes after a crash should find it
//! there: if it is newer than that, somebody else has changed it.

use ebb_node_journal::Home;

/// What is known of a file on the backing. Looks at it take time, and this node's own changes to it
/// (flushes, cuts, times that are set) go on meanwhile: a look counts only when there was no such
/// change from its begin until it is told here.
#[derive(Debug, Default)]
pub struct Whereabouts {
    at: Option<Home>,
    changes: u32,
    begun: u64,
}

/// What had been changed when a look at the backing began.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    quiet: bool,
    begun: u64,
}

impl Whereabouts {
    /// As an earlier daemon left it.
    #[must_use]
    pub fn restored(at: Option<Home>) -> Whereabouts {
        Whereabouts { at, ..Whereabouts::default() }
    }

    /// Where it is; in which state only while this node does not change it.
    #[must_use]
    pub fn home(&self) -> Option<&Home> {
        self.at.as_ref()
    }

    /// Before looking at the backing.
    #[must_use]
    pub fn look(&self) -> Look {
        Look { quiet: self.changes == 0, begun: self.begun }
    }

    /// What was found, after [`Whereabouts::look`].
    pub fn found(&mut self, look: Look, at: Option<Home>) {
        self.at = at;
        if let Some(home) = self.at.as_mut().filter(|_| !look.quiet || look.begun != self.begun) {
            home.seen = None;
        }
    }

    /// It has another name.
    pub fn moved(&mut self, path: &[u8]) {
        if let Some(home) = self.at.as_mut().filter(|h| !h.is_part()) {
            home.path = path.to_vec();
        }
    }

    /// This node is going to change it; at `at`, if that is known. True if what is to be noted of
    /// it is another thing now. Ends with [`Whereabouts::changed`].
    pub fn changes(&mut self, at: Option<(&[u8], u64)>) -> bool {
        self.changes += 1;
        self.begun += 1;
        let before = self.at.clone();
        match (at, &mut self.at) {
            (Some((path, ino)), _) => {
                self.at = Some(Home { path: path.to_vec(), ino, seen: None, changing: true });
            }
            (None, Some(home)) => home.seen = None,
            (None, None) => {}
        }
        self.at != before
    }

    /// A change is over, one way or the other.
    pub fn changed(&mut self) {
        self.changes = self.changes.saturating_sub(1);
    }
}

#[cfg(test)]
#[path = "home_tests.rs"]
mod tests;
