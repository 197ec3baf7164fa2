//! Changes of the backing that the service died of. The step of a request that leads to its answer is
//! noted before its first effect; when the note is all that is left of it, the backing tells how
//! far it came, and it is finished, so that whoever asks again hears what he would have heard then.
//!
//! Consistency: changes of names take turns, so there is one note at most. It is *written* before
//! the first effect (it survives the service, not the machine: see docs/journal.md).
//! Retries: a change of which nothing is done yet, or nothing that shows, is forgotten; asked again,
//! it begins anew. So is one about which the backing cannot be asked at the start.
//! Crash consistency: finishing is done at start and can be interrupted: the note stays until what
//! it says is in the state.

use crate::core::Core;
use crate::state::{Entry, Outcome};
use ebb_namespace::{BackingKey, BackingPath, Effect, Known, Record, Replace, Step, XattrMode};
use ebb_types::{Errno, NodeId};
use serde::{Deserialize, Serialize};

/// A step of a change, noted before it is carried out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Begun {
    /// What is to be done, and what is true then.
    pub step: Step,
    /// Whose request it is, its number, and its answer.
    pub answered: (NodeId, u64, Outcome),
}

/// What the backing tells about an effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sign {
    Done,
    NotDone,
    /// It can be done again, whether it was done or not, and ends in the same way.
    Repeatable,
}

impl Core {
    /// Finishes what the service before this one had begun.
    pub(super) fn finish_begun(&self) {
        let Some(begun) = self.state().begun.clone() else { return };
        let mut with = vec![Entry::Ended];
        let mut records = Vec::new();
        match self.redo(&begun.step) {
            Ok(Some(seen)) => {
                tracing::info!(effects = ?begun.step.effects, "finished what was begun");
                records = begun.step.records;
                records.extend(seen);
                let (node, id, outcome) = begun.answered;
                with.push(Entry::Answered(node, id, outcome));
            }
            Ok(None) => {}
            // It is looked at again when somebody asks for these names.
            Err(error) => {
                let effects = &begun.step.effects;
                tracing::warn!(?error, ?effects, "cannot finish what was begun");
            }
        }
        self.commit_ns_with(&mut self.state(), records, with);
    }

    /// Carries out what is left of a step; what its objects look like then. `None`: nothing of it
    /// had been done.
    fn redo(&self, step: &Step) -> Result<Option<Vec<Record>>, Errno> {
        let known = self.state().ns.known_objects(&step.effects);
        let signs = step.effects.iter().map(|e| self.sign(step, e, &known));
        let signs = signs.collect::<Result<Vec<Sign>, Errno>>()?;
        if !signs.contains(&Sign::Done) {
            return Ok(None);
        }
        for (effect, sign) in step.effects.iter().zip(signs) {
            if sign != Sign::Done {
                self.backing.effect(effect, &known)?;
            }
        }
        Ok(Some(self.backing.look_at(&step.restat)))
    }

    fn sign(&self, step: &Step, effect: &Effect, known: &Known) -> Result<Sign, Errno> {
        let done = match effect {
            // It may never have been there, so that it is not there says nothing.
            Effect::Unlink { path } if effect.clears() && !known.contains_key(path) => {
                return Ok(Sign::Repeatable);
            }
            Effect::Rmdir { path } | Effect::Unlink { path } => self.key(path)?.is_none(),
            Effect::Link { from, to } => {
                let there = self.key(to)?;
                // A later effect may have taken the old name away.
                let wanted =
                    self.known(step, to).map_or_else(|| self.key(from), |k| Ok(Some(k)))?;
                there.is_some() && there == wanted
            }
            Effect::Rename { from, to, replace } => self.is_moved(step, from, to, *replace)?,
            Effect::RemoveXattr { path, name } => {
                self.backing.get_xattr(path, name).err() == Some(Errno::ENODATA)
            }
            Effect::SetXattr { path, name, value, mode: XattrMode::Create } => {
                self.backing.get_xattr(path, name).is_ok_and(|v| v == **value)
            }
            _ => return Ok(Sign::Repeatable),
        };
        Ok(if done { Sign::Done } else { Sign::NotDone })
    }

    /// True when the object that is to move is under its new name, and not under the old one.
    fn is_moved(
        &self,
        step: &Step,
        from: &BackingPath,
        to: &BackingPath,
        replace: Replace,
    ) -> Result<bool, Errno> {
        let (left, there) = (self.key(from)?, self.key(to)?);
        Ok(match (self.known(step, to), replace) {
            (Some(moved), _) => there == Some(moved) && left != there,
            // Nothing is known of it, but that it was there.
            (None, Replace::Yes | Replace::No) => left.is_none() && there.is_some(),
            (None, Replace::Exchange) => false,
        })
    }

    /// Which object is to be at a path after a step, if it was seen before.
    fn known(&self, step: &Step, path: &BackingPath) -> Option<BackingKey> {
        let ino = step.restat.iter().find(|r| r.path == *path)?.ino;
        self.state().ns.get(ino)?.seen.map(|s| s.key)
    }

    /// What is at a path now; nothing also when the way there is gone.
    fn key(&self, path: &BackingPath) -> Result<Option<BackingKey>, Errno> {
        match self.backing.stat(path) {
            Ok(found) => Ok(Some(found.seen.key)),
            Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP) => Ok(None),
            Err(e) => Err(e),
        }
    }
}
