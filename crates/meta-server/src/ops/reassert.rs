//! A node tells again what this service may have forgotten.

use super::{Call, OpError, OpResult, checked, locking, size};
use crate::reassert::Holding;
use crate::rebuild::{Located, Place, Rebuild};
use crate::state::{Entry, FileOp, State};
use ebb_consistency::{Assertion, Claimed, Seat};
use ebb_namespace::locks::Kind;
use ebb_namespace::{AttrChange, Home, Record};
use ebb_types::{ByteRange, Errno, Ino, Name, NodeId, Version};
use ebb_wire::pb::{self, asserted, reply::Body};

/// Files and ranges that one request may speak of.
const FILES_MAX: usize = 1 << 16;
const CLAIMS_MAX: usize = 1 << 18;

/// A name and a part file.
const PATHS_MAX: usize = 2;

impl Call {
    pub(super) async fn reassert(&self, op: &pb::Reassert) -> OpResult {
        let most = op.asks.len().max(op.files.len()).max(op.located.len()).max(op.coupled.len());
        if most > FILES_MAX {
            return Err(Errno::E2BIG.into());
        }
        if op.to_instance != 0 && op.to_instance != self.core.instance {
            let text = "this was told to the service before: it must hear all of it";
            return Err(OpError::new(Errno::ESTALE, text));
        }
        let asked = op.asks.iter().map(|ask| (Ino(ask.ino), Version(ask.newest)));
        let placed = op.located.iter().map(|file| (Ino(file.ino), Version(file.as_of)));
        self.core.hear_versions(asked.chain(placed))?;
        let told: Vec<(Ino, Assertion, &pb::Assertion)> = op
            .files
            .iter()
            .map(|f| Ok((Ino(f.ino), assertion(f)?, f)))
            .collect::<Result<_, Errno>>()?;
        let locks = match op.done && op.all_locks {
            true => Some(owners(&op.owners)?),
            false => None,
        };
        let mut unflushed = Vec::new();
        for (ino, mut assertion, sent) in told {
            let turn = self.core.turn().await;
            if is_on_backing(&assertion) && !self.core.finds_home(&turn, ino).await {
                tracing::error!(%ino, "the backing has nothing of what was flushed: once more");
                not_flushed(&mut assertion);
                unflushed.push(ino.0);
            }
            let mut state = self.core.state();
            // It is gone, or was made in the time that is lost.
            if state.file(ino).is_err() {
                continue;
            }
            let entries = self.entries(&state, ino, assertion, sent)?;
            self.core.commit(&mut state, &entries);
            self.now_due(&mut state, ino);
        }
        let mut wanted = {
            let mut state = self.core.state();
            self.open_again(&mut state, &op.asks);
            let mut wanted = wanted(&state, self.who.node, &op.asks);
            wanted.unflushed = unflushed;
            if op.done && state.owing.contains(&self.who.node) {
                self.core.hear_locks(self.who.node, locks);
                if op.all_coupled {
                    crate::coupling::hear_coupled(
                        &self.core,
                        &mut state,
                        self.who.node,
                        &op.coupled,
                    );
                }
                self.core.commit(&mut state, &[Entry::Reasserted(self.who.node)]);
                if let Some((told, wanted)) = state.rebuild.as_ref().map(Rebuild::progress) {
                    tracing::info!(node = %self.who.node, told, wanted, "a node has told");
                }
            }
            wanted
        };
        for sent in &op.located {
            let (ino, located) = located(sent)?;
            self.core.hear_where(ino, located);
        }
        for sent in &op.names {
            let facts = ebb_wire::facts_from_pb(sent.clone())?;
            if !facts.is_sound() {
                return Err(Errno::EPROTO.into());
            }
            self.core.hear_names(sent.at, &facts)?;
        }
        if op.named {
            self.core.has_named(self.who.node);
            self.core.names_are_heard().await;
        }
        if op.done {
            self.core.look_who_owes_words();
            self.core.words_are_heard().await;
            wanted.lost = self.core.lost_locks_of(self.who.node);
        }
        Ok(Some(Body::Wanted(wanted)))
    }

    /// What somebody has open there is open, and what sits there sits there, whether that is known here or forgotten.
    fn open_again(&self, state: &mut State, asks: &[pb::KnownFile]) {
        let node = self.who.node;
        if state.floor() == Version::ZERO {
            // Nothing is forgotten here.
            return;
        }
        let inos = asks.iter().filter(|ask| ask.open).map(|ask| Ino(ask.ino));
        let open: Vec<Record> = inos
            .filter(|ino| state.ns.get(*ino).is_some() && !state.ns.is_open_by(*ino, node))
            .map(|ino| Record::Open { node, ino })
            .collect();
        if !open.is_empty() {
            self.core.commit_ns(state, open);
        }
        // Where it sits it is written without a word: that must be known before others are told of it.
        let free = |ino: &Ino| state.files.get(ino).is_some_and(|file| file.seat().is_none());
        let seat = |ask: &pb::KnownFile| {
            let (ino, told) = (Ino(ask.ino), ask.seat.filter(|told| told.id != 0 && ask.open)?);
            let seat = Seat { node, id: told.id, asked: told.asked };
            free(&ino).then_some(Entry::File(ino, FileOp::Seat(seat)))
        };
        let seats: Vec<Entry> = asks.iter().filter_map(seat).collect();
        self.core.commit(state, &seats);
    }

