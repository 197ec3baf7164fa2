//! A file that is written through a shared mapping. Bytes go in and out of the mapping by system calls,
//! so what the kernel cannot bring or store is an error here and no signal.

use super::{Setup, Work};
use crate::content;
use crate::crash::Expected;
use crate::model::{Model, close};
use rand::Rng;
use rand_chacha::ChaCha8Rng;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Some pages, the last one not whole.
const BYTES: u64 = 40_000;
const STORE_MAX: u64 = 9_000;

/// The file as its writer knows it.
#[derive(Debug)]
pub(super) struct Mapped {
    name: String,
    expected: Expected,
    open: Option<Mapping>,
    is_published: bool,
    in_doubt: bool,
    /// What failed was done on the other node: it may still come from there.
    in_doubt_elsewhere: bool,
    /// Some of it was written there.
    was_elsewhere: bool,
    /// What was done last, for who wonders why it failed.
    pub did: String,
}

#[derive(Debug)]
struct Mapping {
    /// None once it is closed.
    file: Option<File>,
    at: *mut libc::c_void,
    /// Between it and the program.
    between: File,
}

impl Mapping {
    fn new(file: File) -> io::Result<Mapping> {
        let (kind, len) = (libc::PROT_READ | libc::PROT_WRITE, BYTES as usize);
        // SAFETY: a new mapping of an open file, taken away when this is dropped.
        let at = unsafe {
            libc::mmap(std::ptr::null_mut(), len, kind, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a name of a constant; the descriptor is fresh.
        let between = unsafe {
            let fd = libc::memfd_create(c"between".as_ptr(), libc::MFD_CLOEXEC);
            assert!(fd >= 0, "memfd: {}", io::Error::last_os_error());
            File::from_raw_fd(fd)
        };
        Ok(Mapping { file: Some(file), at, between })
    }

    fn store(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.between.write_all_at(data, 0)?;
        // SAFETY: within the mapping; what cannot be stored there is an error of the call.
        let stored = unsafe {
            let to = self.at.byte_add(offset as usize);
            libc::pread(self.between.as_raw_fd(), to, data.len(), 0)
        };
        whole(stored, data.len())
    }

    fn load(&self, offset: u64, len: usize) -> io::Result<Vec<u8>> {
        // SAFETY: as above.
        let loaded = unsafe {
            let from = self.at.byte_add(offset as usize);
            libc::pwrite(self.between.as_raw_fd(), from, len, 0)
        };
        whole(loaded, len)?;
        let mut data = vec![0; len];
        self.between.read_exact_at(&mut data, 0).map(|()| data)
    }

    fn sync(&self) -> io::Result<()> {
        // SAFETY: the whole mapping.
        match unsafe { libc::msync(self.at, BYTES as usize, libc::MS_SYNC) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Unmaps and closes. A close tells once what the kernel could not store, also a close of another
    /// descriptor; whoever opens it anew and syncs is told what nobody's sync was.
    fn end(mut self) -> io::Result<()> {
        self.unmap();
        let Some(file) = self.file.take() else { return Ok(()) };
        let path = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
        close(file)?;
        match File::options().write(true).open(path) {
            Ok(again) => again.sync_all(),
            // It was closed; what is there now is somebody else's.
            Err(_) => Ok(()),
        }
    }

    fn unmap(&mut self) {
        if !self.at.is_null() {
            // SAFETY: the mapping of this, which nobody uses after it.
            unsafe { libc::munmap(self.at, BYTES as usize) };
            self.at = std::ptr::null_mut();
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.unmap();
    }
}

/// A page that could not be brought ends the call early, or fails it with EFAULT.
fn whole(done: isize, wanted: usize) -> io::Result<()> {
    match usize::try_from(done) {
        Ok(n) if n == wanted => Ok(()),
        Ok(_) => Err(io::Error::from_raw_os_error(libc::EFAULT)),
        Err(_) => Err(io::Error::last_os_error()),
    }
}

impl Mapped {
    pub fn new(who: u64) -> Mapped {
        Mapped {
            name: format!("x{who}/mapped"),
            expected: Expected::default(),
            open: None,
            is_published: false,
            in_doubt: false,
            in_doubt_elsewhere: false,
            was_elsewhere: false,
            did: String::new(),
        }
    }

    fn path(&self, root: &Path) -> PathBuf {
        root.join(&self.name)
    }

    /// One of the things that are done with it.
    pub fn step(
        &mut self,
        setup: &Setup,
        dice: &mut ChaCha8Rng,
        (round, number): (u64, u64),
        work: &mut Work,
    ) -> io::Result<()> {
        if self.in_doubt_elsewhere {
            return Ok(());
        }
        self.open(&setup.root, round, number)?;
        let offset = dice.random_range(0..BYTES);
        let len = dice.random_range(1..STORE_MAX).min(BYTES - offset);
        let data = content::bytes(round % 200, number, offset, len);
        let what = dice.random_range(0..10);
        self.did = match what {
            0..5 => format!("store {len} at {offset}"),
            5 => "sync".to_owned(),
            6 => "read".to_owned(),
            7 => "load".to_owned(),
            8 => "close, read elsewhere".to_owned(),
            _ => format!("close, write {len} at {offset} elsewhere, load"),
        };
        match what {
            0..5 => self.store(offset, &data, work),
            5 => self.sync(setup),
            6 => self.read(&setup.root),
            7 => self.load(),
            8 => {
                self.close()?;
                self.read_elsewhere(&setup.elsewhere, work);
                Ok(())
            }
            _ => {
                self.close()?;
                self.write_elsewhere(&setup.elsewhere, offset, &data, work);
                if self.in_doubt_elsewhere {
                    return Ok(());
                }
                self.open(&setup.root, round, number)?;
                self.load()
            }
        }
    }

    fn open(&mut self, root: &Path, round: u64, number: u64) -> io::Result<()> {
        if self.open.is_some() {
            return Ok(());
        }
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false);
        if self.expected.len() < BYTES || self.expected.size_least() < BYTES {
            let file = options.open(self.path(root))?;
            let data = content::bytes(round % 200, number, 0, BYTES);
            (self.in_doubt, self.is_published) = (true, false);
            self.expected.write(0, &data);
            file.write_all_at(&data, 0)?;
            close(file)?;
            self.in_doubt = false;
            self.acknowledge();
        }
        self.open = Some(Mapping::new(options.open(self.path(root))?)?);
        Ok(())
    }

    fn acknowledge(&mut self) {
        if !self.in_doubt {
            self.expected.acknowledge_all();
            self.is_published = true;
        }
    }

    fn store(&mut self, offset: u64, data: &[u8], work: &mut Work) -> io::Result<()> {
        let mapping = self.open.as_ref().expect("it was just opened");
        (self.in_doubt, self.is_published) = (true, false);
        self.expected.write(offset, data);
        mapping.store(offset, data)?;
        self.in_doubt = false;
        work.mapped += 1;
        Ok(())
    }

    fn sync(&mut self, setup: &Setup) -> io::Result<()> {
        let mapping = self.open.as_ref().expect("it was just opened");
        let (was_published, model) = (self.is_published, setup.model);
        let file = mapping.file.as_ref().filter(|_| setup.extra.past);
        let synced = mapping.sync().and_then(|()| file.map_or(Ok(()), File::sync_all));
        self.told(synced)?;
        self.acknowledge();
        self.is_published = was_published || model != Model::Session && self.is_published;
        Ok(())
    }

    /// The kernel says once that it could not write stores back, and forgets them: what was stored until
    /// then is vouched for by no sync or close after that, also when these succeed.
    fn told(&mut self, synced: io::Result<()>) -> io::Result<()> {
        self.in_doubt |= synced.is_err();
        synced
    }

    /// By read, while it is mapped.
    fn read(&mut self, root: &Path) -> io::Result<()> {
        match std::fs::read(self.path(root)) {
            Ok(got) => self.is_latest("mapped, by read", &got),
            e => self.unless_elsewhere(e.map(drop)),
        }
    }

    fn load(&mut self) -> io::Result<()> {
        let mapping = self.open.as_ref().expect("it was just opened");
        match mapping.load(0, BYTES as usize) {
            Ok(got) => self.is_latest("mapped, by loads", &got),
            e => self.unless_elsewhere(e.map(drop)),
        }
    }

    /// Stores that a full disk did not take may be gone; then the next sync says so.
    fn is_latest(&mut self, what: &str, got: &[u8]) -> io::Result<()> {
        let wanted = self.expected.latest();
        if let Some(mapping) = self.open.as_ref().filter(|_| got != wanted) {
            let synced = mapping.sync();
            self.told(synced)?;
        }
        content::same(what, got, &wanted);
        Ok(())
    }

    /// What was written there may be on a node that does not answer just now.
    fn unless_elsewhere(&self, done: io::Result<()>) -> io::Result<()> {
        let absent = |e: &io::Error| matches!(e.raw_os_error(), Some(libc::EIO | libc::EFAULT));
        match done {
            Err(e) if self.was_elsewhere && absent(&e) => Ok(()),
            done => done,
        }
    }

    /// Ends the mapping; what was stored is published by that.
    pub fn close(&mut self) -> io::Result<()> {
        let Some(mapping) = self.open.take() else { return Ok(()) };
        mapping.end()?;
        self.acknowledge();
        Ok(())
    }

    fn read_elsewhere(&self, elsewhere: &Path, work: &mut Work) {
        let path = self.path(elsewhere);
        match std::fs::read(&path) {
            Ok(got) => {
                content::same(&path.display().to_string(), &got, &self.expected.latest());
                work.read_elsewhere += 1;
            }
            Err(e) => work.miss(&path, &e),
        }
    }

    /// From then on this node must see it in a new mapping.
    fn write_elsewhere(&mut self, elsewhere: &Path, offset: u64, data: &[u8], work: &mut Work) {
        self.expected.write(offset, data);
        self.was_elsewhere = true;
        let done = File::options().write(true).open(self.path(elsewhere)).and_then(|file| {
            file.write_all_at(data, offset)?;
            close(file)
        });
        if done.is_err() {
            (self.in_doubt, self.in_doubt_elsewhere, self.is_published) = (true, true, false);
            return;
        }
        self.acknowledge();
        work.written_elsewhere += 1;
    }

    /// After whatever happened: what is there is the truth from here on, and published.
    pub fn settle(&mut self, what: &str, setup: &Setup) {
        drop(self.open.take());
        if std::mem::take(&mut self.in_doubt_elsewhere) {
            super::judge::publish_at(what, &self.path(&setup.elsewhere));
        }
        // A store that the kernel could not write is told to whoever asks first, also on another
        // descriptor.
        let path = self.path(&setup.root);
        let _ = File::options().write(true).open(path).and_then(|file| file.sync_all());
        self.check(what, &setup.root);
        self.in_doubt = false;
        if !self.expected.is_empty() {
            super::judge::publish_at(what, &self.path(&setup.root));
            self.acknowledge();
        }
    }

    /// In another directory, when everything is published.
    pub fn check(&mut self, what: &str, root: &Path) {
        let path = self.path(root);
        match std::fs::read(&path) {
            Ok(got) => self.expected.settle(&format!("{what}: {}", path.display()), &got),
            Err(e) if e.kind() == ErrorKind::NotFound && self.expected.size_least() == 0 => {
                self.expected = Expected::default();
            }
            Err(e) => panic!("{what}: {}: {e}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stores_are_seen_by_read_and_what_cannot_be_stored_is_an_error() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut options = File::options();
        options.read(true).write(true).create_new(true);
        let file = options.open(dir.path().join("f")).expect("create");
        file.set_len(BYTES).expect("make it long");
        let mapping = Mapping::new(file.try_clone().expect("dup")).expect("map");
        let data = content::bytes(1, 2, 3_000, 5_000);
        mapping.store(3_000, &data).expect("store");
        let mut got = vec![0; 5_000];
        file.read_exact_at(&mut got, 3_000).expect("read");
        assert_eq!(got, data);
        assert_eq!(mapping.load(3_000, 5_000).expect("load"), data);
        mapping.sync().expect("msync");
        file.set_len(10).expect("cut");
        let error = mapping.store(20_000, &data).expect_err("behind the end");
        assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
        mapping.end().expect("close");
    }

    #[test]
    fn what_a_failed_sync_told_of_is_vouched_for_by_no_close_after_it() {
        let dir = tempfile::tempdir().expect("a directory");
        let (mut mapped, mut work) = (Mapped::new(1), Work::default());
        let path = mapped.path(dir.path());
        std::fs::create_dir(path.parent().expect("a directory")).expect("mkdir");
        for fails in [true, false] {
            mapped.open(dir.path(), 1, 1).expect("open");
            let before = mapped.expected.latest();
            mapped.store(100, &[7; 50], &mut work).expect("store");
            if fails {
                let full = Err(io::Error::from_raw_os_error(libc::ENOSPC));
                mapped.told(full).expect_err("it is told");
            }
            mapped.close().expect("close");
            // The stores are gone.
            std::fs::write(&path, before).expect("write");
            let check = std::panic::AssertUnwindSafe(|| mapped.check("test", dir.path()));
            assert_eq!(std::panic::catch_unwind(check).is_ok(), fails, "after an error: {fails}");
            mapped.in_doubt = false;
        }
    }
}
