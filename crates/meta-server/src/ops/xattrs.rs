//! Extended attributes.

use super::{Call, OpResult};
use crate::state::{Outcome, State};
use ebb_namespace::{XattrMode, XattrSource};
use ebb_types::{Errno, Ino, Time};
use ebb_wire::pb;
use ebb_wire::pb::reply::Body;

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
                self.core.backing.run(move |b| b.list_xattr(&path)).await?
            }
        };
        Ok(Some(Body::XattrNames(pb::XattrNames { names })))
    }

    pub(super) async fn set_xattr(&self, op: &pb::SetXattr) -> OpResult {
        let mode = mode(op.flags)?;
        let plan = |state: &State| {
            state.ns.plan_set_xattr(Ino(op.ino), &op.name, &op.value, mode, Time::now())
        };
        self.core.change(&[], plan, |_| vec![self.answered(Outcome::Plain)]).await?;
        Ok(None)
    }

    pub(super) async fn remove_xattr(&self, op: &pb::RemoveXattr) -> OpResult {
        let plan = |state: &State| state.ns.plan_remove_xattr(Ino(op.ino), &op.name, Time::now());
        self.core.change(&[], plan, |_| vec![self.answered(Outcome::Plain)]).await?;
        Ok(None)
    }
}
