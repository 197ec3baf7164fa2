//! What a supervisor waits for: the end of its daemon, a word of it, a signal, the end of its
//! patience.

use ebb_handover::Line;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Signal;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

/// Why it woke up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wake {
    Ended,
    Said,
    Signal(Signal),
    Late,
}

/// Signals that are passed on, or mean something, instead of ending the process.
pub struct Signals(OwnedFd);

impl Signals {
    /// From now on they are read, not delivered.
    pub fn block() -> io::Result<Signals> {
        // SAFETY: an empty set is initialised by sigemptyset; the calls get valid pointers.
        let fd = unsafe {
            let mut set = std::mem::zeroed::<libc::sigset_t>();
            libc::sigemptyset(&raw mut set);
            for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
                libc::sigaddset(&raw mut set, signal);
            }
            if libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) != 0 {
                return Err(io::Error::last_os_error());
            }
            libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK)
        };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: it is new and nobody else's.
        Ok(Signals(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// A child inherits what is blocked: this ends it, in the child, once it is ready for them.
    pub fn unblock() {
        // SAFETY: an empty set is initialised by sigemptyset; the calls get valid pointers.
        unsafe {
            let mut none = std::mem::zeroed::<libc::sigset_t>();
            libc::sigemptyset(&raw mut none);
            libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
        }
    }

    fn next(&self) -> Option<Signal> {
        let mut info = [0; size_of::<libc::signalfd_siginfo>()];
        let got = rustix::io::read(&self.0, &mut info).ok()?;
        let number = info.get(..4).filter(|_| got == info.len())?;
        match i32::from_ne_bytes(number.try_into().ok()?) {
            libc::SIGTERM => Some(Signal::TERM),
            libc::SIGINT => Some(Signal::INT),
            libc::SIGHUP => Some(Signal::HUP),
            _ => None,
        }
    }
}

/// Waits for the first of them.
pub fn wait(
    ended: &OwnedFd,
    line: &Line,
    signals: &Signals,
    until: Option<Instant>,
) -> io::Result<Wake> {
    let mut listens = true;
    loop {
        let left = until.map(|t| t.saturating_duration_since(Instant::now()));
        if left == Some(Duration::ZERO) {
            return Ok(Wake::Late);
        }
        let said = if listens { PollFlags::IN } else { PollFlags::empty() };
        let mut fds = [
            PollFd::new(&signals.0, PollFlags::IN),
            PollFd::from_borrowed_fd(line.as_fd(), said),
            PollFd::new(ended, PollFlags::IN),
        ];
        match poll(&mut fds, timespec(left).as_ref()) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(e) => return Err(e.into()),
        }
        let [signal, said, over] = fds.map(|f| f.revents());
        if over.contains(PollFlags::IN) {
            return Ok(Wake::Ended);
        }
        if signal.contains(PollFlags::IN)
            && let Some(signal) = signals.next()
        {
            return Ok(Wake::Signal(signal));
        }
        if said.contains(PollFlags::IN) && has_word(line) {
            return Ok(Wake::Said);
        }
        if said.intersects(PollFlags::HUP | PollFlags::IN) {
            // The other end is closed, and nothing is left to hear: its end comes next. A line
            // that hangs up cannot be polled without waking up all the time.
            listens = false;
            if said.contains(PollFlags::HUP) {
                let rest = until.map(|t| t.saturating_duration_since(Instant::now()));
                return wait_without(ended, signals, rest);
            }
        }
    }
}

/// The same when there is no line any more.
fn wait_without(ended: &OwnedFd, signals: &Signals, left: Option<Duration>) -> io::Result<Wake> {
    let mut fds = [PollFd::new(&signals.0, PollFlags::IN), PollFd::new(ended, PollFlags::IN)];
    loop {
        match poll(&mut fds, timespec(left).as_ref()) {
            Ok(0) => return Ok(Wake::Late),
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(e) => return Err(e.into()),
        }
        if fds[1].revents().contains(PollFlags::IN) {
            return Ok(Wake::Ended);
        }
        if let Some(signal) = signals.next() {
            return Ok(Wake::Signal(signal));
        }
    }
}

/// True when there is more to read than the end.
fn has_word(line: &Line) -> bool {
    let mut byte = [0_u8; 1];
    // SAFETY: a valid buffer of this length; nothing is taken from the queue.
    let got = unsafe {
        let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
        libc::recv(line.as_fd().as_raw_fd(), byte.as_mut_ptr().cast(), 1, flags)
    };
    got > 0
}

/// True when the process has ended by then.
pub fn ends_within(ended: &OwnedFd, limit: Duration) -> bool {
    let end = Instant::now() + limit;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let mut fds = [PollFd::new(ended, PollFlags::IN)];
        match poll(&mut fds, timespec(Some(left)).as_ref()) {
            Err(rustix::io::Errno::INTR) => {}
            Ok(n) => return n > 0,
            Err(_) => return false,
        }
    }
}

fn timespec(left: Option<Duration>) -> Option<Timespec> {
    left.and_then(|l| Timespec::try_from(l).ok())
}
