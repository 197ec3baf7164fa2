//! Opens and closes of coupled files, and waiting for them.

use super::{Call, Fast, OpError, OpResult, name};
use crate::coupling::verdict;
use crate::state::{Entry, Outcome, State};
use ebb_coupling::{
    Coupled, Keep, NotOne, PARTIES_MAX, State as Stand, Step, TERMS_BYTES_MAX, Terms, User,
};
use ebb_types::{Errno, FileKind, Ino};
use ebb_wire::pb;

/// The attribute of a directory whose files are coupled.
const COUPLE: &[u8] = b"user.ebb.couple";

/// True for the attribute that is kept here and not with the file.
pub(super) fn is_couple(name: &[u8]) -> bool {
    name == COUPLE
}

/// The terms of the nearest directory from this one on that has some.
pub(crate) fn terms_from(state: &State, dir: Ino) -> Option<Terms> {
    if state.couplings.no_dirs() {
        return None;
    }
    let mut at = dir;
    loop {
        if let Some(terms) = state.couplings.of_dir(at) {
            return Some(*terms);
        }
        if at == Ino::ROOT {
            return None;
        }
        at = state.ns.get(at)?.links.first()?.parent;
    }
}

/// What is said of an inode, for people.
pub(super) fn couple_text(state: &State, ino: Ino) -> String {
    match state.couplings.file(ino) {
        Some(file) => file.describe(),
        None if state.ns.get(ino).is_some_and(|i| i.is_dir()) => {
            terms_from(state, ino).map(|terms| terms.to_string()).unwrap_or_default()
        }
        None => String::new(),
    }
}

/// What the journal notes of a new file in that directory.
pub(super) fn made_in(state: &State, dir: Ino, kind: Option<FileKind>) -> Option<Box<Coupled>> {
    let terms = terms_from(state, dir).filter(|_| kind == Some(FileKind::Regular))?;
    Some(Box::new(Coupled::new(terms)))
}

fn ms(wait: std::time::Duration) -> u64 {
    u64::try_from(wait.as_millis()).unwrap_or(u64::MAX)
}

/// How long who opens a name of that directory waits for it; 0: not at all.
pub(crate) fn awaits_names_in(state: &State, dir: Ino) -> u64 {
    terms_from(state, dir).map_or(0, |terms| ms(terms.wait))
}

fn user(call: &Call, handle: u64) -> User {
    User { node: call.who.node, handle }
}

/// Couples the files of a directory (the nodes know that it is empty), or takes that back.
pub(super) fn couple(call: &Call, ino: Ino, value: Option<&[u8]>) -> OpResult {
    let terms: Option<Terms> = match value {
        None => None,
        Some(text) if text.len() > TERMS_BYTES_MAX => return Err(Errno::EINVAL.into()),
        Some(text) => {
            let text = std::str::from_utf8(text).map_err(|_| Errno::EINVAL)?;
            Some(text.parse().map_err(|e| OpError::new(Errno::EINVAL, format!("{e}")))?)
        }
    };
    let mut state = call.core.state();
    if state.ns.inode(ino)?.kind != FileKind::Directory {
        return Err(Errno::ENOTDIR.into());
    }
    if terms.is_none() && state.couplings.of_dir(ino).is_none() {
        return Err(Errno::ENODATA.into());
    }
    let entries = [Entry::Couples(ino, terms), call.answered(Outcome::Plain)];
    call.core.commit(&mut state, &entries);
    Ok(None)
}

/// Somebody opens the file to write. ESTALE: all have read it, and it goes.
pub(super) fn produces(
    call: &Call,
    state: &mut State,
    ino: Ino,
    handle: u64,
    anew: bool,
) -> Result<(), Errno> {
    if handle == 0 || state.couplings.file(ino).is_none() {
        return Ok(());
    }
    if state.couplings.is_to_go(ino) {
        return Err(Errno::ESTALE);
    }
    let step = |step| Entry::CoupledStep(ino, step);
    let mut entries = Vec::new();
    entries.extend(anew.then(|| step(Step::Anew)));
    entries.push(step(Step::Produces(user(call, handle))));
    call.core.commit(state, &entries);
    Ok(())
}

/// That came to nothing.
pub(super) fn withdraws(call: &Call, state: &mut State, ino: Ino, handle: u64) {
    if handle != 0 && state.couplings.file(ino).is_some() {
        let step = Step::Withdraws(user(call, handle));
        call.core.commit(state, &[Entry::CoupledStep(ino, step)]);
    }
}

