//! The doors of the service: TCP connections, of which strangers get little, and the side door for the
//! daemon that the service is in.
//!
//! A connection is a stranger's until the token was proven over it, by TLS, by a node or by a call. Without
//! a token: until a node has said a hello that can be one, or a call was admitted.
//! Strangers are few at a time, have a deadline, and may send no
//! more than a handshake needs, so that nobody without the job's token can fill memory or
//! descriptors. When there are too many, others stay outside, in the backlog of the socket, until some are
//! greeted or one has had nothing to say for too long (`ebb_transport::gate`): all nodes of a job come at once. Without a token only processes of this user (and root) on this machine come in. With one,
//! who comes from elsewhere proves it in the TLS handshake, before a byte of HTTP is read.

use ebb_locks::Mutex;
use ebb_transport::gate::{Gate, Room, Stranger};
use ebb_transport::neighbour;
use ebb_transport::secure::{Arrival, Purpose, Spoken, Whose};
use ebb_transport::side_door::Arrivals;
use ebb_transport::{Secure, Token};
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Sleep;
use tonic::transport::server::Connected;

/// Strangers at a time. What they cost they share: fewer of them are greeted sooner, and none waits so long that
/// it gives up and comes again.
const STRANGERS_MAX: usize = 64;

/// How long a connection may stay a stranger's.
const STRANGER_TIME: Duration = Duration::from_secs(10);

/// What a stranger may send: a greeting with its longest texts, and the proof.
const STRANGER_BYTES: usize = 64 << 10;

/// The same of this user's own processes when there is no token: an echo may come first.
const NEIGHBOUR_BYTES: usize = 2 << 20;

/// After a failed accept (out of descriptors) others get time to close theirs.
const PAUSE: Duration = Duration::from_millis(20);

/// One connection as its requests see it.
#[derive(Clone, Debug)]
pub struct Visitor {
    /// The other end.
    pub peer: SocketAddr,
    /// It is on this machine, and a process of this user's or root's.
    pub is_ours: bool,
    spoken: Arc<Spoken>,
    place: Arc<Place>,
}

#[derive(Debug)]
struct Place {
    admitted: AtomicBool,
    stranger: Mutex<Option<Stranger>>,
}

impl Visitor {
    /// From here on it is no stranger.
    pub fn admit(&self) {
        self.place.admitted.store(true, Ordering::Release);
        *self.place.stranger.lock() = None;
    }

    /// It was asked, and has nothing to say so far.
    fn is_silent(&self) {
        if let Some(stranger) = &*self.place.stranger.lock() {
            stranger.is_silent(Instant::now());
        }
    }

    fn speaks(&self) {
        if let Some(stranger) = &*self.place.stranger.lock() {
            stranger.speaks();
        }
    }

    /// It does not encrypt and has to: it is told so, and nothing else.
    #[must_use]
    pub fn must_encrypt(&self) -> bool {
        self.spoken.must_encrypt()
    }

    fn is_admitted(&self) -> bool {
        self.place.admitted.load(Ordering::Acquire)
    }
}

/// The connections that come in.
pub struct Doors {
    listener: TcpListener,
    aside: Option<Arrivals>,
    gate: Arc<Gate>,
    token: Option<Arc<Token>>,
    secure: Secure,
    pause: Option<Pin<Box<Sleep>>>,
    /// Until it is looked again whether there is room.
    look: Option<Pin<Box<Sleep>>>,
}

impl Doors {
    /// Opens them. Whoever holds the token may come from anywhere; whoever takes the side door is a
    /// process of this user's.
    pub fn open(
        listener: TcpListener,
        aside: Option<Arrivals>,
        token: Option<Arc<Token>>,
        secure: Secure,
    ) -> Doors {
        let gate = Gate::new(STRANGERS_MAX);
        Doors { listener, aside, gate, token, secure, pause: None, look: None }
    }

    fn let_in(&self, stream: TcpStream, peer: SocketAddr) -> io::Result<Connection> {
        // An answer that waits for the acknowledgement of the one before it waits 40 ms.
        stream.set_nodelay(true)?;
        let is_ours = neighbour::is_ours(peer, stream.local_addr()?);
        let whose = if is_ours { Whose::Ours } else { Whose::Anybodys };
        let arrival =
            Arrival::new(stream, whose, self.secure, self.token.clone(), Purpose::Service);
        let spoken = arrival.spoken();
        Ok(self.watched(Box::pin(arrival), spoken, peer, is_ours))
    }

