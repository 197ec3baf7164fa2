//! A FUSE file system with one file, whose bytes come over one plain TCP connection: as little as a
//! daemon can do that brings another node's bytes to a reader and keeps a copy. It knows that the file
//! is read in order, once, and asks nobody whether the bytes are right.

use crate::hollow::attr;
use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    KernelConfig, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyEntry, ReplyOpen,
    Request, Session,
};
use parking_lot::{Condvar, Mutex};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

const ROOT: INodeNo = INodeNo(1);
const FILE: INodeNo = INodeNo(2);

/// How the file is called.
pub const NAME: &str = "f";

/// Bytes of a piece, and so many are asked for ahead of the reader: as the plain copy does.
const PIECE: usize = 1 << 20;
const AHEAD: u64 = 8;

/// As many event loops as Ebb has by default.
const LOOPS: usize = 2;

/// A mounted one; dropping it unmounts.
#[derive(Debug)]
pub struct Fetching {
    _session: fuser::BackgroundSession,
}

impl Fetching {
    /// Mounts it: every open of its file brings the bytes of `from`, and stores them in `to`.
    pub fn mount(at: &Path, from: &Path, to: &Path) -> io::Result<Fetching> {
        let mut config = Config::default();
        config.mount_options =
            vec![MountOption::FSName("fetching".into()), MountOption::DefaultPermissions];
        config.n_threads = Some(LOOPS);
        config.clone_fd = true;
        let one = OneFile { from: from.into(), to: to.into(), stream: Mutex::default() };
        Ok(Fetching { _session: Session::new(one, at, &config)?.spawn()? })
    }
}

struct OneFile {
    from: PathBuf,
    to: PathBuf,
    stream: Mutex<Option<Arc<Stream>>>,
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
    /// The far end: sends the pieces that are asked for.
    fn serve(listener: &TcpListener, from: &File) -> io::Result<()> {
        let (mut stream, _) = listener.accept()?;
        stream.set_nodelay(true)?;
        let (mut number, mut piece) = ([0; 8], vec![0; PIECE]);
        while stream.read_exact(&mut number).is_ok() {
            from.read_exact_at(&mut piece, u64::from_le_bytes(number) * PIECE as u64)?;
            stream.write_all(&piece)?;
        }
        Ok(())
    }

    /// The near end: whoever waits for a piece has it before it is stored.
    fn fetch(&self, mut stream: TcpStream, count: u64, to: &File) -> io::Result<()> {
        stream.set_nodelay(true)?;
        let mut asked = 0;
        for number in 0..count {
            let read = self.pieces.lock().read;
            while asked < count.min(read.max(number) + AHEAD) {
                stream.write_all(&asked.to_le_bytes())?;
                asked += 1;
            }
            let mut piece = vec![0; PIECE];
            stream.read_exact(&mut piece)?;
            let piece = Arc::new(piece);
            let mut pieces = self.pieces.lock();
            pieces.here.insert(number, Arc::clone(&piece));
            drop(pieces);
            self.changed.notify_all();
            to.write_all_at(&piece, number * PIECE as u64)?;
            let mut pieces = self.pieces.lock();
            while number >= pieces.read + 2 * AHEAD {
                self.changed.wait(&mut pieces);
            }
        }
        Ok(())
    }

    fn begin(from: &Path, to: &Path) -> io::Result<Arc<Stream>> {
        let (from, to) = (File::open(from)?, File::create(to)?);
        let count = from.metadata()?.len() / PIECE as u64;
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let near = TcpStream::connect(listener.local_addr()?)?;
        thread::spawn(move || Stream::serve(&listener, &from));
        let stream = Arc::new(Stream::default());
        let fetching = Arc::clone(&stream);
        thread::spawn(move || {
            let failed = fetching.fetch(near, count, &to).is_err();
            fetching.pieces.lock().failed |= failed;
            fetching.changed.notify_all();
        });
        Ok(stream)
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

impl OneFile {
    fn attr(&self, ino: INodeNo) -> Result<FileAttr, Errno> {
        match ino {
            ROOT => Ok(attr(ino.0, FileType::Directory, 0)),
            FILE => {
                let size = std::fs::metadata(&self.from).map_err(|_| Errno::EIO)?.len();
                Ok(attr(ino.0, FileType::RegularFile, size))
            }
            _ => Err(Errno::ENOENT),
        }
    }
}

impl Filesystem for OneFile {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        ebb_fs_client::ask_kernel(config);
        Ok(())
    }

    fn lookup(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let found =
            if parent == ROOT && name == NAME { self.attr(FILE) } else { Err(Errno::ENOENT) };
        match found {
            Ok(a) => reply.entry(&Duration::ZERO, &a, Generation(0)),
            Err(e) => reply.error(e),
        }
    }

    fn getattr(&self, _req: &Request, i: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        match self.attr(i) {
            Ok(a) => reply.attr(&Duration::ZERO, &a),
            Err(e) => reply.error(e),
        }
    }

    fn open(&self, _req: &Request, _i: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        match Stream::begin(&self.from, &self.to) {
            Ok(stream) => {
                *self.stream.lock() = Some(stream);
                reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO);
            }
            Err(e) => reply.error(e.into()),
        }
    }

    fn read(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let (number, at) = (offset / PIECE as u64, offset as usize % PIECE);
        let stream = self.stream.lock().clone();
        match stream.ok_or(Errno::EIO).and_then(|s| s.take(number).map(|piece| (s, piece))) {
            Ok((stream, piece)) => {
                let end = PIECE.min(at + size as usize);
                reply.data(&piece[at..end]);
                if end == PIECE {
                    stream.is_read(number);
                }
            }
            Err(e) => reply.error(e),
        }
    }
}
