//! Stand-ins until the rooms below are merged.
use ebb_fs_client::config::MountConfig;
use std::path::PathBuf;
use std::sync::Arc;
pub struct ModelTable;
impl ModelTable {
    pub fn builtin() -> Self {
        ModelTable
    }
    pub fn with_user(self, _t: &str) -> Result<Self, std::io::Error> {
        Ok(self)
    }
    pub fn get(&self, n: &str) -> Option<()> {
        self.names().contains(&n).then_some(())
    }
    pub fn names(&self) -> Vec<&str> {
        vec!["commit", "mpiio", "posix", "session"]
    }
}
pub struct Ready {
    pub node: String,
    pub meta: String,
    pub mountpoint: PathBuf,
}
#[derive(Debug)]
pub struct RunError;
impl std::fmt::Display for RunError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("x")
    }
}
impl RunError {
    pub fn exit_code(&self) -> i32 {
        1
    }
}
pub fn run(
    _c: MountConfig,
    _m: String,
    _f: Box<dyn FnOnce(&Ready) + Send>,
) -> Result<(), RunError> {
    Err(RunError)
}
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
