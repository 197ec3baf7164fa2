//! What the integration tests share: how a program synchronises under each model, files filled
//! with content that tells where it came from, and trees compared byte for byte.

pub mod content;
pub mod model;
pub mod tree;
