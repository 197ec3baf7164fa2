//! The metadata service: who it is, who may speak with it, and its end. One program of many files, because each takes its time to build.

mod identity;
mod secure;
mod service_kill;
mod service_moves;
mod service_power_loss;
mod service_rebuild;
mod service_standby;
mod uninvited;
