//! Processes of services beside the one of the cluster.

use crate::mounts;
use crate::node::signal_process;
use rustix::process::Signal;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::Child;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A service of another job, or one that was replaced. Ends when it is dropped.
#[derive(Debug)]
pub struct Stranger(pub(crate) Child);

impl Stranger {
    /// Sends it a signal; after one that stops it, it stands still.
    pub fn signal(&self, signal: Signal) {
        signal_process(self.0.id(), signal);
    }

    /// Its status, once it has ended by itself.
    ///
    /// # Panics
    /// When it does not.
    pub fn ends_within(&mut self, limit: Duration) -> std::process::ExitStatus {
        let mut status = None;
        mounts::wait_until(limit, || {
            status = self.0.try_wait().expect("its status");
            status.is_some()
        });
        status.expect("it has not ended")
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A service that waits for the cluster's to fall silent. Ends when it is dropped.
#[derive(Debug)]
pub struct Standby {
    /// The process.
    pub process: Stranger,
    said: Arc<Mutex<Vec<String>>>,
    pub(crate) state: PathBuf,
    pub(crate) command: Vec<String>,
}

impl Standby {
    /// `child`: with its standard output in a pipe; `command`: that of a service in its place, without its address.
    pub(crate) fn heard(mut child: Child, state: PathBuf, command: Vec<String>) -> Standby {
        let stdout = BufReader::new(child.stdout.take().expect("it was piped"));
        let said = Arc::new(Mutex::new(Vec::new()));
        let hears = Arc::clone(&said);
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                hears.lock().expect("no panic").push(line);
            }
        });
        Standby { process: Stranger(child), said, state, command }
    }

    /// Waits until it has said something with `text` in it, and returns that line.
    ///
    /// # Panics
    /// When it does not.
    #[must_use]
    pub fn says(&self, text: &str, limit: Duration) -> String {
        let find = || {
            let said = self.said.lock().expect("no panic");
            said.iter().find(|line| line.contains(text)).cloned()
        };
        mounts::wait_until(limit, || find().is_some());
        find().unwrap_or_else(|| panic!("no '{text}' in {:?}", self.has_said()))
    }

    /// All that it has said.
    ///
    /// # Panics
    /// Never.
    #[must_use]
    pub fn has_said(&self) -> Vec<String> {
        self.said.lock().expect("no panic").clone()
    }
}
