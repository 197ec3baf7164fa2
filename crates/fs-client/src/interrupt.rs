//! Signals for processes that wait in a request: the kernel tells which request, the waiting
//! operation hears of it here and answers `EINTR`.

use ebb_locks::Mutex;
use ebb_types::Errno;
use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;

/// An interrupt can be read from the kernel by one event loop before the request it means was
/// registered by another; so many of those are remembered. Request ids are never used twice.
const EARLY_MAX: usize = 256;

/// How long work goes on after a signal where programs do not expect to be interrupted.
const GRACE: Duration = Duration::from_secs(2);

#[derive(Default)]
struct Inner {
    waiting: HashMap<u64, Arc<Notify>>,
    early: VecDeque<u64>,
}

/// The requests that can be interrupted now.
#[derive(Default)]
pub struct Interrupts {
    inner: Mutex<Inner>,
}

impl Interrupts {
    /// The kernel says that whoever waits for `unique` got a signal.
    pub fn interrupt(&self, unique: u64) {
        let mut inner = self.inner.lock();
        match inner.waiting.get(&unique) {
            Some(waiter) => waiter.notify_one(),
            None => {
                if inner.early.len() == EARLY_MAX {
                    inner.early.pop_front();
                }
                inner.early.push_back(unique);
            }
        }
    }

    /// Runs `work` until it is done or its process is interrupted. Dropped work must leave a
    /// consistent state: this is for waiting, not for changing things.
    pub async fn run<T>(
        &self,
        unique: u64,
        work: impl Future<Output = Result<T, Errno>>,
    ) -> Result<T, Errno> {
        self.run_for(unique, Duration::ZERO, work).await
    }

    /// The same for work that programs do not expect to be interrupted, such as reading a regular
    /// file: a timer's signal must not make it fail. It gets `GRACE` after the signal to end by
    /// itself; only what is really stuck ends with EINTR.
    pub async fn run_patiently<T>(
        &self,
        unique: u64,
        work: impl Future<Output = Result<T, Errno>>,
    ) -> Result<T, Errno> {
        self.run_for(unique, GRACE, work).await
    }

    async fn run_for<T>(
        &self,
        unique: u64,
        grace: Duration,
        work: impl Future<Output = Result<T, Errno>>,
    ) -> Result<T, Errno> {
        let notify = Arc::new(Notify::new());
        {
            let mut inner = self.inner.lock();
            if let Some(at) = inner.early.iter().position(|u| *u == unique) {
                inner.early.remove(at);
                notify.notify_one();
            }
            inner.waiting.insert(unique, Arc::clone(&notify));
        }
        let interrupted = async {
            notify.notified().await;
            tokio::time::sleep(grace).await;
        };
        let result = tokio::select! {
            biased;
            result = work => result,
            () = interrupted => Err(Errno::EINTR),
        };
        self.inner.lock().waiting.remove(&unique);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_interrupt_ends_a_wait_before_and_after_it_began() {
        let interrupts = Arc::new(Interrupts::default());
        interrupts.interrupt(7);
        let forever = std::future::pending::<Result<(), Errno>>();
        assert_eq!(interrupts.run(7, forever).await, Err(Errno::EINTR));

        let other = Arc::clone(&interrupts);
        let wait =
            tokio::spawn(
                async move { other.run(8, std::future::pending::<Result<(), Errno>>()).await },
            );
        tokio::time::sleep(Duration::from_millis(20)).await;
        interrupts.interrupt(8);
        assert_eq!(wait.await.expect("no panic"), Err(Errno::EINTR));
        assert_eq!(interrupts.run(9, async { Ok(1) }).await, Ok(1));
    }

    #[tokio::test]
    async fn patient_work_survives_a_signal_but_not_for_ever() {
        let interrupts = Interrupts::default();
        interrupts.interrupt(1);
        let slow = async {
            tokio::time::sleep(GRACE / 2).await;
            Ok(5)
        };
        assert_eq!(interrupts.run_patiently(1, slow).await, Ok(5));
        interrupts.interrupt(2);
        let stuck = std::future::pending::<Result<(), Errno>>();
        assert_eq!(interrupts.run_patiently(2, stuck).await, Err(Errno::EINTR));
    }
}
