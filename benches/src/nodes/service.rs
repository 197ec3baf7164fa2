//! The metadata service as a process of its own: what it has used so far, and its restart.

use ebb_testkit::environment::ebb_command;
use ebb_transport::{Secure, Token};
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;

/// `ebb meta` on a directory of its own; killed when dropped.
pub struct Service {
    dir: TempDir,
    child: Child,
    secure: Secure,
    lease: Duration,
    token: Arc<Token>,
    address: String,
    /// CPU time of those that were killed.
    used_before: Duration,
}

impl Service {
    /// Starts one and waits until it listens.
    pub async fn start(secure: Secure, lease: Duration) -> Result<Service, String> {
        let dir = tempfile::tempdir().map_err(text)?;
        for below in ["backing", "tmp"] {
            std::fs::create_dir(dir.path().join(below)).map_err(text)?;
        }
        let token = Token::generate_to(dir.path().join("token")).map_err(text)?;
        let child = spawn(&dir, "127.0.0.1:0", secure, lease).map_err(text)?;
        let (token, address) = (Arc::new(token), String::new());
        let mut service =
            Service { dir, child, secure, lease, token, address, used_before: Duration::ZERO };
        service.address = service.listening().await?;
        Ok(service)
    }

    /// Kills it and starts another one on its state, at the same address; waits until that one listens.
    pub async fn restart(&mut self) -> Result<(), String> {
        self.used_before = self.cpu();
        self.child.kill().and_then(|()| self.child.wait()).map_err(text)?;
        self.child = spawn(&self.dir, &self.address, self.secure, self.lease).map_err(text)?;
        self.listening().await.map(drop)
    }

    async fn listening(&mut self) -> Result<String, String> {
        let out = self.child.stdout.take().ok_or("its output is read already")?;
        let first = tokio::task::spawn_blocking(move || {
            let mut line = String::new();
            BufReader::new(out).read_line(&mut line).map(|_| line)
        });
        let line = first.await.map_err(text)?.map_err(text)?;
        let address = line.trim().strip_prefix("ebb meta: listening on ");
        address.map(str::to_owned).ok_or_else(|| self.why_not())
    }

    fn why_not(&self) -> String {
        let log = std::fs::read_to_string(self.log()).unwrap_or_default();
        let end = log.lines().next_back().unwrap_or("nothing").to_owned();
        format!("the service does not listen; the last line of its log: {end}")
    }

    fn log(&self) -> PathBuf {
        self.dir.path().join("log")
    }

    /// HOST:PORT where it listens.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// What nodes show it.
    #[must_use]
    pub fn token(&self) -> Arc<Token> {
        Arc::clone(&self.token)
    }

    /// CPU time so far, of the process and of those before it: `/proc/PID/stat` has the same in steps of 10 ms.
    ///
    /// # Panics
    /// When the clock of a child cannot be read.
    #[must_use]
    pub fn cpu(&self) -> Duration {
        let mut clock = 0;
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: both are given places of the right type, which outlive the calls.
        let failed = unsafe {
            libc::clock_getcpuclockid(self.child.id().cast_signed(), &raw mut clock) != 0
                || libc::clock_gettime(clock, &raw mut time) != 0
        };
        assert!(!failed, "the process is a child that nobody has waited for");
        let nanoseconds = u32::try_from(time.tv_nsec).expect("less than a second");
        self.used_before + Duration::new(time.tv_sec.unsigned_abs(), nanoseconds)
    }

    /// Bytes of memory that it has now.
    #[must_use]
    pub fn resident(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()));
        let status = status.unwrap_or_default();
        let kib = status.lines().find_map(|l| l.strip_prefix("VmRSS:")?.split_whitespace().next());
        kib.and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) << 10
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // It may be gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spawn(dir: &TempDir, listen: &str, secure: Secure, lease: Duration) -> io::Result<Child> {
    let log = File::options().append(true).create(true).open(dir.path().join("log"))?;
    let mut command = ebb_command(dir.path());
    command.args(["meta", "--listen", listen, "--secure", &secure.to_string()]);
    command.args(["--lease", &format!("{}ms", lease.as_millis())]);
    command.arg("--state").arg(dir.path().join("state"));
    command.arg("--token-file").arg(dir.path().join("token"));
    command.arg(dir.path().join("backing"));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log).spawn()
}

fn text(e: impl std::fmt::Display) -> String {
    format!("the service: {e}")
}
