//! The command line as users have it. One program of many files, because each takes its time to build.

mod cli_bench;
mod cli_meta;
mod cli_mount;
mod cli_mount_refused;
mod cli_recover;
mod cli_run;
mod cli_usage;
mod demo;
mod slurm_hooks;
mod staging;
