//! Bounds the connections of strangers: those that have not proven yet that they belong to the
//! job. When there are too many, the oldest is shut out for the newest, so that a flood of
//! connections that never say anything cannot keep out those that do: a handshake takes
//! milliseconds, and each connection of the flood costs the flood a place of its own.

use ebb_locks::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::oneshot;

/// Counts strangers.
#[derive(Debug)]
pub struct Gate {
    limit: usize,
    inside: Mutex<Inside>,
}

#[derive(Debug, Default)]
struct Inside {
    next: u64,
    /// By arrival; what is sent tells the stranger to go.
    strangers: BTreeMap<u64, oneshot::Sender<()>>,
}

/// A place at the gate; dropping it gives it up, because the stranger has proven itself or left.
#[derive(Debug)]
pub struct Stranger {
    gate: Arc<Gate>,
    number: u64,
}

/// Resolves when the stranger is shut out; never once its place was given up.
#[derive(Debug)]
pub struct ShutOut(oneshot::Receiver<()>);

impl Gate {
    /// A gate with room for `limit` strangers, at least one.
    #[must_use]
    pub fn new(limit: usize) -> Arc<Gate> {
        Arc::new(Gate { limit: limit.max(1), inside: Mutex::default() })
    }

    /// Lets one more in, and the oldest out when there is no room.
    pub fn enter(self: &Arc<Gate>) -> (Stranger, ShutOut) {
        let (out, shut_out) = oneshot::channel();
        let mut inside = self.inside.lock();
        if inside.strangers.len() >= self.limit
            && let Some((_, oldest)) = inside.strangers.pop_first()
        {
            // It may be about to leave by itself.
            let _ = oldest.send(());
        }
        let number = inside.next;
        inside.next += 1;
        inside.strangers.insert(number, out);
        drop(inside);
        (Stranger { gate: Arc::clone(self), number }, ShutOut(shut_out))
    }

    /// How many there are now.
    #[must_use]
    pub fn strangers(&self) -> usize {
        self.inside.lock().strangers.len()
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        self.gate.inside.lock().strangers.remove(&self.number);
    }
}

impl ShutOut {
    /// Waits for the word to go.
    pub async fn wait(self) {
        if self.0.await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::time::timeout;

    async fn is_out(shut_out: ShutOut) -> bool {
        timeout(Duration::from_millis(20), shut_out.wait()).await.is_ok()
    }

    #[tokio::test]
    async fn the_oldest_goes_when_there_is_no_room() {
        let gate = Gate::new(2);
        let (a, out_a) = gate.enter();
        let (b, out_b) = gate.enter();
        let (c, out_c) = gate.enter();
        assert_eq!(gate.strangers(), 2);
        assert!(is_out(out_a).await);
        drop(b);
        assert!(!is_out(out_b).await, "who has proven itself is never told to go");
        let (d, out_d) = gate.enter();
        assert_eq!(gate.strangers(), 2, "a place given up is free");
        assert!(!is_out(out_d).await);
        let (_e, _) = gate.enter();
        assert!(is_out(out_c).await);
        drop((a, c, d));
        assert_eq!(gate.strangers(), 1);
    }

    #[tokio::test]
    async fn a_flood_never_holds_more_than_the_limit() {
        let gate = Gate::new(16);
        let all: Vec<_> = (0..10_000).map(|_| gate.enter()).collect();
        assert_eq!(gate.strangers(), 16);
        drop(all);
        assert_eq!(gate.strangers(), 0);
    }
}
