//! A node joins the job, or comes back: whether it may, under which number, and what becomes of the one of
//! that name that was there before. No word of the handshake itself (`stream.rs`).

use crate::core::Core;
use crate::ops::OpError;
use crate::ops::copies::{forget_kept_by, forget_orphans, last_words, leave_ghost};
use crate::rebuild::Rebuild;
use crate::sessions::{Line, Out, Who};
use crate::state::{Entry, NodeRecord, State};
use ebb_consistency::StreamId;
use ebb_types::{Errno, Incarnation, NodeId, lives};
use ebb_wire::pb;
use std::sync::Arc;
use tokio::sync::{mpsc, watch};

/// Longest name of a node, address or consistency text.
const TEXT_MAX: usize = 4096;

/// The first word of a node, looked at.
pub fn check_hello(hello: &pb::Hello) -> Result<(), OpError> {
    let refuse = |text: String| Err(OpError::new(Errno::EPROTO, text));
    if hello.protocol != ebb_wire::PROTOCOL {
        return refuse(format!(
            "protocol {} is not spoken here, only {}",
            hello.protocol,
            ebb_wire::PROTOCOL
        ));
    }
    if hello.node.is_empty() || hello.node.len() > 255 || hello.node.contains('\0') {
        return refuse("a node needs a name of 1 to 255 bytes".to_owned());
    }
    if hello.peer_address.len() > TEXT_MAX || hello.consistency.len() > TEXT_MAX {
        return refuse("peer address or consistency text is too long".to_owned());
    }
    Ok(())
}

/// A node that is one of the job.
pub struct Joined {
    pub who: Who,
    pub serial: StreamId,
    pub recalls: mpsc::UnboundedReceiver<pb::Notice>,
    pub ended: watch::Receiver<bool>,
    pub welcome: pb::Welcome,
}

/// What becomes of a node of before that told nothing while the state was rebuilt.
const LEFT_OUT: &str =
    "this service was rebuilt without this node: what is in its cache is for `ebb recover`";

/// A node that others have spoken to, or this service when it knew more, must not take what is
/// here for what became of its files. How much is kept of what it was told.
fn check_lineage(core: &Core, state: &State, hello: &pb::Hello) -> Result<u64, OpError> {
    let refuse = |text: String| {
        tracing::warn!(name = hello.node, text, "a node was refused");
        Err(OpError::new(Errno::ESTALE, text))
    };
    if hello.job == 0 && core.job() == 0 {
        let text = "the service is being rebuilt and does not know its job yet: first must come the nodes \
                    that were there before";
        return Err(OpError::new(Errno::EAGAIN, text));
    }
    if hello.job == 0 {
        return Ok(0);
    }
    if core.job() == 0 {
        return Ok(u64::MAX);
    }
    if hello.job != core.job() {
        return refuse(format!(
            "this is the service of another job ({:016x}, the node is of {:016x}): its state directory \
             was lost or exchanged",
            core.job(),
            hello.job
        ));
    }
    let kept = state.lineage.kept_of(hello.told_by);
    if kept.is_none() && state.is_being_rebuilt() {
        return Ok(u64::MAX);
    }
    let left_out = |r: &Rebuild| kept.is_none() || r.lacks(NodeId(hello.node_id));
    if state.rebuild.as_ref().is_some_and(|rebuild| rebuild.done && left_out(rebuild)) {
        return refuse(LEFT_OUT.to_owned());
    }
    let Some(kept) = kept else {
        return refuse(
            "the state of this service is an older one: it does not know of the service that the node \
             has spoken to"
                .to_owned(),
        );
    };
    if kept < hello.told {
        return refuse(format!(
            "the state of this service is an older one: it ends at change {kept} where the node was told \
             of {}",
            hello.told
        ));
    }
    Ok(kept)
}

/// A node that tells what this state is rebuilt from goes on under its number; `None`: it does not.
fn teller(state: &State, hello: &pb::Hello) -> Result<Option<NodeId>, OpError> {
    let of_before = hello.job != 0 && state.lineage.kept_of(hello.told_by).is_none();
    let rebuild = state.rebuild.as_ref().filter(|rebuild| of_before && !rebuild.done);
    let Some(rebuild) = rebuild else { return Ok(None) };
    let number = NodeId(hello.node_id);
    if number == NodeId::NOBODY || number >= rebuild.first_new {
        return Ok(Some(state.next_node()));
    }
    match state.nodes.get(&number) {
        Some(other) if other.name != hello.node => {
            let text = format!("another node of this job says that it is {number}");
            Err(OpError::new(Errno::EBUSY, text))
        }
        _ => Ok(Some(number)),
    }
}

/// Its cache is of a daemon from before this state was rebuilt, of which nothing is known here.
fn is_of_before(state: &State, hello: &pb::Hello, known: Option<&NodeRecord>) -> bool {
    let Some(rebuild) = state.rebuild.as_ref().filter(|_| !hello.empty) else { return false };
    match known {
        Some(node) => rebuild.done && rebuild.lacks(node.id),
        None => hello.job == 0,
    }
}

