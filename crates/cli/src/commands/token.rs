//! `ebb token`: makes the secret that the daemons and the service of one job share.

use crate::exit::Failure;
use ebb_transport::auth::{Token, TokenError};
use std::path::PathBuf;

/// Make a job secret in a new file that only its owner can read (mode 0600)
#[derive(clap::Args)]
#[command(after_help = "Example:
  ebb token ~/jobs/$SLURM_JOB_ID.token      then give --token-file FILE to every node's mount")]
pub struct Args {
    /// File to make; an existing one is not touched
    file: PathBuf,
}

impl Args {
    /// Runs the command.
    pub fn run(self) -> Result<(), Failure> {
        Token::generate_to(&self.file).map(drop).map_err(|e| match e {
            TokenError::Io { .. } => Failure::failed(e.to_string()),
            other => Failure::usage(other.to_string()),
        })
    }
}
