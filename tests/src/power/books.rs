//! What a program was told before the power went, and whether what is there agrees with it.

use super::program::LONGEST;
use super::{Id, Line, NAMES, Op};
use crate::content;
use crate::crash::Expected;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// A file, whatever its names.
#[derive(Clone, Debug, Default)]
struct Known {
    expected: Expected,
    /// As the program sees it; bytes beyond it may be there as long as no sync followed a cut.
    len: u64,
    was_cut: bool,
    was_synced: bool,
}

/// Everything that one program was told.
#[derive(Debug, Default)]
pub struct Books {
    files: BTreeMap<Id, Known>,
    /// What a name may stand for: first what was synced last, then what came after it.
    names: BTreeMap<String, Vec<Option<Id>>>,
    trying: Option<Op>,
    /// All that was tried, for who looks for what went wrong.
    history: Vec<Op>,
    /// Syncs that were acknowledged.
    pub syncs: u64,
    /// Operations that were acknowledged.
    pub operations: u64,
}

/// What was found.
#[derive(Clone, Debug, Default)]
pub struct Verdict {
    /// Files, and their contents as they can be read.
    pub whole: BTreeMap<String, Vec<u8>>,
    /// Files of which bytes that were never synced are lost, and said to be.
    pub lost: BTreeSet<String>,
}

impl Books {
    /// The next line of its output.
    pub fn read(&mut self, line: &Line) {
        match line {
            Line::Try(op) => {
                self.begin(op);
                self.history.push(op.clone());
                self.trying = Some(op.clone());
            }
            Line::Done => {
                let op = self.trying.take().expect("it was tried");
                self.operations += 1;
                self.done(&op);
            }
            Line::Failed(_) => {}
        }
    }

    fn stands_for(&self, name: &str) -> Option<Id> {
        self.names.get(name).and_then(|all| *all.last().expect("never empty"))
    }

    fn bind(&mut self, name: &str, id: Option<Id>) {
        self.names.entry(name.to_owned()).or_insert_with(|| vec![None]).push(id);
    }

    fn begin(&mut self, op: &Op) {
        match op {
            Op::Create { name, id } => {
                if self.stands_for(name).is_some() {
                    self.bind(name, None);
                }
                self.bind(name, Some(*id));
                self.files.insert(*id, Known::default());
            }
            Op::Write { id, operation, offset, len } => {
                let known = self.files.get_mut(id).expect("it was created");
                let data = content::bytes(*id % 251, *operation, *offset, *len);
                known.expected.write(*offset, &data);
                known.len = known.len.max(offset + len);
            }
            Op::Cut { id, len } => {
                let known = self.files.get_mut(id).expect("it was created");
                known.cut(*len);
            }
            Op::Rename { from, to } if from != to => {
                let id = self.stands_for(from);
                self.bind(to, id);
                self.bind(from, None);
            }
            Op::Unlink { name } => self.bind(name, None),
            Op::Rename { .. } | Op::Sync { .. } | Op::SyncNames => {}
        }
    }

    fn done(&mut self, op: &Op) {
        match op {
            Op::Sync { id } => {
                self.syncs += 1;
                self.files.get_mut(id).expect("it was created").synced();
                for all in self.names.values_mut().filter(|all| all.last() == Some(&Some(*id))) {
                    all.drain(..all.len() - 1);
                }
            }
            Op::SyncNames => {
                self.syncs += 1;
                self.names.values_mut().for_each(|all| drop(all.drain(..all.len() - 1)));
            }
            _ => {}
        }
    }

