//! `libebb_trace.so`: `ebb trace` preloads it into programs. It takes the place of the C library's
//! calls on files, makes the real call, and writes down what it did.
//!
//! Whatever happens here must not change what the program does: a call that cannot be recorded is made
//! all the same, errno is the real call's, nothing is allocated or locked while the real call runs,
//! and no descriptor is kept open.
//!
//! Not for: models, order between processes, judging. It does not know MPI either: a library that
//! is built with the user's own compiler (`mpi/ebb_trace_mpi.c`) tells of that through [`mpi`].
//!
//! The symbols of the C library that are defined here are found by this library's own calls as well, so
//! what it does itself on files goes to the kernel directly ([`sys`]).

#[cfg(not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
compile_error!("the tracer knows Linux on x86_64 and aarch64");

mod children;
mod descriptors;
mod hook;
mod locks;
mod mapped;
mod mpi;
mod opening;
mod output;
mod plain;
mod state;
mod stdio;
mod sys;
mod tracer;
