//! The files of a node that may have bytes which are not on the backing.

use crate::file::CachedFile;
use ebb_locks::Mutex;
use ebb_types::Ino;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Release};

/// The list. Writers put files on it, the flusher takes them off, and a file that the node gives up
/// for good is taken off after that: nothing would ever flush it.
#[derive(Default)]
pub struct DirtyList {
    /// Taken before the shard locks of the node.
    files: Mutex<BTreeMap<Ino, Arc<CachedFile>>>,
}

impl DirtyList {
    /// Puts a file on the list, unless the node has given it up.
    pub fn put(&self, file: &Arc<CachedFile>, is_known: impl FnOnce() -> bool) {
        if file.listed.swap(true, AcqRel) {
            return;
        }
        let mut files = self.files.lock();
        // Whoever gives it up later takes it off then.
        if is_known() {
            files.insert(file.ino, Arc::clone(file));
        } else {
            file.listed.store(false, Release);
        }
    }

    /// Takes it off. Whoever writes next puts it on again.
    pub fn take(&self, file: &CachedFile) {
        let mut files = self.files.lock();
        file.listed.store(false, Release);
        // Another file may have come in its place after it was given up.
        if files.get(&file.ino).is_some_and(|f| std::ptr::eq(&raw const **f, file)) {
            files.remove(&file.ino);
        }
    }

    /// What is on it.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<CachedFile>> {
        self.files.lock().values().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_consistency::ModelTable;
    use ebb_types::NodeId;
    use std::sync::Barrier;
    use std::sync::atomic::AtomicBool;
    use std::sync::atomic::Ordering::Acquire;

    fn file() -> Arc<CachedFile> {
        let model = ModelTable::builtin().get("session").expect("a model of ours");
        Arc::new(CachedFile::new(Ino(7), NodeId(1), model))
    }

    #[test]
    fn what_is_given_up_while_it_is_put_on_the_list_does_not_stay_there() {
        for _ in 0..2000 {
            let (list, file) = (DirtyList::default(), file());
            let (known, begin) = (AtomicBool::new(true), Barrier::new(2));
            std::thread::scope(|s| {
                s.spawn(|| {
                    begin.wait();
                    list.put(&file, || known.load(Acquire));
                });
                begin.wait();
                known.store(false, Release);
                list.take(&file);
            });
            assert!(list.all().is_empty());
        }
    }

    #[test]
    fn one_that_came_in_its_place_stays() {
        let (list, old, new) = (DirtyList::default(), file(), file());
        list.put(&old, || true);
        list.put(&new, || true);
        list.take(&old);
        assert!(Arc::ptr_eq(&list.all()[0], &new));
        list.put(&old, || false);
        list.take(&old);
        assert!(Arc::ptr_eq(&list.all()[0], &new));
    }
}
