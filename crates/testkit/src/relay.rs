//! A relay on the way between two ends that should not have to trust it: it records everything that
//! passes, and changes some of it.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Towards {
    /// From who connected to who is connected to.
    Server,
    /// Back.
    Client,
}

/// What is done to bytes on their way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// One bit of the byte is another one.
    Flip,
    /// These bytes come before it.
    Insert(Vec<u8>),
    /// It does not arrive, nor do those behind it that came together with it.
    Remove,
    /// All that came together with it arrives twice.
    Repeat,
}

/// A change at a place of each connection, a number of times.
#[derive(Debug)]
struct Plan {
    towards: Towards,
    at: usize,
    change: Change,
    left: AtomicUsize,
}

#[derive(Debug, Default)]
struct Shared {
    recorded: Mutex<Vec<u8>>,
    plan: Mutex<Option<Arc<Plan>>>,
    /// Every socket, to be closed at the end.
    open: Mutex<Vec<TcpStream>>,
    ended: AtomicBool,
}

/// The relay; dropping it ends all that goes through it.
#[derive(Debug)]
pub struct Relay {
    address: SocketAddr,
    shared: Arc<Shared>,
}

impl Relay {
    /// A relay on a port of its own of loopback, to `target` (HOST:PORT).
    ///
    /// # Panics
    /// When there is no port.
    #[must_use]
    pub fn new(target: &str) -> Relay {
        Relay::at("127.0.0.1:0", target)
    }

    /// The same at an address to listen on.
    ///
    /// # Panics
    /// When it cannot be listened on.
    #[must_use]
    pub fn at(listen: &str, target: &str) -> Relay {
        let listener = TcpListener::bind(listen).expect("an address for a relay");
        let address = listener.local_addr().expect("a listener has one");
        let shared = Arc::new(Shared::default());
        let (target, on) = (target.to_owned(), shared.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if on.ended.load(Ordering::Relaxed) {
                    return;
                }
                let Ok(client) = stream else { continue };
                // Who cannot be connected to the target is hung up on.
                if let Ok(server) = TcpStream::connect(&target) {
                    join(&on, &client, &server);
                }
            }
        });
        Relay { address, shared }
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Makes `change` at byte `at` of the next `times` connections that get so far.
    ///
    /// # Panics
    /// Never.
    pub fn change(&self, towards: Towards, at: usize, change: Change, times: usize) {
        let plan = Plan { towards, at, change, left: AtomicUsize::new(times) };
        *self.shared.plan.lock().expect("no panics under it") = Some(Arc::new(plan));
    }

    /// Ends the connections of now; new ones are taken.
    ///
    /// # Panics
    /// Never.
    pub fn break_all(&self) {
        for stream in self.shared.open.lock().expect("no panics under it").drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// How many of the changes that were asked for last have not been made.
    ///
    /// # Panics
    /// Never.
    #[must_use]
    pub fn changes_left(&self) -> usize {
        let plan = self.shared.plan.lock().expect("no panics under it");
        plan.as_ref().map_or(0, |plan| plan.left.load(Ordering::SeqCst))
    }

    /// All bytes that came to it so far, both ways.
    ///
    /// # Panics
    /// Never.
    #[must_use]
    pub fn recorded(&self) -> Vec<u8> {
        self.shared.recorded.lock().expect("no panics under it").clone()
    }

    /// Whether `text` passed in the clear.
    ///
    /// # Panics
    /// Never.
    #[must_use]
    pub fn has_seen(&self, text: &[u8]) -> bool {
        let recorded = self.shared.recorded.lock().expect("no panics under it");
        recorded.windows(text.len()).any(|w| w == text)
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Relaxed);
        // So that the listener notices.
        let _ = TcpStream::connect(self.address);
        self.break_all();
    }
}

fn join(shared: &Arc<Shared>, client: &TcpStream, server: &TcpStream) {
    let copy = |stream: &TcpStream| stream.try_clone().expect("descriptors for a relay");
    for (from, to, towards) in
        [(client, server, Towards::Server), (server, client, Towards::Client)]
    {
        let _ = from.set_nodelay(true);
        shared.open.lock().expect("no panics under it").push(copy(from));
        let (from, to, shared) = (copy(from), copy(to), shared.clone());
        std::thread::spawn(move || pass(&shared, from, to, towards));
    }
}

fn pass(shared: &Shared, mut from: TcpStream, mut to: TcpStream, towards: Towards) {
    let mut buffer = vec![0; 64 << 10];
    let mut passed = 0;
    while let Ok(n @ 1..) = from.read(&mut buffer) {
        let came = &buffer[..n];
        shared.recorded.lock().expect("no panics under it").extend_from_slice(came);
        let plan = shared.plan.lock().expect("no panics under it").clone();
        let plan = plan.filter(|p| p.towards == towards && (passed..passed + n).contains(&p.at));
        let out = plan.and_then(|p| changed(&p, came, passed)).unwrap_or_else(|| came.to_vec());
        passed += n;
        if to.write_all(&out).is_err() {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}

fn changed(plan: &Plan, came: &[u8], passed: usize) -> Option<Vec<u8>> {
    let one_less = |left: usize| left.checked_sub(1);
    plan.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less).ok()?;
    let (before, after) = came.split_at(plan.at - passed);
    Some(match &plan.change {
        Change::Flip => {
            let mut out = came.to_vec();
            out[before.len()] ^= 1;
            out
        }
        Change::Insert(bytes) => [before, bytes, after].concat(),
        Change::Remove => before.to_vec(),
        Change::Repeat => [came, came].concat(),
    })
}
