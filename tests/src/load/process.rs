//! The test's end of a program: starts it, tells it what to do, waits for its word.

use super::{Order, Report, Setup, Work};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;

/// A program that runs. Ends when it is dropped.
#[derive(Debug)]
pub struct Load {
    /// What it was told.
    pub setup: Setup,
    child: Child,
    input: ChildStdin,
    reports: Receiver<Report>,
}

impl Load {
    /// Starts it; `binary` is `ebb-load`.
    ///
    /// # Panics
    /// When it cannot be started.
    #[must_use]
    pub fn start(binary: &Path, setup: Setup) -> Load {
        let mut child = Command::new(binary)
            .arg(serde_json::to_string(&setup).expect("a setup can be written"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("ebb-load can be started");
        let input = child.stdin.take().expect("it was piped");
        let output = BufReader::new(child.stdout.take().expect("it was piped"));
        let (tx, reports) = mpsc::channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                let report = serde_json::from_str(&line).expect("a report");
                if tx.send(report).is_err() {
                    return;
                }
            }
        });
        Load { setup, child, input, reports }
    }

    /// Tells it something without waiting.
    ///
    /// # Panics
    /// When it is gone.
    pub fn tell(&mut self, order: &Order) {
        let mut line = serde_json::to_vec(order).expect("orders can be written");
        line.push(b'\n');
        let told = self.input.write_all(&line);
        told.unwrap_or_else(|e| panic!("program {} is gone: {e}", self.setup.who));
    }

    /// Waits until it has paused.
    ///
    /// # Panics
    /// When it found something wrong, or does not answer within `limit`.
    pub fn paused(&self, limit: Duration) -> Work {
        match self.report(limit) {
            Report::Paused(work) => work,
            other => panic!("program {} answers {other:?}", self.setup.who),
        }
    }

    /// Waits until it has found nothing wrong.
    ///
    /// # Panics
    /// As above.
    pub fn right(&self, limit: Duration) {
        let report = self.report(limit);
        assert!(matches!(report, Report::Right), "program {}: {report:?}", self.setup.who);
    }

    fn report(&self, limit: Duration) -> Report {
        let who = self.setup.who;
        match self.reports.recv_timeout(limit) {
            Ok(report) => report,
            Err(RecvTimeoutError::Timeout) => panic!("program {who}: stuck for {limit:?}"),
            Err(RecvTimeoutError::Disconnected) => {
                panic!("program {who} found something wrong; see above and {:?}", self.setup.log)
            }
        }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        // One that waits in a mount is collected when the mount is gone, by init at the latest.
        let _ = self.child.kill();
        let _ = self.child.try_wait();
    }
}

/// Gives all of them an order, and waits for the word of each.
///
/// # Panics
/// When one finds something wrong, or takes longer than `limit`.
pub fn all_right(loads: &mut [Load], limit: Duration, order: impl Fn(&Setup) -> Order) {
    for load in loads.iter_mut() {
        let order = order(&load.setup);
        load.tell(&order);
    }
    loads.iter().for_each(|load| load.right(limit));
}
