//! Keeps the session of a node alive.
//!
//! * Consistency: a session that broke is resumed under the same incarnation, also with a service
//!   that was restarted; what was unanswered goes out again (see [`crate::exchange`]).
//! * Retries: without end, with growing pauses, until the service of the job refuses this node for
//!   good. Somebody else who answers in its place (a service of another job, an older state of this
//!   one, a stranger) ends nothing: calls fail at once with EIO, the log and [`crate::MetaClient::refusal`]
//!   say why, and the right one is looked for again and again.
//! * Cancellation: the tasks end when the last [`crate::MetaClient`] is dropped.
//! * Completion: calls end by their answer, their deadline, or the end of the session for good.

use crate::client::Inner;
use crate::exchange::Patience;
use crate::session::{self, Acquaintance, ConnectError, Session};
use crate::silence::Silence;
use crate::trust;
use ebb_transport::auth;
use ebb_types::{Errno, Ino};
use ebb_wire::pb::{self, notice::What, request::Op};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tokio::time::{Instant, sleep, sleep_until};

/// The first pause between two attempts to reconnect.
const PAUSE_MIN: Duration = Duration::from_millis(10);
/// The longest one.
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// When the service has said nothing for so long, it is looked whether there is another one.
const SILENT: Duration = Duration::from_secs(1);
/// Why calls fail after a goodbye.
pub(crate) const LEFT: &str = "this node has left the job";
/// Heartbeats of one lease: two may be lost.
const HEARTBEATS_PER_LEASE: u32 = 3;

/// What a node must hear of besides the answers to its calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The connection broke; calls wait.
    Disconnected,
    /// The same service is back.
    Resumed {
        /// This node was silent for so long that its locks and opens were given up.
        expired: bool,
    },
    /// A new instance of the service is there: it knows what the old one had journalled, but no
    /// flush grants. Sent before any call is answered by it.
    ServiceRestarted {
        /// Its number.
        instance: u64,
        /// As for [`Event::Resumed`].
        expired: bool,
    },
    /// This node is out of the job: another daemon took its name, or the service refuses it.
    /// Every call fails from now on.
    Fenced {
        /// In words.
        reason: String,
    },
}

/// Runs `session` and those that follow it.
pub(crate) async fn drive(inner: Arc<Inner>, mut session: Session) {
    let mut silence = Silence::default();
    loop {
        let (began, instance) = (Instant::now(), inner.instance.load(Relaxed));
        if let Err(reason) = listen(&inner, session).await {
            return inner.fence(&reason);
        }
        if inner.leaving.load(Relaxed) {
            // Who comes back after a goodbye would be a node of the job again.
            return inner.exchange.end(Errno::ENOTCONN, LEFT);
        }
        inner.exchange.down();
        inner.announce(Event::Disconnected);
        silence = silence.after(began.elapsed());
        session = match reconnect(&inner, silence).await {
            Ok(session) => session,
            Err(refused) => return inner.fence(&refused.to_string()),
        };
        if session.welcome.service_instance != instance {
            // It was gone; that has nothing to do with patience.
            silence = Silence::default();
        }
        welcome(&inner, &session);
    }
}

/// Without a heartbeat for so long something of this node's ends.
pub(crate) fn shortest_lease(welcome: &pb::Welcome) -> u32 {
    match welcome.trust_ms {
        0 => welcome.lease_ms,
        trust => trust.min(welcome.lease_ms),
    }
}

/// Makes a session's calls flow.
pub(crate) fn welcome(inner: &Arc<Inner>, session: &Session) {
    let instance = session.welcome.service_instance;
    let before = inner.instance.swap(instance, Relaxed);
    let restarted = inner.sessions.fetch_add(1, Relaxed) > 0 && before != instance;
    inner.lease_ms.store(shortest_lease(&session.welcome), Relaxed);
    // Before the first word of this session, which tells the service so.
    inner.trusting.begin(session.welcome.trust_ms);
    inner.node_id.store(session.welcome.node_id, Relaxed);
    inner.at.lock().clone_from(&session.address);
    *inner.known.lock() = Acquaintance::made(&session.welcome);
    if inner.refused.lock().take().is_some() {
        tracing::warn!("the metadata service of this job is back");
    }
    inner.trusting.welcomed(session.sent, session.welcome.lease_ms, session.welcome.expired);
    if inner.sessions.load(Relaxed) > 1 {
        tracing::info!(restarted, "connected to the metadata service again");
        let expired = session.welcome.expired;
        inner.announce(match restarted {
            true => Event::ServiceRestarted { instance, expired },
            false => Event::Resumed { expired },
        });
    }
    inner.exchange.up(session.number);
    inner.heartbeat(0);
    if session.welcome.reassert {
        inner.names_after.store(session.welcome.names_after, Relaxed);
        inner.owed.send_modify(|sessions| *sessions += 1);
    }
}

/// Hands out what comes until the stream breaks (Ok) or this node is told to stop (Err).
async fn listen(inner: &Arc<Inner>, session: Session) -> Result<(), String> {
    let Session { mut stream, early, .. } = session;
    let in_terms = ebb_coordinator::directory_of(&inner.options.address).is_some();
    let mut frame = early;
    loop {
        receive(inner, frame)?;
        let message = tokio::select! {
            biased;
            message = stream.message() => message,
            newer = newer_term(inner), if in_terms => {
                tracing::warn!(newer, "the metadata service says nothing, and another one has taken over");
                return Ok(());
            }
        };
        frame = match message {
            Ok(Some(frame)) => frame,
            Ok(None) => return Ok(()),
            Err(e) => {
                tracing::debug!(error = %e, "stream to the metadata service broke");
                return Ok(());
            }
        };
    }
}

