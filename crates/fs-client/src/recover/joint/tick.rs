//! Where tests kill a recovery: before each of its effects on the backing. Elsewhere nothing.

use std::io;

#[cfg(not(test))]
#[allow(clippy::unnecessary_wraps)]
pub(super) fn effect() -> io::Result<()> {
    Ok(())
}

#[cfg(test)]
thread_local! {
    static LEFT: std::cell::Cell<u64> = const { std::cell::Cell::new(u64::MAX) };
}

/// So many effects are done, and none after these.
#[cfg(test)]
pub(super) fn allow(effects: u64) {
    LEFT.set(effects);
}

#[cfg(test)]
pub(super) fn effect() -> io::Result<()> {
    match LEFT.get() {
        0 => Err(io::Error::other("killed")),
        u64::MAX => Ok(()),
        left => {
            LEFT.set(left - 1);
            Ok(())
        }
    }
}
