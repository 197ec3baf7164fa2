//! TCP as a [`PeerTransport`].

use crate::auth::Token;
use crate::peer::{PeerChannel, PeerServing, PeerTransport};
use crate::pool::{PeerPool, PoolOptions};
use crate::server::{PeerServer, ServeError, ServeOptions};
use crate::source::ByteSource;
use std::sync::Arc;
use tokio::net::TcpListener;

/// The transport that every machine has.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tcp {
    /// For its servers.
    pub serve: ServeOptions,
    /// For its asking ends.
    pub pool: PoolOptions,
}

impl PeerTransport for Tcp {
    fn serve(
        &self,
        listener: TcpListener,
        source: Arc<dyn ByteSource>,
        token: Option<Arc<Token>>,
    ) -> Result<Box<dyn PeerServing>, ServeError> {
        Ok(Box::new(PeerServer::serve(listener, source, token, self.serve)?))
    }

    fn channel(&self, token: Option<Arc<Token>>) -> Arc<dyn PeerChannel> {
        Arc::new(PeerPool::new(token, self.pool))
    }
}
