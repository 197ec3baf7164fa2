//! One node's stream: the handshake, then requests in and answers out.
//!
//! Consistency: an answer is sent only when everything that was true when it was made is in the
//! journal, so nobody ever learns what a crash of the service could take back; and only as long as no other
//! service can have taken over.
//! Retries: a request that comes again after a reconnect is answered from what is remembered, or
//! joins the one that still runs.
//! Cancellation: operations run on when their stream breaks; their answers are remembered where
//! it matters and dropped where it does not.
//! Completion: the stream ends when the node ends it, is replaced, or says goodbye.

use crate::core::Core;
use crate::doors::Visitor;
use crate::joining::{check_hello, join};
use crate::leases::{self, Asking, Owed};
use crate::ops::{Call, Fast, OpError, OpResult};
use crate::quiet::{Settled, can_be_repeated, comes_first};
use crate::seats::goes_on_without;
use crate::sessions::{Out, Turnout, Who};
use ebb_consistency::StreamId;
use ebb_transport::Token;
use ebb_transport::auth::{self, SessionHandshake};
use ebb_types::{Errno, Ino, NodeId};
use ebb_wire::pb;
use ebb_wire::pb::reply::Body;
use ebb_wire::pb::request::Op;
use prost::Message;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Semaphore, mpsc, watch};
use tonic::{Status, Streaming};

/// Frames that wait for a slow reader before its requests are read no further.
const OUT_FRAMES: usize = 1024;

/// Answers put into one frame at most.
const REPLIES_PER_FRAME: usize = 512;

/// Operations of one node that wait for the backing at the same time; more are read later.
const SLOW_MAX: usize = 4096;

/// The handshake takes no longer.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);

/// Sends frames of a stream.
pub type FrameSender = mpsc::Sender<Result<pb::ServerFrame, Status>>;

/// Serves a stream to its end.
pub async fn serve(
    core: Arc<Core>,
    token: Option<Arc<Token>>,
    visitor: Visitor,
    mut frames: Streaming<pb::ClientFrame>,
    to_node: FrameSender,
) {
    if core.tenure.held().await.is_err() {
        return;
    }
    let door = Door { token: token.as_deref(), visitor: &visitor };
    let greeting = greet(&core, &door, &mut frames, &to_node);
    let greeted = match tokio::time::timeout(HANDSHAKE_MAX, greeting).await {
        Ok(Some(greeted)) => greeted,
        Ok(None) | Err(_) => return,
    };
    let Greeted { who, serial, ended, out, more } = greeted;
    let slow = Arc::new(Semaphore::new(SLOW_MAX));
    let mut stream = Stream { core: Arc::clone(&core), who, serial, out, slow };
    stream.run(more, frames, ended).await;
    leave(&core, who.node, serial);
    tracing::debug!(node = %who.node, "stream ended");
}

/// The stream of a node counts no more.
fn leave(core: &Core, node: NodeId, serial: StreamId) {
    core.desk.left(serial);
    core.sessions.detach(node, serial);
}

/// One request of a node that has a stream, answered as there, but on its own.
pub async fn answer(core: Arc<Core>, node: NodeId, request: pb::Request) -> Option<pb::Reply> {
    let (who, serial) = core.sessions.stream_of(node)?;
    let (out, mut answers) = mpsc::channel(1);
    let mut stream = Stream { core, who, serial, out, slow: Arc::new(Semaphore::new(1)) };
    stream.requests(vec![request]).await;
    match answers.recv().await? {
        Out::Replies(mut replies) => replies.pop(),
        Out::Notice(_) => None,
    }
}

struct Greeted {
    who: Who,
    serial: StreamId,
    ended: watch::Receiver<bool>,
    out: mpsc::Sender<Out>,
    /// Requests that came in the same frame as the last word of the handshake.
    more: Vec<pb::Request>,
}

/// Where a node comes in.
struct Door<'a> {
    token: Option<&'a Token>,
    visitor: &'a Visitor,
}

/// Why a handshake ends without a session: an answer for the node, or silence.
type Refusal = Option<(u64, OpError)>;

