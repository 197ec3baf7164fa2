//! Whose process is at the other end of a connection over loopback? Without a job token only
//! this machine is served, and of its users only ours (and root, who needs no leave): the kernel
//! knows who owns a socket (`sock_diag(7)`, or `/proc/net/tcp` where that is missing).

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with,
};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLMSG_ERROR: u16 = 2;
const NLM_F_REQUEST: u16 = 1;
const HEADER_BYTES: usize = 16;
const REQUEST_BYTES: usize = HEADER_BYTES + 8 + SOCKET_ID_BYTES;
const SOCKET_ID_BYTES: usize = 48;
/// Where the answer has the state: after header and family.
const STATE_AT: usize = HEADER_BYTES + 1;
/// Where it has the owner: after header, four bytes of state, id, expiry and two queues.
const UID_AT: usize = HEADER_BYTES + 4 + SOCKET_ID_BYTES + 12;
const INODE_AT: usize = UID_AT + 4;
/// `TCP_ESTABLISHED`: a socket of which its owner can be told. The kernel says 0, which is root, of
/// one that was closed.
const ESTABLISHED: u8 = 1;

/// True when the process that connected from `peer` to our `local` is this user's or root's.
pub fn is_ours(peer: SocketAddr, local: SocketAddr) -> bool {
    // Who comes by IPv4 to a socket of both is seen as IPv6; the kernel lists it as it came.
    let canonical = |a: SocketAddr| SocketAddr::new(a.ip().to_canonical(), a.port());
    let (peer, local) = (canonical(peer), canonical(local));
    if !peer.ip().is_loopback() {
        return false;
    }
    let me = rustix::process::geteuid().as_raw();
    match owner(peer, local) {
        Ok(Some(uid)) => uid == me || uid == 0,
        // It is gone already, or nobody can tell whose it is.
        Ok(None) => false,
        Err(e) => {
            tracing::warn!(%peer, error = %e, "cannot tell whose connection this is; refused");
            false
        }
    }
}

/// The user who owns the socket that is bound to `peer` and connected to `local`.
fn owner(peer: SocketAddr, local: SocketAddr) -> io::Result<Option<u32>> {
    match ask_kernel(peer, local) {
        Ok(uid) => Ok(uid),
        Err(_) => search_table(peer, local),
    }
}

fn ask_kernel(peer: SocketAddr, local: SocketAddr) -> io::Result<Option<u32>> {
    let protocol = Some(netlink::SOCK_DIAG);
    let socket: OwnedFd =
        socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, protocol)?;
    send(&socket, &request(peer, local), SendFlags::empty())?;
    let mut answer = [0u8; 4096];
    // The kernel has answered before send returns.
    let (len, _) = recv(&socket, &mut answer[..], RecvFlags::DONTWAIT)?;
    read_answer(&answer[..len])
}

fn request(peer: SocketAddr, local: SocketAddr) -> Vec<u8> {
    let family = if peer.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let mut out = Vec::with_capacity(REQUEST_BYTES);
    out.extend_from_slice(&(REQUEST_BYTES as u32).to_ne_bytes());
    out.extend_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    out.extend_from_slice(&NLM_F_REQUEST.to_ne_bytes());
    out.extend_from_slice(&[0; 8]); // sequence, port
    out.extend_from_slice(&[family as u8, libc::IPPROTO_TCP as u8, 0, 0]);
    out.extend_from_slice(&u32::MAX.to_ne_bytes()); // in every state
    out.extend_from_slice(&peer.port().to_be_bytes());
    out.extend_from_slice(&local.port().to_be_bytes());
    out.extend_from_slice(&padded(peer.ip()));
    out.extend_from_slice(&padded(local.ip()));
    out.extend_from_slice(&[0; 4]); // any interface
    out.extend_from_slice(&[0xff; 8]); // no cookie
    out
}

fn padded(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V6(ip) => ip.octets(),
        IpAddr::V4(ip) => {
            let mut out = [0; 16];
            out[..4].copy_from_slice(&ip.octets());
            out
        }
    }
}

