//! File operations in another process: a program that opens, reads, writes, locks and closes as
//! it is told, one step at a time, so that a test can order the steps of several processes (and,
//! with one of them on each node, of several nodes).

use crate::environment::steps_binary;
use crate::locks::record_lock;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, IntoRawFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// One step. `file` is a number that the test chooses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Step {
    /// Opens for reading and writing, makes it when missing.
    Open {
        file: u32,
        path: PathBuf,
    },
    Write {
        file: u32,
        offset: u64,
        data: Vec<u8>,
    },
    /// Answers fewer bytes at the end of the file.
    Read {
        file: u32,
        offset: u64,
        len: usize,
    },
    Fsync {
        file: u32,
    },
    /// Maps the file as far as that, stores there, and msyncs. The mapping stays.
    Store {
        file: u32,
        offset: u64,
        data: Vec<u8>,
    },
    /// Stores through the mapping that the last `Store` left, which may end the process.
    StoreAgain {
        offset: u64,
        data: Vec<u8>,
    },
    Truncate {
        file: u32,
        len: u64,
    },
    Close {
        file: u32,
    },
    Rename {
        from: PathBuf,
        to: PathBuf,
    },
    Unlink {
        path: PathBuf,
    },
    Stat {
        path: PathBuf,
    },
    /// A byte-range lock of `fcntl`: shared or exclusive; waits when told to.
    Lock {
        file: u32,
        offset: u64,
        len: u64,
        exclusive: bool,
        wait: bool,
    },
    Unlock {
        file: u32,
        offset: u64,
        len: u64,
    },
}

/// What came of a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// It is done.
    Done,
    /// It read this.
    Data(Vec<u8>),
    /// The size of a file.
    Size(u64),
    /// It failed with this errno.
    Errno(i32),
}

/// Carries out steps until the input ends.
pub fn serve(input: impl BufRead, mut output: impl Write) -> io::Result<()> {
    let mut files = BTreeMap::new();
    let mut map = None;
    for line in input.lines() {
        let step: Step = serde_json::from_str(&line?)?;
        let answer = carry_out(step, &mut files, &mut map)
            .unwrap_or_else(|e| Answer::Errno(e.raw_os_error().unwrap_or(libc::EIO)));
        serde_json::to_writer(&mut output, &answer)?;
        output.write_all(b"\n")?;
        output.flush()?;
    }
    Ok(())
}

fn carry_out(
    step: Step,
    files: &mut BTreeMap<u32, File>,
    map: &mut Option<Map>,
) -> io::Result<Answer> {
    let bad = || io::Error::from_raw_os_error(libc::EBADF);
    let get = |number: u32| files.get(&number).ok_or_else(bad);
    match step {
        Step::Open { file, path } => {
            let mut options = File::options();
            let opened = options.read(true).write(true).create(true).truncate(false).open(path)?;
            files.insert(file, opened);
        }
        Step::Write { file, offset, data } => get(file)?.write_all_at(&data, offset)?,
        Step::Read { file, offset, len } => return read(get(file)?, offset, len),
        Step::Fsync { file } => get(file)?.sync_all()?,
        Step::Store { file, offset, data } => {
            let new = Map::of(get(file)?, offset as usize + data.len())?;
            new.store(offset, &data)?;
            new.sync()?;
            *map = Some(new);
        }
        Step::StoreAgain { offset, data } => map.as_ref().ok_or_else(bad)?.store(offset, &data)?,
        Step::Truncate { file, len } => get(file)?.set_len(len)?,
        Step::Close { file } => close(files.remove(&file).ok_or_else(bad)?)?,
        Step::Rename { from, to } => std::fs::rename(from, to)?,
        Step::Unlink { path } => std::fs::remove_file(path)?,
        Step::Stat { path } => return Ok(Answer::Size(std::fs::symlink_metadata(path)?.len())),
        Step::Lock { file, offset, len, exclusive, wait } => {
            let kind = if exclusive { libc::F_WRLCK } else { libc::F_RDLCK };
            let command = if wait { libc::F_SETLKW } else { libc::F_SETLK };
            record_lock(get(file)?, command, kind, (offset, len))?;
        }
        Step::Unlock { file, offset, len } => {
            record_lock(get(file)?, libc::F_SETLK, libc::F_UNLCK, (offset, len))?;
        }
    }
    Ok(Answer::Done)
}

fn read(file: &File, offset: u64, len: usize) -> io::Result<Answer> {
    let mut data = vec![0; len];
    let mut done = 0;
    while done < len {
        match file.read_at(&mut data[done..], offset + done as u64)? {
            0 => break,
            n => done += n,
        }
    }
    data.truncate(done);
    Ok(Answer::Data(data))
}

/// A shared mapping of a file from its beginning, which nobody takes away.
struct Map {
    at: *mut u8,
    len: usize,
}

