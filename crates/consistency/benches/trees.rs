//! How the ownership tree and a node's view scale with the number of extents.
fn main() {}
