//! The exchange alone, step by step and against an obvious reference.

use super::*;
use proptest::prelude::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::task::Wake;
use std::time::Duration;

#[derive(Default)]
struct Counter(AtomicUsize);

impl Wake for Counter {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, SeqCst);
    }
}

fn lookup(parent: u64) -> Op {
    Op::Lookup(pb::Lookup { parent, name: b"x".to_vec(), lease: 0, tell: false })
}

fn soon() -> Patience {
    Patience::Until(Instant::now() + Duration::from_secs(60))
}

fn frame(exchange: &Exchange, session: u64) -> Vec<pb::Request> {
    match exchange.next(session, Waker::noop()) {
        Next::Frame(frame) => frame.requests,
        Next::Wait => Vec::new(),
        Next::End => panic!("the session is over"),
    }
}

fn ids(requests: &[pb::Request]) -> Vec<u64> {
    requests.iter().map(|r| r.id).collect()
}

fn done(id: u64) -> Vec<pb::Reply> {
    vec![pb::Reply { id, ..Default::default() }]
}

fn connected() -> (Exchange, u64) {
    let exchange = Exchange::new(1);
    let (session, _) = exchange.begin();
    exchange.up(session);
    (exchange, session)
}

#[test]
fn frames_are_bounded_in_requests_and_bytes_and_keep_the_order() {
    let (exchange, session) = connected();
    let mut answers: Vec<_> =
        (0..1200).map(|i| exchange.submit(lookup(i), soon()).unwrap()).collect();
    let big = |len| Op::SetXattr(pb::SetXattr { value: vec![1; len], ..Default::default() });
    for len in [600 << 10, 600 << 10, 3 << 20] {
        answers.push(exchange.submit(big(len), soon()).unwrap());
    }
    let frames: Vec<_> = (0..7).map(|_| ids(&frame(&exchange, session))).collect();
    let sizes: Vec<_> = frames.iter().map(Vec::len).collect();
    assert_eq!(sizes, [512, 512, 177, 1, 1, 0, 0]);
    let sent: Vec<_> = frames.concat();
    assert_eq!(sent, answers.iter().map(|(id, _)| *id).collect::<Vec<_>>());
    let too_big = exchange.submit(big(ebb_wire::MESSAGE_BYTES_MAX), soon());
    assert_eq!(too_big.err(), Some(Errno::E2BIG));
}

#[test]
fn nothing_flows_before_the_welcome_but_the_handshake() {
    let exchange = Exchange::new(1);
    let waiting = exchange.submit(lookup(1), soon()).unwrap();
    let (session, hello) = exchange.begin();
    let counter = Arc::new(Counter::default());
    let waker = Waker::from(counter.clone());
    assert_eq!(exchange.next(session, &waker), Next::Wait);
    let request =
        pb::Request { id: hello, op: Some(Op::Hello(pb::Hello::default())), ..Default::default() };
    exchange.offer(session, request.clone());
    assert_eq!(counter.0.load(SeqCst), 1);
    assert_eq!(frame(&exchange, session), [request]);
    assert_eq!(exchange.next(session, &waker), Next::Wait);
    exchange.up(session);
    assert_eq!(counter.0.load(SeqCst), 2);
    assert_eq!(ids(&frame(&exchange, session)), [waiting.0]);
    // One wake for many requests: the stream takes them all at once.
    assert_eq!(exchange.next(session, &waker), Next::Wait);
    let _more: Vec<_> = (0..5).map(|i| exchange.submit(lookup(i), soon()).unwrap()).collect();
    assert_eq!(counter.0.load(SeqCst), 3);
    assert_eq!(frame(&exchange, session).len(), 5);
}

#[test]
fn an_older_session_ends_and_changes_nothing() {
    let (exchange, old) = connected();
    let counter = Arc::new(Counter::default());
    assert_eq!(exchange.next(old, &Waker::from(counter.clone())), Next::Wait);
    let (new, hello) = exchange.begin();
    assert_eq!(counter.0.load(SeqCst), 1, "its stream is told");
    assert_eq!(exchange.next(old, Waker::noop()), Next::End);
    exchange.offer(old, pb::Request { id: hello, ..Default::default() });
    exchange.up(old);
    assert!(!exchange.is_up());
    assert_eq!(exchange.next(new, Waker::noop()), Next::Wait);
}

#[test]
fn a_heartbeat_dies_with_its_connection() {
    let (exchange, session) = connected();
    let until = Patience::Connection(Instant::now() + Duration::from_secs(60));
    exchange.post(Op::Heartbeat(pb::Heartbeat::default()), until);
    assert_eq!(frame(&exchange, session).len(), 1);
    exchange.down();
    assert_eq!(exchange.unanswered(), 0);
}

