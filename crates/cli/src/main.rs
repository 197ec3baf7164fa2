//! The `ebb` command: mounts and unmounts, talks to daemons, runs the metadata service.
//! Each command is one file in `commands/`; this one only reads the command line.

mod cachedir;
mod checks;
mod client;
mod commands;
mod daemon;
mod exit;
mod joined;
mod keeper;
mod launch;
mod left;
mod lock;
mod logging;
mod models;
mod mounts;
mod options;
mod plan;
mod plot;
mod progress;
mod service;
mod settings;
mod standby;
mod unmount;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// A job-local burst buffer in front of a parallel file system.
///
/// Exit status of every command: 0 done and durable; 1 failed; 2 usage or configuration;
/// 3 something is still not on the backing; 4 timed out; 5 metadata service or peer unreachable.
#[derive(Parser)]
#[command(name = "ebb", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Mount(commands::mount::Args),
    Umount(commands::umount::Args),
    Drain(commands::drain::Args),
    Scrub(commands::scrub::Args),
    StageIn(commands::stage_in::Args),
    Status(commands::status::Args),
    Top(commands::top::Args),
    Stats(commands::stats::Args),
    Restart(commands::restart::Args),
    Meta(commands::meta::Args),
    Run(commands::run::Args),
    Recover(commands::recover::Args),
    Token(commands::token::Args),
    Config(commands::config::Args),
    OstLoad(commands::ost_load::Args),
    Bench(commands::bench::Args),
    Trace(commands::trace::Args),
    Check(commands::check::Args),
    Advise(commands::advise::Args),
    #[command(hide = true)]
    Daemon(commands::daemon::Args),
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Mount(args) => args.run(),
        Command::Umount(args) => args.run(),
        Command::Drain(args) => args.run(),
        Command::Scrub(args) => args.run(),
        Command::StageIn(args) => args.run(),
        Command::Status(args) => args.run(),
        Command::Top(args) => args.run(),
        Command::Stats(args) => args.run(),
        Command::Restart(args) => args.run(),
        Command::Meta(args) => args.run(),
        Command::Recover(args) => args.run(),
        Command::Token(args) => args.run(),
        Command::Config(args) => args.run(),
        Command::OstLoad(args) => args.run(),
        Command::Bench(args) => args.run(),
        Command::Daemon(args) => args.run(),
        Command::Run(args) => return ended(args.run()),
        Command::Trace(args) => return ended(args.run()),
        Command::Check(args) => return ended(args.run()),
        Command::Advise(args) => return ended(args.run()),
    };
    ended(done.map(|()| 0))
}

fn ended(outcome: Result<u8, exit::Failure>) -> ExitCode {
    match outcome {
        Ok(status) => ExitCode::from(status),
        Err(failure) => {
            eprintln!("ebb: {failure}");
            ExitCode::from(failure.status)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn every_command_has_an_example_in_its_help() {
        Cli::command().debug_assert();
        for command in Cli::command().get_subcommands().filter(|c| !c.is_hide_set()) {
            let after = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let name = command.get_name();
            assert!(after.contains(&format!("ebb {name}")), "{name}");
        }
    }
}
