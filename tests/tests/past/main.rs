//! The kernel reads and writes the cache files past the daemon. One program of many files, because each takes its time to build.

mod passthrough;
mod passthrough_edges;
mod passthrough_kill;
mod passthrough_told;
