//! A trial on the file system itself, before anybody trusts the tracker: writes of a nameless file
//! must be told of exactly. It also finds out which number the kernel has for this process.

use crate::tracker::{Tracker, Writers};
use crate::unavailable::Unavailable;
use crate::watched::{Watched, Why};
use rustix::fs::{CWD, Mode, OFlags};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Offsets and lengths: within a block, across blocks, behind the end, over what is there.
const WRITES: [Range<u64>; 4] = [100..200, 5_000..80_001, 1_000_000..1_000_001, 150..6_000];
const SEEN: [Range<u64>; 2] = [100..80_001, 1_000_000..1_000_001];

/// What memory and offsets of direct writes are aligned to here.
const BLOCK: usize = 4096;

pub fn run(tracker: &Tracker, dir: &Path) -> Result<(), Unavailable> {
    let io = |source| Unavailable::Io { path: dir.into(), source };
    let failed = |what: String| Unavailable::Trial { dir: dir.into(), what };
    let file = nameless(dir, OFlags::empty()).map_err(io)?;
    let watched = tracker.watch(&file, Writers::All).map_err(io)?;
    write(&file).map_err(io)?;
    expect(&watched, &SEEN).map_err(failed)?;
    tracker.set_own_process(watched.last_writer().map_err(io)?);
    drop(watched);
    let watched = tracker.watch(&file, Writers::Others).map_err(io)?;
    write(&file).map_err(io)?;
    expect(&watched, &[]).map_err(|what| failed(format!("own writes: {what}")))?;
    direct(tracker, dir).map_err(io)?.map_err(failed)?;
    mapped(tracker, dir).map_err(io)?.map_err(failed)
}

fn nameless(dir: &Path, more: OFlags) -> io::Result<File> {
    let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC | more;
    Ok(rustix::fs::openat(CWD, dir, flags, Mode::RUSR | Mode::WUSR)?.into())
}

fn write(file: &File) -> io::Result<()> {
    for range in WRITES {
        let bytes = vec![1; (range.end - range.start) as usize];
        file.write_all_at(&bytes, range.start)?;
    }
    Ok(())
}

fn expect(watched: &Watched, ranges: &[Range<u64>]) -> Result<(), String> {
    let seen = watched.drain().map_err(|e| e.to_string())?.ranges;
    if seen == ranges { Ok(()) } else { Err(format!("seen {seen:?} instead of {ranges:?}")) }
}

/// A mapping must be noticed, while it is there and when it is gone.
fn mapped(tracker: &Tracker, dir: &Path) -> io::Result<Result<(), String>> {
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
    let file = nameless(dir, OFlags::empty())?;
    file.set_len(1)?;
    for touches in [false, true] {
        let watched = tracker.watch(&file, Writers::All)?;
        let how = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses, taken away below.
        let at = unsafe { mmap(std::ptr::null_mut(), 1, how, MapFlags::SHARED, &file, 0) }?;
        let seen = if touches {
            // SAFETY: the first byte of the mapping, which the file has.
            unsafe { at.cast::<u8>().write_volatile(1) };
            None
        } else {
            Some(watched.is_lost())
        };
        // SAFETY: the mapping made above; nobody else has it.
        unsafe { munmap(at, 1) }?;
        if !seen.unwrap_or_else(|| watched.is_lost()) {
            return Ok(Err("a mapping was not noticed".into()));
        }
    }
    Ok(Ok(()))
}

/// Where direct writes are possible they must be noticed.
fn direct(tracker: &Tracker, dir: &Path) -> io::Result<Result<(), String>> {
    let Ok(file) = nameless(dir, OFlags::DIRECT) else { return Ok(Ok(())) };
    let watched = tracker.watch(&file, Writers::All)?;
    let bytes = vec![1u8; 2 * BLOCK];
    let skip = bytes.as_ptr().align_offset(BLOCK);
    if file.write_at(&bytes[skip..skip + BLOCK], 0).is_err() {
        return Ok(Ok(()));
    }
    Ok(match watched.drain() {
        Err(lost) if lost.why == Why::Direct => Ok(()),
        // The file system may have written it as any other.
        Ok(seen) if seen.ranges.first().is_some_and(|r| r.contains(&0)) => Ok(()),
        Ok(_) => Err("a direct write was not noticed".into()),
        Err(lost) => Err(lost.to_string()),
    })
}