    fn entries(
        &self,
        state: &State,
        ino: Ino,
        assertion: Assertion,
        sent: &pb::Assertion,
    ) -> Result<Vec<Entry>, Errno> {
        let told = FileOp::Reassert(self.who.node, Box::new(assertion));
        let mut entries = vec![Entry::File(ino, told)];
        let inode = state.ns.inode(ino)?;
        if let Some(mtime) = sent.mtime {
            let mtime = ebb_wire::time_from_pb(mtime)?;
            let change = AttrChange {
                mtime: Some(mtime),
                ctime: Some(mtime.max(inode.ctime)),
                ..AttrChange::default()
            };
            let newer = mtime > inode.mtime;
            entries.extend(newer.then_some(Entry::Ns(Record::Attr { ino, change })));
        }
        Ok(entries)
    }

    /// What is on no backing any more has to get there.
    fn now_due(&self, state: &mut State, ino: Ino) {
        let due = state.is_dirty(ino)
            && state.ns.get(ino).is_some_and(|inode| inode.home == Home::Own && !inode.due);
        if due {
            self.core.commit(state, &[Entry::Ns(Record::Due { ino, due: true })]);
        }
    }
}

/// What is sent, checked: a path that leaves the backing directory is none.
fn located(sent: &pb::Located) -> Result<(Ino, Located), Errno> {
    let names = |path: &Vec<u8>| {
        let names = path.split(|b| *b == b'/').map(Name::new);
        names.collect::<Result<Vec<_>, _>>().map_err(|_| Errno::EPROTO)
    };
    let sent_paths = sent.paths.iter().take(PATHS_MAX).filter(|path| !path.is_empty());
    let paths = sent_paths.map(names).collect::<Result<_, _>>()?;
    // Who needs it may never have heard that the backing has it.
    let knows = sent.object != 0;
    let place = || Place { as_of: Version(sent.as_of), object: sent.object, paths };
    let places = knows.then(place).into_iter().collect();
    Ok((Ino(sent.ino), Located { places, needed: sent.needed }))
}

/// True when the backing has something of the file, as far as the node knows.
fn is_on_backing(assertion: &Assertion) -> bool {
    let flushed = |(_, claim): &(_, Claimed)| matches!(claim, Claimed::Own(_, true));
    assertion.base_len.0 > 0 || assertion.claims.iter().any(flushed)
}

fn not_flushed(assertion: &mut Assertion) {
    assertion.base_len = (0, Version::ZERO);
    for (_, claim) in &mut assertion.claims {
        if let Claimed::Own(_, flushed) = claim {
            *flushed = false;
        }
    }
}

/// Who holds which locks, checked.
fn owners(sent: &[pb::LockOwner]) -> Result<Vec<Holding>, Errno> {
    if sent.len() > FILES_MAX {
        return Err(Errno::E2BIG);
    }
    let holding = |o: &pb::LockOwner| {
        let held = |h: &pb::HeldLock| {
            let kind = match h.r#type {
                locking::READ => Kind::Read,
                locking::WRITE => Kind::Write,
                _ => return Err(Errno::EINVAL),
            };
            Ok((locking::range(o.flock, h.range)?, kind, h.pid))
        };
        Ok(Holding {
            ino: Ino(o.ino),
            space: locking::space(o.flock),
            owner: o.owner,
            certain: o.certain,
            locks: o.locks.iter().map(held).collect::<Result<_, Errno>>()?,
        })
    };
    sent.iter().map(holding).collect()
}

fn wanted(state: &State, node: NodeId, asks: &[pb::KnownFile]) -> pb::Wanted {
    let mut wanted = pb::Wanted::default();
    for ask in asks {
        let Ok(file) = state.file(Ino(ask.ino)) else {
            wanted.unknown.push(ask.ino);
            continue;
        };
        let Some(from) = file.leapt_from() else { continue };
        let news = ask.owns || Version(ask.newest) > from || file.is_owned_by(node);
        if news {
            wanted.files.push(pb::WantedFile { ino: ask.ino, after: from.0 });
        }
    }
    wanted
}

/// What is sent, checked: ranges in order, sizes that files can have.
fn assertion(sent: &pb::Assertion) -> Result<Assertion, Errno> {
    if sent.claims.len() > CLAIMS_MAX {
        return Err(Errno::E2BIG);
    }
    let covers = ebb_wire::range_from_pb(sent.covers.ok_or(Errno::EPROTO)?)?;
    let mut at = covers.start();
    let mut claims = Vec::with_capacity(sent.claims.len());
    for claim in &sent.claims {
        let range = ebb_wire::range_from_pb(pb::Range { start: claim.start, end: claim.end })?;
        if range.is_empty() || range.start() < at || range.end() > covers.end() {
            return Err(Errno::EPROTO);
        }
        at = range.end();
        let version = Version(claim.version);
        let claimed = match asserted::Kind::try_from(claim.kind).map_err(|_| Errno::EPROTO)? {
            asserted::Kind::Known if claim.version > claim.as_of => return Err(Errno::EPROTO),
            asserted::Kind::Known => {
                Claimed::Known { node: NodeId(claim.node), version, as_of: Version(claim.as_of) }
            }
            asserted::Kind::Own => Claimed::Own(version, false),
            asserted::Kind::OwnFlushed => Claimed::Own(version, true),
            asserted::Kind::Written => Claimed::Keep,
        };
        let owned = match claimed {
            Claimed::Known { node, .. } => node != NodeId::NOBODY,
            Claimed::Own(..) | Claimed::Keep => true,
        };
        if owned {
            checked(pb::Range { start: range.start(), end: range.end() })?;
        }
        claims.push((range, claimed));
    }
    Ok(Assertion {
        size: (size(sent.size)?, Version(sent.size_as_of)),
        base_len: (size(sent.base_len)?, Version(sent.base_len_as_of)),
        covers: ByteRange::new(covers.start(), covers.end()),
        claims,
        complete: sent.complete,
    })
}
