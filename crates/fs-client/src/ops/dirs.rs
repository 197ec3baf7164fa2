//! Listing directories: taken whole when reading begins, so that positions stay meaningful while
//! entries come and go. A position is made of the name, so it means the same in another listing:
//! a reader goes on there when the daemon was replaced, and sees each name that stayed once.

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
        let mut all = match self.list_all(dir.ino).await {
            // Not even the dots are in one that is no more.
            Err(e) if self.gone(dir.ino, e).await.is_some() => Vec::new(),
            listed => listed?,
        };
        place(&mut all);
        let fresh = Arc::new(all);
        *listing = Some(Arc::clone(&fresh));
        Ok(fresh)
    }

    async fn list_all(&self, ino: Ino) -> Result<Vec<DirItem>, Errno> {
        if virtual_files::is_virtual(ino) {
            return self.list_virtual(ino).await;
        }
        let own = self.getattr(ino).await?;
        if own.nlink == 0 {
            return Err(Errno::ESTALE);
        }
        let mut items = vec![DirItem { name: b".".to_vec(), attr: own, position: 0 }];
        let mut after = None;
        let first = self.asking();
        let (mut lease, mut names) = (None, Vec::new());
        loop {
            let asked = self.published_so_far();
            let wish = self.wish(first, None);
            let page = self.meta.readdir_leased(ino, after.as_ref(), PAGE, wish).await?;
            if let (None, Some(first), Some(granted)) = (&after, first, page.lease) {
                self.listing_begins(first, ino, granted);
                lease = Some(granted);
            }
            names.extend(page.entries.iter().map(|e| (e.name.clone(), e.attr.ino)));
            if items.len() == 1 {
                let parent = ebb_types::Attr { ino: page.parent, ..own };
                items.push(DirItem { name: b"..".to_vec(), attr: parent, position: 0 });
            }
            after = page.entries.last().map(|e| e.name.clone());
            for e in page.entries {
                let attr = match self.seen(asked, e.attr).await {
                    // It has gone since the page was told.
                    Err(Errno::ENOENT | Errno::ESTALE) => continue,
                    seen => seen?,
                };
                items.push(DirItem { name: e.name.as_bytes().to_vec(), attr, position: 0 });
            }
            if page.end {
                if let (Some(first), Some(lease)) = (first, lease) {
                    self.listed(first, ino, lease, names);
                }
                return Ok(items);
            }
        }
    }

    async fn list_virtual(&self, ino: Ino) -> Result<Vec<DirItem>, Errno> {
        let own = virtual_files::getattr(ino).ok_or(Errno::ENOTDIR)?;
        let above = self.getattr(Ino::ROOT).await?;
        let dots = [(&b"."[..], own), (&b".."[..], above)];
        let all = dots.into_iter().chain(virtual_files::listing());
        Ok(all.map(|(name, attr)| DirItem { name: name.to_vec(), attr, position: 0 }).collect())
    }
}

/// Gives every entry its position and puts them in that order: the dots first.
fn place(items: &mut [DirItem]) {
    for item in items.iter_mut() {
        item.position = match &item.name[..] {
            b"." => 1,
            b".." => 2,
            // The kernel counts positions with a sign.
            name => (crate::hash::bytes(name) >> 1).max(3),
        };
    }
    items.sort_unstable_by(|a, b| (a.position, &a.name).cmp(&(b.position, &b.name)));
    let mut last = 0;
    for item in items {
        item.position = item.position.max(last + 1);
        last = item.position;
    }
}

/// The entries behind a position.
#[must_use]
pub fn behind(items: &[DirItem], position: u64) -> &[DirItem] {
    &items[items.partition_point(|item| item.position <= position)..]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn listing(names: &BTreeSet<String>) -> Vec<DirItem> {
        let attr = virtual_files::getattr(virtual_files::listing()[0].1.ino).unwrap();
        let all = [".", ".."].into_iter().chain(names.iter().map(String::as_str));
        let item = |n: &str| DirItem { name: n.into(), attr, position: 0 };
        let mut items: Vec<DirItem> = all.map(item).collect();
        place(&mut items);
        items
    }

    proptest! {
        #[test]
        fn a_reader_that_goes_on_in_another_listing_sees_what_stayed_once(
            before in prop::collection::btree_set("[a-z]{1,6}", 0..60),
            gone in prop::collection::btree_set("[a-z]{1,6}", 0..60),
            come in prop::collection::btree_set("[a-z]{1,6}", 0..60),
            read in 0_usize..62,
        ) {
            let first = listing(&before);
            let read = read.min(first.len());
            prop_assert!(first.iter().zip(&first[1..]).all(|(a, b)| a.position < b.position));
            let position = first[..read].last().map_or(0, |i| i.position);
            let after: BTreeSet<String> =
                before.difference(&gone).chain(&come).cloned().collect();
            let second = listing(&after);
            let seen = first[..read].iter().chain(behind(&second, position)).map(|i| &i.name);
            let seen: Vec<String> =
                seen.map(|n| String::from_utf8_lossy(n).into_owned()).collect();
            let stayed = before.intersection(&after);
            for name in stayed {
                prop_assert_eq!(seen.iter().filter(|n| *n == name).count(), 1, "{}", name);
            }
            prop_assert_eq!(seen.iter().filter(|n| *n == ".").count(), 1);
        }
    }
}
