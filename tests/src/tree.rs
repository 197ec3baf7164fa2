//! A whole directory tree as comparable data: what `find`, `stat` and `cat` would tell.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// One entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// `st_mode`.
    pub mode: u32,
    /// Number of names (of directories: left out, file systems differ).
    pub nlink: u64,
    /// Owner and group.
    pub owner: (u32, u32),
    /// Size of files and links.
    pub size: u64,
    /// Content of files, target of links.
    pub content: Vec<u8>,
}

/// Everything below `root` by relative path.
pub fn snapshot(root: &Path) -> io::Result<BTreeMap<Vec<u8>, Entry>> {
    let mut found = BTreeMap::new();
    let mut todo = vec![root.to_path_buf()];
    while let Some(dir) = todo.pop() {
        let list = fs::read_dir(&dir).map_err(|e| named(&dir, "opendir", &e))?;
        for item in list {
            let path = item.map_err(|e| named(&dir, "readdir", &e))?.path();
            let meta = fs::symlink_metadata(&path).map_err(|e| named(&path, "lstat", &e))?;
            let content = if meta.is_file() {
                fs::read(&path).map_err(|e| named(&path, "read", &e))?
            } else if meta.is_symlink() {
                let target = fs::read_link(&path).map_err(|e| named(&path, "readlink", &e))?;
                target.as_os_str().as_bytes().to_vec()
            } else {
                Vec::new()
            };
            let relative = path.strip_prefix(root).map_err(io::Error::other)?;
            found.insert(
                relative.as_os_str().as_bytes().to_vec(),
                Entry {
                    mode: meta.mode(),
                    nlink: if meta.is_dir() { 0 } else { meta.nlink() },
                    owner: (meta.uid(), meta.gid()),
                    size: if meta.is_dir() { 0 } else { meta.size() },
                    content,
                },
            );
            if meta.is_dir() {
                todo.push(path);
            }
        }
    }
    Ok(found)
}

fn named(path: &Path, what: &str, e: &io::Error) -> io::Error {
    io::Error::new(e.kind(), format!("{what} {}: {e}", path.display()))
}

/// Panics with the first differences of two trees.
pub fn assert_same(what: &str, got: &Path, want: &Path) {
    let got = snapshot(got).unwrap_or_else(|e| panic!("{what}: {}: {e}", got.display()));
    let want = snapshot(want).unwrap_or_else(|e| panic!("{what}: {}: {e}", want.display()));
    let names: std::collections::BTreeSet<_> = got.keys().chain(want.keys()).collect();
    let mut wrong = Vec::new();
    for name in names {
        if got.get(name) != want.get(name) {
            let show = |e: Option<&Entry>| {
                e.map_or_else(
                    || "missing".to_string(),
                    |e| {
                        let head = &e.content[..e.content.len().min(24)];
                        format!(
                            "mode {:o} nlink {} owner {:?} size {} content {head:?}",
                            e.mode, e.nlink, e.owner, e.size
                        )
                    },
                )
            };
            wrong.push(format!(
                "{}:\n     got {}\n  wanted {}",
                String::from_utf8_lossy(name),
                show(got.get(name)),
                show(want.get(name))
            ));
        }
    }
    assert!(
        wrong.is_empty(),
        "{what}: {} entries differ:\n{}",
        wrong.len(),
        wrong[..wrong.len().min(5)].join("\n")
    );
}
