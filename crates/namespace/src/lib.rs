//! PURE. The overlay of new names on the backing tree.
