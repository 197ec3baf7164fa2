//! An event loop: a completion queue, the connections whose completions come there, and the task that
//! waits for them.

use crate::endpoint::Shared;
use crate::stream::Inner;
use crate::verbs::{Completion, Completions, Receives, Work, watch};
use ebb_locks::Mutex;
use std::collections::HashMap;
use std::io;
use std::sync::Arc;

/// Rounds of completions before others have their turn.
const ROUNDS_MAX: usize = 64;

/// A completion queue and its connections.
pub(crate) struct Lane {
    pub completions: Arc<Completions>,
    receives: Arc<Receives>,
    /// By the number of the queue pair. Whoever polls holds it.
    conns: Mutex<HashMap<u32, Arc<Inner>>>,
    conns_max: usize,
}

impl Lane {
    pub fn new(completions: Completions, receives: Arc<Receives>, conns_max: usize) -> Lane {
        let completions = Arc::new(completions);
        Lane { completions, receives, conns: Mutex::default(), conns_max }
    }

    /// How many connections it has.
    pub fn len(&self) -> usize {
        self.conns.lock().len()
    }

    /// Takes a connection in; false when there is no room.
    pub fn admit(&self, conn: &Arc<Inner>) -> bool {
        let mut conns = self.conns.lock();
        let room = conns.len() < self.conns_max;
        if room {
            conns.insert(conn.number(), Arc::clone(conn));
        }
        room
    }

    /// Ends a connection. The number of its queue pair may be given to another one as soon as it is destroyed:
    /// what is left of it in the queue is taken out before.
    pub fn retire(&self, conn: &Inner) {
        let mut conns = self.conns.lock();
        conn.destroy();
        let mut left = self.completions.room();
        while left > 0 {
            match self.poll_some(&conns) {
                Ok(n) if n > 0 => left = left.saturating_sub(n),
                _ => break,
            }
        }
        conns.remove(&conn.number());
    }

    fn poll_some(&self, conns: &HashMap<u32, Arc<Inner>>) -> io::Result<usize> {
        self.completions.poll(|completion| self.handle(conns, completion))
    }

    fn handle(&self, conns: &HashMap<u32, Arc<Inner>>, done: Completion) {
        let conn = conns.get(&done.queue_pair);
        match done.work {
            Work::Posted(at) => {
                if let Some(conn) = conn {
                    conn.posted_done(at, done.result.map(drop));
                }
            }
            Work::Received(at) => {
                let Some(block) = self.receives.done(at) else { return };
                if let (Some(conn), result) = (conn, done.result) {
                    conn.arrived(result.map(|len| &block[..len.min(block.len())]));
                }
                if let Err(why) = self.receives.post(at, block) {
                    tracing::error!(%why, "a block for what arrives over RDMA is lost");
                }
            }
        }
    }

    /// All that is there; true when there may be more.
    fn poll_all(&self) -> io::Result<bool> {
        for _ in 0..ROUNDS_MAX {
            let conns = self.conns.lock();
            if self.poll_some(&conns)? == 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Ends all connections.
    pub fn fail_all(&self, why: &str) {
        let all: Vec<_> = self.conns.lock().values().cloned().collect();
        for conn in all {
            conn.fail(why, false);
        }
    }
}

/// Serves a lane until it fails.
pub(crate) async fn serve(shared: Arc<Shared>, at: usize) {
    let served = serve_lane(&shared, at).await;
    if let Err(why) = served {
        shared.fail(&format!("the event loop of RDMA failed: {why}"));
    }
}

async fn serve_lane(shared: &Arc<Shared>, at: usize) -> io::Result<()> {
    let lane = &shared.lanes[at];
    let events = watch(&lane.completions)?;
    loop {
        // Armed first, so that what comes after the last look makes an event.
        lane.completions.arm()?;
        if lane.poll_all()? {
            tokio::task::yield_now().await;
            continue;
        }
        let mut ready = events.readable().await?;
        // Before the events are taken: what comes meanwhile makes it ready again.
        ready.clear_ready();
        lane.completions.take_events()?;
    }
}