    fn watched(
        &self,
        pipe: Pin<Box<dyn Pipe>>,
        spoken: Arc<Spoken>,
        peer: SocketAddr,
        is_ours: bool,
    ) -> Connection {
        let (stranger, shut_out) = self.gate.enter();
        let place =
            Place { admitted: AtomicBool::new(false), stranger: Mutex::new(Some(stranger)) };
        let patience = async move {
            tokio::select! {
                () = tokio::time::sleep(STRANGER_TIME) => {}
                () = shut_out.wait() => {}
            }
        };
        Connection {
            pipe,
            visitor: Visitor { peer, is_ours, spoken, place: Arc::new(place) },
            patience: Some(Box::pin(patience)),
            bytes_left: if self.token.is_some() { STRANGER_BYTES } else { NEIGHBOUR_BYTES },
        }
    }
}

impl tokio_stream::Stream for Doors {
    type Item = io::Result<Connection>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let doors = self.get_mut();
        loop {
            if let Some(pause) = &mut doors.pause {
                ready!(pause.as_mut().poll(cx));
                doors.pause = None;
            }
            if let Some(aside) = &mut doors.aside {
                match aside.poll_recv(cx) {
                    Poll::Ready(Some(pipe)) => {
                        let nowhere = SocketAddr::from(([127, 0, 0, 1], 0));
                        let spoken = Arc::default();
                        let connection = doors.watched(Box::pin(pipe), spoken, nowhere, true);
                        return Poll::Ready(Some(Ok(connection)));
                    }
                    Poll::Ready(None) => doors.aside = None,
                    Poll::Pending => {}
                }
            }
            if let Room::None(after) = doors.gate.room(Instant::now(), cx.waker()) {
                let look = doors.look.get_or_insert_with(|| Box::pin(tokio::time::sleep(after)));
                ready!(look.as_mut().poll(cx));
                doors.look = None;
                continue;
            }
            doors.look = None;
            let accepted = ready!(doors.listener.poll_accept(cx));
            match accepted.and_then(|(stream, peer)| doors.let_in(stream, peer)) {
                Ok(connection) => return Poll::Ready(Some(Ok(connection))),
                Err(e) => {
                    tracing::warn!(error = %e, "cannot accept a connection");
                    doors.pause = Some(Box::pin(tokio::time::sleep(PAUSE)));
                }
            }
        }
    }
}

/// What a connection is made of: a socket, or a pipe in memory.
trait Pipe: AsyncRead + AsyncWrite + Send {}

impl<P: AsyncRead + AsyncWrite + Send> Pipe for P {}

/// A connection that ends when its visitor stays a stranger for too long.
pub struct Connection {
    pipe: Pin<Box<dyn Pipe>>,
    visitor: Visitor,
    /// Ends when the stranger must go; none once it was admitted.
    patience: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    bytes_left: usize,
}

impl Connection {
    /// An error when a stranger's time is up or it has said too much.
    fn check(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        let Some(patience) = &mut self.patience else { return Ok(()) };
        if self.visitor.is_admitted() {
            self.patience = None;
        } else if self.bytes_left == 0 || patience.as_mut().poll(cx).is_ready() {
            tracing::debug!(peer = %self.visitor.peer, "a stranger is sent away");
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        Ok(())
    }
}

impl Connected for Connection {
    type ConnectInfo = Visitor;

    fn connect_info(&self) -> Visitor {
        self.visitor.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.check(cx)?;
        let before = buf.filled().len();
        let read = this.pipe.as_mut().poll_read(cx, buf);
        if this.patience.is_some() && this.visitor.spoken.is_secure() {
            this.visitor.admit();
        }
        if this.patience.is_some() {
            this.bytes_left = this.bytes_left.saturating_sub(buf.filled().len() - before);
            match read {
                Poll::Pending => this.visitor.is_silent(),
                Poll::Ready(_) => this.visitor.speaks(),
            }
        }
        read
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        // The first write may wait for the handshake of the other end.
        this.check(cx)?;
        this.pipe.as_mut().poll_write(cx, buf)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        this.check(cx)?;
        this.pipe.as_mut().poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.pipe.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().pipe.as_mut().poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().pipe.as_mut().poll_shutdown(cx)
    }
}
