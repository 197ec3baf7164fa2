//! Daemons that are killed under a supervisor: applications go on as if nothing had happened.
//! `EBB_SURVIVE_KILLS` kills under load for each model (10), `EBB_SEED` repeats the operations;
//! the moments of the kills are a matter of the machine.

mod copies;
mod kills;
mod load;
mod single;
mod stuck;
