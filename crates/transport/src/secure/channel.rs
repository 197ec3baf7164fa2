//! A TCP connection that may be encrypted, or may have moved to RDMA, with the calls of a `TcpStream` that the peer protocol
//! uses, and as a byte stream for gRPC. Both directions can be used at the same time.

use super::keys::{Keys, Purpose, another_role};
use super::tls::{RECORD_BYTES_MAX, SEAL_BYTES_MAX, Tls, nothing};
use super::{MUST_ENCRYPT, Secure};
use crate::auth::Token;
use bytes::{Buf, BufMut};
use ebb_locks::Mutex;
use rustls::{AlertDescription, Error};
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::OnceLock;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// Why a connection is not encrypted as it should be. Texts go on after the address of the other end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SecureError {
    /// The other end has another key.
    #[error("has another job token")]
    OtherToken,
    /// The other end has the key of a peer port, and the metadata service's was expected.
    #[error("is a node's peer port, and no metadata service")]
    PeerPort,
    /// The other end says that it does not encrypt.
    #[error(
        "does not encrypt, but this end does: --secure off is set there and not here, or it has no \
         job token"
    )]
    NotSecure,
    /// The other end says that what came was not encrypted, and should be.
    #[error("{MUST_ENCRYPT}")]
    MustEncrypt,
    /// What came is no TLS, or not what the other end sent.
    #[error("does not answer as an encrypted connection does, or is altered on the way: {0}")]
    Broken(String),
}

impl SecureError {
    fn of(e: &Error) -> SecureError {
        // Alerts may be anybody's: that the token differs is found out here, by the key.
        match e {
            e if *e == another_role() => SecureError::PeerPort,
            Error::InvalidCertificate(_) => SecureError::OtherToken,
            Error::AlertReceived(AlertDescription::InsufficientSecurity) => SecureError::NotSecure,
            e => SecureError::Broken(e.to_string()),
        }
    }

    /// What an I/O error of a channel is about, when it is about this.
    #[must_use]
    pub fn in_io(e: &io::Error) -> Option<&SecureError> {
        e.get_ref()?.downcast_ref()
    }
}

impl From<SecureError> for io::Error {
    fn from(e: SecureError) -> io::Error {
        io::Error::new(io::ErrorKind::PermissionDenied, e)
    }
}

fn failed(e: Error) -> io::Error {
    SecureError::of(&e).into()
}

/// A connection.
#[derive(Debug)]
pub struct Channel {
    tcp: TcpStream,
    /// Short calls only: never held while a socket is waited for.
    tls: Option<Mutex<Tls>>,
    /// Once the ends have met over RDMA, all goes there; what came before stays open and is silent.
    rdma: OnceLock<ebb_rdma::Stream>,
}

/// Connects to `address` (HOST:PORT), encrypted where `secure` and the address say so, and past the
/// TLS handshake.
pub async fn connect(
    address: &str,
    purpose: Purpose,
    token: Option<&Token>,
    secure: Secure,
) -> io::Result<Channel> {
    let tcp = TcpStream::connect(address).await?;
    tcp.set_nodelay(true)?;
    match token {
        Some(token) if secure.encrypts(tcp.peer_addr()?.ip(), true) => {
            Channel::client(tcp, token.keys(), purpose).await
        }
        _ => Ok(Channel::plain(tcp)),
    }
}

impl Channel {
    /// Not encrypted.
    #[must_use]
    pub fn plain(tcp: TcpStream) -> Channel {
        Channel { tcp, tls: None, rdma: OnceLock::new() }
    }

    /// The end that connects, once both have proven themselves.
    pub async fn client(tcp: TcpStream, keys: &Keys, purpose: Purpose) -> io::Result<Channel> {
        let mut channel = Channel::over(tcp, Tls::client(keys, purpose));
        poll_fn(|cx| channel.poll_greet(cx)).await?;
        Ok(channel)
    }

    /// The end that is connected to, once both have proven themselves.
    pub async fn server(tcp: TcpStream, keys: &Keys, purpose: Purpose) -> io::Result<Channel> {
        let mut channel = Channel::over(tcp, Tls::server(keys, purpose));
        poll_fn(|cx| channel.poll_greet(cx)).await?;
        Ok(channel)
    }

    pub(super) fn over(tcp: TcpStream, tls: Tls) -> Channel {
        Channel { tcp, tls: Some(Mutex::new(tls)), rdma: OnceLock::new() }
    }

