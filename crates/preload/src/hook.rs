//! How a call of the C library comes here, and how the real one is found.
//!
//! A program calls an entry of the C library's name, which has no frame of its own: it adds the return
//! address as one more argument and goes on to the function that does the work. Functions with a
//! variable number of arguments (open, fcntl) are entered the same way: on these processors an integer
//! argument is passed alike in both.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// Where a real function is, once it was looked for.
pub struct Real {
    name: &'static CStr,
    at: AtomicPtr<c_void>,
}

impl Real {
    pub const fn new(name: &'static CStr) -> Real {
        Real { name, at: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// The next definition of that name after this library's.
    pub fn get(&self) -> *mut c_void {
        let at = self.at.load(Ordering::Relaxed);
        if !at.is_null() {
            return at;
        }
        // SAFETY: a name that ends.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        if found.is_null() {
            // The program calls a function that its C library does not have: it could not have started.
            // SAFETY: no arguments.
            unsafe { libc::abort() };
        }
        self.at.store(found, Ordering::Relaxed);
        found
    }
}

/// The real function of that name and type.
#[macro_export]
macro_rules! real {
    ($name:ident as fn($($type:ty),*) -> $result:ty) => {{
        static REAL: $crate::hook::Real = $crate::hook::Real::new(
            match std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!("a name without zeros"),
            },
        );
        // SAFETY: the C library's function of that name has this type.
        #[allow(unused_unsafe)] // some callers are in such a block already
        let found = unsafe {
            std::mem::transmute::<*mut std::ffi::c_void, unsafe extern "C" fn($($type),*) -> $result>(
                REAL.get(),
            )
        };
        found
    }};
}

/// Entries of the C library's names with so many arguments, each with the function that does the work.
#[macro_export]
macro_rules! hooks {
    ($($count:tt $($name:ident),+ => $work:ident;)*) => {
        /// The C library's names.
        mod entries {
            $($($crate::hook!($count, $name, super::$work);)+)*
        }
    };
}

#[cfg(target_arch = "x86_64")]
#[macro_export]
macro_rules! hook {
    (0, $name:ident, $work:path) => {
        $crate::entry!($name, $work, "mov rdi, [rsp]", "jmp {work}");
    };
    (1, $name:ident, $work:path) => {
        $crate::entry!($name, $work, "mov rsi, [rsp]", "jmp {work}");
    };
    (2, $name:ident, $work:path) => {
        $crate::entry!($name, $work, "mov rdx, [rsp]", "jmp {work}");
    };
    (3, $name:ident, $work:path) => {
        $crate::entry!($name, $work, "mov rcx, [rsp]", "jmp {work}");
    };
    (4, $name:ident, $work:path) => {
        $crate::entry!($name, $work, "mov r8, [rsp]", "jmp {work}");
    };
    (5, $name:ident, $work:path) => {
        $crate::entry!($name, $work, "mov r9, [rsp]", "jmp {work}");
    };
}

#[cfg(target_arch = "aarch64")]
#[macro_export]
macro_rules! hook {
    (0, $name:ident, $work:path) => {
        $crate::entry!($name, $work, "mov x0, x30", "b {work}");
    };
    (1, $name:ident, $work:path) => {
        $crate::entry!($name, $work, "mov x1, x30", "b {work}");
    };
    (2, $name:ident, $work:path) => {
        $crate::entry!($name, $work, "mov x2, x30", "b {work}");
    };
    (3, $name:ident, $work:path) => {
        $crate::entry!($name, $work, "mov x3, x30", "b {work}");
    };
    (4, $name:ident, $work:path) => {
        $crate::entry!($name, $work, "mov x4, x30", "b {work}");
    };
    (5, $name:ident, $work:path) => {
        $crate::entry!($name, $work, "mov x5, x30", "b {work}");
    };
}

#[macro_export]
macro_rules! entry {
    ($name:ident, $work:path, $put:literal, $go:literal) => {
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        unsafe extern "C" fn $name() {
            std::arch::naked_asm!($put, $go, work = sym $work)
        }
    };
}
