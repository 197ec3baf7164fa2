//! Disks and backings that fail, hang or are full, and what is written to the backing when. One program of many files, because each takes its time to build.

mod buffer;
mod failing_backing;
mod failures;
mod hung_backing;
mod late_flush;
mod medium;
mod small_buffer;
mod space;
