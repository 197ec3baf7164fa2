//! Names without a service: directories, links, empty files, symbolic links, special files, and the
//! modes of everything, as the journals of all nodes tell them together.
//!
//! Each recovery first says on the [`board`](super::board) what its node has heard of names, and goes by what
//! all have said so far: newest fact first, see [`ebb_namespace::Book`]. It makes what its own node heard last,
//! the directories that this is in, and those that files are in of which it has bytes: directories before
//! the files, the rest after them. Whoever finds something done leaves it. What it is going to make, and
//! where, it says before it begins, so that a recovery that comes later and knows of newer names can take
//! back what was made by older ones.
//!
//! # What is never done
//! Nothing that is on the backing and was not made by a recovery of this job is changed, unless the job
//! was going to replace it. A file of which no cache that was recovered has the bytes is not made,
//! unless it had none but zeros as far as was heard.

mod acts;

use super::board::{Board, Said, Token};
use super::file::{Progress, Site, Work, is_hollow};
use super::{StateTells, merge, statement};
use acts::Trouble;
use ebb_namespace::{Book, Missing};
use ebb_node_journal::{Header, Home, Image, Note};
use ebb_types::facts::Shape;
use ebb_types::{Facts, FileKind, Ino, Name, Version};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::time::{Duration, Instant};

/// How often it is looked who has said something.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// What is known of names.
pub(super) struct Names<'a> {
    /// The state of the service, where that is here.
    state: Option<&'a StateTells<'a>>,
    /// What all had said when it answered last.
    answered: Option<Vec<Token>>,
    own: Book,
    all: Book,
    /// Inodes of which this node has bytes.
    held: BTreeSet<Ino>,
    /// What it cut.
    cuts: BTreeMap<Ino, Cuts>,
    /// Those of them that never were under their names on the backing.
    homeless: BTreeSet<Ino>,
    /// What recoveries made, or were going to, under names that were others by then: whoever takes that
    /// back makes it anew, because the others may be done.
    moved: BTreeSet<Ino>,
    /// What the recoveries of all nodes have gone by so far.
    acted: BTreeMap<String, Vec<Book>>,
    paths: BTreeMap<Ino, Vec<Vec<Name>>>,
    /// What each path means.
    taken: BTreeMap<Vec<u8>, Ino>,
    /// `st_ino` of what is to be replaced, by path.
    replaces: BTreeMap<Vec<u8>, u64>,
}

/// Lengths to which a node cut a file, and at which versions; and the newest version it knows of.
type Cuts = (Vec<(u64, Version)>, Version);

/// A name that is not on the backing, and why.
pub(super) struct Left {
    pub path: String,
    pub why: String,
}

fn bytes(path: &[Name]) -> Vec<u8> {
    path.iter().map(Name::as_bytes).collect::<Vec<_>>().join(&b'/')
}

fn text(path: &[Name]) -> String {
    String::from_utf8_lossy(&bytes(path)).into_owned()
}

/// Books, on the board.
pub(super) fn encode(books: &[Book]) -> Vec<u8> {
    let facts: Vec<Vec<Facts>> = books.iter().map(Book::facts).collect();
    statement::encode(&facts)
}

/// What another one said; `None` when it is no such thing.
pub(super) fn decode(bytes: &[u8]) -> Option<Vec<Book>> {
    let books: Vec<Vec<Facts>> = statement::decode(bytes)?;
    let book = |facts: Vec<Facts>| {
        let mut book = Book::default();
        facts.iter().all(Facts::is_sound).then(|| facts.iter().for_each(|f| book.hear(f)))?;
        Some(book)
    };
    books.into_iter().map(book).collect()
}

/// True when by now something has that name that looks as what had it: only which inode it is has
/// changed.
fn is_like(now: Option<&Option<&Shape>>, stale: &Missing<'_>) -> bool {
    let like = |shape: &&Shape| {
        let same = shape.kind == stale.shape.kind && shape.target == stale.shape.target;
        same && shape.kind != FileKind::Regular
    };
    now.is_some_and(|shape| shape.as_ref().is_none_or(like))
}

