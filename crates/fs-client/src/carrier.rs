//! How bytes travel between nodes: what was asked for, what this machine has, what may go unencrypted.
//!
//! | `--transport` | `--secure`, with a token | an RDMA device | bytes go over |
//! |---|---|---|---|
//! | tcp | any | any | TCP |
//! | rdma | on | any | refused: nothing over RDMA is encrypted |
//! | rdma | loopback, off | no | refused, with the reason |
//! | rdma | loopback, off | yes | RDMA, not encrypted |
//! | auto | on, loopback | any | TCP: nothing goes unencrypted that was not said to |
//! | auto | off, or there is no token | no | TCP, and why is in the status |
//! | auto | off, or there is no token | yes | RDMA |
//!
//! Peers that have no RDMA are spoken to over TCP in every case.

use crate::config::{Carrier, MountConfig};
use crate::daemon::RunError;
use ebb_rdma::{Options, local};
use ebb_transport::{
    Fabric, PeerTransport, PoolOptions, Rdma, RdmaReport, Secure, ServeOptions, Tcp,
};
use serde::Serialize;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

/// Why not over RDMA.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Not {
    /// It was not asked for, or is not to be had: TCP does.
    Needed(String),
    /// It was asked for.
    Possible(String),
}

/// What the table says; the reasons are for the user.
fn decide(
    asked: Carrier,
    secure: Secure,
    has_token: bool,
    device: impl FnOnce() -> Result<IpAddr, String>,
) -> Result<IpAddr, Not> {
    let encrypts = has_token && secure != Secure::Off;
    match asked {
        Carrier::Tcp => Err(Not::Needed("--transport tcp".to_owned())),
        Carrier::Auto if encrypts => Err(Not::Needed(format!(
            "bytes over RDMA are not encrypted, and --secure is {secure} (--transport rdma allows it \
             unless --secure is on)"
        ))),
        Carrier::Auto => device().map_err(Not::Needed),
        Carrier::Rdma if has_token && secure == Secure::On => Err(Not::Possible(
            "bytes over RDMA are not encrypted, and --secure is on (use --transport tcp, or \
             --secure loopback)"
                .to_owned(),
        )),
        Carrier::Rdma => device().map_err(|why| {
            Not::Possible(format!("{why} (--transport auto or tcp goes without RDMA)"))
        }),
    }
}

fn plan(config: &MountConfig) -> Result<IpAddr, Not> {
    let device = || {
        if !ebb_rdma::IS_BUILT_IN {
            return Err(ebb_rdma::NOT_BUILT_IN.to_owned());
        }
        local::choose(&local::gids(), config.rdma_device.as_deref())
    };
    decide(config.transport, config.secure, config.token_file.is_some(), device)
}

/// Whether what was asked for is to be had here; the reason names the option.
pub fn check(config: &MountConfig) -> Result<(), String> {
    match plan(config) {
        Err(Not::Possible(why)) => Err(format!("--transport rdma: {why}")),
        _ => Ok(()),
    }
}

/// How bytes travel, and why not over RDMA; on a runtime.
pub(crate) fn transport(
    config: &MountConfig,
) -> Result<(Box<dyn PeerTransport>, Option<String>), RunError> {
    let tcp = tcp(config);
    let opened = plan(config).and_then(|address| {
        Fabric::open(Options::at(address)).map_err(|e| {
            let why = format!("RDMA at {address}: {e}");
            match config.transport {
                Carrier::Rdma => Not::Possible(why),
                _ => Not::Needed(why),
            }
        })
    });
    match opened {
        Ok(fabric) => {
            tracing::info!("bytes of other nodes come over RDMA, where they are not encrypted");
            Ok((Box::new(Rdma { tcp, fabric: Arc::new(fabric) }), None))
        }
        Err(Not::Needed(why)) => {
            tracing::info!(why, "bytes of other nodes come over TCP");
            Ok((Box::new(tcp), Some(why)))
        }
        Err(Not::Possible(why)) => Err(RunError::Config(format!("--transport rdma: {why}"))),
    }
}

