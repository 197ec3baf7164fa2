//! Daemons that are dead, and what is in their caches. One program of many files, because each takes its time to build.

mod recovery;
mod recovery_kill;
mod recovery_lengths;
mod recovery_names;
mod recovery_shared;
mod recovery_state;
mod written_over;