async fn greet(
    core: &Arc<Core>,
    door: &Door<'_>,
    frames: &mut Streaming<pb::ClientFrame>,
    to_node: &FrameSender,
) -> Option<Greeted> {
    match try_greet(core, door, frames, to_node).await {
        Ok(greeted) => Some(greeted),
        Err(None) => None,
        Err(Some((id, error))) => {
            tracing::debug!(errno = ?error.errno, text = error.text, "a node was refused");
            // By it a node of the job knows that it is the job's service that says so.
            let refusal = pb::Reply { job: core.job(), ..reply(id, Err(error)) };
            core.tenure.held().await.ok()?;
            // The node may be gone already.
            let _ = to_node.send(Ok(frame_of(vec![refusal]))).await;
            None
        }
    }
}

async fn try_greet(
    core: &Arc<Core>,
    door: &Door<'_>,
    frames: &mut Streaming<pb::ClientFrame>,
    to_node: &FrameSender,
) -> Result<Greeted, Refusal> {
    let mut requests = next_requests(frames).await?;
    let first = requests.remove(0);
    let Some(Op::Hello(hello)) = first.op else {
        return Err(Some((first.id, OpError::new(Errno::EPROTO, "the first request is Hello"))));
    };
    let refuse = |id: u64| move |e: OpError| Some((id, e));
    check_hello(&hello).map_err(refuse(first.id))?;
    let mut id = first.id;
    if let Some(token) = door.token {
        let nonce = auth::nonce();
        // All of it, so that nothing of it can be changed on the way.
        let said = hello.encode_to_vec();
        let shake =
            SessionHandshake { hello_nonce: &hello.nonce, service_nonce: &nonce, hello: &said };
        let challenge =
            pb::Challenge { nonce: nonce.to_vec(), proof: shake.service_proof(token).to_vec() };
        let answer = reply(id, Ok(Some(Body::Challenge(challenge))));
        to_node.send(Ok(frame_of(vec![answer]))).await.map_err(|_| None)?;
        requests = next_requests(frames).await?;
        let second = requests.remove(0);
        id = second.id;
        let proof = match second.op {
            Some(Op::Prove(p)) if shake.node_proof_is(token, &p.proof) => Ok(()),
            Some(Op::Prove(_)) => Err(OpError::new(Errno::EACCES, "the job token differs")),
            _ => Err(OpError::new(Errno::EPROTO, "the answer to a challenge is Prove")),
        };
        proof.map_err(refuse(id))?;
    }
    // From here on it is no stranger, whatever the welcome waits for: the journal may stand still
    // for longer than it takes many others to come in.
    door.visitor.admit();
    let (out, outgoing) = mpsc::channel(OUT_FRAMES);
    let joined = join(core, &hello, out.clone()).map_err(refuse(id))?;
    if let Err(e) = core.noted().await {
        leave(core, joined.who.node, joined.serial);
        // With room again the node is welcome.
        let errno = if e.errno == Errno::ENOSPC { Errno::EAGAIN } else { e.errno };
        return Err(Some((id, OpError { errno, ..e })));
    }
    let welcome = reply(id, Ok(Some(Body::Welcome(joined.welcome))));
    let frame = pb::ServerFrame { durable: core.durable(), ..frame_of(vec![welcome]) };
    core.tenure.held().await.map_err(|_| None)?;
    to_node.send(Ok(frame)).await.map_err(|_| None)?;
    let ended = joined.ended.clone();
    tokio::spawn(pump(core.clone(), outgoing, joined.recalls, to_node.clone(), ended));
    Ok(Greeted { who: joined.who, serial: joined.serial, ended: joined.ended, out, more: requests })
}

/// The next frame that has requests.
async fn next_requests(
    frames: &mut Streaming<pb::ClientFrame>,
) -> Result<Vec<pb::Request>, Refusal> {
    loop {
        match frames.message().await {
            Ok(Some(frame)) if frame.requests.is_empty() => {}
            Ok(Some(frame)) => return Ok(frame.requests),
            Ok(None) | Err(_) => return Err(None),
        }
    }
}

