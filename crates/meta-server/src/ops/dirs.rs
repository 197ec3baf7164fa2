//! readdir, page by page.

use super::{Call, OpResult};
use ebb_types::{Ino, Name};
use ebb_wire::pb;
use ebb_wire::pb::reply::Body;

/// Names to a page, when the node does not say, and at most.
const PAGE: u32 = 1024;
const PAGE_MAX: u32 = 8192;

impl Call {
    pub(super) async fn read_dir(&self, op: &pb::ReadDir) -> OpResult {
        let dir = Ino(op.ino);
        let after = match &op.after[..] {
            b"" => None,
            name => Some(Name::new(name)?),
        };
        // The first page looks at the backing; the others go on with what it learned, as far as
        // nothing of it was forgotten.
        if after.is_none() || !self.core.state().ns.is_listed(dir) {
            self.core.learn_all(dir).await?;
        }
        let limit = if op.limit == 0 { PAGE } else { op.limit.min(PAGE_MAX) } as usize;
        let state = self.core.state();
        let mut entries = state.ns.entries_after(dir, after.as_ref())?;
        let page = entries.by_ref().take(limit);
        let item = |(name, ino): (&Name, Ino)| {
            let attr = ebb_wire::attr_to_pb(&state.attr(ino).ok()?);
            Some(pb::DirItem { name: name.as_bytes().to_vec(), attr: Some(attr) })
        };
        let items: Vec<_> = page.filter_map(|(n, d)| item((n, d.ino))).collect();
        let end = entries.next().is_none();
        let parent = state.ns.parent(dir)?.0;
        Ok(Some(Body::DirPage(pb::DirPage { items, end, parent, lease: None })))
    }
}
