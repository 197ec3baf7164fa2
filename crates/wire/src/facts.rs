//! Facts of names, checked: they end in a journal that a later recovery acts on.

use crate::pb::request::Op;
use crate::{pb, time_from_pb, time_to_pb};
use ebb_types::facts::{Bound, Facts, InodeFact, NameFact, Shape, Subjects, XattrFact};
use ebb_types::{Errno, FileKind, Ino, Name};

/// Facts to an answer; more are an attack.
const FACTS_MAX: usize = 1 << 16;
/// PATH_MAX without the NUL.
const TARGET_MAX: usize = 4095;
/// As the kernel has it.
const XATTR_BYTES_MAX: usize = 64 << 10;

/// The names, inodes and attributes that a request may change: the node notes them before it asks, and the
/// service tells of them with its answer.
#[must_use]
pub fn changed_by(op: &Op) -> Option<Subjects> {
    let mut about = Subjects::default();
    let mut name = |parent: u64, name: &[u8]| {
        about.names.extend(Name::new(name).ok().map(|name| (Ino(parent), name)));
    };
    match op {
        Op::Make(m) => name(m.parent, &m.name),
        Op::Link(l) => name(l.new_parent, &l.new_name),
        Op::Unlink(u) => name(u.parent, &u.name),
        Op::Rename(r) => {
            name(r.parent, &r.name);
            name(r.new_parent, &r.new_name);
        }
        Op::SetAttr(s) => about.inos.push(Ino(s.ino)),
        Op::Open(o) if o.truncate => about.inos.push(Ino(o.ino)),
        Op::SetXattr(x) => about.xattrs.push((Ino(x.ino), x.name.as_slice().into())),
        Op::RemoveXattr(x) => about.xattrs.push((Ino(x.ino), x.name.as_slice().into())),
        _ => return None,
    }
    Some(about)
}

/// Facts of one moment, as sent.
#[must_use]
pub fn facts_to_pb(at: u64, facts: &Facts) -> pb::Facts {
    pb::Facts {
        at,
        settled: facts.settled,
        shared: facts.shared,
        nodes: facts.nodes,
        lives: facts.lives,
        names: facts.names.iter().map(name_to_pb).collect(),
        inodes: facts.inodes.iter().map(inode_to_pb).collect(),
        xattrs: facts.xattrs.iter().map(xattr_to_pb).collect(),
    }
}

/// Facts as received.
pub fn facts_from_pb(facts: pb::Facts) -> Result<Facts, Errno> {
    let at = facts.at;
    if facts.names.len().max(facts.inodes.len()).max(facts.xattrs.len()) > FACTS_MAX {
        return Err(Errno::EPROTO);
    }
    Ok(Facts {
        settled: facts.settled,
        shared: facts.shared,
        nodes: facts.nodes,
        lives: facts.lives,
        names: collect(facts.names, |n| name_from_pb(at, n))?,
        inodes: collect(facts.inodes, |i| inode_from_pb(at, i))?,
        xattrs: collect(facts.xattrs, |x| xattr_from_pb(at, x))?,
    })
}

fn collect<A, B>(all: Vec<A>, check: impl Fn(A) -> Result<B, Errno>) -> Result<Vec<B>, Errno> {
    all.into_iter().map(check).collect()
}

fn sound(ino: u64) -> Result<Ino, Errno> {
    if ino == 0 { Err(Errno::EPROTO) } else { Ok(Ino(ino)) }
}

fn name_to_pb(fact: &NameFact) -> pb::NameFact {
    let bound = fact.bound.as_ref();
    pb::NameFact {
        parent: fact.parent.0,
        name: fact.name.as_bytes().to_vec(),
        ino: bound.map_or(0, |b| b.ino.0),
        placed: bound.is_some_and(|b| b.placed),
        replaces: bound.map_or(0, |b| b.replaces),
    }
}

fn name_from_pb(at: u64, fact: pb::NameFact) -> Result<NameFact, Errno> {
    let (placed, replaces) = (fact.placed, fact.replaces);
    Ok(NameFact {
        at,
        parent: sound(fact.parent)?,
        name: Name::new(&fact.name).map_err(|_| Errno::EPROTO)?,
        bound: (fact.ino != 0).then_some(Bound { ino: Ino(fact.ino), placed, replaces }),
    })
}

fn inode_to_pb(fact: &InodeFact) -> pb::InodeFact {
    let Some(shape) = &fact.shape else {
        return pb::InodeFact { ino: fact.ino.0, gone: true, ..Default::default() };
    };
    pb::InodeFact {
        ino: fact.ino.0,
        gone: false,
        mode: shape.kind.mode_bits() | (shape.perm & 0o7777),
        uid: shape.uid,
        gid: shape.gid,
        rdev: shape.rdev,
        atime: Some(time_to_pb(shape.atime)),
        mtime: Some(time_to_pb(shape.mtime)),
        target: shape.target.as_deref().unwrap_or_default().to_vec(),
        size: shape.size,
        zeros: shape.zeros,
        placed: shape.placed,
    }
}

