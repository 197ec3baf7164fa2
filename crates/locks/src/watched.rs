//! The locks of `parking_lot`, watched: as much of them as Ebb uses.

use crate::order::{self, Having};
use std::any::type_name;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::panic::Location;
use std::time::{Duration, Instant};

fn address<T>(lock: &T) -> usize {
    std::ptr::from_ref(lock) as usize
}

/// A watched mutex.
#[derive(Default)]
pub struct Mutex<T>(parking_lot::Mutex<T>);

impl<T> Mutex<T> {
    /// A new one.
    pub const fn new(value: T) -> Mutex<T> {
        Mutex(parking_lot::const_mutex(value))
    }

    /// Waits for it.
    #[track_caller]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        let place = Location::caller();
        order::before(type_name::<T>(), address(self), place);
        let guard = self.0.lock();
        MutexGuard { guard, _having: order::after(type_name::<T>(), address(self), place) }
    }

    /// What it holds, which nobody else can have.
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut()
    }

    /// What it held.
    pub fn into_inner(self) -> T {
        self.0.into_inner()
    }
}

impl<T: fmt::Debug> fmt::Debug for Mutex<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A mutex that is had. What is locked is let go before it is noted so.
pub struct MutexGuard<'a, T> {
    guard: parking_lot::MutexGuard<'a, T>,
    _having: Having,
}

/// A condition with its mutex.
#[derive(Debug, Default)]
pub struct Condvar(parking_lot::Condvar);

impl Condvar {
    /// A new one.
    #[must_use]
    pub const fn new() -> Condvar {
        Condvar(parking_lot::Condvar::new())
    }

    /// Waits until it is told of.
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        self.0.wait(&mut guard.guard);
    }

    /// The same up to a moment.
    pub fn wait_until<T>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        end: Instant,
    ) -> parking_lot::WaitTimeoutResult {
        self.0.wait_until(&mut guard.guard, end)
    }

    /// The same for some time.
    pub fn wait_for<T>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        time: Duration,
    ) -> parking_lot::WaitTimeoutResult {
        self.0.wait_for(&mut guard.guard, time)
    }

    /// Tells one.
    pub fn notify_one(&self) -> bool {
        self.0.notify_one()
    }

    /// Tells all.
    pub fn notify_all(&self) -> usize {
        self.0.notify_all()
    }
}

/// A watched lock for one writer or many readers.
#[derive(Default)]
pub struct RwLock<T>(parking_lot::RwLock<T>);

macro_rules! take {
    ($name:ident, $guard:ident) => {
        #[doc = "Waits for it."]
        #[track_caller]
        pub fn $name(&self) -> $guard<'_, T> {
            let place = Location::caller();
            order::before(type_name::<T>(), address(self), place);
            let guard = self.0.$name();
            $guard { guard, having: order::after(type_name::<T>(), address(self), place) }
        }
    };
}

impl<T> RwLock<T> {
    /// A new one.
    pub const fn new(value: T) -> RwLock<T> {
        RwLock(parking_lot::const_rwlock(value))
    }

    take!(read, RwLockReadGuard);
    take!(write, RwLockWriteGuard);
    take!(upgradable_read, RwLockUpgradableReadGuard);

    /// Takes it if nobody has it. Who does not wait makes no circle.
    #[track_caller]
    pub fn try_write(&self) -> Option<RwLockWriteGuard<'_, T>> {
        let guard = self.0.try_write()?;
        let having = order::after(type_name::<T>(), address(self), Location::caller());
        Some(RwLockWriteGuard { guard, having })
    }
}

impl<T: fmt::Debug> fmt::Debug for RwLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Had for reading.
pub struct RwLockReadGuard<'a, T> {
    guard: parking_lot::RwLockReadGuard<'a, T>,
    #[expect(dead_code, reason = "it is noted as let go when it is dropped")]
    having: Having,
}

/// Had for writing.
pub struct RwLockWriteGuard<'a, T> {
    guard: parking_lot::RwLockWriteGuard<'a, T>,
    #[expect(dead_code, reason = "it is noted as let go when it is dropped")]
    having: Having,
}

/// Had for reading, perhaps to be written.
pub struct RwLockUpgradableReadGuard<'a, T> {
    guard: parking_lot::RwLockUpgradableReadGuard<'a, T>,
    having: Having,
}

impl<'a, T> RwLockUpgradableReadGuard<'a, T> {
    /// Waits until nobody else reads.
    #[must_use]
    pub fn upgrade(this: RwLockUpgradableReadGuard<'a, T>) -> RwLockWriteGuard<'a, T> {
        let RwLockUpgradableReadGuard { guard, having } = this;
        RwLockWriteGuard { guard: parking_lot::RwLockUpgradableReadGuard::upgrade(guard), having }
    }
}

macro_rules! deref {
    ($($guard:ident),*) => {$(
        impl<T> Deref for $guard<'_, T> {
            type Target = T;

            fn deref(&self) -> &T {
                &self.guard
            }
        }
    )*};
}

macro_rules! deref_mut {
    ($($guard:ident),*) => {$(
        impl<T> DerefMut for $guard<'_, T> {
            fn deref_mut(&mut self) -> &mut T {
                &mut self.guard
            }
        }
    )*};
}

deref!(MutexGuard, RwLockReadGuard, RwLockWriteGuard, RwLockUpgradableReadGuard);
deref_mut!(MutexGuard, RwLockWriteGuard);

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    /// What is said of `what`, if anything.
    fn told(what: impl FnOnce()) -> Option<String> {
        let died = catch_unwind(AssertUnwindSafe(what)).err()?;
        died.downcast_ref::<String>().cloned()
    }

    #[test]
    fn two_orders_are_seen_though_nobody_waits() {
        struct A;
        struct B;
        struct C;
        let (a, b, c) = (Mutex::new(A), RwLock::new(B), Mutex::new(C));
        // Other ones of the same kinds: it is the order of the kinds.
        let other = Mutex::new(A);
        assert_eq!(told(|| drop((a.lock(), b.read()))), None);
        assert_eq!(told(|| drop((b.write(), c.lock()))), None);
        assert_eq!(told(|| drop((a.lock(), c.lock()))), None);
        let circle = told(|| drop((c.lock(), other.lock()))).unwrap();
        assert!(circle.contains("a circle") && circle.contains("watched.rs"), "{circle}");
        // What was let go in between is no order.
        drop(b.upgradable_read());
        assert_eq!(told(|| drop(a.lock())), None);
    }

    #[test]
    fn the_same_lock_twice_and_two_of_a_kind_are_seen() {
        struct D;
        let (one, two) = (RwLock::new(D), RwLock::new(D));
        let twice = told(|| drop((one.read(), one.read()))).unwrap();
        assert!(twice.contains("while this thread has it"), "{twice}");
        let pair = told(|| drop((one.read(), two.write()))).unwrap();
        assert!(pair.contains("two of"), "{pair}");
        let guard = RwLockUpgradableReadGuard::upgrade(one.upgradable_read());
        drop(guard);
        assert_eq!(told(|| drop(one.write())), None);
    }
}