fn read_answer(answer: &[u8]) -> io::Result<Option<u32>> {
    let word = |at: usize| answer.get(at..at + 4).and_then(|b| b.try_into().ok());
    let word = |at: usize| word(at).map(u32::from_ne_bytes);
    let kind = word(4).map(|k| (k & 0xffff) as u16);
    match kind {
        Some(SOCK_DIAG_BY_FAMILY) => {
            let open = answer.get(STATE_AT) == Some(&ESTABLISHED);
            Ok(word(UID_AT).filter(|_| open && word(INODE_AT).is_some_and(|inode| inode != 0)))
        }
        Some(NLMSG_ERROR) => match word(HEADER_BYTES).map(|e| (e as i32).wrapping_neg()) {
            Some(libc::ENOENT) => Ok(None),
            Some(errno) => Err(io::Error::from_raw_os_error(errno)),
            None => Err(io::ErrorKind::InvalidData.into()),
        },
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

fn search_table(peer: SocketAddr, local: SocketAddr) -> io::Result<Option<u32>> {
    let path = if peer.is_ipv4() { "/proc/net/tcp" } else { "/proc/net/tcp6" };
    let table = std::fs::read_to_string(path)?;
    let wanted = (in_table(peer), in_table(local));
    let row = table.lines().skip(1).find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        let (own, other) = (words.nth(1)?, words.next()?);
        let (state, uid) = (words.next()?, words.nth(3)?.parse().ok()?);
        let open = u8::from_str_radix(state, 16) == Ok(ESTABLISHED) && words.nth(1)? != "0";
        (own == wanted.0 && other == wanted.1 && open).then_some(uid)
    });
    Ok(row)
}

/// As the table writes it: words of the address in the byte order of the machine.
fn in_table(address: SocketAddr) -> String {
    let padded = padded(address.ip());
    let words = if address.is_ipv4() { &padded[..4] } else { &padded[..] };
    let mut out = String::new();
    for word in words.chunks_exact(4) {
        let word = u32::from_ne_bytes([word[0], word[1], word[2], word[3]]);
        out.push_str(&format!("{word:08X}"));
    }
    format!("{out}:{:04X}", address.port())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    /// Both ends of a connection.
    fn pair(at: &str) -> Option<([TcpStream; 2], SocketAddr, SocketAddr)> {
        let listener = TcpListener::bind(at).ok()?;
        let local = listener.local_addr().ok()?;
        let stream = TcpStream::connect(local).ok()?;
        let (accepted, peer) = listener.accept().ok()?;
        Some(([stream, accepted], peer, local))
    }

    #[test]
    fn both_ways_name_this_user_as_the_owner() {
        let me = rustix::process::geteuid().as_raw();
        for at in ["127.0.0.1:0", "[::1]:0"] {
            let Some((ends, peer, local)) = pair(at) else {
                assert!(at.contains("::1"), "loopback is always there");
                continue;
            };
            assert_eq!(ask_kernel(peer, local).unwrap(), Some(me), "{at}");
            assert_eq!(search_table(peer, local).unwrap(), Some(me), "{at}");
            assert!(is_ours(peer, local));
            drop(ends);
        }
    }

    /// The kernel shows a socket that was closed as root's, also one that never was.
    #[test]
    fn a_closed_socket_is_nobodys() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let local = listener.local_addr().unwrap();
        let stream = TcpStream::connect(local).unwrap();
        let (accepted, peer) = listener.accept().unwrap();
        assert!(is_ours(peer, local));
        drop(stream);
        // Our end is open still: theirs stays in the kernel's tables, as FIN_WAIT2.
        let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
        assert!(table.contains(&format!("{} {}", in_table(peer), in_table(local))));
        assert_eq!(ask_kernel(peer, local).unwrap(), None);
        assert_eq!(search_table(peer, local).unwrap(), None);
        assert!(!is_ours(peer, local));
        drop(accepted);
    }

    #[test]
    fn nobody_is_not_ours() {
        let (_ends, peer, local) = pair("127.0.0.1:0").unwrap();
        let nobody = SocketAddr::new(peer.ip(), peer.port() ^ 1);
        // A neighbouring port may be in use by chance, but not connected to ours.
        assert_eq!(ask_kernel(nobody, local).unwrap(), None);
        assert_eq!(search_table(nobody, local).unwrap(), None);
        assert!(!is_ours(nobody, local));
        assert!(!is_ours("192.0.2.1:5".parse().unwrap(), local));
    }
}
