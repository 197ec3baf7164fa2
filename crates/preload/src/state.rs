//! The one state of the tracer, and who may use it: one thread at a time, never a signal handler that
//! interrupts that thread, and after a fork the child begins anew.

use crate::sys;
use crate::tracer::Tracer;
use std::cell::{Cell, UnsafeCell};
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};

struct Shared {
    is_locked: AtomicBool,
    tracer: UnsafeCell<Option<Tracer>>,
}

// SAFETY: the tracer is only reached through `Guard`, which holds the lock.
unsafe impl Sync for Shared {}

static SHARED: Shared = Shared { is_locked: AtomicBool::new(false), tracer: UnsafeCell::new(None) };
/// A word that the kernel wipes in the child of any fork; null while nothing is traced.
static ALIVE: AtomicPtr<AtomicU32> = AtomicPtr::new(std::ptr::null_mut());
static THREADS: AtomicU32 = AtomicU32::new(0);

thread_local! {
    /// This thread is inside the tracer.
    static BUSY: Cell<bool> = const { Cell::new(false) };
    /// Its number, and one.
    static THREAD: Cell<u32> = const { Cell::new(0) };
}

/// Whether anything is traced in this process.
pub fn is_on() -> bool {
    !ALIVE.load(Ordering::Relaxed).is_null()
}

/// The tracer, for one thread. errno is put back at the end.
pub struct Guard {
    errno: i32,
}

impl Guard {
    /// Nothing when nothing is traced, or this thread is in it already.
    pub fn take() -> Option<Guard> {
        let alive = ALIVE.load(Ordering::Acquire);
        // A thread that ends has no such word any more.
        if alive.is_null() || BUSY.try_with(|b| b.replace(true)).unwrap_or(true) {
            return None;
        }
        // SAFETY: the page is never unmapped.
        let alive = unsafe { &*alive };
        // SAFETY: errno of this thread.
        let guard = Guard { errno: unsafe { *libc::__errno_location() } };
        if alive.load(Ordering::Relaxed) == 0 {
            // This is a child, which has one thread; whoever held the lock is not here.
            SHARED.is_locked.store(false, Ordering::Relaxed);
        }
        while SHARED.is_locked.swap(true, Ordering::Acquire) {
            std::thread::yield_now();
        }
        if alive.swap(1, Ordering::Relaxed) == 0 {
            // SAFETY: the lock is held.
            let tracer = unsafe { &mut *SHARED.tracer.get() };
            *tracer = tracer.take().and_then(Tracer::in_child);
        }
        // SAFETY: as above.
        unsafe { (*SHARED.tracer.get()).is_some() }.then_some(guard)
    }
}

impl Deref for Guard {
    type Target = Tracer;

    fn deref(&self) -> &Tracer {
        // SAFETY: the lock is held, and `take` has looked.
        unsafe { (*SHARED.tracer.get()).as_ref().unwrap_unchecked() }
    }
}

impl DerefMut for Guard {
    fn deref_mut(&mut self) -> &mut Tracer {
        // SAFETY: the lock is held, and `take` has looked.
        unsafe { (*SHARED.tracer.get()).as_mut().unwrap_unchecked() }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        SHARED.is_locked.store(false, Ordering::Release);
        // SAFETY: errno of this thread.
        unsafe { *libc::__errno_location() = self.errno };
        let _ = BUSY.try_with(|b| b.set(false));
    }
}

/// The number of this thread.
pub fn thread() -> u32 {
    let of_new = || THREADS.fetch_add(1, Ordering::Relaxed) + 1;
    let number = THREAD.try_with(|t| {
        if t.get() == 0 {
            t.set(of_new());
        }
        t.get()
    });
    number.map_or(0, |n| n - 1)
}

/// Begins tracing where `ebb trace` asked for it.
extern "C" fn begin() {
    let Some(page) = sys::map(-1, 0, 4096) else { return };
    if !sys::wipe_on_fork(page, 4096) {
        return;
    }
    let Some(tracer) = Tracer::from_environment() else { return };
    // SAFETY: before main nobody else is here, and nothing is traced yet.
    unsafe { *SHARED.tracer.get() = Some(tracer) };
    let alive = page.cast::<AtomicU32>();
    // SAFETY: a page of our own.
    unsafe { (*alive).store(1, Ordering::Relaxed) };
    ALIVE.store(alive, Ordering::Release);
}

/// The last words of a process that ends in order.
pub extern "C" fn end() {
    if let Some(mut tracer) = Guard::take() {
        tracer.exit(true);
    }
}

#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;
#[used]
#[unsafe(link_section = ".fini_array")]
static END: extern "C" fn() = end;
