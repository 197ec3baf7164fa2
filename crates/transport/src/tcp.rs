//! TCP as a [`PeerTransport`].

use crate::auth::Token;
use crate::peer::{BoxFuture, PeerReader, PeerServing, PeerTransport};
use crate::pool::{PeerPool, PoolOptions};
use crate::server::{PeerServer, ServeError, ServeOptions};
use crate::source::ByteSource;
use std::io;
use std::sync::Arc;
use tokio::net::TcpListener;

/// The transport that every machine has.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tcp {
    /// For its servers.
    pub serve: ServeOptions,
    /// For its readers.
    pub pool: PoolOptions,
}

impl PeerTransport for Tcp {
    fn serve<'a>(
        &'a self,
        bind: &'a str,
        source: Arc<dyn ByteSource>,
        token: Option<Arc<Token>>,
    ) -> BoxFuture<'a, io::Result<Box<dyn PeerServing>>> {
        Box::pin(async move {
            let listener = TcpListener::bind(bind).await?;
            let server = PeerServer::serve(listener, source, token, self.serve);
            match server {
                Ok(server) => Ok(Box::new(server) as Box<dyn PeerServing>),
                Err(ServeError::Io(e)) => Err(e),
                Err(e) => Err(io::Error::new(io::ErrorKind::PermissionDenied, e)),
            }
        })
    }

    fn reader(&self, token: Option<Arc<Token>>) -> Arc<dyn PeerReader> {
        Arc::new(PeerPool::new(token, self.pool))
    }
}
