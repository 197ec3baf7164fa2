//! Which RDMA devices this machine has, as the kernel shows them in its file system: the libraries are not needed
//! to look.

use std::fs;
use std::net::{IpAddr, Ipv6Addr};
use std::path::{Path, PathBuf};

const CLASS: &str = "/sys/class/infiniband";

/// An address of a device's port.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Gid {
    /// The device's name.
    pub device: String,
    /// Its port.
    pub port: u32,
    /// The place in the port's table.
    pub index: u32,
    /// As what packets go: "RoCE v2" and others.
    pub kind: String,
    /// The address.
    pub address: IpAddr,
}

/// All addresses of all devices, in order.
#[must_use]
pub fn gids() -> Vec<Gid> {
    gids_below(Path::new(CLASS))
}

fn gids_below(class: &Path) -> Vec<Gid> {
    let mut found = Vec::new();
    for device in entries(class) {
        for port in entries(&device.join("ports")) {
            for gid in entries(&port.join("gids")) {
                found.extend(read_gid(&device, &port, &gid));
            }
        }
    }
    found.sort();
    found
}

fn entries(of: &Path) -> Vec<PathBuf> {
    let all = fs::read_dir(of).into_iter().flatten();
    all.flatten().map(|entry| entry.path()).collect()
}

fn name(of: &Path) -> Option<&str> {
    of.file_name()?.to_str()
}

fn read_gid(device: &Path, port: &Path, gid: &Path) -> Option<Gid> {
    let address: Ipv6Addr = fs::read_to_string(gid).ok()?.trim().parse().ok()?;
    if address.is_unspecified() {
        return None;
    }
    let index = name(gid)?;
    let kind = fs::read_to_string(port.join("gid_attrs/types").join(index)).unwrap_or_default();
    Some(Gid {
        device: name(device)?.to_owned(),
        port: name(port)?.parse().ok()?,
        index: index.parse().ok()?,
        kind: kind.trim().to_owned(),
        address: address.to_canonical(),
    })
}

/// The address at which a device is used: what `wish` says, an address, a device, or one with the
/// place of an address in its table (`DEVICE:GID`); without a wish that of the first device with RoCE v2.
pub fn choose(gids: &[Gid], wish: Option<&str>) -> Result<IpAddr, String> {
    if let Some(address) = wish.and_then(|wish| wish.parse().ok()) {
        return Ok(address);
    }
    let (device, index) = match wish.map(|wish| wish.rsplit_once(':').unwrap_or((wish, ""))) {
        None => (None, None),
        Some((device, "")) => (Some(device), None),
        Some((device, index)) => {
            let number = index.parse::<u32>();
            (Some(device), Some(number.map_err(|_| format!("'{index}' is no number of a GID"))?))
        }
    };
    let fits =
        |gid: &&Gid| device.is_none_or(|d| d == gid.device) && index.is_none_or(|i| i == gid.index);
    let usable = |gid: &&Gid| match gid.address {
        IpAddr::V4(_) => true,
        // Link-local addresses and those of InfiniBand itself are none of the IP network.
        IpAddr::V6(a) => !a.is_unicast_link_local(),
    };
    let all: Vec<&Gid> = gids.iter().filter(fits).filter(usable).collect();
    let best = all.iter().find(|gid| gid.kind == "RoCE v2" && gid.address.is_ipv4());
    let best = best.or_else(|| all.iter().find(|gid| gid.kind == "RoCE v2"));
    match (best.or(all.first().filter(|_| index.is_some())), wish) {
        (Some(gid), _) => Ok(gid.address),
        (None, _) if gids.is_empty() => Err("this machine has no RDMA device".to_owned()),
        (None, Some(wish)) => Err(format!(
            "no RDMA device has an IP address for '{wish}'; over InfiniBand say the address of its \
             IP interface. There are: {}",
            list(gids)
        )),
        (None, None) => Err(format!(
            "no RDMA device has an address of RoCE v2; say which address to use. There are: {}",
            list(gids)
        )),
    }
}

fn list(gids: &[Gid]) -> String {
    let one = |gid: &Gid| format!("{}:{} {} {}", gid.device, gid.index, gid.kind, gid.address);
    gids.iter().map(one).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(device: &str, index: u32, kind: &str, address: &str) -> Gid {
        let address = address.parse().unwrap();
        Gid { device: device.to_owned(), port: 1, index, kind: kind.to_owned(), address }
    }

    #[test]
    fn every_wish_finds_the_address_that_it_means() {
        let all = [
            gid("ib0", 0, "IB/RoCE v1", "fe80::1"),
            gid("roce0", 0, "RoCE v2", "fe80::2"),
            gid("roce0", 1, "IB/RoCE v1", "10.0.0.1"),
            gid("roce0", 2, "RoCE v2", "10.0.0.1"),
            gid("roce1", 0, "RoCE v2", "fd00::3"),
            gid("roce1", 1, "RoCE v2", "10.0.0.2"),
        ];
        let chosen = |wish| choose(&all, wish).map(|a| a.to_string());
        assert_eq!(chosen(None).as_deref(), Ok("10.0.0.1"));
        assert_eq!(chosen(Some("roce1")).as_deref(), Ok("10.0.0.2"));
        assert_eq!(chosen(Some("roce1:0")).as_deref(), Ok("fd00::3"));
        assert_eq!(chosen(Some("roce0:1")).as_deref(), Ok("10.0.0.1"));
        assert_eq!(chosen(Some("192.168.7.7")).as_deref(), Ok("192.168.7.7"));
        for wrong in ["ib0", "roce0:0", "roce0:7", "mlx5_0", "roce0:x"] {
            assert!(chosen(Some(wrong)).is_err(), "{wrong}");
        }
        assert!(choose(&[], None).unwrap_err().contains("no RDMA device"));
    }
}
