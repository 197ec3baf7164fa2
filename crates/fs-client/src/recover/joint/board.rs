//! The directory on the backing by which the recoveries of one job know of each other:
//!
//! ```text
//! BACKING/.ebb-part-recovery-JOB/        0700, of the user who recovers
//!     INO/place                          which file the bytes of this inode go into; the first one counts
//!     INO/from-HASH                      the statement of a node, replaced by rename
//!     INO/kept-HASH                      the same of a node that does not bring what it has, and was told why
//!     INO/.ebb-part-whole                the file itself, where none was there before, until it has its name
//!     names-HASH                         what a node has heard of names
//!     acted-HASH                         what its recovery has gone by, before anything is done by it
//!     lives-HASH                         it has said all that it has to say: for which lives of nodes
//!     INO/name                           the name that it was given last
//!     INO/.ebb-part-ready                a file that had a name which was older than another one
//!     .ebb-part-INO                      the same of a file that only one node had: nothing else is said of it
//! ```
//!
//! Nobody else can make names in a directory that only its user can enter, so names in it need not
//! be secret; that it is such a directory is checked at every start. Everything in it appears by
//! rename or link, whole and synced.

use super::names;
use super::statement::{self, BYTES_MAX, Statement};
use super::tick;
use crate::hash;
use crate::recover::places::{At, Places, kind, open_dir, sync_dir};
use ebb_namespace::Book;
use ebb_node_journal::Seen;
use ebb_types::{Ino, Lives, Name, name::PART_PREFIX};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags};
use rustix::io::Errno as Os;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;

/// The file that the bytes go into.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Place {
    /// Where it is until it has its name, or its name.
    pub path: Vec<u8>,
    /// Its number on the backing.
    pub ino: u64,
    /// So many bytes it had before any recovery, of which nothing need be known.
    pub base: u64,
    /// How it was before any recovery, when it was there by then.
    pub was: Option<Seen>,
}

/// The same as recoveries of before said it.
#[derive(Deserialize)]
struct OlderPlace {
    path: Vec<u8>,
    ino: u64,
    base: u64,
}

impl Place {
    /// A file, or a directory, of which it does not matter how it was.
    pub fn of(path: Vec<u8>, ino: u64) -> Place {
        Place { path, ino, base: 0, was: None }
    }

    fn decode(bytes: &[u8]) -> Option<Place> {
        let older = |OlderPlace { path, ino, base }| Place { base, ..Place::of(path, ino) };
        statement::decode(bytes).or_else(|| statement::decode(bytes).map(older))
    }
}

/// All recoveries of a job.
pub(crate) struct Board {
    dir: OwnedFd,
    name: String,
    /// What nodes said of files that left the job before it ended.
    left: BTreeMap<Ino, Vec<Statement>>,
}

/// Those of one file.
pub(crate) struct Corner {
    dir: OwnedFd,
    path: String,
    /// The name in it of the file, until it has its own.
    whole: String,
    /// Nobody else has the file: what there is to say is kept here, and nothing but the file is on
    /// the backing.
    alone: Option<Statement>,
    /// What those have said of it that left before.
    left: Vec<Statement>,
}

/// What stands for something that was said: file and time.
pub(crate) type Token = (u64, i64, u64);

/// A node has said all that it has to say.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Spoken {
    /// For these lives.
    pub lives: Lives,
    /// And nothing is in its cache any more.
    pub done: bool,
    /// What it said of files when it left the job: statements.
    pub said: Vec<(Ino, Vec<u8>)>,
}

/// What is said of names.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Said {
    /// What a node has heard from the service.
    Heard,
    /// What its recovery goes by.
    Acted,
}

impl Said {
    fn prefix(self) -> &'static str {
        match self {
            Said::Heard => "names-",
            Said::Acted => "acted-",
        }
    }

    pub fn name(self, node: &str) -> String {
        format!("{}{:016x}", self.prefix(), hash::bytes(node.as_bytes()))
    }
}

