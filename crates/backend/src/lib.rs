//! Where data ends: the backing directory.
