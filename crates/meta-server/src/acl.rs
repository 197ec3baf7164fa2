//! What a mode may show of an object that has an access ACL. With one, the group bits of `st_mode` are its
//! mask, not what the group may do; and a mount lets users in by mode bits alone. So the bits shown here
//! give nobody more than the ACL does. Some who are named in it get less.

use ebb_namespace::{AttrChange, Record, Seen};
use ebb_types::Ino;
use rustix::io::Errno as Os;
use std::path::Path;

const NAME: &str = "system.posix_acl_access";
/// ACLs that are longer are not read: nobody but the owner is let in.
const BYTES_MAX: usize = 4096;
const VERSION: u32 = 2;

const USER: u16 = 0x02;
const GROUP_OBJ: u16 = 0x04;
const GROUP: u16 = 0x08;
const MASK: u16 = 0x10;

/// The bits to show of the object at `proc`, which is no symbolic link and has the mode bits `perm`.
pub(crate) fn shown(proc: &Path, perm: u32) -> u32 {
    // Without these bits nobody is let in but the owner, and an ACL changes nothing for that one.
    if perm & 0o077 == 0 {
        return perm;
    }
    let mut acl = [0; BYTES_MAX];
    match rustix::fs::lgetxattr(proc, NAME, &mut acl[..]) {
        Ok(len) => limit(perm, &acl[..len]),
        Err(Os::NODATA | Os::OPNOTSUPP) => perm,
        Err(errno) => {
            tracing::warn!(path = %proc.display(), %errno, "an ACL cannot be read: shown to its owner alone");
            perm & !0o077
        }
    }
}

/// `perm` with no more than the ACL grants: the group as its own entry says, under the mask; the group
/// and all others no more than any user who is named, others no more than any group that is named.
fn limit(perm: u32, acl: &[u8]) -> u32 {
    let closed = perm & !0o077;
    let Some((version, entries)) = acl.split_first_chunk::<4>() else { return closed };
    if u32::from_le_bytes(*version) != VERSION || entries.len() % 8 != 0 {
        return closed;
    }
    let (mut group, mut mask, mut users, mut groups) = (0, 7, None, None);
    let both = |had: Option<u32>, bits| Some(had.unwrap_or(7) & bits);
    for entry in entries.chunks_exact(8) {
        let bits = u32::from(u16::from_le_bytes([entry[2], entry[3]])) & 7;
        match u16::from_le_bytes([entry[0], entry[1]]) {
            USER => users = both(users, bits),
            GROUP_OBJ => group = bits,
            GROUP => groups = both(groups, bits),
            MASK => mask = bits,
            _ => {}
        }
    }
    // Who is named is under the mask, too.
    let named = |bits: Option<u32>| bits.map_or(7, |bits| bits & mask);
    let group = group & mask & named(users);
    closed | group << 3 | (perm & 7 & named(users) & named(groups))
}

/// What is shown of an object after it was changed.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// Identity, size and times of change.
    pub seen: Seen,
    /// The permission bits, where an ACL makes them others than were set.
    pub limited: Option<u32>,
}

impl Now {
    /// What to note of it.
    pub fn records(self, ino: Ino) -> impl Iterator<Item = Record> {
        let limited = self.limited.map(|perm| {
            let change = AttrChange { perm: Some(perm), ..AttrChange::default() };
            Record::Attr { ino, change }
        });
        [Record::Seen { ino, seen: Some(self.seen) }].into_iter().chain(limited)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn acl(entries: &[(u16, u16)]) -> Vec<u8> {
        let mut acl = VERSION.to_le_bytes().to_vec();
        for (tag, bits) in entries {
            acl.extend_from_slice(&tag.to_le_bytes());
            acl.extend_from_slice(&bits.to_le_bytes());
            acl.extend_from_slice(&1234u32.to_le_bytes());
        }
        acl
    }

    #[test]
    fn a_mode_gives_nobody_more_than_the_acl() {
        // The owner, the group, the mask, others; and who is named.
        let with = |group, mask, named: &[(u16, u16)]| {
            let mut all = vec![(1, 6), (GROUP_OBJ, group), (MASK, mask), (0x20, 4)];
            all.extend_from_slice(named);
            acl(&all)
        };
        let cases = [
            ("the mask is not the group's", 0o664, with(0, 6, &[(USER, 6)]), 0o604),
            ("the mask limits the group", 0o644, with(6, 4, &[(USER, 6)]), 0o644),
            ("a user who is refused is one of the others", 0o664, with(6, 6, &[(USER, 0)]), 0o600),
            ("a group that is refused is of the others", 0o664, with(6, 6, &[(GROUP, 0)]), 0o660),
            ("the mask limits who is named", 0o604, with(6, 0, &[(USER, 7)]), 0o600),
            ("a mask alone", 0o644, with(6, 4, &[]), 0o644),
            ("other bits stay", 0o7664, with(0, 6, &[(GROUP, 6)]), 0o7604),
        ];
        for (what, perm, acl, shown) in cases {
            let got = limit(perm, &acl);
            assert_eq!(got, shown, "{what}: {got:o}, not {shown:o}");
        }
        for broken in [&[][..], &[2, 0, 0], &[3, 0, 0, 0], &[2, 0, 0, 0, 1]] {
            assert_eq!(limit(0o4777, broken), 0o4700, "{broken:?}");
        }
    }
}