/// Where the name is that a file was given last.
const NAME: &str = "name";

/// Which nodes have said all that they have to say.
const LIVES: &str = "lives-";

/// What nodes say of a file: of those that bring what they have, and of others.
const FROM: &str = "from-";
const KEPT: &str = "kept-";

/// The name of a file that waits for another one.
const READY: &str = ".ebb-part-ready";

/// The name of the file until it has its own.
const WHOLE: &str = ".ebb-part-whole";

fn name_of(job: &str) -> String {
    format!("{}recovery-{job}", String::from_utf8_lossy(PART_PREFIX))
}

fn plain(name: &str) -> Name {
    Name::new(name.as_bytes()).expect("our own names are plain")
}

/// True for a directory that nobody else can change.
fn is_private(dir: &OwnedFd) -> io::Result<bool> {
    let stat = rustix::fs::fstat(dir)?;
    Ok(stat.st_uid == rustix::process::geteuid().as_raw() && stat.st_mode & 0o022 == 0)
}

fn make_dir(at: &OwnedFd, name: &str) -> io::Result<OwnedFd> {
    match rustix::fs::mkdirat(at, name, Mode::RWXU) {
        Ok(()) => sync_dir(at)?,
        Err(Os::EXIST) => {}
        Err(e) => return Err(e.into()),
    }
    Ok(open_dir(at, &plain(name))?)
}

impl Board {
    /// That of a job, made when it is not there.
    pub fn open(places: &Places, job: &str) -> io::Result<Board> {
        let name = name_of(job);
        let dir = make_dir(&places.dir(&[], false)?, &name)?;
        if is_private(&dir)? {
            let mut board = Board { dir, name, left: BTreeMap::new() };
            for (ino, bytes) in board.spoken()?.into_iter().flat_map(|spoken| spoken.said) {
                let statement =
                    Statement::decode(&bytes).ok_or_else(|| board.damaged("lives-*"))?;
                board.left.entry(ino).or_default().push(statement);
            }
            return Ok(board);
        }
        let text = format!(
            "{name} on the backing can be changed by other users: somebody else made it; remove \
             it, or have it removed"
        );
        Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
    }

    /// That of one file.
    pub fn corner(&self, ino: Ino) -> io::Result<Corner> {
        let name = format!("{:016x}", ino.0);
        let dir = make_dir(&self.dir, &name)?;
        let path = format!("{}/{name}", self.name);
        let left = self.left.get(&ino).cloned().unwrap_or_default();
        Ok(Corner { dir, path, whole: WHOLE.to_owned(), alone: None, left })
    }

    /// The same of a file of which nobody else says anything.
    pub fn alone(&self, ino: Ino, mine: &Statement) -> io::Result<Corner> {
        let whole = format!("{}{:016x}", String::from_utf8_lossy(PART_PREFIX), ino.0);
        let dir = self.dir.try_clone()?;
        let (path, left) = (self.name.clone(), Vec::new());
        Ok(Corner { dir, path, whole, alone: Some(mine.clone()), left })
    }

    /// True when somebody has said something of the file that goes by it.
    pub fn has(&self, ino: Ino) -> io::Result<bool> {
        if self.left.contains_key(&ino) || !self.has_corner(ino) {
            return Ok(self.left.contains_key(&ino));
        }
        let corner = self.corner(ino)?;
        Ok(corner.place()?.is_some() || !list(&corner.dir, FROM.as_bytes())?.is_empty())
    }

    fn has_corner(&self, ino: Ino) -> bool {
        rustix::fs::statat(&self.dir, format!("{:016x}", ino.0), AtFlags::SYMLINK_NOFOLLOW).is_ok()
    }

    /// A descriptor of the directory.
    pub fn dir(&self) -> io::Result<OwnedFd> {
        self.dir.try_clone()
    }

