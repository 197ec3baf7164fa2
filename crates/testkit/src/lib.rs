//! Real mounts, nodes and processes for tests and benches.
