//! The names of a directory as READDIR and READDIRPLUS are answered: one after the other, as many as
//! the kernel has room for.

use crate::{abi, attributes};
use fuser::{FileAttr, FileType, Generation, INodeNo};
use std::time::Duration;
use zerocopy::IntoBytes;

/// Names alone.
#[derive(Debug)]
pub struct Listing(Entries);

/// Names with attributes: each is a look-up as well.
#[derive(Debug)]
pub struct ListingPlus(Entries);

impl Listing {
    /// An empty one for so many bytes, which the kernel has asked for.
    #[must_use]
    pub fn new(size: u32) -> Listing {
        Listing(Entries::new(size))
    }

    /// Adds a name; `offset` is where the listing goes on behind it. False when it has no room.
    pub fn add(&mut self, inode: INodeNo, offset: u64, kind: FileType, name: &[u8]) -> bool {
        self.0.add(&[], inode, offset, kind, name)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0.bytes
    }
}

impl ListingPlus {
    /// An empty one for so many bytes, which the kernel has asked for.
    #[must_use]
    pub fn new(size: u32) -> ListingPlus {
        ListingPlus(Entries::new(size))
    }

    /// Adds a name; `offset` is where the listing goes on behind it. False when it has no room.
    pub fn add(&mut self, offset: u64, name: &[u8], ttl: Duration, attr: &FileAttr) -> bool {
        let entry = attributes::entry(ttl, attr, Generation(0));
        self.0.add(entry.as_bytes(), attr.ino, offset, attr.kind, name)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0.bytes
    }
}

#[derive(Debug)]
struct Entries {
    bytes: Vec<u8>,
    size: usize,
}

impl Entries {
    fn new(size: u32) -> Entries {
        Entries { bytes: Vec::new(), size: size as usize }
    }

    fn add(
        &mut self,
        before: &[u8],
        inode: INodeNo,
        offset: u64,
        kind: FileType,
        name: &[u8],
    ) -> bool {
        let Ok(namelen) = u32::try_from(name.len()) else { return false };
        let len = before.len() + size_of::<abi::Dirent>() + name.len();
        let end = self.bytes.len() + len.next_multiple_of(size_of::<u64>());
        if end > self.size {
            return false;
        }
        // Types in a directory are those of a mode, without the bits below them.
        let kind = attributes::type_bits(kind) >> 12;
        self.bytes.extend_from_slice(before);
        let dirent = abi::Dirent { ino: inode.0, off: offset, namelen, kind };
        self.bytes.extend_from_slice(dirent.as_bytes());
        self.bytes.extend_from_slice(name);
        self.bytes.resize(end, 0);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listing_is_what_the_kernel_expects_and_never_longer() {
        let mut listing = Listing::new(64);
        assert!(listing.add(INodeNo(5), 9, FileType::Directory, b"name"));
        assert!(listing.add(INodeNo(6), 10, FileType::RegularFile, b"12345678"));
        assert!(!listing.add(INodeNo(7), 11, FileType::RegularFile, b"n"), "it is full");
        let expected = [
            5_u64.to_ne_bytes().as_slice(),
            &9_u64.to_ne_bytes(),
            &4_u32.to_ne_bytes(),
            &4_u32.to_ne_bytes(),
            b"name\0\0\0\0",
            &6_u64.to_ne_bytes(),
            &10_u64.to_ne_bytes(),
            &8_u32.to_ne_bytes(),
            &8_u32.to_ne_bytes(),
            b"12345678",
        ]
        .concat();
        assert_eq!(listing.bytes(), expected);
    }
}