    /// Says something of names for a node, in the place of what it said before.
    pub fn say_names(&self, what: Said, node: &str, books: &[Book]) -> io::Result<()> {
        let name = what.name(node);
        let new = prepare(&self.dir, &format!("new-{name}"), &names::encode(books))?;
        new.rename_over(&at(&self.dir, &name)?)
    }

    /// True when it has said that.
    pub fn has_said(&self, what: Said, node: &str) -> io::Result<bool> {
        Ok(at(&self.dir, &what.name(node))?.stat()?.is_some())
    }

    /// How many nodes have said what they have heard of names.
    pub fn said(&self) -> io::Result<usize> {
        Ok(list(&self.dir, Said::Heard.prefix().as_bytes())?.len())
    }

    /// What all nodes have said of names so far, as tokens: what is said anew is another file, of another time.
    pub fn all_said(&self) -> io::Result<Vec<Token>> {
        let mut said = Vec::new();
        for name in list(&self.dir, Said::Heard.prefix().as_bytes())? {
            let at = At { dir: self.dir.try_clone()?, name };
            said.extend(at.stat()?.map(|s| (s.st_ino, s.st_mtime, s.st_mtime_nsec)));
        }
        said.sort_unstable();
        Ok(said)
    }

    /// A node has said all that it has to say.
    pub fn speak(&self, node: &str, spoken: &Spoken) -> io::Result<()> {
        let name = format!("{LIVES}{:016x}", hash::bytes(node.as_bytes()));
        let new = prepare(&self.dir, &format!("new-{name}"), &statement::encode(spoken))?;
        new.rename_over(&at(&self.dir, &name)?)
    }

    fn spoken(&self) -> io::Result<Vec<Spoken>> {
        let mut spoken = Vec::new();
        for name in list(&self.dir, LIVES.as_bytes())? {
            let Some(bytes) = read(&self.dir, &name)? else { continue };
            // One that cannot be read may have said anything.
            let damaged = || self.damaged(&name.to_string());
            spoken.push(statement::decode(&bytes).ok_or_else(damaged)?);
        }
        Ok(spoken)
    }

    fn damaged(&self, name: &str) -> io::Error {
        let text = format!("{}/{name} is damaged", self.name);
        io::Error::new(io::ErrorKind::InvalidData, text)
    }

    /// True when every node that ever was in the job has said all that it has to say.
    pub fn has_everybody(&self) -> io::Result<bool> {
        Ok(Lives::are_all(self.spoken()?.iter().map(|s| &s.lives)))
    }

    /// True when, besides, nothing is in any of their caches.
    pub fn is_over(&self) -> io::Result<bool> {
        let spoken = self.spoken()?;
        Ok(Lives::are_all(spoken.iter().map(|s| &s.lives)) && spoken.iter().all(|s| s.done))
    }

    /// All of the job is on the backing: nobody reads any of this again.
    pub fn clear(&self, backing: &Path) -> io::Result<()> {
        std::fs::remove_dir_all(backing.join(&self.name))
    }

    /// Nobody needs that any more.
    pub fn unsay_names(&self, node: &str) {
        for what in [Said::Heard, Said::Acted] {
            if let Ok(at) = at(&self.dir, &what.name(node)) {
                let _ = at.remove();
            }
        }
    }

    /// What all nodes have said of names so far, by the name under which it is here.
    pub fn names(&self, what: Said) -> io::Result<BTreeMap<String, Vec<Book>>> {
        let mut found = BTreeMap::new();
        for name in list(&self.dir, what.prefix().as_bytes())? {
            let Some(bytes) = read(&self.dir, &name)? else { continue };
            let damaged = || self.damaged(&name.to_string());
            found.insert(name.to_string(), names::decode(&bytes).ok_or_else(damaged)?);
        }
        Ok(found)
    }