    /// From here on all goes over `stream`, not encrypted. Of what came before nothing may be unread.
    pub fn move_to(&self, stream: ebb_rdma::Stream) {
        // A second one is given up: nobody asks for one.
        let _ = self.rdma.set(stream);
    }

    /// The connection over RDMA.
    #[must_use]
    pub fn rdma(&self) -> Option<&ebb_rdma::Stream> {
        self.rdma.get()
    }

    /// Nothing comes in or goes out from here on, not even into landings.
    pub fn shut(&self) {
        if let Some(rdma) = self.rdma() {
            rdma.close();
        }
    }

    /// True when what is sent is encrypted.
    #[must_use]
    pub fn is_secure(&self) -> bool {
        self.tls.is_some() && self.rdma().is_none()
    }

    /// True when what is sent may be sent over [`Channel::tcp`] as well.
    #[must_use]
    pub fn is_bare(&self) -> bool {
        self.tls.is_none() && self.rdma().is_none()
    }

    /// The socket. Only of a connection that is [bare](Channel::is_bare) may anything be sent over it.
    #[must_use]
    pub fn tcp(&self) -> &TcpStream {
        &self.tcp
    }

    /// Goes on with the handshake.
    pub(super) fn poll_greet(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Some(tls) = &self.tls else { return Poll::Ready(Ok(())) };
        loop {
            let mut tls = tls.lock();
            let greeted = tls.greet();
            let pushed = push(&self.tcp, &mut tls);
            greeted.map_err(failed)?;
            match (pushed, tls.is_open()) {
                (Ok(()), true) => return Poll::Ready(Ok(())),
                (Ok(()), false) => {}
                (Err(e), _) if would_block(&e) => {
                    drop(tls);
                    ready!(self.tcp.poll_write_ready(cx))?;
                    continue;
                }
                (Err(e), _) => return Poll::Ready(Err(e)),
            }
            match read_into(&self.tcp, &mut tls, &mut nothing()) {
                Ok(Some(_)) => {}
                Ok(None) => return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into())),
                Err(e) if would_block(&e) => {
                    drop(tls);
                    ready!(self.tcp.poll_read_ready(cx))?;
                }
                Err(e) => return Poll::Ready(Err(e)),
            }
        }
    }

    /// Reads what is there: as `TcpStream::try_read_buf`.
    pub fn try_read_buf(&self, buf: &mut impl BufMut) -> io::Result<usize> {
        if let Some(rdma) = self.rdma() {
            return rdma.try_read_buf(buf);
        }
        let Some(tls) = &self.tls else { return self.tcp.try_read_buf(buf) };
        let mut tls = tls.lock();
        if !buf.has_remaining_mut() {
            return Ok(0);
        }
        loop {
            match tls.take(buf) {
                0 if tls.has_ended() => return Ok(0),
                0 => {}
                n => return Ok(n),
            }
            match read_into(&self.tcp, &mut tls, buf) {
                Ok(Some(0)) => {}
                Ok(Some(n)) => return Ok(n),
                // Whoever cuts a connection gains nothing: all that is said has its length.
                Ok(None) => return Ok(0),
                Err(e) => {
                    tls.rest();
                    return Err(e);
                }
            }
        }
    }

    /// As `TcpStream::try_read`.
    pub fn try_read(&self, mut buf: &mut [u8]) -> io::Result<usize> {
        match self.is_bare() {
            true => self.tcp.try_read(buf),
            false => self.try_read_buf(&mut buf),
        }
    }

    /// Writes as much as is taken: as `TcpStream::try_write`. What is taken of an encrypted connection
    /// may wait for the socket: [`Channel::try_flush`].
    pub fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        if let Some(rdma) = self.rdma() {
            return rdma.try_write(bytes);
        }
        let Some(tls) = &self.tls else { return self.tcp.try_write(bytes) };
        let mut tls = tls.lock();
        if bytes.is_empty() {
            return Ok(0);
        }
        push(&self.tcp, &mut tls)?;
        let n = bytes.len().min(SEAL_BYTES_MAX);
        tls.seal(&bytes[..n]).map_err(failed)?;
        match push(&self.tcp, &mut tls) {
            Err(e) if !would_block(&e) => Err(e),
            _ => Ok(n),
        }
    }

    /// Sends what waits for the socket; "would block" while something does.
    pub fn try_flush(&self) -> io::Result<()> {
        match &self.tls {
            None => Ok(()),
            Some(tls) => push(&self.tcp, &mut tls.lock()),
        }
    }

    /// True when something waits for the socket.
    pub fn has_unsent(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| !tls.lock().unsent().is_empty())
    }

    /// Waits until there may be something to read; [`Channel::try_read`] first.
    pub async fn readable(&self) -> io::Result<()> {
        match self.rdma() {
            Some(rdma) => rdma.readable().await,
            None => self.tcp.readable().await,
        }
    }

    /// Waits until something is taken.
    pub async fn writable(&self) -> io::Result<()> {
        match self.rdma() {
            Some(rdma) => rdma.writable().await,
            None => self.tcp.writable().await,
        }
    }

    /// Bytes that the socket has at least when `plain` more bytes can be read from here.
    pub fn low_water(&self, plain: usize) -> usize {
        // Of a record that comes in parts the last one may be all that is missing.
        let Some(tls) = &self.tls else { return plain };
        plain.saturating_sub(tls.lock().undecrypted() + RECORD_BYTES_MAX).max(1)
    }

    /// Reads something, waiting for it; 0 at the end.
    pub async fn read_buf(&self, buf: &mut impl BufMut) -> io::Result<usize> {
        loop {
            match self.try_read_buf(buf) {
                Err(e) if would_block(&e) => self.readable().await?,
                read => return read,
            }
        }
    }

    /// Fills `buf`, waiting for it.
    pub async fn read_exact(&self, buf: &mut [u8]) -> io::Result<()> {
        let mut rest = buf;
        while !rest.is_empty() {
            if self.read_buf(&mut rest).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(())
    }

    /// Writes all of `bytes`, waiting for the socket.
    pub async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match self.try_write(bytes) {
                Ok(n) => bytes = &bytes[n..],
                Err(e) if would_block(&e) => self.writable().await?,
                Err(e) => return Err(e),
            }
        }
        self.flush().await
    }

    /// Sends what waits for the socket.
    pub async fn flush(&self) -> io::Result<()> {
        loop {
            match self.try_flush() {
                Err(e) if would_block(&e) => self.writable().await?,
                done => return done,
            }
        }
    }
}

