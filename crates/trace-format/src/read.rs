//! Reading a trace file: every number in it is checked, and what follows damage is not believed.

use crate::bytes::In;
use crate::write::{MAGIC, SEALED};
use crate::{BLOCK, HEAD, HEADER, Header, Record};
use std::io::{self, Read};

/// Why a trace file cannot be read, or not to its end.
#[derive(Debug, thiserror::Error)]
pub enum Damage {
    /// It cannot be read at all.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// Its first page is wrong.
    #[error("{0}")]
    Header(&'static str),
    /// A block is wrong; what was read before it is good.
    #[error("block {block}: {what}")]
    Block {
        /// Which one, from 0.
        block: u64,
        /// What is wrong.
        what: &'static str,
    },
}

/// Reads records one after the other, a block at a time.
#[derive(Debug)]
pub struct Reader<R> {
    from: R,
    header: Header,
    block: Vec<u8>,
    /// Where the next record of the block begins, and the end of its records.
    at: usize,
    end: usize,
    base: u64,
    blocks: u64,
    is_last: bool,
}

impl<R: Read> Reader<R> {
    /// Reads the header.
    pub fn new(mut from: R) -> Result<Reader<R>, Damage> {
        let mut page = vec![0; HEADER];
        let got = read_full(&mut from, &mut page)?;
        let header = Header::decode(&page[..got]).map_err(Damage::Header)?;
        let block = vec![0; BLOCK];
        let (at, end, base, blocks, is_last) = (0, 0, 0, 0, false);
        Ok(Reader { from, header, block, at, end, base, blocks, is_last })
    }

    /// Who wrote it.
    #[must_use]
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The next record; nothing at the end. After damage there is nothing more.
    pub fn read(&mut self) -> Result<Option<Record>, Damage> {
        while self.at == self.end {
            if self.is_last || !self.next_block()? {
                self.is_last = true;
                return Ok(None);
            }
        }
        let mut input = In::new(&self.block[self.at..self.end]);
        let Some(record) = Record::decode(self.base, &mut input) else {
            return Err(self.damaged("a record makes no sense"));
        };
        self.at = self.end - input.rest();
        self.base = record.end;
        Ok(Some(record))
    }

    fn next_block(&mut self) -> Result<bool, Damage> {
        let got = read_full(&mut self.from, &mut self.block)?;
        self.blocks += 1;
        let word = |at: usize| {
            let bytes = self.block.get(at..at + 4).filter(|_| at + 4 <= got);
            bytes.map_or(0, |b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        };
        let (magic, used, sealed, sum) = (word(0), word(4) as usize, word(8), word(12));
        if magic == 0 {
            return Ok(false);
        }
        if magic != MAGIC {
            return Err(self.damaged("it is not one"));
        }
        if got < HEAD || used > got - HEAD {
            return Err(self.damaged("it is cut off"));
        }
        match sealed {
            0 => self.is_last = true,
            SEALED if crc32c::crc32c(&self.block[HEAD..HEAD + used]) == sum => {}
            _ => return Err(self.damaged("its checksum is wrong")),
        }
        let mut base = [0; 8];
        base.copy_from_slice(&self.block[16..24]);
        self.base = u64::from_le_bytes(base);
        (self.at, self.end) = (HEAD, HEAD + used);
        Ok(true)
    }

    fn damaged(&mut self, what: &'static str) -> Damage {
        self.is_last = true;
        self.at = self.end;
        Damage::Block { block: self.blocks.saturating_sub(1), what }
    }
}

/// Reads until the buffer is full or the file ends.
fn read_full(from: &mut impl Read, mut into: &mut [u8]) -> io::Result<usize> {
    let mut got = 0;
    while !into.is_empty() {
        match from.read(into) {
            Ok(0) => break,
            Ok(n) => {
                got += n;
                into = &mut into[n..];
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(got)
}
