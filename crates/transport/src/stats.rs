//! Counters of both ends, for status and metrics.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

macro_rules! counters {
    ($(#[$doc:meta])* $snapshot:ident, $cells:ident { $($(#[$field_doc:meta])* $field:ident,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $snapshot { $($(#[$field_doc])* pub $field: u64,)* }

        #[derive(Debug, Default)]
        pub(crate) struct $cells { $(pub $field: AtomicU64,)* }

        impl $cells {
            pub fn snapshot(&self) -> $snapshot {
                $snapshot { $($field: self.$field.load(Relaxed),)* }
            }
        }
    };
}

counters! {
    /// What a lending end did since it started.
    ServerStats, ServerCells {
        /// Connections that are open now.
        connections,
        /// Connections that were turned away: no room, no or a wrong token, garbage.
        refused,
        /// Read requests that arrived whole.
        requests,
        /// Bytes of files that were sent with the word that they are good.
        bytes_sent,
        /// Requests for bytes that were not here, or went while they were sent.
        not_here,
        /// Requests that failed otherwise.
        errors,
    }
}

counters! {
    /// What a fetching end did since it started.
    PoolStats, PoolCells {
        /// Calls of `read`.
        reads,
        /// Bytes that were fetched.
        bytes_received,
        /// Connections that were made.
        connects,
        /// Parts of reads that were asked again because a connection broke.
        retries,
        /// Reads that ended with an error other than "not here".
        errors,
    }
}

pub(crate) fn add(cell: &AtomicU64, n: u64) {
    cell.fetch_add(n, Relaxed);
}

pub(crate) fn sub(cell: &AtomicU64, n: u64) {
    cell.fetch_sub(n, Relaxed);
}
