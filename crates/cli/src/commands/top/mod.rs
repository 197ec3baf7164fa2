//! `ebb top`: a terminal screen about one mount that renews itself.

mod screen;

use crate::client;
use crate::exit::{Context, Failure};
use crate::mounts;
use ebb_fs_client::control::Request;
use ebb_fs_client::registry::Record;
use ebb_types::units::Span;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::termios::{
    LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcgetwinsize, tcsetattr,
};
use screen::{History, Sample};
use std::io::{IsTerminal, Read, Write, stdin, stdout};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Size of a screen that cannot be asked for its own.
const USUAL: (usize, usize) = (100, 32);

/// Activity, dirty bytes over time, flush state, progress of files, rates
#[derive(clap::Args)]
#[command(after_help = "Examples:
  ebb top /local/run7                       q ends it
  ebb top /local/run7 --once                one plain frame, for scripts
  ebb top /local/run7 --interval 200ms")]
pub struct Args {
    /// Time between two looks, in ms, s, m, h
    #[arg(long, value_name = "TIME", default_value = "1s")]
    interval: Span,
    /// Look twice, print one frame without colours, and end
    #[arg(long)]
    once: bool,
    /// The mount point
    mountpoint: PathBuf,
}

impl Args {
    /// Runs the command.
    pub fn run(self) -> Result<(), Failure> {
        let point = mounts::resolve(&self.mountpoint).or_usage(self.mountpoint.display())?;
        let record = client::daemon_of(&point)?;
        let interval = self.interval.0.max(Duration::from_millis(50));
        if self.once {
            return once(&record, interval);
        }
        if !stdin().is_terminal() || !stdout().is_terminal() {
            return Err(Failure::usage("top needs a terminal (--once prints one frame anywhere)"));
        }
        let _screen = Screen::enter().or_failed("terminal")?;
        watch(&record, interval)
    }
}

fn look(record: &Record) -> Result<Sample, Failure> {
    let status = client::ask_body(record, &Request::Status)?;
    Ok(Sample { at: Instant::now(), status })
}

fn once(record: &Record, interval: Duration) -> Result<(), Failure> {
    let mut history = History::default();
    history.add(look(record)?);
    std::thread::sleep(interval);
    history.add(look(record)?);
    print!("{}", history.frame(USUAL.0, USUAL.1));
    Ok(())
}

fn watch(record: &Record, interval: Duration) -> Result<(), Failure> {
    let mut history = History::default();
    loop {
        history.add(look(record)?);
        let size = tcgetwinsize(stdout()).ok();
        let size = size.map(|s| (usize::from(s.ws_col), usize::from(s.ws_row)));
        let (columns, rows) = size.filter(|s| s.0 > 0 && s.1 > 0).unwrap_or(USUAL);
        let frame = history.frame(columns, rows.saturating_sub(1));
        // Home, each line cleared to its end, and what is below.
        let text = frame.replace('\n', "\x1b[K\r\n");
        let mut out = stdout().lock();
        write!(out, "\x1b[H{text}\x1b[J").and_then(|()| out.flush()).or_failed("terminal")?;
        drop(out);
        if wants_to_leave(interval).or_failed("terminal")? {
            return Ok(());
        }
    }
}

/// Waits for a key, or until it is time to look again.
fn wants_to_leave(wait: Duration) -> std::io::Result<bool> {
    let end = Instant::now() + wait;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).map_err(std::io::Error::other)?;
        let input = stdin();
        match poll(&mut [PollFd::new(&input, PollFlags::IN)], Some(&timeout)) {
            Ok(0) => return Ok(false),
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(e) => return Err(e.into()),
        }
        let mut key = [0];
        // Nothing to read: the terminal is gone.
        if input.lock().read(&mut key)? == 0 || matches!(key[0], b'q' | b'Q' | 3 | 27) {
            return Ok(true);
        }
    }
}

/// The other screen of the terminal, without cursor and echo; everything is as before afterwards.
struct Screen {
    before: Termios,
}

impl Screen {
    fn enter() -> std::io::Result<Screen> {
        let before = tcgetattr(stdin())?;
        let mut raw = before.clone();
        // Ctrl-C comes as a key, so that the terminal is put right before the end.
        raw.local_modes -= LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG;
        raw.special_codes[SpecialCodeIndex::VMIN] = 1;
        raw.special_codes[SpecialCodeIndex::VTIME] = 0;
        tcsetattr(stdin(), OptionalActions::Now, &raw)?;
        let screen = Screen { before };
        print!("\x1b[?1049h\x1b[?25l");
        stdout().flush()?;
        Ok(screen)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        print!("\x1b[?25h\x1b[?1049l");
        let _ = stdout().flush();
        let _ = tcsetattr(stdin(), OptionalActions::Now, &self.before);
    }
}
