//! Opens of coupled files that the service counts, from before it is told of one until after it knows how it
//! ended: a service that has lost the end of its journal is told all of them again.

use ebb_locks::Mutex;
use ebb_meta_client::{CoupledHandle, Left};
use ebb_types::Ino;
use std::collections::{HashMap, VecDeque};

/// So many that have ended are remembered: more than a journal can lose.
const LEFT_MAX: usize = 4096;

/// Of a file that is just being made.
pub const MAKING: Ino = Ino(0);

#[derive(Debug, Default)]
struct Inner {
    open: HashMap<u64, CoupledHandle>,
    left: VecDeque<CoupledHandle>,
}

/// The opens that count, by their numbers.
#[derive(Debug, Default)]
pub struct CountedOpens {
    inner: Mutex<Inner>,
}

impl CountedOpens {
    /// An open is about to be told, if it has a number. Whether its file is coupled is not known.
    pub fn begins(&self, ino: Ino, handle: u64, write: bool) {
        if handle != 0 {
            let open = CoupledHandle { ino, handle, write, coupled: false, of: 0, left: None };
            self.inner.lock().open.entry(handle).or_insert(open);
        }
    }

    /// It was told, and the file is coupled, or not.
    pub fn is_told(&self, ino: Ino, handle: u64, coupled: bool) {
        let mut inner = self.inner.lock();
        match coupled {
            true => {
                if let Some(open) = inner.open.get_mut(&handle) {
                    (open.ino, open.coupled) = (ino, true);
                }
            }
            false => drop(inner.open.remove(&handle)),
        }
    }

    /// It says that it is one of so many.
    pub fn joins(&self, handle: u64, of: u32) {
        if let Some(open) = self.inner.lock().open.get_mut(&handle) {
            open.of = of;
        }
    }

    /// Nothing was opened, or nothing that counts.
    pub fn is_nothing(&self, handle: u64) {
        if handle != 0 {
            self.inner.lock().open.remove(&handle);
        }
    }

    /// It ends so, which the service is about to be told.
    pub fn ends(&self, handle: u64, how: Left) {
        if let Some(open) = self.inner.lock().open.get_mut(&handle) {
            open.left = Some(how);
        }
    }

    /// The service has said that it knows.
    pub fn has_ended(&self, handle: u64) {
        let mut inner = self.inner.lock();
        let Some(open) = inner.open.remove(&handle) else { return };
        if inner.left.len() == LEFT_MAX {
            inner.left.pop_front();
        }
        inner.left.push_back(open);
    }

    /// True when the service knows of every end.
    pub fn all_told(&self) -> bool {
        self.inner.lock().open.values().all(|open| open.left.is_none())
    }

    /// All of them.
    pub fn all(&self) -> Vec<CoupledHandle> {
        let inner = self.inner.lock();
        inner.left.iter().chain(inner.open.values()).copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_open_is_told_again_from_its_beginning_until_long_after_its_end() {
        let opens = CountedOpens::default();
        opens.begins(MAKING, 1, true);
        opens.begins(Ino(9), 2, false);
        opens.begins(Ino(9), 0, false);
        opens.begins(Ino(9), 3, false);
        opens.is_told(Ino(7), 1, true);
        opens.is_told(Ino(9), 2, false);
        opens.is_nothing(3);
        let told = |left| CoupledHandle {
            ino: Ino(7),
            handle: 1,
            write: true,
            coupled: true,
            of: 4,
            left,
        };
        opens.joins(1, 4);
        assert_eq!(opens.all(), [told(None)]);
        opens.ends(1, Left::Through);
        assert!(!opens.all_told());
        assert_eq!(opens.all(), [told(Some(Left::Through))]);
        opens.has_ended(1);
        assert!(opens.all_told());
        assert_eq!(opens.all(), [told(Some(Left::Through))]);
        for handle in 10..10 + LEFT_MAX as u64 {
            opens.begins(Ino(7), handle, true);
            opens.ends(handle, Left::Died);
            opens.has_ended(handle);
        }
        assert_eq!(opens.all().len(), LEFT_MAX);
    }
}
