//! How loaded storage targets are when several jobs stripe over them, and how many stripes a new
//! file should take. Formulas only: no I/O, no clock; nothing here knows a file system.
//!
//! The model (Wright and Jarvis, *Lustre contention*): each job stripes over targets that are
//! chosen at random. With `D` targets in all and a further job of `r` stripes
//!
//! ```text
//! in_use(n) = in_use(n-1) + r - r * in_use(n-1) / D        in_use(0) = 0
//! in_use    = D - D * (1 - R/D)^n                          the same R for all n jobs
//! required  = sum of r
//! load      = required / in_use
//! ```
//!
//! `load` is the mean number of jobs on a target that is in use at all. A log-structured layout
//! (one log for each rank, as in PLFS) behaves like as many jobs as ranks, each with two stripes.

mod advice;
mod load;
#[cfg(test)]
mod tests;

pub use advice::{
    Advice, BYTES_PER_STRIPE_MIN, LOAD_LIMIT, Limit, Question, TARGETS_PER_NODE, advise,
};
pub use load::{
    JOBS_MAX, LOG_STRUCTURED_STRIPES, Load, LoadError, TARGETS_MAX, equal, log_structured, unequal,
};
