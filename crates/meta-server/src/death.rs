//! The service's death between two effects, and effects that fail, for tests.

use ebb_types::Errno;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use tokio::sync::Notify;

/// No errno of any system.
const DEAD: Errno = Errno(9999);

#[derive(Debug)]
pub struct Death {
    /// So many effects are lived to see.
    left: AtomicU32,
    /// So many succeed before one fails.
    good: AtomicU32,
    pub came: Notify,
}

impl Default for Death {
    fn default() -> Death {
        let never = || AtomicU32::new(u32::MAX);
        Death { left: never(), good: never(), came: Notify::new() }
    }
}

impl Death {
    pub fn after(&self, effects: u32) {
        self.left.store(effects, Relaxed);
    }

    /// One effect fails after so many.
    pub fn fails_after(&self, effects: u32) {
        self.good.store(effects, Relaxed);
    }

    pub fn may_fail(&self) -> Result<(), Errno> {
        match self.good.load(Relaxed) {
            u32::MAX => Ok(()),
            0 => {
                self.good.store(u32::MAX, Relaxed);
                Err(Errno::EDQUOT)
            }
            n => {
                self.good.store(n - 1, Relaxed);
                Ok(())
            }
        }
    }

    pub fn may_come(&self) -> Result<(), Errno> {
        match self.left.load(Relaxed) {
            u32::MAX => Ok(()),
            0 => Err(DEAD),
            n => {
                self.left.store(n - 1, Relaxed);
                Ok(())
            }
        }
    }

    /// Goes no further if this is the end.
    pub async fn stop_here<T>(&self, result: &Result<T, Errno>) {
        if result.as_ref().is_err_and(|e| *e == DEAD) {
            self.came.notify_one();
            std::future::pending::<()>().await;
        }
    }
}