/// Puts what there is to send into frames, several answers to one.
async fn pump(
    core: Arc<Core>,
    mut outgoing: mpsc::Receiver<Out>,
    mut recalls: mpsc::UnboundedReceiver<pb::Notice>,
    to_node: FrameSender,
    mut ended: watch::Receiver<bool>,
) {
    let mut batch = Vec::new();
    let mut notices = Vec::new();
    let mut recalling = true;
    loop {
        batch.clear();
        notices.clear();
        tokio::select! {
            biased;
            // First: somebody waits for their return.
            n = recalls.recv_many(&mut notices, REPLIES_PER_FRAME), if recalling => if n == 0 {
                // The node has left; what there is for it to hear is sent all the same.
                recalling = false;
                continue;
            },
            n = outgoing.recv_many(&mut batch, REPLIES_PER_FRAME) => if n == 0 { return },
            () = end_of(&mut ended) => return,
        }
        let notices = std::mem::take(&mut notices);
        let mut frame = pb::ServerFrame { notices, replies: vec![], durable: core.durable() };
        for out in batch.drain(..) {
            match out {
                Out::Replies(replies) => frame.replies.extend(replies),
                Out::Notice(notice) => frame.notices.push(notice),
            }
        }
        // Another service may have taken over since the answers were made.
        if core.tenure.held().await.is_err() || to_node.send(Ok(frame)).await.is_err() {
            return;
        }
    }
}

/// Waits until the stream must end. A node that said goodbye is forgotten, but ends its stream
/// itself, so that it hears the answer.
async fn end_of(ended: &mut watch::Receiver<bool>) {
    if ended.wait_for(|e| *e).await.is_err() {
        std::future::pending::<()>().await;
    }
}

fn frame_of(replies: Vec<pb::Reply>) -> pb::ServerFrame {
    pb::ServerFrame { replies, ..Default::default() }
}

fn reply(id: u64, result: OpResult) -> pb::Reply {
    match result {
        Ok(body) => pb::Reply { id, body, ..Default::default() },
        Err(e) => pb::Reply { id, errno: e.errno.0, text: e.text, ..Default::default() },
    }
}

#[derive(Clone)]
struct Stream {
    core: Arc<Core>,
    who: Who,
    serial: StreamId,
    out: mpsc::Sender<Out>,
    slow: Arc<Semaphore>,
}

impl Stream {
    async fn run(
        &mut self,
        first: Vec<pb::Request>,
        mut frames: Streaming<pb::ClientFrame>,
        mut ended: watch::Receiver<bool>,
    ) {
        self.requests(first).await;
        loop {
            let frame = tokio::select! {
                biased;
                () = end_of(&mut ended) => return,
                frame = frames.message() => frame,
            };
            match frame {
                Ok(Some(frame)) => {
                    self.core.sessions.heard(self.who.node, None);
                    self.core.desk.heard(self.serial);
                    self.requests(frame.requests).await;
                }
                Ok(None) | Err(_) => return,
            }
        }
    }

    /// Answers what it can at once, in one frame; the rest goes its own way.
    async fn requests(&mut self, requests: Vec<pb::Request>) {
        let mut replies = Vec::with_capacity(requests.len());
        for request in requests {
            let Some(op) = request.op else {
                let error = OpError::new(Errno::ENOSYS, "an operation that is not known here");
                replies.push(reply(request.id, Err(error)));
                continue;
            };
            self.core.stats.count(&op);
            let core = Arc::clone(&self.core);
            let (who, stream, id) = (self.who, self.serial, request.id);
            let call = Call { core, who, stream, id, beside_seats: request.beside_seats };
            if Call::is_once(&op) {
                self.once(call, op, &mut replies).await;
            } else {
                self.start(call, op, None, &mut replies).await;
            }
        }
        if !replies.is_empty() {
            send(&self.core, &self.out, replies).await;
        }
    }

    /// An operation that must not be done twice.
    async fn once(&self, call: Call, op: Op, replies: &mut Vec<pb::Reply>) {
        match self.core.sessions.once(self.who, call.id) {
            None => {
                let gone = OpError::new(Errno::ESTALE, "this node has left or was replaced");
                replies.push(reply(call.id, Err(gone)));
            }
            Some(Turnout::Done(answer)) => replies.push(*answer),
            Some(Turnout::Wait(mut told)) => {
                let (core, out) = (Arc::clone(&self.core), self.out.clone());
                tokio::spawn(async move {
                    let answer = told.wait_for(Option::is_some).await.ok().and_then(|r| r.clone());
                    if let Some(answer) = answer {
                        send(&core, &out, vec![answer]).await;
                    }
                });
            }
            Some(Turnout::Do(tell)) => match call.answered_before(&op) {
                Some(result) => {
                    let facts = self.core.facts(self.core.subject(&op), &result);
                    let answer = pb::Reply { facts, ..reply(call.id, result) };
                    self.core.sessions.remember(self.who, &answer);
                    replies.push(answer);
                }
                None => self.start(call, op, Some(tell), replies).await,
            },
        }
    }

