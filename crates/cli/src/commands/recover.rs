//! `ebb recover`: lists and drains what a dead daemon left in its cache, without a mount.

use crate::cachedir;
use crate::exit::{Code, Context, Failure};
use crate::joined;
use crate::left::Left;
use crate::lock::{Lock, Use};
use crate::plan::Plan;
use crate::progress::Progress;
use crate::service::Service;
use ebb_fs_client::config::MountConfig;
use ebb_fs_client::control::Outcome;
use ebb_fs_client::recover::joint::StateTells;
use ebb_fs_client::{leftover, recover};
use ebb_node_journal as journal;
use ebb_types::units::Span;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// After a crash: list what a cache still holds and bring it to BACKING
///
/// Exit status 0 when everything is on BACKING, 3 when something is left.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  ebb recover /nvme/$USER/run7 --backing /lustre/proj/run7 --dry-run
  ebb recover /nvme/$USER/run7 --backing /lustre/proj/run7")]
pub struct Args {
    /// The cache directory of the daemon that is no more
    #[arg(value_name = "CACHE_DIR")]
    cache: PathBuf,
    /// The directory that was mounted
    #[arg(long, value_name = "DIR")]
    backing: PathBuf,
    /// Only list; change nothing
    #[arg(long)]
    dry_run: bool,
    /// Also write over files on BACKING that are not as the cache knew them, use another
    /// directory than was mounted, and use a damaged journal as far as it goes
    #[arg(long)]
    force: bool,
    /// Journal of the metadata service that was embedded in the daemon [default: where it was]
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
    /// Give up after this time, in ms, s, m, h [default: none]
    #[arg(long, value_name = "TIME")]
    timeout: Option<Span>,
    /// How long to wait for recoveries of other nodes that go on at the same time, while nothing
    /// changes, in ms, s, m, h
    #[arg(long, value_name = "TIME", default_value = "3s")]
    wait: Span,
    /// What is logged, to standard error: error, warn, info, debug or trace
    #[arg(long, value_name = "LEVEL", default_value = "error")]
    log_level: String,
}

impl Args {
    /// Runs the command.
    pub fn run(self) -> Result<(), Failure> {
        let what = format!("cache {}", self.cache.display());
        let cache = self.cache.canonicalize().or_usage(&what)?;
        if !cache.is_dir() {
            return Err(Failure::usage(format!("{what}: not a directory")));
        }
        let backing = self.backing.canonicalize();
        let backing = backing.or_usage(format!("backing {}", self.backing.display()))?;
        crate::logging::start(&self.log_level, None)?;
        cachedir::refuse_others(&cache)?;
        let _lock = Lock::take(&cache, &Use::Command("ebb recover"))?;
        let left = self.look(&cache)?;
        let dry_run = self.dry_run;
        self.recover(left, &cache, &backing, &what)?;
        let unheard =
            if dry_run { Vec::new() } else { leftover::unheard(&cache).or_failed(&what)? };
        if unheard.is_empty() {
            return Ok(());
        }
        let kept: Vec<_> = unheard.iter().map(|kept| format!("\n  {}", kept.display())).collect();
        let text = format!(
            "{what}: programs went on writing after their daemon was dead, and that is lost; it is in{}",
            kept.concat()
        );
        Err(Failure::new(Code::Incomplete, text))
    }

    fn recover(self, left: Left, cache: &Path, backing: &Path, what: &str) -> Result<(), Failure> {
        // Where other nodes may have something, too, the recoveries of all caches work together, as they do
        // where no state of a service is.
        let joint = left.service.is_none() || left.has_other_nodes();
        if left.is_empty() && (self.dry_run || !joint || left.bytes.is_silent()) {
            println!("{what}: nothing that the backing lacks");
            return Ok(());
        }
        if !left.is_empty() {
            println!("{}", left.listing());
        }
        if self.dry_run {
            let text = format!("{what}: not on the backing (dry run: nothing was changed)");
            return Err(Failure::new(Code::Incomplete, text));
        }
        let config = self.config_for(&left, cache, backing)?;
        self.drain(left, joint, config, what)
    }

    /// What there is, or why that cannot be told.
    fn look(&self, cache: &Path) -> Result<Left, Failure> {
        let shown = cache.display();
        let bytes = match self.force {
            true => leftover::read_past_damage(cache),
            false => leftover::read(cache),
        };
        let mut bytes = bytes.map_err(|e| Failure::failed(e.to_string()))?;
        if !self.dry_run {
            bytes.part_from_writers(cache).or_failed(&shown)?;
        }
        if bytes.found().is_none() {
            cachedir::refuse_unknown(cache)?;
        }
        if let Some(at) = bytes.found().and_then(|f| f.damaged_at) {
            eprintln!(
                "ebb: note: the journal in {shown} is damaged at byte {at}; what comes after that is not known"
            );
        }
        Left::with(bytes, cache, self.state.as_deref())
    }

    /// The dead daemon's configuration, for a node that only drains.
    fn config_for(
        &self,
        left: &Left,
        cache: &Path,
        backing: &Path,
    ) -> Result<MountConfig, Failure> {
        let unknown = || {
            Failure::failed(format!(
                "{}: the daemon's configuration cannot be read (another version of ebb wrote it)",
                cache.display()
            ))
        };
        let config = left.config.clone().ok_or_else(unknown)?;
        let there = std::fs::metadata(backing).or_usage(backing.display())?.ino();
        let life = left.bytes.found().and_then(|f| f.image.life.as_ref());
        let was = life.map_or(0, |l| l.backing_ino);
        if was != 0 && was != there && !self.force {
            return Err(Failure::usage(format!(
                "--backing {}: not the directory that was mounted ({}); --force uses it all the \
                 same",
                backing.display(),
                config.backing.display()
            )));
        }
        if left.has_other_nodes() {
            eprintln!(
                "ebb: note: other nodes have not left this job: recover their caches, too. Where their daemons \
                 live, mount this one again instead (`ebb mount --cache {}`): they wait for its service, which is \
                 no more after this",
                cache.display()
            );
        }
        if let Some(meta) = &config.meta {
            eprintln!("ebb: note: {}", joined::note(meta, cache, &config, &left.bytes));
        }
        Ok(MountConfig {
            backing: backing.to_owned(),
            cache: cache.to_owned(),
            meta: None,
            listen: "127.0.0.1:0".to_owned(),
            token_file: None,
            ..config
        })
    }

