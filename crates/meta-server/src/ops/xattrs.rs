//! Extended attributes.

use super::{Call, OpResult};
use crate::state::{Outcome, State};
use ebb_namespace::{XattrMode, XattrSource};
use ebb_types::{Errno, Ino, Time};
use ebb_wire::pb;
use ebb_wire::pb::reply::Body;

/// So often an attribute is tried on the backing while others of the same file come and go.
const TRIALS: usize = 16;

fn bytes(data: Vec<u8>) -> OpResult {
    Ok(Some(Body::Bytes(pb::Bytes { data })))
}

fn mode(flags: u32) -> Result<XattrMode, Errno> {
    match i32::try_from(flags) {
        Ok(0) => Ok(XattrMode::Either),
        Ok(libc::XATTR_CREATE) => Ok(XattrMode::Create),
        Ok(libc::XATTR_REPLACE) => Ok(XattrMode::Replace),
        _ => Err(Errno::EINVAL),
    }
}

impl Call {
    pub(super) fn get_xattr_fast(&self, op: &pb::GetXattr) -> Option<OpResult> {
        match self.core.state().ns.xattr(Ino(op.ino), &op.name) {
            Err(e) => Some(Err(e.into())),
            Ok(XattrSource::Here(value)) => Some(bytes(value.to_vec())),
            Ok(XattrSource::Backing(_)) => None,
        }
    }

    pub(super) async fn get_xattr(&self, op: &pb::GetXattr) -> OpResult {
        let path = match self.core.state().ns.xattr(Ino(op.ino), &op.name)? {
            XattrSource::Here(value) => return bytes(value.to_vec()),
            XattrSource::Backing(path) => path,
        };
        let name = op.name.clone();
        bytes(self.core.backing.run(move |b| b.get_xattr(&path, &name)).await?)
    }

    pub(super) async fn list_xattr(&self, op: &pb::ListXattr) -> OpResult {
        let source = self.core.state().ns.xattr_names(Ino(op.ino))?;
        let names = match source {
            XattrSource::Here(names) => names.into_iter().map(Vec::from).collect(),
            XattrSource::Backing(path) => {
                let mut names = self.core.backing.run(move |b| b.list_xattr(&path)).await?;
                let kept = self.core.state().ns.xattrs_kept(Ino(op.ino));
                names.extend(kept.into_iter().map(Vec::from));
                names
            }
        };
        Ok(Some(Body::XattrNames(pb::XattrNames { names })))
    }

    pub(super) async fn set_xattr(&self, op: &pb::SetXattr) -> OpResult {
        let mode = mode(op.flags)?;
        let ino = Ino(op.ino);
        let planned =
            |state: &State| state.ns.plan_set_xattr(ino, &op.name, &op.value, mode, Time::now());
        let trial_of = |state: &State| state.ns.xattr_trial(ino, &op.name, &op.value);
        for _ in 0..TRIALS {
            let trial = {
                let state = self.core.state();
                // What is wrong with the request itself needs no trial.
                planned(&state)?;
                trial_of(&state)
            };
            if let Some(trial) = trial.clone() {
                self.core.backing.run(move |b| b.try_xattrs(&trial)).await?;
            }
            // Another one may have come meanwhile, or the file got to the backing.
            let plan = |state: &State| match trial_of(state) == trial {
                true => planned(state),
                false => Err(Errno::EAGAIN),
            };
            match self.core.change(&[], plan, |_| vec![self.answered(Outcome::Plain)]).await {
                Err(Errno::EAGAIN) => {}
                other => return Ok(other.map(|_| None)?),
            }
        }
        Err(Errno::EAGAIN.into())
    }

    pub(super) async fn remove_xattr(&self, op: &pb::RemoveXattr) -> OpResult {
        let plan = |state: &State| state.ns.plan_remove_xattr(Ino(op.ino), &op.name, Time::now());
        self.core.change(&[], plan, |_| vec![self.answered(Outcome::Plain)]).await?;
        Ok(None)
    }
}
