//! Bytes on the connections of this process to the service, as the kernel counts them: what TCP carried,
//! with encryption and framing, without its own headers.
//!
//! A connection takes its counters with it when it is closed. They are read five times a second, so what was
//! carried between the last reading and the close is missing: the goodbyes, and tries that were refused.

use parking_lot::Mutex;
use rustix::net::{getpeername, sockopt};
use std::collections::HashMap;
use std::mem::{offset_of, size_of};
use std::net::SocketAddr;
use std::ops::Sub;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

const INTERVAL: Duration = Duration::from_millis(200);

/// Bytes in both directions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Carried {
    /// By the service.
    pub sent: u64,
    /// By the service.
    pub received: u64,
}

impl Sub for Carried {
    type Output = Carried;

    fn sub(self, before: Carried) -> Carried {
        // A descriptor may come to mean another socket between two calls about it.
        let sent = self.sent.saturating_sub(before.sent);
        Carried { sent, received: self.received.saturating_sub(before.received) }
    }
}

/// Counts until it is dropped.
pub struct Traffic {
    counted: Arc<Mutex<Counted>>,
    stop: Arc<AtomicBool>,
    reader: Option<JoinHandle<()>>,
}

impl Traffic {
    /// Counts what goes to and from this address.
    #[must_use]
    pub fn with(service: SocketAddr) -> Traffic {
        let counted = Counted { service, sockets: HashMap::new(), total: Carried::default() };
        let (counted, stop) = (Arc::new(Mutex::new(counted)), Arc::new(AtomicBool::new(false)));
        let (its, stopped) = (Arc::clone(&counted), Arc::clone(&stop));
        let reader = std::thread::spawn(move || {
            while !stopped.load(Relaxed) {
                its.lock().read();
                std::thread::sleep(INTERVAL);
            }
        });
        Traffic { counted, stop, reader: Some(reader) }
    }

    /// So far.
    #[must_use]
    pub fn carried(&self) -> Carried {
        let mut counted = self.counted.lock();
        counted.read();
        counted.total
    }
}

impl Drop for Traffic {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        // It has nothing to say; should it have panicked, the panic was printed.
        let _ = self.reader.take().map(JoinHandle::join);
    }
}

struct Counted {
    service: SocketAddr,
    /// What each socket that is open now had carried at the last reading.
    sockets: HashMap<u64, Carried>,
    total: Carried,
}

impl Counted {
    fn read(&mut self) {
        let mut now = HashMap::with_capacity(self.sockets.len());
        for fd in descriptors() {
            let Some((cookie, carried)) = self.of_socket(fd) else { continue };
            let before = self.sockets.get(&cookie).copied().unwrap_or_default();
            let more = carried - before;
            self.total.sent += more.sent;
            self.total.received += more.received;
            now.insert(cookie, carried);
        }
        self.sockets = now;
    }

    /// A name of the socket that no other one ever has, and its counters; none where this is no connection
    /// to the service.
    fn of_socket(&self, fd: RawFd) -> Option<(u64, Carried)> {
        // SAFETY: it was open a moment ago. Should it have been closed since, the calls fail, or speak of
        // another socket, which is told by its peer and its cookie.
        let socket = unsafe { BorrowedFd::borrow_raw(fd) };
        let peer = SocketAddr::try_from(getpeername(socket).ok()??).ok()?;
        if peer != self.service {
            return None;
        }
        Some((sockopt::socket_cookie(socket).ok()?, counters(socket)?))
    }
}

fn descriptors() -> Vec<RawFd> {
    let Ok(listing) = std::fs::read_dir("/proc/self/fd") else { return Vec::new() };
    listing.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

fn counters(socket: BorrowedFd<'_>) -> Option<Carried> {
    // SAFETY: it is numbers only, of which zeros are right.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut len = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: `info` is of `len` bytes, and the kernel writes no more.
    let failed = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast(),
            &raw mut len,
        ) != 0
    };
    // A kernel before 4.1 does not count.
    let counts = len as usize >= offset_of!(libc::tcp_info, tcpi_bytes_received) + size_of::<u64>();
    let carried = || Carried { sent: info.tcpi_bytes_received, received: info.tcpi_bytes_acked };
    (!failed && counts).then(carried)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn both_directions_are_counted_and_a_closed_connection_stays_counted() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let traffic = Traffic::with(listener.local_addr().unwrap());
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut far, _) = listener.accept().unwrap();
        near.write_all(&[0; 1000]).unwrap();
        far.read_exact(&mut [0; 1000]).unwrap();
        far.write_all(&[0; 30]).unwrap();
        near.read_exact(&mut [0; 30]).unwrap();
        let carried = traffic.carried();
        assert_eq!((carried.sent, carried.received / 1000), (30, 1));
        drop(near);
        assert_eq!(traffic.carried(), carried);
    }
}