/// Somebody opens the file to read. An answer: it is not opened.
pub(super) fn consumes(
    call: &Call,
    state: &mut State,
    ino: Ino,
    handle: u64,
) -> Result<Option<pb::Opened>, OpError> {
    let file = state.couplings.file(ino).filter(|_| handle != 0);
    let Some((stand, wait)) = file.map(|f| (f.state(), f.terms().wait)) else {
        return Ok(None);
    };
    match stand {
        Stand::Awaited => {
            return Ok(Some(pb::Opened { await_ms: ms(wait), ..pb::Opened::default() }));
        }
        Stand::Lost(node) => {
            let text = format!("a producer of it at node {} died", node.0);
            return Err(OpError::new(Errno::EIO, text));
        }
        Stand::Consumed if state.couplings.is_to_go(ino) => return Err(Errno::ESTALE.into()),
        Stand::Ready | Stand::Consumed => {}
    }
    let step = Step::Consumes(user(call, handle));
    call.core.commit(state, &[Entry::CoupledStep(ino, step)]);
    Ok(None)
}

/// What a node must know of an opened file.
pub(super) fn note_coupled(state: &State, ino: Ino, opened: &mut pb::Opened) {
    if let Some(file) = state.couplings.file(ino) {
        opened.coupled = true;
        opened.held = file.terms().keep == Keep::None;
    }
}

pub(super) fn await_coupled(call: &Call, op: &pb::Await) -> Fast {
    let awaited = try_await(call, op);
    awaited.unwrap_or_else(|e| Fast::Done(Err(e.into())))
}

fn try_await(call: &Call, op: &pb::Await) -> Result<Fast, Errno> {
    // Under it whoever changes the file looks who waits.
    let state = call.core.state();
    let missing = match Ino(op.ino) {
        Ino(0) => {
            let named = (Ino(op.parent), name(&op.name)?);
            match state.ns.dentry(named.0, &named.1)? {
                Some(dentry) => Err(dentry.ino),
                None => Ok(named),
            }
        }
        ino => Err(ino),
    };
    if let Err(ino) = missing
        && let Some(verdict) = verdict(&state, ino)
    {
        return Ok(Fast::Done(verdict.map(|()| None).map_err(OpError::from)));
    }
    let (ticket, told) = call.core.new_ticket();
    let before = call.core.waits.lock().insert((call.who.node, call.id), ticket);
    // The same request, from before the connection broke.
    if let Some(before) = before.filter(|before| call.core.awaiting.cancel(*before)) {
        call.core.end_waiting(&[before], Err(Errno::EINTR));
    }
    match missing {
        Ok(named) => call.core.awaiting.for_name(named, call.who.node, ticket),
        Err(ino) => call.core.awaiting.for_file(ino, call.who.node, ticket),
    }
    Ok(Fast::Lock(told, None))
}

pub(super) fn leave(call: &Call, op: &pb::Leave) -> OpResult {
    let mut state = call.core.state();
    let ino = Ino(op.ino);
    let counts = state.couplings.file(ino).is_some_and(|f| f.has(user(call, op.handle)));
    if op.asks && !counts {
        return Err(Errno::ESTALE.into());
    }
    if state.couplings.file(ino).is_none() {
        return Ok(None);
    }
    let step = match op.withdraws {
        true => Step::Withdraws(user(call, op.handle)),
        false => Step::Leaves(user(call, op.handle), op.through),
    };
    let mut entries = vec![Entry::CoupledStep(ino, step)];
    entries.extend(op.asks.then(|| call.answered(Outcome::Plain)));
    call.core.commit(&mut state, &entries);
    if state.couplings.file(ino).is_some_and(Coupled::is_to_go) {
        let core = std::sync::Arc::clone(&call.core);
        tokio::spawn(async move { crate::coupling::remove_consumed(&core).await });
    }
    Ok(None)
}

/// Who cannot be one of so many is taken out of the count: the file is as if it had not opened it.
pub(super) fn join(call: &Call, op: &pb::Join) -> OpResult {
    let mut state = call.core.state();
    let (ino, user) = (Ino(op.ino), user(call, op.handle));
    let file = state.couplings.file(ino).ok_or(Errno::ENODATA)?;
    let joined = match op.of > PARTIES_MAX {
        true => Err(NotOne::AreMore),
        false => file.may_join(user, op.of),
    };
    let errno = match joined {
        Ok(()) => {
            let step = Entry::CoupledStep(ino, Step::Joins(user, op.of));
            call.core
                .commit(&mut state, if op.of == 0 { &[] } else { std::slice::from_ref(&step) });
            return Ok(None);
        }
        Err(NotOne::IsProduced) => Errno::EEXIST,
        Err(NotOne::IsConsumed) => Errno::EUSERS,
        Err(NotOne::IsLost) => Errno::EIO,
        Err(NotOne::AreMore) => Errno::EINVAL,
        Err(NotOne::IsNotThere) => return Err(Errno::ESTALE.into()),
    };
    withdraws(call, &mut state, ino, op.handle);
    Err(errno.into())
}
