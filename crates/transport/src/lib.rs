//! Peer-to-peer bytes over TCP, and the proof of the job token.

pub mod auth;
