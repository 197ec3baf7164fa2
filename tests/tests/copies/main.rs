//! Copies with a partner. One program of many files, because each takes its time to build.

mod replicas;
mod replicas_random;
mod replicas_restart;