    async fn start(
        &self,
        call: Call,
        op: Op,
        tell: Option<watch::Sender<Option<pb::Reply>>>,
        replies: &mut Vec<pb::Reply>,
    ) {
        if self.core.awaits_words(&op) {
            return self.after_words(true, call, op, tell);
        }
        if self.core.awaits_names(&op) {
            return self.after_words(false, call, op, tell);
        }
        self.start_when(settled_for(&call), call, op, tell, replies).await;
    }

    async fn start_when(
        &self,
        settled: Settled,
        call: Call,
        op: Op,
        tell: Option<watch::Sender<Option<pb::Reply>>>,
        replies: &mut Vec<pb::Reply>,
    ) {
        let forgotten = self.core.note_use(&op);
        if !forgotten.is_empty() {
            return self.after_finding(forgotten, settled, call, op, tell);
        }
        let quiet = self.core.quiet_before(call.who.node, &op, settled);
        if !quiet.is_empty() {
            return self.after_settling(quiet, call, op, tell);
        }
        let name = crate::stats::name(&op);
        let again = can_be_repeated(&op).then(|| op.clone());
        let subjects = leases::subjects(&op);
        let lease = self.core.grant(self.who, self.serial, &op);
        let by = (self.serial, comes_first(&op));
        let asking = Asking::new(self.serial, &op);
        let subject = self.core.subject(&op);
        let (fast, changed) = asking.at_once(|| call.fast(op));
        match fast {
            Fast::Done(mut result) => {
                let who = (call.who.node, settled);
                if let Some((op, quiet)) = self.core.told_too_little(who, again, &result) {
                    return self.after_settling(quiet, call, op, tell);
                }
                leases::put(lease, &mut result);
                let owed = self.core.owed(by, changed, &subjects, &result);
                let facts = self.core.facts(subject, &result);
                let answer = pb::Reply { facts, ..reply(call.id, result) };
                let Some(owed) = owed else {
                    finish(&call, tell, &answer);
                    return replies.push(answer);
                };
                tokio::spawn(answer_later(call, tell, answer, owed, self.out.clone()));
            }
            Fast::Lock(told, asks) => {
                let out = self.out.clone();
                tokio::spawn(async move {
                    let mut result = call.lock_wait(told).await;
                    if let Some(asks) = asks {
                        if result.is_ok() {
                            result = call.core.publish_before(&asks).await.map(|()| None);
                        }
                        call.core.publishing.end(&asks);
                    }
                    let answer = reply(call.id, result);
                    finish(&call, tell, &answer);
                    send(&call.core, &out, vec![answer]).await;
                });
            }
            Fast::Slow(op) => {
                let slow = Arc::clone(&self.slow);
                let Ok(permit) = slow.acquire_owned().await else { return };
                let (out, this) = (self.out.clone(), self.clone());
                tokio::spawn(async move {
                    let asking = Asking::new(call.stream, &op);
                    let (mut result, changed) = asking.later(call.slow(op)).await;
                    let who = (call.who.node, settled);
                    if let Some((op, quiet)) = call.core.told_too_little(who, again, &result) {
                        return this.after_settling(quiet, call, op, tell);
                    }
                    tracing::debug!(node = %call.who.node, op = name, ok = result.is_ok(), "done");
                    leases::put(lease, &mut result);
                    let owed = call.core.owed(by, changed, &subjects, &result).unwrap_or_default();
                    let facts = call.core.facts(subject, &result);
                    let answer = pb::Reply { facts, ..reply(call.id, result) };
                    drop(permit);
                    answer_later(call, tell, answer, owed, out).await;
                });
            }
        }
    }
}

