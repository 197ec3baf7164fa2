//! `ebb ost-load`: how loaded the storage targets are when several jobs stripe over them, as
//! tables, CSV and a plot, and how many stripes a file should take. It computes; no file system
//! is asked.

use crate::exit::{Context, Failure};
use crate::plot::{Chart, document};
use ebb_contention::{
    LOAD_LIMIT, LOG_STRUCTURED_STRIPES, Load, LoadError, Question, advise, equal, log_structured,
    unequal,
};
use ebb_types::units::Size;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// More jobs than a table needs; each is a line of the CSV file.
const JOBS_LISTED_MAX: u32 = 100_000;
/// Tables show every number of jobs up to here, then the powers of two and the last.
const EVERY_ROW_UP_TO: u32 = 16;
/// Points of a plotted line; more cannot be seen.
const POINTS_MAX: usize = 400;

/// How loaded the storage targets (OSTs) are when several jobs stripe over them
#[derive(clap::Args)]
#[command(after_help = "Examples:
  ebb ost-load --targets 480 --stripes 160 --jobs 10             ten jobs with 160 stripes each
  ebb ost-load --targets 480 --stripes 160,64,32 --plot jobs.svg   three unequal jobs
  ebb ost-load --targets 480 --ranks 4096 --csv logs.csv         a log for each rank (PLFS)
  ebb ost-load --targets 480 --jobs 4 --advise --nodes 64 --size 1TiB")]
pub struct Args {
    /// Storage targets of the file system
    #[arg(long, value_name = "N")]
    targets: u32,
    /// Stripes of each job: one number for all, or one for each job
    #[arg(long, value_name = "R|R1,R2,...", value_delimiter = ',')]
    stripes: Vec<u32>,
    /// Jobs at the same time, this one included
    #[arg(long, value_name = "N")]
    jobs: Option<u32>,
    /// Ranks that each write a log of their own with 2 stripes (the log-structured case)
    #[arg(long, value_name = "N")]
    ranks: Option<u32>,
    /// Also write every line of the tables to this file
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Also draw load and targets in use to this file (SVG)
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// Print a stripe count for a new file, and why
    #[arg(long)]
    advise: bool,
    /// With --advise: nodes that write the file
    #[arg(long, value_name = "N", default_value_t = 1, requires = "advise")]
    nodes: u32,
    /// With --advise: files that each job writes at the same time
    #[arg(long, value_name = "N", default_value_t = 1, requires = "advise")]
    files: u32,
    /// With --advise: size of the file, in B, KiB, MiB, GiB, TiB
    #[arg(long, value_name = "SIZE", default_value = "1GiB", requires = "advise")]
    size: Size,
    /// With --advise: size of a stripe
    #[arg(long, value_name = "SIZE", default_value = "1MiB", requires = "advise")]
    stripe_size: Size,
}

/// One table: a title, what is counted, and a line for each number of it.
struct Table {
    title: String,
    /// `jobs` or `ranks`.
    of: &'static str,
    loads: Vec<Load>,
}

impl Args {
    /// Runs the command.
    pub fn run(self) -> Result<(), Failure> {
        let tables = self.tables()?;
        let advice = if self.advise { Some(self.advice()?) } else { None };
        if tables.is_empty() && advice.is_none() {
            return Err(Failure::usage(
                "nothing asked: give --stripes and --jobs, --ranks, or --advise",
            ));
        }
        if tables.is_empty() && (self.csv.is_some() || self.plot.is_some()) {
            return Err(Failure::usage("--csv and --plot need --stripes or --ranks"));
        }
        let texts: Vec<String> = tables.iter().map(as_text).chain(advice).collect();
        print!("{}", texts.join("\n"));
        if let Some(path) = &self.csv {
            write(path, &as_csv(&tables))?;
        }
        if let Some(path) = &self.plot {
            write(path, &as_svg(&tables, self.targets))?;
        }
        Ok(())
    }

    fn tables(&self) -> Result<Vec<Table>, Failure> {
        let mut tables = Vec::new();
        if !self.stripes.is_empty() {
            tables.push(self.jobs_table()?);
        }
        if let Some(ranks) = self.ranks {
            let loads = listed("--ranks", ranks)?
                .map(|n| log_structured(self.targets, n))
                .collect::<Result<_, _>>()
                .map_err(refusal)?;
            let title = format!(
                "{} targets, a log of {LOG_STRUCTURED_STRIPES} stripes for each rank",
                self.targets
            );
            tables.push(Table { title, of: "ranks", loads });
        }
        Ok(tables)
    }