impl Map {
    fn of(file: &File, len: usize) -> io::Result<Map> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let (shared, fd) = (libc::MAP_SHARED, file.as_raw_fd());
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, shared, fd, 0) };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Map { at: at.cast(), len })
    }

    fn store(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let at = offset as usize;
        if at + data.len() > self.len {
            return Err(io::Error::from_raw_os_error(libc::EFAULT));
        }
        // SAFETY: it is within the mapping; the file is as long as what is stored there.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), self.at.add(at), data.len()) };
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        // SAFETY: the mapping is there.
        match unsafe { libc::msync(self.at.cast(), self.len, libc::MS_SYNC) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// Closes and tells the error, which dropping would hide.
fn close(file: File) -> io::Result<()> {
    // SAFETY: the descriptor was just taken out of its only owner.
    match unsafe { libc::close(file.into_raw_fd()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A process that carries out steps. Ends when it is dropped.
#[derive(Debug)]
pub struct Steps {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Steps {
    /// Starts the process in `directory` (relative paths of steps start there).
    ///
    /// # Panics
    /// When it cannot be started.
    #[must_use]
    pub fn spawn(directory: &Path) -> Steps {
        let mut child = Command::new(steps_binary())
            .current_dir(directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("ebb-steps can be started");
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().expect("it was piped"));
        Steps { child, input, output }
    }

    /// Tells it a step without waiting for the answer: for steps that block.
    ///
    /// # Panics
    /// When the process is gone.
    pub fn begin(&mut self, step: &Step) {
        let mut line = serde_json::to_vec(step).expect("steps can be written");
        line.push(b'\n');
        let input = self.input.as_mut().expect("open until it is dropped");
        input.write_all(&line).expect("the process takes steps");
    }

    /// The answer to the oldest step that has none yet.
    ///
    /// # Panics
    /// When the process is gone.
    #[must_use]
    pub fn answer(&mut self) -> Answer {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("the process answers");
        serde_json::from_str(&line).unwrap_or_else(|e| panic!("answer {line:?}: {e}"))
    }

    /// Does a step and waits for it.
    #[must_use]
    pub fn step(&mut self, step: Step) -> Answer {
        self.begin(&step);
        self.answer()
    }

    /// Does a step that ends the process: the signal that it ends with.
    ///
    /// # Panics
    /// When it goes on, or ends by itself.
    #[must_use]
    pub fn killed_by(mut self, step: &Step) -> i32 {
        use std::os::unix::process::ExitStatusExt;
        self.begin(step);
        let mut line = String::new();
        self.output.read_line(&mut line).expect("the end of its output");
        assert_eq!(line, "", "it goes on");
        let ended = self.child.wait().expect("it is a child");
        ended.signal().unwrap_or_else(|| panic!("it ends with {ended}"))
    }

    /// Does a step that must succeed.
    ///
    /// # Panics
    /// When it fails.
    pub fn must(&mut self, step: Step) {
        let shown = format!("{step:?}");
        let answer = self.step(step);
        assert_eq!(answer, Answer::Done, "{}", &shown[..shown.len().min(200)]);
    }

    /// Reads, which must succeed.
    ///
    /// # Panics
    /// When it fails.
    #[must_use]
    pub fn read(&mut self, file: u32, offset: u64, len: usize) -> Vec<u8> {
        match self.step(Step::Read { file, offset, len }) {
            Answer::Data(data) => data,
            other => panic!("read of file {file}: {other:?}"),
        }
    }
}

impl Drop for Steps {
    fn drop(&mut self) {
        // At the end of its input it ends by itself, and closes its files in good order.
        drop(self.input.take());
        let ended = || !matches!(self.child.try_wait(), Ok(None));
        if !crate::mounts::wait_until(std::time::Duration::from_secs(5), ended) {
            // It waits for a lock, or in a mount that does not answer.
            let _ = self.child.kill();
        }
        let _ = self.child.try_wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_do_what_they_say() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        let steps = [
            Step::Open { file: 1, path: path.clone() },
            Step::Write { file: 1, offset: 3, data: b"abc".to_vec() },
            Step::Read { file: 1, offset: 2, len: 10 },
            Step::Lock { file: 1, offset: 0, len: 1, exclusive: true, wait: false },
            Step::Close { file: 1 },
            Step::Close { file: 1 },
            Step::Stat { path },
        ];
        let input: Vec<String> = steps.iter().map(|s| serde_json::to_string(s).unwrap()).collect();
        let mut output = Vec::new();
        serve(input.join("\n").as_bytes(), &mut output).unwrap();
        let answers: Vec<Answer> = String::from_utf8(output)
            .unwrap()
            .lines()
            .map(|l| serde_json::from_str(l).unwrap())
            .collect();
        let read = Answer::Data(b"\0abc".to_vec());
        let done = || Answer::Done;
        let want =
            [done(), done(), read, done(), done(), Answer::Errno(libc::EBADF), Answer::Size(6)];
        assert_eq!(answers, want);
    }
}
