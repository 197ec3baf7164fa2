//! What a program finds when it looks again: every difference from its books is a panic.

use super::book::{BIG, Book, DIRECTORIES, NAMES, SHARED, TAG, Unanswered};
use super::program::Program;
use crate::model::close;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

impl Program {
    /// On its own mount, after whatever happened.
    pub(super) fn settle(&mut self, what: &str) {
        let what = format!("{what}, program {}", self.setup.who);
        self.look_up_unanswered(&what);
        self.publish_elsewhere(&what);
        let root = self.setup.root.clone();
        self.check(&what, &root);
        self.repeat_cuts(&what);
        self.publish(&what);
        if self.setup.mix.is_wide() {
            self.mapped.settle(&what, &self.setup);
            self.linked.settle(&what, &self.setup.root);
        }
        if let Some(told) = &mut self.told {
            told.settle(&what, &self.setup);
        }
    }

    /// Somewhere else, when everything is published.
    pub(super) fn compare(&mut self, what: &str, root: &Path) {
        let what = format!("{what}, program {}", self.setup.who);
        let open: Vec<_> = self.book.files.iter().filter(|(_, f)| !f.is_published).collect();
        assert!(open.is_empty(), "{what}: settle first: {open:?}");
        self.check(&what, root);
        if self.setup.mix.is_wide() {
            self.mapped.check(&what, root);
            self.linked.check(&what, root);
        }
        if let Some(told) = &mut self.told {
            told.check(&what, root);
        }
    }

    fn check(&mut self, what: &str, root: &Path) {
        check_names(what, root, &self.book);
        let names: Vec<String> = self.book.files.keys().cloned().collect();
        for name in names {
            let path = self.book.path(root, &name);
            let _shown =
                ShowState { paths: [self.book.path(&self.setup.root, &name), path.clone()] };
            let got = std::fs::read(&path);
            let got = got.unwrap_or_else(|e| panic!("{what}: {}: {e}", path.display()));
            let layout = self.book.layout(&name);
            let own = layout.own(got, self.book.files[&name].expected.len());
            let known = self.book.files.get_mut(&name).expect("a name of the list");
            let what = format!("{what}: {}", path.display());
            known.expected.settle(&what, &own);
            known.in_doubt = false;
            let doubted = known.perm.is_doubted();
            known.perm.settle(&format!("{what}: permissions"), || permissions(&path));
            if doubted {
                set_again(&what, &path);
            }
            known.tag.settle(&format!("{what}: {TAG}"), || {
                tag(&path).unwrap_or_else(|e| panic!("{what}: {TAG}: {e}"))
            });
        }
        let big = self.book.path(root, BIG);
        if !self.big.is_empty() {
            self.big.settle(&format!("{what}: {}", big.display()), &big);
        }
    }

    /// What a killed daemon of the other node has left there, and what was not answered, comes now and
    /// not later.
    fn publish_elsewhere(&mut self, what: &str) {
        for (name, known) in &mut self.book.files {
            if std::mem::take(&mut known.in_doubt_elsewhere) {
                let path = self.setup.elsewhere.join(format!("p{}", self.setup.who)).join(name);
                publish_at(what, &path);
            }
        }
    }

    fn look_up_unanswered(&mut self, what: &str) {
        let Some(unanswered) = self.book.unanswered.take() else { return };
        let exists = |name: &str| {
            let path = self.book.path(&self.setup.root, name);
            match std::fs::symlink_metadata(&path) {
                Ok(_) => true,
                Err(e) if e.kind() == ErrorKind::NotFound => false,
                Err(e) => panic!("{what}: {}: {e}", path.display()),
            }
        };
        match unanswered {
            Unanswered::Create(name) if exists(&name) => {
                self.book.files.insert(name, super::book::Known::default());
            }
            Unanswered::Rename { from, to } if !exists(&from) => self.book.rename(&from, &to),
            Unanswered::Unlink(name) if !exists(&name) => {
                self.book.files.remove(&name);
            }
            Unanswered::Link(name) => {
                let link = self.book.link(&self.setup.root, &name);
                match std::fs::remove_file(&link) {
                    Err(e) if e.kind() == ErrorKind::NotFound => {}
                    done => done.unwrap_or_else(|e| panic!("{what}: {}: {e}", link.display())),
                }
            }
            Unanswered::MakeDirectory(name) if exists(&name) => {
                self.book.directories.insert(name);
            }
            Unanswered::RenameDirectory { from, to } if !exists(&from) => {
                self.book.directories.remove(&from);
                self.book.directories.insert(to);
            }
            Unanswered::RemoveDirectory(name) if !exists(&name) => {
                self.book.directories.remove(&name);
            }
            _ => {}
        }
    }