    fn jobs_table(&self) -> Result<Table, Failure> {
        let (stripes, loads) = match (self.stripes.as_slice(), self.jobs) {
            ([all], Some(jobs)) => {
                let loads = listed("--jobs", jobs)?.map(|n| equal(self.targets, *all, n)).collect();
                (format!("{all} stripes for each job"), loads)
            }
            ([_], None) => {
                return Err(Failure::usage("--stripes with one number needs --jobs"));
            }
            (each, Some(jobs)) if jobs as usize != each.len() => {
                return Err(Failure::usage(format!(
                    "--jobs {jobs}: --stripes names {} jobs (leave --jobs out)",
                    each.len()
                )));
            }
            (each, _) => {
                let named: Vec<String> = each.iter().map(u32::to_string).collect();
                (format!("jobs of {} stripes", named.join(", ")), unequal(self.targets, each))
            }
        };
        let title = format!("{} targets, {stripes}", self.targets);
        Ok(Table { title, of: "jobs", loads: loads.map_err(refusal)? })
    }

    fn advice(&self) -> Result<String, Failure> {
        let Some(jobs) = self.jobs else {
            return Err(Failure::usage("--advise needs --jobs"));
        };
        let advice = advise(&Question {
            targets: self.targets,
            jobs,
            files: self.files,
            nodes: self.nodes,
            file_size: self.size.0,
            stripe_size: self.stripe_size.0,
        })
        .map_err(refusal)?;
        let mut text = format!("stripes: {}\n", advice.stripes);
        for reason in &advice.reasons {
            text.push_str(&format!("  {reason}\n"));
        }
        Ok(text)
    }
}

/// The numbers from 1 to what was asked, when those can be listed.
fn listed(flag: &str, most: u32) -> Result<impl Iterator<Item = u32>, Failure> {
    if (1..=JOBS_LISTED_MAX).contains(&most) {
        return Ok(1..=most);
    }
    Err(Failure::usage(format!("{flag} {most}: from 1 to {JOBS_LISTED_MAX} are possible")))
}

/// Names the flag that is to be mended.
fn refusal(error: LoadError) -> Failure {
    let flag = match error {
        LoadError::Targets { .. } => "--targets",
        LoadError::Stripes { .. } => "--stripes",
        LoadError::Jobs { .. } => "--jobs, --files",
        LoadError::StripeSize => "--stripe-size",
        LoadError::Nodes => "--nodes",
    };
    Failure::usage(format!("{flag}: {error}"))
}

fn write(path: &Path, text: &str) -> Result<(), Failure> {
    std::fs::write(path, text).or_failed(path.display())
}

fn is_shown(n: u32, last: u32) -> bool {
    n <= EVERY_ROW_UP_TO || n == last || n.is_power_of_two()
}

fn as_text(table: &Table) -> String {
    let last = table.loads.last().map_or(0, |l| l.jobs);
    let mut text = format!("{}\n{:>8}  in use  required    load\n", table.title, table.of);
    for l in table.loads.iter().filter(|l| is_shown(l.jobs, last)) {
        let _ =
            writeln!(text, "{:>8} {:>7.2} {:>9} {:>7.3}", l.jobs, l.in_use, l.required, l.load());
    }
    text
}

fn as_csv(tables: &[Table]) -> String {
    let mut text = String::from("of,n,in_use,required,load\n");
    for table in tables {
        for l in &table.loads {
            let (of, n, required) = (table.of, l.jobs, l.required);
            let _ = writeln!(text, "{of},{n},{:.6},{required},{:.6}", l.in_use, l.load());
        }
    }
    text
}

fn as_svg(tables: &[Table], targets: u32) -> String {
    let mut charts = Vec::new();
    for table in tables {
        let step = table.loads.len().div_ceil(POINTS_MAX).max(1);
        let last = table.loads.len().saturating_sub(1);
        let mut picked: Vec<&Load> = table.loads.iter().step_by(step).collect();
        picked.extend(table.loads.last().filter(|_| last % step != 0));
        let line = |of: fn(&Load) -> f64| {
            picked.iter().map(|l| (f64::from(l.jobs), of(l))).collect::<Vec<_>>()
        };
        charts.push(Chart {
            title: format!("{}: load", table.title),
            x_label: table.of.to_owned(),
            points: line(Load::load),
            mark: Some((LOAD_LIMIT, "visible from here".to_owned())),
        });
        charts.push(Chart {
            title: format!("{}: targets in use", table.title),
            x_label: table.of.to_owned(),
            points: line(|l| l.in_use),
            mark: Some((f64::from(targets), "all".to_owned())),
        });
    }
    document(&charts)
}

#[cfg(test)]
#[path = "ost_load_tests.rs"]
mod tests;
