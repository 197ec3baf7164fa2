//! Files that the service does not know, made anew through it at the paths where the dead daemon
//! last heard of them, with the bytes that its cache and an old part file hold.

use super::Recovery;
use crate::file::CachedFile;
use crate::journal::{Home, Note};
use crate::passing::written_runs;
use ebb_backend::{Access, Backend};
use ebb_consistency::FileView;
use ebb_meta_client::{MakeRequest, QueryRequest, SetAttr, SetTime};
use ebb_types::{Attr, ByteRange, Errno, FileKind, Ino, Name, Version};
use std::sync::Arc;

/// Directories that have to be made anew, and of which nothing but the name is known.
const DIRECTORY_PERM: u32 = 0o700;

/// The file that recovered bytes go into.
struct Target {
    attr: Attr,
    /// It is made whole: it was not on the backing, or only under another one's name.
    whole: bool,
    /// It was made for this, under this name.
    made: Option<Name>,
}

impl Recovery<'_> {
    /// Makes a file at its path through the service, with what the cache holds of it.
    pub(super) async fn make_anew(
        &self,
        old: Ino,
        note: &Note,
        rebooted: bool,
    ) -> Result<Ino, String> {
        let said = |what: &str, e: Errno| format!("{what}: {e}");
        let mut note = note.clone();
        let len = self.node.cache.len(old).map_err(|e| e.to_string())?;
        let had = note.len();
        note.trim(len);
        let safe: Vec<_> = note.held().filter(|(_, h)| h.durable || !rebooted).collect();
        note.set_held(safe);
        if note.len() < had {
            let gone = had - note.len();
            return Err(format!("{gone} bytes of it were lost with the power or the cache file"));
        }
        let path = &note.header.path;
        let mut parts = Vec::new();
        for part in path.split(|b| *b == b'/') {
            parts.push(Name::new(part).map_err(|e| said("its path", e))?);
        }
        let (name, dirs) = parts.split_last().ok_or("it has no path")?;
        let parent = self.directories(dirs, &note).await.map_err(|e| said("directory", e))?;
        let target = self.file_at(parent, name, &note).await?;
        let ino = target.attr.ino;
        let filled = self.fill(old, &target, &note).await;
        let ended = match (filled, &target.made) {
            (Ok(()), Some(aside)) if aside != name => {
                // It replaces the older one now that it is whole, and not before.
                let moved = self.node.meta.rename((parent, aside), (parent, name), 0).await;
                moved.map_err(|e| said("rename", e))
            }
            (filled, _) => filled,
        };
        if ended.is_err()
            && let Some(made) = &target.made
        {
            // A name without its bytes would be drained as an empty file.
            if let Err(e) = self.node.meta.unlink(parent, made).await {
                tracing::error!(error = %e, "a file that could not be recovered has an empty one in its place");
            }
        }
        ended.map(|()| ino)
    }

    /// Brings the bytes and the attributes into the file that was found or made for them.
    async fn fill(&self, old: Ino, target: &Target, note: &Note) -> Result<(), String> {
        let said = |what: &str, e: Errno| format!("{what}: {e}");
        let ino = target.attr.ino;
        let held = self.take_bytes(old, target, note)?;
        let query = QueryRequest { ino, range: ByteRange::ALL, known: Version::ZERO, lease: false };
        let answer = self.node.meta.query(query).await.map_err(|e| said("query", e))?;
        let file = CachedFile::new(ino, self.node.me, Arc::clone(self.node.rules.job()));
        {
            let mut state = file.state.write();
            state.view = FileView::restored(self.node.me, &answer.map, &[], &held);
            state.path.clone_from(&note.header.path);
            state.mtime = Some(note.header.mtime);
        }
        self.node.adopt(Arc::new(file));
        let size = note.header.size.max(target.attr.size);
        self.attributes(ino, note, size).await.map_err(|e| said("attributes", e))
    }

    async fn directories(&self, dirs: &[Name], note: &Note) -> Result<Ino, Errno> {
        let mut at = Ino::ROOT;
        for name in dirs {
            let attr = match self.node.meta.lookup(at, name).await {
                Ok(attr) => attr,
                Err(Errno::ENOENT) => {
                    self.make(at, name, FileKind::Directory, DIRECTORY_PERM, note).await?
                }
                Err(e) => return Err(e),
            };
            if attr.kind != FileKind::Directory {
                return Err(Errno::ENOTDIR);
            }
            at = attr.ino;
        }
        Ok(at)
    }

    async fn make(
        &self,
        parent: Ino,
        name: &Name,
        kind: FileKind,
        perm: u32,
        note: &Note,
    ) -> Result<Attr, Errno> {
        let request = MakeRequest {
            parent,
            name: name.clone(),
            kind,
            perm,
            uid: note.header.uid,
            gid: note.header.gid,
            rdev: 0,
            target: Vec::new(),
            open: false,
            lease: ebb_meta_client::Wish::No,
            seat: None,
        };
        match self.node.meta.make(&request).await? {
            ebb_meta_client::Made::Made(attr, _) => Ok(attr),
            ebb_meta_client::Made::Opened(..) => Err(Errno::EPROTO),
        }
    }

    /// The file that the bytes go into.
    async fn file_at(&self, parent: Ino, name: &Name, note: &Note) -> Result<Target, String> {
        let said = |what: &str, e: Errno| format!("{what}: {e}");
        let in_place = note.header.home.as_ref().is_some_and(|h| !h.is_part());
        let perm = note.header.perm;
        let there = match self.node.meta.lookup(parent, name).await {
            Ok(attr) => Some(attr),
            Err(Errno::ENOENT) => None,
            Err(e) => return Err(said("lookup", e)),
        };
        match there {
            Some(attr) if attr.kind != FileKind::Regular => {
                Err("something that is not a file has this name on the backing".to_owned())
            }
            Some(attr) if in_place || !covers(note, ByteRange::new(0, note.header.size)) => {
                Ok(Target { attr, whole: false, made: None })
            }
            None => {
                let made = self.make(parent, name, FileKind::Regular, perm, note).await;
                let made = made.map_err(|e| said("create", e))?;
                Ok(Target { attr: made, whole: !in_place, made: Some(name.clone()) })
            }
            Some(_) => {
                let text = [name.as_bytes(), b".ebb-recovered"].concat();
                let aside = Name::new(&text).map_err(|e| said("temporary name", e))?;
                let made = self.make(parent, &aside, FileKind::Regular, perm, note).await;
                let attr = made.map_err(|e| said("create", e))?;
                Ok(Target { attr, whole: true, made: Some(aside) })
            }
        }
    }

    /// The cache file under the new number, with what the old part file has on top: a file that
    /// is made whole needs every byte.
    fn take_bytes(&self, old: Ino, target: &Target, note: &Note) -> Result<Vec<ByteRange>, String> {
        let shown = |e: std::io::Error| e.to_string();
        let new = target.attr.ino;
        let all: Vec<ByteRange> = note.held().map(|(r, _)| r).collect();
        self.node.cache.part_from_writers(old, &all).map_err(shown)?;
        self.node.cache.link(old, new).map_err(shown)?;
        let cache = self.node.cache.file(new).map_err(shown)?;
        let held = written(note, &cache).map_err(shown)?;
        let all = ByteRange::new(0, note.header.size);
        let is_all = held_bytes(note, all) == all.len();
        let part = note.header.home.as_ref().filter(|h| target.whole && h.is_part());
        match part.filter(|_| !is_all) {
            Some(part) => self.add_part(part, note.header.size, &held, &cache),
            None => Ok(held),
        }
    }

    fn add_part(
        &self,
        part: &Home,
        size: u64,
        held: &[ByteRange],
        cache: &std::fs::File,
    ) -> Result<Vec<ByteRange>, String> {
        use std::os::unix::fs::FileExt;
        let file =
            self.posix.open(&part.path, part.ino, Access::Read).map_err(|e| e.to_string())?;
        let len = file.identity().map_err(|e| e.to_string())?.size.min(size);
        let mut buf = vec![0; 1 << 20];
        let mut at = 0;
        for range in held.iter().chain([&ByteRange::at(len, 0)]) {
            while at < range.start().min(len) {
                let n = (range.start().min(len) - at).min(buf.len() as u64) as usize;
                let got = file.read_full_at(&mut buf[..n], at).map_err(|e| e.to_string())?;
                buf[got..n].fill(0);
                cache.write_all_at(&buf[..n], at).map_err(|e| e.to_string())?;
                at += n as u64;
            }
            at = at.max(range.end());
        }
        let end = held.last().map_or(0, |r| r.end()).max(len);
        if cache.metadata().map_err(|e| e.to_string())?.len() < end {
            cache.set_len(end).map_err(|e| e.to_string())?;
        }
        Ok(vec![ByteRange::new(0, end)])
    }

    /// Size first: it moves the times.
    async fn attributes(&self, ino: Ino, note: &Note, size: u64) -> Result<(), Errno> {
        let had = self.node.meta.getattr(ino).await?;
        let grow = (size > had.size).then_some(size);
        if grow.is_some() {
            let args = SetAttr { size: grow, ..SetAttr::default() };
            let done = self.node.meta.setattr(ino, &args).await?;
            if let (Some(file), Some(map)) = (self.node.file(ino), done.map) {
                file.state.write().view.apply(&map.map);
            }
        }
        let header = &note.header;
        let args = SetAttr {
            mode: Some(header.perm),
            uid: (had.uid != header.uid).then_some(header.uid),
            gid: (had.gid != header.gid).then_some(header.gid),
            atime: Some(SetTime::To(header.atime)),
            mtime: Some(SetTime::To(header.mtime)),
            ..SetAttr::default()
        };
        match self.node.meta.setattr(ino, &args).await {
            // A user cannot give files away; the bytes matter more.
            Err(Errno::EPERM) => {
                let args = SetAttr { uid: None, gid: None, ..args };
                self.node.meta.setattr(ino, &args).await.map(drop)
            }
            other => other.map(drop),
        }
    }
}

/// What is held and was written for certain: zeros of blocks that were written past the daemon may
/// be where others' bytes are, and without the service nobody can tell.
fn written(note: &Note, cache: &std::fs::File) -> std::io::Result<Vec<ByteRange>> {
    let mut out = Vec::new();
    for (range, held) in note.held() {
        match held.guessed {
            true => out.extend(written_runs(cache, &[range])?),
            false => out.push(range),
        }
    }
    Ok(out)
}

fn held_bytes(note: &Note, range: ByteRange) -> u64 {
    note.held_in(range).iter().map(|(r, _)| r.len()).sum()
}

fn covers(note: &Note, range: ByteRange) -> bool {
    let part = note.header.home.as_ref().is_some_and(Home::is_part);
    part || held_bytes(note, range) == range.len()
}