impl Stream {
    /// Does an operation once the nodes have told what this service may have forgotten; of names alone, if not
    /// `all` of it.
    fn after_words(
        &self,
        all: bool,
        call: Call,
        op: Op,
        tell: Option<watch::Sender<Option<pb::Reply>>>,
    ) {
        let this = self.clone();
        let work: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(async move {
            match all {
                true => this.core.words_are_heard().await,
                false => this.core.names_are_heard().await,
            }
            let mut replies = Vec::new();
            this.start_when(settled_for(&call), call, op, tell, &mut replies).await;
            if !replies.is_empty() {
                send(&this.core, &this.out, replies).await;
            }
        });
        tokio::spawn(work);
    }

    /// Does an operation once the inodes that it names, which were forgotten, are found again.
    fn after_finding(
        &self,
        inos: Vec<Ino>,
        settled: Settled,
        call: Call,
        op: Op,
        tell: Option<watch::Sender<Option<pb::Reply>>>,
    ) {
        let this = self.clone();
        let work: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(async move {
            let mut found = Ok(());
            for ino in inos {
                match this.core.find_again(ino).await {
                    // The operation says so itself.
                    Ok(()) | Err(Errno::ESTALE) => {}
                    Err(e) => found = Err(e),
                }
            }
            let mut replies = Vec::new();
            match found {
                Ok(()) => this.start_when(settled, call, op, tell, &mut replies).await,
                Err(e) => {
                    let answer = reply(call.id, Err(e.into()));
                    finish(&call, tell, &answer);
                    replies.push(answer);
                }
            }
            if !replies.is_empty() {
                send(&this.core, &this.out, replies).await;
            }
        });
        tokio::spawn(work);
    }

    /// Does an operation once the nodes that may have written to these inodes quietly have told.
    fn after_settling(
        &self,
        inos: Vec<Ino>,
        call: Call,
        op: Op,
        tell: Option<watch::Sender<Option<pb::Reply>>>,
    ) {
        let this = self.clone();
        let work: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(async move {
            let settled = this.core.settle_quiet(call.who.node, &inos).await;
            let mut replies = Vec::new();
            match settled {
                Err(e) if !goes_on_without(&op) => {
                    let answer = reply(call.id, Err(e));
                    finish(&call, tell, &answer);
                    replies.push(answer);
                }
                _ => this.start_when(Settled::Seats, call, op, tell, &mut replies).await,
            }
            if !replies.is_empty() {
                send(&this.core, &this.out, replies).await;
            }
        });
        tokio::spawn(work);
    }
}

/// What need not be settled for a request.
fn settled_for(call: &Call) -> Settled {
    if call.beside_seats { Settled::Seats } else { Settled::Nothing }
}

/// Answers once every lease that must be returned for it is.
async fn answer_later(
    call: Call,
    tell: Option<watch::Sender<Option<pb::Reply>>>,
    answer: pb::Reply,
    owed: Owed,
    out: mpsc::Sender<Out>,
) {
    call.core.desk.settled(&owed).await;
    finish(&call, tell, &answer);
    send(&call.core, &out, vec![answer]).await;
}

/// Remembers an answer and tells whoever asked again meanwhile.
fn finish(call: &Call, tell: Option<watch::Sender<Option<pb::Reply>>>, answer: &pb::Reply) {
    if let Some(tell) = tell {
        let again = leases::without_leases(answer.clone());
        call.core.sessions.remember(call.who, &again);
        tell.send_replace(Some(again));
    }
}

/// Sends answers once what they tell is in the journal; without a journal they are failures. But for
/// grants: they were in the journal before they were given, and nobody ends one that he never hears of.
async fn send(core: &Core, out: &mpsc::Sender<Out>, mut replies: Vec<pb::Reply>) {
    if let Err(error) = core.noted().await {
        for answer in replies.iter_mut().filter(|answer| !is_grant(answer)) {
            *answer = reply(answer.id, Err(error.clone()));
        }
    }
    // The stream may have ended; the node asks again when it is back.
    let _ = out.send(Out::Replies(replies)).await;
}

fn is_grant(answer: &pb::Reply) -> bool {
    matches!(&answer.body, Some(Body::FlushGrant(granted)) if granted.grant != 0)
}
