//! The first page of a trace file: who wrote it.

use crate::HEADER;
use crate::bytes::{In, Out};

const MAGIC: [u8; 8] = *b"EBBTRACE";
/// What readers of this version understand.
const VERSION: u32 = 1;
/// Magic, version, length and checksum.
const FIXED: usize = 20;

/// Who wrote a trace file.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Header {
    /// The machine's name.
    pub host: Vec<u8>,
    /// The process.
    pub pid: u32,
    /// Its parent.
    pub parent: u32,
    /// Which program of the process this is: 0, and one more with each exec.
    pub generation: u32,
    /// When tracing began, by the machine's clock.
    pub start: u64,
    /// What to add to times of this file to have them since 1970.
    pub since_1970: u64,
    /// Which task of a launcher (mpiexec, srun) this is, in the launcher's words; empty when of none.
    pub task: Vec<u8>,
    /// The program's file.
    pub program: Vec<u8>,
}

impl Header {
    /// A time of this file, since 1970. Whatever is written there, a sum is made of it.
    #[must_use]
    pub fn since_1970(&self, time: u64) -> u64 {
        time.saturating_add(self.since_1970)
    }

    /// As a page; long names are cut.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut page = vec![0; HEADER];
        let mut out = Out::new(&mut page[FIXED..]);
        let cut = |text: &[u8], most: usize| text[..text.len().min(most)].to_vec();
        // What fits by these limits.
        let _ = (|| {
            out.text(&cut(&self.host, 255))?;
            out.number(self.pid.into())?;
            out.number(self.parent.into())?;
            out.number(self.generation.into())?;
            out.number(self.start)?;
            out.number(self.since_1970)?;
            out.text(&cut(&self.task, 255))?;
            out.text(&cut(&self.program, 3000))
        })();
        let len = out.len();
        page[..8].copy_from_slice(&MAGIC);
        page[8..12].copy_from_slice(&VERSION.to_le_bytes());
        page[12..16].copy_from_slice(&(len as u32).to_le_bytes());
        let sum = crc32c::crc32c(&page[FIXED..FIXED + len]);
        page[16..20].copy_from_slice(&sum.to_le_bytes());
        page
    }

    /// Reads it back; what is wrong in words.
    pub fn decode(page: &[u8]) -> Result<Header, &'static str> {
        let mut input = In::new(page);
        let mut word = || input.fixed::<4>().map(u32::from_le_bytes);
        let (magic, version) = ((word(), word()), word());
        let (len, sum) = (word(), word());
        let half = |at: usize| {
            Some(u32::from_le_bytes([MAGIC[at], MAGIC[at + 1], MAGIC[at + 2], MAGIC[at + 3]]))
        };
        if magic != (half(0), half(4)) {
            return Err("not a trace file");
        }
        if version != Some(VERSION) {
            return Err("written by another version of ebb");
        }
        let len = len.unwrap_or(u32::MAX) as usize;
        let body = input.take(len).ok_or("its header is cut off")?;
        if sum != Some(crc32c::crc32c(body)) {
            return Err("its header is damaged");
        }
        Header::fields(&mut In::new(body)).ok_or("its header makes no sense")
    }

    fn fields(input: &mut In<'_>) -> Option<Header> {
        Some(Header {
            host: input.text(255)?,
            pid: input.small()?,
            parent: input.small()?,
            generation: input.small()?,
            start: input.number()?,
            since_1970: input.number()?,
            task: input.text(255)?,
            program: input.text(3000)?,
        })
    }
}
