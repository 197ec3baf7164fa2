//! Up to which moment the backing has everything that was made or changed.
//!
//! What is not there at some moment is waited for; when all of it has got there, or is gone, that
//! moment is settled, and what is not there by then is waited for next. So it moves on while there is
//! always something on its way, at the cost of one look at each inode that is.

use crate::tree::Namespace;
use ebb_types::Ino;
use ebb_types::facts::Moment;
use std::collections::BTreeSet;

/// See the head of the file.
#[derive(Clone, Debug, Default)]
pub struct Horizon {
    settled: Moment,
    next: Moment,
    waiting: BTreeSet<Ino>,
}

impl Horizon {
    /// The moment that is settled, after a look at what is still on its way. `now` counts up.
    pub fn look(&mut self, ns: &Namespace, now: Moment) -> Moment {
        // What comes back later, because others took it away on the backing, was not changed by the job.
        while let Some(ino) = self.waiting.first().copied()
            && !ns.is_local(ino)
        {
            self.waiting.remove(&ino);
        }
        if self.waiting.is_empty() {
            self.settled = self.next;
            self.next = now;
            self.waiting = ns.pending_after(None).filter(|ino| ns.is_local(*ino)).collect();
            if self.waiting.is_empty() {
                self.settled = now;
            }
        }
        self.settled
    }

    /// The same as it was at the last look.
    #[must_use]
    pub fn settled(&self) -> Moment {
        self.settled
    }
}
