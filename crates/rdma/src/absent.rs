//! What there is where RDMA was not built in: types of which there is no value.

use crate::{Answer, Hello, NOT_BUILT_IN, Options, Place, Stats};
use bytes::{BufMut, BytesMut};
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::ops::{Deref, DerefMut};

/// There is none.
#[derive(Debug)]
pub struct Endpoint(Infallible);
/// There is none.
#[derive(Debug)]
pub struct Expected(Infallible);
/// There is none.
#[derive(Debug)]
pub struct Stream(Infallible);
/// There is none.
#[derive(Debug)]
pub struct Landing(Infallible);
/// There is none.
#[derive(Debug)]
pub struct Staged(Infallible);

#[allow(missing_docs)]
impl Endpoint {
    /// Always an error.
    pub fn open(_: Options) -> io::Result<Endpoint> {
        Err(io::Error::new(io::ErrorKind::Unsupported, NOT_BUILT_IN))
    }

    #[must_use]
    pub fn address(&self) -> SocketAddr {
        match self.0 {}
    }

    #[must_use]
    pub fn failed(&self) -> Option<String> {
        match self.0 {}
    }

    pub fn expect(&self, _: Hello, _: Answer) -> io::Result<Expected> {
        match self.0 {}
    }

    pub async fn connect(&self, _: SocketAddr, _: &Hello) -> io::Result<(Stream, Answer)> {
        match self.0 {}
    }

    pub fn land(&self, _: BytesMut) -> io::Result<Landing> {
        match self.0 {}
    }

    #[must_use]
    pub fn stats(&self) -> Stats {
        match self.0 {}
    }
}

#[allow(missing_docs)]
impl Expected {
    pub async fn connected(self) -> io::Result<Stream> {
        match self.0 {}
    }
}

#[allow(missing_docs)]
impl Stream {
    pub fn try_read_buf(&self, _: &mut impl BufMut) -> io::Result<usize> {
        match self.0 {}
    }

    pub fn try_write(&self, _: &[u8]) -> io::Result<usize> {
        match self.0 {}
    }

    pub async fn readable(&self) -> io::Result<()> {
        match self.0 {}
    }

    pub async fn writable(&self) -> io::Result<()> {
        match self.0 {}
    }

    pub fn close(&self) {
        match self.0 {}
    }

    pub async fn stage(&self) -> io::Result<Staged> {
        match self.0 {}
    }

    pub async fn write_to(&self, _: Staged, _: usize, _: Place) -> io::Result<()> {
        match self.0 {}
    }
}

#[allow(missing_docs)]
impl Landing {
    #[must_use]
    pub fn place(&self, _: usize) -> Place {
        match self.0 {}
    }

    #[must_use]
    pub fn take(self) -> BytesMut {
        match self.0 {}
    }
}

impl Deref for Staged {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self.0 {}
    }
}

impl DerefMut for Staged {
    fn deref_mut(&mut self) -> &mut [u8] {
        match self.0 {}
    }
}
