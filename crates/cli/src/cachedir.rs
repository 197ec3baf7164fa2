//! The buffer directory as seen from outside the daemon: private to its user, and not reused while
//! it holds data that nobody knows. Who has it is the business of `lock.rs`, what the journal of a
//! dead daemon knows that of `left.rs`.

use crate::exit::{Context, Failure};
use crate::lock::LOCK;
use std::fs::{DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Name of the directory under $TMPDIR that holds the caches of one user.
#[must_use]
pub fn user_directory(uid: u32) -> String {
    format!("ebb-{uid}")
}

/// Makes the directory when it is missing (and, private too, the user's directory above it);
/// refuses one that is not this user's alone.
pub fn prepare(dir: &Path) -> Result<(), Failure> {
    let what = format!("cache {}", dir.display());
    let mut builder = DirBuilder::new();
    builder.recursive(true).mode(0o700).create(dir).or_usage(&what)?;
    let uid = rustix::process::geteuid().as_raw();
    if let Some(parent) = dir.parent() {
        let meta = std::fs::symlink_metadata(parent).or_usage(&what)?;
        let open_to_others = meta.is_dir() && meta.mode() & 0o1002 == 0o002;
        // In a shared /tmp somebody could have been faster to make the directory of this user.
        let ours = parent.file_name() == Some(user_directory(uid).as_ref());
        if open_to_others || (ours && !(meta.is_dir() && meta.uid() == uid)) {
            let parent = parent.display();
            return Err(Failure::usage(format!("{what}: others may change {parent}")));
        }
    }
    refuse_exchangeable(dir, uid, &what)?;
    let meta = std::fs::symlink_metadata(dir).or_usage(&what)?;
    if !meta.is_dir() || meta.uid() != uid {
        return Err(Failure::usage(format!("{what}: not a directory of this user's own")));
    }
    if meta.mode() & 0o1002 != 0 {
        return Err(Failure::usage(format!("{what}: shared with others; name one below it")));
    }
    std::fs::set_permissions(dir, Permissions::from_mode(0o700)).or_usage(&what)
}

/// Refuses a cache on the way to which another user could put something else in its place: a directory
/// or a link of theirs, or one in which everybody may rename what is not theirs.
fn refuse_exchangeable(dir: &Path, uid: u32, what: &str) -> Result<(), Failure> {
    let named = std::path::absolute(dir).or_usage(what)?;
    let real = std::fs::canonicalize(dir).or_usage(what)?;
    for above in named.ancestors().skip(1).chain(real.ancestors().skip(1)) {
        let meta = std::fs::symlink_metadata(above).or_usage(what)?;
        let owner = meta.uid();
        let why = if owner != 0 && owner != uid && !is_nobody_known(owner) {
            format!("belongs to user {owner}")
        } else if meta.is_dir() && meta.mode() & 0o1002 == 0o002 {
            "may be changed by everybody".to_owned()
        } else {
            continue;
        };
        let above = above.display();
        return Err(Failure::usage(format!(
            "{what}: {above}, on the way to it, {why}, who could put another directory there; name a \
             cache below directories of root's and of your own"
        )));
    }
    Ok(())
}

/// In a container that does not know root's number, root's directories show this owner.
fn is_nobody_known(owner: u32) -> bool {
    let number = std::fs::read_to_string("/proc/sys/kernel/overflowuid").unwrap_or_default();
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    number.trim().parse() == Ok(owner) && !maps_everybody(&map)
}

/// Whether every user has a number here.
fn maps_everybody(map: &str) -> bool {
    map.split_whitespace().eq(["0", "0", "4294967295"])
}

/// Refuses what was never a cache: to say of it that nothing is missing would be a lie.
pub fn refuse_others(dir: &Path) -> Result<(), Failure> {
    if [LOCK, "journal"].iter().any(|name| dir.join(name).is_file()) {
        return Ok(());
    }
    let shown = dir.display();
    Err(Failure::usage(format!(
        "{shown}: not a cache of Ebb (it has no `{LOCK}` and no `journal`)"
    )))
}

/// Data files that a daemon which is no more left in its cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Leftover {
    /// Files with content.
    pub files: u64,
    /// Bytes on disk.
    pub bytes: u64,
}

/// What a cache directory holds. Which of it never reached the backing cannot be told without
/// the job's metadata, so all of it counts.
pub fn leftover(dir: &Path) -> io::Result<Leftover> {
    let mut found = Leftover::default();
    for (_, bytes) in data_files(dir)? {
        found.files += 1;
        found.bytes += bytes;
    }
    Ok(found)
}

/// Files with blocks on disk, and how many bytes that is.
fn data_files(dir: &Path) -> io::Result<Vec<(PathBuf, u64)>> {
    let mut found = Vec::new();
    for shard in entries(&dir.join("data"))? {
        for file in entries(&shard)? {
            let meta = std::fs::symlink_metadata(&file)?;
            if meta.is_file() && meta.blocks() > 0 {
                found.push((file, meta.blocks() * 512));
            }
        }
    }
    found.sort();
    Ok(found)
}

