//! What is done to the overlay, and the same done to a directory of the kernel's.

use ebb_types::Errno;
use proptest::prelude::*;
use rustix::fs::{AtFlags, CWD, RenameFlags, XattrFlags};
use std::collections::BTreeMap;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

#[derive(Clone, Debug)]
pub(super) enum Act {
    Mkdir(Vec<u8>),
    /// Creates and writes: length and fill.
    Write(Vec<u8>, u16, u8),
    Symlink(Vec<u8>),
    Fifo(Vec<u8>),
    Unlink(Vec<u8>),
    Rmdir(Vec<u8>),
    Rename(Vec<u8>, Vec<u8>, u32),
    Link(Vec<u8>, Vec<u8>),
    Chmod(Vec<u8>, u32),
    Truncate(Vec<u8>, u16),
    SetXattr(Vec<u8>, u8),
    List(Vec<u8>),
    Flush,
    /// Flushes that are begun and given back: part files are there.
    BeginFlush,
    Materialize,
    Restart,
    /// What the backing has exactly so is not known any more.
    Forget,
    /// The service dies after so many effects of this one, which is then asked again.
    Dies(Box<Act>, u32),
    /// An effect of this one fails after so many, and it is asked for again.
    Fails(Box<Act>, u32),
}

/// A path of one to three components out of few, so that they often meet.
pub(super) fn path() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(0u8..4, 1..4)
}

/// Names of files, so few that most of what is done concerns two of them. Two are one file at first.
pub(super) fn near() -> impl Strategy<Value = Vec<u8>> {
    prop::sample::select(vec![vec![1], vec![0, 3], vec![2], vec![0, 2]])
}

pub(super) fn act() -> impl Strategy<Value = Act> {
    act_on(path)
}

/// Something done to paths out of these.
pub(super) fn act_on<P>(path: fn() -> P) -> impl Strategy<Value = Act>
where
    P: Strategy<Value = Vec<u8>> + 'static,
{
    prop_oneof![
        3 => path().prop_map(Act::Mkdir),
        5 => (path(), 0u16..9000, any::<u8>()).prop_map(|(p, n, b)| Act::Write(p, n, b)),
        1 => path().prop_map(Act::Symlink),
        1 => path().prop_map(Act::Fifo),
        2 => path().prop_map(Act::Unlink),
        2 => path().prop_map(Act::Rmdir),
        6 => (path(), path(), 0u32..3).prop_map(|(a, b, f)| Act::Rename(a, b, f)),
        2 => (path(), path()).prop_map(|(a, b)| Act::Link(a, b)),
        1 => (path(), 0u32..0o1000).prop_map(|(p, m)| Act::Chmod(p, m)),
        1 => (path(), 0u16..9000).prop_map(|(p, n)| Act::Truncate(p, n)),
        1 => (path(), any::<u8>()).prop_map(|(p, v)| Act::SetXattr(p, v)),
        1 => path().prop_map(Act::List),
        2 => Just(Act::Flush),
        2 => Just(Act::BeginFlush),
        1 => Just(Act::Materialize),
        1 => Just(Act::Restart),
        2 => Just(Act::Forget),
    ]
}

/// The same, with deaths.
pub(super) fn act_or_death() -> impl Strategy<Value = Act> {
    (act(), 0u32..4, prop::bool::weighted(0.5)).prop_map(|(act, after, dies)| match act {
        // A grant ends with the service's life: whoever flushes begins anew.
        Act::Flush
        | Act::BeginFlush
        | Act::Materialize
        | Act::Restart
        | Act::Forget
        | Act::List(_) => act,
        act if dies => Act::Dies(Box::new(act), after),
        act => act,
    })
}

/// The same, with effects that fail.
pub(super) fn act_or_failure() -> impl Strategy<Value = Act> {
    (act(), 0u32..5, prop::bool::weighted(0.5)).prop_map(|(act, after, fails)| match act {
        Act::Restart | Act::Forget | Act::List(_) => act,
        act if fails => Act::Fails(Box::new(act), after),
        act => act,
    })
}

pub(super) fn component(c: u8) -> String {
    ["a", "b", "c", "d"][c as usize].to_owned()
}

/// What both sides begin with.
pub(super) fn populate(dir: &Path) {
    std::fs::create_dir_all(dir.join("a/b")).unwrap();
    std::fs::write(dir.join("a/b/c"), b"old content").unwrap();
    std::fs::write(dir.join("a/c"), b"other").unwrap();
    std::fs::write(dir.join("b"), vec![7u8; 5000]).unwrap();
    std::fs::hard_link(dir.join("b"), dir.join("a/d")).unwrap();
    std::os::unix::fs::symlink("a/c", dir.join("d")).unwrap();
}

pub(super) fn real(root: &Path, path: &[u8]) -> PathBuf {
    path.iter().fold(root.to_owned(), |p, c| p.join(component(*c)))
}

pub(super) fn os(result: std::io::Result<()>) -> Result<(), Errno> {
    result.map_err(Errno::from)
}