    /// Compares a directory with the books; every difference is a panic. From here on what was
    /// found is the truth.
    ///
    /// # Panics
    /// When something that was synced is not there, or something else is.
    pub fn judge(&self, what: &str, directory: &Path) -> Verdict {
        let mut verdict = Verdict::default();
        let mut found = BTreeMap::new();
        for name in NAMES {
            let none = vec![None];
            let may_be = self.names.get(name).unwrap_or(&none);
            let what = format!("{what}: {name}");
            let path = directory.join(name);
            let file = match File::open(&path) {
                Ok(file) => file,
                Err(e) if e.kind() == ErrorKind::NotFound => {
                    assert!(
                        may_be.contains(&None),
                        "{what}: is not there, wanted one of {may_be:?}"
                    );
                    continue;
                }
                Err(e) => panic!("{what}: {e}"),
            };
            let known: Vec<&Known> = may_be.iter().flatten().map(|id| &self.files[id]).collect();
            let vouched = |at| known.iter().any(|known| known.is_vouched(at));
            let (bytes, unreadable) = Reader { what: &what, file: &file, vouched: &vouched }.all();
            // More than one when nothing, or nothing but zeros, is in it.
            let fits = |id: &Id| self.files[id].agrees(&bytes, &unreadable);
            let ids: Vec<Id> = may_be.iter().flatten().copied().filter(fits).collect();
            assert!(
                !ids.is_empty(),
                "{what}: {} bytes that are none of {may_be:?}: {:#?}",
                bytes.len(),
                {
                    let why = may_be.iter().flatten().map(|id| self.why(*id, &bytes, &unreadable));
                    why.collect::<Vec<String>>()
                }
            );
            found.insert(name, (ids, bytes.len()));
            match unreadable.is_empty() {
                true => drop(verdict.whole.insert(name.to_owned(), bytes)),
                false => drop(verdict.lost.insert(name.to_owned())),
            }
        }
        self.nothing_vanished(what, &found);
        verdict
    }

    /// A synced file whose name was not taken away has one.
    fn nothing_vanished(&self, what: &str, found: &BTreeMap<&str, (Vec<Id>, usize)>) {
        for (id, known) in &self.files {
            let is_found = found.values().any(|(ids, _)| ids.contains(id));
            let is_named = self.names.values().any(|all| all.last() == Some(&Some(*id)));
            let is_vouched = known.was_synced && is_named;
            assert!(
                !is_vouched || is_found,
                "{what}: file {id} is nowhere: {:?}, found {found:?}; {:?}; {}",
                self.names,
                self.trying,
                self.why(*id, &[], &[])
            );
        }
    }

    fn why(&self, id: Id, bytes: &[u8], unreadable: &[u64]) -> String {
        let known = &self.files[&id];
        let mut text =
            format!("file {id}: size {} to {}", known.expected.size_least(), known.expected.len());
        if let Some(at) = known.expected.first_wrong(bytes, unreadable) {
            let end = bytes.len().min(at as usize + 8);
            let got = &bytes[at as usize..end];
            text += &format!(
                ", wrong from {at} on: got {got:?}, may be {:?}",
                known.expected.may_be(at)
            );
        }
        if let Some(at) = known.vouched_and_lost(unreadable) {
            text += &format!(", byte {at} cannot be read and was synced");
        }
        let made = |op: &Op| matches!(op, Op::Create { id: made, .. } if *made == id);
        let since = self.history.iter().enumerate().skip_while(|(_, op)| !made(op));
        for (at, op) in since.filter(|(_, op)| op.is_of(id)) {
            text += &format!("; {at} of {}: {op:?}", self.history.len());
        }
        text
    }
}

impl Known {
    fn cut(&mut self, len: u64) {
        let before = self.len;
        self.expected.cut(len.min(self.expected.len()));
        if len > before {
            // Zeros from the end on, which are written like others.
            self.expected.write(before, &vec![0; (len - before) as usize]);
        }
        self.len = len;
        self.was_cut = true;
    }

    fn synced(&mut self) {
        if self.was_cut {
            self.expected.acknowledge_cut(self.len);
        }
        self.expected.acknowledge_all();
        (self.was_cut, self.was_synced) = (false, true);
    }

    fn agrees(&self, bytes: &[u8], unreadable: &[u64]) -> bool {
        let size = bytes.len() as u64;
        let fits = (self.expected.size_least()..=self.expected.len()).contains(&size);
        fits && self.expected.first_wrong(bytes, unreadable).is_none()
            && self.vouched_and_lost(unreadable).is_none()
    }

