//! Ends a mount: by its daemon while that lives, by the kernel alone when it is dead. It always
//! comes to an end, and says what may not be on the backing.

use crate::client::{self, Behind};
use crate::exit::{Code, Context, Failure};
use crate::left::Left;
use crate::mounts;
use crate::progress::Progress;
use ebb_fs_client::control::Request;
use ebb_fs_client::registry::{self, Record};
use std::path::Path;
use std::time::Duration;

/// What the daemon needs on top of the time for draining: leaving the job, unmounting.
const GRACE: Duration = Duration::from_secs(20);
/// A daemon that is done ends within this time, unless it serves other nodes.
const END_LIMIT: Duration = Duration::from_secs(3);
/// How long the kernel may take to let go of the mount after the daemon is done.
const GONE_LIMIT: Duration = Duration::from_secs(10);

/// Ends the mount at a resolved mount point.
pub fn unmount(point: &Path, drain: bool, timeout: Duration) -> Result<(), Failure> {
    match client::behind(point)? {
        Behind::Daemon(record) => by_daemon(&record, drain, timeout),
        Behind::Dead(record) => bury(&record),
        Behind::Unknown => {
            let shown = point.display().to_string();
            if mounts::answers(point, GRACE) {
                return client::daemon_of(point).map(drop);
            }
            mounts::lazy_unmount(point).or_failed(&shown)?;
            Err(Failure::new(
                Code::Incomplete,
                format!(
                    "{shown}: its daemon is dead and is not in this user's registry; the mount is \
                     taken away, but data may remain in its cache directory"
                ),
            ))
        }
        Behind::Nothing => client::daemon_of(point).map(drop),
    }
}

fn by_daemon(record: &Record, drain: bool, timeout: Duration) -> Result<(), Failure> {
    let request = Request::Unmount { drain, timeout_ms: Some(millis(timeout)) };
    let progress = Progress::new();
    let answer = client::ask(record, &request, Some(timeout.saturating_add(GRACE)), |event| {
        progress.update(&event);
    });
    let what = format!("umount {}", record.mountpoint.display());
    let outcome = match answer {
        Ok(outcome) => progress.finish(&what, outcome),
        Err(_) if !record.is_alive() => {
            eprintln!("{what}: the daemon died meanwhile");
            return match client::behind(&record.mountpoint)? {
                Behind::Daemon(next) => by_daemon(&next, drain, timeout),
                _ => bury(record),
            };
        }
        Err(e) => Err(Failure { status: e.status, text: format!("{what}: {e}") }),
    };
    match outcome {
        Ok(()) => let_go(record),
        Err(mut failure) => {
            if matches!(mounts::at(&record.mountpoint), Ok(None)) {
                // What comes next may want the cache.
                mounts::poll(END_LIMIT, || !record.is_alive());
            }
            failure.text.push_str(&afterwards(record));
            Err(failure)
        }
    }
}

/// What became of the mount after a drain that did not succeed.
fn afterwards(record: &Record) -> String {
    let point = record.mountpoint.display();
    let cache = record.cache.display();
    if matches!(mounts::at(&record.mountpoint), Ok(Some(_))) {
        return format!(
            "\n{point} stays mounted and keeps what it has; try again, or `ebb umount --no-drain {point}` \
             leaves the rest in {cache}"
        );
    }
    format!("\n{point} is unmounted; the rest is in {cache}")
}

/// After a drain that succeeded: the mount goes, and the daemon unless others need it.
fn let_go(record: &Record) -> Result<(), Failure> {
    let point = &record.mountpoint;
    if !mounts::wait_gone(point, GONE_LIMIT) {
        mounts::lazy_unmount(point).or_failed(point.display())?;
    }
    if !mounts::poll(END_LIMIT, || !record.is_alive()) {
        eprintln!(
            "the metadata service of this job stays in process {} until the other nodes have left",
            record.pid
        );
    }
    Ok(())
}

/// Clears away what a daemon left that is no more, and says what its cache still holds.
fn bury(record: &Record) -> Result<(), Failure> {
    let point = &record.mountpoint;
    if matches!(mounts::at(point), Ok(Some(m)) if m.is_ebb()) {
        mounts::lazy_unmount(point).or_failed(point.display())?;
    }
    let _ = std::fs::remove_file(&record.socket);
    registry::leave(point).or_failed("registry of mounts")?;
    let cache = record.cache.display();
    let dead = format!("{}: its daemon (process {}) was dead", point.display(), record.pid);
    let left = Left::of(&record.cache)?;
    if left.is_empty() {
        eprintln!(
            "{dead}; the mount is taken away and {cache} holds nothing that the backing lacks"
        );
        return Ok(());
    }
    let backing = left.backing();
    Err(Failure::new(
        Code::Incomplete,
        format!(
            "{dead}; the mount is taken away.\nIn {cache} and not on the backing:\n{}\n\
             `ebb mount ... --cache {cache} {backing} {}` goes on with it, \
             `ebb recover {cache} --backing {backing}` drains it",
            left.listing(),
            point.display()
        ),
    ))
}

/// For the wire, which counts in milliseconds.
#[must_use]
pub fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
