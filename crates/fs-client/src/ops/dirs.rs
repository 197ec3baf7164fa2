//! Listing directories: taken whole when reading begins, so that positions stay meaningful while
//! entries come and go.

use crate::handles::{DirHandle, DirItem};
use crate::node::Node;
use crate::virtual_files;
use ebb_types::{Errno, Ino};
use std::sync::Arc;

/// Entries asked for at once.
const PAGE: u32 = 2048;

impl Node {
    /// The listing of a directory; taken anew at position 0.
    pub async fn list(&self, dir: &DirHandle, position: u64) -> Result<Arc<Vec<DirItem>>, Errno> {
        let mut listing = dir.listing.lock().await;
        if position > 0
            && let Some(known) = &*listing
        {
            return Ok(Arc::clone(known));
        }
        let fresh = Arc::new(self.list_all(dir.ino).await?);
        *listing = Some(Arc::clone(&fresh));
        Ok(fresh)
    }

    async fn list_all(&self, ino: Ino) -> Result<Vec<DirItem>, Errno> {
        if virtual_files::is_virtual(ino) {
            return self.list_virtual(ino).await;
        }
        let own = self.getattr(ino).await?;
        let mut items = vec![DirItem { name: b".".to_vec(), attr: own }];
        let mut after = None;
        loop {
            let page = self.meta.readdir(ino, after.as_ref(), PAGE).await?;
            if items.len() == 1 {
                let parent = ebb_types::Attr { ino: page.parent, ..own };
                items.push(DirItem { name: b"..".to_vec(), attr: parent });
            }
            after = page.entries.last().map(|e| e.name.clone());
            items.extend(
                page.entries
                    .into_iter()
                    .map(|e| DirItem { name: e.name.as_bytes().to_vec(), attr: self.seen(e.attr) }),
            );
            if page.end {
                return Ok(items);
            }
        }
    }

    async fn list_virtual(&self, ino: Ino) -> Result<Vec<DirItem>, Errno> {
        let own = virtual_files::getattr(ino).ok_or(Errno::ENOTDIR)?;
        let above = self.getattr(Ino::ROOT).await?;
        let dots = [(&b"."[..], own), (&b".."[..], above)];
        let all = dots.into_iter().chain(virtual_files::listing());
        Ok(all.map(|(name, attr)| DirItem { name: name.to_vec(), attr }).collect())
    }
}
