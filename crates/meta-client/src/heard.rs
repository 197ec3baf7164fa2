//! What came first over a connection to the service. Where nobody answers as a service does, it
//! tells who answers instead: tonic's own text is "transport error".

use crate::session::ConnectError;
use ebb_locks::Mutex;
use ebb_transport::begins_as_peer;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// As much as is kept: the first line of most protocols.
const FIRST_BYTES: usize = 64;

/// What a user can do about it.
pub(crate) const ADVICE: &str =
    "is it the address that `ebb meta` or the first node's `ebb mount` printed?";

/// Kinds of HTTP/2 frames with which its servers begin.
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;

/// Of one connection.
#[derive(Debug, Default)]
pub(crate) struct Heard {
    /// Something is there that takes connections.
    connected: AtomicBool,
    first: Mutex<Vec<u8>>,
    /// The other end has ended it, or it broke, before so many bytes had come.
    ended: AtomicBool,
}

impl Heard {
    /// The same connection, listened to.
    pub fn over<W>(self: &Arc<Heard>, wire: W) -> Overheard<W> {
        self.connected.store(true, Relaxed);
        Overheard { wire, heard: Some(Arc::clone(self)) }
    }

    /// Notes what came; false when that is enough.
    fn hear(&self, bytes: &[u8]) -> bool {
        let mut first = self.first.lock();
        let room = FIRST_BYTES - first.len();
        first.extend_from_slice(&bytes[..bytes.len().min(room)]);
        first.len() < FIRST_BYTES
    }

    /// Why there is no session: what was heard says more than how the connection broke.
    pub fn explain(&self, address: &str, error: ConnectError) -> ConnectError {
        let open = matches!(error, ConnectError::HungUp(_) | ConnectError::Unreachable(_));
        if !open || !self.connected.load(Relaxed) {
            return error;
        }
        let first = self.first.lock();
        match first.as_slice() {
            [] if self.ended.load(Relaxed) => hung_up(address),
            [] => ConnectError::Unreachable(format!(
                "{address}: takes the connection and says nothing: it hangs, or it is no metadata \
                 service of Ebb ({ADVICE})"
            )),
            first if is_http2(first) => error,
            first if begins_as_peer(first) => peer_port(address),
            first => ConnectError::Stranger(format!(
                "{address}: is no metadata service of Ebb: it answers {} ({ADVICE})",
                shown(first)
            )),
        }
    }
}

/// Somebody took the connection and ended it before a word.
pub(crate) fn hung_up(address: &str) -> ConnectError {
    ConnectError::HungUp(format!(
        "{address}: hangs up without a word: more nodes come at once than it can greet, or it is \
         no metadata service of Ebb ({ADVICE})"
    ))
}

/// A daemon with the service inside has both, and mostly one is the number after the other.
pub(crate) fn peer_port(address: &str) -> ConnectError {
    ConnectError::Stranger(format!(
        "{address}: is the port where a node of Ebb lends its bytes to other nodes, not the one of \
         a metadata service ({ADVICE})"
    ))
}

/// What everything that speaks gRPC begins with.
fn is_http2(first: &[u8]) -> bool {
    first.len() > 3 && first[0] == 0 && matches!(first[3], SETTINGS | GOAWAY)
}

/// The first line, or what can be shown of it: a stranger may send anything.
fn shown(first: &[u8]) -> String {
    let line = first.split(|b| matches!(b, b'\r' | b'\n')).next().unwrap_or_default();
    let is_text = !line.is_empty() && line.iter().all(|b| matches!(b, b' '..=b'~'));
    match std::str::from_utf8(line) {
        Ok(line) if is_text => format!("\"{line}\""),
        _ => "in another protocol".to_owned(),
    }
}

/// A connection whose first bytes are noted.
#[derive(Debug)]
pub(crate) struct Overheard<W> {
    wire: W,
    /// Until enough has come.
    heard: Option<Arc<Heard>>,
}

impl<W> Overheard<W> {
    /// Who hangs up on what it has not read breaks the connection, and that may be found while
    /// writing.
    fn written(&self, done: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if let (Poll::Ready(Err(_)), Some(heard)) = (&done, &self.heard) {
            heard.ended.store(true, Relaxed);
        }
        done
    }
}