    /// A byte that cannot be read although nothing was written there since it was synced.
    fn vouched_and_lost(&self, unreadable: &[u64]) -> Option<u64> {
        unreadable.iter().find(|at| self.is_vouched(**at)).copied()
    }

    fn is_vouched(&self, at: u64) -> bool {
        at < self.expected.size_least() && self.expected.may_be(at).len() == 1
    }
}

/// Reading each byte of a large lost piece alone takes minutes. So a block of which these cannot be
/// read counts as lost, when none of its bytes must be there.
const PROBES: [usize; 6] = [0, 1, 77, 256, 510, 511];
const BLOCK: usize = 512;

struct Reader<'a> {
    what: &'a str,
    file: &'a File,
    /// This byte must be there.
    vouched: &'a dyn Fn(u64) -> bool,
}

impl Reader<'_> {
    /// What the file has; and which of its bytes answer EIO (they are 0 then).
    fn all(&self) -> (Vec<u8>, Vec<u64>) {
        let what = self.what;
        let len = self.file.metadata().unwrap_or_else(|e| panic!("{what}: {e}")).len();
        assert!(len <= LONGEST, "{what}: {len} bytes, and nobody wrote so far");
        let mut bytes = vec![0; len as usize];
        let mut unreadable = Vec::new();
        self.read(0, &mut bytes, &mut unreadable);
        (bytes, unreadable)
    }

    /// In halves where it fails, down to single bytes.
    fn read(&self, at: u64, into: &mut [u8], unreadable: &mut Vec<u64>) {
        if into.is_empty() || !self.fails(at, into) {
            return;
        }
        if into.len() == 1 || into.len() == BLOCK && self.is_all_lost(at) {
            into.fill(0);
            return unreadable.extend(at..at + into.len() as u64);
        }
        // Whole blocks first, so that halves are blocks too.
        let half = match into.len() > BLOCK {
            true => (into.len() / 2).next_multiple_of(BLOCK),
            false => into.len() / 2,
        };
        let (first, second) = into.split_at_mut(half);
        self.read(at, first, unreadable);
        self.read(at + half as u64, second, unreadable);
    }

    fn is_all_lost(&self, block: u64) -> bool {
        !(block..block + BLOCK as u64).any(self.vouched)
            && PROBES.iter().all(|by| self.fails(block + *by as u64, &mut [0]))
    }

    fn fails(&self, at: u64, into: &mut [u8]) -> bool {
        match self.file.read_exact_at(into, at) {
            Ok(()) => false,
            Err(e) if e.raw_os_error() == Some(libc::EIO) => true,
            Err(e) => panic!("{}: at {at}: {e}", self.what),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(ops: &[Op]) -> Books {
        let mut books = Books::default();
        for op in ops {
            books.read(&Line::Try(op.clone()));
            books.read(&Line::Done);
        }
        books
    }

    fn synced(name: &str, id: Id) -> [Op; 2] {
        [Op::Create { name: name.to_owned(), id }, Op::Sync { id }]
    }

    #[test]
    fn an_empty_file_may_be_any_of_two_that_are_empty() {
        let mut ops = synced("a", 1).to_vec();
        ops.extend(synced("new", 2));
        ops.push(Op::Rename { from: "new".to_owned(), to: "a".to_owned() });
        let directory = tempfile::tempdir().expect("a directory");
        std::fs::write(directory.path().join("a"), "").expect("write");
        let verdict = told(&ops).judge("renamed", directory.path());
        assert_eq!(verdict.whole.len(), 1);
    }

    #[test]
    #[should_panic(expected = "file 2 is nowhere")]
    fn a_file_that_neither_of_its_names_has_is_missed() {
        let mut ops = synced("a", 1).to_vec();
        ops.push(Op::Create { name: "new".to_owned(), id: 2 });
        ops.push(Op::Write { id: 2, operation: 3, offset: 0, len: 9 });
        ops.push(Op::Sync { id: 2 });
        ops.push(Op::Rename { from: "new".to_owned(), to: "a".to_owned() });
        let directory = tempfile::tempdir().expect("a directory");
        std::fs::write(directory.path().join("a"), "").expect("write");
        told(&ops).judge("half a rename", directory.path());
    }
}
