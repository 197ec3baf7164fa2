//! Calls of the backing go on beside everything else, and a backing that hangs keeps what it was asked
//! for as long as it likes: nobody can take a thread back from it. So only so many of the runtime's
//! threads may be there at a time; the others are for the local disk, where a sync or a
//! write must go on. Who finds no place waits for one, as long as for an answer.

use crate::node::Node;
use ebb_types::Errno;
use std::sync::Arc;

/// Threads of the runtime that may block.
pub const THREADS: usize = 128;

/// So many of them may be at the backing.
pub const BACKING_CALLS: usize = 64;

impl Node {
    /// Runs a call of the backing, for as long as one remote step may take. What hangs longer goes on
    /// and keeps its place.
    pub(crate) async fn on_backing<T: Send + 'static>(
        &self,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Errno> {
        let done = tokio::time::timeout(self.deadline(), self.when_there_is_a_place(call));
        done.await.map_err(|_late| Errno::ETIMEDOUT)?
    }

    /// The same for as long as it takes. What is given up while it waits for a place is never begun.
    pub(crate) fn when_there_is_a_place<T, C>(
        &self,
        call: C,
    ) -> impl Future<Output = Result<T, Errno>> + Send + use<T, C>
    where
        T: Send + 'static,
        C: FnOnce() -> T + Send + 'static,
    {
        let places = Arc::clone(&self.backing_calls);
        async move {
            let place = places.acquire_owned().await.map_err(|_closed| Errno::EIO)?;
            let work = move || {
                let done = call();
                drop(place);
                done
            };
            tokio::task::spawn_blocking(work).await.map_err(|_panicked| Errno::EIO)
        }
    }
}
