//! One record: when a call of which thread was made from where, and what it did.

use crate::bytes::{In, Out};
use crate::{Call, PATH_MAX};

/// What an access does to its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Act {
    /// It reads them.
    Read,
    /// It writes them, or cuts them off.
    Write,
    /// It writes them behind what was the end.
    Append,
}

/// A call that may publish or look for what others wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Event {
    /// The file was opened.
    Open,
    /// A descriptor of it is closed.
    Close,
    /// fsync, fdatasync and their like.
    Fsync,
    /// The explicit commit of an Ebb mount.
    Commit,
}

/// Who hears of whom in a collective call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Flow {
    /// Everybody of everybody.
    All,
    /// Everybody of the root.
    FromRoot,
    /// The root of everybody.
    ToRoot,
    /// Each of those with smaller ranks.
    Prefix,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// From here on `file` stands for this one.
    File {
        /// Its number in this trace file.
        file: u32,
        /// Its inode number.
        ino: u64,
        /// When it was made, in nanoseconds; 0 where the file system does not say.
        born: u64,
        /// Where it was opened.
        path: Vec<u8>,
    },
    /// From here on `site` stands for this place in a program.
    Site {
        /// Its number in this trace file; 0 is nowhere.
        site: u32,
        /// Address in the object.
        offset: u64,
        /// The object's file.
        object: Vec<u8>,
    },
    /// Bytes were read or written.
    Access {
        /// Which file.
        file: u32,
        /// How.
        act: Act,
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
    },
    /// A sync operation.
    Sync {
        /// Which file.
        file: u32,
        /// Which one.
        event: Event,
    },
    /// A lock was granted.
    Lock {
        /// Which file.
        file: u32,
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
        /// Not shared.
        exclusive: bool,
    },
    /// What is locked in a range is about to be given up.
    Unlock {
        /// Which file.
        file: u32,
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
    },
    /// A child was made.
    Fork {
        /// Its process number.
        pid: u32,
    },
    /// The library is about to make children that nobody tells of (system, popen).
    Spawning,
    /// Those have ended.
    Spawned,
    /// A child's end was heard of.
    Reaped {
        /// Its process number.
        pid: u32,
    },
    /// The process ends.
    Exit,
    /// This process is a rank of an MPI job.
    World {
        /// The job's communicator of all.
        comm: u64,
        /// Which rank.
        rank: u32,
        /// Of how many.
        size: u32,
    },
    /// A message was sent.
    Send {
        /// In which communicator.
        comm: u64,
        /// By whom in it.
        from: u32,
        /// To whom.
        to: u32,
        /// With which tag.
        tag: i32,
    },
    /// A message has arrived.
    Recv {
        /// In which communicator.
        comm: u64,
        /// From whom in it.
        from: u32,
        /// To whom.
        to: u32,
        /// With which tag.
        tag: i32,
        /// When the receive was posted, among all of this process.
        posted: u64,
    },
    /// A collective call begins.
    Enter {
        /// In which communicator.
        comm: u64,
        /// Which one in it.
        number: u64,
        /// This process's rank in it.
        rank: u32,
        /// How many take part.
        size: u32,
        /// The rank that matters to `flow`.
        root: u32,
        /// Who hears of whom.
        flow: Flow,
    },
    /// A collective call is over for this process.
    Leave {
        /// In which communicator.
        comm: u64,
        /// Which one in it.
        number: u64,
        /// This process's rank in it.
        rank: u32,
    },
    /// MPI_File_sync begins; what it does to the file system follows, or nothing does.
    Asked,
    /// MPI_File_sync is over.
    Answered,
    /// Order may be missing: an MPI call that is not understood was made.
    Unknown,
}

/// A record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// When the call began, in nanoseconds of the machine's clock.
    pub begin: u64,
    /// When it had ended, or is recorded because what follows may not return.
    pub end: u64,
    /// The thread, in the order in which they were first seen.
    pub thread: u32,
    /// Which call.
    pub call: Call,
    /// From where; 0 where that is not known.
    pub site: u32,
    /// What happened.
    pub what: What,
}

impl Record {
    /// Puts it into `bytes`, relative to the time `base`; how long it is, if it fits.
    pub(crate) fn encode(&self, base: u64, bytes: &mut [u8]) -> Option<usize> {
        let mut out = Out::new(bytes);
        out.byte(self.what.tag())?;
        out.byte(self.call as u8)?;
        out.number(self.thread.into())?;
        out.number(self.site.into())?;
        out.signed(self.end.wrapping_sub(base).cast_signed())?;
        out.number(self.end.saturating_sub(self.begin))?;
        self.what.encode(&mut out)?;
        Some(out.len())
    }

    /// Takes one off.
    pub(crate) fn decode(base: u64, input: &mut In<'_>) -> Option<Record> {
        let tag = input.byte()?;
        let call = Call::from_number(input.byte()?)?;
        let (thread, site) = (input.small()?, input.small()?);
        let end = base.wrapping_add(input.signed()?.cast_unsigned());
        let begin = end.checked_sub(input.number()?)?;
        let what = What::decode(tag, input)?;
        Some(Record { begin, end, thread, call, site, what })
    }
}

impl What {
    fn tag(&self) -> u8 {
        match self {
            What::File { .. } => 1,
            What::Site { .. } => 2,
            What::Access { .. } => 3,
            What::Sync { .. } => 4,
            What::Lock { .. } => 5,
            What::Unlock { .. } => 6,
            What::Fork { .. } => 7,
            What::Spawning => 8,
            What::Spawned => 9,
            What::Reaped { .. } => 10,
            What::Exit => 12,
            What::World { .. } => 13,
            What::Send { .. } => 14,
            What::Recv { .. } => 15,
            What::Enter { .. } => 16,
            What::Leave { .. } => 17,
            What::Asked => 18,
            What::Answered => 19,
            What::Unknown => 20,
        }
    }