/// Over TCP.
pub(crate) fn tcp(config: &MountConfig) -> Tcp {
    Tcp { serve: lending(config), pool: peer_deadlines(config) }
}

/// Reads from peers end by the deadline that every remote request has.
fn peer_deadlines(config: &MountConfig) -> PoolOptions {
    let usual = PoolOptions::default();
    PoolOptions {
        connect_timeout: usual.connect_timeout.min(config.request_timeout),
        read_timeout: config.request_timeout,
        secure: config.secure,
        ..usual
    }
}

/// What is lent stays until no reader can wait for it any more.
fn lending(config: &MountConfig) -> ServeOptions {
    let usual = ServeOptions::default();
    ServeOptions {
        stall_timeout: usual.stall_timeout.max(config.request_timeout.saturating_mul(2)),
        secure: config.secure,
        ..usual
    }
}

/// How bytes come from other nodes, in the status.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct Carriers {
    pub asked: Carrier,
    /// Why nothing goes over RDMA.
    pub tcp_because: Option<String>,
    pub rdma: Option<OverRdma>,
}

/// What RDMA does at this node.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct OverRdma {
    /// Where connections are taken.
    pub address: String,
    /// Why it does not work any more.
    pub failed: Option<String>,
    pub connections: u64,
    /// Requests to connect that nobody expected.
    pub refused: u64,
    /// Connections that ended with an error.
    pub broken: u64,
    /// Connections to peers that went over to RDMA, and that did not.
    pub moved: u64,
    pub fell_back: u64,
    /// Memory that the device may use, and of that what peers may write into now.
    pub registered_bytes: u64,
    pub landing_bytes: u64,
    /// Bytes that peers wrote into buffers here, and that this node wrote into theirs.
    pub placed_bytes: u64,
    pub written_bytes: u64,
    /// By address: none for a peer that is reached over RDMA, or why it is not.
    pub peers: BTreeMap<String, Option<String>>,
}

impl Carriers {
    pub(crate) fn of(
        asked: Carrier,
        tcp_because: Option<&String>,
        report: Option<RdmaReport>,
    ) -> Carriers {
        let rdma = report.map(|report| OverRdma {
            address: report.address.to_string(),
            failed: report.failed,
            connections: report.stats.connections,
            refused: report.stats.refused,
            broken: report.stats.broken,
            moved: report.moved,
            fell_back: report.fell_back,
            registered_bytes: report.stats.registered_bytes,
            landing_bytes: report.stats.landing_bytes,
            placed_bytes: report.placed_bytes,
            written_bytes: report.stats.written_bytes,
            peers: report.peers,
        });
        Carriers { asked, tcp_because: tcp_because.cloned(), rdma }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every row of the table.
    #[test]
    fn what_is_encrypted_stays_so_unless_it_is_said() {
        let there: IpAddr = [10, 0, 0, 1].into();
        let secures = [Secure::Off, Secure::Loopback, Secure::On];
        for (secure, token) in secures.iter().flat_map(|s| [(*s, false), (*s, true)]) {
            for has_device in [false, true] {
                let device = || if has_device { Ok(there) } else { Err("none".to_owned()) };
                let decided = |asked| decide(asked, secure, token, device);
                let encrypts = token && secure != Secure::Off;
                assert!(matches!(decided(Carrier::Tcp), Err(Not::Needed(_))));
                match decided(Carrier::Auto) {
                    Ok(_) => assert!(has_device && !encrypts),
                    Err(Not::Needed(_)) => assert!(!has_device || encrypts),
                    Err(Not::Possible(_)) => panic!("auto refuses nothing"),
                }
                match decided(Carrier::Rdma) {
                    Ok(_) => assert!(has_device && !(token && secure == Secure::On)),
                    Err(Not::Possible(_)) => {
                        assert!(!has_device || token && secure == Secure::On);
                    }
                    Err(Not::Needed(_)) => panic!("TCP is not what was asked for"),
                }
            }
        }
    }
}
