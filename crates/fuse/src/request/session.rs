//! What the kernel says to the session: its offer at the start, and what it lets go of.

use super::{Decode, Head, Malformed};
use crate::abi;
use crate::body::Body;
use fuser::{INodeNo, InitFlags};
use zerocopy::FromBytes;

/// The kernel's offer at the start of a session.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct Init {
    pub major: u32,
    pub minor: u32,
    pub max_readahead: u32,
    pub flags: InitFlags,
}

impl Decode<'_> for Init {
    fn decode(_: &Head, body: &mut Body<'_>) -> Result<Self, Malformed> {
        let abi::InitIn { major, minor, max_readahead, flags } = body.take()?;
        let low = InitFlags::from_bits_retain(u64::from(flags));
        let high = match low.contains(InitFlags::FUSE_INIT_EXT) {
            true => u64::from(body.take::<u32>()?) << 32,
            false => 0,
        };
        let flags = low | InitFlags::from_bits_retain(high);
        Ok(Init { major, minor, max_readahead, flags })
    }
}

/// Inodes that the kernel lets go of.
#[derive(Clone, Debug, PartialEq)]
pub enum Forgets<'a> {
    /// One of them.
    One(INodeNo, u64),
    /// Several, as they came.
    Many(&'a [u8]),
}

impl Forgets<'_> {
    /// Each inode, and how many of its look-ups are taken back.
    pub fn iter(&self) -> impl Iterator<Item = (INodeNo, u64)> + '_ {
        let (one, many) = match self {
            Forgets::One(inode, lookups) => (Some((*inode, *lookups)), &[][..]),
            Forgets::Many(bytes) => (None, *bytes),
        };
        let many = many.chunks_exact(size_of::<abi::ForgetOne>()).filter_map(|raw| {
            let one = abi::ForgetOne::read_from_bytes(raw).ok()?;
            Some((INodeNo(one.nodeid), one.nlookup))
        });
        one.into_iter().chain(many)
    }
}

impl<'a> Decode<'a> for Forgets<'a> {
    fn decode(head: &Head, body: &mut Body<'a>) -> Result<Self, Malformed> {
        if head.opcode == abi::opcode::FORGET {
            return Ok(Forgets::One(head.inode, body.take::<abi::ForgetIn>()?.nlookup));
        }
        let abi::BatchForgetIn { count, .. } = body.take()?;
        let size = u32::try_from(size_of::<abi::ForgetOne>()).map_err(|_| Malformed::Short)?;
        let len = count.checked_mul(size).ok_or(Malformed::Short)?;
        Ok(Forgets::Many(body.bytes(len)?))
    }
}