fn inode_from_pb(at: u64, fact: pb::InodeFact) -> Result<InodeFact, Errno> {
    let ino = sound(fact.ino)?;
    if fact.gone {
        return Ok(InodeFact { at, ino, shape: None });
    }
    let kind = FileKind::from_mode(fact.mode).ok_or(Errno::EPROTO)?;
    let time = |t: Option<pb::Time>| t.ok_or(Errno::EPROTO).and_then(time_from_pb);
    let is_link = kind == FileKind::Symlink;
    let bad_target = fact.target.contains(&0) || fact.target.len() > TARGET_MAX;
    if is_link == fact.target.is_empty() || bad_target || fact.size > i64::MAX as u64 {
        return Err(Errno::EPROTO);
    }
    let shape = Shape {
        kind,
        perm: fact.mode & 0o7777,
        uid: fact.uid,
        gid: fact.gid,
        rdev: fact.rdev,
        atime: time(fact.atime)?,
        mtime: time(fact.mtime)?,
        target: is_link.then(|| fact.target.into()),
        size: fact.size,
        zeros: fact.zeros,
        placed: fact.placed,
    };
    Ok(InodeFact { at, ino, shape: Some(shape) })
}

fn xattr_to_pb(fact: &XattrFact) -> pb::XattrFact {
    let value = fact.value.as_deref().map(<[u8]>::to_vec);
    pb::XattrFact { ino: fact.ino.0, name: fact.name.to_vec(), value }
}

fn xattr_from_pb(at: u64, fact: pb::XattrFact) -> Result<XattrFact, Errno> {
    let long = fact.value.as_ref().is_some_and(|v| v.len() > XATTR_BYTES_MAX);
    if fact.name.is_empty() || fact.name.len() > Name::MAX || fact.name.contains(&0) || long {
        return Err(Errno::EPROTO);
    }
    let value = fact.value.map(Into::into);
    Ok(XattrFact { at, ino: sound(fact.ino)?, name: fact.name.into(), value })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_types::Time;

    fn shape(kind: FileKind) -> Shape {
        let target = (kind == FileKind::Symlink).then(|| b"a/b".as_slice().into());
        Shape {
            kind,
            perm: 0o640,
            uid: 1,
            gid: 2,
            rdev: 0,
            atime: Time { sec: 5, nsec: 6 },
            mtime: Time { sec: -7, nsec: 8 },
            target,
            size: 9,
            zeros: kind == FileKind::Regular,
            placed: 10,
        }
    }

    fn some() -> Facts {
        let name = |n: &[u8]| Name::new(n).unwrap();
        let bound = Some(Bound { ino: Ino(3), placed: true, replaces: 4 });
        Facts {
            settled: 11,
            shared: true,
            nodes: 3,
            lives: 4,
            names: vec![
                NameFact { at: 12, parent: Ino(1), name: name(b"x"), bound },
                NameFact { at: 12, parent: Ino(1), name: name(b"y"), bound: None },
            ],
            inodes: vec![
                InodeFact { at: 12, ino: Ino(3), shape: Some(shape(FileKind::Symlink)) },
                InodeFact { at: 12, ino: Ino(4), shape: None },
                InodeFact { at: 12, ino: Ino(5), shape: Some(shape(FileKind::Regular)) },
            ],
            xattrs: [Some(b"v".as_slice().into()), None]
                .map(|value| XattrFact { at: 12, ino: Ino(3), name: (*b"user.x").into(), value })
                .to_vec(),
        }
    }

    #[test]
    fn facts_survive_the_way_there_and_back() {
        assert_eq!(facts_from_pb(facts_to_pb(12, &some())), Ok(some()));
    }

    #[test]
    fn hostile_facts_are_refused() {
        let spoil: [fn(&mut pb::Facts); 9] = [
            |f| f.names[0].parent = 0,
            |f| f.names[0].name = b"a/b".to_vec(),
            |f| f.names[0].name.clear(),
            |f| f.inodes[0].ino = 0,
            |f| f.inodes[0].mode = 0,
            |f| f.inodes[0].target.clear(),
            |f| f.inodes[0].target = vec![b'x'; TARGET_MAX + 1],
            |f| f.inodes[0].size = u64::MAX,
            |f| f.xattrs[0].name.clear(),
        ];
        for (n, spoil) in spoil.iter().enumerate() {
            let mut facts = facts_to_pb(12, &some());
            spoil(&mut facts);
            assert_eq!(facts_from_pb(facts), Err(Errno::EPROTO), "{n}");
        }
    }
}
