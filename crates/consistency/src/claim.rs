//! Claims of whole blocks.