#[test]
fn deadlines_are_kept_and_lock_waits_have_none_while_the_service_is_there() {
    let (exchange, session) = connected();
    let now = Instant::now();
    let until = |ms| Patience::Until(now + Duration::from_millis(ms));
    let (_, mut early) = exchange.submit(lookup(1), until(10)).unwrap();
    let (late_id, mut late) = exchange.submit(lookup(2), until(20)).unwrap();
    let (_, mut lock) = exchange.submit(lookup(3), Patience::Granted).unwrap();
    assert_eq!(exchange.expire(now + Duration::from_millis(15), false), 1);
    assert_eq!(early.try_recv().unwrap().unwrap_err().errno, Errno::ETIMEDOUT);
    assert!(late.try_recv().is_err());
    assert_eq!(frame(&exchange, session).len(), 2, "what has timed out is not sent");
    assert_eq!(exchange.expire(now + Duration::from_secs(9), true), 2);
    assert_eq!(late.try_recv().unwrap().unwrap_err().errno, Errno::ETIMEDOUT);
    assert_eq!(lock.try_recv().unwrap().unwrap_err().errno, Errno::ETIMEDOUT);
    assert_eq!(exchange.resolve(done(late_id)), 1, "its answer comes too late");
}

#[test]
fn a_cancelled_request_is_withdrawn_or_cancelled_at_the_service() {
    let (exchange, session) = connected();
    let (id, mut answer) = exchange.submit(lookup(1), Patience::Granted).unwrap();
    exchange.cancel(id, soon());
    assert_eq!(answer.try_recv().unwrap().unwrap_err().errno, Errno::EINTR);
    assert_eq!(frame(&exchange, session), []);

    let (id, mut answer) = exchange.submit(lookup(1), Patience::Granted).unwrap();
    frame(&exchange, session);
    exchange.cancel(id, soon());
    assert!(answer.try_recv().is_err(), "the service has the last word");
    let sent = frame(&exchange, session);
    assert_eq!(sent[0].op, Some(Op::Cancel(pb::Cancel { request: id })));
    exchange.resolve(done(id));
    assert!(answer.try_recv().unwrap().is_ok());
    exchange.cancel(id, soon());
    assert_eq!(frame(&exchange, session), [], "it has ended");
}

