//! First reads of bytes that another node holds, and beside them the same bytes over a plain TCP
//! connection of this machine: a stream that is stored at the far end, and requests for single
//! records.

use crate::content::{stamp, verify};
use crate::crew::{Place, open_read, open_write, remove};
use crate::{Measure, PageBuffer, Told, WorkloadError};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// For one end of a plain connection to come.
const PATIENCE: Duration = Duration::from_secs(10);

/// Where the two ends of a plain connection are.
#[derive(Clone, Copy)]
pub struct Ends<'a> {
    /// The address of the first, which has the bytes.
    pub host: &'a str,
    /// Moves a thread to the first (0) or the second (1), for good.
    pub enter: &'a (dyn Fn(usize) -> io::Result<()> + Sync),
}

impl Ends<'static> {
    /// Both here.
    pub const HERE: Ends<'static> = Ends { host: "127.0.0.1", enter: &|_| Ok(()) };
}

/// A file that one node writes and another reads for the first time.
#[derive(Clone, Copy, Debug)]
pub struct FirstTouch {
    /// Bytes of the file.
    pub bytes: usize,
    /// Bytes of a read.
    pub size: usize,
    /// In random order?
    pub random: bool,
}

impl FirstTouch {
    fn order(&self, round: u64) -> Vec<u64> {
        let mut order: Vec<u64> = (0..(self.bytes / self.size) as u64).collect();
        if self.random {
            order.shuffle(&mut ChaCha8Rng::seed_from_u64(round));
            // A random reader does not read everything.
            order.truncate((order.len() / 4).max(1));
        }
        order
    }

    fn read_bytes(&self, round: u64) -> u64 {
        (self.order(round).len() * self.size) as u64
    }

    /// Makes the file.
    pub fn fill(&self, path: &Path, round: u64) -> Result<File, WorkloadError> {
        let file = open_write(path)?;
        let mut piece = PageBuffer::filled(0x21, 1 << 20);
        for at in (0..self.bytes).step_by(piece.len()) {
            stamp(&mut piece, at as u64, round);
            let n = piece.len().min(self.bytes - at);
            file.write_all_at(&piece[..n], at as u64)
                .told(|| format!("write {}", path.display()))?;
        }
        Ok(file)
    }

    /// Through the mounts: the first node writes, the second reads.
    pub fn run(&self, place: &Place, round: u64) -> Result<Vec<Measure>, WorkloadError> {
        let name = format!("remote-{}-{round}", self.size);
        let written = place.nodes[0].join(&name);
        place.finish(self.fill(&written, round)?, &written)?;
        let path = place.nodes[1].join(&name);
        let measure = self.read(&path, round)?;
        remove(&written)?;
        Ok(vec![measure])
    }

    /// Reads the file in its order, and checks what it reads.
    pub fn read(&self, path: &Path, round: u64) -> Result<Measure, WorkloadError> {
        let file = open_read(path)?;
        let mut buffer = PageBuffer::filled(0, self.size);
        let start = Instant::now();
        for n in self.order(round) {
            let at = n * self.size as u64;
            file.read_exact_at(&mut buffer, at).told(|| format!("read {}", path.display()))?;
            verify(&buffer, at, round, path)?;
        }
        let seconds = start.elapsed().as_secs_f64();
        Ok(Measure::bandwidth("first read", self.read_bytes(round), seconds))
    }

