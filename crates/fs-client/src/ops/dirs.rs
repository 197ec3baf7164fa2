//! Listing directories: taken whole when reading begins, so that positions stay meaningful while
//! entries come and go.

use crate::handles::{DirHandle, DirItem};
use crate::node::Node;
use ebb_types::{Errno, Ino};
use std::sync::Arc;

/// Entries asked for at once.
const PAGE: u32 = 2048;

impl Node {
    /// The listing of a directory; taken anew at position 0.
    pub async fn list(&self, dir: &DirHandle, position: u64) -> Result<Arc<Vec<DirItem>>, Errno> {
        let mut listing = dir.listing.lock().await;
        if position > 0 && let Some(known) = &*listing {
            return Ok(Arc::clone(known));
        }
        let fresh = Arc::new(self.list_all(dir.ino).await?);
        *listing = Some(Arc::clone(&fresh));
        Ok(fresh)
    }

    async fn list_all(&self, ino: Ino) -> Result<Vec<DirItem>, Errno> {
        let own = self.getattr(ino).await?;
        let mut items = vec![DirItem { name: b".".to_vec(), attr: own }];
        let mut after = Vec::new();
        loop {
            let page = self.meta.read_dir(ino, &after, PAGE).await?;
            if items.len() == 1 {
                let parent = ebb_types::Attr { ino: page.parent, ..own };
                items.push(DirItem { name: b"..".to_vec(), attr: parent });
            }
            if let Some((last, _)) = page.items.last() {
                after.clone_from(last);
            }
            let empty = page.items.is_empty();
            items.extend(page.items.into_iter().map(|(name, attr)| DirItem {
                name,
                attr: self.seen(attr),
            }));
            if page.end || empty {
                return Ok(items);
            }
        }
    }
}
