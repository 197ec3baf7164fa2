//! The three file systems that SCNF makes of its primitives (its Table 6), over files of a mount whose model
//! publishes nothing between an open and a close by itself (`session`). What a program calls is a mount's
//! call; what it sees is what a mount under that model shows.
//!
//! | call | [`PosixFs`] | [`CommitFs`] | [`SessionFs`] |
//! |---|---|---|---|
//! | write | write, attach | write | write |
//! | read | query, read | query, read | read |
//! | synchronisation | – | commit = attach_file | session_open = query_file, session_close = attach_file |
//!
//! A read is the system's own: the node reads by what it was last told of owners, and a query is how it is told.
//! ([`Extended::read_owner`] names the owner instead, and fails where that has changed since.)

use crate::Extended;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Every write is visible at once.
#[derive(Debug)]
pub struct PosixFs(pub File);

/// Writes are visible after a commit of who wrote.
#[derive(Debug)]
pub struct CommitFs(pub File);

/// Writes are visible to who opens a session after their writer has closed one.
#[derive(Debug)]
pub struct SessionFs(pub File);

fn looked_up_read(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    let end = offset.saturating_add(buffer.len() as u64).min(i64::MAX as u64);
    if end > offset {
        file.query(Some(offset..end))?;
    }
    read_all(file, buffer, offset)
}

/// Up to the end of the file.
fn read_all(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < buffer.len() {
        match file.read_at(&mut buffer[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(done)
}

impl PosixFs {
    /// All of it, published.
    ///
    /// # Errors
    /// As of write(2) and [`Extended::attach`].
    pub fn write(&self, data: &[u8], offset: u64) -> io::Result<()> {
        self.0.write_all_at(data, offset)?;
        if data.is_empty() {
            return Ok(());
        }
        self.0.attach(Some(offset..offset + data.len() as u64))
    }

    /// What there is, as of now.
    ///
    /// # Errors
    /// As of read(2) and [`Extended::query`].
    pub fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        looked_up_read(&self.0, buffer, offset)
    }
}

impl CommitFs {
    /// All of it, visible on this node.
    ///
    /// # Errors
    /// As of write(2).
    pub fn write(&self, data: &[u8], offset: u64) -> io::Result<()> {
        self.0.write_all_at(data, offset)
    }

    /// Publishes what was written.
    ///
    /// # Errors
    /// As of [`Extended::attach`].
    pub fn commit(&self) -> io::Result<()> {
        self.0.attach(None)
    }

    /// What there is, as of now.
    ///
    /// # Errors
    /// As of read(2) and [`Extended::query`].
    pub fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        looked_up_read(&self.0, buffer, offset)
    }
}

impl SessionFs {
    /// From now on reads show what was published so far.
    ///
    /// # Errors
    /// As of [`Extended::query`].
    pub fn session_open(&self) -> io::Result<()> {
        self.0.query(None).map(drop)
    }

    /// Publishes what was written.
    ///
    /// # Errors
    /// As of [`Extended::attach`].
    pub fn session_close(&self) -> io::Result<()> {
        self.0.attach(None)
    }

    /// All of it, visible on this node.
    ///
    /// # Errors
    /// As of write(2).
    pub fn write(&self, data: &[u8], offset: u64) -> io::Result<()> {
        self.0.write_all_at(data, offset)
    }

    /// What there is, as of the last [`SessionFs::session_open`].
    ///
    /// # Errors
    /// As of read(2).
    pub fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        read_all(&self.0, buffer, offset)
    }
}
