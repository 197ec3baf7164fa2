//! Programs that know nothing of Ebb. One program of many files, because each takes its time to build.

mod applications;
mod big_tree;
mod fsx;
mod many_files;
mod mpi;
mod mpi_library;
mod namespace_ops;
mod races;