    /// The name that a file was given last.
    pub fn name_of(&self, ino: Ino) -> io::Result<Option<Vec<u8>>> {
        if !self.has_corner(ino) {
            return Ok(None);
        }
        let Some(bytes) = read(&self.corner(ino)?.dir, &plain(NAME))? else { return Ok(None) };
        Ok(statement::decode(&bytes))
    }

    /// Where a file waits that is whole and whose name was taken back.
    pub fn ready(&self, ino: Ino) -> io::Result<At> {
        at(&self.corner(ino)?.dir, READY)
    }

    /// Which file the bytes of an inode go into, when that is decided.
    pub fn place(&self, ino: Ino) -> io::Result<Option<Place>> {
        if self.has_corner(ino) { self.corner(ino)?.place() } else { Ok(None) }
    }

    /// Takes away what tells nobody anything: the directory, when it is empty.
    pub fn leave(&self, places: &Places) {
        if let Ok(root) = places.dir(&[], false) {
            let _ = rustix::fs::unlinkat(&root, self.name.as_str(), AtFlags::REMOVEDIR);
        }
    }
}

fn at(dir: &OwnedFd, name: &str) -> io::Result<At> {
    Ok(At { dir: dir.try_clone()?, name: plain(name) })
}

fn read(dir: &OwnedFd, name: &Name) -> io::Result<Option<Vec<u8>>> {
    let at = At { dir: dir.try_clone()?, name: name.clone() };
    if at.stat()?.is_none_or(|s| kind(&s) != FileType::RegularFile) {
        return Ok(None);
    }
    let mut bytes = Vec::new();
    at.open(OFlags::RDONLY)?.take(BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}

/// A file that is whole and synced before it is anything.
fn prepare(dir: &OwnedFd, name: &str, bytes: &[u8]) -> io::Result<At> {
    tick::effect()?;
    let at = at(dir, name)?;
    let mut file = at.open(OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    tick::effect()?;
    Ok(at)
}

/// The names in a directory that begin so. Opened anew each time: on NFS that is when names made by
/// others are seen.
fn list(dir: &OwnedFd, prefix: &[u8]) -> io::Result<Vec<Name>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let anew = rustix::fs::openat(dir, ".", flags, Mode::empty())?;
    let mut names = Vec::new();
    for entry in Dir::read_from(&anew)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name.starts_with(prefix) {
            names.push(Name::new(name)?);
        }
    }
    Ok(names)
}

impl Corner {
    /// It is going to get this name, as this node knows.
    pub fn note_name(&self, node: &str, path: &[u8]) -> io::Result<()> {
        if self.alone.is_some() {
            return Ok(());
        }
        // Others may be about to say the same.
        let new = format!("new-{NAME}-{:016x}", hash::bytes(node.as_bytes()));
        let new = prepare(&self.dir, &new, &statement::encode(&path))?;
        new.rename_over(&at(&self.dir, NAME)?)
    }

    /// Where the file is when its name was taken back.
    pub fn ready(&self) -> Vec<u8> {
        format!("{}/{READY}", self.path).into_bytes()
    }

    /// What every node has said, in the order of their names.
    pub fn statements(&self) -> io::Result<Vec<Statement>> {
        let mut found = Vec::new();
        if let Some(mine) = &self.alone {
            return Ok(vec![mine.clone()]);
        }
        let mut names = list(&self.dir, FROM.as_bytes())?;
        names.extend(list(&self.dir, KEPT.as_bytes())?);
        for name in names {
            let bytes = read(&self.dir, &name)?;
            // One that cannot be read may claim anything.
            let bad = || {
                let text = format!("{}/{name} is damaged", self.path);
                io::Error::new(io::ErrorKind::InvalidData, text)
            };
            found.extend(bytes.map(|b| Statement::decode(&b).ok_or_else(bad)).transpose()?);
        }
        found.extend(self.left.iter().cloned());
        found.sort_by(|a, b| a.node.cmp(&b.node));
        Ok(found)
    }