/// Waits until the service has been silent for a while and another one has begun in its place, where that is
/// said somewhere. Its connection need not break: it may stand still, or be cut off.
async fn newer_term(inner: &Inner) -> u64 {
    let mine = inner.terms.newest.load(Relaxed);
    loop {
        sleep(SILENT).await;
        // What cannot be looked at says nothing.
        let _ = session::whereabouts(&inner.options.address, &inner.terms).await;
        let newest = inner.terms.newest.load(Relaxed);
        if newest > mine {
            return newest;
        }
    }
}

fn receive(inner: &Arc<Inner>, mut frame: pb::ServerFrame) -> Result<(), String> {
    {
        // Before anybody acts on what the frame says.
        let mut known = inner.known.lock();
        known.told = known.told.max(frame.durable);
    }
    inner.hear_facts(&mut frame.replies);
    let unknown = inner.exchange.resolve(frame.replies);
    inner.unknown_replies.fetch_add(unknown as u64, Relaxed);
    for notice in frame.notices {
        match notice.what {
            Some(What::Fenced(fenced)) => return Err(fenced.reason),
            Some(What::Ping(ping)) => inner.heartbeat(ping.number),
            Some(What::Recall(recall)) => inner.recalled(&recall),
            Some(What::Publish(asked)) => inner.asked_to_publish(&asked),
            Some(What::Deleted(gone)) => inner.is_deleted(Ino(gone.ino)),
            // From a newer service; nothing that this node must know.
            None => {}
        }
    }
    Ok(())
}

async fn reconnect(inner: &Inner, silence: Silence) -> Result<Session, ConnectError> {
    let mut pause = PAUSE_MIN;
    let mut logged = false;
    loop {
        let known = *inner.known.lock();
        let (options, exchange) = (&inner.options, &inner.exchange);
        match session::open(options, exchange, Some(known), &inner.terms, silence).await {
            Ok(session) => return Ok(session),
            Err(e) if e.may_pass() => {
                if !logged {
                    tracing::warn!(error = %e, "lost the metadata service, trying again");
                    logged = true;
                }
            }
            Err(e) if !e.is_final() => {
                inner.refuse(&e);
                pause = PAUSE_MAX;
            }
            Err(e) => return Err(e),
        }
        // Up to twice as long, so that the nodes of a job do not come back all at once.
        sleep(pause + pause.mul_f64(f64::from(auth::nonce()[0]) / 255.0)).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// Sends heartbeats in good time.
pub(crate) async fn beat(inner: Arc<Inner>) {
    loop {
        let lease = Duration::from_millis(u64::from(inner.lease_ms.load(Relaxed)));
        sleep((lease / HEARTBEATS_PER_LEASE).max(Duration::from_millis(1))).await;
        inner.heartbeat(0);
    }
}

/// Ends calls whose deadline has passed. One clock for all of them: a call sets no timer, and
/// may overrun its deadline by an eighth of it.
pub(crate) async fn watch_deadlines(inner: Arc<Inner>) {
    let timeout = inner.options.request_timeout;
    let period = (timeout / 8).clamp(Duration::from_millis(2), Duration::from_millis(500));
    let mut up_last = Instant::now();
    let mut logged = false;
    loop {
        sleep_until(Instant::now() + period).await;
        let now = Instant::now();
        if inner.exchange.is_up() {
            up_last = now;
            logged = false;
        }
        let expired = inner.exchange.expire(now.into_std(), now - up_last >= timeout);
        if expired > 0 {
            inner.timeouts.fetch_add(expired as u64, Relaxed);
            if !logged {
                tracing::warn!(expired, ?timeout, "no answer from the metadata service in time");
                logged = true;
            }
        }
    }
}

impl Inner {
    /// Sends a heartbeat, which may answer a ping; its answer renews this node's trust from now on.
    fn heartbeat(self: &Arc<Self>, answers: u64) {
        if !self.exchange.is_up() {
            return;
        }
        let dirty_bytes = self.dirty_bytes.load(Relaxed);
        let sent = trust::now_ms();
        let beat = Op::Heartbeat(pb::Heartbeat { dirty_bytes, answers });
        let Ok((_, answer)) = self.submit(beat, self.on_this_connection()) else { return };
        let inner = Arc::clone(self);
        tokio::spawn(async move {
            if let Ok(Ok(_)) = answer.await {
                inner.trusting.answered(sent);
            }
        });
    }

    /// For what is of no use on another connection.
    pub fn on_this_connection(&self) -> Patience {
        let until = Instant::now() + self.options.request_timeout;
        Patience::Connection(until.into_std())
    }

    fn announce(&self, event: Event) {
        // Nobody may be listening.
        let _ = self.events.send(event);
    }

    /// What answers is not the job's service. Waiting calls end, those that come fail at once.
    fn refuse(&self, why: &ConnectError) {
        let text = format!(
            "{why}. Nothing is sent there, and nothing is deleted here: bring the job's service back on \
             its newest state, or, if that is lost, with `ebb meta --rebuild`; or unmount and save what is in \
             the cache with `ebb recover`"
        );
        let mut refused = self.refused.lock();
        if refused.as_ref() != Some(&text) {
            tracing::error!(reason = text, "this node does not speak to the service that answers");
        }
        *refused = Some(text.clone());
        drop(refused);
        self.exchange.refuse(&text);
    }

    fn fence(&self, reason: &str) {
        tracing::error!(reason, "this node is out of the job");
        self.exchange.end(Errno::EIO, reason);
        self.fenced.send_replace(Some(reason.to_owned()));
        self.announce(Event::Fenced { reason: reason.to_owned() });
    }
}
