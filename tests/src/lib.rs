//! What the integration tests share: how a program synchronises under each model, files filled
//! with content that tells where it came from, trees compared byte for byte, and programs that
//! are found, bounded in time and loud when they fail.

pub mod content;
pub mod crash;
pub mod grown;
pub mod model;
pub mod tools;
pub mod tree;
