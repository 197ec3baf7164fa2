//! Which bytes of a file were written, told by the kernel while it writes them: a small program
//! at the tracepoints of the file system puts (file, offset, length) into a ring. Nothing here
//! knows what the files are for.
//!
//! # What is seen
//!
//! Every buffered write by whatever call (`write`, `pwritev`, `O_APPEND`, `splice`, io_uring,
//! asynchronous I/O) and through whatever is stacked above the file. Direct writes are noticed, not
//! measured: from then on the file answers [`Why::Direct`]. So are mappings ([`Why::Mapped`]): the
//! stores through them are not seen. What is **not** seen at all is what changes the size alone (truncate, fallocate), nor blocks that are cloned
//! (FICLONE; on XFS copy_file_range, too): who watches a file must know of these by other means.
//! XFS tells of a write before it is carried out: of one that fails on the way, as on a full disk,
//! all bytes are told of.
//!
//! # When it is seen
//!
//! [`Watched::drain`] tells of every write that had returned before it was called. A write that is
//! under way is told of now or later; when it is told of now, it has ended when `drain` returns, so
//! nothing is told of before it can be read.
//!
//! # When something is missed
//!
//! The ring is bounded. What does not fit raises a counter of its file, in the kernel, and the next
//! `drain` is an error ([`Lost`]). The same goes for a program that the kernel left out, and for
//! more ranges than are kept. So is an answer that cannot be trusted for any other reason: there is
//! no way to an incomplete list that looks whole.
//!
//! # What it needs
//!
//! CAP_BPF and CAP_PERFMON (or root), the kernel's type information (`/sys/kernel/btf`), ext4 or
//! XFS, and a kernel that has the tracepoints. [`Tracker::open`] says in words what is missing. It
//! ends with a trial on the file system itself, so that a kernel on which this works differently is
//! one on which it is unavailable.

mod asm;
mod btf;
mod hooks;
mod program;
mod ring;
mod sys;
mod tracker;
mod trial;
mod unavailable;
mod watched;

pub use btf::{Btf, BtfError};
pub use tracker::{Limits, Tracker, Writers};
pub use unavailable::Unavailable;
pub use watched::{Lost, Watched, Why, Written};
