//! Stand-ins until the rooms below are merged.
use std::path::PathBuf;
use std::sync::Arc;
pub struct Config {
    pub backing: PathBuf,
    pub state_dir: PathBuf,
    pub token: Option<ebb_transport::auth::Token>,
    pub consistency: String,
    pub lease: std::time::Duration,
}
pub struct Server;
impl Server {
    pub fn open(_c: Config) -> Result<Arc<Server>, std::io::Error> {
        Ok(Arc::new(Server))
    }
    pub async fn serve(
        self: Arc<Self>,
        _l: tokio::net::TcpListener,
        s: impl Future<Output = ()>,
    ) -> Result<(), std::io::Error> {
        s.await;
        Ok(())
    }
    pub fn status(&self) -> ebb_wire::pb::StatusReply {
        Default::default()
    }
    pub async fn shutdown(&self) {}
}