impl<W: AsyncRead + Unpin> AsyncRead for Overheard<W> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let Some(heard) = &this.heard else { return Pin::new(&mut this.wire).poll_read(cx, buf) };
        let before = buf.filled().len();
        let read = ready!(Pin::new(&mut this.wire).poll_read(cx, buf));
        let came = &buf.filled()[before..];
        if read.is_err() || came.is_empty() {
            heard.ended.store(true, Relaxed);
        } else if !heard.hear(came) {
            this.heard = None;
        }
        Poll::Ready(read)
    }
}

impl<W: AsyncWrite + Unpin> AsyncWrite for Overheard<W> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let done = Pin::new(&mut self.wire).poll_write(cx, buf);
        self.written(done)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let done = Pin::new(&mut self.wire).poll_write_vectored(cx, bufs);
        self.written(done)
    }

    fn is_write_vectored(&self) -> bool {
        self.wire.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.wire).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.wire).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    /// What is said of a connection over which this came; then it ends, or not.
    async fn explained(came: &[u8], ends: bool) -> ConnectError {
        let heard = Arc::new(Heard::default());
        let (near, mut far) = tokio::io::duplex(1000);
        let mut near = heard.over(near);
        far.write_all(came).await.unwrap();
        let mut read = vec![0; came.len()];
        near.read_exact(&mut read).await.unwrap();
        assert_eq!(read, came, "nothing is taken away from it");
        if ends {
            drop(far);
            assert_eq!(near.read(&mut [0]).await.unwrap(), 0);
        }
        heard.explain("h:1", ConnectError::HungUp("h:1: transport error".into()))
    }

    #[tokio::test]
    async fn who_answers_is_told_by_its_first_bytes() {
        use ConnectError::{HungUp, Stranger, Unreachable};
        let cases: [(&[u8], bool, fn(&ConnectError) -> bool, &str); 7] = [
            (b"", true, |e| matches!(e, HungUp(_)), "without a word"),
            (b"", false, |e| matches!(e, Unreachable(_)), "says nothing"),
            (b"\0\0\x06\x04\0\0\0\0\0", true, |e| matches!(e, HungUp(_)), "transport error"),
            (b"EbP2\x01\0\x02\0", true, |e| matches!(e, Stranger(_)), "lends its bytes"),
            (b"HTTP/1.1 400 No\r\nmore", true, |e| matches!(e, Stranger(_)), "\"HTTP/1.1 400 No\""),
            (b"\x1b[2J\x07", false, |e| matches!(e, Stranger(_)), "another protocol"),
            (&[b'x'; 4 * FIRST_BYTES], true, |e| matches!(e, Stranger(_)), "xxx"),
        ];
        for (came, ends, is_right, says) in cases {
            let error = explained(came, ends).await;
            let text = error.to_string();
            assert!(is_right(&error) && text.contains(says) && text.contains("h:1"), "{error:?}");
            assert!(text.len() < 300 && error.may_pass(), "{text}");
        }
    }

    #[tokio::test]
    async fn who_breaks_the_connection_is_not_called_silent() {
        let heard = Arc::new(Heard::default());
        let (near, far) = tokio::io::duplex(1000);
        let mut near = heard.over(near);
        drop(far);
        near.write_all(b"hello").await.unwrap_err();
        let error = heard.explain("h:1", ConnectError::HungUp("h:1: broken pipe".into()));
        assert_eq!(error, hung_up("h:1"));
    }

    /// More than the first bytes is read, and is nobody's concern here.
    #[tokio::test]
    async fn only_the_beginning_is_kept() {
        let heard = Arc::new(Heard::default());
        let (near, mut far) = tokio::io::duplex(1000);
        let mut near = heard.over(near);
        for _ in 0..3 {
            far.write_all(&[7; 50]).await.unwrap();
            near.read_exact(&mut [0; 50]).await.unwrap();
        }
        assert_eq!(*heard.first.lock(), [7; FIRST_BYTES]);
    }

    #[test]
    fn what_was_refused_or_never_connected_stays_as_it_is() {
        let refused = ConnectError::BadToken("h:1: no".into());
        let heard = Arc::new(Heard::default());
        let gone = ConnectError::Unreachable("h:1: refused".into());
        assert_eq!(heard.explain("h:1", gone.clone()), gone);
        let _wire = heard.over(());
        assert_eq!(heard.explain("h:1", refused.clone()), refused);
    }
}
