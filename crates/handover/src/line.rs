//! The line between a daemon and its supervisor: a socket pair whose messages are a few bytes and
//! perhaps a descriptor. Both ends are of this program, but not of one version: a word that is not
//! known is skipped.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// Longest message.
const BYTES_MAX: usize = 1024;
/// Whoever does not listen for so long is stuck or gone.
const HEARD_WITHIN: Duration = Duration::from_secs(10);

/// One message. With the letters they begin with.
#[derive(Debug)]
pub enum Word {
    /// `A`, to the daemon: the memory that outlives it.
    Area(OwnedFd),
    /// `D`, both ways: a device of the mount. They come in one order.
    Device(OwnedFd),
    /// `K`, both ways: a descriptor to keep under this number.
    Keep(u64, OwnedFd),
    /// `F`, to the supervisor: it need not be kept any more.
    Forget(u64),
    /// `S`, to the daemon: everything was handed over; how often one was started before, the
    /// supervisor's process, and why.
    Start(u32, u32, String),
    /// `U`, to the supervisor: the mount is served.
    Up,
    /// `L`, to the supervisor: the mount is gone, or will not be: do not start another one.
    Leaving,
    /// `R`, to the supervisor: this process is about to end for the reason given.
    Ending(String),
}

/// One end.
#[derive(Debug)]
pub struct Line(OwnedFd);

impl Line {
    /// Both ends.
    pub fn pair() -> io::Result<(Line, Line)> {
        let flags = SocketFlags::CLOEXEC;
        let (a, b) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        Ok((Line(a), Line(b)))
    }

    /// An end that was inherited.
    #[must_use]
    pub fn inherited(fd: OwnedFd) -> Line {
        Line(fd)
    }

    /// Says something. Waits a while for an ear: a queue takes few words, and a process that has
    /// just been started does not listen yet.
    pub fn say(&self, word: &Word) -> io::Result<()> {
        let (bytes, fd): (Vec<u8>, Option<BorrowedFd<'_>>) = match word {
            Word::Area(fd) => (b"A".to_vec(), Some(fd.as_fd())),
            Word::Device(fd) => (b"D".to_vec(), Some(fd.as_fd())),
            Word::Keep(id, fd) => (number(b'K', *id), Some(fd.as_fd())),
            Word::Forget(id) => (number(b'F', *id), None),
            Word::Start(restarts, supervisor, why) => {
                let mut bytes = b"S".to_vec();
                bytes.extend_from_slice(&restarts.to_le_bytes());
                bytes.extend_from_slice(&supervisor.to_le_bytes());
                bytes.extend_from_slice(text(why));
                (bytes, None)
            }
            Word::Up => (b"U".to_vec(), None),
            Word::Leaving => (b"L".to_vec(), None),
            Word::Ending(why) => ([b"R", text(why)].concat(), None),
        };
        self.send(&bytes, fd)
    }

    /// The same for a descriptor that stays with the speaker.
    pub fn lend_device(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.send(b"D", Some(fd))
    }

    fn send(&self, bytes: &[u8], fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = [fd.unwrap_or(self.0.as_fd())];
        if fd.is_some() {
            control.push(SendAncillaryMessage::ScmRights(&fds));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let end = Instant::now() + HEARD_WITHIN;
        loop {
            match sendmsg(&self.0, &[IoSlice::new(bytes)], &mut control, flags) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if Instant::now() < end => self.await_room(end)?,
                Err(e) => return Err(e.into()),
            }
        }
    }

    fn await_room(&self, end: Instant) -> io::Result<()> {
        let left = Timespec::try_from(end.saturating_duration_since(Instant::now())).ok();
        match poll(&mut [PollFd::new(&self.0, PollFlags::OUT)], left.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    /// What was said next; none when the other end is gone. Something that is not understood is
    /// skipped. With `wait` false: an error of kind `WouldBlock` when there is nothing.
    pub fn hear(&self, wait: bool) -> io::Result<Option<Word>> {
        loop {
            let mut bytes = [0; BYTES_MAX];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut flags = RecvFlags::CMSG_CLOEXEC;
            flags.set(RecvFlags::DONTWAIT, !wait);
            let got =
                match recvmsg(&self.0, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags) {
                    Ok(got) => got.bytes,
                    Err(Errno::INTR) => continue,
                    Err(Errno::CONNRESET) => return Ok(None),
                    Err(e) => return Err(e.into()),
                };
            if got == 0 {
                return Ok(None);
            }
            let mut fd = None;
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(fds) = message {
                    fd = fds.last().or(fd);
                }
            }
            if let Some(word) = understood(&bytes[..got], fd) {
                return Ok(Some(word));
            }
        }
    }
}

impl AsFd for Line {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn number(letter: u8, id: u64) -> Vec<u8> {
    let mut bytes = vec![letter];
    bytes.extend_from_slice(&id.to_le_bytes());
    bytes
}

fn text(why: &str) -> &[u8] {
    &why.as_bytes()[..why.len().min(BYTES_MAX / 2)]
}

fn understood(bytes: &[u8], fd: Option<OwnedFd>) -> Option<Word> {
    let id = || Some(u64::from_le_bytes(bytes.get(1..9)?.try_into().ok()?));
    let short = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    let rest =
        |at: usize| String::from_utf8_lossy(bytes.get(at..).unwrap_or_default()).into_owned();
    Some(match (*bytes.first()?, fd) {
        (b'A', Some(fd)) => Word::Area(fd),
        (b'D', Some(fd)) => Word::Device(fd),
        (b'K', Some(fd)) => Word::Keep(id()?, fd),
        (b'F', _) => Word::Forget(id()?),
        (b'S', _) => Word::Start(short(1)?, short(5)?, rest(9)),
        (b'U', _) => Word::Up,
        (b'L', _) => Word::Leaving,
        (b'R', _) => Word::Ending(rest(1)),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Seek, Write};

    #[test]
    fn words_and_descriptors_arrive() {
        let (a, b) = Line::pair().unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"kept").unwrap();
        a.say(&Word::Keep(7, file.try_clone().unwrap().into())).unwrap();
        a.send(b"?what", None).unwrap();
        a.say(&Word::Start(3, 99, "killed by signal 9".into())).unwrap();
        a.lend_device(file.as_fd()).unwrap();
        let Some(Word::Keep(7, fd)) = b.hear(true).unwrap() else { panic!("another word") };
        let mut got = std::fs::File::from(fd);
        got.rewind().unwrap();
        let mut text = String::new();
        got.read_to_string(&mut text).unwrap();
        assert_eq!(text, "kept");
        let word = b.hear(true).unwrap();
        assert!(matches!(word, Some(Word::Start(3, 99, why)) if why == "killed by signal 9"));
        assert!(matches!(b.hear(true).unwrap(), Some(Word::Device(_))));
        assert_eq!(b.hear(false).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(a);
        assert!(b.hear(true).unwrap().is_none());
        assert!(b.say(&Word::Up).is_err());
    }
}