fn would_block(e: &io::Error) -> bool {
    e.kind() == io::ErrorKind::WouldBlock
}

/// Sends what is encrypted.
fn push(tcp: &TcpStream, tls: &mut Tls) -> io::Result<()> {
    while !tls.unsent().is_empty() {
        let n = tcp.try_write(tls.unsent())?;
        tls.was_sent(n);
    }
    Ok(())
}

/// Receives and decrypts: how many bytes went into `buf`; none at the end of the connection.
fn read_into(tcp: &TcpStream, tls: &mut Tls, buf: &mut impl BufMut) -> io::Result<Option<usize>> {
    let n = match tcp.try_read(tls.space())? {
        0 => return Ok(None),
        n => n,
    };
    let given = tls.received(n, buf);
    // An alert, or the answer to a change of keys: what the socket does not take goes with the next.
    match push(tcp, tls) {
        Err(e) if !would_block(&e) && given.is_ok() => return Err(e),
        _ => {}
    }
    given.map(Some).map_err(failed)
}

impl AsyncRead for Channel {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            match self.try_read_buf(buf) {
                Err(e) if would_block(&e) => ready!(self.tcp.poll_read_ready(cx))?,
                read => return Poll::Ready(read.map(drop)),
            }
        }
    }
}

impl AsyncWrite for Channel {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        loop {
            match self.try_write(buf) {
                Err(e) if would_block(&e) => ready!(self.tcp.poll_write_ready(cx))?,
                wrote => return Poll::Ready(wrote),
            }
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if this.tls.is_none() {
            return Pin::new(&mut this.tcp).poll_write_vectored(cx, bufs);
        }
        // One record of many small pieces.
        let mut together =
            Vec::with_capacity(SEAL_BYTES_MAX.min(bufs.iter().map(|b| b.len()).sum()));
        for piece in bufs {
            let mut piece: &[u8] = piece;
            let room = SEAL_BYTES_MAX - together.len();
            together.put((&mut piece).take(room));
        }
        Pin::new(this).poll_write(cx, &together)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            match self.try_flush() {
                Err(e) if would_block(&e) => ready!(self.tcp.poll_write_ready(cx))?,
                done => return Poll::Ready(done),
            }
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Some(tls) = &self.tls {
            tls.lock().close();
            ready!(self.as_mut().poll_flush(cx))?;
        }
        Pin::new(&mut self.tcp).poll_shutdown(cx)
    }
}
