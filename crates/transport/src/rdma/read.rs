//! The asking end of a read with a landing.

use super::Fabric;
use crate::link::{Link, Outcome, Target};
use crate::peer::ReadError;
use crate::pool::{Flight, Peer, PeerPool, error_of};
use crate::source::Subject;
use crate::split::Part;
use crate::stats::add;
use bytes::BytesMut;
use ebb_rdma::Landing;
use std::sync::Arc;

/// Below it, registering a buffer costs more than copying the bytes out of the stream.
const PLACE_BYTES_MIN: usize = 32 << 10;

/// How an attempt ended.
pub(crate) enum Attempt {
    /// With bytes, or with the owner's word.
    Done(Result<BytesMut, ReadError>),
    /// It was not possible, or a connection broke; here is a buffer for the usual way.
    NotSo(BytesMut),
}

impl PeerPool {
    /// Has the owner write the bytes of all parts into `buffer`, if the peer is reached over RDMA.
    pub(crate) async fn fly_placed(
        &self,
        fabric: &Fabric,
        peer: &Peer,
        subject: Subject,
        parts: &[Part],
        buffer: BytesMut,
        flights: &mut Vec<Flight>,
    ) -> Attempt {
        let total: usize = parts.iter().map(|part| part.len).sum();
        if total < PLACE_BYTES_MIN {
            return Attempt::NotSo(buffer);
        }
        match self.link(peer).await {
            Ok(link) if link.is_rdma() => {}
            Ok(_) => return Attempt::NotSo(buffer),
            Err(e) => return Attempt::Done(Err(e)),
        }
        let Ok(landing) = land(fabric, buffer, total) else {
            return Attempt::NotSo(BytesMut::with_capacity(total));
        };
        let landing = Arc::new(landing);
        let lost = || {
            add(&self.cells.retries, 1);
            Attempt::NotSo(BytesMut::with_capacity(total))
        };
        let mut at = 0;
        for part in parts {
            match self.link(peer).await.and_then(|link| ask(link, subject, part, &landing, at)) {
                Ok(Some(flight)) => flights.push(flight),
                Ok(None) => return lost(),
                Err(e) => return Attempt::Done(Err(e)),
            }
            at += part.len;
        }
        for flight in flights.iter_mut() {
            match (&mut flight.outcome).await {
                Ok(Outcome::Placed) => {}
                Ok(Outcome::Answered(status)) => return Attempt::Done(Err(error_of(status))),
                _ => return lost(),
            }
        }
        // Everybody else who had it has answered.
        match Arc::into_inner(landing) {
            Some(landing) => {
                fabric.count_placed(total as u64);
                Attempt::Done(Ok(landing.take()))
            }
            None => lost(),
        }
    }
}

fn land(fabric: &Fabric, mut buffer: BytesMut, total: usize) -> std::io::Result<Landing> {
    // What the buffer had before costs nothing; the rest must be there to be written into.
    buffer.resize(total, 0);
    fabric.land(buffer).inspect_err(|why| tracing::debug!(%why, "bytes come without a landing"))
}

/// Asks for a part; none when the connection is of no use for it.
fn ask(
    link: Arc<Link>,
    subject: Subject,
    part: &Part,
    landing: &Arc<Landing>,
    at: usize,
) -> Result<Option<Flight>, ReadError> {
    if !link.is_rdma() {
        return Ok(None);
    }
    let arrived_before = link.arrived();
    let target = Target::Landing(Arc::clone(landing), at);
    let asked = link.submit(subject, &part.ranges, part.len, target).ok();
    Ok(asked.map(|outcome| Flight { part: part.clone(), link, arrived_before, outcome }))
}
