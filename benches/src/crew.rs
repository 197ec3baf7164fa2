//! Processes that work on a directory at the same time: this program once more, each with its part
//! of the files, which begin together when all of them are there.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

/// Tells a process that it is one of a crew.
const MARK: &str = "EBB_BENCH_WORKER";

/// What is done to every file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deed {
    /// Made, with 4 KiB, and closed.
    Create,
    /// Its attributes are asked for.
    Stat,
    /// Removed.
    Unlink,
}

impl Deed {
    const ALL: [Deed; 3] = [Deed::Create, Deed::Stat, Deed::Unlink];

    /// In the report.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Deed::Create => "create+write 4 KiB+close",
            Deed::Stat => "stat",
            Deed::Unlink => "unlink",
        }
    }

    fn to(self, path: &Path) -> std::io::Result<()> {
        match self {
            Deed::Create => std::fs::write(path, [7; 4096]),
            Deed::Stat => std::fs::symlink_metadata(path).map(drop),
            Deed::Unlink => std::fs::remove_file(path),
        }
    }
}

/// How many processes, and whether each has a directory of its own.
#[derive(Clone, Copy, Debug)]
pub struct Crew {
    /// How many.
    pub processes: usize,
    /// Not all in one directory.
    pub apart: bool,
}

impl Crew {
    /// In the report.
    #[must_use]
    pub fn name(self) -> String {
        match (self.processes, self.apart) {
            (1, _) => "1 process".into(),
            (n, false) => format!("{n} processes"),
            (n, true) => format!("{n} processes apart"),
        }
    }

    fn dir(self, below: &Path, number: usize) -> PathBuf {
        if self.apart { below.join(format!("p{number}")) } else { below.to_owned() }
    }

    /// Makes the directories, `below` itself too.
    ///
    /// # Panics
    /// When that fails.
    pub fn prepare(self, below: &Path) {
        std::fs::create_dir(below).expect("mkdir");
        for number in (0..self.processes).filter(|_| self.apart) {
            std::fs::create_dir(self.dir(below, number)).expect("mkdir");
        }
    }

    /// Removes the directories, which must be empty.
    ///
    /// # Panics
    /// When that fails.
    pub fn clear(self, below: &Path) {
        for number in (0..self.processes).filter(|_| self.apart) {
            std::fs::remove_dir(self.dir(below, number)).expect("rmdir");
        }
        std::fs::remove_dir(below).expect("rmdir");
    }

    /// Does it to so many files in all; files per second, from the word to begin until the last
    /// process is done.
    ///
    /// # Panics
    /// When a process fails.
    pub fn run(self, deed: Deed, below: &Path, files: usize) -> f64 {
        let start = |number| {
            let part = number..files;
            let share = part.step_by(self.processes).count();
            start(deed, &self.dir(below, number), number, share)
        };
        let mut crew: Vec<Child> = (0..self.processes).map(start).collect();
        crew.iter_mut().for_each(|p| hear(p, b'r'));
        let begin = Instant::now();
        for process in &mut crew {
            let word = process.stdin.as_mut().expect("it was piped").write_all(b"g");
            word.expect("the process waits");
        }
        crew.iter_mut().for_each(|p| hear(p, b'd'));
        let taken = begin.elapsed().as_secs_f64();
        for mut process in crew {
            assert!(process.wait().expect("a child").success(), "{deed:?} failed");
        }
        files as f64 / taken
    }
}

fn start(deed: Deed, dir: &Path, number: usize, share: usize) -> Child {
    let me = std::env::current_exe().expect("a running program has a path");
    Command::new(me)
        .env(MARK, "1")
        .arg(format!("{deed:?}"))
        .arg(dir)
        .args([number.to_string(), share.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("this program can be started")
}

fn hear(process: &mut Child, word: u8) {
    let mut heard = [0];
    let from = process.stdout.as_mut().expect("it was piped");
    from.read_exact(&mut heard).expect("the process goes on");
    assert_eq!(heard[0], word);
}

/// To be called first: true in a process of a crew, which has done its part then.
///
/// # Panics
/// When a file cannot be made, asked for or removed.
#[must_use]
pub fn was_worker() -> bool {
    if std::env::var_os(MARK).is_none() {
        return false;
    }
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [deed, dir, number, share] = &args[..] else { panic!("{args:?}") };
    let deed = Deed::ALL.into_iter().find(|d| format!("{d:?}") == *deed).expect("a deed");
    let share: usize = share.parse().expect("a number");
    let paths: Vec<PathBuf> =
        (0..share).map(|i| Path::new(dir).join(format!("f{number}-{i}"))).collect();
    say(b"r");
    std::io::stdin().read_exact(&mut [0]).expect("the word to begin");
    for path in &paths {
        deed.to(path).unwrap_or_else(|e| panic!("{deed:?} {}: {e}", path.display()));
    }
    say(b"d");
    true
}

fn say(word: &[u8]) {
    let mut out = std::io::stdout();
    out.write_all(word).and_then(|()| out.flush()).expect("somebody listens");
}
