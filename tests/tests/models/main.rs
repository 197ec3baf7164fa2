//! What nodes see of each other's bytes and names, and what they need not ask for. One program of many files, because each takes its time to build.

mod appends;
mod asked_once;
mod leases;
mod links;
mod mapped_pages;
mod name_leases;
mod quiet_writes;
mod records;
mod seats;
mod seeing;
mod shared_files;
