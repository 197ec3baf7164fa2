//! Files that the service does not know, made anew through it at the paths where the dead daemon
//! last heard of them, with the bytes that its cache and an old part file hold.

use super::Recovery;
use crate::file::CachedFile;
use crate::journal::{Held, Home, Kept, Note};
use ebb_backend::{Access, Backend};
use ebb_consistency::FileView;
use ebb_meta_client::{MakeRequest, QueryRequest, SetAttr, SetTime};
use ebb_types::{Attr, ByteRange, Errno, FileKind, Ino, Name, Version};
use std::sync::Arc;

/// Directories that have to be made anew, and of which nothing but the name is known.
const DIRECTORY_PERM: u32 = 0o700;

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
        let (attr, whole) = self.file_at(parent, name, &note).await?;
        let held = self.take_bytes(old, attr.ino, &note, whole).map_err(|e| e.to_string())?;
        let query = QueryRequest {
            ino: attr.ino,
            range: ByteRange::ALL,
            known: Version::ZERO,
            lease: false,
        };
        let answer = self.node.meta.query(query).await.map_err(|e| said("query", e))?;
        let file = CachedFile::new(attr.ino, self.node.me, Arc::clone(self.node.rules.job()));
        {
            let mut state = file.state.write();
            state.view = FileView::restored(self.node.me, &answer.map, &[], &held);
            state.path.clone_from(path);
            state.mtime = Some(note.header.mtime);
        }
        self.node.adopt(Arc::new(file));
        let size = note.header.size.max(attr.size);
        self.attributes(attr.ino, &note, size).await.map_err(|e| said("attributes", e))?;
        Ok(attr.ino)
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
        };
        match self.node.meta.make(&request).await? {
            ebb_meta_client::Made::Made(attr) => Ok(attr),
            ebb_meta_client::Made::Opened(_) => Err(Errno::EPROTO),
        }
    }

    /// The file that the bytes go into, and whether it is made whole: one that was not on the
    /// backing, or only under another one's name.
    async fn file_at(&self, parent: Ino, name: &Name, note: &Note) -> Result<(Attr, bool), String> {
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
                Ok((attr, false))
            }
            None => {
                let made = self.make(parent, name, FileKind::Regular, perm, note).await;
                made.map(|attr| (attr, !in_place)).map_err(|e| said("create", e))
            }
            Some(_) => {
                // It replaces the older one when it is whole, and not before.
                let text = [name.as_bytes(), b".ebb-recovered"].concat();
                let aside = Name::new(&text).map_err(|e| said("temporary name", e))?;
                let made = self.make(parent, &aside, FileKind::Regular, perm, note).await;
                let attr = made.map_err(|e| said("create", e))?;
                let moved = self.node.meta.rename((parent, &aside), (parent, name), 0).await;
                moved.map(|()| (attr, true)).map_err(|e| said("rename", e))
            }
        }
    }

    /// The cache file under the new number, with what the old part file has on top: a file that
    /// is made whole needs every byte.
    fn take_bytes(
        &self,
        old: Ino,
        new: Ino,
        note: &Note,
        whole: bool,
    ) -> Result<Vec<ByteRange>, String> {
        let shown = |e: std::io::Error| e.to_string();
        self.node.cache.link(old, new).map_err(shown)?;
        let mut held: Vec<ByteRange> = note.held().map(|(r, _)| r).collect();
        let part = note.header.home.as_ref().filter(|h| whole && h.is_part());
        if let Some(part) = part {
            let cache = self.node.cache.file(new).map_err(shown)?;
            held = self.add_part(part, note, &cache)?;
        }
        Ok(held)
    }

    fn add_part(
        &self,
        part: &Home,
        note: &Note,
        cache: &std::fs::File,
    ) -> Result<Vec<ByteRange>, String> {
        use std::os::unix::fs::FileExt;
        let file =
            self.posix.open(&part.path, part.ino, Access::Read).map_err(|e| e.to_string())?;
        let len = file.identity().map_err(|e| e.to_string())?.size.min(note.header.size);
        let mut buf = vec![0; 1 << 20];
        let mut at = 0;
        for (range, _) in note.held().chain([(ByteRange::at(len, 0), note_end())]) {
            while at < range.start().min(len) {
                let n = (range.start().min(len) - at).min(buf.len() as u64) as usize;
                let got = file.read_full_at(&mut buf[..n], at).map_err(|e| e.to_string())?;
                buf[got..n].fill(0);
                cache.write_all_at(&buf[..n], at).map_err(|e| e.to_string())?;
                at += n as u64;
            }
            at = at.max(range.end());
        }
        let end = note.held().map(|(r, _)| r.end()).max().unwrap_or(0).max(len);
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

fn note_end() -> Held {
    Held { kept: Kept::Written, durable: false }
}

fn covers(note: &Note, range: ByteRange) -> bool {
    let part = note.header.home.as_ref().is_some_and(Home::is_part);
    part || note.held_in(range).iter().map(|(r, _)| r.len()).sum::<u64>() == range.len()
}
