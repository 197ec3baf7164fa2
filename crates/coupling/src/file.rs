//! One coupled file.

use crate::terms::{Keep, Terms};
use ebb_types::NodeId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// One open of a file: a number that its node chose, the same when the open is asked for again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct User {
    /// Where.
    pub node: NodeId,
    /// Which.
    pub handle: u64,
}

/// What happens to a coupled file. Done twice it is as done once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Step {
    /// Somebody opens it to write.
    Produces(User),
    /// Somebody opens it to read.
    Consumes(User),
    /// Somebody is through with it: true; or died before.
    Leaves(User, bool),
    /// An open of somebody came to nothing.
    Withdraws(User),
    /// An open truncates it: everything is written anew. Who reads what was there does not count.
    Anew,
    /// Who has it open says of how many producers, or consumers, it is one.
    Joins(User, u32),
}

/// Why somebody is not one of so many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotOne {
    /// So many have produced it, or are at it.
    IsProduced,
    /// So many have consumed it, or are at it.
    IsConsumed,
    /// It is lost.
    IsLost,
    /// There are more, as the directory or another one has said.
    AreMore,
    /// It was begun anew since, or the open came to nothing.
    IsNotThere,
}

/// Where a file stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Producers are missing, or are writing.
    Awaited,
    /// It can be read.
    Ready,
    /// A producer at this node died while it wrote.
    Lost(NodeId),
    /// All have read it.
    Consumed,
}

/// One coupled file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Coupled {
    terms: Terms,
    writing: BTreeSet<User>,
    /// Who was writing when a lost file was begun anew: it is not ready before they are gone, and they do not
    /// count.
    stale: BTreeSet<User>,
    reading: BTreeSet<User>,
    produced: u32,
    consumed: u32,
    lost: Option<NodeId>,
    /// The nodes that had it open so far.
    parties: BTreeSet<NodeId>,
}

impl Coupled {
    /// A file that was just made.
    #[must_use]
    pub fn new(terms: Terms) -> Coupled {
        let (writing, stale, reading, parties) = Default::default();
        let (produced, consumed, lost) = (0, 0, None);
        Coupled { terms, writing, stale, reading, produced, consumed, lost, parties }
    }

    /// How it is handed on.
    #[must_use]
    pub fn terms(&self) -> &Terms {
        &self.terms
    }

    /// Where it stands.
    #[must_use]
    pub fn state(&self) -> State {
        if let Some(node) = self.lost {
            return State::Lost(node);
        }
        let is_written = !self.writing.is_empty() || !self.stale.is_empty();
        if is_written || self.produced < self.terms.producers {
            return State::Awaited;
        }
        match self.reading.is_empty() && self.consumed >= self.terms.consumers {
            true => State::Consumed,
            false => State::Ready,
        }
    }

    /// A file of which nobody knows any more how much is missing.
    #[must_use]
    pub fn unknown(node: NodeId) -> Coupled {
        let wait = std::time::Duration::from_secs(30);
        let terms = Terms { producers: 1, consumers: 1, keep: Keep::Pfs, wait };
        Coupled { lost: Some(node), ..Coupled::new(terms) }
    }

    /// All have read it, and it stays: there is nothing more to be known of it.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.terms.keep == Keep::Pfs && self.state() == State::Consumed
    }

    /// All have read it, and nobody wants it on the backing.
    #[must_use]
    pub fn is_to_go(&self) -> bool {
        self.terms.keep == Keep::None && self.state() == State::Consumed
    }

    /// The nodes that had it open so far.
    pub fn parties(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.parties.iter().copied()
    }

    /// Who writes or reads it at this node.
    pub fn users_at(&self, node: NodeId) -> impl Iterator<Item = User> + '_ {
        let all = self.writing.iter().chain(&self.stale).chain(&self.reading);
        all.copied().filter(move |user| user.node == node)
    }

    /// Whether somebody who has it open can be one of so many; 0: of as many as are known.
    ///
    /// # Errors
    /// When there are as many without it, when it was said that there are more, and where nobody can be one of any.
    pub fn may_join(&self, user: User, of: u32) -> Result<(), NotOne> {
        let (known, through, open, full) = if self.writing.contains(&user) {
            (self.terms.producers, self.produced, &self.writing, NotOne::IsProduced)
        } else if self.reading.contains(&user) {
            (self.terms.consumers, self.consumed, &self.reading, NotOne::IsConsumed)
        } else {
            return Err(NotOne::IsNotThere);
        };
        if full == NotOne::IsProduced && self.lost.is_some() {
            return Err(NotOne::IsLost);
        }
        let of = if of == 0 { known } else { of };
        // What all have produced is not taken back by who says that there are more.
        if through >= known || u64::from(through) + open.len() as u64 > u64::from(of) {
            return Err(full);
        }
        if of < known { Err(NotOne::AreMore) } else { Ok(()) }
    }

    /// True when that open counts.
    #[must_use]
    pub fn has(&self, user: User) -> bool {
        self.writing.contains(&user) || self.reading.contains(&user)
    }

    /// Takes a step.
    pub fn apply(&mut self, step: Step) {
        match step {
            Step::Produces(user) => {
                self.writing.insert(user);
                self.parties.insert(user.node);
            }
            Step::Consumes(user) => {
                self.reading.insert(user);
                self.parties.insert(user.node);
            }
            Step::Withdraws(user) => {
                self.writing.remove(&user);
                self.stale.remove(&user);
                self.reading.remove(&user);
            }
            Step::Leaves(user, through) => {
                self.stale.remove(&user);
                if self.writing.remove(&user) {
                    match through {
                        true => self.produced = self.produced.saturating_add(1),
                        false => self.lost = Some(user.node),
                    }
                }
                if self.reading.remove(&user) && through {
                    self.consumed = self.consumed.saturating_add(1);
                }
            }
            Step::Anew => {
                if self.lost.is_some() {
                    self.stale.append(&mut self.writing);
                }
                self.reading.clear();
                (self.produced, self.consumed, self.lost) = (0, 0, None);
            }
            Step::Joins(user, of) => {
                if self.writing.contains(&user) {
                    self.terms.producers = of;
                } else if self.reading.contains(&user) {
                    self.terms.consumers = of;
                }
            }
        }
    }

    /// For people.
    #[must_use]
    pub fn describe(&self) -> String {
        let Coupled { terms, produced, consumed, .. } = self;
        let state = match self.state() {
            State::Awaited => "awaited".to_owned(),
            State::Ready => "ready".to_owned(),
            State::Lost(node) => format!("lost (a producer at node {} died)", node.0),
            State::Consumed => "consumed".to_owned(),
        };
        let (writing, reading) = (self.writing.len() + self.stale.len(), self.reading.len());
        format!(
            "{state}: {produced} of {} producers through, {writing} writing; {consumed} of {} \
             consumers through, {reading} reading",
            terms.producers, terms.consumers
        )
    }
}
