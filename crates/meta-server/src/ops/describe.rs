//! Where an inode is in the mount, and which model its directory asks for.

use super::coupling::couple_text;
use super::{Call, OpError, OpResult};
use crate::state::{Entry, Outcome, State};
use ebb_types::{Errno, FileKind, Ino};
use ebb_wire::pb;
use ebb_wire::pb::reply::Body;

/// The attribute of a directory that names the model of everything below it.
const MODEL: &[u8] = b"user.ebb.consistency";

/// Names of models are short words.
const MODEL_BYTES_MAX: usize = 64;

/// True for the attribute that is kept here and not with the file.
pub(super) fn is_model(name: &[u8]) -> bool {
    name == MODEL
}

/// Where `ino` is.
pub(super) fn place(state: &State, ino: Ino) -> pb::Description {
    let path = state.ns.path(ino).map(|p| p.to_bytes()).unwrap_or_default();
    let (model, couple) = (model_above(state, ino).unwrap_or_default(), couple_text(state, ino));
    pb::Description { path, model, couple }
}

fn model_above(state: &State, ino: Ino) -> Option<String> {
    if state.models.is_empty() {
        return None;
    }
    let mut at = ino;
    loop {
        if let Some(model) = state.models.get(&at) {
            return Some(model.clone());
        }
        if at == Ino::ROOT {
            return None;
        }
        at = state.ns.get(at)?.links.first()?.parent;
    }
}

impl Call {
    pub(super) fn exists(&self, op: &pb::Exists) -> OpResult {
        use pb::existence::What;
        let state = self.core.state();
        let ino = Ino(op.ino);
        let what = match state.ns.get(ino) {
            Some(_) => What::There,
            // Forgotten, and found when it is asked for.
            None if state.ns.place(ino).is_some() => What::There,
            None if state.is_deleted(ino) => What::Deleted,
            None => What::Unknown,
        };
        Ok(Some(Body::Existence(pb::Existence { what: what.into() })))
    }

    pub(super) fn describe(&self, op: &pb::Describe) -> OpResult {
        let state = self.core.state();
        state.ns.inode(Ino(op.ino))?;
        Ok(Some(Body::Description(place(&state, Ino(op.ino)))))
    }

    /// Chooses the model of a directory (the nodes know which names there are), or takes the
    /// choice back.
    pub(super) fn choose_model(&self, ino: Ino, value: Option<&[u8]>) -> OpResult {
        let wrong = |text: &str| OpError::new(Errno::EINVAL, text);
        let model = match value {
            None => None,
            Some(v) if v.len() > MODEL_BYTES_MAX => return Err(wrong("no model has such a name")),
            Some(v) => Some(std::str::from_utf8(v).map_err(|_| wrong("not a name"))?.to_owned()),
        };
        let mut state = self.core.state();
        if state.ns.inode(ino)?.kind != FileKind::Directory {
            return Err(Errno::ENOTDIR.into());
        }
        if model.is_none() && !state.models.contains_key(&ino) {
            return Err(Errno::ENODATA.into());
        }
        let entries = [Entry::Model(ino, model), self.answered(Outcome::Plain)];
        self.core.commit(&mut state, &entries);
        Ok(None)
    }
}