#[test]
fn a_lock_granted_to_nobody_is_given_back() {
    let (exchange, session) = connected();
    let lock = pb::SetLock { ino: 4, owner: 5, r#type: 1, wait: true, ..Default::default() };
    let (id, answer) = exchange.submit(Op::SetLock(lock), Patience::Granted).unwrap();
    frame(&exchange, session);
    drop(answer);
    exchange.resolve(done(id));
    let sent = frame(&exchange, session);
    let unlock = pb::SetLock { r#type: UNLOCK, wait: false, ..lock };
    assert_eq!(sent[0].op, Some(Op::SetLock(unlock)));
    exchange.resolve(done(sent[0].id));
    assert_eq!(exchange.unanswered(), 0, "an unlock for nobody is not undone");
}

/// It was granted, and cancelled while the service waited for others before it said so; then its owner asked again.
#[test]
fn a_cancelled_lock_does_not_take_the_next_one_of_its_owner_away() {
    let (exchange, session) = connected();
    let lock = pb::SetLock { ino: 4, owner: 5, r#type: 1, wait: true, ..Default::default() };
    let submit = |lock| exchange.submit(Op::SetLock(lock), Patience::Granted).unwrap();
    let cancelled = || {
        let (id, answer) = submit(lock);
        frame(&exchange, session);
        drop(answer);
        exchange.cancel(id, soon());
        id
    };
    let ids = [cancelled(), cancelled()];
    let (next, mut granted) = submit(lock);
    frame(&exchange, session);
    for id in ids {
        exchange.resolve(done(id));
    }
    exchange.resolve(done(next));
    assert!(granted.try_recv().unwrap().is_ok());
    assert_eq!(frame(&exchange, session), [], "it keeps what it has");
    // Those of others change nothing.
    let id = cancelled();
    let others = [pb::SetLock { owner: 6, ..lock }, pb::SetLock { ino: 5, ..lock }];
    let unlock = pb::SetLock { r#type: UNLOCK, ..lock };
    let _answers = [others[0], others[1], unlock, pb::SetLock { flock: true, ..lock }].map(submit);
    frame(&exchange, session);
    exchange.resolve(done(id));
    let sent = frame(&exchange, session);
    assert_eq!(sent[0].op, Some(Op::SetLock(pb::SetLock { wait: false, ..unlock })));
}

/// Its caller has waited as long as it may; the service was waiting for others.
#[test]
fn a_flush_granted_too_late_is_given_back() {
    let (exchange, session) = connected();
    let now = Instant::now();
    let begin = || Op::FlushBegin(pb::FlushBegin { ino: 4, ranges: vec![] });
    let (id, mut answer) = exchange.submit(begin(), Patience::Until(now)).unwrap();
    frame(&exchange, session);
    let (_, mut unsent) = exchange.submit(begin(), Patience::Until(now)).unwrap();
    assert_eq!(exchange.expire(now, false), 2);
    for answer in [&mut answer, &mut unsent] {
        assert_eq!(answer.try_recv().unwrap().unwrap_err().errno, Errno::ETIMEDOUT);
    }
    assert_eq!(exchange.expire(now, false), 0, "once");
    let given = pb::FlushGrant { grant: 9, ..Default::default() };
    let body = Some(pb::reply::Body::FlushGrant(given));
    exchange.resolve(vec![pb::Reply { id, body, ..Default::default() }]);
    let sent = frame(&exchange, session);
    let end = pb::FlushEnd { ino: 4, grant: 9, done: false, shaped: false };
    assert_eq!(sent.iter().map(|r| r.op.clone()).collect::<Vec<_>>(), [Some(Op::FlushEnd(end))]);
    exchange.resolve(done(sent[0].id));
    assert_eq!(exchange.unanswered(), 0);
}

#[test]
fn after_the_end_everything_fails() {
    let (exchange, session) = connected();
    let (_, mut before) = exchange.submit(lookup(1), soon()).unwrap();
    exchange.end(Errno::EIO, "fenced");
    let error = before.try_recv().unwrap().unwrap_err();
    assert_eq!((error.errno, &*error.text), (Errno::EIO, "fenced"));
    assert_eq!(exchange.submit(lookup(1), soon()).err(), Some(Errno::EIO));
    assert_eq!(exchange.next(session, Waker::noop()), Next::End);
    let (late, _) = exchange.begin();
    exchange.up(late);
    assert!(!exchange.is_up());
}

#[test]
fn an_errno_that_is_none_is_not_passed_on() {
    let (exchange, _) = connected();
    for (sent, heard) in [(2, Errno::ENOENT), (-5, Errno::EPROTO), (70_000, Errno::EPROTO)] {
        let (id, mut answer) = exchange.submit(lookup(1), soon()).unwrap();
        exchange.resolve(vec![pb::Reply { id, errno: sent, ..Default::default() }]);
        assert_eq!(answer.try_recv().unwrap().unwrap_err().errno, heard);
    }
}

#[derive(Clone, Debug)]
enum Step {
    Submit,
    Send,
    Answer(prop::sample::Index),
    Break,
    Connect,
}

fn steps() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => Just(Step::Submit),
        3 => Just(Step::Send),
        3 => any::<prop::sample::Index>().prop_map(Step::Answer),
        1 => Just(Step::Break),
        2 => Just(Step::Connect),
    ]
}

/// What the reference knows of one request.
struct Known {
    id: u64,
    /// On this connection.
    sent_here: bool,
    answered: bool,
    answer: oneshot::Receiver<Answer>,
}

proptest! {
    /// Every request is answered exactly once, and reaches each connection at most once and in
    /// order until it is.
    #[test]
    fn requests_survive_as_the_reference_says(steps in prop::collection::vec(steps(), 1..120)) {
        let exchange = Exchange::new(1);
        let mut session = None;
        let mut known: Vec<Known> = Vec::new();
        for step in steps {
            match step {
                Step::Submit => {
                    let (id, answer) = exchange.submit(lookup(1), soon()).unwrap();
                    known.push(Known { id, answer, sent_here: false, answered: false });
                }
                Step::Send => if let Some(session) = session {
                    let due: Vec<_> = known
                        .iter_mut()
                        .filter(|k| !k.answered && !k.sent_here)
                        .map(|k| { k.sent_here = true; k.id })
                        .collect();
                    prop_assert_eq!(ids(&frame(&exchange, session)), due);
                },
                Step::Answer(which) => {
                    let mut open: Vec<_> = known
                        .iter_mut()
                        .filter(|k| !k.answered && k.sent_here && session.is_some())
                        .collect();
                    if !open.is_empty() {
                        let chosen = which.index(open.len());
                        prop_assert_eq!(exchange.resolve(done(open[chosen].id)), 0);
                        prop_assert_eq!(exchange.resolve(done(open[chosen].id)), 1);
                        open[chosen].answered = true;
                    }
                }
                Step::Break => {
                    exchange.down();
                    session = None;
                }
                Step::Connect => {
                    exchange.down();
                    let (number, _) = exchange.begin();
                    exchange.up(number);
                    session = Some(number);
                    known.iter_mut().for_each(|k| k.sent_here = false);
                }
            }
            let open = known.iter().filter(|k| !k.answered).count();
            prop_assert_eq!(exchange.unanswered(), open);
        }
        for mut k in known {
            prop_assert_eq!(k.answer.try_recv().is_ok_and(|a| a.is_ok()), k.answered);
        }
    }
}
