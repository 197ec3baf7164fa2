//! What a program knows of its files: names, contents, and the one operation that was not
//! answered.

use super::Layout;
use crate::crash::Expected;
use std::collections::BTreeMap;
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
    Rename { from: String, to: String },
    Unlink(String),
}

/// All files of a program.
#[derive(Debug)]
pub(super) struct Book {
    who: u64,
    of: u64,
    pub files: BTreeMap<String, Known>,
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

impl Book {
    pub fn new(who: u64, of: u64) -> Book {
        Book { who, of, files: BTreeMap::new(), unanswered: None }
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

    /// The file gets another name, in place of what has it.
    pub fn rename(&mut self, from: &str, to: &str) {
        let file = self.files.remove(from).expect("only known files are renamed");
        self.files.insert(to.to_owned(), file);
    }
}
