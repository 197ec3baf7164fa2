//! A node's end of the metadata stream: calls of the service by many tasks at once over one
//! connection that repairs itself. What the answers mean for a file is not decided here.
//!
//! * [`exchange`]: which requests are unanswered, what goes into the next frame, what is asked
//!   again after a broken connection. No sockets, no clock.
//! * [`session`]: the connection, the proof of the token, the welcome.
//! * [`heard`]: who answers where no service does.
//! * [`driver`]: keeps a session up, heartbeats, deadlines.
//! * [`silence`]: how long a connection may say nothing.
//! * [`lately`]: one request for many who ask for the same.
//! * [`once`]: which request is which when the daemon itself was replaced.
//! * [`facts`]: what the node's journal hears of names.
//! * [`trust`]: until when leases may be trusted, and their recall.
//! * [`client`], [`names`], [`bytes`], [`copies`], [`locks`], [`reassert`]: the calls.

mod bytes;
mod client;
mod copies;
mod coupling;
mod driver;
mod exchange;
mod facts;
mod frames;
mod heard;
mod lately;
mod locks;
mod map;
mod names;
mod once;
mod opened;
mod ops;
mod reassert;
mod session;
mod silence;
mod trust;

pub use bytes::{
    AttachRequest, Attached, Backing, Changes, FlushDone, FlushGrant, Materialized, Opened, Place,
    QueryRequest, Quietly, SeatWish, detached_from_pb,
};
pub use client::{CallError, ClientStats, Followed, MetaClient, follow, service_status};
pub use copies::{Adopted, Holding, Pairs};
pub use coupling::{Awaited, CoupledHandle, Left, OpenAnswer};
pub use driver::Event;
pub use facts::NameNotes;
pub use locks::{CancelLock, LockCall, LockHolder, LockKind, LockRequest};
pub use map::{Base, Mapped, map_from_pb};
pub use names::{
    DirEntry, DirPage, LookedUp, Made, MakeRequest, New, Renamed, SetAttr, SetAttrDone, SetTime,
    Wish,
};
pub use once::{Caller, caller, on_behalf_of, on_behalf_of_now};
pub use reassert::{Forgotten, KnownFile, Listener, Located, OwnedLocks};
pub use session::{ConnectError, ConnectOptions};
pub use trust::{OnDeleted, OnGivenUp, OnPublish, OnRecall, PublishFor, now_ms};
