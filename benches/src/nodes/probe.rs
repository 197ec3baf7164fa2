//! Another client of the service, which asks for a name and for attributes all the time: how long it has to
//! wait for an answer while others work. It has a thread of its own, because the nodes keep theirs busy.

use ebb_meta_client::{ConnectOptions, Made, MakeRequest, MetaClient, Opened, Wish};
use ebb_types::{Errno, FileKind, Ino, Name};
use parking_lot::Mutex;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Between an answer and the next question.
const PAUSE: Duration = Duration::from_millis(10);

/// Asks until it is dropped.
pub struct Probe {
    waits: Arc<Mutex<Waits>>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Probe {
    /// Joins the job and begins.
    pub async fn start(options: ConnectOptions) -> Result<Probe, String> {
        let waits = Arc::new(Mutex::new(Waits::new(Instant::now())));
        let (stop, stopped) = oneshot::channel();
        let (ready, begun) = oneshot::channel();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|e| e.to_string())?;
        let its = Arc::clone(&waits);
        let thread = std::thread::spawn(move || {
            runtime.block_on(async move {
                tokio::select! {
                    () = work(options, ready, &its) => {}
                    // Also when the sender is gone.
                    _ = stopped => {}
                }
            });
        });
        let probe = Probe { waits, stop: Some(stop), thread: Some(thread) };
        begun.await.map_err(|_| "the probe ended".to_owned())??;
        Ok(probe)
    }

    /// From now on.
    pub fn begin(&self) {
        let mut waits = self.waits.lock();
        *waits = waits.anew(Instant::now());
    }

    /// Questions that were answered since `begin`.
    #[must_use]
    pub fn answers(&self) -> u32 {
        self.waits.lock().answers
    }

    /// The longest wait since `begin`, also one that has not ended.
    #[must_use]
    pub fn longest(&self) -> Duration {
        self.waits.lock().longest(Instant::now())
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        drop(self.stop.take());
        // Should it have panicked, the panic was printed.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// How long answers took since a moment.
#[derive(Clone, Copy, Debug)]
struct Waits {
    since: Instant,
    /// When the question was asked that has no answer yet.
    asked: Option<Instant>,
    longest: Duration,
    answers: u32,
}

impl Waits {
    fn new(since: Instant) -> Waits {
        Waits { since, asked: None, longest: Duration::ZERO, answers: 0 }
    }

    fn anew(self, now: Instant) -> Waits {
        Waits { asked: self.asked, ..Waits::new(now) }
    }

    fn answered(&mut self, now: Instant) {
        self.longest = self.longest(now);
        self.asked = None;
        self.answers += 1;
    }

    /// What of a wait is from before `since` belongs to what was measured then.
    fn longest(&self, now: Instant) -> Duration {
        let waiting = self.asked.map(|asked| now.saturating_duration_since(asked.max(self.since)));
        self.longest.max(waiting.unwrap_or_default())
    }
}

async fn work(
    options: ConnectOptions,
    ready: oneshot::Sender<Result<(), String>>,
    waits: &Mutex<Waits>,
) {
    let (client, name, ino) = match prepare(options).await {
        Ok(prepared) => prepared,
        Err(e) => {
            // Who started it waits for this word.
            let _ = ready.send(Err(e));
            return;
        }
    };
    let _ = ready.send(Ok(()));
    loop {
        waits.lock().asked = Some(Instant::now());
        // A question that fails is asked again: the wait goes on until there is an answer.
        while client.lookup(Ino::ROOT, &name).await.is_err() {
            tokio::time::sleep(PAUSE).await;
        }
        waits.lock().answered(Instant::now());
        tokio::time::sleep(PAUSE).await;
        waits.lock().asked = Some(Instant::now());
        while client.getattr(ino).await.is_err() {
            tokio::time::sleep(PAUSE).await;
        }
        waits.lock().answered(Instant::now());
        tokio::time::sleep(PAUSE).await;
    }
}

async fn prepare(options: ConnectOptions) -> Result<(MetaClient, Name, Ino), String> {
    let (client, _) = MetaClient::connect(options).await.map_err(|e| e.to_string())?;
    let name = Name::new(b"small").expect("it is a name");
    let ino = make_file(&client, &name, false).await.map_err(|e| format!("making a file: {e}"))?;
    Ok((client, name, ino))
}

/// A new empty file at the top; open for who makes it, if it is to be.
pub async fn make_file(client: &MetaClient, name: &Name, open: bool) -> Result<Ino, Errno> {
    let wanted = MakeRequest {
        parent: Ino::ROOT,
        name: name.clone(),
        kind: FileKind::Regular,
        perm: 0o644,
        uid: 0,
        gid: 0,
        rdev: 0,
        target: Vec::new(),
        open,
        lease: Wish::No,
        seat: None,
        handle: 0,
    };
    match client.make(&wanted).await? {
        Made::Made(attr, _) | Made::Opened(Opened { attr, .. }, _) => Ok(attr.ino),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_wait_counts_before_it_has_ended_and_only_from_the_beginning_on() {
        let begin = Instant::now();
        let mut waits = Waits::new(begin);
        waits.asked = Some(begin);
        assert_eq!(waits.longest(begin + SECOND), SECOND);
        let mut later = waits.anew(begin + SECOND);
        assert_eq!(later.longest(begin + SECOND * 3), SECOND * 2);
        later.answered(begin + SECOND * 4);
        assert_eq!((later.longest(begin + SECOND * 9), later.answers), (SECOND * 3, 1));
    }
}
