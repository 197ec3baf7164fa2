//! Coupled directories (docs/coupling.md) on real mounts: programs that know nothing of them hand files on to
//! each other. One program of several files.

mod exchange;
mod handing_on;
mod kills;
mod rules;
mod together;
