//! The answer to a query, until `ebb-consistency` brings it.
use ebb_types::{ByteRange, NodeId, Version};
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MapAnswer {
    pub version: Version,
    pub size: u64,
    pub base_version: Version,
    pub base_len: u64,
    pub unchanged: bool,
    pub covers: ByteRange,
    pub ranges: Vec<Owned>,
}
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Owned {
    pub range: ByteRange,
    pub node: NodeId,
    pub version: Version,
    pub flushed: bool,
}
