//! What the integration tests share: how a program synchronises under each model, files filled
//! with content that tells where it came from, trees compared byte for byte, programs that are
//! found, bounded in time and loud when they fail, and processes that write and know what must
//! be there afterwards.

pub mod content;
pub mod copies;
pub mod crash;
pub mod grown;
pub mod load;
pub mod mapping;
pub mod model;
pub mod nodes;
pub mod power;
pub mod reboot;
pub mod recoveries;
pub mod tools;
pub mod tree;
pub mod turns;
