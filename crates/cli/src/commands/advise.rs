//! `ebb advise`: which model a traced program needs, and what it would cost.

use super::check::{Source, all};
use crate::exit::Failure;

/// Say which consistency model a traced program needs, what each would cost in requests, and where a file
/// needs more than the others
#[derive(clap::Args)]
#[command(after_help = "Examples:
  ebb trace -o trace -- mpiexec -n 4 ./solver
  ebb advise trace")]
pub struct Args {
    #[command(flatten)]
    source: Source,
    /// One JSON object instead of text
    #[arg(long)]
    json: bool,
}

impl Args {
    /// Runs the command; 1 when no model will do.
    pub fn run(self) -> Result<u8, Failure> {
        let models = all(&self.source.table()?);
        let traced = self.source.load(&models)?;
        let checked = ebb_trace_check::check(&traced, &models, &|_| None);
        let advice = ebb_trace_check::advise(&traced, &models, &checked);
        match self.json {
            true => println!("{}", advice.json(&traced, &checked)),
            false => print!("{}", advice.text(&traced, &checked)),
        }
        Ok(u8::from(advice.model.is_none()))
    }
}