fn entries(dir: &Path) -> io::Result<Vec<PathBuf>> {
    match std::fs::read_dir(dir) {
        Ok(list) => list.map(|e| e.map(|e| e.path())).collect(),
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(Vec::new())
        }
        Err(e) => Err(e),
    }
}

/// Refuses a cache that holds data of which no journal says what it is. Asked under the lock.
pub fn refuse_unknown(dir: &Path) -> Result<(), Failure> {
    let shown = dir.display();
    ebb_fs_client::leftover::finish_clearing(dir).or_failed(format!("cache {shown}"))?;
    let found = leftover(dir).or_failed(format!("cache {shown}"))?;
    if found.files == 0 || ebb_node_journal::path_in(dir).exists() {
        return Ok(());
    }
    Err(Failure::usage(format!(
        "cache {shown}: {} of {} file(s) are there, but no journal that says what they are; save \
         what you need from {shown}/data, then remove it, or name another --cache",
        ebb_types::units::Size(found.bytes),
        found.files
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_is_made_private_and_a_shared_directory_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let cache = dir.path().join("user/cache");
        prepare(&cache).unwrap();
        assert_eq!(std::fs::metadata(&cache).unwrap().mode() & 0o7777, 0o700);
        assert_eq!(std::fs::metadata(dir.path().join("user")).unwrap().mode() & 0o7777, 0o700);
        std::fs::set_permissions(&cache, Permissions::from_mode(0o755)).unwrap();
        prepare(&cache).unwrap();
        assert_eq!(std::fs::metadata(&cache).unwrap().mode() & 0o7777, 0o700);
        for mode in [0o1777, 0o777] {
            std::fs::set_permissions(&cache, Permissions::from_mode(mode)).unwrap();
            assert_eq!(prepare(&cache).unwrap_err().status, 2, "{mode:o}");
        }
        let link = dir.path().join("link");
        std::os::unix::fs::symlink("user", &link).unwrap();
        assert_eq!(prepare(&link).unwrap_err().status, 2);
        let trap = dir.path().join(user_directory(rustix::process::geteuid().as_raw()));
        std::os::unix::fs::symlink("user", &trap).unwrap();
        assert_eq!(prepare(&trap.join("new")).unwrap_err().status, 2);
    }

    #[test]
    fn nobody_else_can_exchange_a_directory_on_the_way_to_a_cache() {
        let dir = tempfile::tempdir().unwrap();
        let (above, cache) = (dir.path().join("above"), dir.path().join("above/user/cache"));
        prepare(&cache).unwrap();
        let mode = |m| std::fs::set_permissions(&above, Permissions::from_mode(m)).unwrap();
        mode(0o777);
        let e = prepare(&cache).unwrap_err();
        assert!(e.status == 2 && e.text.contains("above, on the way"), "{e}");
        let link = dir.path().join("link");
        std::os::unix::fs::symlink("above/user", &link).unwrap();
        assert_eq!(prepare(&link.join("cache")).unwrap_err().status, 2, "behind a link, too");
        // Where it is sticky, only what is one's own can be renamed.
        mode(0o1777);
        prepare(&cache).unwrap();
        prepare(&link.join("cache")).unwrap();
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::lchown(&link, Some(61_001), None).unwrap();
            let e = prepare(&link.join("cache")).unwrap_err();
            assert!(e.status == 2 && e.text.contains("user 61001"), "{e}");
            std::os::unix::fs::chown(&above, Some(61_001), None).unwrap();
            assert_eq!(prepare(&cache).unwrap_err().status, 2);
        }
        assert!(maps_everybody("         0          0 4294967295\n"));
        assert!(!maps_everybody("      1000       1000          1\n"));
    }

    #[test]
    fn what_was_never_a_cache_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(refuse_others(dir.path()).unwrap_err().status, 2);
        std::fs::write(dir.path().join(LOCK), "").unwrap();
        refuse_others(dir.path()).unwrap();
    }

    #[test]
    fn only_files_with_content_are_left_over() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(leftover(dir.path()).unwrap(), Leftover::default());
        let shard = dir.path().join("data/0a");
        std::fs::create_dir_all(&shard).unwrap();
        std::fs::write(shard.join("empty"), "").unwrap();
        refuse_unknown(dir.path()).unwrap();
        std::fs::write(shard.join("full"), vec![1; 5000]).unwrap();
        let found = leftover(dir.path()).unwrap();
        assert!(found.files == 1 && found.bytes >= 5000, "{found:?}");
        let e = refuse_unknown(dir.path()).unwrap_err();
        assert!(e.text.contains(&dir.path().display().to_string()), "{e}");
        std::fs::write(dir.path().join("journal"), "").unwrap();
        refuse_unknown(dir.path()).unwrap();
    }
}
