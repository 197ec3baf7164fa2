//! The nodes: many clients that do the same at the same time.

use super::service::Service;
use ebb_meta_client::{ConnectError, ConnectOptions, MetaClient};
use ebb_transport::Secure;
use ebb_types::Incarnation;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

/// The longest that a node trusts, as a daemon with the default `--request-timeout` has it or less.
const TRUST_MAX: Duration = Duration::from_secs(5);

/// The first pause of a node that was hung up on, and the longest one: those of a fresh mount.
const PAUSES: [Duration; 2] = [Duration::from_millis(250), Duration::from_secs(1)];

/// How far a phase is; it can be read at any moment.
#[derive(Debug, Default)]
pub struct Tally {
    /// Nodes that are through.
    pub done: AtomicU64,
    /// Ranges that were named to the service, or by it.
    pub ranges: AtomicU64,
    /// Joins that were tried in vain.
    pub refused: AtomicU64,
    error: Mutex<Option<String>>,
}

impl Tally {
    /// What went wrong first.
    #[must_use]
    pub fn error(&self) -> Option<String> {
        self.error.lock().clone()
    }

    /// Counts a node, or keeps what went wrong with it.
    pub fn note<T>(&self, outcome: Result<T, String>) -> Option<T> {
        match outcome {
            Ok(value) => {
                self.done.fetch_add(1, Relaxed);
                Some(value)
            }
            Err(e) => {
                self.error.lock().get_or_insert(e);
                None
            }
        }
    }
}

/// How nodes introduce themselves.
#[derive(Clone, Debug)]
pub struct Introduction {
    base: ConnectOptions,
}

impl Introduction {
    /// To this service; a call ends after `deadline` without an answer.
    #[must_use]
    pub fn to(service: &Service, secure: Secure, lease: Duration, deadline: Duration) -> Self {
        let base = ConnectOptions {
            consistency: "session".into(),
            token: Some(service.token()),
            secure,
            request_timeout: deadline,
            trust_max: TRUST_MAX.min(lease / 2),
            empty: true,
            ..ConnectOptions::new(service.address(), "")
        };
        Introduction { base }
    }

    /// Of a node of this name. Number 0 is the probe's.
    #[must_use]
    pub fn of(&self, name: &str, number: u64) -> ConnectOptions {
        let [_, high, middle, low] = (number as u32).to_be_bytes();
        ConnectOptions {
            node: name.to_owned(),
            incarnation: Incarnation(number + 1),
            peer_address: format!("10.{high}.{middle}.{low}:7401"),
            ..self.base.clone()
        }
    }
}

/// So many nodes join, at most `width` at a time.
pub async fn join(
    introduction: &Introduction,
    nodes: usize,
    width: usize,
    tally: &Arc<Tally>,
) -> Vec<MetaClient> {
    let options = (1..=nodes as u64).map(|i| introduction.of(&format!("node{i:05}"), i));
    let joined = each(options, width, tally, {
        let tally = Arc::clone(tally);
        move |_, options| join_one(options, Arc::clone(&tally))
    });
    joined.await.into_iter().map(|(_, client)| client).collect()
}

/// Comes again where it is hung up on, as a fresh mount does, but with no end: the limit of the phase is one.
async fn join_one(options: ConnectOptions, tally: Arc<Tally>) -> Result<MetaClient, String> {
    let [mut pause, longest] = PAUSES;
    loop {
        match MetaClient::connect(options.clone()).await {
            Ok((client, _)) => {
                client.on_recall(Box::new(|_, _| true));
                return Ok(client);
            }
            Err(ConnectError::HungUp(_) | ConnectError::Unreachable(_)) => {
                tally.refused.fetch_add(1, Relaxed);
                tokio::time::sleep(pause.mul_f64(1.0 + share(&options))).await;
                pause = (pause * 2).min(longest);
            }
            Err(e) => return Err(e.to_string()),
        }
    }
}

/// Between 0 and 1: each node pauses for a time of its own.
fn share(options: &ConnectOptions) -> f64 {
    (options.incarnation.0.wrapping_mul(0x9e37_79b9) % 256) as f64 / 255.0
}

/// Does the same for each, at most `width` at a time; what came of those that are through, in order.
pub async fn each<I, T, F, Fut>(
    items: impl IntoIterator<Item = I>,
    width: usize,
    tally: &Arc<Tally>,
    work: F,
) -> Vec<(usize, T)>
where
    T: Send + 'static,
    F: Fn(usize, I) -> Fut,
    Fut: Future<Output = Result<T, String>> + Send + 'static,
{
    let turns = Arc::new(Semaphore::new(width));
    let mut running = JoinSet::new();
    for (i, item) in items.into_iter().enumerate() {
        let (work, turns, tally) = (work(i, item), Arc::clone(&turns), Arc::clone(tally));
        running.spawn(async move {
            let _turn = turns.acquire().await.expect("nothing closes it");
            Some((i, tally.note(work.await)?))
        });
    }
    let mut through: Vec<(usize, T)> = running.join_all().await.into_iter().flatten().collect();
    through.sort_by_key(|(i, _)| *i);
    through
}
