//! What the state directory of a service that is no more says to recoveries that go on without one: its
//! newest word of every name and inode that they may have to bring, as a service tells it to nodes
//! ([`crate::facts`]). Changes nothing in the directory.

use crate::facts::{SECOND_NODE, moment};
use crate::journal::{JournalError, Read, StateDir};
use crate::state::{self, State};
use ebb_namespace::Book;
use ebb_types::facts::{Bound, Facts};
use ebb_types::{FileKind, Ino, Name};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// A state that nobody serves.
#[derive(Debug)]
pub struct Remembered {
    job: u64,
    path: PathBuf,
    pub(crate) state: State,
}

impl Remembered {
    /// Reads a state directory; `None` when there is no journal in it.
    pub fn read(state_dir: &Path) -> Result<Option<Remembered>, JournalError> {
        let path = state_dir.join("journal");
        if !path.exists() {
            return Ok(None);
        }
        let dir = StateDir::take(state_dir)?;
        let Some(Read { job, bodies, .. }) = dir.read()? else { return Ok(None) };
        let state = state::replay(&bodies).map_err(|what| JournalError::Header { path, what })?;
        Ok(Some(Remembered { job, path: state_dir.to_owned(), state }))
    }

    /// No service begins on it any more: recoveries are going to do what it knows nothing of.
    pub fn set_aside(&self) -> Result<(), JournalError> {
        StateDir::take(&self.path)?.set_aside().map(drop)
    }

    /// The job.
    #[must_use]
    pub fn job(&self) -> u64 {
        self.job
    }

    /// Names of the nodes that have not left it.
    pub fn nodes(&self) -> impl Iterator<Item = &str> {
        self.state.nodes.values().map(|n| n.name.as_str())
    }

    /// What the backing lacks, how these inodes are, and what has become of what others have heard. The state
    /// knows where an inode is, not where it was: so that a name is not right any more is told of those in `heard`.
    #[must_use]
    pub fn facts(&self, heard: &Book, inos: &BTreeSet<Ino>) -> Facts {
        let mut told = Told::default();
        let dirty = self.state.files.iter().filter(|(_, f)| !f.is_clean()).map(|(ino, _)| *ino);
        self.state.ns.pending_after(None).chain(dirty).for_each(|ino| self.place(ino, &mut told));
        for facts in heard.facts() {
            for fact in &facts.names {
                let Some(bound) = fact.bound else { continue };
                if self.is_over(fact.parent, &fact.name, bound) {
                    told.names.insert((fact.parent, fact.name.clone()));
                }
                self.word_of(bound.ino, &mut told);
            }
            facts.inodes.iter().for_each(|fact| self.word_of(fact.ino, &mut told));
        }
        inos.iter().for_each(|ino| self.word_of(*ino, &mut told));
        self.tell(&told)
    }

    /// Of an inode that is known, or known to be gone.
    fn word_of(&self, ino: Ino, told: &mut Told) {
        if self.state.is_deleted(ino) {
            told.inos.insert(ino);
        } else {
            self.place(ino, told);
        }
    }

    /// All names of an inode, and the directories that they are in.
    fn place(&self, ino: Ino, told: &mut Told) {
        let mut next = vec![ino];
        while let Some(ino) = next.pop() {
            let Some(inode) = self.state.ns.get(ino) else { continue };
            if told.inos.insert(ino) {
                told.names.extend(inode.links.iter().map(|l| (l.parent, l.name.clone())));
                next.extend(inode.links.iter().map(|l| l.parent));
            }
        }
    }

    /// True for a name that was this inode's and is not any more. Of a file that is on the backing not all
    /// names need be known here.
    fn is_over(&self, parent: Ino, name: &Name, bound: Bound) -> bool {
        let ns = &self.state.ns;
        let Some(inode) = ns.get(bound.ino) else { return self.state.is_deleted(bound.ino) };
        let all_known = !bound.placed || inode.kind == FileKind::Directory;
        all_known && !inode.links.iter().any(|l| l.parent == parent && l.name == *name)
    }

    fn tell(&self, told: &Told) -> Facts {
        let (state, ns) = (&self.state, &self.state.ns);
        let at = moment(&state.lineage);
        let size =
            |ino: &Ino| state.files.get(ino).map_or((0, false), |f| (f.size(), f.is_zeros()));
        let xattrs = told.inos.iter().filter_map(|ino| Some((*ino, ns.get(*ino)?)));
        Facts {
            settled: 0,
            shared: state.next_node() > SECOND_NODE,
            nodes: u32::try_from(state.nodes.len()).unwrap_or(u32::MAX),
            lives: state.lives(),
            names: told.names.iter().map(|(p, n)| ns.name_fact(at, *p, n)).collect(),
            inodes: told.inos.iter().map(|ino| ns.inode_fact(at, *ino, size(ino))).collect(),
            xattrs: xattrs
                .flat_map(|(ino, i)| i.xattrs.keys().map(move |n| ns.xattr_fact(at, ino, n)))
                .collect(),
        }
    }
}

/// What is told of.
#[derive(Debug, Default)]
struct Told {
    names: BTreeSet<(Ino, Name)>,
    inos: BTreeSet<Ino>,
}