    /// As a program does whose truncate was not answered.
    fn repeat_cuts(&mut self, what: &str) {
        for (name, known) in &mut self.book.files {
            let Some(len) = known.expected.unanswered_cut() else { continue };
            let path = self.setup.root.join(format!("p{}", self.setup.who)).join(name);
            let cut = File::options().write(true).open(&path).and_then(|file| {
                file.set_len(len)?;
                close(file)
            });
            cut.unwrap_or_else(|e| panic!("{what}: truncate {}: {e}", path.display()));
            known.expected.acknowledge_cut(len);
        }
    }

    /// What a killed daemon has left, and was never published, other nodes need not see: publish
    /// it, so that all must agree.
    fn publish(&mut self, what: &str) {
        let names: Vec<String> = self.book.files.keys().cloned().collect();
        for name in names {
            publish_at(what, &self.book.path(&self.setup.root, &name));
            let known = self.book.files.get_mut(&name).expect("a name of the list");
            known.expected.acknowledge_all();
            known.is_published = true;
        }
        if !self.big.is_empty() {
            publish_at(what, &self.book.path(&self.setup.root, BIG));
            self.big.is_published = true;
        }
    }
}

pub(super) fn publish_at(what: &str, path: &Path) {
    let file = File::options().read(true).write(true).open(path);
    let done = file.and_then(|file| {
        file.sync_all()?;
        close(file)
    });
    done.unwrap_or_else(|e| panic!("{what}: publish {}: {e}", path.display()));
}

/// As a program does whose chmod was not answered, or failed: btrfs has been seen to change the mode and
/// to say EDQUOT, and whoever asks the service knows nothing of that.
fn set_again(what: &str, path: &Path) {
    let done =
        std::fs::metadata(path).and_then(|m| std::fs::set_permissions(path, m.permissions()));
    done.unwrap_or_else(|e| panic!("{what}: permissions once more: {e}"));
}

fn permissions(path: &Path) -> Option<u32> {
    Some(std::fs::metadata(path).ok()?.permissions().mode() & 0o7777)
}

/// The number in its extended attribute; `None` when it has none.
pub(super) fn tag(path: &Path) -> io::Result<Option<u64>> {
    let mut value = [0; 32];
    let len = match rustix::fs::getxattr(path, TAG, &mut value) {
        Err(rustix::io::Errno::NODATA) => return Ok(None),
        len => len?,
    };
    Ok(std::str::from_utf8(&value[..len]).ok().and_then(|text| text.parse().ok()))
}

/// No name is lost, and none is there that should not be.
fn check_names(what: &str, root: &Path, book: &Book) {
    let directory = root.join(book.directory());
    let mut found = BTreeSet::new();
    for (below, prefix) in [(directory.clone(), ""), (directory.join("s"), "s/")] {
        let list = match std::fs::read_dir(&below) {
            Err(e) if e.kind() == ErrorKind::NotFound && book.files.is_empty() => continue,
            list => list.unwrap_or_else(|e| panic!("{what}: {}: {e}", below.display())),
        };
        for entry in list {
            let entry = entry.unwrap_or_else(|e| panic!("{what}: {}: {e}", below.display()));
            found.insert(format!("{prefix}{}", entry.file_name().to_string_lossy()));
        }
    }
    found.remove("s");
    found.remove(BIG);
    let files = book.files.keys().filter(|n| *n != SHARED).cloned();
    let wanted: BTreeSet<String> = files.chain(book.directories.iter().cloned()).collect();
    let known = |n: &str| NAMES.contains(&n) || DIRECTORIES.contains(&n);
    assert!(wanted.iter().all(|n| known(n)), "{wanted:?}");
    for name in &book.directories {
        assert!(directory.join(name).is_dir(), "{what}: {name} is no directory any more");
    }
    assert_eq!(found, wanted, "{what}: names below {}", directory.display());
}

/// Shows what the nodes say of a file when it is found wrong.
struct ShowState {
    paths: [PathBuf; 2],
}

impl Drop for ShowState {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        for path in &self.paths {
            let mut state = vec![0; 4096];
            let read = rustix::fs::getxattr(path, "user.ebb.state", &mut state);
            state.truncate(read.unwrap_or(0));
            eprintln!("state of {}: {}", path.display(), String::from_utf8_lossy(&state));
        }
    }
}
