//! Cache files that programs can still write to when their daemon is dead: what it had passed through the
//! kernel goes on writing and mapping without asking. A daemon that takes the cache over gives such a
//! file a new body and keeps the programs from writing to the old one, or, where the file system does
//! not do that, looks whether they did.
//!
//! The first is the work of the immutable flag. ext4 looks at it in each write, and when a page is to be
//! written to, also through what was open before. Others (XFS, btrfs, tmpfs of Linux 6.18) look at it
//! when a file is opened. It is a trial that decides.
//!
//! Crash: the flag is set while the file still has its name, so that what is copied does not change. A
//! file that has the flag cannot lose its name: the flag is off for the moment of the rename, after
//! which the file is compared with its copy once more. Should a daemon end in between, whoever opens or
//! removes the file next takes the flag away ([`thaw`]).

use crate::cache::{self, CacheDir};
use crate::node::Node;
use ebb_types::{ByteRange, Ino};
use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

/// Compared and copied at a time.
const STEP: usize = 64 << 10;

/// So often what was written meanwhile is copied as well; what comes later is told.
const ROUNDS: usize = 3;

/// A file that was written to before that gets another time at its next write.
const TICK: Duration = Duration::from_millis(30);

/// What old bodies are called among what is kept aside.
const OLD: &str = "old";

/// Nobody can write to the file any more, whatever he has open or mapped; for any other use it is as before.
fn freeze(file: &File) -> io::Result<()> {
    let flags = ioctl_getflags(file)?;
    ioctl_setflags(file, flags | IFlags::IMMUTABLE)?;
    // Pages that are mapped and were written to just before are protected now as well.
    file.sync_data()
}

/// Takes that back. True when it was so.
pub(crate) fn thaw(file: &File) -> io::Result<bool> {
    let flags = ioctl_getflags(file)?;
    if !flags.contains(IFlags::IMMUTABLE) {
        return Ok(false);
    }
    ioctl_setflags(file, flags.difference(IFlags::IMMUTABLE))?;
    Ok(true)
}

/// The same by name, after something failed; true when it may be tried again.
pub(crate) fn thaw_after(e: &io::Error, path: &Path) -> bool {
    let how = || OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(path);
    e.raw_os_error() == Some(libc::EPERM) && how().is_ok_and(|file| thaw(&file).unwrap_or(false))
}

/// The same for all cache files below a directory.
pub(crate) fn thaw_all(data: &Path) -> io::Result<()> {
    for shard in std::fs::read_dir(data)? {
        for entry in std::fs::read_dir(shard?.path())? {
            thaw(&File::open(entry?.path())?)?;
        }
    }
    Ok(())
}

/// True when what is frozen here cannot be written, through descriptors and mappings of before either.
/// `file` is open for both and nobody else's.
fn freezes(file: &File) -> io::Result<bool> {
    file.write_all_at(b"x", 0)?;
    let (how, fd) = (libc::PROT_READ | libc::PROT_WRITE, file.as_raw_fd());
    // SAFETY: a new mapping at an address of the kernel's choice, of which only the kernel uses the first byte.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), 1, how, libc::MAP_SHARED, fd, 0) };
    if at == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // A store of the kernel's is an error where one of this process would end it.
    // SAFETY: the byte is in the mapping, which is taken away below.
    let stores = || unsafe { libc::getrandom(at, 1, 0) } == 1;
    let before = stores();
    let frozen = freeze(file);
    let refuses =
        frozen.is_ok() && file.write_at(b"x", 0).is_err() && file.set_len(2).is_err() && !stores();
    // SAFETY: made above, and used by nobody any more.
    unsafe { libc::munmap(at, 1) };
    thaw(file)?;
    frozen.map(|()| before && refuses)
}

/// How a file shows that it was written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seen {
    /// Nanoseconds since 1970.
    modified: u64,
    len: u64,
}

impl Seen {
    fn of(file: &File) -> io::Result<Seen> {
        let meta = file.metadata()?;
        let modified = meta.mtime().cast_unsigned().wrapping_mul(1_000_000_000);
        let modified = modified.wrapping_add(meta.mtime_nsec().cast_unsigned());
        Ok(Seen { modified, len: meta.len() })
    }

    /// Another write may leave the same.
    fn is_fresh(&self) -> bool {
        let now = UNIX_EPOCH.elapsed().map_or(0, |d| d.as_nanos() as u64);
        now.saturating_sub(self.modified) < TICK.as_nanos() as u64
    }
}