    /// Over plain TCP between two threads: the file is read at one end and stored at the other.
    pub fn plain_tcp(
        &self,
        dir: &Path,
        round: u64,
        ends: Ends<'_>,
    ) -> Result<Vec<Measure>, WorkloadError> {
        let (from, to) = (dir.join("tcp-from"), dir.join("tcp-to"));
        drop(self.fill(&from, round)?);
        let (tell, told) = mpsc::channel();
        let (source, target) = (&from, &to);
        let seconds = std::thread::scope(|scope| {
            let serving = scope.spawn(move || {
                (ends.enter)(0).told(|| "enter the first node".into())?;
                let listener = patient(ends.host).told(|| "listen".into())?;
                // If nobody listens any more the other end has failed, and says why.
                let _ = tell.send(listener.local_addr().told(|| "listen".into())?);
                self.serve(&listener, source)
            });
            let fetching = scope.spawn(move || {
                (ends.enter)(1).told(|| "enter the second node".into())?;
                let address = told.recv().map_err(|_| WorkloadError::Died)?;
                let start = Instant::now();
                self.fetch(TcpStream::connect(address).told(|| "connect".into())?, target, round)?;
                Ok::<f64, WorkloadError>(start.elapsed().as_secs_f64())
            });
            let fetched = fetching.join().map_err(|_| WorkloadError::Died)?;
            let served = serving.join().map_err(|_| WorkloadError::Died)?;
            // That nobody came is the lesser news.
            let seconds = fetched?;
            served.map(|()| seconds)
        })?;
        remove(&from)?;
        remove(&to)?;
        Ok(vec![Measure::bandwidth("first read", self.read_bytes(round), seconds)])
    }

    /// The end that has the bytes: sends one peer the records at the offsets that it asks for.
    pub fn serve(&self, listener: &TcpListener, from: &Path) -> Result<(), WorkloadError> {
        let (mut stream, _) = listener.accept().told(|| "accept".into())?;
        stream.set_nodelay(true).told(|| "nodelay".into())?;
        let file = open_read(from)?;
        let mut buffer = PageBuffer::filled(0, self.size);
        let mut request = [0; 8];
        while stream.read_exact(&mut request).is_ok() {
            let at = u64::from_le_bytes(request);
            file.read_exact_at(&mut buffer, at).told(|| format!("read {}", from.display()))?;
            stream.write_all(&buffer).told(|| "send".into())?;
        }
        Ok(())
    }

    /// Random records are asked for one by one; a whole file is asked for ahead, as a stream is.
    fn fetch(&self, mut stream: TcpStream, to: &Path, round: u64) -> Result<(), WorkloadError> {
        stream.set_nodelay(true).told(|| "nodelay".into())?;
        let file = open_write(to)?;
        let order = self.order(round);
        let ahead = if self.random { 1 } else { 8 };
        let mut asked = order.iter();
        let ask = |stream: &mut TcpStream, n: &u64| {
            stream.write_all(&(n * self.size as u64).to_le_bytes()).told(|| "send".into())
        };
        for n in asked.by_ref().take(ahead) {
            ask(&mut stream, n)?;
        }
        let mut buffer = PageBuffer::filled(0, self.size);
        for n in &order {
            stream.read_exact(&mut buffer).told(|| "receive".into())?;
            if let Some(next) = asked.next() {
                ask(&mut stream, next)?;
            }
            let at = n * self.size as u64;
            file.write_all_at(&buffer, at).told(|| format!("write {}", to.display()))?;
            verify(&buffer, at, round, to)?;
        }
        Ok(())
    }
}

/// A listener that waits for somebody to come, but not for ever.
fn patient(host: &str) -> io::Result<TcpListener> {
    let listener = TcpListener::bind((host, 0))?;
    // The option is the same for both, and only a stream has a way to it.
    let socket = TcpStream::from(OwnedFd::from(listener));
    socket.set_read_timeout(Some(PATIENCE))?;
    Ok(TcpListener::from(OwnedFd::from(socket)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Publish;

    #[test]
    fn an_end_that_cannot_be_reached_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let touch = FirstTouch { bytes: 1 << 20, size: 1 << 20, random: false };
        let refuse = |end| if end == 1 { Err(io::ErrorKind::NotFound.into()) } else { Ok(()) };
        let ends = Ends { host: "127.0.0.1", enter: &refuse };
        let error = touch.plain_tcp(dir.path(), 1, ends).unwrap_err().to_string();
        assert!(error.contains("second node"), "{error}");
    }

    #[test]
    fn both_ways_read_what_was_written() {
        let dir = tempfile::tempdir().unwrap();
        let nodes = vec![dir.path().to_owned(); 2];
        let place = Place { nodes, per_node: 1, publish: Publish::Close };
        for (size, random) in [(1 << 20, false), (8192, true)] {
            let touch = FirstTouch { bytes: 3 << 20, size, random };
            touch.run(&place, 1).unwrap();
            touch.plain_tcp(dir.path(), 1, Ends::HERE).unwrap();
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
