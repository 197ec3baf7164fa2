//! Which directories couple their files, and where these stand.

use super::Entry;
use ebb_coupling::{Coupled, State, Step, Terms, User};
use ebb_types::{Ino, NodeId};
use std::collections::{BTreeMap, BTreeSet};

/// Coupled directories and files.
#[derive(Clone, Debug, Default)]
pub struct Couplings {
    dirs: BTreeMap<Ino, Terms>,
    files: BTreeMap<Ino, Coupled>,
    /// Files that all have read, and whose names are to be removed.
    to_go: BTreeSet<Ino>,
}

impl Couplings {
    pub(super) fn set(&mut self, dir: Ino, terms: Option<Terms>) {
        match terms {
            Some(terms) => drop(self.dirs.insert(dir, terms)),
            None => drop(self.dirs.remove(&dir)),
        }
    }

    pub(super) fn put(&mut self, ino: Ino, file: Option<Coupled>) {
        match file {
            Some(file) => drop(self.files.insert(ino, file)),
            None => drop(self.files.remove(&ino)),
        }
        self.look(ino);
    }

    pub(super) fn step(&mut self, ino: Ino, step: Step) {
        if let Some(file) = self.files.get_mut(&ino) {
            file.apply(step);
            self.look(ino);
        }
    }

    pub(super) fn forget(&mut self, ino: Ino) {
        self.dirs.remove(&ino);
        self.files.remove(&ino);
        self.to_go.remove(&ino);
    }

    fn look(&mut self, ino: Ino) {
        match self.files.get(&ino).is_some_and(Coupled::is_to_go) {
            true => self.to_go.insert(ino),
            false => self.to_go.remove(&ino),
        };
    }

    /// True when no directory couples its files.
    #[must_use]
    pub fn no_dirs(&self) -> bool {
        self.dirs.is_empty()
    }

    /// What this directory itself says.
    #[must_use]
    pub fn of_dir(&self, dir: Ino) -> Option<&Terms> {
        self.dirs.get(&dir)
    }

    /// A coupled file.
    #[must_use]
    pub fn file(&self, ino: Ino) -> Option<&Coupled> {
        self.files.get(&ino)
    }

    /// True when nothing is to be known of it: what is found again is a plain file.
    #[must_use]
    pub fn may_forget(&self, ino: Ino) -> bool {
        !self.dirs.contains_key(&ino) && self.files.get(&ino).is_none_or(Coupled::is_over)
    }

    /// True when all have read it, and its names are being removed.
    #[must_use]
    pub fn is_to_go(&self, ino: Ino) -> bool {
        self.to_go.contains(&ino)
    }

    /// How many files are coupled.
    #[must_use]
    pub fn len(&self) -> usize {
        self.files.len()
    }

    /// Files of which producers died.
    pub fn lost(&self) -> impl Iterator<Item = (Ino, NodeId)> + '_ {
        self.files.iter().filter_map(|(ino, file)| match file.state() {
            State::Lost(node) => Some((*ino, node)),
            _ => None,
        })
    }

    /// Files whose names are to be removed.
    #[must_use]
    pub fn to_go(&self) -> Vec<Ino> {
        self.to_go.iter().copied().collect()
    }

    /// Who writes or reads any of them at this node.
    #[must_use]
    pub fn users_at(&self, node: NodeId) -> Vec<(Ino, User)> {
        let of_file = |(ino, file): (&Ino, &Coupled)| {
            file.users_at(node).map(|user| (*ino, user)).collect::<Vec<_>>()
        };
        self.files.iter().flat_map(of_file).collect()
    }

    /// As entries.
    pub(super) fn all(&self) -> Vec<Entry> {
        let dirs = self.dirs.iter().map(|(ino, terms)| Entry::Couples(*ino, Some(*terms)));
        let files =
            self.files.iter().map(|(ino, file)| Entry::Coupled(*ino, Some(Box::new(file.clone()))));
        dirs.chain(files).collect()
    }
}
