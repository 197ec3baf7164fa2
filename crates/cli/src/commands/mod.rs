//! The commands, one file each: flags in, words for the user out.

pub mod advise;
pub mod bench;
pub mod check;
pub mod config;
pub mod daemon;
pub mod drain;
pub mod meta;
pub mod mount;
pub mod ost_load;
pub mod recover;
pub mod restart;
pub mod run;
pub mod scrub;
pub mod stage_in;
pub mod stats;
pub mod status;
pub mod token;
pub mod top;
pub mod trace;
pub mod umount;
