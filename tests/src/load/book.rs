//! What a program knows of its files: names, contents, and the one operation that was not
//! answered.

use super::Layout;
use crate::crash::Expected;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::{Path, PathBuf};

/// One file.
#[derive(Debug, Default)]
pub(super) struct Known {
    pub expected: Expected,
    /// Everything in it is where the model shows it to other nodes.
    pub is_published: bool,
    /// A write or a truncate has failed: some of it may be done, and no sync event vouches for it.
    pub in_doubt: bool,
    /// What failed was done on the other node: it may still come from there.
    pub in_doubt_elsewhere: bool,
    /// Some of it was written there.
    pub was_elsewhere: bool,
    pub open: Option<Open>,
    /// Its permissions, and a number in an extended attribute, where they were set.
    pub perm: Doubtful<u32>,
    pub tag: Doubtful<u64>,
}

/// A value that was set: what was answered for, and what was tried since.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Doubtful<T> {
    certain: Option<T>,
    tried: Option<T>,
}

impl<T: Copy + PartialEq + std::fmt::Debug> Doubtful<T> {
    pub fn try_to_set(&mut self, value: T) {
        self.tried = Some(value);
    }

    pub fn was_set(&mut self) {
        self.certain = self.tried.take().or(self.certain);
    }

    /// It was tried, and not answered for.
    pub fn is_doubted(&self) -> bool {
        self.tried.is_some()
    }

    /// It is there: from now on that is so. Nobody asks for what was never set.
    pub fn settle(&mut self, what: &str, there: impl FnOnce() -> Option<T>) {
        if self.certain.is_none() && self.tried.is_none() {
            return;
        }
        let there = there();
        let right = there == self.certain || (there.is_some() && there == self.tried);
        // What nobody has answered for may be as it was before it was set the first time.
        assert!(right || self.certain.is_none(), "{what}: {there:?}, and not {self:?}");
        let is_ours = there == self.certain || there == self.tried;
        *self = Doubtful { certain: there.filter(|_| is_ours), tried: None };
    }
}

impl Known {
    /// A sync event succeeded.
    pub fn acknowledge(&mut self) {
        if !self.in_doubt {
            self.expected.acknowledge_all();
        }
    }
}

/// A file that is open.
#[derive(Debug)]
pub(super) struct Open {
    pub file: File,
    pub appends: bool,
}

/// An operation on names that failed: the service may have carried it out all the same.
#[derive(Clone, Debug)]
pub(super) enum Unanswered {
    Create(String),
    Rename {
        from: String,
        to: String,
    },
    Unlink(String),
    /// A second name of the file, for a moment.
    Link(String),
    MakeDirectory(String),
    RenameDirectory {
        from: String,
        to: String,
    },
    RemoveDirectory(String),
}

/// All files of a program.
#[derive(Debug)]
pub(super) struct Book {
    who: u64,
    of: u64,
    pub files: BTreeMap<String, Known>,
    /// Empty ones, that come and go.
    pub directories: BTreeSet<String>,
    pub unanswered: Option<Unanswered>,
}

/// The file that all programs write, each its own records.
pub(super) const SHARED: &str = "shared";
/// Where that is: a directory that is not below the mount when the daemon is gone just now.
pub(super) const COMMON: &str = "all";
/// The large file of a program, in its own directory.
pub(super) const BIG: &str = "big";
/// Names of the files that a program has for itself, below a directory of its own.
pub(super) const NAMES: [&str; 6] = ["a", "b", "c", "s/a", "s/b", "s/c"];
/// And of its empty directories.
pub(super) const DIRECTORIES: [&str; 4] = ["d", "e", "s/d", "s/e"];
/// An extended attribute of its files.
pub(super) const TAG: &str = "user.tag";

impl Book {
    pub fn new(who: u64, of: u64) -> Book {
        Book { who, of, files: BTreeMap::new(), directories: BTreeSet::new(), unanswered: None }
    }

    pub fn directory(&self) -> String {
        format!("p{}", self.who)
    }

    pub fn path(&self, root: &Path, name: &str) -> PathBuf {
        match name {
            SHARED => root.join(COMMON).join(SHARED),
            _ => root.join(self.directory()).join(name),
        }
    }

    pub fn layout(&self, name: &str) -> Layout {
        match name {
            SHARED => Layout { who: self.who, of: self.of },
            _ => Layout::WHOLE,
        }
    }

    /// The second name of a file.
    pub fn link(&self, root: &Path, name: &str) -> PathBuf {
        let mut path = self.path(root, name).into_os_string();
        path.push(".l");
        path.into()
    }

    /// The file gets another name, in place of what has it.
    pub fn rename(&mut self, from: &str, to: &str) {
        let file = self.files.remove(from).expect("only known files are renamed");
        self.files.insert(to.to_owned(), file);
    }
}