/// The real kernel does it. Nothing goes through symbolic links, as nothing does above.
pub(super) fn reference(root: &Path, act: &Act) -> Result<(), Errno> {
    let r = |p: &[u8]| real(root, p);
    for p in paths(act) {
        let mut at = root.to_owned();
        for c in &p[..p.len() - 1] {
            at = at.join(component(*c));
            let meta = std::fs::symlink_metadata(&at).map_err(Errno::from)?;
            if !meta.is_dir() {
                return Err(Errno::ENOTDIR);
            }
        }
    }
    match act {
        Act::Mkdir(p) => os(std::fs::create_dir(r(p)).and_then(|()| chmod(&r(p), 0o755))),
        Act::Write(p, len, fill) => {
            match std::fs::symlink_metadata(r(p)) {
                Ok(m) if !m.is_file() => return Err(Errno::EINVAL),
                _ => {}
            }
            let fresh = !r(p).exists();
            let mut options = std::fs::OpenOptions::new();
            let options = options.create(true).truncate(false).write(true);
            let file = options.open(r(p)).map_err(Errno::from)?;
            file.write_all_at(&vec![*fill; *len as usize], 0).map_err(Errno::from)?;
            if fresh { os(chmod(&r(p), 0o644)) } else { Ok(()) }
        }
        Act::Symlink(p) => os(std::os::unix::fs::symlink("x/y", r(p))),
        Act::Fifo(p) => {
            let mode = rustix::fs::Mode::from_raw_mode(0o640);
            rustix::fs::mknodat(CWD, r(p), rustix::fs::FileType::Fifo, mode, 0)
                .map_err(|e| Errno(e.raw_os_error()))
        }
        Act::Unlink(p) => os(std::fs::remove_file(r(p))),
        Act::Rmdir(p) => os(std::fs::remove_dir(r(p))),
        Act::Rename(a, b, flags) => {
            let flags = RenameFlags::from_bits_retain(*flags);
            rustix::fs::renameat_with(CWD, r(a), CWD, r(b), flags)
                .map_err(|e| Errno(e.raw_os_error()))
        }
        Act::Link(a, b) => rustix::fs::linkat(CWD, r(a), CWD, r(b), AtFlags::empty())
            .map_err(|e| Errno(e.raw_os_error())),
        Act::Chmod(p, mode) => {
            let meta = std::fs::symlink_metadata(r(p)).map_err(Errno::from)?;
            if meta.is_symlink() { Err(Errno::EOPNOTSUPP) } else { os(chmod(&r(p), *mode)) }
        }
        Act::Truncate(p, len) => {
            let meta = std::fs::symlink_metadata(r(p)).map_err(Errno::from)?;
            if meta.is_dir() {
                return Err(Errno::EISDIR);
            }
            if !meta.is_file() {
                return Err(Errno::EINVAL);
            }
            let file = std::fs::OpenOptions::new().write(true).open(r(p)).map_err(Errno::from)?;
            os(file.set_len(u64::from(*len)))
        }
        Act::SetXattr(p, v) => {
            let flags = XattrFlags::from_bits_retain(u32::from(*v) % 3);
            rustix::fs::lsetxattr(r(p), "user.t", &[*v], flags).map_err(|e| Errno(e.raw_os_error()))
        }
        Act::Dies(act, _) | Act::Fails(act, _) => reference(root, act),
        Act::List(_)
        | Act::Flush
        | Act::BeginFlush
        | Act::Materialize
        | Act::Restart
        | Act::Forget => Ok(()),
    }
}

pub(super) fn chmod(path: &Path, mode: u32) -> std::io::Result<()> {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
}

pub(super) fn paths(act: &Act) -> Vec<&[u8]> {
    match act {
        Act::Mkdir(p) | Act::Write(p, ..) | Act::Symlink(p) | Act::Fifo(p) | Act::Unlink(p) => {
            vec![p]
        }
        Act::Rmdir(p) | Act::Chmod(p, _) | Act::Truncate(p, _) | Act::SetXattr(p, _) => vec![p],
        Act::Rename(a, b, _) | Act::Link(a, b) => vec![a, b],
        Act::Dies(act, _) | Act::Fails(act, _) => paths(act),
        Act::List(_)
        | Act::Flush
        | Act::BeginFlush
        | Act::Materialize
        | Act::Restart
        | Act::Forget => Vec::new(),
    }
}

/// Everything about a tree that both sides must agree on.
pub(super) fn tree(root: &Path, at: &Path, out: &mut BTreeMap<PathBuf, String>) {
    for entry in std::fs::read_dir(at).unwrap() {
        let path = entry.unwrap().path();
        let meta = std::fs::symlink_metadata(&path).unwrap();
        let content = if meta.is_file() { std::fs::read(&path).unwrap() } else { Vec::new() };
        let target = std::fs::read_link(&path).ok();
        let mut value = [0u8; 8];
        let xattr = rustix::fs::lgetxattr(&path, "user.t", &mut value[..]).unwrap_or(0);
        let text = format!(
            "mode {:o} nlink {} size {} sum {} to {target:?} xattr {:?}",
            meta.mode(),
            if meta.is_dir() { 0 } else { meta.nlink() },
            content.len(),
            crc32c::crc32c(&content),
            &value[..xattr],
        );
        out.insert(path.strip_prefix(root).unwrap().to_owned(), text);
        if meta.is_dir() {
            tree(root, &path, out);
        }
    }
}
