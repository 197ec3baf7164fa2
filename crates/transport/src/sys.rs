//! System calls that rustix lacks.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Whoever waits for `socket` to be readable is woken when so many bytes are there (or when no more
/// can come).
pub(crate) fn set_receive_low_water(socket: &impl AsFd, bytes: usize) -> io::Result<()> {
    let value = libc::c_int::try_from(bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: the descriptor is open for as long as it is borrowed, and the value is read before
    // the call returns.
    let done = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_RCVLOWAT,
            (&raw const value).cast(),
            size_of_val(&value) as libc::socklen_t,
        )
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