/// A body that programs of before can still write to, and which no file has any more.
#[derive(Debug)]
pub(crate) struct OldBody {
    ino: Ino,
    /// Where it is kept.
    path: PathBuf,
    /// None: nobody has it open for writing any more.
    file: Option<File>,
    /// As it was when it was copied.
    copied: Seen,
    /// When it was seen that something was written since, in seconds since 1970.
    written: Option<u64>,
    is_told: bool,
}

/// What was written to an old body.
#[derive(Clone, Debug)]
pub(crate) struct Unheard {
    pub ino: Ino,
    /// The old body.
    pub kept: PathBuf,
    /// What it is longer; all of it when it is not, since what was written over is not known.
    pub bytes: u64,
    pub since: u64,
    /// Nobody has been told.
    pub is_new: bool,
}

impl Unheard {
    /// Why it is not on the backing.
    pub(crate) fn why(&self) -> String {
        let kept = self.kept.display();
        format!(
            "lost: a program went on writing after its daemon was dead and another one was mounted; \
             see {kept}, and remove that when it is not needed"
        )
    }
}

impl OldBody {
    fn new(ino: Ino, path: PathBuf, file: File, copied: Seen) -> OldBody {
        OldBody { ino, path, file: Some(file), copied, written: None, is_told: false }
    }

    /// Looks whether it was written to. False: it was not, and nobody can any more.
    fn look(&mut self) -> bool {
        let Some(file) = &self.file else { return true };
        let alone = cache::has_no_writers(file).unwrap_or(false);
        if self.written.is_none() && !Seen::of(file).is_ok_and(|now| now == self.copied) {
            self.written = Some(UNIX_EPOCH.elapsed().map_or(0, |d| d.as_secs()));
        }
        if alone {
            self.file = None;
        }
        !alone || self.written.is_some()
    }

    fn unheard(&mut self) -> Option<Unheard> {
        let since = self.written?;
        let len = std::fs::metadata(&self.path).map_or(0, |meta| meta.len());
        let more = len.saturating_sub(self.copied.len);
        Some(Unheard {
            ino: self.ino,
            kept: self.path.clone(),
            bytes: if more > 0 { more } else { len.max(1) },
            since,
            is_new: !std::mem::replace(&mut self.is_told, true),
        })
    }
}

fn name_of(ino: Ino, copied: Seen) -> String {
    format!("{:016x}-{:016x}-{:x}.{OLD}", ino.0, copied.modified, copied.len)
}

fn parse(path: &Path) -> Option<(Ino, Seen)> {
    let name = path.file_name()?.to_str()?.strip_suffix(OLD)?.strip_suffix('.')?;
    let mut numbers = name.split('-').map(|n| u64::from_str_radix(n, 16).ok());
    let ino = Ino(numbers.next()??);
    let copied = Seen { modified: numbers.next()??, len: numbers.next()?? };
    numbers.next().is_none().then_some((ino, copied))
}

impl CacheDir {
    fn freezes(&self) -> bool {
        *self.freezes.get_or_init(|| {
            let tried = self.nameless().and_then(|file| freezes(&file));
            tried.unwrap_or_else(|e| {
                tracing::debug!(error = %e, "programs of before cannot be kept from writing");
                false
            })
        })
    }

