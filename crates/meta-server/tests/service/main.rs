//! The metadata service, by the protocol: a service in this process and nodes that speak to it. One program, because
//! each has the whole service in it, and building that takes longer than all the tests.

mod begin_anew;
mod common;
mod coupling;
mod files;
mod hostile;
mod hostile_names;
mod leases;
mod lock_publishes;
mod many_ranges;
mod places;
mod reassert;
mod rebuild;
mod seats;
mod sessions;
mod strangers;
mod two_services;
