//! A connection that came in. Its first byte tells whether it is encrypted, so that one port serves
//! both: what comes over loopback, and what comes from other machines.

use super::channel::Channel;
use super::keys::Purpose;
use super::tls::Tls;
use super::{Answer, Secure, Whose};
use crate::auth::Token;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// The first byte of a TLS connection: a record of the handshake. None of our protocols begins so.
const TLS_FIRST: u8 = 22;

/// A TLS alert: fatal, "insufficient security". All that a server without keys can say.
const NO_TLS_HERE: [u8; 7] = [21, 3, 3, 0, 2, 2, 71];

/// What is known of how a connection is spoken, for those who answer its requests.
#[derive(Debug, Default)]
pub struct Spoken {
    must_encrypt: AtomicBool,
    secure: AtomicBool,
}

impl Spoken {
    /// It is not encrypted, and should be: nothing may be answered but that.
    #[must_use]
    pub fn must_encrypt(&self) -> bool {
        self.must_encrypt.load(Ordering::Acquire)
    }

    /// Both ends hold the token, and what is said is encrypted.
    #[must_use]
    pub fn is_secure(&self) -> bool {
        self.secure.load(Ordering::Acquire)
    }
}

/// A byte stream that finds out by itself, when it is first used, how it is spoken.
#[derive(Debug)]
pub struct Arrival {
    state: State,
    from: Whose,
    secure: Secure,
    token: Option<Arc<Token>>,
    purpose: Purpose,
    spoken: Arc<Spoken>,
}

#[derive(Debug)]
enum State {
    /// Nothing has come.
    Silent(TcpStream),
    /// The TLS handshake is on its way.
    Greeting(Channel),
    Open(Channel),
    /// It failed.
    Failed,
}

impl Arrival {
    /// A connection from `from`, before anything was read.
    #[must_use]
    pub fn new(
        tcp: TcpStream,
        from: Whose,
        secure: Secure,
        token: Option<Arc<Token>>,
        purpose: Purpose,
    ) -> Arrival {
        let spoken = Arc::default();
        Arrival { state: State::Silent(tcp), from, secure, token, purpose, spoken }
    }

    /// What will be known of it.
    #[must_use]
    pub fn spoken(&self) -> Arc<Spoken> {
        self.spoken.clone()
    }

    /// Waits until it is known how it is spoken, and past the TLS handshake if it is encrypted.
    pub async fn open(mut self) -> io::Result<Channel> {
        poll_fn(|cx| self.poll_open(cx).map_ok(drop)).await?;
        match self.state {
            State::Open(channel) => Ok(channel),
            _ => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    fn poll_open(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<&mut Channel>> {
        while !matches!(self.state, State::Open(_)) {
            let opened = match &mut self.state {
                State::Silent(tcp) => ready!(poll_first(tcp, cx)).map(Some),
                State::Greeting(channel) => ready!(channel.poll_greet(cx)).map(|()| None),
                State::Open(_) | State::Failed => Err(io::ErrorKind::NotConnected.into()),
            };
            let before = std::mem::replace(&mut self.state, State::Failed);
            self.state = match (before, opened?) {
                (State::Silent(tcp), Some(first)) => self.begin(tcp, first == TLS_FIRST)?,
                (State::Greeting(channel), None) => {
                    self.spoken.secure.store(true, Ordering::Release);
                    State::Open(channel)
                }
                _ => State::Failed,
            };
        }
        match &mut self.state {
            State::Open(channel) => Poll::Ready(Ok(channel)),
            _ => Poll::Ready(Err(io::ErrorKind::NotConnected.into())),
        }
    }

    fn begin(&self, tcp: TcpStream, begins_as_tls: bool) -> io::Result<State> {
        match (self.secure.answers(self.from, begins_as_tls, self.token.is_some()), &self.token) {
            (Answer::Encrypt, Some(token)) => {
                Ok(State::Greeting(Channel::over(tcp, Tls::server(token.keys(), self.purpose))))
            }
            (Answer::CannotEncrypt, _) | (Answer::Encrypt, None) => {
                // What was not read when a socket is closed takes the answer away with it.
                let _ = tcp.try_read(&mut [0; 4096]);
                // Whether the other end hears it is its own concern.
                let _ = tcp.try_write(&NO_TLS_HERE);
                Err(io::Error::other("a connection that is encrypted, which this end does not do"))
            }
            (Answer::MustEncrypt, _) => {
                self.spoken.must_encrypt.store(true, Ordering::Release);
                Ok(State::Open(Channel::plain(tcp)))
            }
            (Answer::Plain, _) => Ok(State::Open(Channel::plain(tcp))),
        }
    }
}

/// The first byte, which stays to be read.
fn poll_first(tcp: &TcpStream, cx: &mut Context<'_>) -> Poll<io::Result<u8>> {
    let mut first = [0];
    match ready!(tcp.poll_peek(cx, &mut ReadBuf::new(&mut first)))? {
        0 => Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into())),
        _ => Poll::Ready(Ok(first[0])),
    }
}

impl AsyncRead for Arrival {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let channel = ready!(self.get_mut().poll_open(cx))?;
        Pin::new(channel).poll_read(cx, buf)
    }
}

impl AsyncWrite for Arrival {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let channel = ready!(self.get_mut().poll_open(cx))?;
        Pin::new(channel).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let channel = ready!(self.get_mut().poll_open(cx))?;
        Pin::new(channel).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().state {
            // Nothing can be waiting.
            State::Silent(_) | State::Greeting(_) => Poll::Ready(Ok(())),
            State::Open(channel) => Pin::new(channel).poll_flush(cx),
            State::Failed => Poll::Ready(Err(io::ErrorKind::NotConnected.into())),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().state {
            State::Silent(tcp) => Pin::new(tcp).poll_shutdown(cx),
            State::Greeting(channel) | State::Open(channel) => Pin::new(channel).poll_shutdown(cx),
            State::Failed => Poll::Ready(Ok(())),
        }
    }
}