    fn encode(&self, out: &mut Out<'_>) -> Option<()> {
        match self {
            What::File { file, ino, born, path } => {
                out.number((*file).into())?;
                out.number(*ino)?;
                out.number(*born)?;
                out.text(&path[..path.len().min(PATH_MAX)])
            }
            What::Site { site, offset, object } => {
                out.number((*site).into())?;
                out.number(*offset)?;
                out.text(&object[..object.len().min(PATH_MAX)])
            }
            What::Access { file, act, start, end } => {
                out.number((*file).into())?;
                out.byte(*act as u8)?;
                out.number(*start)?;
                out.number(end.saturating_sub(*start))
            }
            What::Sync { file, event } => {
                out.number((*file).into())?;
                out.byte(*event as u8)
            }
            What::Lock { file, start, end, exclusive } => {
                out.number((*file).into())?;
                out.number(*start)?;
                out.number(end.saturating_sub(*start))?;
                out.byte(u8::from(*exclusive))
            }
            What::Unlock { file, start, end } => {
                out.number((*file).into())?;
                out.number(*start)?;
                out.number(end.saturating_sub(*start))
            }
            What::Fork { pid } | What::Reaped { pid } => out.number((*pid).into()),
            What::Spawning
            | What::Spawned
            | What::Exit
            | What::Asked
            | What::Answered
            | What::Unknown => Some(()),
            _ => self.encode_mpi(out),
        }
    }

    fn encode_mpi(&self, out: &mut Out<'_>) -> Option<()> {
        match self {
            What::World { comm, rank, size } => {
                out.number(*comm)?;
                out.number((*rank).into())?;
                out.number((*size).into())
            }
            What::Send { comm, from, to, tag } => {
                out.number(*comm)?;
                out.number((*from).into())?;
                out.number((*to).into())?;
                out.signed((*tag).into())
            }
            What::Recv { comm, from, to, tag, posted } => {
                out.number(*comm)?;
                out.number((*from).into())?;
                out.number((*to).into())?;
                out.signed((*tag).into())?;
                out.number(*posted)
            }
            What::Enter { comm, number, rank, size, root, flow } => {
                out.number(*comm)?;
                out.number(*number)?;
                out.number((*rank).into())?;
                out.number((*size).into())?;
                out.number((*root).into())?;
                out.byte(*flow as u8)
            }
            What::Leave { comm, number, rank } => {
                out.number(*comm)?;
                out.number(*number)?;
                out.number((*rank).into())
            }
            _ => Some(()),
        }
    }

    fn decode(tag: u8, input: &mut In<'_>) -> Option<What> {
        Some(match tag {
            1 => What::File {
                file: input.small()?,
                ino: input.number()?,
                born: input.number()?,
                path: input.text(PATH_MAX)?,
            },
            2 => What::Site {
                site: input.small()?,
                offset: input.number()?,
                object: input.text(PATH_MAX)?,
            },
            3 => {
                let file = input.small()?;
                let act = match input.byte()? {
                    0 => Act::Read,
                    1 => Act::Write,
                    2 => Act::Append,
                    _ => return None,
                };
                let (start, end) = range(input)?;
                What::Access { file, act, start, end }
            }
            4 => {
                let file = input.small()?;
                let event = match input.byte()? {
                    0 => Event::Open,
                    1 => Event::Close,
                    2 => Event::Fsync,
                    3 => Event::Commit,
                    _ => return None,
                };
                What::Sync { file, event }
            }
            5 | 6 => {
                let file = input.small()?;
                let (start, end) = range(input)?;
                match tag {
                    5 => What::Lock { file, start, end, exclusive: flag(input)? },
                    _ => What::Unlock { file, start, end },
                }
            }
            7 => What::Fork { pid: input.small()? },
            8 => What::Spawning,
            9 => What::Spawned,
            10 => What::Reaped { pid: input.small()? },
            12 => What::Exit,
            18 => What::Asked,
            19 => What::Answered,
            20 => What::Unknown,
            _ => return What::decode_mpi(tag, input),
        })
    }

    fn decode_mpi(tag: u8, input: &mut In<'_>) -> Option<What> {
        let comm = input.number()?;
        Some(match tag {
            13 => What::World { comm, rank: input.small()?, size: input.small()? },
            14 | 15 => {
                let (from, to) = (input.small()?, input.small()?);
                let tag_of = i32::try_from(input.signed()?).ok()?;
                match tag {
                    14 => What::Send { comm, from, to, tag: tag_of },
                    _ => What::Recv { comm, from, to, tag: tag_of, posted: input.number()? },
                }
            }
            16 => {
                let number = input.number()?;
                let (rank, size, root) = (input.small()?, input.small()?, input.small()?);
                let flow = match input.byte()? {
                    0 => Flow::All,
                    1 => Flow::FromRoot,
                    2 => Flow::ToRoot,
                    3 => Flow::Prefix,
                    _ => return None,
                };
                (rank < size && root < size).then_some(())?;
                What::Enter { comm, number, rank, size, root, flow }
            }
            17 => What::Leave { comm, number: input.number()?, rank: input.small()? },
            _ => return None,
        })
    }
}

fn range(input: &mut In<'_>) -> Option<(u64, u64)> {
    let start = input.number()?;
    Some((start, start.checked_add(input.number()?)?))
}

fn flag(input: &mut In<'_>) -> Option<bool> {
    match input.byte()? {
        0 => Some(false),
        1 => Some(true),
        _ => None,
    }
}