/// The node becomes (again) one of the job.
pub fn join(
    core: &Arc<Core>,
    hello: &pb::Hello,
    out: mpsc::Sender<Out>,
) -> Result<Joined, OpError> {
    let incarnation = Incarnation(hello.incarnation);
    let mut state = core.state();
    let kept = check_lineage(core, &state, hello)?;
    match &state.consistency {
        Some(ours) if *ours != hello.consistency => {
            let text = format!(
                "this job's consistency is '{ours}', the node asks for '{}': mount with the \
                 --consistency of the other nodes",
                hello.consistency
            );
            return Err(OpError::new(Errno::EINVAL, text));
        }
        _ => {}
    }
    let teller = teller(&state, hello)?;
    let known = state.node_named(&hello.node).cloned();
    if teller.is_none() && is_of_before(&state, hello, known.as_ref()) {
        return Err(OpError::new(Errno::ESTALE, LEFT_OUT));
    }
    let came_back = known.as_ref().filter(|k| k.incarnation != incarnation).map(|k| k.id);
    let mut known = known;
    let mut id = known.as_ref().map_or(teller.unwrap_or(state.next_node()), |n| n.id);
    let mut who = Who { node: id, incarnation };
    let heir = known
        .as_ref()
        .is_some_and(|k| k.incarnation != incarnation && hello.heir_of.contains(&k.incarnation.0));
    if !heir && core.sessions.is_taken(who, core.lease) {
        let text = format!("a node named '{}' is alive in this job", hello.node);
        return Err(OpError::new(Errno::EBUSY, text));
    }
    let mut entries = Vec::new();
    let mut ghost = None;
    if let Some(old) = known.as_ref().filter(|k| k.incarnation != incarnation) {
        if hello.empty {
            entries = leave_ghost(&state, old);
            ghost = (!entries.is_empty()).then_some(old.id);
            if ghost.is_none() {
                entries = last_words(&state, old.id);
            }
            if !entries.is_empty() {
                tracing::warn!(name = hello.node, "back without its cache");
            }
            // With its cache went what it kept of others.
            entries.extend(forget_kept_by(&state, old.id));
        } else {
            // It has its bytes: copies of them are of no use.
            entries = forget_orphans(&state, old.id);
            entries
                .extend(state.pairs.contains_key(&old.id).then_some(Entry::Paired(old.id, None)));
        }
    }
    if ghost.is_some() {
        known = None;
        id = state.next_node();
        who.node = id;
    }
    if state.consistency.is_none() {
        entries.push(Entry::Consistency(hello.consistency.clone()));
    }
    let record = NodeRecord {
        id,
        name: hello.node.clone(),
        incarnation,
        peer_address: hello.peer_address.clone(),
    };
    let replaced = known.as_ref().is_some_and(|k| k.incarnation != incarnation);
    if known.as_ref() != Some(&record) {
        entries.push(if heir { Entry::Heir(record) } else { Entry::Node(record) });
    }
    entries.extend(teller.map(|_| Entry::Owes(id)));
    // With its cache went what it knew.
    let before = came_back.filter(|old| hello.empty && state.owing.contains(old));
    entries.extend(before.map(Entry::Reasserted));
    if core.job() == 0 {
        tracing::info!(job = format_args!("{:016x}", hello.job), "the nodes are of this job");
        core.is_of_job(&mut state, hello.job);
    }
    let lived = state.lives();
    core.commit(&mut state, &entries);
    let lives = state.lives();
    let life = if lives > lived && lives != lives::UNKNOWN { lives } else { 0 };
    drop(state);
    core.look_who_owes_words();
    if let Some(ghost) = ghost {
        tracing::warn!(name = hello.node, lost = %ghost, "a partner has copies");
        core.give_up(ghost);
        core.lose_quiet_of(ghost);
        core.sessions.remove(ghost);
    }
    if replaced && hello.empty {
        core.lose_quiet_of(id);
    }
    match (replaced, heir) {
        (true, false) => core.give_up(id),
        (true, true) => core.inherit(id),
        (false, _) => {}
    }
    let (recalls, recalled) = mpsc::unbounded_channel();
    let (end, ended) = watch::channel(false);
    let (serial, trust_ms, expired) = {
        // A node that comes back just then is not welcomed before its locks and opens are gone.
        let _whole = core.coming_and_going.lock();
        // Under the state, as every recall: one for the new stream would else be sent, and counted as
        // sent, before there is anything to send it on.
        let state = core.state();
        let (serial, trust_ms) = core.desk.join(who, hello.trust_ms_max);
        core.sessions.attach(who, Line { serial, out, recalls, end }, heir);
        (serial, trust_ms, state.given_up.contains(&id))
    };
    // Whoever has the cache of the daemon before it holds its lock: that one is dead.
    if heir || (replaced && !hello.empty) {
        core.desk.succeeded(who);
    }
    tracing::debug!(node = %id, name = hello.node, resume = hello.resume, heir, "joined");
    let root = core.state().ns.get(ebb_types::Ino::ROOT).and_then(|r| r.seen);
    let welcome = pb::Welcome {
        node_id: id.0,
        service_instance: core.instance,
        lease_ms: u32::try_from(core.lease.as_millis()).unwrap_or(u32::MAX),
        backing_dev_ino: root.map_or(0, |s| s.key.ino),
        expired,
        job: core.job(),
        trust_ms,
        kept,
        reassert: core.state().owing.contains(&id),
        names_after: core.words.names_after(),
        life,
        lives,
    };
    Ok(Joined { who, serial, ended, recalls: recalled, welcome })
}
