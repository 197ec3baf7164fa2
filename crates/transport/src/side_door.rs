//! A way into a service of the same process that does not go over the network: pipes in memory.
//! Whoever comes in here speaks as over any other connection.

use std::io;
use tokio::io::DuplexStream;
use tokio::sync::mpsc;

/// How much is on its way in one direction at most.
const PIPE_BYTES: usize = 1 << 20;

/// The way in.
#[derive(Clone, Debug)]
pub struct SideDoor(mpsc::UnboundedSender<DuplexStream>);

/// The service's end of those who came in.
pub type Arrivals = mpsc::UnboundedReceiver<DuplexStream>;

impl SideDoor {
    /// A door, and where those arrive who take it.
    #[must_use]
    pub fn new() -> (SideDoor, Arrivals) {
        let (into, arrivals) = mpsc::unbounded_channel();
        (SideDoor(into), arrivals)
    }

    /// Connects; refused when the service has ended.
    pub fn enter(&self) -> io::Result<DuplexStream> {
        let (ours, theirs) = tokio::io::duplex(PIPE_BYTES);
        match self.0.send(theirs) {
            Ok(()) => Ok(ours),
            Err(_) => Err(io::ErrorKind::ConnectionRefused.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[tokio::test]
    async fn a_door_leads_to_the_service_while_there_is_one() {
        let (door, mut arrivals) = SideDoor::new();
        let mut here = door.clone().enter().expect("open");
        let mut there = arrivals.recv().await.expect("somebody");
        here.write_all(b"hello").await.expect("write");
        let mut said = [0; 5];
        there.read_exact(&mut said).await.expect("read");
        assert_eq!(&said, b"hello");
        drop((there, arrivals));
        assert_eq!(here.read(&mut said).await.expect("the end"), 0);
        let refused = door.enter().expect_err("nobody is there");
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
    }
}
