//! The generated code of `proto/ebb.proto` and the conversions to Ebb's own types.
//!
//! Everything that comes out of a conversion has been checked; nothing here does I/O.

/// Messages, client and server as generated.
#[allow(missing_docs, clippy::all, clippy::pedantic)]
pub mod pb {
    tonic::include_proto!("ebb.v1");
}

mod convert;
mod facts;
pub use convert::{attr_from_pb, attr_to_pb, range_from_pb, range_to_pb, time_from_pb, time_to_pb};
pub use facts::{changed_by, facts_from_pb, facts_to_pb};

/// True when an answer sends the asker to the node at which the file sits. Nothing was done then: as after a
/// failure, the same request can be sent once more, under the same id.
#[must_use]
pub fn sends_on(body: Option<&pb::reply::Body>) -> bool {
    matches!(body, Some(pb::reply::Body::Attached(a)) if a.seat != 0)
}

/// Version of the protocol in `Hello`.
pub const PROTOCOL: u32 = 4;

/// So many leases without a word of a node until the service gives its locks and opens up. The node
/// counts them too: it has to stop trusting its locks before.
pub const LEASES_UNTIL_GIVEN_UP: u32 = 3;

/// Largest message either side accepts: a full ownership map of a badly fragmented file.
pub const MESSAGE_BYTES_MAX: usize = 64 << 20;