    /// Gives the cache file of an inode a new body when somebody else can still write to it. The new
    /// one has what `held` answers for the length of the old one. True when that was so.
    ///
    /// When it returns nobody writes to the old body any more, or [`CacheDir::unheard`] tells of it.
    pub(crate) fn part_from_writers(
        &self,
        ino: Ino,
        mut held: impl FnMut(u64) -> Vec<ByteRange>,
    ) -> io::Result<bool> {
        let old = match self.read_only(ino) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
            other => other?,
        };
        // Where that cannot be asked, nothing is passed through.
        if cache::has_no_writers(&old).unwrap_or(true) {
            return Ok(false);
        }
        let path = self.path(ino);
        let new = path.with_extension("new");
        let mut frozen = self.freezes() && freeze(&old).is_ok();
        let mut seen = Seen::of(&old)?;
        let mut was_fresh = seen.is_fresh();
        let copied = (|| {
            let mut how = OpenOptions::new();
            let how = how.read(true).write(true).create(true).truncate(true).mode(0o600);
            let to = how.open(&new)?;
            copy(&old, &to, &mut held)?;
            let kept = match frozen {
                true => thaw(&old).map(|_| None)?,
                false => self.keep_old(ino, &path)?,
            };
            std::fs::rename(&new, &path)?;
            Ok((to, kept))
        })();
        let (to, kept) = match copied {
            Ok(done) => done,
            Err(e) => {
                let _ = std::fs::remove_file(&new);
                let _ = thaw(&old);
                return Err(e);
            }
        };
        frozen = frozen && freeze(&old).is_ok();
        self.sync_name(ino)?;
        for _ in 0..ROUNDS {
            if !frozen {
                // Stores through mappings show from now on.
                let _ = old.sync_data();
                if Seen::of(&old)?.is_fresh() {
                    std::thread::sleep(TICK);
                }
            }
            let now = Seen::of(&old)?;
            if now == seen && !was_fresh {
                break;
            }
            copy(&old, &to, &mut held)?;
            (seen, was_fresh) = (now, now.is_fresh());
            if frozen {
                break;
            }
        }
        tracing::warn!(%ino, refused = frozen, "a program of before could still write to this file");
        if !frozen {
            self.watch_old(ino, old, seen, kept)?;
        }
        Ok(true)
    }

    /// A second name for a file that is about to lose its own.
    fn keep_old(&self, ino: Ino, path: &Path) -> io::Result<Option<PathBuf>> {
        let aside = self.aside();
        std::fs::create_dir_all(&aside)?;
        let name = aside.join(name_of(ino, Seen { modified: 0, len: 0 }));
        let _ = std::fs::remove_file(&name);
        std::fs::hard_link(path, &name)?;
        Ok(Some(name))
    }

    fn watch_old(
        &self,
        ino: Ino,
        old: File,
        copied: Seen,
        kept: Option<PathBuf>,
    ) -> io::Result<()> {
        let path = self.aside().join(name_of(ino, copied));
        if let Some(kept) = kept {
            std::fs::rename(kept, &path)?;
        }
        self.old.lock().push(OldBody::new(ino, path, old, copied));
        Ok(())
    }

    /// Goes on looking at the old bodies that a daemon before this one had to look at.
    pub(crate) fn watch_old_again(&self) -> io::Result<()> {
        let found = match std::fs::read_dir(self.aside()) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            other => other?,
        };
        for entry in found {
            let path = entry?.path();
            let Some((ino, copied)) = parse(&path) else { continue };
            if std::fs::symlink_metadata(&path)?.nlink() > 1 {
                // It was only about to become one.
                std::fs::remove_file(&path)?;
                continue;
            }
            let file = File::open(&path)?;
            self.old.lock().push(OldBody::new(ino, path, file, copied));
        }
        Ok(())
    }

    /// What programs of before have written to bodies that no file has any more, as of now. What they left
    /// as it was goes.
    pub(crate) fn unheard(&self) -> Vec<Unheard> {
        let mut old = self.old.lock();
        old.retain_mut(|body| {
            let stays = body.look() && body.path.exists();
            if !stays {
                let _ = std::fs::remove_file(&body.path);
            }
            stays
        });
        old.iter_mut().filter_map(OldBody::unheard).collect()
    }

    /// Nobody looks any more.
    pub(crate) fn forget_old(&self) {
        let gone = std::mem::take(&mut *self.old.lock());
        for body in gone.iter().filter(|body| body.written.is_none()) {
            let _ = std::fs::remove_file(&body.path);
        }
    }
}

impl Node {
    /// The same, told when it is news: each with the file as far as that is known, else where the bytes are.
    pub(crate) fn unheard(&self) -> Vec<(String, Unheard)> {
        let named = |unheard: Unheard| {
            let file = self.file(unheard.ino).map(|file| file.label());
            (file.unwrap_or_else(|| unheard.kept.display().to_string()), unheard)
        };
        let all: Vec<_> = self.cache.unheard().into_iter().map(named).collect();
        for (path, unheard) in all.iter().filter(|(_, unheard)| unheard.is_new) {
            tracing::error!(path, kept = %unheard.kept.display(), "a program of a dead daemon goes on writing: these bytes are lost");
        }
        all
    }
}

/// Makes `to` have what `held` answers of `from`, as long as that is, on the disk.
fn copy(from: &File, to: &File, held: &mut impl FnMut(u64) -> Vec<ByteRange>) -> io::Result<()> {
    let len = from.metadata()?.len();
    if to.metadata()?.len() != len {
        to.set_len(len)?;
    }
    let (mut new, mut old) = (vec![0; STEP], vec![0; STEP]);
    for range in held(len) {
        let mut at = range.start();
        while at < range.end().min(len) {
            let n = (range.end().min(len) - at).min(STEP as u64) as usize;
            cache::read_padded(from, &mut new[..n], at)?;
            cache::read_padded(to, &mut old[..n], at)?;
            if new[..n] != old[..n] {
                to.write_all_at(&new[..n], at)?;
            }
            at += n as u64;
        }
    }
    to.sync_all()
}

#[cfg(test)]
#[path = "parting_tests.rs"]
mod tests;
