//! The locks that threads wait for, and in which order they are taken.
//!
//! Usually these are the locks of `parking_lot` and nothing else. With the feature `order` each of
//! them notes under which others it is taken: two threads that take two locks in opposite order wait
//! for each other for ever, but only when they meet; the order itself can be seen at every run. What
//! could become such a meeting is written to the file that `LOCK_ORDER_FILE` names, or is a panic
//! where it names none. `make test-locks` runs tests on real mounts so.
//!
//! Locks are told apart by what they hold, not one by one: the states of two files are one kind. So
//! an order is known from the first two files that show it.

#[cfg(feature = "order")]
mod order;
#[cfg(feature = "order")]
mod watched;

#[cfg(not(feature = "order"))]
pub use parking_lot::{Condvar, Mutex, MutexGuard, RwLock, RwLockUpgradableReadGuard};
#[cfg(feature = "order")]
pub use watched::{Condvar, Mutex, MutexGuard, RwLock, RwLockUpgradableReadGuard};
