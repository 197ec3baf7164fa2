//! The sending half of a session as the stream that tonic asks for frames: whenever the
//! connection can take one, it packs what has queued up since.

use crate::exchange::{Exchange, Next};
use ebb_wire::pb;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio_stream::Stream;

/// The frames of one session; ends when another one begins.
pub(crate) struct Frames {
    pub exchange: Arc<Exchange>,
    pub session: u64,
}

impl Stream for Frames {
    type Item = pb::ClientFrame;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<pb::ClientFrame>> {
        match self.exchange.next(self.session, cx.waker()) {
            Next::Frame(frame) => Poll::Ready(Some(frame)),
            Next::Wait => Poll::Pending,
            Next::End => Poll::Ready(None),
        }
    }
}
