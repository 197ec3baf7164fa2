//! The metadata service: namespace, ownership, sessions and locks behind one stream, and their journal.
