//! Gives freed memory back to the machine: the C library keeps what a burst of files needed, and the
//! node's memory belongs to the application.

use crate::node::Node;
use std::sync::Weak;
use std::time::Duration;

/// How often it is looked whether there is something to give back.
const PERIOD: Duration = Duration::from_secs(5);
/// Only when no operation came for so long: the walk over the heap takes the allocator's locks.
const QUIET: Duration = Duration::from_secs(2);

/// Runs as long as the node lives: once after every time of activity.
pub async fn trim_when_idle(node: Weak<Node>) {
    let mut trimmed = None;
    loop {
        tokio::time::sleep(PERIOD).await;
        let Some(node) = node.upgrade() else { return };
        let epoch = node.activity.epoch();
        if node.activity.active() > 0 || node.activity.idle_for() < QUIET || trimmed == Some(epoch)
        {
            continue;
        }
        drop(node);
        let _ = tokio::task::spawn_blocking(give_back).await;
        trimmed = Some(epoch);
    }
}

#[cfg(target_env = "gnu")]
fn give_back() {
    // SAFETY: it only returns free pages of the heap to the kernel.
    unsafe { libc::malloc_trim(0) };
}

/// Other C libraries give back by themselves or offer nothing.
#[cfg(not(target_env = "gnu"))]
fn give_back() {}