    fn drain(
        &self,
        left: Left,
        joint: bool,
        mut config: MountConfig,
        what: &str,
    ) -> Result<(), Failure> {
        if left.bytes.found().is_some_and(|f| f.damaged_at.is_some()) {
            keep_damaged(&config.cache)?;
        }
        config.state.clone_from(&left.state);
        if joint {
            self.with_all(left, &config, what)?;
            leftover::clear(&config.cache).or_failed(what)?;
            return remove_state(&config);
        }
        if !self.with_service(left, &config, what)? {
            return Err(Failure::new(
                Code::Incomplete,
                format!(
                    "{what}: all of it is on the backing; what other nodes of the job have is \
                     not, so the state of the metadata service stays in {}",
                    config.state.display()
                ),
            ));
        }
        leftover::clear(&config.cache).or_failed(what)?;
        remove_state(&config)
    }

    /// Brings everything there without the service: all that nodes know of each other is what
    /// their recoveries say on the backing. Where its state is here, this one says what is in it.
    fn with_all(&self, left: Left, config: &MountConfig, what: &str) -> Result<(), Failure> {
        let Left { mut bytes, remembered, .. } = left;
        let tells = remembered.as_ref().map(|state| {
            Box::new(|heard: &_, inos: &_| state.facts(heard, inos)) as Box<StateTells<'_>>
        });
        let tells = tells.as_deref();
        if let (Some(remembered), Some(tells)) = (&remembered, tells) {
            recover::joint::take_in(&config.cache, &mut bytes, tells).or_failed(what)?;
            remembered.set_aside().or_failed(what)?;
        }
        let (events, seen) = mpsc::channel();
        std::thread::scope(|scope| {
            let working = scope.spawn(|| {
                recover::joint::run(&recover::joint::Job {
                    cache: &config.cache,
                    backing: &config.backing,
                    left: &bytes,
                    state: tells,
                    force: self.force,
                    timeout: self.timeout.map(|t| t.0),
                    patience: self.wait.0,
                    threads: config.flush_threads,
                    progress: Arc::new(move |event| {
                        let _ = events.send(event);
                    }),
                })
            });
            let progress = Progress::new();
            seen.iter().for_each(|event| progress.update(&event));
            let outcome = working.join().unwrap_or_else(|_| {
                Ok(Outcome::Failed { text: "recovery ended unexpectedly; nothing is lost".into() })
            });
            let outcome = outcome.map_err(|e| Failure::with_status(e.exit_code(), e.to_string()));
            outcome.and_then(|o| progress.finish(what, o))
        })
    }

    /// Drains with a service in this process. True when nobody needs its journal any more.
    fn with_service(&self, left: Left, config: &MountConfig, what: &str) -> Result<bool, Failure> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("service")
            .enable_all()
            .build()
            .or_failed("threads")?;
        let plan = Plan {
            config: config.clone(),
            log: None,
            log_level: self.log_level.clone(),
            stop_timeout: Span(Duration::from_secs(600)),
            own_state: false,
            jobs_hint: None,
            inodes_max: ebb_meta_server::Config::INODES_MAX,
            supervise: false,
            restart_timeout: Span(Duration::ZERO),
        };
        let service = Service::embedded(&runtime, &plan, "")?;
        let (events, seen) = mpsc::channel();
        let job = recover::Job {
            config: config.clone(),
            meta: service.address().to_owned(),
            left: left.bytes,
            force: self.force,
            timeout: self.timeout.map(|t| t.0),
            progress: Arc::new(move |event| {
                let _ = events.send(event);
            }),
        };
        let working = std::thread::spawn(move || recover::run(&job));
        let progress = Progress::new();
        seen.iter().for_each(|event| progress.update(&event));
        let outcome = working.join().unwrap_or_else(|_| {
            Ok(Outcome::Failed { text: "recovery ended unexpectedly; nothing is lost".into() })
        });
        let outcome = outcome.map_err(|e| Failure::with_status(e.exit_code(), e.to_string()));
        let ended = outcome.and_then(|o| progress.finish(what, o));
        let nobody_needs_it = runtime.block_on(service.linger(&config.node, |_| ()));
        runtime.shutdown_background();
        ended.map(|()| nobody_needs_it)
    }
}

/// The state of the service goes when everything is done, where it is the cache's own.
fn remove_state(config: &MountConfig) -> Result<(), Failure> {
    if config.state.starts_with(&config.cache)
        && let Err(e) = std::fs::remove_dir_all(&config.state)
        && e.kind() != std::io::ErrorKind::NotFound
    {
        return Err(e).or_failed(config.state.display());
    }
    Ok(())
}

/// What was looked past may be of use to somebody who can read it.
fn keep_damaged(cache: &Path) -> Result<(), Failure> {
    let path = journal::path_in(cache);
    let kept = cache.join("journal.damaged");
    std::fs::copy(&path, &kept).map(drop).or_failed(kept.display())
}
