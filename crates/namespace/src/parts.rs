//! Names of part files, and which object is to be found under a path of ours. Others may write to
//! the same directory, so nobody must be able to foretell such a name.

use crate::inode::{BackingKey, Home, Inode, Under};
use crate::record::{BackingPath, Effect, Record};
use crate::tree::{Absence, Namespace};
use ebb_types::name::PART_PREFIX;
use ebb_types::{FileKind, Ino, Name};
use hmac::{Hmac, Mac};
use sha2::Sha256;
use std::collections::BTreeMap;

/// Which objects are to be found under paths; any other one is somebody else's.
pub type Known = BTreeMap<BackingPath, BackingKey>;

/// What the names of part files follow from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PartNames {
    pub secret: [u8; 16],
    /// Inodes below this one have part files with names of before.
    pub from: Ino,
}

impl PartNames {
    pub fn record(self) -> Record {
        Record::PartNames { secret: self.secret, from: self.from }
    }

    /// 64 bits that only the job can compute.
    fn bits(&self, ino: Ino) -> u64 {
        let mut mac =
            Hmac::<Sha256>::new_from_slice(&self.secret).expect("a key may have any length");
        mac.update(b"part file");
        mac.update(&ino.0.to_le_bytes());
        let sum = mac.finalize().into_bytes();
        u64::from_le_bytes(sum[..8].try_into().expect("8 of 32 bytes"))
    }
}

/// Of which inode a part file is, as its name says; that may have been given by any service, or by anybody.
#[must_use]
pub fn part_of(name: &Name) -> Option<Ino> {
    let rest = std::str::from_utf8(name.as_bytes().strip_prefix(PART_PREFIX)?).ok()?;
    let digits = rest.split('-').next()?;
    Some(Ino(u64::from_str_radix(digits, 16).ok()?))
}

impl Namespace {
    /// A service begins on this state, and gives out numbers from `first` on.
    pub fn begins_with(&mut self, first: Ino) {
        self.older_below = first;
    }

    /// True for a file that has no place on the backing, as far as is noted: a service before this one may have made its
    /// part file, and died before it noted that. Nothing was written there: nobody was told of it.
    #[must_use]
    pub fn may_have_part(&self, inode: &Inode) -> bool {
        let is_older = inode.ino < self.older_below || crate::forget::is_found(inode.ino);
        is_older && inode.kind == FileKind::Regular && inode.home == Home::None
    }

    /// True when names of part files cannot be foretold.
    #[must_use]
    pub fn has_part_names(&self) -> bool {
        self.part_names.is_some()
    }

    /// The name of an inode's part file: the same as long as the job lives, also after a restart.
    #[must_use]
    pub fn part_name(&self, ino: Ino) -> Name {
        let prefix = String::from_utf8_lossy(PART_PREFIX);
        let text = match self.part_names.filter(|names| ino >= names.from) {
            Some(names) => format!("{prefix}{:x}-{:016x}", ino.0, names.bits(ino)),
            None => format!("{prefix}{:x}", ino.0),
        };
        Name::new(text.as_bytes()).expect("a prefix and hex digits are a name")
    }

    /// The inode whose object belongs under this path of the backing: by a name of it, or by its
    /// part file's.
    #[must_use]
    pub fn at_path(&self, path: &BackingPath) -> Option<Ino> {
        let Some((dirs, name)) = path.split() else { return Some(Ino::ROOT) };
        let mut dir = Ino::ROOT;
        for component in dirs {
            dir = self.child_ino(dir, component)?;
        }
        if !name.is_reserved() {
            return self.child_ino(dir, name);
        }
        part_of(name).filter(|ino| self.part_name(*ino) == *name)
    }

    fn child_ino(&self, dir: Ino, name: &Name) -> Option<Ino> {
        match self.look(dir, name) {
            Ok(Absence::Present(dentry)) => Some(dentry.ino),
            _ => None,
        }
    }

    /// Which objects effects must find under the paths they name, where another one would be taken
    /// for ours (part files) or harmed (sizes).
    #[must_use]
    pub fn known_objects(&self, effects: &[Effect]) -> Known {
        let known = |path: &BackingPath| Some((path.clone(), self.object_at(path)?));
        effects.iter().filter_map(|e| known(e.checked_path()?)).collect()
    }

    fn object_at(&self, path: &BackingPath) -> Option<BackingKey> {
        let inode = self.get(self.at_path(path)?)?;
        let (_, name) = path.split()?;
        let is_there = match inode.home {
            Home::None => false,
            Home::Part { .. } => {
                name.is_reserved() && self.home_path(inode.ino).as_ref() == Some(path)
            }
            Home::Own => inode.links.iter().any(|l| {
                l.name == *name
                    && self
                        .dentry(l.parent, name)
                        .is_ok_and(|d| d.is_some_and(|d| d.under == Under::This))
            }),
        };
        inode.seen.filter(|_| is_there).map(|s| s.key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_part_files_tell_nothing_of_the_next_ones() {
        let names = |secret| PartNames { secret: [secret; 16], from: Ino(5) };
        let of = |names, ino| {
            let mut ns = Namespace::empty();
            ns.apply(&PartNames::record(names)).unwrap();
            ns.part_name(Ino(ino)).to_string()
        };
        assert_eq!(of(names(1), 4), ".ebb-part-4", "made before there were such names");
        assert!(of(names(1), 5).starts_with(".ebb-part-5-"));
        assert_eq!(of(names(1), 5).len(), ".ebb-part-5-".len() + 16);
        assert_eq!(of(names(1), 5), of(names(1), 5), "found again after a restart");
        assert_ne!(of(names(1), 5)[12..], of(names(1), 6)[12..]);
        assert_ne!(of(names(1), 5), of(names(2), 5), "another job");
    }
}
