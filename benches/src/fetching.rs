//! A FUSE file system with one file, whose bytes come over one plain TCP connection: as little as a
//! daemon can do that brings another node's bytes to a reader and keeps a copy. It knows that the file
//! is read in order, once, and asks nobody whether the bytes are right.

use crate::one_file::{self, Behind};
use ebb_fuse::{Background, Errno, FileHandle, FopenFlags, Handshake, ReplyData, ReplyOpen};
use ebb_workloads::remote::FirstTouch;
use parking_lot::{Condvar, Mutex};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

/// Pieces that are asked for ahead of the reader: as the plain copy does.
const AHEAD: u64 = 8;

/// As many event loops as Ebb has by default.
const LOOPS: usize = 2;

/// A mounted one; dropping it unmounts.
#[derive(Debug)]
pub struct Fetching {
    _session: Background,
}

impl Fetching {
    /// Mounts it: every open of its file brings the bytes of `from`, as `touch` reads them, and stores
    /// them in `to`.
    pub fn mount(at: &Path, touch: FirstTouch, from: &Path, to: &Path) -> io::Result<Fetching> {
        let far = Far { touch, from: from.into(), to: to.into(), stream: Mutex::default() };
        Ok(Fetching { _session: one_file::mount(at, LOOPS, far)? })
    }
}

struct Far {
    touch: FirstTouch,
    from: PathBuf,
    to: PathBuf,
    stream: Mutex<Option<Arc<Stream>>>,
}

impl Far {
    fn begin(&self) -> io::Result<Arc<Stream>> {
        let (touch, from, to) = (self.touch, self.from.clone(), File::create(&self.to)?);
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let near = TcpStream::connect(listener.local_addr()?)?;
        thread::spawn(move || touch.serve(&listener, &from));
        let stream = Arc::new(Stream::default());
        let fetching = Arc::clone(&stream);
        thread::spawn(move || {
            let failed = fetching.fetch(near, touch, &to).is_err();
            fetching.pieces.lock().failed |= failed;
            fetching.changed.notify_all();
        });
        Ok(stream)
    }
}

/// The pieces that have come and are not read yet.
#[derive(Default)]
struct Stream {
    pieces: Mutex<Pieces>,
    changed: Condvar,
}

#[derive(Default)]
struct Pieces {
    here: BTreeMap<u64, Arc<Vec<u8>>>,
    read: u64,
    failed: bool,
}

impl Stream {
    /// The near end: whoever waits for a piece has it before it is stored.
    fn fetch(&self, mut stream: TcpStream, touch: FirstTouch, to: &File) -> io::Result<()> {
        stream.set_nodelay(true)?;
        let (count, size) = ((touch.bytes / touch.size) as u64, touch.size as u64);
        let mut asked = 0;
        for number in 0..count {
            let read = self.pieces.lock().read;
            while asked < count.min(read.max(number) + AHEAD) {
                stream.write_all(&(asked * size).to_le_bytes())?;
                asked += 1;
            }
            let mut piece = vec![0; touch.size];
            stream.read_exact(&mut piece)?;
            let piece = Arc::new(piece);
            let mut pieces = self.pieces.lock();
            pieces.here.insert(number, Arc::clone(&piece));
            drop(pieces);
            self.changed.notify_all();
            to.write_all_at(&piece, number * size)?;
            let mut pieces = self.pieces.lock();
            while number >= pieces.read + 2 * AHEAD {
                self.changed.wait(&mut pieces);
            }
        }
        Ok(())
    }

    /// The bytes of a piece from an offset in it on.
    fn take(&self, number: u64) -> Result<Arc<Vec<u8>>, Errno> {
        let mut pieces = self.pieces.lock();
        loop {
            if let Some(piece) = pieces.here.get(&number) {
                return Ok(Arc::clone(piece));
            }
            if pieces.failed {
                return Err(Errno::EIO);
            }
            self.changed.wait(&mut pieces);
        }
    }

    fn is_read(&self, number: u64) {
        let mut pieces = self.pieces.lock();
        pieces.here.remove(&number);
        pieces.read = number + 1;
        drop(pieces);
        self.changed.notify_all();
    }
}

impl Behind for Far {
    fn init(&self, _: &mut Handshake) -> io::Result<()> {
        Ok(())
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.touch.bytes as u64)
    }

    fn open(&self, reply: ReplyOpen) {
        match self.begin() {
            Ok(stream) => {
                *self.stream.lock() = Some(stream);
                reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO, None);
            }
            Err(e) => reply.error(e.into()),
        }
    }

    fn read(&self, offset: u64, size: usize, reply: ReplyData) {
        let piece = self.touch.size;
        let (number, at) = (offset / piece as u64, offset as usize % piece);
        let stream = self.stream.lock().clone();
        match stream.ok_or(Errno::EIO).and_then(|s| s.take(number).map(|bytes| (s, bytes))) {
            Ok((stream, bytes)) => {
                let end = piece.min(at + size);
                reply.data(&bytes[at..end]);
                if end == piece {
                    stream.is_read(number);
                }
            }
            Err(e) => reply.error(e),
        }
    }
}
