//! How a connection to a peer comes about, whatever it is used for.

use crate::auth::Token;
use crate::handshake::{self, HandshakeError};
use crate::rdma::Fabric;
use crate::secure::{self, Channel, Purpose, Secure};
use std::sync::Arc;

/// What all connections of an asking end have in common.
#[derive(Clone)]
pub(crate) struct Dialer {
    pub token: Option<Arc<Token>>,
    pub secure: Secure,
    pub fabric: Option<Arc<Fabric>>,
}

impl Dialer {
    /// Connects to the peer at `address` and greets it; over RDMA where both ends have it.
    pub async fn dial(&self, address: &str) -> Result<Channel, HandshakeError> {
        let channel = self.greeted(address).await?;
        let Some(fabric) = self.fabric.as_ref().filter(|fabric| fabric.may_ask(address)) else {
            return Ok(channel);
        };
        match fabric.move_over(address, &channel, self.token.as_deref()).await {
            Ok(()) => Ok(channel),
            Err(_) => self.greeted(address).await,
        }
    }

    async fn greeted(&self, address: &str) -> Result<Channel, HandshakeError> {
        let token = self.token.as_deref();
        let channel = secure::connect(address, Purpose::Peer, token, self.secure).await?;
        handshake::greet_server(&channel, token).await?;
        Ok(channel)
    }
}