    /// Says it in the place of what was said before.
    pub fn say(&mut self, statement: &Statement) -> io::Result<()> {
        if let Some(mine) = &mut self.alone {
            mine.clone_from(statement);
            return Ok(());
        }
        self.put(FROM, statement)?;
        let kept = self.named(KEPT, statement)?;
        if kept.stat()?.is_some() { kept.remove() } else { Ok(()) }
    }

    /// Says what a node has and does not bring: nobody waits for it, or takes its bytes for a hole.
    pub fn keep(&self, statement: &Statement) -> io::Result<()> {
        self.put(KEPT, statement)
    }

    fn named(&self, prefix: &str, statement: &Statement) -> io::Result<At> {
        let id = hash::bytes(statement.node.as_bytes());
        at(&self.dir, &format!("{prefix}{id:016x}"))
    }

    fn put(&self, prefix: &str, statement: &Statement) -> io::Result<()> {
        let id = hash::bytes(statement.node.as_bytes());
        let new = prepare(&self.dir, &format!("new-{id:016x}"), &statement.encode())?;
        new.rename_over(&self.named(prefix, statement)?)
    }

    /// Where the bytes go, when that is decided.
    pub fn place(&self) -> io::Result<Option<Place>> {
        if self.alone.is_some() {
            return Ok(None);
        }
        let Some(bytes) = read(&self.dir, &plain("place"))? else { return Ok(None) };
        let bad = || {
            io::Error::new(io::ErrorKind::InvalidData, format!("{}/place is damaged", self.path))
        };
        Place::decode(&bytes).map(Some).ok_or_else(bad)
    }

    /// True for a file that no recovery has made: nodes may have flushed to it.
    pub fn was_there(&self, place: &Place) -> bool {
        let made = self.whole_path();
        place.path != made
    }

    fn whole_path(&self) -> Vec<u8> {
        format!("{}/{}", self.path, self.whole).into_bytes()
    }

    /// Decides where the bytes go, unless somebody else has done so: what counts.
    pub fn settle(&self, node: &str, place: &Place) -> io::Result<Place> {
        if self.alone.is_some() {
            return Ok(place.clone());
        }
        let new = format!("place-{:016x}", hash::bytes(node.as_bytes()));
        let new = prepare(&self.dir, &new, &statement::encode(place))?;
        let to = at(&self.dir, "place")?;
        let linked = rustix::fs::linkat(
            &new.dir,
            new.name.as_os_str(),
            &to.dir,
            to.name.as_os_str(),
            AtFlags::empty(),
        );
        match linked {
            // Without links: of two renames at once neither must win over the other.
            Err(Os::OPNOTSUPP | Os::PERM) => match new.rename_to_free(&to) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                other => other?,
            },
            Err(Os::EXIST) => {}
            other => other?,
        }
        tick::effect()?;
        let _ = new.remove();
        sync_dir(&self.dir)?;
        self.place()?.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// The file of its own, made when it is not there; all of a job open the same one.
    pub fn whole(&self) -> io::Result<Place> {
        tick::effect()?;
        let file = at(&self.dir, &self.whole)?.open(OFlags::RDWR | OFlags::CREATE)?;
        check_own(&file)?;
        if self.alone.is_none() {
            file.sync_all()?;
            sync_dir(&self.dir)?;
        }
        Ok(Place::of(self.whole_path(), rustix::fs::fstat(&file)?.st_ino))
    }
}

/// Proves that a file is one of ours before anything is written to it.
pub(crate) fn check_own(file: &File) -> io::Result<()> {
    let stat = rustix::fs::fstat(file)?;
    let own = stat.st_uid == rustix::process::geteuid().as_raw() && stat.st_nlink == 1;
    let text = "the part file belongs to somebody else, or has another name";
    if own { Ok(()) } else { Err(io::Error::new(io::ErrorKind::PermissionDenied, text)) }
}