impl<'a> Names<'a> {
    /// Says what this node knows, and hears what all have said so far.
    /// Others that are recovered at the same time are waited for as long as more of them come.
    pub fn gather(
        board: &Board,
        node: &str,
        image: &Image,
        state: Option<&'a StateTells<'a>>,
        patience: Duration,
    ) -> io::Result<Names<'a>> {
        let own = image.book.clone();
        // Also that there is nothing to say: others wait for that.
        let shared = own.is_shared() || image.lives.has_others();
        if !own.is_empty() || shared && !board.has_said(Said::Heard, node)? {
            board.say_names(Said::Heard, node, std::slice::from_ref(&own))?;
        }
        let mut names = Names {
            state,
            answered: None,
            all: own.clone(),
            own,
            held: image.sayable().filter(|(_, n)| n.has_bytes()).map(|(ino, _)| ino).collect(),
            cuts: image.sayable().map(|(ino, n)| (ino, (n.cuts.clone(), n.known))).collect(),
            homeless: image
                .sayable()
                .filter(|(_, n)| n.header.home.as_ref().is_none_or(Home::is_part))
                .map(|(ino, _)| ino)
                .collect(),
            moved: BTreeSet::new(),
            acted: BTreeMap::new(),
            paths: BTreeMap::new(),
            taken: BTreeMap::new(),
            replaces: BTreeMap::new(),
        };
        let (mut said, mut since) = (0, Instant::now());
        loop {
            let by_now = board.said()?;
            if by_now != said {
                (said, since) = (by_now, Instant::now());
            }
            let idle = names.own.is_empty() && names.held.is_empty();
            if idle || said >= image.book.nodes() || since.elapsed() >= patience {
                break;
            }
            std::thread::sleep(LOOK_INTERVAL);
        }
        names.listen(board, node)?;
        Ok(names)
    }

    /// Hears what has been said since.
    pub fn listen(&mut self, board: &Board, node: &str) -> io::Result<()> {
        let said = board.all_said()?;
        self.acted = board.names(Said::Acted)?;
        self.all = self.own.clone();
        board.names(Said::Heard)?.values().flatten().for_each(|book| self.all.join(book));
        self.answer(board, node, said)?;
        let acted = self.acted.values().flatten();
        self.moved = acted.flat_map(|book| book.overruled(&self.all)).map(|m| m.ino).collect();
        self.paths = self.all.all_paths();
        let taken = self.paths.iter().flat_map(|(ino, all)| all.iter().map(|p| (bytes(p), *ino)));
        self.taken = taken.collect();
        let (missing, _) = self.all.missing();
        let replacing = missing.iter().filter(|m| m.replaces != 0);
        self.replaces = replacing.map(|m| (bytes(&m.path), m.replaces)).collect();
        Ok(())
    }

    /// The state of the service knows what has become of what others have heard.
    /// `said`: what stands for all that was heard.
    fn answer(&mut self, board: &Board, node: &str, said: Vec<Token>) -> io::Result<()> {
        let Some(state) = self.state else { return Ok(()) };
        if self.answered.as_ref() == Some(&said) {
            return Ok(());
        }
        let before = self.own.clone();
        self.own.hear(&state(&self.all, &self.held));
        let news = self.own != before;
        if news {
            self.all.join(&self.own);
            board.say_names(Said::Heard, node, std::slice::from_ref(&self.own))?;
        }
        self.answered = (!news).then_some(said);
        Ok(())
    }

    /// True when there were other nodes in the job.
    pub fn is_shared(&self) -> bool {
        self.all.is_shared()
    }

    /// Files of which other recoveries must know which objects they are: those that may get another name,
    /// or another one besides.
    pub fn told(&self) -> BTreeSet<Ino> {
        let mut told = self.named();
        told.extend(self.homeless.iter().filter(|_| self.is_shared()));
        told
    }

    /// Those of them of which it is known from all journals which name they have.
    pub fn named(&self) -> BTreeSet<Ino> {
        if self.is_shared() { self.paths.keys().copied().collect() } else { BTreeSet::new() }
    }

    /// Files of which somebody has heard which modes and owner they have.
    pub fn shaped(&self) -> BTreeSet<Ino> {
        let shaped =
            self.held.iter().chain(self.cuts.keys()).filter(|ino| self.all.shape(**ino).is_some());
        shaped.copied().collect()
    }

    /// Files that are zeros and nothing else, and how long they are.
    pub fn zeros(&self) -> BTreeMap<Ino, u64> {
        let (missing, _) = self.all.missing();
        let zeros = missing.iter().filter(|m| m.shape.is_zeros());
        zeros.map(|m| (m.ino, m.shape.size)).collect()
    }

    /// True when the job has taken the file's last name away.
    pub fn is_gone(&self, ino: Ino) -> bool {
        self.all.is_gone(ino)
    }

    /// True when it has done so at any time, as far as that is remembered.
    pub fn was_removed(&self, ino: Ino) -> bool {
        self.all.was_removed(ino)
    }

    /// A file of which this node has bytes, with the name and the modes that it has by now.
    pub fn corrected(&self, ino: Ino, note: &Note) -> Note {
        let mut note = note.clone();
        let paths = self.paths.get(&ino).map(|all| all.iter().map(|p| bytes(p)));
        let paths: Vec<Vec<u8>> = paths.into_iter().flatten().collect();
        let other = self.taken.get(&note.header.path).is_some_and(|by| *by != ino);
        if paths.is_empty() && other {
            // It was moved or deleted, and who did that has not said so yet.
            note.header.path.clear();
        }
        if let Some(first) = paths.first()
            && !paths.contains(&note.header.path)
        {
            note.header.path.clone_from(first);
        }
        if let Some(ino) = self.replaces.get(&note.header.path) {
            let path = note.header.path.clone();
            note.header.under = Some(Home { path, ino: *ino, seen: None, changing: false });
        }
        if let Some(shape) = self.all.shape(ino).filter(|s| s.kind == FileKind::Regular) {
            let header = &mut note.header;
            (header.perm, header.uid, header.gid) = (shape.perm, shape.uid, shape.gid);
            // Brought there by the job before this node had a byte of it.
            if self.state.is_some() && shape.placed != 0 && header.home.is_none() {
                let (path, ino) = (header.path.clone(), shape.placed);
                header.home = Some(Home { path, ino, seen: None, changing: false });
            }
        }
        note
    }

    /// Takes back what was made by older names, and makes the directories that are missing; those that
    /// cannot be made.
    pub fn directories(&self, site: &Site<'_>) -> io::Result<Vec<Left>> {
        let mine = self.mine();
        let mut acted = self.take_back(site);
        if self.is_shared() && !mine.is_empty() {
            acted.push(self.all.only(mine.iter()));
            acted.dedup();
            site.board.say_names(Said::Acted, site.node, &acted)?;
        }
        let mut left = Vec::new();
        for missing in mine.iter().filter(|m| m.shape.kind == FileKind::Directory) {
            if let Err(why) = acts::directory(site, &self.all, missing) {
                left.push(Left { path: text(&missing.path), why: why.text() });
            }
        }
        Ok(left)
    }

    /// What this recovery makes, directories before what is in them.
    fn mine(&self) -> Vec<Missing<'_>> {
        let (mut missing, _) = self.all.missing();
        let mine = |m: &Missing<'_>| {
            self.all.is_heard_by(&self.own, m)
                || self.held.contains(&m.ino)
                || self.moved.contains(&m.ino)
        };
        let mut dirs: BTreeSet<Ino> = BTreeSet::new();
        missing.iter().filter(|m| mine(m)).for_each(|m| dirs.extend(&m.dirs));
        missing.retain(|m| mine(m) || dirs.contains(&m.ino));
        missing
    }

    /// Takes names back that recoveries gave, and that somebody's journal says were others by then. What
    /// this node's recoveries went by and could not be taken back.
    fn take_back(&self, site: &Site<'_>) -> Vec<Book> {
        let mut kept = Vec::new();
        let now: BTreeMap<&Vec<Name>, Option<&Shape>> = self
            .paths
            .iter()
            .flat_map(|(ino, paths)| paths.iter().map(|path| (path, self.all.shape(*ino))))
            .collect();
        let own = Said::Acted.name(site.node);
        let books: Vec<(bool, &Book)> = self
            .acted
            .iter()
            .flat_map(|(node, books)| books.iter().map(|book| (*node == own, book)))
            .collect();
        let stale = books.iter().enumerate().flat_map(|(at, (_, book))| {
            book.overruled(&self.all).into_iter().map(move |stale| (at, stale))
        });
        let mut stale: Vec<_> = stale.filter(|(_, s)| !is_like(now.get(&s.path), s)).collect();
        // Whatever recovery made them: directories after what is in them.
        stale.sort_by_key(|(_, s)| std::cmp::Reverse(s.path.len()));
        let mut stays = BTreeSet::new();
        for (at, stale) in stale {
            let gone = self.all.is_gone(stale.ino);
            let elsewhere = !gone && self.is_elsewhere(site, stale.ino);
            let done = acts::take_back(site, books[at].1, &stale, gone || elsewhere);
            if !matches!(done, Ok(true)) {
                tracing::debug!(path = text(&stale.path), ?done, "stays");
                stays.insert(at);
            }
        }
        for (_, (_, book)) in
            books.iter().enumerate().filter(|(at, (own, _))| *own && stays.contains(at))
        {
            kept.push((*book).clone());
        }
        kept
    }

    /// True for a file that is under a name that it has.
    fn is_elsewhere(&self, site: &Site<'_>, ino: Ino) -> bool {
        let Ok(Some(place)) = site.board.place(ino) else { return false };
        let mut paths = self.paths.get(&ino).into_iter().flatten();
        paths.any(|path| matches!(site.places.file(&bytes(path), place.ino), Ok(Some(_))))
    }

    /// Everything else, after the files of which this node has bytes. `whole`: which of them are under their
    /// names, and as which objects.
    pub fn rest(&self, site: &Site<'_>, whole: &BTreeMap<Ino, u64>) -> Vec<Left> {
        let mut left = Vec::new();
        let mut by_ino: BTreeMap<Ino, Vec<Missing<'_>>> = BTreeMap::new();
        let (dirs, mine): (Vec<_>, Vec<_>) =
            self.mine().into_iter().partition(|m| m.shape.kind == FileKind::Directory);
        let dirs: BTreeSet<Ino> = dirs.iter().map(|m| m.ino).collect();
        for missing in mine {
            by_ino.entry(missing.ino).or_default().push(missing);
        }
        for (ino, names) in by_ino {
            let held = self.held.contains(&ino);
            // What is held and not whole is told of itself.
            if (!held || whole.contains_key(&ino))
                && let Err((path, why)) = self.bring(site, &names, whole.get(&ino).copied())
            {
                left.push(Left { path: text(path), why: why.text() });
            }
        }
        // What could not be made was told of before.
        for missing in self.all.missing().0.iter().rev() {
            let is_mine = dirs.contains(&missing.ino) || self.held.contains(&missing.ino);
            if (is_mine || self.all.is_shaped_by(&self.own, missing.ino))
                && let Err(why) = self.dress(site, missing)
            {
                tracing::debug!(path = text(&missing.path), why = why.text(), "stays as it is");
            }
        }
        let astray = self.all.missing().1.into_iter().map(|(name, _)| name);
        left.extend(astray.filter(|name| self.own.has(name)).map(|(_, name)| Left {
            path: text(&[name]),
            why: "in a directory of which no recovered cache tells where it is".to_owned(),
        }));
        left
    }

    /// All names of something that is not a directory.
    fn bring<'m>(
        &self,
        site: &Site<'_>,
        names: &'m [Missing<'_>],
        whole: Option<u64>,
    ) -> Result<(), (&'m [Name], Trouble)> {
        let Some(first) = names.first() else { return Ok(()) };
        let failed = |m: &'m Missing<'_>| move |why: Trouble| (&m.path[..], why);
        let ours = match whole {
            Some(object) => Some(object),
            None => {
                site.board.place(first.ino).map_err(|e| failed(first)(e.into()))?.map(|p| p.ino)
            }
        };
        let mut object = None;
        for missing in names {
            let found = acts::find(site, &self.all, missing, ours).map_err(failed(missing))?;
            object = object.or(found);
        }
        // Under a name that another node gave it.
        let object = object.or_else(|| acts::elsewhere(site, &self.all, first, ours));
        let object = match object {
            Some(object) => {
                self.resize(site, first, object, ours).map_err(failed(first))?;
                object
            }
            // Files are there that no recovery made: the job had got so far, and nothing is known of it here.
            None if names.iter().all(|m| acts::is_file(site, &self.all, m)) => return Ok(()),
            None => self.make(site, first, ours).map_err(failed(first))?,
        };
        for missing in names {
            acts::name(site, &self.all, missing, object).map_err(failed(missing))?;
        }
        acts::tidy_ready(site, first.ino, object).map_err(failed(first))?;
        acts::dress(site, &self.all, first, object).map_err(failed(first))
    }

    /// Modes and the like of what is there by now.
    fn dress(&self, site: &Site<'_>, missing: &Missing<'_>) -> Result<(), Trouble> {
        if missing.shape.kind == FileKind::Directory {
            return acts::dress_directory(site, &self.all, missing);
        }
        match site.board.place(missing.ino)? {
            Some(place) => {
                self.resize(site, missing, place.ino, Some(place.ino))?;
                acts::dress(site, &self.all, missing, place.ino)
            }
            None => Ok(()),
        }
    }

    /// Makes it under its first name; which object it is.
    fn make(
        &self,
        site: &Site<'_>,
        missing: &Missing<'_>,
        ours: Option<u64>,
    ) -> Result<u64, Trouble> {
        if missing.shape.kind != FileKind::Regular {
            acts::special(site, &self.all, missing)?;
            let made = acts::find(site, &self.all, missing, None)?;
            return made.ok_or_else(|| Trouble::Other("it was taken away again".to_owned()));
        }
        if let Some(object) = ours
            && (acts::from_ready(site, &self.all, missing, object)?
                || self.fetch_from_elsewhere(site, missing, object)?)
        {
            return Ok(object);
        }
        if !missing.shape.is_zeros() {
            let text = "bytes of it are in caches that were not recovered yet";
            return Err(Trouble::Other(text.to_owned()));
        }
        self.make_of_zeros(site, missing)
    }

    fn make_of_zeros(&self, site: &Site<'_>, missing: &Missing<'_>) -> Result<u64, Trouble> {
        let mut work = Work::begin(site, missing.ino, &self.of_zeros(missing))?;
        match work.step_zeros(site)? {
            Progress::Done => Ok(work.home().ino),
            Progress::Missing(missing) => Err(Trouble::Other(missing.describe())),
        }
    }

    /// A file that a recovery made of zeros gets the length that was heard of last.
    fn resize(
        &self,
        site: &Site<'_>,
        missing: &Missing<'_>,
        object: u64,
        ours: Option<u64>,
    ) -> Result<(), Trouble> {
        let shape = missing.shape;
        let regular = shape.kind == FileKind::Regular && ours == Some(object);
        if !regular || !shape.is_zeros() || !site.board.has(missing.ino)? {
            return Ok(());
        }
        let file = site.places.file(&bytes(&missing.path), object)?;
        let other = match file {
            Some(file) => file.metadata()?.len() != shape.size && is_hollow(&file)?,
            None => false,
        };
        let all = site.board.corner(missing.ino)?.statements()?;
        if other && merge::is_nobodys(&all) {
            self.make_of_zeros(site, missing)?;
        }
        Ok(())
    }

    /// Whoever brought it knew it under another name.
    fn fetch_from_elsewhere(
        &self,
        site: &Site<'_>,
        missing: &Missing<'_>,
        object: u64,
    ) -> Result<bool, Trouble> {
        let Some(path) = site.board.name_of(missing.ino)? else { return Ok(false) };
        let has = |path: &[u8]| self.taken.get(path) == Some(&missing.ino);
        if has(&path) || site.places.file(&path, object)?.is_none() {
            return Ok(false);
        }
        let from = site.places.at(&path, false)?;
        from.rename_to_free(&site.places.at(&bytes(&missing.path), false)?)?;
        self.tidy_above(site, &path);
        Ok(true)
    }

    /// Directories that were made for a name that was another one by then: as whoever has nothing but a
    /// path makes them, and empty.
    fn tidy_above(&self, site: &Site<'_>, path: &[u8]) {
        let mut path = path;
        while let Some(end) = path.iter().rposition(|b| *b == b'/') {
            path = &path[..end];
            let known = self.taken.contains_key(path);
            if known || !acts::remove_bare(site, path).unwrap_or(false) {
                return;
            }
        }
    }

    fn of_zeros(&self, missing: &Missing<'_>) -> Note {
        let (path, shape) = (bytes(&missing.path), missing.shape);
        let older = |ino| Home { path: path.clone(), ino, seen: None, changing: false };
        let header = Header {
            path: path.clone(),
            perm: shape.perm,
            uid: shape.uid,
            gid: shape.gid,
            atime: shape.atime,
            mtime: shape.mtime,
            size: shape.size,
            home: None,
            under: (missing.replaces != 0).then(|| older(missing.replaces)),
            shared: self.is_shared(),
        };
        let mut note = Note::new(header);
        note.alone = !self.is_shared();
        if let Some((cuts, known)) = self.cuts.get(&missing.ino) {
            (note.cuts, note.known) = (cuts.clone(), *known);
        }
        note
    }

    /// Everything is on the backing: what this node need not say again.
    pub fn done(&self) -> Facts {
        Facts { settled: self.own.newest(), ..Facts::default() }
    }
}

#[cfg(test)]
mod tests;
